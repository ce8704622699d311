"""The artifact directory: what is written is what is loaded, or it is refused."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from runtime_fake import contents, embedding, plan

from adaptc import artifact, artifact_format
from adaptc.artifact import Weight, check_output, weight_chunks, write_artifact
from adaptc.artifact_format import ALIGNMENT, TextInfo, canonical, manifest_digest
from adaptc.errors import ArtifactError, OutputError
from adaptc.runtime.loader import load_artifact, parse_weights

HERE = Path(__file__).parent


def full(**changes):
    extra = dict(tokenizer=b'{"a": 1}', chat_template="{{ messages }}", goldens=b"golden bytes",
                 tolerances={"logits": 0.001}, options={"weights": "auto"}, provenance={"torch": "2"},
                 requirements={"architecture": "x86_64"})  # fmt: skip
    return contents(plan(), **{**extra, **changes})


@pytest.fixture
def out(tmp_path) -> Path:
    return write_artifact(tmp_path / "m.adapt", full())


def tree(path: Path) -> dict[str, bytes]:
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def rewrite_manifest(path: Path, **changes) -> None:
    manifest = {**json.loads((path / "manifest.json").read_text()), **changes}
    manifest["digest"] = manifest_digest(manifest)
    (path / "manifest.json").write_bytes(canonical(manifest))


def test_what_is_written_is_loaded(out):
    loaded = load_artifact(out)
    assert loaded.plan == plan() and loaded.objects == {"x86-64-v3/fake.o": b"\x7fELFcode"}
    assert loaded.text_info == TextInfo(stop_ids=(39,))
    assert bytes(loaded.weights["another"][:100]) == bytes(range(100)) and not any(loaded.weights["another"][100:])
    assert loaded.weights["another"].readonly
    assert (np.frombuffer(loaded.weights["embedding"], np.float32).reshape(40, 8) == embedding()).all()
    assert loaded.read("tokenizer.json") == b'{"a": 1}' and loaded.read("nothing.json") is None
    assert loaded.manifest["target"] == "cpu" and loaded.manifest["levels"] == ["x86-64-v3"]
    assert loaded.manifest["states"][0]["parts"][0]["name"] == "k"
    assert loaded.manifest["tensors"] == {"token_embd": "cd" * 32}
    assert sorted(os.listdir(out.parent)) == ["m.adapt"]
    for name, entry in loaded.manifest["files"].items():
        data = (out / name).read_bytes()
        assert entry == {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


def test_weights_are_a_safetensors_file_with_aligned_data(out):
    path = out / "weights.safetensors"
    tensors = safetensors.numpy.load_file(path)
    assert {n: t.dtype for n, t in tensors.items()} == {"another": np.uint8, "embedding": np.uint8}
    assert tensors["another"][:100].tolist() == list(range(100)) and tensors["another"].size == 128
    raw = np.frombuffer(path.read_bytes(), np.uint8)
    start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    assert start % ALIGNMENT == 0
    views = load_artifact(out).weights
    for view in views.values():
        assert np.frombuffer(view, np.uint8).ctypes.data % ALIGNMENT == 0


def test_weights_are_streamed_one_at_a_time():
    alive = []

    def produce(name):
        alive.append(name)
        return b"x" * 10

    chunks = weight_chunks([Weight(n, 10, lambda n=n: produce(n)) for n in "ba"])
    next(chunks)
    assert alive == []
    next(chunks)
    assert alive == ["a"]
    with pytest.raises(AssertionError, match="announced"):
        list(weight_chunks([Weight("a", 11, lambda: b"x" * 10)]))


def test_every_flipped_bit_is_refused_by_file_name(out):
    for path in sorted(p for p in out.rglob("*") if p.is_file()):
        good = path.read_bytes()
        rng = np.random.default_rng(len(good))
        places = {0, len(good) - 1, *rng.integers(0, len(good), 12).tolist()}
        for at in places:
            bad = bytearray(good)
            bad[at] ^= 1 << int(rng.integers(8))
            path.write_bytes(bad)
            with pytest.raises(ArtifactError, match=path.name):
                load_artifact(out)
        path.write_bytes(good)
    load_artifact(out)


def test_every_bit_of_the_manifest_counts(tmp_path):
    """Also bits that leave the JSON value as it is: the case of a hexadecimal escape, or of an exponent."""
    out = write_artifact(tmp_path / "m.adapt", contents(plan(layers=1, windows=(0,)), model="a\x01b\x1f",
                                                        tolerances={"x": 1e-30}))  # fmt: skip
    path, good = out / "manifest.json", (out / "manifest.json").read_bytes()
    assert b"\\u001f" in good and b"1e-30" in good
    for at in range(len(good)):
        for bit in {at % 8, 5 if good[at] in b"ef" else at % 8}:  # bit 5 is the case of a letter
            bad = bytearray(good)
            bad[at] ^= 1 << bit
            path.write_bytes(bad)
            with pytest.raises(ArtifactError):
                load_artifact(out)


def test_a_truncated_or_lengthened_file_is_refused(out):
    for path in sorted(p for p in out.rglob("*") if p.is_file()):
        good = path.read_bytes()
        for bad in (good[:-1], good[: len(good) // 2], b"", good + b"\0"):
            path.write_bytes(bad)
            with pytest.raises(ArtifactError, match=path.name):
                load_artifact(out)
        path.write_bytes(good)


def test_a_missing_file_is_refused(out):
    for path in sorted(p for p in out.rglob("*") if p.is_file()):
        good = path.read_bytes()
        path.unlink()
        with pytest.raises(ArtifactError, match=path.name):
            load_artifact(out)
        path.write_bytes(good)


@pytest.mark.parametrize("name", ["extra.txt", "kernels/evil.o", ".hidden", "deep/down/x"])
def test_an_extra_file_is_refused(out, name):
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_bytes(b"")
    with pytest.raises(ArtifactError, match=Path(name).name):
        load_artifact(out)


def test_a_link_out_of_the_artifact_is_refused(out):
    target = out.parent / "elsewhere"
    (out / "text.json").rename(target)
    (out / "text.json").symlink_to(target)
    with pytest.raises(ArtifactError, match="text.json is not a plain file"):
        load_artifact(out)


def test_a_newer_format_says_so(out):
    rewrite_manifest(out, format=artifact_format.FORMAT_VERSION + 1, something_new=1)
    with pytest.raises(ArtifactError, match="format 2; this adaptc reads up to 1.*Install a newer adaptc"):
        load_artifact(out)


@pytest.mark.parametrize("changes", [{"extra": 1}, {"files": 3}, {"files": {}}, {"files": {"x": {}}}, {"format": "1"},
                                     {"format": 0},
                                     {"files": {"../../etc/passwd": {"sha256": "", "size": 1}}}])  # fmt: skip
def test_a_manifest_of_another_shape_is_refused(out, changes):
    rewrite_manifest(out, **changes)
    with pytest.raises(ArtifactError):
        load_artifact(out)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"{}", b'{"format": 1}', b"[" * 100_000, b"\xff\xfe"])
def test_a_manifest_that_is_none_is_refused(out, raw):
    (out / "manifest.json").write_bytes(raw)
    with pytest.raises(ArtifactError, match="manifest.json"):
        load_artifact(out)


def header(**tensors) -> bytes:
    text = json.dumps(tensors).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize("raw", [
    b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{}", (2**62).to_bytes(8, "little") + b"{}",
    header(a={"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}),
    header(a={"dtype": "F32", "shape": [64], "data_offsets": [0, 64]}) + bytes(64),
    header(a={"dtype": "U8", "shape": [65], "data_offsets": [0, 64]}) + bytes(64),
    header(a={"dtype": "U8", "shape": [64], "data_offsets": [64, 128]}) + bytes(128),
    header(a={"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}) + bytes(128),
    header(a={"dtype": "U8", "shape": [64], "data_offsets": [0, 64]},
           b={"dtype": "U8", "shape": [64], "data_offsets": [32, 96]}) + bytes(96),
    header(a={"dtype": "U8", "shape": [-64], "data_offsets": [0, -64]}) + bytes(64),
    header(a={"dtype": "U8", "shape": [32], "data_offsets": [0, 32]},
           b={"dtype": "U8", "shape": [32], "data_offsets": [32, 64]}) + bytes(64),
    header(a=[]), header(a={}),
])  # fmt: skip
def test_hostile_weight_files(out, raw):
    (out / "weights.safetensors").write_bytes(raw)
    files = json.loads((out / "manifest.json").read_text())["files"]
    files["weights.safetensors"] = {"sha256": hashlib.sha256(raw).hexdigest(), "size": len(raw)}
    rewrite_manifest(out, files=files)
    with pytest.raises(ArtifactError, match="weights.safetensors|embedding"):
        load_artifact(out)


@pytest.mark.parametrize("changes, message", [
    ({"page_size": 0}, "page_size is 0"), ({"vocabulary": -1}, "vocabulary is -1"),
    ({"states": ()}, "the state .* is used, and the plan doesn't declare it"),
])  # fmt: skip
def test_sizes_and_states_that_a_plan_needs(tmp_path, changes, message):
    out = write_artifact(tmp_path / "a", contents(dataclasses.replace(plan(), **changes)))
    with pytest.raises(ArtifactError, match=message):
        load_artifact(out)


def test_a_weight_or_object_that_the_plan_names_must_be_there(tmp_path):
    few = write_artifact(tmp_path / "a", contents(plan(), weights=[Weight("embedding", 64, lambda: bytes(64))]))
    with pytest.raises(ArtifactError, match="wants 1280 bytes of weight 'embedding'.*has 64 bytes"):
        load_artifact(few)
    none = write_artifact(tmp_path / "b", contents(plan(), objects={}))
    with pytest.raises(ArtifactError, match="fake.o"):
        load_artifact(none)


@pytest.mark.parametrize(
    "path, words", [("nothing", "does not exist"), ("file", "is a file"), ("empty", "no manifest")]
)
def test_what_is_no_artifact(tmp_path, path, words):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match=words):
        load_artifact(tmp_path / path)


# ---- writing ---------------------------------------------------------------------------------------------------

WRITER = """
    import sys, time
    from pathlib import Path
    sys.path.insert(0, {here!r})
    from runtime_fake import contents, plan
    from adaptc.artifact import Weight, write_artifact

    def slow():
        if {sleep}:
            print("writing", flush=True)
            time.sleep(60)
        return bytes(1000)

    options = {{name: name for name in {{"b", "a", "d", "c"}}}}
    write_artifact(Path({out!r}), contents(plan(), options=options, weights=[
        *contents(plan()).weights, Weight("zzz", 1000, slow)]), force={force})
