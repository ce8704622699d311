"""Elementwise operators, and ``group``: several of them as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from adaptc.ops.table import REQUIRED, OpRow, added, broadcast_shapes, expect, row, size
from adaptc.protocol import TensorSpec

NUMPY = {"f32": np.float32, "f16": np.float16, "bf16": np.float32, "f64": np.float64, "i64": np.int64,
         "i32": np.int32, "i8": np.int8, "u8": np.uint8, "i1": np.bool_}
"""Element dtype → numpy dtype (bf16 values are float32 values whose lower half is zero)."""

FLOATS = ("f32", "f16", "bf16", "f64")
NUMBERS = (*FLOATS, "i64", "i32", "i8", "u8")


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """``values`` as elements of ``dtype``, in its numpy dtype: rounded to nearest even, beyond the range infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        made = np.asarray(values).astype(NUMPY[dtype])
    if dtype != "bf16":
        return made
    bits = np.ascontiguousarray(made).view(np.uint32)
    upper = ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32).reshape(made.shape)
    return np.where(np.isnan(made), made, upper)  # a NaN's payload could carry into its sign


_erf = np.vectorize(math.erf, otypes=[np.float64])
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(np.minimum(x, 0)) / (1 + np.exp(-np.abs(x)))


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    """x·(1 + tanh u)/2 as x·σ(2u), which loses nothing where tanh is almost -1; so does erfc in gelu."""
    return x * _sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def _wide(function):
    """Transcendentals are evaluated in float64 and rounded once, so that the oracle's own error is half an ulp."""

    def evaluate(x):
        with np.errstate(all="ignore"):
            return function(x.astype(np.float64)).astype(x.dtype)

    return evaluate


EXACT = {"neg": np.negative, "abs": np.abs}
TRANSCENDENTAL = {
    "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "reciprocal": np.reciprocal,
    "cos": np.cos, "sin": np.sin, "tanh": np.tanh, "erf": _erf, "sigmoid": _sigmoid, "silu": lambda x: x * _sigmoid(x),
    "gelu_tanh": _gelu_tanh, "gelu": lambda x: 0.5 * x * _erfc(-x * math.sqrt(0.5)),
}
UNARY = EXACT | {name: _wide(function) for name, function in TRANSCENDENTAL.items()}
BINARY = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum, "min": np.minimum,
    "pow": lambda x, y: np.power(x.astype(np.float64), y).astype(x.dtype),
}
ALLOWED = dict.fromkeys((*TRANSCENDENTAL, "div", "pow"), FLOATS) | dict.fromkeys((*EXACT, "sub"), NUMBERS)
"""Operator → dtypes it is defined on; the others are defined on all."""
COMPARE = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
           "ne": np.not_equal}


def _one_dtype(name: str, operands) -> str:
    kinds = sorted({o.dtype for o in operands})
    expect(len(kinds) == 1, f"{name}: operands have dtypes {', '.join(kinds)}; insert a cast.")
    allowed = ALLOWED.get(name, tuple(NUMPY))
    expect(kinds[0] in allowed, f"{name}: isn't defined on {kinds[0]}, only on {', '.join(allowed)}; insert a cast.")
    return kinds[0]


def _same(name: str):
    """Inference for operands of one dtype, whose result has it too."""

    def infer(attrs, operands) -> tuple[TensorSpec, ...]:
        return (TensorSpec(_one_dtype(name, operands), broadcast_shapes(name, *(o.shape for o in operands))),)

    return infer


def _flops(attrs, operands, results):
    return size(results[0].shape)


def _infer_select(attrs, operands):
    expect(operands[0].dtype == "i1", "select: the condition must be i1.")
    dtype = _one_dtype("select", operands[1:])
    return (TensorSpec(dtype, broadcast_shapes("select", *(o.shape for o in operands))),)


def _infer_compare(attrs, operands):
    expect(attrs["predicate"] in COMPARE, f"compare: unknown predicate {attrs['predicate']!r}.")
    return (TensorSpec("i1", _same("compare")(attrs, operands)[0].shape),)


def _infer_cast(attrs, operands):
    expect(attrs["dtype"] in NUMPY, f"cast: unknown dtype {attrs['dtype']!r}; dtypes are {', '.join(NUMPY)}.")
    return (TensorSpec(attrs["dtype"], operands[0].shape),)


