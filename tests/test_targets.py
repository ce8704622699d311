"""Targets: the files that come along, what they may say, and files of installed packages."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import adaptc
from adaptc import targets
from adaptc.errors import InputError, OptionError
from adaptc.plan import DTYPE_BYTES

CPU_FILE = Path(targets.__file__).with_name("cpu.json")


def test_unknown_name_lists_the_known():
    with pytest.raises(OptionError, match="unknown target 'gpu'; valid values are: .*cpu"):
        targets.target("gpu")


@pytest.mark.parametrize("name", targets.names())
def test_files_are_sane(name):
    found = targets.target(name)
    assert found.name == name and found.default_level in found.levels
    assert set(found.dtypes) <= set(DTYPE_BYTES)
    bandwidths = [m.bandwidth for m in found.memory]
    assert bandwidths == sorted(bandwidths, reverse=True), "fastest first"
    assert 0 <= found.launch_s < 1e-3


def test_cpu_is_described_in_its_units():
    cpu = targets.target("cpu")
    assert cpu.backend == "cpu" and cpu.levels and cpu.key_block >= 1
    assert 1e9 < cpu.compute["f32"] < 1e13 and cpu.compute["i8"] > cpu.compute["f32"]
    assert 1e9 < cpu.memory[-1].bandwidth < 1e12


def test_levels():
    cpu = targets.target("cpu")
    assert cpu.level("") == cpu.default_level and cpu.level(cpu.levels[0]) == cpu.levels[0]
    with pytest.raises(OptionError, match="level of target cpu 'x86-64-v9'; valid values are: x86-64-v2, x86-64-v3"):
        cpu.level("x86-64-v9")
    assert cpu.level("x86-64-v4+avx512vnni") == "x86-64-v4+avx512vnni" and cpu.level("native") == "native"


def test_rates_are_of_the_dtypes_it_computes_in():
    cpu = replace(targets.target("cpu"), compute={"f32": 80e9})
    assert cpu.rate("f32") == 80e9
    with pytest.raises(OptionError, match="computes in 'f64'; valid values are: f32"):
        cpu.rate("f64")


@pytest.mark.parametrize("options, words", [
    ({"kv": "bf16"}, "kv=bf16 needs bf16, and target board has f32, f16 only"),
    ({"activations": "int8"}, "activations=int8 needs i8, and target board has f32, f16 only"),
])
def test_what_the_target_has_no_dtype_for_is_refused_at_once(tmp_path, monkeypatch, options, words):
    written(tmp_path, dtypes=["f32", "f16"], compute={"f32": 1e9})
    monkeypatch.setattr(targets, "_files", lambda: {"board": tmp_path / "board.json"})
    with pytest.raises(OptionError, match=words):
        adaptc.compile(tmp_path / "none", "board", output=tmp_path / "out.adapt", **options)


def written(folder: Path, **changes) -> dict:
    """cpu.json as target "board" with changes (None takes a field away), in ``folder``."""
    data = json.loads(CPU_FILE.read_text()) | {"name": "board"} | changes
    data = {k: v for k, v in data.items() if v is not None}
    (folder / "board.json").write_text(json.dumps(data))
    return data


@pytest.mark.parametrize("changes,message", [
    ({"launch_s": None}, "launch_s"),
    ({"memory": None}, "it has no 'memory'"),
    ({"colour": "red"}, "colour"),
    ({"memory": [{"name": "dram", "bytes": 0}]}, "bandwidth"),
    ({"memory": []}, "at least one level"),
    ({"compute": {"f32": 0}}, r"compute\[f32\] must be a positive number, got 0"),
    ({"compute": {"f32": "fast"}}, "got 'fast'"),
    ({"default_level": "v9"}, "default_level 'v9' is none of its levels"),
    ({"key_block": 0}, "key_block must be a positive number"),
    ({"links": []}, "links"),
    ({"dtypes": ["f16", "i8"]}, "computes in f32, which is none of its dtypes"),
    ({"name": "other"}, "it calls itself 'other'"),
])
def test_a_damaged_file_is_named_with_what_is_wrong(tmp_path, monkeypatch, changes, message):
    written(tmp_path, **changes)
    monkeypatch.setattr(targets, "_files", lambda: {"board": tmp_path / "board.json"})
    with pytest.raises(InputError, match=f"target file board.json is not a target: .*{message}"):
        targets.target("board")


def test_a_file_that_is_no_json(tmp_path, monkeypatch):
    (tmp_path / "board.json").write_text("{")
    monkeypatch.setattr(targets, "_files", lambda: {"board": tmp_path / "board.json"})
    with pytest.raises(InputError, match="board.json is not a target"):
        targets.target("board")


def in_package(folder: Path, code: str) -> str:
    """Standard output of ``code`` where a package brings the targets in ``folder``."""
    (folder / "boards.py").write_text(f"FOLDER = {str(folder)!r}\n")
    info = folder / "boards-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: boards\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[adaptc.targets]\nboards = boards:FOLDER\n")
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\nfrom adaptc import targets\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_an_installed_package_adds_a_target(tmp_path):
    written(tmp_path, key_block=64)
    code = "print(targets.names(), targets.target('board').key_block)"
    assert in_package(tmp_path, code) == "['board', 'cpu'] 64"


def test_a_package_cant_replace_a_target(tmp_path):
    (tmp_path / "cpu.json").write_text(CPU_FILE.read_text())
    code = "from adaptc.errors import InputError\ntry: targets.names()\nexcept InputError as error: print(error)"
    assert "target 'cpu' is described twice" in in_package(tmp_path, code)
