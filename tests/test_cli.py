"""The command as its user meets it: exit codes, one clear sentence, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tiny_gguf
import tiny_models

COMMAND = [sys.executable, "-m", "adaptc.cli"]


def adaptc_(*args, **kw) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *map(str, args)], capture_output=True, text=True, **kw)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_models.write(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture(scope="module")
def artifact(model) -> Path:
    done = adaptc_("compile", model, "-o", model.parent / "a.adapt")
    assert done.returncode == 0, done.stderr
    for part in ("Compute profile", "Operator coverage", "Memory", "Time"):
        assert part in done.stdout
    return model.parent / "a.adapt"


def refused(done: subprocess.CompletedProcess, *words: str) -> None:
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


def test_run_streams_text(artifact):
    done = adaptc_("run", artifact, "Hello", "--max-tokens", 5, "--ignore-eos")
    assert done.returncode == 0 and done.stdout and "TTFT" in done.stderr
    data = json.loads(adaptc_("run", artifact, "--chat", "Hi", "--max-tokens", 5, "--ignore-eos", "--json").stdout)
    assert len(data["token_ids"]) == 5 and data["finish_reason"] == "length" and data["ttft_s"] > 0
    twice = [adaptc_("run", artifact, "Hi", "--temperature", 1, "--seed", 3, "--json").stdout for _ in range(2)]
    assert json.loads(twice[0])["text"] == json.loads(twice[1])["text"]
    assert adaptc_("run", artifact, input="from stdin").returncode == 0


@pytest.mark.parametrize("flags", [(), ("--plan",), ("--memory",), ("--ir", "captured"), ("--ir", "fused"),
                                   ("--ir", "lowered")])
def test_inspect_models_and_artifacts(model, artifact, flags):
    texts = [adaptc_("inspect", what, *flags) for what in (model, artifact)]
    for text in texts:
        assert text.returncode == 0 and text.stdout.strip(), text.stderr
    if flags[:1] == ("--ir",):
        assert texts[0].stdout == texts[1].stdout
    data = adaptc_("inspect", artifact, *flags, "--json")
    assert data.returncode == 0 and json.loads(data.stdout), data.stderr


def test_an_artifact_shows_its_own_options(artifact):
    refused(adaptc_("inspect", artifact, "--weights", "int4"), "weights")


def test_targets():
    assert "cpu" in adaptc_("targets").stdout
    assert json.loads(adaptc_("targets", "--json").stdout)[0]["name"] == "cpu"


@pytest.mark.parametrize(("args", "words"), [
    (("--target", "tpu9"), ("tpu9", "cpu")),
    (("--weights", "int3"), ("int3", "int4")),
    (("--kv", "fp8"), ("fp8", "bf16")),
    (("--level", "x86-64-v9"), ("x86-64-v9", "x86-64-v3")),
    (("--level", "x86-64-v3", "--level", "x86-64-v4+avx9"), ("avx9", "avx512vnni")),
    (("--page-size", "0"), ("page_size",)),
    (("--max-context", "4096"), ("4096", "128")),
    (("--max-requests", "99999999999"), ("max_requests", "2147483647")),
    (("--workers", "0"), ("workers",)),
    (("--from", "absent.mlir"), ("absent.mlir",)),
])
def test_bad_options(model, tmp_path, args, words):
    refused(adaptc_("compile", model, "-o", tmp_path / "x.adapt", *args), *words)
    assert not list(tmp_path.iterdir())


def test_bad_models(tmp_path):
    out = tmp_path / "out" / "x.adapt"
    out.parent.mkdir()
    (tmp_path / "empty").mkdir()
    refused(adaptc_("compile", tmp_path / "empty", "-o", out), "config.json")
    refused(adaptc_("compile", tmp_path / "absent", "-o", out), "absent")
    good = tiny_gguf.write(tmp_path / "good.gguf")
    data = good.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: len(data) // 2])
    refused(adaptc_("compile", tmp_path / "cut.gguf", "-o", out), "cut.gguf")
    tiny_gguf.write(tmp_path / "odd.gguf", "llama", named="mamba99")
    refused(adaptc_("compile", tmp_path / "odd.gguf", "-o", out), "mamba99", "llama")
    import numpy as np

    bad = np.full((tiny_gguf.HIDDEN,), np.nan, np.float32)
    tiny_gguf.write(tmp_path / "nan.gguf", tensors={"output_norm.weight": bad})
    refused(adaptc_("compile", tmp_path / "nan.gguf", "-o", out), "output_norm.weight", "NaN")
    assert not list(out.parent.iterdir())


def test_existing_output(model, artifact, tmp_path):
    refused(adaptc_("compile", model, "-o", artifact), "exists", "--force")
    assert adaptc_("run", artifact, "Hi", "--max-tokens", 1).returncode == 0


def test_bad_requests(artifact):
    refused(adaptc_("run", artifact, ""), "empty")
    refused(adaptc_("run", artifact, "x" * 200), "128")
    refused(adaptc_("run", artifact.parent / "absent.adapt", "x"), "absent.adapt")
    refused(adaptc_("run", artifact, "x", "--top-p", 2), "top_p")
    refused(adaptc_("run", artifact, "x", "--threads", 100000), "threads", "1024")
    refused(adaptc_("run", artifact, "a\udcff"), "Unicode")
    refused(adaptc_("run", artifact, "--chat", "a\udcff"), "Unicode")
    refused(adaptc_("run", artifact, preexec_fn=lambda: os.close(0)), "standard input")
    bytes_in = subprocess.run([*COMMAND, "run", str(artifact)], input=b"\xff\xfe", capture_output=True)
    assert bytes_in.returncode == 2 and b"UTF-8" in bytes_in.stderr and b"Traceback" not in bytes_in.stderr


def test_bad_inspections(artifact):
    refused(adaptc_("inspect", artifact, "--plan", "--memory"), "--plan")
    refused(adaptc_("inspect", artifact, "--ir", "molten"), "molten", "fused")


def test_bad_golden_requests(model, tmp_path):
    (tmp_path / "blank.txt").write_text("hello\n\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    out = tmp_path / "out" / "g.safetensors"
    out.parent.mkdir()
    refused(adaptc_("golden", model, "-o", out, "--prompts", tmp_path / "blank.txt"), "prompt 2", "empty")
    refused(adaptc_("golden", model, "-o", out, "--prompts", tmp_path / "latin.txt"), "latin.txt")
    refused(adaptc_("golden", model, "-o", out, "--steps", 0), "steps")
    refused(adaptc_("golden", model, "-o", out, "--steps", 500), "context")
    assert not list(out.parent.iterdir())
    out.write_text("kept")
    refused(adaptc_("golden", model, "-o", out), "g.safetensors", "--force")
    assert out.read_text() == "kept"


def test_an_interrupt_within_an_exec_ends_with_130():
    """CPython would end by the signal when an exec of text was interrupted, whatever caught it."""
    code = ("import click, adaptc.cli as c\n@c.main.command()\ndef boom(): exec('raise KeyboardInterrupt')\n"
            "c.main(['boom'])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr == "adaptc: interrupted.\n"


def test_flipped_bit(artifact, tmp_path):
    import shutil

    copy = tmp_path / "copy.adapt"
    shutil.copytree(artifact, copy)
    kernel = sorted((copy / "kernels").glob("*/*.o"))[0]
    data = bytearray(kernel.read_bytes())
    data[len(data) // 2] ^= 4
    kernel.write_bytes(data)
    refused(adaptc_("run", copy, "x"), kernel.name)


def test_a_level_that_the_artifact_lacks(artifact):
    refused(adaptc_("run", artifact, "x", "--level", "x86-64-v4"), "level of this artifact 'x86-64-v4'", "x86-64-v3")


@pytest.mark.parametrize("delay", [1.0, 4.0, 8.0])
def test_interrupt(smollm2_gguf, tmp_path, delay):
    """Ctrl-C at any moment: exit code 130, nothing left."""
    process = subprocess.Popen([*COMMAND, "compile", str(smollm2_gguf), "-o", str(tmp_path / "x.adapt")],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                               env=os.environ | {"ADAPTC_CACHE": str(tmp_path.parent / f"interrupt-cache-{delay}")})
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_output_that_can_not_be_written():
    done = subprocess.run([*COMMAND, "targets"], stdout=open("/dev/full", "w"), stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr.startswith("adaptc: [E0800] standard output can't be written: No space")
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1


def test_full_disk(model, tmp_path):
    """A file-size limit makes writes fail as a full disk does."""
    import resource

    limit = lambda: (signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)))  # noqa: E731
    done = adaptc_("compile", model, "-o", tmp_path / "x.adapt", preexec_fn=limit)
    refused(done, "x.adapt")
    assert not list(tmp_path.iterdir())