def evaluate_body(attrs: Mapping[str, Any], values: list, between: Callable = lambda value: value) -> list:
    """Runs a group's body rows over arrays; see ``protocol.OpSpec`` for their form. ``between`` is applied to the
    results of all but constants."""
    values = list(values)
    for name, indices, inner in attrs["body"]:
        operator = row(name)
        results = operator.meaning(operator.complete(dict(inner)), *(values[i] for i in indices))
        values.extend(between(result) if indices else result for result in results)
    return [values[i] for i in attrs["yields"]]


def _infer_group(attrs, operands):
    specs = list(operands)
    for name, indices, inner in attrs["body"]:
        operator = row(name)
        simple = operator.elementwise or not operator.operands
        expect(simple and "body" not in operator.attrs, f"group: {name!r} isn't elementwise.")
        expect(all(i < len(specs) for i in indices), f"group: {name!r} reads a value that comes after it.")
        specs.extend(operator.results(dict(inner), [specs[i] for i in indices]))
        expect(operator.elementwise or specs[-1].shape == (), f"group: its {name!r} has shape {specs[-1].shape}.")
    expect(all(i < len(specs) for i in attrs["yields"]), "group: it yields a value that it doesn't have.")
    return tuple(specs[i] for i in attrs["yields"])


def _group_flops(attrs, operands, results):
    specs, total = list(operands), {}
    for name, indices, inner in attrs["body"]:
        operator, given = row(name), [specs[i] for i in indices]
        full = operator.complete(dict(inner))
        made = operator.results(full, given)
        total = added(total, operator.cost(full, given, made))
        specs.extend(made)
    return total


def _ungroup(b, attrs, *values):
    values = list(values)
    for name, indices, inner in attrs["body"]:
        values.append(b.op(name, *(values[i] for i in indices), **dict(inner)))
    return tuple(values[i] for i in attrs["yields"])


def _affine(b, x, scale: float = 1.0, offset: float = 0.0):
    """x·scale + offset, in x's dtype."""
    x = x if scale == 1 else b.mul(x, b.scalar(scale, b.dtype(x)))
    return x if offset == 0 else b.add(x, b.scalar(offset, b.dtype(x)))


def _gelu_tanh_down(b, a, x):
    cubic = b.add(x, _affine(b, b.mul(b.mul(x, x), x), 0.044715))
    return (b.mul(_affine(b, x, 0.5), _affine(b, b.tanh(_affine(b, cubic, math.sqrt(2 / math.pi))), offset=1.0)),)


_SIMPLE = {
    # silu(x) = x·σ(x); gelu(x) = x·(1 + erf(x/√2))/2; gelu_tanh is its tanh form (Hendrycks & Gimpel 2016)
    "silu": lambda b, a, x: (b.mul(x, b.sigmoid(x)),),
    "sigmoid": lambda b, a, x: (b.reciprocal(_affine(b, b.exp(b.neg(x)), offset=1.0)),),
    "gelu": lambda b, a, x: (
        b.mul(_affine(b, x, 0.5), _affine(b, b.erf(_affine(b, x, math.sqrt(0.5))), offset=1.0)),
    ),
    "gelu_tanh": _gelu_tanh_down,
}

ROWS = [
    *(
        OpRow(name, ("x",), _same(name), (lambda f: lambda a, x: (f(x),))(function), cost=_flops, elementwise=True,
              decompose=_SIMPLE.get(name))
        for name, function in UNARY.items()
    ),
    *(
        OpRow(name, ("x", "y"), _same(name), (lambda f: lambda a, x, y: (f(x, y),))(function), cost=_flops,
              elementwise=True)
        for name, function in BINARY.items()
    ),
    OpRow("compare", ("x", "y"), _infer_compare, lambda a, x, y: (COMPARE[a["predicate"]](x, y),),
          attrs={"predicate": REQUIRED}, cost=_flops, elementwise=True),
    OpRow("select", ("condition", "x", "y"), _infer_select, lambda a, c, x, y: (np.where(c, x, y),), cost=_flops,
          elementwise=True),
    OpRow("cast", ("x",), _infer_cast, lambda a, x: (rounded(x, a["dtype"]),), attrs={"dtype": REQUIRED},
          elementwise=True),
    OpRow("group", ("operands*",), _infer_group, lambda a, *xs: tuple(evaluate_body(a, list(xs))),
          attrs={"body": REQUIRED, "yields": REQUIRED}, elementwise=True, decompose=_ungroup,
          cost=_group_flops),
]
