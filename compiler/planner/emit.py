"""The lowered program as a plan: every operator at every place, with its kernels and buffers.

Bodies are expanded here: a body's frame stands at an arena offset that its call names, its arguments and results are
the call's. ``passes.plan_memory`` says what the places noted in the lowered program mean.
"""

from __future__ import annotations

from math import prod

from adaptc.errors import LegalityError
from adaptc.ir import dialect
from adaptc.ir.build import short_name
from adaptc.ir.lowered import Place, kernel_uses, scratch_of
from adaptc.ir.module import DIMENSIONS, STEP, Program, callee, joined, source_of, spec_of
from adaptc.plan import (DTYPE_BYTES, Buffer, CacheGroup, Call, Kernel, Operator, Plan, Segment, State, StatePart,
                         Symbol)
from adaptc.planner.cost import cost_of, weight_bytes
from adaptc.protocol import Codegen, KernelSpec, KernelUse, StateSpec, TensorSpec


def emit_plan(program: Program, codegen: Codegen, *, target: str, backend: str, levels: tuple[str, ...],
              max_context: int) -> tuple[Plan, tuple[KernelSpec, ...]]:
    """The plan of a lowered program, and the kernels that it calls, each once. Sizes and paging are the program's."""
    emitter = _Emitter(program, codegen)
    operators = emitter.operators()
    groups = emitter.groups()
    inputs = emitter.inputs(groups)
    page_size, key_block = emitter.paging()
    plan = Plan(
        target=target,
        levels=levels,
        backend=backend,
        vocabulary=program.fact("vocabulary"),
        max_context=max_context,
        max_step_tokens=emitter.maximum["T"],
        max_requests=emitter.maximum["R"],
        page_size=page_size,
        key_block=key_block,
        arena_bytes=program.fact("arena_bytes"),
        symbols=tuple(Symbol(name, emitter.maximum[name]) for name in codegen.symbols),
        buffers=tuple(emitter.buffers[handle] for handle in sorted(emitter.buffers)),
        kernels=tuple(emitter.kernels[symbol] for symbol in sorted(emitter.kernels)),
        states=tuple(emitter.states[name] for name in sorted(emitter.states)),
        groups=groups,
        segments=(Segment("native", tuple(operators)),),
        inputs=inputs,
        outputs={"logits": "output:logits"},
    )
    return plan, tuple(emitter.specs[symbol] for symbol in sorted(emitter.specs))


