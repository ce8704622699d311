"""Opens an artifact and believes nothing that its digests don't confirm."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from adaptc import artifact_format as names
from adaptc.artifact_format import FORMAT_VERSION, TextInfo, canonical, manifest_digest
from adaptc.errors import ArtifactError, DamageError, NewerFormatError
from adaptc.plan import SLOT_ENTRIES, STATE_KINDS, Plan

_AGAIN = "Copy the artifact again or compile the model again."


@dataclass(frozen=True)
class Artifact:
    """A verified artifact.

    objects   "<level>/<object file name>" → object code
    weights   weight name → its packed bytes, a read-only view of the mapped file that starts at a multiple of 64
    """

    path: Path
    manifest: Mapping
    plan: Plan
    text_info: TextInfo
    objects: Mapping[str, bytes]
    weights: Mapping[str, memoryview]

    def kernels(self, level: str) -> Mapping[str, bytes]:
        """The object files of one of the plan's levels, by name."""
        prefix = level + "/"
        return {name.removeprefix(prefix): code for name, code in self.objects.items() if name.startswith(prefix)}

    def read(self, name: str) -> bytes | None:
        """The verified content of one file, e.g. "tokenizer.json" or "ir/laid_out.mlir"; None if there is none."""
        return _read(self.path, self.manifest, name) if name in self.manifest["files"] else None


def load_artifact(path: str | os.PathLike) -> Artifact:
    """Opens the artifact directory ``path``. Raises ArtifactError naming the file that is damaged, missing or extra."""
    path = Path(path)
    manifest = _manifest(path)
    _check_names(path, manifest)
    verified = _Beside(_weights, path, manifest)
    plan = Plan.from_json(_text(path, manifest, names.PLAN))
    objects = {name.removeprefix(names.KERNELS): _read(path, manifest, name)
               for name in manifest["files"] if name.startswith(names.KERNELS)}  # fmt: skip
    text = TextInfo.from_json(_read(path, manifest, names.TEXT))
    loaded = {names.PLAN, names.TEXT, names.WEIGHTS, *(names.KERNELS + name for name in objects)}
    for name in manifest["files"]:
        if name not in loaded:
            _verify_file(path, manifest, name)
    weights = verified.result()
    _check_plan(plan, objects, weights)
    return Artifact(path, manifest, plan, text, objects, weights)