"""


def writer(out, *, sleep=False, force=False, cwd=None, hash_seed="0", preamble=""):
    code = preamble + textwrap.dedent(WRITER.format(here=str(HERE), out=str(out), sleep=sleep, force=force))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            cwd=cwd, env={**os.environ, "PYTHONHASHSEED": hash_seed})  # fmt: skip


def test_bytes_depend_on_nothing_but_the_contents(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    runs = [writer(tmp_path / "one.adapt", hash_seed="1"),
            writer("two.adapt", hash_seed="2", cwd=tmp_path / "elsewhere")]  # fmt: skip
    for run in runs:
        assert run.wait() == 0, run.stderr.read()
    one, two = tree(tmp_path / "one.adapt"), tree(tmp_path / "elsewhere" / "two.adapt")
    assert one == two
    assert not any(str(tmp_path).encode() in data for data in one.values())


def test_a_killed_writer_leaves_nothing_under_the_name_and_is_cleaned_up_after(tmp_path):
    out = tmp_path / "m.adapt"
    run = writer(out, sleep=True)
    assert run.stdout.readline() == "writing\n"
    (leaving,) = tmp_path.iterdir()
    assert leaving.name.startswith(".m.adapt.") and any(leaving.rglob("*"))
    write_artifact(tmp_path / "m.adapt2", full())
    write_artifact(out, full())  # while the other still writes: its temporary is left alone
    assert leaving.exists()
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert leaving.exists()
    write_artifact(out, full(model="new"), force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.adapt", "m.adapt2"]
    assert load_artifact(out).manifest["model"] == "new"


def test_a_writer_killed_while_replacing_leaves_the_old(tmp_path):
    out = write_artifact(tmp_path / "m.adapt", full(model="old"))
    run = writer(out, sleep=True, force=True)
    assert run.stdout.readline() == "writing\n"
    assert load_artifact(out).manifest["model"] == "old"
    run.kill()
    run.wait()
    assert load_artifact(out).manifest["model"] == "old"


def test_an_existing_output_needs_force(out):
    before = tree(out)
    with pytest.raises(OutputError, match="already exists.*--force"):
        write_artifact(out, full(model="new"))
    assert tree(out) == before
    write_artifact(out, full(model="new", tokenizer=None), force=True)
    assert load_artifact(out).manifest["model"] == "new" and "tokenizer.json" not in tree(out)
    assert os.listdir(out.parent) == ["m.adapt"]


def test_a_mapped_artifact_survives_its_replacement(out):
    old = load_artifact(out)
    write_artifact(out, contents(plan(), seed=1), force=True)
    assert (np.frombuffer(old.weights["embedding"], np.float32).reshape(40, 8) == embedding(0)).all()


def test_force_without_an_exchanging_rename(out, monkeypatch):
    monkeypatch.setattr(artifact, "_exchange", lambda a, b: False)
    write_artifact(out, full(model="new"), force=True)
    assert load_artifact(out).manifest["model"] == "new" and os.listdir(out.parent) == ["m.adapt"]
    real = os.rename

    def failing(a, b):
        if ".writing-" in Path(a).name:
            raise OSError(errno.EIO, "Input/output error")
        real(a, b)

    monkeypatch.setattr(artifact.os, "rename", failing)
    with pytest.raises(OutputError):
        write_artifact(out, full(model="newer"), force=True)
    assert load_artifact(out).manifest["model"] == "new" and os.listdir(out.parent) == ["m.adapt"]


def test_force_never_deletes_what_is_no_artifact(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    write_artifact(home, full(), force=True)  # an empty directory may be taken
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("more work")
    (tmp_path / "link").symlink_to(home)
    for path in (other, tmp_path / "file", tmp_path / "link"):
        with pytest.raises(OutputError, match="is not an adaptc artifact"):
            write_artifact(path, full(), force=True)
    assert (other / "thesis.tex").read_text() == "years of work" and (tmp_path / "file").read_text() == "more work"


def test_output_is_checked_before_the_work(tmp_path, out):
    check_output(tmp_path / "new.adapt", force=False)
    check_output(out, force=True)
    with pytest.raises(OutputError, match="already exists"):
        check_output(out, force=False)
    with pytest.raises(OutputError, match="the directory .*nowhere does not exist"):
        check_output(tmp_path / "nowhere" / "m.adapt", force=False)


def raising(error):
    def produce():
        raise error

    return [*contents(plan()).weights, Weight("zzz", 10, produce)]


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path, out):
    before = tree(out)
    full_disk = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for path, force in ((tmp_path / "new.adapt", False), (out, True)):
        with pytest.raises(OutputError, match="no space left on device.*Free some space"):
            write_artifact(path, full(weights=raising(full_disk)), force=force)
    assert os.listdir(tmp_path) == ["m.adapt"] and tree(out) == before


def test_a_full_disk_found_only_when_syncing(tmp_path, monkeypatch):
    def fsync(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(artifact.os, "fsync", fsync)
    with pytest.raises(OutputError, match="no space"):
        write_artifact(tmp_path / "m.adapt", full())
    assert os.listdir(tmp_path) == []


def test_a_limit_of_the_system_stops_the_writer_cleanly(tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
    run = writer(tmp_path / "m.adapt", preamble=limit)
    assert run.wait() == 1 and "OutputError" in run.stderr.read()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), RuntimeError("in packing")])
def test_whatever_stops_the_writer_leaves_nothing(tmp_path, error):
    with pytest.raises(type(error)):
        write_artifact(tmp_path / "m.adapt", full(weights=raising(error)))
    assert os.listdir(tmp_path) == []


def test_a_rival_that_was_quicker_wins(tmp_path):
    out = tmp_path / "m.adapt"

    def produce():
        write_artifact(out, full(model="rival"))
        return bytes(10)

    with pytest.raises(OutputError, match="another writer"):
        write_artifact(out, full(weights=[Weight("zzz", 10, produce)]))
    assert load_artifact(out).manifest["model"] == "rival" and os.listdir(tmp_path) == ["m.adapt"]


def test_ordinary_permissions(out):
    umask = os.umask(0)
    os.umask(umask)
    assert out.stat().st_mode & 0o777 == 0o777 & ~umask


def test_hashing_on_load_is_fast(tmp_path):
    size = 32 << 20
    weights = [*contents(plan()).weights, Weight("big", size, lambda: bytes(size))]
    out = write_artifact(tmp_path / "m.adapt", full(weights=weights))
    start = time.perf_counter()
    load_artifact(out)
    assert time.perf_counter() - start < 32 / 100, "less than 100 MB/s"


def test_text_json_is_checked():
    info = TextInfo(bos_id=1, add_bos=True, stop_ids=(2, 3), special_tokens={"bos_token": "<s>"})
    assert TextInfo.from_json(info.to_json()) == info
    for raw in (b"{", b"[]", b'{"new": 1}', b'{"add_bos": true}', b'{"stop_ids": 3}'):
        with pytest.raises(ArtifactError, match="text.json"):
            TextInfo.from_json(raw)


def test_contents_carry_everything_the_manifest_lists(out):
    manifest = json.loads((out / "manifest.json").read_text())
    assert set(manifest) == set(artifact_format.MANIFEST_FIELDS)
    assert dataclasses.is_dataclass(full())
    assert parse_weights(memoryview((out / "weights.safetensors").read_bytes())).keys() == {"another", "embedding"}
