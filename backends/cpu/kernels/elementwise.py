"""Elementwise operators, alone or as a group: one pass over memory, whatever the group's length.

The result's dimensions are folded to as few as the operands' broadcasting allows; the last one is the *columns*,
taken a register at a time, the others are the *rows*. Threads share out (row, piece of 1024 columns) pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from adaptc.backends.cpu.kernels import vmath
from adaptc.backends.cpu.kernels.base import Emitter, Family, Value, vec
from adaptc.backends.cpu.levels import Level
from adaptc.protocol import KernelSpec, KernelUse, OpSpec, Selection, TensorSpec

PIECE = 1024
"""Columns of one unit of work; a multiple of the lanes."""

CARRIED = {"f32": "f32", "f16": "f32", "bf16": "f32", "i64": "i64", "i32": "i32", "i8": "i32", "u8": "i32", "i1": "i1"}
"""Element dtype in memory → element type of the registers that hold it."""

STORED = {"f32": "f32", "f16": "i16", "bf16": "i16", "i64": "i64", "i32": "i32", "i8": "i8", "u8": "i8", "i1": "i8"}
"""Element dtype → type it is read and written as."""

PREDICATES = {
    "lt": ("olt", "slt"), "le": ("ole", "sle"), "gt": ("ogt", "sgt"), "ge": ("oge", "sge"), "eq": ("oeq", "eq"),
    "ne": ("une", "ne"),
}  # fmt: skip
"""Predicate → names for floats and for integers."""

BITS = {"add": Emitter.or_, "max": Emitter.or_, "mul": Emitter.and_, "min": Emitter.and_, "sub": Emitter.xor}
"""What numpy's arithmetic means on truth values."""

WHOLE = {
    "add": Emitter.add, "sub": Emitter.sub, "mul": Emitter.mul, "max": Emitter.max, "min": Emitter.min,
    "neg": Emitter.neg, "abs": lambda e, x: e.max(x, e.neg(x)),
}  # fmt: skip
"""Arithmetic on integers."""

ARITHMETIC = {"f32": {**vmath.UNARY, **vmath.BINARY}, "i64": WHOLE, "i32": WHOLE, "i1": BITS}
"""dtype → operators on it."""


CONVERSIONS = {
    ("i1", "f32"): "uitofp", ("i32", "f32"): "sitofp", ("i64", "f32"): "sitofp", ("f32", "i32"): "fptosi",
    ("f32", "i64"): "fptosi", ("i1", "i32"): "extui", ("i1", "i64"): "extui", ("i32", "i64"): "extsi",
    ("i64", "i32"): "trunci",
}  # fmt: skip
"""(from, to) in registers → arith conversion."""


# ---- elements in memory


def dense(operand: Any) -> bool:
    """A tensor in plain row-major order, of a dtype that registers can hold; matrices of a format are packed."""
    if not isinstance(operand, TensorSpec) or operand.dtype not in STORED:
        return False
    return operand.format is None or (operand.format.name == "f32" and len(operand.shape) < 2)


def widen(e: Emitter, raw: Value, dtype: str) -> Value:
    """Registers from elements as they are stored (scalar or vector)."""
    if dtype == "f16":
        return e.cast("extf", e.cast("bitcast", raw, "f16"), "f32")
    if dtype == "bf16":
        return e.cast("bitcast", e.shl(e.cast("extui", raw, "i32"), 16), "f32")
    if dtype in ("i8", "u8"):
        return e.cast("extsi" if dtype == "i8" else "extui", raw, "i32")
    return e.compare("ne", raw, 0) if dtype == "i1" else raw


def narrow(e: Emitter, value: Value, dtype: str) -> Value:
    """Elements as they are stored, floats rounded to nearest even."""
    if dtype == "f16":
        return e.cast("bitcast", e.cast("truncf", value, "f16"), "i16")
    if dtype == "bf16":
        bits = e.cast("bitcast", value, "i32")
        up = e.add(e.and_(e.shr(bits, 16), 1), 0x7FFF)
        # a NaN whose payload is in the lower half must not become infinite
        rounded = e.select(e.compare("uno", value, value), e.or_(bits, 1 << 22), e.add(bits, up))
        return e.cast("trunci", e.shr(rounded, 16), "i16")
    if dtype in ("i8", "u8"):
        return e.cast("trunci", value, "i8")
    return e.cast("extui", value, "i8") if dtype == "i1" else value


