"""What every cpu kernel module is made of: the ``Family`` record and a small writer of MLIR text.

A kernel is one ``llvm.func`` of type ``void (void** buffers, int64_t* symbols, int64_t tid, int64_t n)``, written in
the arith, math, scf, vector and llvm dialects. All indices are i64, all memory is reached through ``!llvm.ptr``.
A kernel module offers ``FAMILIES`` (family name → Family) and ``SELECT`` (operator name → select function).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from adaptc.backends.cpu.kernels import instructions
from adaptc.backends.cpu.kernels.values import Value, element, lanes, like, vec
from adaptc.backends.cpu.levels import Level

SYMBOLS = ("T", "R", "S")
"""Order in which kernels find the symbols' values: T tokens, R requests, S sampled rows."""

PTR = "!llvm.ptr"


@dataclass(frozen=True)
class Family:
    """A family of kernels: ``emit(params, symbol, level)`` is the MLIR text of one function for a CPU level,
    ``signature(params)`` its buffers as in ``adaptc.plan.Kernel.signature``. ``choices`` are parameters that tuning may
    set, each with its legal values, the default first: they may change a kernel's speed, and not one bit of what it
    writes."""

    emit: Callable[[Mapping[str, Any], str, Level], str]
    signature: Callable[[Mapping[str, Any]], tuple[str, ...]]
    choices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def chosen_of(choices: Mapping[str, tuple[int, ...]], params: Mapping[str, Any]) -> dict[str, int]:
    """The value of every choice: what ``params`` say, else the default."""
    return {name: params.get(name, values[0]) for name, values in choices.items()}


_HALVES = {("f16", "f32"): "half_to_float", ("f32", "f16"): "float_to_half"}
"""(from, to) of the conversions that not every level has."""


def _literal(value: float, kind: str) -> str:
    """A number as an MLIR literal; floats by their bits, so that nothing is lost in print."""
    if kind == "f32":
        return "0x" + struct.pack(">f", value).hex().upper()
    if kind == "f64":
        return "0x" + struct.pack(">d", value).hex().upper()
    return ("true" if value else "false") if kind == "i1" else str(int(value))


class Loop:
    """An open ``scf.for``: ``index``, the carried ``args``; close with ``end(next values)``; then ``results``."""

    def __init__(self, index: Value, args: tuple[Value, ...], results: tuple[Value, ...]):
        self.index, self.args, self.results = index, args, results
        self.ended: tuple[Value, ...] | None = None

    def end(self, *values: Value) -> None:
        self.ended = values


