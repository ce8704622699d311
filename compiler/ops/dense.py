"""Operators around weights: embedding, linear maps, norms, dynamic quantisation of their input."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from adaptc.ops.elementwise import UNARY
from adaptc.ops.shape import INDICES
from adaptc.ops.table import REQUIRED, OpRow, Part, added, expect, scaled, size
from adaptc.protocol import TensorSpec

SUM_GROUP = 16
"""``quantize`` also gives the sum of every 16 codes: the finest group any weight format has."""


def split_activation(operands) -> tuple[tuple, tuple]:
    """A linear map's operands as (activation, rest): one float tensor, or the codes, scales and sums of quantize."""
    first = operands[0]
    integer = first.dtype == "i8" if isinstance(first, TensorSpec) else first.dtype == np.int8
    count = 3 if integer else 1
    return tuple(operands[:count]), tuple(operands[count:])


def _value(activation) -> np.ndarray:
    """The float64 value of an activation: itself, or codes × scales."""
    if len(activation) == 1:
        return activation[0].astype(np.float64)
    codes, scales, _ = activation
    group = codes.shape[1] // scales.shape[1]
    return codes.astype(np.float64) * np.repeat(scales.astype(np.float64), group, axis=1)


def _matmul(activation, weight) -> np.ndarray:
    return (_value(activation) @ weight.astype(np.float64).T).astype(np.float32)


def _check_weight(name, activation, weight):
    x = activation[0]
    expect(len(weight.shape) == 2, f"{name}: the weight must be [N, K], got {weight.shape}.")
    expect(
        len(x.shape) == 2 and x.shape[1] == weight.shape[1],
        f"{name}: the input is {x.shape}, the weight {weight.shape}; expected [T, K] and [N, K].",
    )
    kinds = tuple(spec.dtype for spec in (*activation, weight))
    wanted = ("i8", "f32", "f32", "f32") if len(activation) == 3 else ("f32", "f32")
    expect(kinds == wanted, f"{name}: the input and weight are {', '.join(kinds)}; expected {', '.join(wanted)}.")
    if len(activation) == 3:
        _check_quantized(name, *activation)
    return TensorSpec("f32", (x.shape[0], weight.shape[0]))


