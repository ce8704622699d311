"""Runs a lowered program over real memory: values live at the places the plan gave them, and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from adaptc.ir import dialect
from adaptc.ir.module import ROLES, Program, callee
from adaptc.ir.rewrite import nodes, spec
from adaptc.ops.elementwise import NUMPY
from adaptc.ops.mixing import FixedState, RowState, oracle_state
from adaptc.passes.plan_memory import ALIGNMENT
from adaptc.ir.lowered import Place, scratch_of


@dataclass(frozen=True)
class Bytes:
    """Memory from an offset of the arena on."""

    offset: int


@dataclass
class Held:
    """What the arena doesn't hold: inputs, weights, states, logits."""

    value: Any = None


class Arena:
    def __init__(self, program: Program, weights):
        self.program, self.weights = program, weights
        self.memory = np.full(program.fact("arena_bytes"), 0xFF, np.uint8)  # NaN, wherever it is read as floats
        self.most = program.fact("max_symbols")
        self.functions = program.functions()
        self.symbols = {name: Held(weights(name)) for name in program.weights()}
        self.symbols |= {name: Held(oracle_state(slot.spec)) for name, slot in program.states().items()}

    def step(self, tokens, positions, requests, sampled) -> np.ndarray:
        inputs = dict(zip(ROLES, (tokens, positions, requests, sampled)))
        self.sizes = {"T": len(tokens), "S": len(sampled), "R": 1}
        logits = Held()
        self._run(self.program.step, [Held(np.asarray(inputs[r], np.int32)) for r in self.program.roles], [logits], 0)
        return logits.value

    def _run(self, function, arguments, results, base: int) -> None:
        def at(place: str):
            found = Place.parse(place)
            if found.memory in ("arena", "frame"):
                return Bytes(base + found.at)
            return {"symbol": self.symbols, "arg": arguments, "result": results}[found.memory][found.at]

        for node in nodes(function):
            if node.row is None and node.name != "func.call":
                continue
            places = [at(p) for p in dialect.from_attr(node.op.attributes["buffers"])]
            count = len(node.operands)
            if node.name == "func.call":
                frame = base + node.op.attributes["frame"].value
                self._run(self.functions[callee(node.op)], places[:count], places[count:], frame)
            elif node.row.aliases:
                assert places[0] == places[1] and len(node.op.attributes["kernels"]) == 0
            else:
                self._operator(node, places[:count], places[count:])

    def _operator(self, node, operands, rest) -> None:
        specs = [spec(v) for v in node.operands]
        made = [spec(v) for v in node.results]
        scratch = scratch_of(node.op)
        kept, written = list(zip(operands, specs)), list(zip(rest, (*made, *scratch)))
        for i, (place, kind) in enumerate(written):
            for other, what in kept + written[:i]:
                assert not self._overlap(place, kind, other, what), f"{node.name}: {place} meets {other}"
        arrays = [self._read(place, kind) for place, kind in kept]
        for place, kind in written[len(made) :]:
            self.memory[place.offset : place.offset + self._bytes(kind, self.most)] = 0xFF
        for (place, kind), array in zip(written, node.row.meaning(node.row.complete(node.attrs), *arrays)):
            self._write(place, kind, array)

    @staticmethod
    def _bytes(kind, sizes) -> int:
        return prod(sizes.get(d, d) for d in kind.shape) * np.dtype(NUMPY[kind.dtype]).itemsize

    def _overlap(self, a, kind_a, b, kind_b) -> bool:
        if not isinstance(a, Bytes) or not isinstance(b, Bytes):
            return a is b
        ends = a.offset + self._bytes(kind_a, self.most), b.offset + self._bytes(kind_b, self.most)
        return a.offset < ends[1] and b.offset < ends[0]

    def _read(self, place, kind):
        if isinstance(place, Held) and isinstance(place.value, (RowState, FixedState)):
            return place.value
        shape = [self.sizes.get(d, d) for d in kind.shape]
        if isinstance(place, Held):
            return place.value.reshape(shape)
        size = self._bytes(kind, self.sizes)
        return self.memory[place.offset : place.offset + size].view(NUMPY[kind.dtype]).reshape(shape).copy()

    def _write(self, place, kind, array) -> None:
        array = np.ascontiguousarray(array, NUMPY[kind.dtype])
        if isinstance(place, Held):
            place.value = array
            return
        assert place.offset % ALIGNMENT == 0 and place.offset + self._bytes(kind, self.most) <= len(self.memory)
        self.memory[place.offset : place.offset + array.nbytes] = array.reshape(-1).view(np.uint8)