def convert(e: Emitter, x: Value, source: str, target: str) -> Value:
    """``cast``: floats to integers by truncation, to truth values by ``!= 0``."""
    start, end = CARRIED[source], CARRIED[target]
    if target == "i1":
        return x if source == "i1" else e.compare("une" if start == "f32" else "ne", x, 0)
    if start != end:
        x = e.cast(CONVERSIONS[start, end], x, end)
    exact = target in ("f32", "i32", "i64") or source == target
    return x if exact else widen(e, narrow(e, x, target), target)


# ---- the body


Body = Sequence[tuple[str, Sequence[int], Sequence[tuple[str, Any]]]]


def dtypes_of(body: Body, operands: Sequence[str]) -> list[str] | None:
    """Dtypes of all values of a body (operands first), or None when there is a row that can't be emitted."""
    kinds = list(operands)
    if not set(kinds) <= CARRIED.keys():
        return None
    for name, indices, attrs in body:
        args, attrs = [kinds[i] for i in indices], dict(attrs)
        if name == "constant":
            known = attrs["dtype"] in CARRIED and isinstance(attrs["value"], (int, float))
            kind = attrs["dtype"]
        elif name == "cast":
            known, kind = attrs["dtype"] in CARRIED, attrs["dtype"]
        elif name == "compare":
            known, kind = args[0] == args[1], "i1"
        elif name == "select":
            known, kind = args[0] == "i1" and args[1] == args[2], args[1]
        else:
            known, kind = len(set(args)) == 1 and name in ARITHMETIC.get(args[0], ()), args[0]
        if not known:
            return None
        kinds.append(kind)
    return kinds


def run_body(e: Emitter, body: Body, values: Sequence[Value], kinds: Sequence[str]) -> list[Value]:
    """Registers of all values of a body, from those of its operands."""
    values = list(values)
    constants: dict[int, float] = {}
    for name, indices, attrs in body:
        args, attrs = [values[i] for i in indices], dict(attrs)
        kind = kinds[indices[0]] if indices else ""
        if name == "constant":
            constants[len(values)] = attrs["value"]
            register = CARRIED[attrs["dtype"]]
            result = convert(e, e.const(attrs["value"], vec(e.lanes, register)), register, attrs["dtype"])
        elif name == "cast":
            result = convert(e, args[0], kind, attrs["dtype"])
        elif name == "compare":
            result = e.compare(PREDICATES[attrs["predicate"]][CARRIED[kind] != "f32"], *args)
        elif name == "select":
            result = e.select(*args)
        elif name == "pow" and indices[1] in constants:
            result = vmath.power(e, args[0], constants[indices[1]])
        else:
            result = ARITHMETIC[kind][name](e, *args)
        values.append(result)
    return values


def used(body: Body, operands: int, yields: Sequence[int]) -> tuple[Body, list[int], list[int]]:
    """The rows and operands that ``yields`` depend on, renumbered: (body, operands kept, yields)."""
    wanted = set(yields)
    for row in range(len(body) - 1, -1, -1):
        if operands + row in wanted:
            wanted.update(body[row][1])
    place = {old: new for new, old in enumerate(sorted(wanted))}
    kept = [i for i in place if i < operands]
    rows = tuple(
        (name, tuple(place[i] for i in indices), attrs)
        for row, (name, indices, attrs) in enumerate(body)
        if operands + row in wanted
    )
    return rows, kept, [place[i] for i in yields]


# ---- the loops


def fold(shape: Sequence[int | str], operands: Sequence[Sequence[int | str]]) -> list[tuple[list, tuple[bool, ...]]]:
    """The result's dimensions with neighbours joined where every operand has both or lacks both: [(factors, which
    operands have it)]. Dimensions of 1 vanish; at least one dimension remains."""
    dims: list[tuple[list, tuple[bool, ...]]] = []
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        at = axis - len(shape)
        has = tuple(len(o) >= -at and o[at] != 1 for o in operands)
        if dims and dims[-1][1] == has:
            dims[-1][0].append(size)
        else:
            dims.append(([size], has))
    return dims or [([1], (True,) * len(operands))]


def product(e: Emitter, factors: Sequence[int | str]) -> Value:
    """A size as i64: the static part times the symbols."""
    result = e.const(math.prod(f for f in factors if isinstance(f, int)), "i64")
    for name in (f for f in factors if isinstance(f, str)):
        result = e.mul(e.size(name), result)
    return result


def split(e: Emitter, index: Value, sizes: Sequence[Value]) -> list[Value]:
    """A flat index as one index a dimension, row-major."""
    parts: list[Value] = []
    for size in reversed(sizes[1:]):
        parts.append(e.rem(index, size))
        index = e.div(index, size)
    return [index, *reversed(parts)] if sizes else []


