"""ATen operators and what they become: one row each.

A rule takes the walk and the operator's own arguments, in ATen's order (see PyTorch's native_functions.yaml): tensors
are values of the dialect, numbers are numbers, "T" is the number of tokens and "T + 2" two more. ``w.shape`` and
``w.dtype`` are the result's; operators whose result says all that they do (views, casts) read nothing else.
"""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np
from torch_mlir import ir

from adaptc.errors import CaptureError
from adaptc.ir.rewrite import definer, scalar, spec
from adaptc.ops.recurrent import pooled
from adaptc.protocol import StateSpec

Rule = Callable[..., Any]

WHOLE = 2**62
"""A slice's limit from here on means the end."""


# ---- elementwise


@dataclass(frozen=True)
class Complex:
    """A complex tensor, as its two parts."""

    real: ir.Value
    imag: ir.Value


def _parts(rule: Rule) -> Rule:
    """The rule of an operator that treats both parts of a complex tensor alike."""

    def each(w, x, *args, **kwargs):
        if isinstance(x, Complex):
            return Complex(rule(w, x.real, *args, **kwargs), rule(w, x.imag, *args, **kwargs))
        return rule(w, x, *args, **kwargs)

    return each


def _mul(w, x, y):
    if isinstance(y, Complex):
        x, y = y, x
    if not isinstance(x, Complex):
        return _binary("mul", 1)(w, x, y)
    if not isinstance(y, Complex):
        return Complex(w.b.mul(x.real, w.value(y)), w.b.mul(x.imag, w.value(y)))
    return Complex(w.b.sub(w.b.mul(x.real, y.real), w.b.mul(x.imag, y.imag)),
                   w.b.add(w.b.mul(x.real, y.imag), w.b.mul(x.imag, y.real)))


def _polar(w, size, angle):
    return Complex(w.b.mul(size, w.b.cos(angle)), w.b.mul(size, w.b.sin(angle)))


def _view_as_complex(w, x):
    axis = w.b.rank(x) - 1
    return Complex(*(w.b.reshape(_cut(w, x, axis, i, i + 1), shape=w.shape) for i in range(2)))


def _view_as_real(w, x):
    return _stack(w, (x.real, x.imag), len(w.shape) - 1)


def _unary(name: str) -> Rule:
    return lambda w, x: w.b.op(name, w.value(x))


def _binary(name: str, neutral: float | None = None, swapped: bool = False) -> Rule:
    """``neutral``: the second operand that changes nothing (x + 0, x · 1)."""

    def rule(w, x, y, alpha=1):
        if isinstance(y, (int, float)) and y == neutral and w.b.spec(x).dtype == w.dtype:
            return x
        x, y = (w.value(y), w.value(x)) if swapped else (w.value(x), w.value(y))
        if alpha != 1:
            y = w.b.mul(y, w.value(alpha))
        return w.b.op(name, x, y)

    def exact(w, x, y, alpha=1):
        """Numbers aren't rounded to a tensor's short dtype: torch computes in float32."""
        numbers = isinstance(x, (int, float)) or isinstance(y, (int, float)) or alpha != 1
        if w.dtype not in ("f16", "bf16") or not numbers:
            return rule(w, x, y, alpha)
        x, y = (v if isinstance(v, (int, float)) else w.value(v, "f32") for v in (x, y))
        short, w.dtype = w.dtype, "f32"
        try:
            return w.b.cast(rule(w, x, y, alpha), dtype=short)
        finally:
            w.dtype = short

    return exact


WIDENING = ("i1", "i8", "i32", "f16", "bf16", "f32", "f64")
"""Of two dtypes of a comparison, the later one."""


def _compare(predicate: str) -> Rule:
    def rule(w, x, y):
        kinds = {bool: "i1", int: "i32", float: "f32"}
        found = [w.b.spec(v).dtype if isinstance(v, ir.Value) else kinds.get(type(v), "i32") for v in (x, y)]
        kind = max(found, key=WIDENING.index)
        return w.b.compare(w.value(x, kind), w.value(y, kind), predicate=predicate)

    return rule


def _gelu(w, x, approximate="none"):
    return w.b.op({"none": "gelu", "tanh": "gelu_tanh"}[approximate], w.value(x))


def _clamp(w, x, low=None, high=None):
    x = w.value(x)
    x = x if low is None else w.b.max(x, w.value(low))
    return x if high is None else w.b.min(x, w.value(high))


def _square(w, x):
    return w.b.mul(w.value(x), w.value(x))


def _where(w, condition, x, y):
    return w.b.select(w.value(condition, "i1"), w.value(x), w.value(y))


def _not(w, x):
    return w.b.compare(w.value(x, "i1"), w.value(0, "i1"), predicate="eq")


def _of_conditions(rule: Rule) -> Rule:
    """The rule of an operator on bits, which adaptc has for conditions alone."""

    def checked(w, *args):
        if w.dtype != "i1":
            raise CaptureError(f"it works on the bits of {w.dtype}; adaptc captures what it does to conditions.")
        return rule(w, *args)

    return checked


def _and(w, x, y):
    return w.b.select(w.value(x, "i1"), w.value(y, "i1"), w.value(0, "i1"))


def _or(w, x, y):
    return w.b.select(w.value(x, "i1"), w.value(1, "i1"), w.value(y, "i1"))


def _log1p(w, x):
    """log(1 + x), as accurate for small x as for others: what is lost of x in u = 1 + x is put right by x / (u - 1)."""
    x, one = w.value(x, "f32"), w.b.scalar(1.0)
    u = w.b.add(x, one)
    lost = w.b.compare(u, one, predicate="eq")
    exact = w.b.mul(w.b.log(u), w.b.div(x, w.b.select(lost, one, w.b.sub(u, one))))
    large = w.b.compare(u, x, predicate="eq")  # the log itself is right, and the quotient of infinities isn't a number
    return w.b.select(lost, x, w.b.select(large, w.b.log(u), exact))


EXACT_FROM = 18
"""From here on log(1 + exp(x)) is x in float32."""


