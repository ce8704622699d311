"""Writes an artifact: everything under a temporary sibling first, then one rename into place.

At no moment is there an incomplete artifact under the final name, whatever kills the writer. A writer holds a lock on
its temporary directory while it lives, so the next writer of the same name can tell a dead writer's leavings.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import adaptc
from adaptc import artifact_format as names
from adaptc.artifact_format import ALIGNMENT, FORMAT_VERSION, TextInfo, canonical, manifest_digest
from adaptc.errors import ExistsError, OutputError
from adaptc.plan import Plan


@dataclass(frozen=True)
class Weight:
    """One packed weight: ``produce`` is called once, when its turn to be written comes, and returns ``size`` bytes."""

    name: str
    size: int
    produce: Callable[[], bytes | bytearray | memoryview]


@dataclass(frozen=True)
class ArtifactContents:
    """All that goes into an artifact. Mappings are written sorted; nothing may depend on the host or the time.

    sources       file name → SHA-256 of each of the model's files
    tensors       source tensor → SHA-256 of its dequantised float32 values, row-major little-endian
    requirements  what the host must have, by level, e.g. {"x86-64-v3": {"architecture": "x86_64"}}
    tolerances    bounds within which the artifact agrees with its goldens
    provenance    versions of the tools that took part
    objects       "<level>/<file name>" → object code; every level of the plan has all
    tuning        what was chosen for the plan's kernels instead of defaults (``adaptc.tuning``), if anything
    weights       every weight that the plan's buffers name as their source
    """

    model: str
    plan: Plan
    captured: str
    laid_out: str
    objects: Mapping[str, bytes]
    weights: Sequence[Weight]
    text: TextInfo = TextInfo()
    tokenizer: bytes | None = None
    chat_template: str | None = None
    goldens: bytes | None = None
    tuning: bytes | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    requirements: Mapping = field(default_factory=dict)
    options: Mapping = field(default_factory=dict)
    tolerances: Mapping = field(default_factory=dict)
    provenance: Mapping = field(default_factory=dict)


def check_output(out: Path, *, force: bool) -> None:
    """Raises OutputError when ``out`` can't be written, so that it is known before an hour of compiling.

    Only an artifact or an empty directory is ever replaced: ``force`` on a home directory must not delete it.
    """
    if not out.parent.is_dir():
        raise OutputError(f"Can't write {out}: the directory {out.parent} does not exist.")
    if not os.path.lexists(out):
        return
    if not force:
        raise ExistsError(f"{out} already exists.", hint="Give another name or --force to replace it.")
    replaceable = not out.is_symlink() and out.is_dir() and ((out / names.MANIFEST).exists() or not any(out.iterdir()))
    if not replaceable:
        raise ExistsError(f"{out} exists and is not an adaptc artifact (it has no {names.MANIFEST}), so it is kept.",
                          hint="Give another name or remove it yourself.")  # fmt: skip


def write_artifact(out: Path, contents: ArtifactContents, *, force: bool = False) -> Path:
    """Writes ``contents`` to the directory ``out`` and returns it.

    With ``force`` an artifact already there stays loadable until the new one is complete. Raises OutputError when
    ``out`` exists (without ``force``), can't be written or the disk is full; nothing is left behind then.
    """
    out = Path(os.path.abspath(out))
    check_output(out, force=force)
    try:
        _remove_leavings(out)
        with _temporary(out) as staging:
            _fill(staging, contents)
            _publish(staging, out, force=force)
    except OSError as error:
        raise _output_error(out, contents, error) from error
    return out


def _output_error(out: Path, contents: ArtifactContents, error: OSError) -> OutputError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        need = sum(w.size for w in contents.weights) / 1e6
        return OutputError(f"Can't write {out}: {error.strerror.lower()}. Its weights alone take {need:.0f} MB.",
                           hint="Free some space or write to another disk.")  # fmt: skip
    if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
        return ExistsError(f"Can't write {out}: another writer put something there meanwhile.",
                           hint="Give another name or --force to replace it.")  # fmt: skip
    return OutputError(f"Can't write {out}: {error.strerror or error}.")


def _fill(staging: Path, contents: ArtifactContents) -> None:
    """Writes every file, the manifest last."""
    files = {}
    for name, chunks in sorted(_files(contents).items()):
        path = staging / name
        path.parent.mkdir(exist_ok=True, parents=True)
        files[name] = _write(path, chunks)
    manifest = {
        "format": FORMAT_VERSION,
        "adaptc": adaptc.__version__,
        "model": contents.model,
        "target": contents.plan.target,
        "levels": list(contents.plan.levels),
        "files": files,
        "states": [asdict(state) for state in contents.plan.states],
        **{k: dict(getattr(contents, k)) for k in
           ("sources", "tensors", "requirements", "options", "tolerances", "provenance")},
    }  # fmt: skip
    manifest["digest"] = manifest_digest(manifest)
    assert set(manifest) == set(names.MANIFEST_FIELDS)
    _write(staging / names.MANIFEST, [canonical(manifest)])
    for directory in {staging, *(path.parent for path in staging.rglob("*"))}:
        _sync(directory)


def _files(contents: ArtifactContents) -> dict[str, Iterable[bytes]]:
    """File name → its content in chunks, for every file but the manifest."""
    files: dict[str, Iterable[bytes]] = {
        names.PLAN: [contents.plan.to_json().encode()],
        names.CAPTURED: [contents.captured.encode()],
        names.LAID_OUT: [contents.laid_out.encode()],
        names.TEXT: [contents.text.to_json()],
        names.WEIGHTS: weight_chunks(contents.weights),
    }
    for name, code in contents.objects.items():
        level, _, file = name.partition("/")
        assert level in contents.plan.levels and file and os.sep not in file and not file.startswith("."), name
        files[names.KERNELS + name] = [code]
    if contents.tokenizer is not None:
        files[names.TOKENIZER] = [contents.tokenizer]
    if contents.chat_template is not None:
        files[names.CHAT_TEMPLATE] = [contents.chat_template.encode()]
    if contents.goldens is not None:
        files[names.GOLDENS] = [contents.goldens]
    if contents.tuning is not None:
        files[names.TUNING] = [contents.tuning]
    return files


def weight_chunks(weights: Iterable[Weight]) -> Iterator[bytes]:
    """A safetensors file of uint8 tensors, sorted by name, with every tensor's data at a multiple of ALIGNMENT.

    The header is padded with spaces and each tensor with zeros (its shape counts them): the format allows no holes.
    """
    ordered = sorted(weights, key=lambda w: w.name)
    header, at = {}, 0
    for weight in ordered:
        assert weight.name not in header, f"two weights are named {weight.name}"
        size = weight.size + -weight.size % ALIGNMENT
        header[weight.name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for weight in ordered:
        data = memoryview(weight.produce()).cast("B")
        assert len(data) == weight.size, f"{weight.name}: {len(data)} bytes packed, {weight.size} announced"
        yield data
        yield bytes(-weight.size % ALIGNMENT)


def _write(path: Path, chunks: Iterable[bytes]) -> dict:
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"sha256": digest.hexdigest(), "size": size}


def _sync(directory: Path) -> None:
    """Makes the directory's entries durable, so that the rename can't survive a power cut that they don't."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ---- temporary siblings ----------------------------------------------------------------------------------------


