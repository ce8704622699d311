"""Capture: the authors' PyTorch module as a ``captured`` program, without per-model code.

Importing this package loads neither torch nor transformers; capturing does, unless the same has been captured before.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adaptc.capture.pipeline import capture_module
    from adaptc.ir.module import Program

__all__ = ["capture", "capture_module"]


def capture(source: Any) -> Program:
    """The program of a ``sources.Source``, at stage "captured": as it was captured before, or else anew.

    CaptureError when the module can't be captured; InputError when its files say what no code reads, or lack tensors.
    """
    if (kept := source.derived.get("program")) is not None and (program := _recalled(source, kept)) is not None:
        return program
    from adaptc.capture.pipeline import capture as run

    program = run(source)
    values = {name: _digest(tensor) for name, tensor in source.stored().items() if tensor.looked_at}
    entry = {"values": values, "waived": source.waiver.names, "computed": list(source.computed), "text": program.text()}
    source.derived.put("program", json.dumps(entry).encode())
    return program


def __getattr__(name: str) -> Any:
    if name == "capture_module":
        from adaptc.capture.pipeline import capture_module

        return capture_module
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _recalled(source: Any, kept: bytes) -> Program | None:
    """The program that was kept, if the weights whose values capture has looked at are those of ``source``, and the
    tables that it has computed are kept too."""
    from adaptc.ir.module import Program

    entry, stored = json.loads(kept), source.stored()
    if any(_digest(stored[name]) != digest for name, digest in entry["values"].items()):
        return None
    program = Program.parse(entry["text"])
    if not all(name in source.computed for name in entry["computed"]):
        return None
    for name in entry["waived"]:
        source.waiver.covers(name)
    return program


def _digest(tensor: Any) -> str:
    return hashlib.sha256(tensor.data).hexdigest()
