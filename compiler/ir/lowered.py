"""What the lowered stage notes on operators, and how to read it. Lowering only adds notes: taking them off gives the
laid-out program."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from adaptc.ir import dialect
from adaptc.ir.module import Program
from adaptc.protocol import KernelSpec, KernelUse, TensorSpec

FACTS = ("arena_bytes", "max_symbols")


@dataclass(frozen=True)
class Place:
    """Where a value lies, as an operator's ``buffers`` spell it.

    arena+N    N bytes into the arena; in @step
    frame+N    N bytes into the body's frame; the call says where in the arena the frame stands (``frame``)
    argI       argument I of the function (in @step the inputs: tokens, positions, requests, sampled)
    resultI    result I of the function: the body writes where its caller wants it (in @step: the logits)
    symbol:S   the weight or state S; in @step
    """

    memory: str
    at: int | str

    def __str__(self) -> str:
        between = {"arena": "+", "frame": "+", "symbol": ":"}.get(self.memory, "")
        return f"{self.memory}{between}{self.at}"

    @staticmethod
    def parse(text: Any) -> Place | None:
        """The place that ``text`` spells; None when it spells none."""
        found = _PLACE.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            return None
        memory, at = next((memory, at) for memory, at in found.groupdict().items() if at is not None)
        return Place(memory, at if memory == "symbol" else int(at))


_PLACE = re.compile(r"arena\+(?P<arena>\d+)|frame\+(?P<frame>\d+)|arg(?P<arg>\d+)|result(?P<result>\d+)|symbol:(?P<symbol>.+)")


def kernel_note(symbol: str, use: KernelUse) -> dict[str, Any]:
    """One entry of an operator's ``kernels``; ``kernel_uses`` reads it back."""
    params = json.dumps(dict(use.kernel.params), sort_keys=True)
    return {"symbol": symbol, "family": use.kernel.family, "params": params, "args": use.args}


def kernel_uses(op) -> tuple[KernelUse, ...]:
    """The kernels noted on an operator, params sorted by name; none for an operator that aliases its operand."""
    rows = dialect.from_attr(op.operation.attributes["kernels"])
    return tuple(
        KernelUse(KernelSpec(r["family"], tuple(sorted(_frozen(json.loads(r["params"])).items()))), r["args"])
        for r in rows
    )


def scratch_of(op) -> tuple[TensorSpec, ...]:
    """The scratch buffers noted on an operator; none on a call."""
    attributes = op.operation.attributes
    rows = dialect.from_attr(attributes["scratch"]) if "scratch" in attributes else ()
    return tuple(TensorSpec(dtype, shape) for dtype, shape in rows)


def laid_out(lowered: Program) -> Program:
    """The laid-out program that ``lowered`` was made from."""
    program = lowered.copy()
    for function in program.functions().values():
        for op in function.entry_block.operations:
            for note in dialect.LOWERED:
                if note in op.operation.attributes:
                    del op.operation.attributes[note]
    for fact in FACTS:
        if f"adaptc.{fact}" in program.module.operation.attributes:
            del program.module.operation.attributes[f"adaptc.{fact}"]
    program.set_fact("stage", "laid_out")
    return program


def _frozen(value: Any) -> Any:
    """JSON with lists as tuples, so that equal kernels are equal values."""
    if isinstance(value, dict):
        return {k: _frozen(v) for k, v in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