def _softplus(w, x, beta=1, threshold=20):
    """log(1 + exp(beta·x)) / beta, and x where beta·x is above the threshold, which matters for a small one only."""
    scaled = x if beta == 1 else w.b.mul(w.value(x), w.value(beta))
    result = w.b.add(w.b.max(scaled, w.value(0)), _log1p(w, w.b.exp(w.b.neg(w.b.abs(scaled)))))
    result = result if beta == 1 else w.b.mul(result, w.value(1 / beta))
    if threshold >= EXACT_FROM:
        return result
    return w.b.select(w.b.compare(scaled, w.value(threshold), predicate="gt"), w.value(x), result)


def _log_sigmoid(w, x):
    return w.b.sub(w.b.min(x, w.value(0)), _log1p(w, w.b.exp(w.b.neg(w.b.abs(x)))))


WHOLE_FROM = float(1 << 23)
"""From here on every float32 is a whole number."""


def _floor(w, x):
    """What a cast cuts off is put back where that was upwards."""
    x = w.value(x)
    cut = w.b.cast(w.b.cast(x, dtype="i32"), dtype=w.b.dtype(x))
    lower = w.b.sub(cut, w.b.cast(w.b.compare(x, cut, predicate="lt"), dtype=w.b.dtype(x)))
    return w.b.select(w.b.compare(w.b.abs(x), w.value(WHOLE_FROM), predicate="lt"), lower, x)


def _expm1(w, x):
    """eˣ - 1 = tanh(x/2) · (eˣ + 1), exact also where eˣ is nearly 1."""
    x = w.value(x)
    return w.b.mul(w.b.tanh(w.b.mul(x, w.value(0.5))), w.b.add(w.b.exp(x), w.value(1)))


# ---- views and moves


def _same(w, x, *_, **__):
    return x


def _cast(w, x, *_, **__):
    return w.value(x)


def _reshape(w, x, *_, **__):
    return x if w.b.shape(x) == w.shape else w.b.reshape(x, shape=w.shape)


def _permute(w, x, dims):
    rank = w.b.rank(x)
    perm = tuple(d % rank for d in dims)
    return x if perm == tuple(range(rank)) else w.b.transpose(x, perm=perm)


def _transpose(w, x, i, j):
    perm = list(range(w.b.rank(x)))
    perm[i], perm[j] = perm[j], perm[i]
    return w.b.transpose(x, perm=tuple(perm))


def _t(w, x):
    return w.b.transpose(x, perm=tuple(reversed(range(w.b.rank(x)))))


def _expand(w, x, *_, **__):
    return _broadcast(w, x, w.shape)


def _broadcast(w, x: ir.Value, shape) -> ir.Value:
    """x to ``shape``, numpy's way. A new token dimension takes its length from the step's positions."""
    own = w.b.shape(x)
    if own == shape:
        return x
    dims = tuple(range(len(shape) - len(own), len(shape)))
    grows = "T" in shape and "T" not in own
    return w.b.broadcast(x, *([w.positions] if grows else []), shape=shape, dims=dims)


def _slice(w, x, dim=0, start=None, end=None, step=1):
    return _cut(w, x, dim, start, end, step)


def _cut(w, x, dim, start, end, step=1):
    shape = w.b.shape(x)
    dim %= len(shape)
    size = shape[dim]
    ends = end is None or end == size or (isinstance(end, int) and end >= WHOLE)
    whole = start in (None, 0, f"-{size}") and step == 1 and ends
    if whole:
        return x
    if isinstance(size, int) and isinstance(start or 0, int) and step == 1 and _beyond(end) == (start or 0):
        return _at_positions(w, x, dim, start or 0)
    if isinstance(size, str) or isinstance(start, str) or isinstance(end, str):
        raise CaptureError(f"it cuts [{start}:{end}:{step}] out of a dimension of {size}, the step's tokens, which "
                           "would make a token's result depend on how many others there are.")
    lo, hi, step = slice(start, end, step).indices(size)
    starts, limits, strides = [0] * len(shape), [-1 if d == "T" else d for d in shape], [1] * len(shape)
    starts[dim], limits[dim], strides[dim] = lo, max(hi, lo), step
    return w.b.slice(x, starts=tuple(starts), limits=tuple(limits), strides=tuple(strides))


def _beyond(number: Any) -> int | None:
    """The c of a number of tokens T + c; None for another number."""
    found = re.fullmatch(r"T(?: ([+-] \d+))?", number) if isinstance(number, str) else None
    return int((found[1] or "0").replace(" ", "")) if found else None


def _at_positions(w, x, dim, first: int) -> ir.Value:
    """A table cut to as many rows as there are tokens, from row ``first`` on: of a sequence read from its start, each
    token has the row of its position."""
    return _picked(w, x, dim, w.b.add(w.positions, w.value(first, "i32")) if first else w.positions)


def _picked(w, x, dim, rows: ir.Value, exact: bool = False) -> ir.Value:
    """Slices of x along ``dim`` by their numbers i32[n]."""
    shape, rank = w.b.shape(x), w.b.rank(x)
    (count,) = w.b.shape(rows)
    dim %= rank
    _end(w, rows, shape[dim])
    found = (*shape[:dim], count, *shape[dim + 1 :])
    flat = _elements(x)
    if flat.size and (flat == flat[0]).all():
        return _broadcast(w, w.b.constant(value=flat[0].item(), shape=(), dtype=w.b.dtype(x)), found)
    if flat.size == shape[dim] and w.b.dtype(x) == "i32" and (flat == np.arange(flat.size)).all():
        return w.b.reshape(rows, shape=found)
    if (whole := definer(x)) is not None and whole.name == "cast" and definer(whole.operands[0]).name == "get":
        picked = _picked(w, whole.operands[0], dim, rows, exact=True)
        return w.b.cast(picked, dtype=w.b.dtype(x))  # of a weight of whole numbers, only what is picked
    order = (dim, *(i for i in range(rank) if i != dim))
    turned = x if dim == 0 else w.b.transpose(x, perm=order)
    if rank == 2 and w.b.dtype(x) == "f32" and not exact and not w.is_table(x):
        picked = w.b.embedding(rows, turned)
    else:
        picked = w.b.gather_rows(turned, rows)
    return picked if dim == 0 else w.b.transpose(picked, perm=tuple(order.index(i) for i in range(rank)))