def _check_quantized(name, codes, scales, sums):
    t, k = codes.shape
    groups = scales.shape[1] if len(scales.shape) == 2 and isinstance(scales.shape[1], int) else 0
    expect(
        groups > 0 and k % groups == 0 and scales.shape[0] == t and sums.shape == (t, k // SUM_GROUP),
        f"{name}: codes are {codes.shape}, scales {scales.shape}, sums {sums.shape}; they must be quantize's results.",
    )


def _infer_linear(attrs, operands):
    activation, rest = split_activation(operands)
    return (_check_map("linear", activation, *rest),)


def _linear(attrs, *operands):
    activation, rest = split_activation(operands)
    return (_map(activation, *rest),)


def _float_down(b, activation):
    """An activation as one float tensor: itself, or codes × scales."""
    if len(activation) == 1:
        return activation[0]
    codes, scales, _ = activation
    (t, k), groups = b.shape(codes), b.shape(scales)[1]
    grouped = b.reshape(b.cast(codes, dtype="f32"), shape=(t, groups, k // groups))
    return b.reshape(b.mul(grouped, b.reshape(scales, shape=(t, groups, 1))), shape=(t, k))


def _linear_down(b, a, *values):
    activation, (weight, *bias) = b.activation(values)
    product = b.dot_general(_float_down(b, activation), weight, contract_x=(1,), contract_y=(1,))
    return (b.add(product, *bias) if bias else product,)


def linear_maps(operands, rank) -> list[tuple]:
    """Weights, each followed by its bias if it has one, as (weight,) and (weight, bias); ``rank`` of an operand tells
    them apart."""
    maps: list[tuple] = []
    for operand in operands:
        if rank(operand) == 1 and maps and len(maps[-1]) == 1:
            maps[-1] += (operand,)
        else:
            maps.append((operand,))
    return maps


def _spec_rank(spec) -> int:
    return len(spec.shape)


def _check_map(name, activation, weight, bias=None):
    result = _check_weight(name, activation, weight)
    if bias is not None:
        expect(bias.shape == weight.shape[:1] and bias.dtype == "f32",
               f"{name}: the bias is {bias.dtype}{list(bias.shape)}, expected f32{list(weight.shape[:1])}.")
    return result


def _map(activation, weight, bias=None) -> np.ndarray:
    y = _matmul(activation, weight)
    return y if bias is None else y + bias


def _infer_linears(attrs, operands):
    activation, rest = split_activation(operands)
    return tuple(_check_map("linears", activation, *one) for one in linear_maps(rest, _spec_rank))


def _linears(attrs, *operands):
    activation, rest = split_activation(operands)
    return tuple(_map(activation, *one) for one in linear_maps(rest, np.ndim))


def _linears_down(b, a, *operands):
    activation, rest = b.activation(operands)
    return tuple(b.linear(*activation, *one) for one in linear_maps(rest, b.rank))


def _infer_gated(attrs, operands):
    activation, rest = split_activation(operands)
    maps = linear_maps(rest, _spec_rank)
    expect(len(maps) == 2, f"gated_linear: got {len(maps)} weights, expected gate and up.")
    gate, up = maps
    expect(gate[0].shape == up[0].shape, f"gated_linear: gate is {gate[0].shape} and up {up[0].shape}.")
    expect(attrs["act"] in UNARY, f"gated_linear: unknown activation {attrs['act']!r}.")
    _check_map("gated_linear", activation, *up)
    return (_check_map("gated_linear", activation, *gate),)


def _gated(attrs, *operands):
    activation, rest = split_activation(operands)
    gate, up = (_map(activation, *one) for one in linear_maps(rest, np.ndim))
    return (UNARY[attrs["act"]](gate) * up,)


def _gated_down(b, a, *operands):
    activation, rest = b.activation(operands)
    gate, up = (b.linear(*activation, *one) for one in linear_maps(rest, b.rank))
    return (b.mul(b.op(a["act"], gate), up),)


def _infer_head_linear(attrs, operands):
    x, weight = operands
    start, step, rows = (attrs[name] for name in ("start", "step", "rows"))
    expect(
        x.dtype == weight.dtype == "f32" and len(x.shape) == 3 and isinstance(x.shape[1], int) and len(weight.shape) == 2,
        f"head_linear: the input is {x.dtype}{list(x.shape)}, the weight {weight.dtype}{list(weight.shape)}; expected "
        "f32[T, H, K] and f32[N, K].",
    )
    (t, heads, k), (n, columns) = x.shape, weight.shape
    expect(
        start >= 0 and 0 < rows <= step and start + (heads - 1) * step + rows <= n,
        f"head_linear: {heads} heads of {rows} rows from row {start} on, {step} apart, aren't apart within {n} rows.",
    )
    wanted, result = (rows, columns) if attrs["transposed"] else (columns, rows)
    expect(k == wanted, f"head_linear: the input has {k} columns a head, its matrix takes {wanted}.")
    return (TensorSpec("f32", (t, heads, result)),)


def _head_rows(attrs, heads: int) -> np.ndarray:
    """The weight's rows that each head's matrix is made of, [heads, rows]."""
    return attrs["start"] + attrs["step"] * np.arange(heads)[:, None] + np.arange(attrs["rows"])


def _head_linear(attrs, x, weight):
    matrices = weight[_head_rows(attrs, x.shape[1])].astype(np.float64)
    letters = "thn,hnk->thk" if attrs["transposed"] else "thk,hnk->thn"
    return (np.einsum(letters, x.astype(np.float64), matrices).astype(np.float32),)


def _head_linear_down(b, a, x, weight):
    """A product of two tensors, with the heads' rows looked up as those of a table: a packed weight stays so."""
    heads = b.shape(x)[1]
    rows = _head_rows(a, heads)
    table = b.embedding(b.constant(value=rows.reshape(-1).tolist(), shape=(rows.size,), dtype="i32"), weight)
    matrices = b.reshape(table, shape=(*rows.shape, b.shape(weight)[1]))
    result = b.dot_general(b.transpose(x, perm=(1, 0, 2)), matrices, batch=(0,), contract_x=(2,),
                           contract_y=(1 if a["transposed"] else 2,))
    return (b.transpose(result, perm=(1, 0, 2)),)


def _head_linear_axes(attrs, operands, results):
    """Heads differ by their rows of the weight, which has no axis for them."""
    return (0, None, None), (None, 2 if attrs["transposed"] else None)


def _head_linear_reads(attrs, operands):
    _, heads, terms = operands[0].shape
    return {0: Part(Fraction(1), terms), 1: Part(Fraction(heads * attrs["rows"], operands[1].shape[0]), terms)}


def _linear_flops(attrs, operands, results):
    activation, weights = split_activation(operands)
    t = activation[0].shape[0]
    return added(*(scaled(size((t, *w.shape)), 2) for w in weights if len(w.shape) == 2))


def _infer_embedding(attrs, operands):
    ids, table = operands
    expect(len(table.shape) == 2, f"embedding: the table must be [V, D], got {table.shape}.")
    expect(
        len(ids.shape) == 1 and ids.dtype in INDICES,
        f"embedding: ids are {ids.dtype}{list(ids.shape)}, expected one dimension of {' or '.join(INDICES)}.",
    )
    return (TensorSpec("f32", ids.shape + table.shape[1:]),)


def _rms_norm(attrs, x, weight):
    wide = x.astype(np.float64)
    return ((wide / np.sqrt((wide**2).mean(-1, keepdims=True) + attrs["eps"]) * weight).astype(np.float32),)


def _infer_norm(name: str, residuals: int):
    """Of a norm of x [..., D] with vectors [D] (weight, bias); with a residual, whose sum with x is a second result."""

    def infer(attrs, operands):
        x, *more = operands
        kinds = sorted({o.dtype for o in operands})
        expect(kinds == ["f32"], f"{name}: operands have dtypes {', '.join(kinds)}, expected f32.")
        for residual in more[:residuals]:
            expect(residual.shape == x.shape, f"{name}: the input is {x.shape}, the residual {residual.shape}.")
        for vector in more[residuals:]:
            expect(len(x.shape) >= 1 and vector.shape == x.shape[-1:],
                   f"{name}: the input is {x.shape}, the weight or bias {vector.shape}; expected [..., D] and [D].")
        return (TensorSpec("f32", x.shape),) * (1 + residuals)

    return infer


def _norm_down(b, a, x, weight):
    square = b.reduce(b.mul(x, x), kind="mean", axes=(b.rank(x) - 1,), keepdims=True)
    return (b.mul(b.mul(x, b.rsqrt(b.add(square, b.scalar(a["eps"])))), weight),)


def _layer_norm(attrs, x, weight, *bias):
    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    result = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + attrs["eps"]) * weight
    return ((result + bias[0] if bias else result).astype(np.float32),)


def _layer_norm_down(b, a, x, weight, *bias):
    mean = lambda v: b.reduce(v, kind="mean", axes=(b.rank(x) - 1,), keepdims=True)  # noqa: E731
    centred = b.sub(x, mean(x))
    scale = b.rsqrt(b.add(mean(b.mul(centred, centred)), b.scalar(a["eps"])))
    result = b.mul(b.mul(centred, scale), weight)
    return (b.add(result, bias[0]) if bias else result,)


def _add_norm(norm):
    """The meaning of a norm of a sum: the norm's own, and the sum."""

    def meaning(attrs, x, residual, *vectors):
        total = residual + x
        return (*norm(attrs, total, *vectors), total)

    return meaning


def _add_norm_down(name: str):
    def decompose(b, a, x, residual, *vectors):
        total = b.add(residual, x)
        return (b.op(name, total, *vectors, **a), total)

    return decompose


def _infer_sinkhorn(attrs, operands):
    (x,) = operands
    expect(x.dtype == "f32" and len(x.shape) == 3 and x.shape[1] == x.shape[2],
           f"sinkhorn: the input is {x.dtype}{list(x.shape)}, expected f32 [T, N, N].")
    expect(attrs["iterations"] >= 1, f"sinkhorn: {attrs['iterations']} iterations, expected at least 1.")
    return (x,)


def _sinkhorn(attrs, x):
    """Columns, then rows and columns in turn, divided by their sums and eps: 2 · iterations - 1 times in all, which makes
    a positive matrix nearly doubly stochastic (Sinkhorn and Knopp 1967)."""
    value = x.astype(np.float64)
    for number in range(2 * attrs["iterations"] - 1):
        value = value / (value.sum(2 if number % 2 else 1, keepdims=True) + attrs["eps"])
    return (value.astype(np.float32),)


def _sinkhorn_down(b, a, x):
    for number in range(2 * a["iterations"] - 1):
        total = b.reduce(x, kind="sum", axes=(2 if number % 2 else 1,), keepdims=True)
        x = b.div(x, b.add(total, b.scalar(a["eps"], "f32")))
    return (x,)


def _infer_quantize(attrs, operands):
    (x,) = operands
    expect(
        x.dtype == "f32" and len(x.shape) == 2 and isinstance(x.shape[1], int),
        f"quantize: the input is {x.dtype}{list(x.shape)}, expected f32[T, K] with K static.",
    )
    t, k = x.shape
    group = attrs["group"]
    expect(group > 0 and group % SUM_GROUP == 0, f"quantize: group is {group}, expected a multiple of {SUM_GROUP}.")
    expect(k % group == 0, f"quantize: {k} columns don't divide into groups of {group}.")
    return (
        TensorSpec("i8", (t, k)),
        TensorSpec("f32", (t, k // group)),
        TensorSpec("f32", (t, k // SUM_GROUP)),
    )


def _quantize(attrs, x):
    t, k = x.shape
    group = attrs["group"]
    blocks = x.reshape(t, k // group, group)
    scales = np.abs(blocks).max(-1) / np.float32(127)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        codes = np.where(scales[..., None] > 0, np.rint(blocks / scales[..., None]), 0)
    codes = codes.clip(-127, 127).astype(np.int8)  # a subnormal scale, itself rounded, would carry codes beyond
    sums = codes.reshape(t, k // SUM_GROUP, SUM_GROUP).sum(-1, dtype=np.int32).astype(np.float32)
    return codes.reshape(t, k), scales, sums * np.repeat(scales, group // SUM_GROUP, axis=1)


ROWS = [
    OpRow("embedding", ("ids", "table"), _infer_embedding, lambda a, ids, table: (table[ids],), factors="t,vd->td",
          gathers=(1, 0), matrices=("table",), decompose=lambda b, a, ids, table: (b.gather_rows(table, ids),)),
    OpRow("linear", ("x+", "weight", "bias?"), _infer_linear, _linear, factors="tk,nk,n->tn", cost=_linear_flops,
          matrices=("weight",), decompose=_linear_down),
    # of several maps, each weight is followed by its bias if it has one
    OpRow("linears", ("x+", "weights*"), _infer_linears, _linears, factors="tk,nk*->tn*", cost=_linear_flops,
          matrices=("weights*",), decompose=_linears_down),
    OpRow("gated_linear", ("x+", "weights*"), _infer_gated, _gated, attrs={"act": REQUIRED},
          factors="tk,nk*->tn", cost=_linear_flops, matrices=("weights*",), decompose=_gated_down),
    # of each head by its own matrix: ``rows`` rows of the weight, those of head h from ``start`` + h·``step`` on; or by
    # that matrix transposed
    OpRow("head_linear", ("x", "weight"), _infer_head_linear, _head_linear, axes=_head_linear_axes,
          attrs={"start": 0, "step": REQUIRED, "rows": REQUIRED, "transposed": False}, reads=_head_linear_reads,
          cost=lambda a, o, r: scaled(size(o[0].shape), 2 * r[0].shape[2]), matrices=("weight",),
          decompose=_head_linear_down),
    OpRow("rms_norm", ("x", "weight"), _infer_norm("rms_norm", 0), _rms_norm, attrs={"eps": REQUIRED},
          factors="...d,d->...e", cost=lambda a, o, r: scaled(size(o[0].shape), 4), decompose=_norm_down),
    OpRow("layer_norm", ("x", "weight", "bias?"), _infer_norm("layer_norm", 0), _layer_norm, attrs={"eps": REQUIRED},
          factors="...d,d,d->...e", cost=lambda a, o, r: scaled(size(o[0].shape), 7), decompose=_layer_norm_down),
    OpRow("add_rms_norm", ("x", "residual", "weight"), _infer_norm("add_rms_norm", 1), _add_norm(_rms_norm),
          attrs={"eps": REQUIRED}, factors="...d,...d,d->...e,...d",
          cost=lambda a, o, r: scaled(size(o[0].shape), 5), decompose=_add_norm_down("rms_norm")),
    OpRow("add_layer_norm", ("x", "residual", "weight", "bias?"), _infer_norm("add_layer_norm", 1),
          _add_norm(_layer_norm), attrs={"eps": REQUIRED}, factors="...d,...d,d,d->...e,...d",
          cost=lambda a, o, r: scaled(size(o[0].shape), 8), decompose=_add_norm_down("layer_norm")),
    OpRow("sinkhorn", ("x",), _infer_sinkhorn, _sinkhorn, attrs={"iterations": REQUIRED, "eps": REQUIRED}, factors="tij->tkl",
          cost=lambda a, o, r: scaled(size(o[0].shape), 2 * (2 * a["iterations"] - 1)), decompose=_sinkhorn_down,
          domain={"x": lambda values: np.abs(values) + 1e-3}),
    OpRow("quantize", ("x",), _infer_quantize, _quantize, attrs={"group": 32}, factors="tk->tc,tg,ts",
          cost=lambda a, o, r: scaled(size(o[0].shape), 3)),
]

QUANTIZABLE = tuple(row.name for row in ROWS if row.operands[0].endswith("+"))
"""Linear maps: operators that take ``quantize``'s three results in place of their input."""