class Emitter:
    """Writes the body of one function for a CPU level. Methods append an operation and return its result.

    ``lanes`` is how many f32 one vector register of the level holds; ``floats``, ``words``, ``shorts`` and ``bytes``
    are the types of a full register of f32, i32, i16 and i8. Wider and narrower vectors are legal everywhere.

    Binary operations choose the float or integer form by the operands' type; a Python number on either side
    becomes a (splat) constant of the other side's type. Constants are shared and stand at the function's start.
    """

    def __init__(self, level: Level) -> None:
        self.level, self.lanes = level, level.lanes
        self.floats, self.words = vec(self.lanes, "f32"), vec(self.lanes, "i32")
        self.shorts, self.bytes = vec(2 * self.lanes, "i16"), vec(4 * self.lanes, "i8")
        self._lines: list[str] = []
        self._constants: dict[tuple[str, str], Value] = {}
        self._count = 0
        self._depth = 1

    # --- the writer ---------------------------------------------------------------------------------------------

    def fresh(self, type: str) -> Value:
        self._count += 1
        return Value(f"%v{self._count}", type)

    def line(self, text: str) -> None:
        """Appends an operation without a result (or any text that names its own results)."""
        self._lines.append("  " * self._depth + text)

    def op(self, text: str, type: str) -> Value:
        """Appends ``text`` as an operation with one result of ``type``."""
        result = self.fresh(type)
        self.line(f"{result} = {text}")
        return result

    def const(self, value: float | Sequence[float], type: str) -> Value:
        """A constant; for a vector type, a splat or one number a lane."""
        kind = element(type)
        if isinstance(value, (tuple, list)):
            text = "dense<[" + ", ".join(_literal(v, kind) for v in value) + "]>"
        else:
            text = f"dense<{_literal(value, kind)}>" if lanes(type) else _literal(value, kind)
        key = (text, type)
        if key not in self._constants:
            self._constants[key] = Value(f"%c{len(self._constants)}", type)
        return self._constants[key]

    def text(self, symbol: str) -> str:
        """The whole function."""
        constants = [
            f"  {v} = arith.constant {text}" + ("" if type == "i1" else f" : {type}")
            for (text, type), v in self._constants.items()
        ]
        head = f"llvm.func @{symbol}(%buffers: !llvm.ptr, %symbols: !llvm.ptr, %tid: i64, %n: i64) {{"
        return "\n".join([head, *constants, *self._lines, "  llvm.return", "}"]) + "\n"

    # --- arithmetic ---------------------------------------------------------------------------------------------

    def _pair(self, a: Value | float, b: Value | float) -> tuple[Value, Value]:
        if not isinstance(a, Value):
            return self.const(a, b.type), b
        return a, b if isinstance(b, Value) else self.const(b, a.type)

    def _binary(self, float_op: str, int_op: str, a: Value | float, b: Value | float) -> Value:
        a, b = self._pair(a, b)
        name = float_op if element(a.type).startswith("f") else int_op
        return self.op(f"arith.{name} {a}, {b} : {a.type}", a.type)

    def add(self, a, b) -> Value:
        return self._binary("addf", "addi", a, b)

    def sub(self, a, b) -> Value:
        return self._binary("subf", "subi", a, b)

    def mul(self, a, b) -> Value:
        return self._binary("mulf", "muli", a, b)

    def div(self, a, b) -> Value:
        return self._binary("divf", "divsi", a, b)

    def rem(self, a, b) -> Value:
        return self._binary("remf", "remsi", a, b)

    def max(self, a, b) -> Value:
        """Larger of two; a float NaN on one side yields the other side."""
        return self._binary("maxnumf", "maxsi", a, b)

    def min(self, a, b) -> Value:
        """Smaller of two; a float NaN on one side yields the other side."""
        return self._binary("minnumf", "minsi", a, b)

    def and_(self, a, b) -> Value:
        return self._binary("andi", "andi", a, b)

    def or_(self, a, b) -> Value:
        return self._binary("ori", "ori", a, b)

    def xor(self, a, b) -> Value:
        return self._binary("xori", "xori", a, b)

    def shl(self, a, b) -> Value:
        return self._binary("shli", "shli", a, b)

    def shr(self, a, b) -> Value:
        """Logical shift right."""
        return self._binary("shrui", "shrui", a, b)

    def sar(self, a, b) -> Value:
        """Arithmetic shift right."""
        return self._binary("shrsi", "shrsi", a, b)

    def neg(self, a: Value) -> Value:
        return self.op(f"arith.negf {a} : {a.type}", a.type) if element(a.type)[0] == "f" else self.sub(0, a)

    def fma(self, a: Value, b: Value | float, c: Value | float) -> Value:
        """a*b + c, with one rounding at levels that can (``instructions`` says what the others do)."""
        a, b = self._pair(a, b)
        a, c = self._pair(a, c)
        return self.do("fma", a, b, c)

    def math(self, name: str, a: Value) -> Value:
        """A one-operand operation of the math dialect that needs no library: absf, sqrt, floor, roundeven, …"""
        return self.op(f"math.{name} {a} : {a.type}", a.type)

    def compare(self, predicate: str, a, b) -> Value:
        """i1 (or a vector of i1). Float predicates: oeq olt ole ogt oge une …; integer: eq ne slt sle sgt sge ult …"""
        a, b = self._pair(a, b)
        name = "cmpf" if element(a.type).startswith("f") else "cmpi"
        return self.op(f"arith.{name} {predicate}, {a}, {b} : {a.type}", like(a.type, "i1"))

    def select(self, condition: Value, a, b) -> Value:
        """``a`` where the condition (a vector of i1, or one i1 for the whole value) holds, else ``b``."""
        a, b = self._pair(a, b)
        kind = f"{condition.type}, {a.type}" if lanes(condition.type) else a.type
        return self.op(f"arith.select {condition}, {a}, {b} : {kind}", a.type)

    # --- conversions and lanes ----------------------------------------------------------------------------------

    def cast(self, name: str, a: Value, to: str) -> Value:
        """An arith conversion: extf truncf extui extsi trunci sitofp uitofp fptosi bitcast. ``to`` may be an element
        type, which keeps the number of lanes."""
        to = to if lanes(to) or not lanes(a.type) else like(a.type, to)
        if conversion := _HALVES.get((element(a.type), element(to))):
            return self.do(conversion, a, to)
        if name == "bitcast" and lanes(a.type) != lanes(to):
            return self.op(f"vector.bitcast {a} : {a.type} to {to}", to)
        return self.op(f"arith.{name} {a} : {a.type} to {to}", to)

    def splat(self, a: Value, count: int = 0) -> Value:
        """``a`` in every lane of a vector of ``count``, by default of the level's, lanes."""
        to = vec(count or self.lanes, a.type)
        return self.op(f"vector.broadcast {a} : {a.type} to {to}", to)

    def lane(self, a: Value, index: int) -> Value:
        return self.op(f"vector.extract {a}[{index}] : {element(a.type)} from {a.type}", element(a.type))

    def shuffle(self, a: Value, b: Value, indices: Sequence[int]) -> Value:
        """Lanes of ``a`` followed by those of ``b``, picked by index."""
        to = vec(len(indices), element(a.type))
        return self.op(f"vector.shuffle {a}, {b} [{', '.join(map(str, indices))}] : {a.type}, {b.type}", to)

    def reduce(self, combine: Callable[[Value, Value], Value], a: Value) -> Value:
        """All lanes combined into a scalar by halves: lane i with lane i + count/2, always in this order."""
        count = lanes(a.type)
        while count > 1:
            count //= 2
            a = combine(self.shuffle(a, a, range(count)), self.shuffle(a, a, range(count, 2 * count)))
        return self.lane(a, 0)

    def do(self, name: str, *args: Any) -> Value:
        """An operation of the table of instructions (``instructions.TABLE``), by what the level has for it."""
        return (self.native(name) or instructions.FALLBACKS[name])(self, *args)

    def native(self, name: str) -> Callable[..., Value] | None:
        """How the level does an operation of that table by one instruction on whole registers; None if it can't."""
        return instructions.find(self.level, name, self.lanes)

    def tree(self, combine: Callable[[Value, Value], Value], values: Sequence[Value]) -> Value:
        """Values (a power of two of them) combined pairwise: neighbours first."""
        while len(values) > 1:
            values = [combine(a, b) for a, b in zip(values[::2], values[1::2])]
        return values[0]

    def intrinsic(self, name: str, args: Sequence[Value], type: str) -> Value:
        """An LLVM intrinsic by its full name. Those of one machine belong in ``instructions.TABLE``."""
        types = ", ".join(a.type for a in args)
        return self.op(f'llvm.call_intrinsic "{name}"({", ".join(map(str, args))}) : ({types}) -> {type}', type)

    # --- memory -------------------------------------------------------------------------------------------------

    def at(self, pointer: Value, index: Value | int, unit: str = "i8") -> Value:
        """``pointer`` moved by ``index`` elements of type ``unit``."""
        if isinstance(index, int):
            return self.op(f"llvm.getelementptr {pointer}[{index}] : (!llvm.ptr) -> !llvm.ptr, {unit}", PTR)
        return self.op(f"llvm.getelementptr {pointer}[{index}] : (!llvm.ptr, i64) -> !llvm.ptr, {unit}", PTR)

    def load(self, pointer: Value, type: str, align: int = 0, mask: Value | None = None) -> Value:
        """Reads a scalar or vector; ``align`` in bytes, by default that of one element. With a ``mask``, the lanes for
        which it holds: the others are 0 and their memory is not touched."""
        align = align or _bytes(element(type))
        if mask is None:
            return self.op(f"llvm.load {pointer} {{alignment = {align} : i64}} : !llvm.ptr -> {type}", type)
        return self.op(f"llvm.intr.masked.load {pointer}, {mask}, {self.const(0, type)} {{alignment = {align} : i32}} : "
                       f"(!llvm.ptr, {mask.type}, {type}) -> {type}", type)

    def store(self, value: Value, pointer: Value, align: int = 0, mask: Value | None = None) -> None:
        """Writes a scalar or vector; with a ``mask``, the lanes for which it holds."""
        align = align or _bytes(element(value.type))
        if mask is None:
            self.line(f"llvm.store {value}, {pointer} {{alignment = {align} : i64}} : {value.type}, !llvm.ptr")
        else:
            self.line(f"llvm.intr.masked.store {value}, {pointer}, {mask} {{alignment = {align} : i32}} : "
                      f"{value.type}, {mask.type} into !llvm.ptr")

    def prefetch(self, pointer: Value) -> None:
        """Asks for the cache line at ``pointer``, which may lie anywhere, to be read soon."""
        how = "<{cache = 1 : i32, hint = 3 : i32, rw = 0 : i32}>"
        self.line(f'"llvm.intr.prefetch"({pointer}) {how} : (!llvm.ptr) -> ()')

    def mask(self, count: Value, width: int = 0) -> Value:
        """Vector of i1, by default of the level's lanes: the first ``count`` (i64) lanes hold."""
        width = width or self.lanes
        numbers = self.const(tuple(range(width)), vec(width, "i32"))
        return self.compare("slt", numbers, self.splat(self.cast("trunci", count, "i32"), width))

    def load_floats(self, pointer: Value, kind: str, count: int = 0) -> Value:
        """``count`` (by default the level's lanes) consecutive f32, f16, bf16 or i8 numbers as f32 (exactly)."""
        count = count or self.lanes
        if kind == "i8":
            return self.cast("sitofp", self.cast("extsi", self.load(pointer, vec(count, "i8")), "i32"), "f32")
        if kind == "f32":
            return self.load(pointer, vec(count, "f32"))
        if kind == "f16":
            return self.cast("extf", self.load(pointer, vec(count, "f16")), "f32")
        bits = self.cast("extui", self.load(pointer, vec(count, "i16")), "i32")
        return self.cast("bitcast", self.shl(bits, 16), "f32")

    def load_float(self, pointer: Value, kind: str) -> Value:
        """One f32, f16 or bf16 number as f32 (exactly)."""
        if kind == "f32":
            return self.load(pointer, "f32")
        if kind == "f16":
            return self.cast("extf", self.load(pointer, "f16"), "f32")
        return self.cast("bitcast", self.shl(self.cast("extui", self.load(pointer, "i16"), "i32"), 16), "f32")

    # --- control ------------------------------------------------------------------------------------------------

    @contextmanager
    def loop(self, low: Value | int, high: Value | int, step: Value | int = 1,
             init: Sequence[Value] = ()) -> Iterator[Loop]:
        """``scf.for`` over i64 with carried values ``init``::

            with e.loop(0, count, init=[zero]) as loop:
                loop.end(e.add(loop.args[0], ...))
            total, = loop.results
        """
        low, high, step = (x if isinstance(x, Value) else self.const(x, "i64") for x in (low, high, step))
        index = self.fresh("i64")
        args = tuple(self.fresh(v.type) for v in init)
        types = ", ".join(v.type for v in init)
        head = f"scf.for {index} = {low} to {high} step {step}"
        if init:
            name = self.fresh("")
            results = tuple(Value(f"{name}#{i}" if len(init) > 1 else f"{name}", v.type) for i, v in enumerate(init))
            pairs = ", ".join(f"{a} = {v}" for a, v in zip(args, init))
            head = f"{name}{f':{len(init)}' if len(init) > 1 else ''} = {head} iter_args({pairs}) -> ({types})"
        else:
            results = ()
        self.line(f"{head} : i64 {{")
        self._depth += 1
        loop = Loop(index, args, results)
        yield loop
        if init:
            assert loop.ended is not None and [v.type for v in loop.ended] == [v.type for v in init]
            self.line(f"scf.yield {', '.join(map(str, loop.ended))} : {types}")
        self._depth -= 1
        self.line("}")

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """``scf.if`` without results."""
        self.line(f"scf.if {condition} {{")
        self._depth += 1
        yield
        self._depth -= 1
        self.line("}")

    # --- the kernel's arguments ---------------------------------------------------------------------------------

    tid = Value("%tid", "i64")
    n = Value("%n", "i64")

    def buffer(self, index: int) -> Value:
        """Pointer number ``index`` of the kernel's signature. Ask for it outside all loops."""
        return self.load(self.at(Value("%buffers", PTR), index, PTR), PTR, 8)

    def size(self, dimension: int | str) -> Value:
        """An i64 dimension: a static number or the value of a symbol. Ask for it outside all loops."""
        if isinstance(dimension, int):
            return self.const(dimension, "i64")
        return self.load(self.at(Value("%symbols", PTR), SYMBOLS.index(dimension), "i64"), "i64")

    def share(self, count: Value | int) -> tuple[Value, Value]:
        """This thread's contiguous part [low, high) of ``count`` items."""
        low = self.div(self.mul(self.tid, count), self.n)
        return low, self.div(self.mul(self.add(self.tid, 1), count), self.n)


def _bytes(kind: str) -> int:
    return 8 if kind == PTR else max(1, int(kind.lstrip("bfi")) // 8)