def _elements(x: ir.Value) -> np.ndarray:
    """A constant's elements in their order, one where all are the same; none of another value."""
    node = definer(x)
    while node is not None and node.name == "reshape":
        node = definer(node.operands[0])
    return np.ravel(node.attrs["value"]) if node is not None and node.name == "constant" else np.arange(0)


def _end(w, rows: ir.Value, size: int | str) -> None:
    """Positions that choose among a table's ``size`` rows may not pass its last one."""
    most = _most(w, rows) if isinstance(size, int) else None
    if most is not None:
        w.end_at(size - most)


def _most(w, x: ir.Value) -> int | None:
    """The least c for which an index is known to be at most its token's position + c, by how it was made."""
    if x == w.positions:
        return 0
    node = definer(x)
    followed = ("reshape", "cast", "broadcast", "min", "mul", "add", "sub")
    if node is None or node.name not in followed or spec(x).dtype != "i32":
        return None
    known = [_most(w, operand) for operand in node.operands]
    if node.name in ("reshape", "cast", "broadcast"):
        return known[0]
    if node.name == "min":
        return min((most for most in known if most is not None), default=None)
    if node.name == "mul" and any(_condition(operand) is not None for operand in node.operands):
        most = next((most for most in known if most is not None), None)
        return None if most is None else max(most, 0)
    (one, other), (first, second) = node.operands, known
    if first is not None and (number := scalar(other)) is not None and node.name != "mul":
        return first + int(number if node.name == "add" else -number)
    if second is not None and (number := scalar(one)) is not None and node.name == "add":
        return second + int(number)
    return None


def _condition(x: ir.Value) -> ir.Value | None:
    """The truth values that a number is 1 or 0 by; None when it may be another number."""
    if spec(x).dtype == "i1":
        return x
    node = definer(x)
    return _condition(node.operands[0]) if node is not None and node.name == "cast" else None


def _select(w, x, dim, index):
    size = w.b.shape(x)[dim]
    if not isinstance(index, int):
        raise CaptureError(f"it picks row {index} by the number of tokens, which other tokens of a step would change.")
    index = index + size if isinstance(size, int) and index < 0 else index
    return w.b.reshape(_cut(w, x, dim, index, index + 1), shape=w.shape)


def _pieces(w, x, dim, sizes):
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(_cut(w, x, dim, end - size, end) for size, end in zip(sizes, ends))


def _static(w, x, dim) -> int:
    size = w.b.shape(x)[dim]
    if isinstance(size, str):
        raise CaptureError(f"it splits a dimension of {size}, the step's tokens.")
    return size


def _split(w, x, size, dim=0):
    if not isinstance(size, int):
        return _pieces(w, x, dim, size)
    whole = _static(w, x, dim)
    return _pieces(w, x, dim, [min(size, whole - i) for i in range(0, whole, size)])