def emit(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    e = Emitter(level)
    operands, results, body = params["operands"], params["results"], params["body"]
    kinds = dtypes_of(body, [dtype for dtype, _ in operands])
    pointers = [e.buffer(i) for i in range(len(operands) + len(results))]
    dims = fold(params["shape"], [shape for _, shape in operands])
    sizes = [product(e, factors) for factors, _ in dims]
    *lead, columns = sizes
    rows = product(e, [f for factors, _ in dims[:-1] for f in factors])
    pieces = e.div(e.add(columns, PIECE - 1), PIECE)
    low, high = e.share(e.mul(rows, pieces))
    with e.loop(low, high) as unit:
        row, piece = e.div(unit.index, pieces), e.rem(unit.index, pieces)
        indices = split(e, row, lead)
        starts: list[Value] = []
        for number, (dtype, _) in enumerate(operands):
            offset = e.const(0, "i64")
            for index, size, (_, has) in zip(indices, lead, dims):
                if has[number]:
                    offset = e.add(e.mul(offset, size), index)
            if dims[-1][1][number]:
                offset = e.mul(offset, columns)
            starts.append(e.at(pointers[number], offset, STORED[dtype]))
        starts += [e.at(p, e.mul(row, columns), STORED[d]) for p, d in zip(pointers[len(operands) :], results)]
        # operands without columns are one number a row
        fixed = [
            None if has else e.splat(widen(e, e.load(start, STORED[dtype]), dtype))
            for has, start, (dtype, _) in zip(dims[-1][1], starts, operands)
        ]

        def some(column: Value, mask: Value | None) -> None:
            values = []
            for value, start, (dtype, _) in zip(fixed, starts, operands):
                if value is None:
                    place, kind = e.at(start, column, STORED[dtype]), vec(e.lanes, STORED[dtype])
                    raw = e.load(place, kind, mask=mask)
                    value = widen(e, raw, dtype)
                values.append(value)
            values = run_body(e, body, values, kinds)
            for index, start, dtype in zip(params["yields"], starts[len(operands) :], results):
                raw, place = narrow(e, values[index], dtype), e.at(start, column, STORED[dtype])
                e.store(raw, place, mask=mask)

        first = e.mul(piece, PIECE)
        last = e.min(e.add(first, PIECE), columns)
        tail = e.rem(last, e.lanes)
        whole = e.sub(last, tail)
        with e.loop(first, whole, e.lanes) as column:
            some(column.index, None)
        if math.prod(f for f in dims[-1][0] if isinstance(f, int)) % e.lanes:
            with e.when(e.compare("sgt", tail, 0)):
                some(whole, e.mask(tail))
    return e.text(symbol)


def describe(dtype: str, shape: Sequence[int | str]) -> str:
    """A tensor as signatures write it: ``f32[T,9,64]``."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        *(f"in:{describe(*operand)}" for operand in params["operands"]),
        *(f"out:{describe(dtype, params['shape'])}" for dtype in params["results"]),
    )


FAMILIES = {"group": Family(emit, signature)}


# ---- selection


def select_group(spec: OpSpec) -> Selection | None:
    """One kernel for each shape among the results (nearly always one)."""
    body, yields = spec.attrs["body"], spec.attrs["yields"]
    if not all(map(dense, spec.operands)):
        return None
    kinds = dtypes_of(body, [o.dtype for o in spec.operands])
    if kinds is None:
        return None
    uses = []
    for shape in dict.fromkeys(r.shape for r in spec.results):
        numbers = [i for i, r in enumerate(spec.results) if r.shape == shape]
        rows, kept, outs = used(body, len(spec.operands), [yields[i] for i in numbers])
        operands = tuple((spec.operands[i].dtype, spec.operands[i].shape) for i in kept)
        params = (
            ("body", rows),
            ("operands", operands),
            ("results", tuple(spec.results[i].dtype for i in numbers)),
            ("shape", shape),
            ("yields", tuple(outs)),
        )
        args = tuple(f"operand:{i}" for i in kept) + tuple(f"result:{i}" for i in numbers)
        uses.append(KernelUse(KernelSpec("group", params), args))
    return Selection(tuple(uses))


def select_one(spec: OpSpec) -> Selection | None:
    """An elementwise operator by itself: a group of one."""
    count = len(spec.operands)
    body = ((spec.op, tuple(range(count)), tuple(sorted(spec.attrs.items()))),)
    return select_group(OpSpec("group", spec.operands, spec.results, {"body": body, "yields": (count,)}))


SELECT = {
    "group": select_group,
    **{name: select_one for name in (*vmath.UNARY, *vmath.BINARY, "compare", "select", "cast")},
}