class _Emitter:
    """One expansion of a program: tables that fill while @step is walked."""

    def __init__(self, program: Program, codegen: Codegen):
        self.program, self.codegen, self.functions = program, codegen, program.functions()
        self.maximum: dict[str, int] = program.fact("max_symbols")
        self.buffers: dict[str, Buffer] = {}
        self.kernels: dict[str, Kernel] = {}
        self.specs: dict[str, KernelSpec] = {}
        self.weights = program.weights()
        self.slots = program.states()
        self.states = {name: self._state(name, slot.spec) for name, slot in self.slots.items()}
        self.next_id = 0

    # ---- states

    def _group(self, spec: StateSpec) -> str:
        if spec.kind == "fixed":
            return "fixed"
        kept = f"window{spec.window}" if spec.window else "full"
        return kept if spec.rate == 1 else f"{kept}_of_{spec.rate}"

    def _state(self, name: str, spec: StateSpec) -> State:
        parts = tuple(StatePart(*part) for part in spec.parts)
        return State(name, spec.kind, self._group(spec), spec.dtype, spec.window, parts, spec.scale, spec.rate)

    def groups(self) -> tuple[CacheGroup, ...]:
        members: dict[str, list[State]] = {}
        for state in self.states.values():
            members.setdefault(state.group, []).append(state)
        return tuple(
            CacheGroup(name, states[0].window, tuple(sorted(s.name for s in states)),
                       self.slots[states[0].name].spec.max_pages, states[0].kind, states[0].rate)
            for name, states in sorted(members.items())
        )

    def paging(self) -> tuple[int, int]:
        """(page size, key block) of all states; a program without states has pages of one token. Those of a row for
        several tokens have other pages, which follow from it."""
        specs = [slot.spec for slot in self.slots.values()]
        found = {(s.page_size, s.key_block) for s in specs if s.rate == 1} or {
            (s.page_size * s.rate, s.key_block) for s in specs}
        if len(found) > 1 or (0, 0) in found:
            raise LegalityError(f"the states' (page size, key block) are {sorted(found)}; expected one pair, not 0.")
        return found.pop() if found else (1, 1)

    def inputs(self, groups: tuple[CacheGroup, ...]) -> dict[str, str]:
        roles = self.program.roles
        for role in roles:
            self._buffer(f"input:{role}", "input", TensorSpec("i32", (DIMENSIONS.get(role, "T"),)))
        for group in groups:
            self._buffer(f"pages:{group.name}", "pages", TensorSpec("i32", ("R", group.max_pages)), source=group.name)
        return {role: f"input:{role}" for role in roles} | {f"pages:{g.name}": f"pages:{g.name}" for g in groups}

    # ---- buffers

    def _buffer(self, handle: str, kind: str, spec: TensorSpec, *, bytes: int | None = None, offset: int = 0,
                source: str = "") -> str:
        if bytes is None:
            bytes = prod(self.maximum.get(d, d) for d in spec.shape) * DTYPE_BYTES[spec.dtype]
        self.buffers[handle] = Buffer(handle, kind, spec.dtype, spec.shape, bytes, offset, source)
        return handle

    def _symbol(self, name: str) -> str:
        if name in self.slots:
            return self._buffer(f"state:{name}", "state", TensorSpec("u8", ()), bytes=0, source=name)
        spec = self.weights[name].spec
        size = weight_bytes(spec, self.codegen.packed_bytes)
        held = TensorSpec("u8", (size,)) if spec.format else spec
        return self._buffer(f"weight:{name}", "weight", held, bytes=size, source=name)

    def _place(self, text: str, spec, frame: int, arguments: list[str], results: list[str]) -> str:
        """The handle of a place as seen from within one function."""
        place = Place.parse(text)
        if place.memory in ("arg", "result"):
            return (arguments if place.memory == "arg" else results)[place.at]
        if place.memory == "symbol":
            return self._symbol(place.at)
        position = place.at + (frame if place.memory == "frame" else 0)
        shape = "x".join(map(str, spec.shape)) or "scalar"
        return self._buffer(f"arena:{position}:{spec.dtype}:{shape}", "arena", spec, offset=position)

    # ---- operators

    def operators(self) -> list[Operator]:
        step = self.functions[STEP]
        self._buffer("output:logits", "output", TensorSpec("f32", ("S", self.program.fact("vocabulary"))))
        arguments = [f"input:{role}" for role in self.program.roles]
        return self._function(step, 0, arguments, ["output:logits"], "")

    def _function(self, function, frame: int, arguments: list[str], results: list[str], path: str) -> list[Operator]:
        found = []
        for op in function.entry_block.operations:
            name = op.operation.name
            if name in ("func.return", "adaptc.get"):
                continue
            values = [*op.operation.operands, *op.operation.results]
            texts = dialect.from_attr(op.operation.attributes["buffers"])
            specs = [*(dialect.to_spec(v.type) for v in values), *scratch_of(op)]
            handles = [self._place(t, s, frame, arguments, results) for t, s in zip(texts, specs)]
            count = len(op.operation.operands)
            source = joined(path, source_of(op))
            if name == "func.call":
                below = frame + dialect.from_attr(op.operation.attributes["frame"])
                found += self._function(self.functions[callee(op)], below, handles[:count], handles[count:], source)
            else:
                found += self._operator(op, handles, count, source)
        return found

    def _operator(self, op, handles: list[str], operands: int, source: str) -> list[Operator]:
        uses = kernel_uses(op)
        if not uses:  # a view: its result is its operand's memory
            return []
        results = len(op.operation.results)
        calls = tuple(self._call(use, handles, operands, results) for use in uses)
        cost = cost_of(spec_of(op), self.codegen.packed_bytes)
        self.next_id += 1
        return [
            Operator(self.next_id - 1, short_name(op), source, self.codegen.name, calls,
                     tuple(handles[operands : operands + results]), cost.flops, cost.traffic)
        ]

    def _call(self, use: KernelUse, handles: list[str], operands: int, results: int) -> Call:
        symbol = self.codegen.symbol(use.kernel)
        self.specs[symbol] = use.kernel
        self.kernels[symbol] = Kernel(symbol, self.codegen.object_of(use.kernel), self.codegen.signature(use.kernel))
        first = {"operand": 0, "state": 0, "pages": 0, "result": operands, "scratch": operands + results}
        buffers = []
        for argument in use.args:
            role, index = argument.split(":")
            handle = handles[first[role] + int(index)]
            if role == "pages":
                handle = f"pages:{self.states[handle.removeprefix('state:')].group}"
            buffers.append(handle)
        return Call(symbol, tuple(buffers))

