"""The wheel holds everything and works with the source tree absent; what runs artifacts needs no compiler."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import adaptc
import tiny_models

ROOT = Path(__file__).parents[1]
RUN_TIME = ("click", "jinja2", "numpy", "safetensors", "tokenizers")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of what git would clone, so that stray files of the working tree can't help."""
    copy = tmp_path_factory.mktemp("source") / "adaptc"
    skip = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, copy, ignore=skip)
    out = copy.parent / "wheel"
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, copy], check=True,
                   capture_output=True)
    return next(out.glob("*.whl"))


def test_wheel_holds_every_module(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    folders = {"compiler": "adaptc", **{f: f"adaptc/{f}" for f in ("passes", "backends", "runtime", "models")}}
    for folder, package in folders.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".json") and "__pycache__" not in path.parts:
                assert f"{package}/{path.relative_to(ROOT / folder)}" in inside, f"{path} is missing from the wheel"


@pytest.fixture(scope="module")
def run_time(wheel, tmp_path_factory) -> Path:
    """A folder with the wheel's content and the run time's four packages, and what those need, and nothing else."""
    site = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(site)
    for name in RUN_TIME + ("markupsafe",):
        for top in {file.parts[0] for file in importlib.metadata.files(name) if ".." not in file.parts}:
            path = Path(importlib.metadata.distribution(name).locate_file(top))
            if path.exists() and not (site / top).exists():
                (site / top).symlink_to(path)
    return site


def isolated(site: Path, code: str, cwd: Path) -> subprocess.CompletedProcess:
    """Runs ``code`` seeing only ``site`` and the standard library."""
    return subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=cwd,
                          env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "HOME": str(cwd)})


def test_artifacts_run_without_the_compiler(run_time, tmp_path):
    model = tiny_models.write(tmp_path / "model")
    adaptc.compile(model, "cpu", output=tmp_path / "tiny.adapt")
    expected = adaptc.load(tmp_path / "tiny.adapt").generate("Hello", max_tokens=8, ignore_eos=True)
    code = """
import adaptc, sys
for name in ("torch", "transformers", "torch_mlir", "gguf"):
    try: __import__(name)
    except ImportError: pass
    else: sys.exit(name + " is there")
session = adaptc.load("tiny.adapt")
print(session.generate("Hello", max_tokens=8, ignore_eos=True).token_ids)
print(session.generate([{"role": "user", "content": "Hi"}], max_tokens=2, ignore_eos=True).finish_reason)
print(adaptc.__file__)
"""
    done = isolated(run_time, code, tmp_path)
    assert done.returncode == 0, done.stderr
    tokens, reason, where = done.stdout.splitlines()
    assert tokens == str(expected.token_ids) and reason == "length"
    assert where.startswith(str(run_time))


def test_cli_runs_without_the_compiler(run_time, tmp_path):
    done = isolated(run_time, "from adaptc.cli import main; main(['targets'])", tmp_path)
    assert done.returncode == 0 and "cpu" in done.stdout, done.stderr
    done = isolated(run_time, "from adaptc.cli import main; main(['run', 'absent.adapt', 'Hi'])", tmp_path)
    assert done.returncode == 2 and "absent.adapt" in done.stderr
