"""Copies of artifacts with a fault planted, whose manifests are valid: only verification can find it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from adaptc.artifact_format import canonical, manifest_digest
from adaptc.backends import codegen
from adaptc.backends.cpu.codegen import _family
from adaptc.backends.cpu.levels import level_of
from adaptc.backends.cpu.toolchain import compile_mlir
from adaptc.plan import Plan
from adaptc.runtime.loader import parse_weights
from adaptc.verify.subject import Subject


SIZES = {"max_step_tokens": 48, "max_requests": 3, "max_context": 96, "page_size": 3}
"""Compile options under which tiny models have several pages a window, and steps smaller than a context."""


@dataclasses.dataclass(frozen=True)
class Plant:
    """What a fault is planted in, and where the artifact with the fault goes."""

    artifact: Path
    model: Path
    folder: Path
    options: Mapping
    laid_out: Callable[[], str]
    monkeypatch: pytest.MonkeyPatch

    @property
    def out(self) -> Path:
        return self.folder / "bad.adapt"

    @property
    def program(self) -> str:
        """The text of the laid-out stage."""
        return self.laid_out()


def copy(artifact: Path, out: Path, name: str, change: Callable[[bytes], bytes]) -> Path:
    """A copy of ``artifact`` whose file ``name`` is ``change`` of it, listed in a manifest with the right digests."""
    shutil.copytree(artifact, out, dirs_exist_ok=True)
    path = out / name
    content = change(path.read_bytes())
    path.write_bytes(content)
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    manifest["digest"] = manifest_digest(manifest)
    (out / "manifest.json").write_bytes(canonical(manifest))
    return out


def weight(artifact: Path, out: Path, name: str, change: Callable[[dict], None]) -> Path:
    """A packed weight's codes, changed in place by ``change``."""
    subject = Subject(artifact)
    spec = subject.stored[name].spec
    backend = codegen(subject.plan.backend)
    size = backend.packed_bytes(spec.format, spec.shape)
    codes = backend.unpack(spec.format, spec.shape, subject.artifact.weights[name][:size])
    codes = {part: array.copy() for part, array in codes.items()}
    change(codes)
    packed = backend.pack(spec.format, spec.shape, codes)

    def put(content: bytes) -> bytes:
        raw = bytearray(content)
        view = parse_weights(memoryview(content))[name]
        start = np.frombuffer(view, np.uint8).ctypes.data - np.frombuffer(content, np.uint8).ctypes.data
        raw[start : start + size] = packed
        return bytes(raw)

    return copy(artifact, out, "weights.safetensors", put)


def kernel(artifact: Path, out: Path, index: int, use: int, edit: Callable[[str], str] = str, **params) -> Path:
    """The kernel of an operator's ``use``-th call, generated with other static parameters under the same symbol; or
    its MLIR text after an ``edit``."""
    subject = Subject(artifact)
    symbol = subject.plan.operators()[index].calls[use].kernel
    spec = codegen(subject.plan.backend).select(subject.places[index].spec).uses[use].kernel
    text = edit(_family(spec.family).emit({**dict(spec.params), **params}, symbol, level_of(subject.level)))
    return copy(artifact, out, f"kernels/{subject.level}/{symbol}.o", lambda _: compile_mlir(text, subject.level))


def plan(artifact: Path, out: Path, change: Callable[[Plan], Plan]) -> Path:
    return copy(artifact, out, "plan.json", lambda text: change(Plan.from_json(text.decode())).to_json().encode())


def operator(plan: Plan, index: int, change: Callable) -> Plan:
    """``plan`` with its operator ``index`` changed."""
    (segment,) = plan.segments
    operators = tuple(change(op) if op.id == index else op for op in segment.operators)
    return dataclasses.replace(plan, segments=(dataclasses.replace(segment, operators=operators),))


def find(artifact: Path, op: str, module: str, which: int = 0) -> int:
    """The id of the operator ``op`` of a module, or of a later one of that name."""
    return [o.id for o in Subject(artifact).plan.operators() if (o.op, o.source) == (op, module)][which]


def never_fresh(text: str) -> str:
    """A kernel over slots that takes what lies in the slot it writes for a request's value, where there is none yet."""
    found = re.search(r"(%v\d+) = arith.cmpi slt, .*\n\s*%v\d+ = arith.select \1, .*\n", text)
    return text[: found.end()] + "%never = arith.constant false\n" + re.sub(rf"{found[1]}\b", "%never", text[found.end() :])


def off_by_one(text: str) -> str:
    """A ``top_k`` kernel whose last choice is one further than it should be."""
    stored, count = re.subn(r"(%\w+) = arith.trunci (%\w+) : i64 to i32",
                            r"%one = arith.constant 1 : i64\n%further = arith.addi \2, %one : i64\n"
                            r"\1 = arith.trunci %further : i64 to i32", text)
    assert count == 1
    return stored
