"""Gives every value a place (``ir.lowered.Place``).

``buffers`` on an operator lists the places of its operands, results and scratch, on a call of operands and results.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar, Sequence

from torch_mlir import ir

from adaptc.errors import OptionError
from adaptc.ir import dialect
from adaptc.ir.functions import bodies
from adaptc.ir.lowered import Place, scratch_of
from adaptc.ir.module import STEP, Program, callee
from adaptc.ir.rewrite import nodes, spec
from adaptc.passes.base import storage
from adaptc.plan import ALIGNMENT, DTYPE_BYTES
from adaptc.protocol import TensorSpec


@dataclass(frozen=True)
class PlanMemory:
    """A static arena by liveness, for ``max_step_tokens`` T, ``max_sampled`` S and ``max_requests`` R.

    A value lives from the operator that makes it to its last use, both included, so that no operator's result
    overlaps its operands. Largest first, each at the lowest offset that is free while it lives. A body's frame is
    placed like a value that lives at its call. Sets the facts "arena_bytes" and "max_symbols".
    """

    max_step_tokens: int = 512
    max_sampled: int = 64
    max_requests: int = 64
    name: ClassVar[str] = "plan_memory"
    requires: ClassVar[tuple[str, ...]] = ("selected", "results_are_made")
    ensures: ClassVar[tuple[str, ...]] = ("placed",)

    def run(self, program: Program) -> None:
        symbols = {"T": self.max_step_tokens, "R": self.max_requests, "S": self.max_sampled}
        for name, most in symbols.items():
            if most < 1:
                raise OptionError(f"the most {name} can be is {most}; it must be at least 1.")
        with program.editing():
            frames = {name: _plan(f, "frame", symbols, {}) for name, f, _ in bodies(program)}
            arena = _plan(program.functions()[STEP], "arena", symbols, frames)
        program.set_fact("arena_bytes", arena)
        program.set_fact("max_symbols", symbols)


@dataclass
class Block:
    """Memory that is needed from operation ``start`` to operation ``end`` of its function, both included."""

    size: int
    start: int
    end: int
    offset: int = -1


def place_blocks(blocks: Sequence[Block]) -> int:
    """Sets offsets: largest first, each at the lowest one where it meets no block of an overlapping lifetime.
    Returns the bytes needed."""
    placed: list[Block] = []
    for block in sorted(blocks, key=lambda b: (-b.size, b.start)):
        offset = 0
        rivals = [b for b in placed if b.start <= block.end and block.start <= b.end]
        for rival in sorted(rivals, key=lambda b: b.offset):
            if offset + block.size <= rival.offset:
                break
            offset = max(offset, rival.offset + rival.size)
        block.offset = offset
        placed.append(block)
    return max((b.offset + b.size for b in placed), default=0)


def bytes_of(tensor: TensorSpec, symbols: dict[str, int]) -> int:
    """Bytes of a dense tensor with its symbols at their maxima, rounded up to whole cache lines."""
    elements = prod(symbols[d] if isinstance(d, str) else d for d in tensor.shape)
    return -(-elements * DTYPE_BYTES[tensor.dtype] // ALIGNMENT) * ALIGNMENT


def _plan(function, memory: str, symbols: dict[str, int], frames: dict[str, int]) -> int:
    """Places a function's values; returns the bytes of its frame."""
    ops = nodes(function)
    places: dict[ir.Value, Place] = {a: Place("arg", a.arg_number) for a in function.entry_block.arguments}
    places |= {storage(v): Place("result", i) for i, v in enumerate(ops[-1].operands)}
    blocks: dict[ir.Value, Block] = {}
    scratch: dict[int, list[Block]] = {}
    frame: dict[int, Block] = {}
    for i, node in enumerate(ops):
        for value in map(storage, node.operands):
            if value in blocks:
                blocks[value].end = i
        if node.name == "get":
            places[node.results[0]] = Place("symbol", node.op.attributes["symbol"].value)
            continue
        for value in node.results:
            if storage(value) == value and value not in places:
                blocks[value] = Block(bytes_of(spec(value), symbols), i, i)
        if node.name == "func.call":
            frame[i] = Block(frames[callee(node.op)], i, i)
        elif node.row is not None:
            scratch[i] = [Block(bytes_of(s, symbols), i, i) for s in scratch_of(node.op)]
    total = place_blocks([*blocks.values(), *frame.values(), *(b for bs in scratch.values() for b in bs)])
    places |= {value: Place(memory, block.offset) for value, block in blocks.items()}
    for i, node in enumerate(ops):
        if node.row is None and node.name != "func.call":
            continue
        buffers = [places[storage(v)] for v in (*node.operands, *node.results)]
        buffers += [Place(memory, block.offset) for block in scratch.get(i, ())]
        node.op.attributes["buffers"] = dialect.to_attr([*map(str, buffers)])
        if i in frame:
            node.op.attributes["frame"] = dialect.to_attr(frame[i].offset)
    return total
