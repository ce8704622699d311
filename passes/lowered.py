"""From the lowered stage back: lowering only adds notes, so taking them off gives the laid-out program."""

from __future__ import annotations

from adaptc.ir.module import Program

NOTES = ("kernels", "scratch", "buffers", "frame")
FACTS = ("arena_bytes", "max_symbols")


def laid_out(lowered: Program) -> Program:
    """The laid-out program that ``lowered`` was made from."""
    program = lowered.copy()
    for function in program.functions().values():
        for op in function.entry_block.operations:
            for note in NOTES:
                if note in op.operation.attributes:
                    del op.operation.attributes[note]
    for fact in FACTS:
        del program.module.operation.attributes[f"adaptc.{fact}"]
    program.set_fact("stage", "laid_out")
    return program
