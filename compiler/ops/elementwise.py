"""Elementwise operators, and ``group``: several of them as one."""

from __future__ import annotations

import math
from typing import Any, Mapping

import numpy as np

from adaptc.ops.table import REQUIRED, OpRow, broadcast_shapes, expect, row, scaled, size
from adaptc.protocol import TensorSpec

NUMPY = {"f32": np.float32, "f16": np.float16, "f64": np.float64, "i64": np.int64, "i32": np.int32, "i8": np.int8,
         "u8": np.uint8, "i1": np.bool_}
"""Element dtype → numpy dtype (bf16 values are computed as float32)."""


def _erf(x: np.ndarray) -> np.ndarray:
    return np.frompyfunc(math.erf, 1, 1)(x.astype(np.float64)).astype(np.float32)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return (np.where(wide >= 0, 1.0, np.exp(np.minimum(wide, 0))) / (1.0 + np.exp(-np.abs(wide)))).astype(np.float32)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return (0.5 * wide * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))).astype(np.float32)


def _wide(function):
    """Transcendentals are evaluated in float64 and rounded once, so that the oracle's own error is half an ulp."""
    return lambda x: function(x.astype(np.float64)).astype(np.float32)


UNARY = {
    "neg": np.negative, "abs": np.abs, "exp": _wide(np.exp), "log": _wide(np.log), "sqrt": _wide(np.sqrt),
    "rsqrt": _wide(lambda x: 1 / np.sqrt(x)), "reciprocal": _wide(np.reciprocal), "cos": _wide(np.cos),
    "sin": _wide(np.sin), "tanh": _wide(np.tanh), "erf": _erf, "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x), "gelu_tanh": _gelu_tanh,
    "gelu": lambda x: (0.5 * x.astype(np.float64) * (1 + _erf(x * np.float32(math.sqrt(0.5))))).astype(np.float32),
}
BINARY = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum, "min": np.minimum,
    "pow": lambda x, y: np.power(x.astype(np.float64), y).astype(x.dtype),
}
COMPARE = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
           "ne": np.not_equal}


def _same(attrs, operands) -> tuple[TensorSpec, ...]:
    kinds = {o.dtype for o in operands}
    expect(len(kinds) == 1, f"elementwise: operands have dtypes {', '.join(sorted(kinds))}; insert a cast.")
    return (TensorSpec(operands[0].dtype, broadcast_shapes("elementwise", *(o.shape for o in operands))),)


def _flops(attrs, operands, results):
    return size(results[0].shape)


def _infer_select(attrs, operands):
    expect(operands[0].dtype == "i1", "select: the condition must be i1.")
    return _same(attrs, operands[1:])[:1] and (
        TensorSpec(operands[1].dtype, broadcast_shapes("select", *(o.shape for o in operands))),
    )


def _infer_compare(attrs, operands):
    expect(attrs["predicate"] in COMPARE, f"compare: unknown predicate {attrs['predicate']!r}.")
    return (TensorSpec("i1", _same(attrs, operands)[0].shape),)


def _infer_cast(attrs, operands):
    return (TensorSpec(attrs["dtype"], operands[0].shape),)


def evaluate_body(attrs: Mapping[str, Any], values: list) -> list:
    """Runs a group's body rows over arrays; see ``protocol.OpSpec`` for their form."""
    values = list(values)
    for name, indices, inner in attrs["body"]:
        operator = row(name)
        values.extend(operator.meaning(operator.complete(dict(inner)), *(values[i] for i in indices)))
    return [values[i] for i in attrs["yields"]]


def _infer_group(attrs, operands):
    specs = list(operands)
    for name, indices, inner in attrs["body"]:
        operator = row(name)
        expect(operator.elementwise, f"group: {name!r} isn't elementwise.")
        specs.extend(operator.results(dict(inner), [specs[i] for i in indices]))
    return tuple(specs[i] for i in attrs["yields"])


_SIMPLE = {
    # silu(x) = x·σ(x); gelu(x) = x·(1 + erf(x/√2))/2; gelu_tanh is its tanh form (Hendrycks & Gimpel 2016)
    "silu": lambda b, a, x: (b.mul(x, b.sigmoid(x)),),
    "sigmoid": lambda b, a, x: (b.reciprocal(b.add(b.exp(b.neg(x)), b.scalar(1.0))),),
    "gelu": lambda b, a, x: (
        b.mul(b.mul(x, b.scalar(0.5)), b.add(b.erf(b.mul(x, b.scalar(math.sqrt(0.5)))), b.scalar(1.0))),
    ),
    "gelu_tanh": lambda b, a, x: (
        b.mul(
            b.mul(x, b.scalar(0.5)),
            b.add(
                b.tanh(
                    b.mul(
                        b.add(x, b.mul(b.mul(b.mul(x, x), x), b.scalar(0.044715))),
                        b.scalar(math.sqrt(2 / math.pi)),
                    )
                ),
                b.scalar(1.0),
            ),
        ),
    ),
}

ROWS = [
    *(
        OpRow(name, ("x",), _same, (lambda f: lambda a, x: (f(x),))(function), cost=_flops, elementwise=True,
              decompose=_SIMPLE.get(name))
        for name, function in UNARY.items()
    ),
    *(
        OpRow(name, ("x", "y"), _same, (lambda f: lambda a, x, y: (f(x, y),))(function), cost=_flops, elementwise=True)
        for name, function in BINARY.items()
    ),
    OpRow("compare", ("x", "y"), _infer_compare, lambda a, x, y: (COMPARE[a["predicate"]](x, y),),
          attrs={"predicate": REQUIRED}, cost=_flops, elementwise=True),
    OpRow("select", ("condition", "x", "y"), _infer_select, lambda a, c, x, y: (np.where(c, x, y),), cost=_flops,
          elementwise=True),
    OpRow("cast", ("x",), _infer_cast, lambda a, x: (x.astype(NUMPY[a["dtype"]]),), attrs={"dtype": REQUIRED},
          elementwise=True),
    OpRow("group", ("operands*",), _infer_group, lambda a, *xs: tuple(evaluate_body(a, list(xs))),
          attrs={"body": REQUIRED, "yields": REQUIRED}, elementwise=True,
          cost=lambda a, o, r: scaled(size(r[0].shape), len(a["body"]))),
]