def _chunk(w, x, chunks, dim=0):
    return _split(w, x, -(-_static(w, x, dim) // chunks), dim)


def _unbind(w, x, dim=0):
    shape = list(w.b.shape(x))
    whole = _static(w, x, dim)
    del shape[dim]
    return tuple(w.b.reshape(_cut(w, x, dim, i, i + 1), shape=tuple(shape)) for i in range(whole))


def _cat(w, tensors, dim=0):
    return w.b.concat(*(w.value(x) for x in tensors), axis=dim % len(w.shape))


def _stack(w, tensors, dim=0):
    axis = dim % len(w.shape)
    shape = w.shape[:axis] + (1,) + w.shape[axis + 1 :]
    return w.b.concat(*(w.b.reshape(w.value(x), shape=shape) for x in tensors), axis=axis)


def _flip(w, x, dims):
    for dim in dims:
        size = _static(w, x, dim)
        x = _picked(w, x, dim, w.b.constant(value=list(reversed(range(size))), shape=(size,), dtype="i32"))
    return x


def _copy(w, x, y, *_):
    """y in the shape of x, whose elements it replaces."""
    return _broadcast(w, w.value(y), w.shape)


def _slice_scatter(w, x, y, dim=0, start=None, end=None, step=1):
    """x with y in the place of its slice: what lies before, y, what lies after; of ``step`` elements the first."""
    size, dim = w.b.shape(x)[dim], dim % len(w.shape)
    if isinstance(size, str):
        raise CaptureError(f"it writes [{start}:{end}:{step}] of a dimension of {size}; expected one of a static size.")
    lo, hi, step = slice(start, end, step).indices(size)
    written, y = range(lo, hi, step), w.value(y)
    if step != 1:
        before, after = w.shape[:dim], w.shape[dim + 1 :]
        y = w.b.reshape(y, shape=(*before, len(written), 1, *after))
        y = _broadcast(w, y, (*before, len(written), step, *after))
        y = w.b.reshape(y, shape=(*before, len(written) * step, *after))
        hi = min(lo + len(written) * step, size)
        y = _cut(w, y, dim, 0, hi - lo)
    pieces = ([_cut(w, x, dim, 0, lo)] if lo else []) + [y] + ([_cut(w, x, dim, hi, size)] if hi < size else [])
    joined = pieces[0] if len(pieces) == 1 else w.b.concat(*pieces, axis=dim)
    if step == 1:
        return joined
    shape = tuple(size if i == dim else 1 for i in range(len(w.shape)))
    here = w.b.constant(value=[i in written for i in range(size)], shape=(size,), dtype="i1")
    return w.b.select(w.b.reshape(here, shape=shape), joined, w.value(x))


def _select_scatter(w, x, y, dim, index):
    dim %= w.b.rank(x)
    y = w.b.reshape(w.value(y), shape=(*w.shape[:dim], 1, *w.shape[dim + 1 :]))
    index %= _static(w, x, dim)
    return _slice_scatter(w, x, y, dim, index, index + 1)


def _repeat(w, x, repeats):
    """Each dimension as often as said; new ones stand in front."""
    own = (1,) * (len(repeats) - w.b.rank(x)) + w.b.shape(x)
    apart = w.b.reshape(x, shape=tuple(d for dim in own for d in (1, dim)))
    wide = tuple(d for times, dim in zip(repeats, own) for d in (times, dim))
    return _reshape(w, _broadcast(w, apart, wide))


def _repeat_interleave(w, x, repeats, dim=None, output_size=None):
    """Each element as often as said, side by side."""
    own = w.b.shape(x)
    if dim is None or not isinstance(repeats, int):
        raise CaptureError("it repeats elements of all dimensions, or each as often as a tensor says; expected a number and "
                           "a dimension.")
    place = dim % len(own) + 1
    apart = w.b.reshape(x, shape=own[:place] + (1,) + own[place:])
    return _reshape(w, _broadcast(w, apart, own[:place] + (repeats,) + own[place:]))


# ---- choices


def _last(w, x, dim, what: str) -> None:
    if dim % w.b.rank(x) != w.b.rank(x) - 1:
        raise CaptureError(f"it {what} along dimension {dim} of {w.b.shape(x)}; expected the last one.")


def _top_k(w, x, k, dim=-1, largest=True, sorted=True):
    _last(w, x, dim, "chooses")
    if not largest:
        raise CaptureError("it chooses the smallest elements; adaptc's top_k chooses the largest.")
    return w.b.top_k(x, k=k)


def _extreme(kind: str) -> Rule:
    """Of two tensors, element by element; or of one, and the largest's index along the last dimension."""

    def rule(w, x, dim=None, keepdim=False):
        if isinstance(dim, ir.Value):
            return w.b.op(kind, w.value(x), w.value(dim))
        value = _reduced(w, x, kind, dim, keepdim)
        if dim is None:
            return value
        if kind != "max" or dim % w.b.rank(x) != w.b.rank(x) - 1:
            return value, None
        _, index = w.b.top_k(x, k=1)
        return value, index if keepdim else w.b.reshape(index, shape=w.b.shape(x)[:-1])

    return rule


def _gather(w, x, dim, index, sparse_grad=False):
    _last(w, x, dim, "picks")
    if all(d == 1 for d in w.b.shape(x)[:-1]):
        return _reshape(w, _picked(w, w.b.reshape(x, shape=w.b.shape(x)[-1:]), 0, _numbers(w, index)))
    return w.b.take_along(x, w.value(index, "i32"))


def _numbers(w, index: ir.Value) -> ir.Value:
    """Numbers of rows as i32[n]."""
    if w.b.dtype(index) == "i1":
        raise CaptureError("it keeps the elements where a condition holds, whose number only a run has.")
    shape = w.b.shape(index)
    wide = tuple(d for d in shape if d != 1)
    if len(wide) > 1:
        raise CaptureError(f"its indices are {shape}; expected one dimension.")
    return w.b.reshape(w.value(index, "i32"), shape=wide or (1,))


def _index(w, x, indices):
    """x[:, …, index, …]: slices along one dimension, or elements of a vector."""
    given = [i for i, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        raise CaptureError(f"it is indexed by {len(given)} tensors; expected one.")
    index = indices[given[0]]
    several = w.b.dtype(index) == "i32" and sum(d != 1 for d in w.b.shape(index)) > 1
    if several and w.b.rank(x) == 1 and not _elements(index).size:  # what was chosen for each token, say
        return w.b.take_along(_broadcast(w, x, (*w.b.shape(index)[:-1], *w.b.shape(x))), index)
    rows = _from_start(w, _numbers(w, index), w.b.shape(x)[given[0]])
    return _reshape(w, _picked(w, x, given[0], rows))


def _from_start(w, rows: ir.Value, size: int | str) -> ir.Value:
    """Numbers of slices, of which known ones below 0 count from the end of ``size``."""
    known = _elements(rows)
    if not (known < 0).any():
        return rows
    if isinstance(size, str):
        raise CaptureError(f"it counts from the end of a dimension of {size}.")
    (count,) = w.b.shape(rows)
    numbers = [int(n) + size if n < 0 else int(n) for n in np.broadcast_to(known, count)]
    return w.b.constant(value=numbers, shape=(count,), dtype="i32")


def _index_select(w, x, dim, index):
    return _reshape(w, _picked(w, x, dim, _numbers(w, index)))


def _scatter(w, x, dim, index, value):
    """``value``, or its element for each place, at the places along the last dimension that ``index`` names: if it names one
    twice, torch says of elements that any of them may be written."""
    _last(w, x, dim, "writes")
    shape = w.b.shape(index)
    if shape[:-1] != w.b.shape(x)[:-1]:
        raise CaptureError(f"it writes rows {shape} of {w.b.shape(x)}; expected as many.")
    count = w.b.shape(x)[-1]
    numbers = w.b.constant(value=list(range(count)), shape=(count,), dtype="i32")
    named = w.b.compare(w.b.reshape(w.value(index, "i32"), shape=(*shape, 1)), numbers, predicate="eq")
    axis = len(shape) - 1
    hits = w.b.reduce(w.b.cast(named, dtype="f32"), kind="max", axes=(axis,), keepdims=False)
    value = w.value(value)
    if w.b.rank(value):
        if w.b.shape(value) != shape or w.dtype != "f32":
            raise CaptureError(f"it writes {w.dtype} elements {w.b.shape(value)} at places {shape}; expected f32, and one for "
                               "each.")
        value = w.b.select(named, w.b.reshape(value, shape=(*shape, 1)), w.value(-math.inf))
        value = w.b.reduce(value, kind="max", axes=(axis,), keepdims=False)
    return w.b.select(w.b.compare(hits, w.b.scalar(0.5), predicate="gt"), value, w.value(x))


# ---- tensors out of nothing


def _fill(value: float | None = None) -> Rule:
    """Tensors of one value: given by the row, or the last positional argument of ``full``."""
    return lambda w, *args: _broadcast(w, w.value(args[-1] if value is None else value), w.shape)


def _arange(w, *bounds):
    start, end, step = {1: (0, *bounds, 1), 2: (*bounds, 1), 3: bounds}[len(bounds)]
    if step == 1 and isinstance(start, int) and _beyond(end) == start:
        return w.b.add(w.value(w.positions), w.value(start)) if start else w.value(w.positions)
    if any(isinstance(bound, str) for bound in (start, end, step)):
        raise CaptureError(f"it counts from {start} to {end} in steps of {step}; of dynamic ranges only those with one "
                           "number for each token have a meaning for a step that continues a sequence.")
    cast = int if w.dtype.startswith("i") else float
    return w.b.constant(value=[cast(v) for v in _range(start, end, step)], shape=w.shape, dtype=w.dtype)


def _range(start, end, step):
    return [start + i * step for i in range(max(0, math.ceil((end - start) / step)))]


COUNTED = 4
"""Width of the rows by which conditions are counted: the least that attention takes."""

ONE = 127
"""What stands for 1 in them: every format of a cache keeps it exactly, the codes of int8 too."""


def _cumsum(w, x, dim, dtype=None):
    """Counting tokens: of the step's tokens all of them, which are as many as the token's position says, or those that
    meet a condition."""
    condition = _condition(x)
    if w.b.shape(x)[dim] != "T" or not (_ones(x) or condition is not None and set(w.b.shape(x)) <= {1, "T"}):
        raise CaptureError("it sums over the tokens before each one; adaptc knows this for ones and conditions alone, "
                           "where it counts tokens.")
    count = w.b.add(w.positions, w.value(1, "i32"))
    if not _ones(x):
        most, fails = count, w.b.reshape(_not(w, condition), shape=("T",))
        count = w.b.min(w.b.sub(most, _counted(w, fails)), most)
    return _broadcast(w, w.b.reshape(w.value(count), shape=("T",)), w.shape)


def _counted(w, condition: ir.Value) -> ir.Value:
    """Tokens i32[T] of the same request, up to each token, that meet a condition i1[T]: attention that looks at all of
    them alike gives their share."""
    rows = ("T", 1, COUNTED)
    nothing = _broadcast(w, w.b.scalar(0.0), rows)
    ones = w.b.mul(w.b.reshape(w.b.cast(condition, dtype="f32"), shape=("T", 1, 1)), w.b.scalar(float(ONE)))
    state = w.state(StateSpec((("k", 1, COUNTED), ("v", 1, COUNTED)), "f32", 0, 0, 0, 0))
    share = w.b.attention(nothing, nothing, _broadcast(w, ones, rows), w.positions, w.requests, state, scaling=1.0,
                          window=0, softcap=0.0)
    share = w.b.reshape(_cut(w, share, 2, 0, 1), shape=("T",))
    tokens = w.b.cast(w.b.add(w.positions, w.value(1, "i32")), dtype="f32")
    found = w.b.mul(w.b.mul(share, tokens), w.b.scalar(1 / ONE))
    return w.b.cast(w.b.add(found, w.b.scalar(0.5)), dtype="i32")  # casts cut what follows the point


def _ones(x: ir.Value) -> bool:
    """Whether a value is 1 everywhere, by how it was made."""
    node = definer(x)
    if node is None:
        return False
    if node.name in ("broadcast", "reshape", "cast"):
        return _ones(node.operands[0])
    return node.name == "constant" and node.attrs["value"] in (1, 1.0, True)


# ---- reductions


def _reduce(kind: str) -> Rule:
    def rule(w, x, dims=None, keepdim=False):
        return _reduced(w, w.value(x), kind, dims, keepdim)

    return rule


def _reduced(w, x, kind, dims, keepdim):
    rank = w.b.rank(x)
    dims = [dims] if isinstance(dims, int) else list(dims or range(rank))
    return w.b.reduce(x, kind=kind, axes=tuple(sorted(d % rank for d in dims)), keepdims=bool(keepdim))


def _var(w, x, dims=None, unbiased=True, keepdim=False, *, correction=None):
    x = w.value(x)
    rank = w.b.rank(x)
    dims = [d % rank for d in ([dims] if isinstance(dims, int) else dims or range(rank))]
    centred = w.b.sub(x, _reduced(w, x, "mean", dims, True))
    mean = _reduced(w, w.b.mul(centred, centred), "mean", dims, keepdim)
    count = math.prod(_static(w, x, d) for d in dims)
    fewer = int(unbiased) if correction is None else correction
    return mean if fewer == 0 else w.b.mul(mean, w.b.scalar(count / (count - fewer)))


def _vector_norm(w, x, order=2, dims=None, keepdim=False, *_):
    """(Σ |x|^order)^(1/order)"""
    size = w.b.abs(w.value(x))
    if order in (math.inf, -math.inf):
        return _reduced(w, size, "max" if order > 0 else "min", dims, keepdim)
    if order == 0:
        raise CaptureError("it counts the elements that aren't 0; adaptc captures norms of orders above 0.")
    if order == 1:
        return _reduced(w, size, "sum", dims, keepdim)
    if order == 2:
        return w.b.sqrt(_reduced(w, w.b.mul(size, size), "sum", dims, keepdim))
    powers = w.b.pow(size, w.value(float(order)))
    return w.b.pow(_reduced(w, powers, "sum", dims, keepdim), w.value(1 / order))


def _rms_norm(w, x, normalized, weight=None, eps=None):
    if len(normalized) != 1:
        raise CaptureError(f"it normalises {len(normalized)} dimensions; expected one.")
    eps = float(np.finfo(np.float32).eps) if eps is None else float(eps)
    weight = w.b.constant(value=1.0, shape=tuple(normalized), dtype="f32") if weight is None else weight
    return w.b.rms_norm(x, weight, eps=eps)


def _softmax(w, x, dim, *_):
    x = w.value(x)
    e = w.b.exp(w.b.sub(x, _reduced(w, x, "max", dim, True)))
    return w.b.div(e, _reduced(w, e, "sum", dim, True))


def _layer_norm(w, x, normalized, weight=None, bias=None, eps=1e-5, *_):
    if len(normalized) == 1 and weight is not None:
        return w.b.layer_norm(x, weight, *([] if bias is None else [bias]), eps=float(eps))
    axes = tuple(range(-len(normalized), 0))
    centred = w.b.sub(x, _reduced(w, x, "mean", axes, True))
    variance = _reduced(w, w.b.mul(centred, centred), "mean", axes, True)
    result = w.b.mul(centred, w.b.rsqrt(w.b.add(variance, w.b.scalar(eps))))
    result = result if weight is None else w.b.mul(result, weight)
    return result if bias is None else w.b.add(result, bias)


# ---- linear algebra


def _embedding(w, table, ids, *_):
    ids = w.value(ids, "i32")
    wide = [d for d in w.b.shape(ids) if d != 1]
    if len(wide) > 1:
        raise CaptureError(f"its ids are {w.b.shape(ids)}; expected one dimension.")
    flat = w.b.reshape(ids, shape=(wide[0] if wide else 1,))
    _end(w, flat, w.b.shape(table)[0])
    return _reshape(w, w.b.embedding(flat, table))


def _linear(w, x, weight, bias=None):
    flat = w.flat(x)
    if flat is not None:
        return _reshape(w, w.b.linear(flat, weight, *([] if bias is None else [bias])))
    product = w.b.dot_general(x, weight, contract_x=(w.b.rank(x) - 1,), contract_y=(1,))
    return product if bias is None else w.b.add(product, bias)


def _swapped(w, x):
    rank = w.b.rank(x)
    return w.b.transpose(x, perm=(*range(rank - 2), rank - 1, rank - 2))


def _times(w, x, y):
    """x[..., K], y[N, K] → [..., N]."""
    flat = w.flat(x) if _is_weight(y) else None
    if flat is None:
        return w.b.dot_general(x, w.value(y), contract_x=(w.b.rank(x) - 1,), contract_y=(1,))
    return w.b.reshape(w.b.linear(flat, y), shape=(*w.b.shape(x)[:-1], w.b.shape(y)[0]))


def _matmul(w, x, y):
    xs, ys = w.b.shape(x), w.b.shape(y)
    if len(ys) == 2 and _is_weight(y) and w.flat(x) is not None:
        return _linear(w, x, w.b.transpose(y, perm=(1, 0)))
    if len(xs) == 2 < len(ys):
        return _swapped(w, _times(w, _swapped(w, y), x))
    if min(len(xs), len(ys)) < 2:
        raise CaptureError(f"it multiplies {xs} by {ys}; expected matrices.")
    if xs[-1] == 1:
        return w.b.mul(w.value(x), w.value(y))
    batch = () if len(ys) == 2 else tuple(range(len(xs) - 2))
    if len(xs) < len(ys) or any(xs[i] != ys[i] for i in batch):
        raise CaptureError(f"it multiplies {xs} by {ys}; expected equal leading dimensions.")
    return w.b.dot_general(w.value(x), w.value(y), batch=batch, contract_x=(len(xs) - 1,), contract_y=(len(ys) - 2,))


def _addmm(w, bias, x, y, beta=1, alpha=1):
    if (beta, alpha) != (1, 1):
        raise CaptureError(f"it scales by beta {beta} and alpha {alpha}; expected 1.")
    if _is_weight(y) and w.flat(x) is not None and w.b.rank(bias) == 1:
        return _linear(w, x, w.b.transpose(y, perm=(1, 0)), bias)
    return w.b.add(_matmul(w, x, y), bias)


def _is_weight(x: ir.Value) -> bool:
    """Whether it is a stored tensor as it is, or transposed."""
    node = definer(x)
    return node is not None and (node.name == "get" or node.name == "transpose" and _is_weight(node.operands[0]))


def _expert_linear(w, x, experts, weight, bias=None, transposed=False):
    weight = w.b.transpose(weight, perm=(0, 2, 1)) if transposed else weight
    return w.b.expert_linear(w.value(x), w.value(experts, "i32"), weight, *([] if bias is None else [bias]))


# ---- what the hooks recorded


@dataclass(frozen=True)
class Mask:
    """A mask's meaning in place of its elements."""

    kind: str
    window: int


def _mask(w, like, padding, kind, window, blocks=None):
    if padding is not None and not _ones(padding):
        raise CaptureError("its mask keeps some tokens and not others by a rule that adaptc can't see; expected all.")
    if blocks is not None:
        raise CaptureError("its mask lets tokens of one block see each other (a prefix, or an image's tokens), later ones "
                           "too; adaptc's attention is causal, with or without a sliding window.")
    return Mask(kind, window)


def _constant(w, values, shape, dtype, device):
    numbers = [float(x) if w.dtype.startswith("f") else int(x) for x in values]
    return w.b.constant(value=np.reshape(numbers, w.shape).tolist(), shape=w.shape, dtype=w.dtype)


def _request_length(w, positions):
    return w.b.reshape(w.b.gather_rows(w.lengths(), w.requests), shape=w.shape)


def _attention(w, q, k, v, mask, extras, names, scaling, window, softcap):
    """q[1,H,T,D], k[1,Hkv,T,D], v[1,Hkv,T,Dv] → [1,T,H,Dv]; the keys a token sees are the mask's. ``extras`` are
    operands of the row's by their ``names``. Keys and values that another attention has are kept once."""
    if getattr(mask, "kind", None) not in ("causal", "sliding", "chunked"):
        kind = getattr(mask, "kind", "computed")
        raise CaptureError(f"its mask is {kind}; adaptc's attention is causal, with or without a sliding window or chunks.")
    if mask.kind != "causal" and mask.window < 1:
        raise CaptureError(f"its mask is {mask.kind}, and the configuration says no width of it, or {mask.window}; expected "
                           "1 or more tokens.")
    if window not in (0, mask.window):
        raise CaptureError(f"the attention is given a window of {window} and a mask with one of {mask.window}.")
    if "pairs" in names:
        raise CaptureError("it is given a bias for each pair of tokens, which adaptc's attention doesn't have.")
    shared = (k, v, mask)
    q, k, v = (_rows(w, x) for x in (q, k, v))
    parts = tuple((name, *w.b.shape(x)[1:]) for name, x in (("k", k), ("v", v)))
    attrs = dict(scaling=scaling, window=mask.window, chunked=mask.kind == "chunked", softcap=softcap, extras=tuple(names))
    extras = [w.b.reshape(x, shape=w.b.shape(x)[1:]) if name == "rows" else w.value(x) for name, x in zip(names, extras)]
    where = (w.positions, w.requests)
    if shared in w.shared:
        return w.b.reshape(w.b.recall(q, *where, w.shared[shared], *extras, **attrs), shape=w.shape)
    w.shared[shared] = state = w.state(StateSpec(parts, "f32", mask.window, 0, 0, 0))
    return w.b.reshape(w.b.attention(q, k, v, *where, state, *extras, **attrs), shape=w.shape)


def _index_rows(w, query, key, weights, top_k, scaling, rate=1):
    """query[1,T,H,D], key[1,T,D], weights[1,T,H] → i32[1,T,top_k]."""
    _, tokens, heads, width = w.b.shape(query)
    state = w.state(StateSpec((("index", 1, width),), "f32", 0, 0, 0, 0, rate=rate))
    rows = w.b.index_rows(w.b.reshape(query, shape=(tokens, heads, width)), w.b.reshape(key, shape=(tokens, width)),
                          w.b.reshape(weights, shape=(tokens, heads)), w.positions, w.requests, state, top_k=top_k,
                          scaling=scaling)
    return w.b.reshape(rows, shape=w.shape)


def _entries(w, entries, chosen, rate):
    return Mask("entries", rate)


def _latent_attention(w, q, row, mask, rows, scaling):
    """q[1,H,T,D], row[1,1,T,D] → [1,T,H,D] and [1,T,H]; the rows a token sees are the mask's (``shared_rows``)."""
    width = w.b.shape(row)[3]
    window, rate = (0, mask.window) if mask.kind == "entries" else (mask.window, 1)
    state = w.state(StateSpec((("latent", 1, width),), "f32", window, 0, 0, 0, rate=rate))
    chosen = [] if rows is None else [w.b.reshape(rows, shape=w.b.shape(rows)[1:])]
    operands = (_rows(w, q), w.b.reshape(_rows(w, row), shape=("T", width)))
    results = w.b.latent_attention(*operands, w.positions, w.requests, state, *chosen, scaling=scaling, value_width=width,
                                   window=window, lse=True, extras=("rows",) if chosen else ())
    return tuple(w.b.reshape(x, shape=(1, *w.b.shape(x))) for x in results)


def _index_blocks(w, query, key, top_k, block, local):
    """query[1,T,H,D], key[1,T,D] → i32[1,T,H,top_k · block]."""
    _, tokens, heads, width = w.b.shape(query)
    state = w.state(StateSpec((("index", 1, width),), "f32", 0, 0, 0, 0))
    rows = w.b.index_blocks(w.b.reshape(query, shape=(tokens, heads, width)), w.b.reshape(key, shape=(tokens, width)),
                            w.positions, w.requests, state, top_k=top_k, block=block, local=local)
    return w.b.reshape(rows, shape=w.shape)


def _rows(w, x):
    """[1, H, T, D] → [T, H, D]."""
    one, heads, tokens, width = w.b.shape(x)
    if (one, tokens) != (1, "T"):
        raise CaptureError(f"an operand of attention is {(one, heads, tokens, width)}; expected [1, heads, T, width].")
    return w.b.reshape(w.b.transpose(x, perm=(0, 2, 1, 3)), shape=(tokens, heads, width))


def _of_tokens(w, x) -> ir.Value:
    """[1, T, ...] → [T, ...]."""
    one, tokens, *rest = w.b.shape(x)
    if (one, tokens) != (1, "T"):
        raise CaptureError(f"an operand is {w.b.shape(x)}; expected [1, T, ...].")
    return w.b.reshape(w.value(x), shape=(tokens, *rest))


def _convolve(w, x, weight, bias):
    """x[1,T,C], weight[C,W], bias[C] → [1,T,C]."""
    channels, width = w.b.shape(weight)
    state = w.state(StateSpec.fixed("window", width - 1, channels))
    extra = [] if bias is None else [w.value(bias)]
    return _reshape(w, w.b.convolve(_of_tokens(w, x), w.value(weight), w.positions, w.requests, state, *extra))


def _recur(w, query, key, value, decay, beta, read):
    """query, key [1,T,H,K], value [1,T,H,V], decay [1,T,H,K or 1], beta [1,T,H] → [1,T,H,V]."""
    _, _, heads, rows = w.b.shape(key)
    state = w.state(StateSpec.fixed("state", heads, rows * w.b.shape(value)[3]))
    extra = [] if beta is None else [_of_tokens(w, beta)]
    operands = [_of_tokens(w, x) for x in (query, key, value, decay)]
    return _reshape(w, w.b.recur(*operands, w.positions, w.requests, state, *extra, read=read))


def _running_max(w, x, decay):
    """x, decay [1,T,C] → [1,T,C]."""
    state = w.state(StateSpec.fixed("max", 1, w.b.shape(x)[2]))
    return _reshape(w, w.b.running_max(_of_tokens(w, x), _of_tokens(w, decay), w.positions, w.requests, state))


def _pool(w, value, gate, bias, rate):
    """value, gate [1,T,S,C], bias [m,S,C] → [1,T,C]."""
    _, _, series, channels = w.b.shape(value)
    state = w.state(StateSpec.fixed("pool", 3 * len(pooled(series)), channels))
    result = w.b.pool(_of_tokens(w, value), _of_tokens(w, gate), w.positions, w.requests, state, w.value(bias), rate=rate)
    return _reshape(w, result)


def _sinkhorn(w, x, iterations, eps):
    """[1,T,N,N], the same again."""
    return _reshape(w, w.b.sinkhorn(_of_tokens(w, x), iterations=iterations, eps=eps))


FLATTENED = frozenset(f"aten.{name}" for name in (
    "neg abs exp log sqrt rsqrt reciprocal tanh erf sigmoid silu gelu relu square log1p softplus clamp clamp_min add sub mul "
    "div rsub pow maximum minimum eq ne lt le gt ge where masked_fill contiguous clone detach alias to _to_copy type_as "
    "float dropout view reshape _unsafe_view unsqueeze flatten mean sum amax amin var rms_norm layer_norm linear").split())
"""Operators that may have an operand [c·T, ...], rows of tokens and, say, heads as one dimension: it is held as
[T, c, ...], in which nothing but shapes and dimensions counted from the last one mean the same."""

SKIPPED = ("aten._assert_tensor_metadata", "aten._assert_scalar", "aten.sym_constrain_range",
           "aten.sym_constrain_range_for_size", "aten._assert_async")
"""Operators without results: checks on what the trace assumed."""

TABLE: dict[str, Rule] = {
    **{f"aten.{name}": _unary(name) for name in (
        "neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "cos", "sin", "tanh", "erf", "sigmoid", "silu")},
    "aten.gelu": _gelu,
    "aten.relu": lambda w, x: w.b.max(w.value(x), w.value(0)),
    "aten.square": _square,
    "aten.log1p": _log1p,
    "aten.expm1": _expm1,
    "aten.floor": _floor,
    "aten.softplus": _softplus,
    "aten.log_sigmoid": _log_sigmoid,
    "aten.clamp": _clamp,
    "aten.clamp_min": lambda w, x, low: _clamp(w, x, low),
    "aten.add": _binary("add", 0),
    "aten.sub": _binary("sub", 0),
    "aten.mul": _mul,
    "aten.div": _binary("div", 1),
    "aten.true_divide": _binary("div", 1),
    "aten.rsub": _binary("sub", swapped=True),
    "aten.pow": _binary("pow", 1),
    "aten.maximum": _binary("max"),
    "aten.minimum": _binary("min"),
    **{f"aten.{name}": _compare(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "aten.logical_not": _not,
    "aten.logical_and": _and,
    "aten.logical_or": _or,
    "aten.bitwise_not": _of_conditions(_not),
    "aten.bitwise_and": _of_conditions(_and),
    "aten.bitwise_or": _of_conditions(_or),
    "aten.where": _where,
    "aten.masked_fill": lambda w, x, mask, value: _where(w, mask, value, x),
    **{f"aten.{name}": _parts(_same) for name in ("contiguous", "clone", "detach", "detach_", "alias", "lift_fresh_copy")},
    **{f"aten.{name}": _parts(_cast) for name in ("to", "_to_copy", "type_as", "float")},
    "aten.dropout": lambda w, x, p, train: _same(w, x),
    **{f"aten.{name}": _parts(_reshape) for name in (
        "view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as", "reshape_as")},
    "aten.permute": _parts(_permute),
    "aten.transpose": _parts(_transpose),
    "aten.t": _t,
    "aten.numpy_T": _t,
    "aten.broadcast_to": _parts(_expand),
    "aten.expand": _parts(_expand),
    "aten.expand_as": _expand,
    "aten.polar": _polar,
    "aten.view_as_complex": _view_as_complex,
    "aten.view_as_real": _view_as_real,
    "aten.copy": _copy,
    "aten.slice_scatter": _slice_scatter,
    "aten.select_scatter": _select_scatter,
    "aten.repeat": _repeat,
    "aten.repeat_interleave": _repeat_interleave,
    "aten.max": _extreme("max"),
    "aten.min": _extreme("min"),
    "aten.topk": _top_k,
    "aten.gather": _gather,
    "aten.index": _index,
    "aten.index_select": _index_select,
    "aten.scatter": _scatter,
    "aten.cumsum": _cumsum,
    "aten.slice": _parts(_slice),
    "aten.select": _select,
    "aten.split": _split,
    "aten.split_with_sizes": _split,
    "aten.chunk": _chunk,
    "aten.unbind": _unbind,
    "aten.flip": _flip,
    "getitem": lambda w, values, index: operator.getitem(values, index),
    "aten.cat": _cat,
    "aten.stack": _stack,
    **{f"aten.{name}": _fill(0) for name in (
        "zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty", "empty_permuted")},
    **{f"aten.{name}": _fill(1) for name in ("ones", "ones_like", "new_ones")},
    **{f"aten.{name}": _fill() for name in ("full", "full_like", "new_full", "scalar_tensor")},
    "aten.arange": _arange,
    "aten.mean": _reduce("mean"),
    "aten.sum": _reduce("sum"),
    "aten.amax": _reduce("max"),
    "aten.amin": _reduce("min"),
    "aten.var": _var,
    "aten.std": lambda w, *args, **kwargs: w.b.sqrt(_var(w, *args, **kwargs)),
    "aten.linalg_vector_norm": _vector_norm,
    "aten.softmax": _softmax,
    "aten._softmax": _softmax,
    "aten.layer_norm": _layer_norm,
    "aten.rms_norm": _rms_norm,
    "aten._fused_rms_norm": lambda w, *args: (_rms_norm(w, *args), None),
    "aten.embedding": _embedding,
    "aten.linear": _linear,
    "aten.matmul": _matmul,
    "aten.mm": _matmul,
    "aten.bmm": _matmul,
    "aten.addmm": _addmm,
    "adaptc.mask": _mask,
    "adaptc.attention": _attention,
    "adaptc.index_rows": _index_rows,
    "adaptc.entries": _entries,
    "adaptc.latent_attention": _latent_attention,
    "adaptc.index_blocks": _index_blocks,
    "adaptc.expert_linear": _expert_linear,
    "adaptc.request_length": _request_length,
    "adaptc.constant": _constant,
    "adaptc.convolve": _convolve,
    "adaptc.recur": _recur,
    "adaptc.running_max": _running_max,
    "adaptc.pool": _pool,
    "adaptc.sinkhorn": _sinkhorn,
}