def _prefix(out: Path) -> str:
    return f".{out.name}.writing-"


_NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What locking a directory fails with on filesystems that can't (NFS): leavings there are kept, never guessed at."""


def _try_lock(directory: Path, *, own: bool) -> int | None:
    """A descriptor that holds the directory's lock until closed (or its process dies); None if another holds it."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(directory)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(fd)
            raise
        if own:
            return fd
    os.close(fd)
    return None


def _remove_leavings(out: Path) -> None:
    """Removes the temporaries of writers of ``out`` that died."""
    for path in out.parent.iterdir():
        if path.name.startswith(_prefix(out)) and (lock := _try_lock(path, own=False)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


@contextmanager
def _temporary(out: Path) -> Iterator[Path]:
    """A new locked directory beside ``out``, on the same filesystem; whatever bears its name at the end is removed."""
    while True:
        path = out.with_name(_prefix(out) + os.urandom(6).hex())
        try:
            path.mkdir()  # not mkdtemp: the artifact gets the user's ordinary permissions
            if (lock := _try_lock(path, own=True)) is not None:  # else another writer's clean-up was quicker
                break
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _publish(staging: Path, out: Path, *, force: bool) -> None:
    if not (force and out.exists()):
        os.rename(staging, out)  # fails if a non-empty directory or a file appeared there meanwhile
    elif not _exchange(staging, out):
        aside = out.with_name(f".{out.name}.replaced-" + os.urandom(6).hex())  # no leaving: the only copy for a moment
        os.rename(out, aside)
        try:
            os.rename(staging, out)
        except BaseException:
            os.rename(aside, out)
            raise
        os.rename(aside, staging)
    _sync(out.parent)


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two names in one step (Linux's renameat2 with RENAME_EXCHANGE); False where the system can't."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    at_cwd, exchange = -100, 2
    if call(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(code, os.strerror(code), str(b))