class _Beside:
    """A call in a thread of its own: hashing gives Python's lock free. ``result`` waits for it."""

    def __init__(self, function: Callable, *arguments):
        self._call, self._result, self._error = (function, arguments), None, None
        self._thread = threading.Thread(target=self._run, name="adaptc-verify", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        function, arguments = self._call
        try:
            self._result = function(*arguments)
        except BaseException as error:
            self._error = error

    def result(self):
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result


# ---- the manifest ----------------------------------------------------------------------------------------------


def _manifest(path: Path) -> Mapping:
    if not path.is_dir():
        what = "is a file, not an artifact directory" if path.exists() else "does not exist"
        raise ArtifactError(f"Can't load {path}: it {what}.")
    if not (path / names.MANIFEST).is_file():
        raise ArtifactError(f"Can't load {path}: it has no {names.MANIFEST}, so it is not an adaptc artifact.")
    raw = (path / names.MANIFEST).read_bytes()
    damaged = DamageError(f"{path / names.MANIFEST} is damaged: its digest does not match.", hint=_AGAIN)
    try:
        manifest = json.loads(raw)
        version = manifest["format"]
        if type(version) is int and version > FORMAT_VERSION:
            raise NewerFormatError(f"{path} has artifact format {version}; this adaptc reads up to {FORMAT_VERSION}.",
                                hint="Install a newer adaptc or compile the model again.")  # fmt: skip
        # The exact text is compared as well: a flipped bit may leave the value as it is (an escape in upper case).
        listed = all(set(entry) == {"sha256", "size"} for entry in manifest["files"].values())
        intact = listed and manifest["digest"] == manifest_digest(manifest) and raw == canonical(manifest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged from error
    if not intact:
        raise damaged
    if type(version) is not int or version != FORMAT_VERSION or set(manifest) != set(names.MANIFEST_FIELDS):
        wrong = sorted(set(manifest) ^ set(names.MANIFEST_FIELDS)) or ["format"]
        raise DamageError(f"{path / names.MANIFEST}: missing, unknown or unreadable field {wrong[0]!r}.", hint=_AGAIN)
    return manifest


def _check_names(path: Path, manifest: Mapping) -> None:
    """The directory holds the files that the manifest lists, as plain files, and nothing else."""
    present = set()
    for directory, directories, files in os.walk(path):
        for name in (*directories, *files):
            full = Path(directory, name)
            if full.is_symlink() or not (full.is_file() or full.is_dir()):
                raise DamageError(f"{full} is not a plain file; an artifact holds only plain files.", hint=_AGAIN)
        present.update(Path(directory, name).relative_to(path).as_posix() for name in files)
    listed = set(manifest["files"]) | {names.MANIFEST}
    for name in sorted({*names.REQUIRED, *listed} - present):
        raise DamageError(f"{path}: the file {name} is missing.", hint=_AGAIN)
    for name in sorted(present - listed):
        raise DamageError(f"{path}: the file {name} does not belong to the artifact.",
                          hint="Remove it, or copy the artifact again.")  # fmt: skip


# ---- files -----------------------------------------------------------------------------------------------------


def _verify(path: Path, manifest: Mapping, name: str, content: bytes | memoryview) -> None:
    _expect(path, manifest, name, len(content), hashlib.sha256(content).hexdigest)


def _verify_file(path: Path, manifest: Mapping, name: str) -> None:
    """As ``_verify``, of a file whose content isn't needed now: it is never all in memory."""
    with open(path / name, "rb", buffering=0) as file:
        _expect(path, manifest, name, os.fstat(file.fileno()).st_size,
                lambda: hashlib.file_digest(file, "sha256").hexdigest())  # fmt: skip


def _expect(path: Path, manifest: Mapping, name: str, size: int, digest: Callable[[], str]) -> None:
    expected = manifest["files"][name]
    if size != expected["size"]:
        raise DamageError(f"{path / name} is damaged: it has {size} bytes, expected {expected['size']}.", hint=_AGAIN)
    if digest() != expected["sha256"]:
        raise DamageError(f"{path / name} is damaged: its SHA-256 differs from the manifest's.", hint=_AGAIN)


def _read(path: Path, manifest: Mapping, name: str) -> bytes:
    content = (path / name).read_bytes()
    _verify(path, manifest, name, content)
    return content


def _text(path: Path, manifest: Mapping, name: str) -> str:
    try:
        return _read(path, manifest, name).decode()
    except UnicodeDecodeError as error:
        raise DamageError(f"{path / name} is not UTF-8: {error}.") from error


def _weights(path: Path, manifest: Mapping) -> dict[str, memoryview]:
    """Views of the mapped weights file, hashed through the mapping that is used: what is verified is what is read."""
    with open(path / names.WEIGHTS, "rb") as file:
        if os.fstat(file.fileno()).st_size != manifest["files"][names.WEIGHTS]["size"]:
            _verify(path, manifest, names.WEIGHTS, file.read())
        try:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            _verify(path, manifest, names.WEIGHTS, content)
            return parse_weights(content)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamageError(f"{path / names.WEIGHTS} is not a file of packed weights: {error}.") from error


def parse_weights(content: memoryview) -> dict[str, memoryview]:
    """Views of the uint8 tensors of a safetensors file. Raises ValueError and the like when it is malformed."""
    start = 8 + int.from_bytes(content[:8], "little")
    if not 8 < start <= len(content):
        raise ValueError(f"the header ends at byte {start} of {len(content)}")
    header = json.loads(bytes(content[8:start]))
    header.pop("__metadata__", None)
    views, end = {}, 0
    for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = tensor["data_offsets"]
        if tensor["dtype"] != "U8" or tensor["shape"] != [last - first] or first != end or last < first:
            raise ValueError(f"tensor {name!r} is {tensor}")
        if (start + first) % names.ALIGNMENT:
            raise ValueError(f"tensor {name!r} starts at byte {start + first}, not a multiple of {names.ALIGNMENT}")
        views[name], end = content[start + first : start + last], last
    if start + end != len(content):
        raise ValueError(f"tensors end at byte {start + end} of {len(content)}")
    return views


def _check_plan(plan: Plan, objects: Mapping, weights: Mapping[str, memoryview]) -> None:
    """Everything that the plan names is there."""
    if not plan.levels:
        raise DamageError("plan.json: it has no level.")
    for name in ("vocabulary", "max_context", "max_step_tokens", "max_requests", "page_size", "key_block"):
        if getattr(plan, name) < 1:
            raise DamageError(f"plan.json: {name} is {getattr(plan, name)}.")
    known = {state.name for state in plan.states}
    named = [*(name for group in plan.groups for name in group.states),
             *(buffer.source for buffer in plan.buffers if buffer.kind == "state")]  # fmt: skip
    if unknown := sorted({*named} - known):
        raise DamageError(f"plan.json: the state {unknown[0]!r} is used, and the plan doesn't declare it.")
    for group in plan.groups:
        if group.kind not in STATE_KINDS or group.kind == "fixed" and group.max_pages != SLOT_ENTRIES:
            raise DamageError(f"plan.json: cache group {group.name!r} has kind {group.kind!r} and {group.max_pages} "
                              f"entries a request; a group has rows, or is fixed with {SLOT_ENTRIES} entries.")  # fmt: skip
    for level, kernel in ((level, kernel) for level in plan.levels for kernel in plan.kernels):
        if f"{level}/{kernel.object}" not in objects:
            raise DamageError(f"plan.json: kernel {kernel.symbol} is in {kernel.object}, which is not in "
                                f"{names.KERNELS}{level}/.")  # fmt: skip
    for buffer in plan.buffers:
        if buffer.kind == "weight" and len(weights.get(buffer.source, b"")) < buffer.bytes:
            got = f"{len(weights[buffer.source])} bytes" if buffer.source in weights else "nothing"
            raise DamageError(f"plan.json: {buffer.handle} wants {buffer.bytes} bytes of weight {buffer.source!r}; "
                              f"{names.WEIGHTS} has {got}.")  # fmt: skip
