"""The operator table: what rows infer, mean, decompose into, cost and claim about themselves agree."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptc.errors import LegalityError
from adaptc.formats import FORMATS
from adaptc.ops.axes import axis_map
from adaptc.ops.dense import split_activation
from adaptc.ops.elementwise import NUMPY, UNARY, rounded
from adaptc.ops.mixing import RowState, oracle_state, store
from adaptc.ops.table import OpRow, broadcast_shapes, problem, row, size, table
from adaptc.planner.cost import cost_of, evaluate
from adaptc.protocol import OpSpec, StateSpec, TensorSpec

torch.set_num_threads(1)
Values = Callable[[np.random.Generator, Mapping[str, int]], Any]


@dataclass(frozen=True)
class Sample:
    """Operands and attributes that a row accepts. ``given``: operand → its value from (generator, sizes), where a
    normal distribution doesn't do."""

    operands: tuple
    attrs: dict[str, Any] = field(default_factory=dict)
    given: dict[int, Values] = field(default_factory=dict)


def f(*shape) -> TensorSpec:
    return TensorSpec("f32", shape)


def t(dtype: str, *shape) -> TensorSpec:
    return TensorSpec(dtype, shape)


def below(limit: int | str, name: str = "T") -> Values:
    """Indices under ``limit``, one for each of the dimension ``name``."""
    return lambda rng, sizes: rng.integers(0, sizes.get(limit, limit), sizes[name]).astype(np.int32)


def positive(dtype: str = "f32", *shape) -> Values:
    return lambda rng, sizes: rng.uniform(0.1, 4, [sizes.get(d, d) for d in shape]).astype(NUMPY[dtype])


def quantized(k: int) -> dict[int, Values]:
    """Operands 0 to 2: what quantize gives for one x."""

    def part(i: int) -> Values:
        x = lambda sizes: np.random.default_rng(7).normal(size=(sizes["T"], k)).astype(np.float32)  # noqa: E731
        return lambda rng, sizes: row("quantize").meaning({"group": 32}, x(sizes))[i]

    return {i: part(i) for i in range(3)}


CODES = (t("i8", "T", 64), f("T", 2), f("T", 4))
KV = StateSpec((("k", 2, 8), ("v", 2, 6)), "f16", 0, 0, 0, 0)
LATENT = StateSpec((("latent", 1, 8),), "f16", 0, 0, 0, 0)
WHERE = (t("i32", "T"), t("i32", "T"))


def places(first: int) -> dict[int, Values]:
    """Positions and requests, operands ``first`` and the next: all tokens of one request."""
    return {first: lambda rng, sizes: np.arange(sizes["T"], dtype=np.int32),
            first + 1: lambda rng, sizes: np.zeros(sizes["T"], np.int32)}


ATTENTION = places(3)


def filled(rng, sizes):
    """KV with rows of one request."""
    state = RowState(KV)
    for position in range(sizes["T"]):
        state.append(0, position, [rng.standard_normal((heads, width)) for _, heads, width in KV.parts])
    return state


HEADS = (f("T", 4, 8), f("T", 2, 8), f("T", 2, 6), *WHERE)
INDEX = StateSpec((("index", 1, 8),), "f16", 0, 0, 0, 0)
INDEXED = (f("T", 3, 8), f("T", 8), f("T", 3), *WHERE, INDEX)
EARLIER = {6: lambda rng, sizes: np.stack([np.arange(sizes["T"]), np.full(sizes["T"], -1)], 1).astype(np.int32) // 2}
"""Rows that tokens choose: the one half as far from the start, and none."""
BODY = (("mul", (0, 1), ()), ("constant", (), (("dtype", "f32"), ("shape", ()), ("value", 2.0))), ("add", (2, 3), ()),
        ("silu", (4,), ()))

SAMPLES: dict[str, tuple[Sample, ...]] = {
    **{name: (Sample((f("T", 3, 4),)), Sample((f(),)), Sample((t("f64", 5),)))
       for name in ("neg", "abs", "exp", "cos", "sin", "tanh", "erf", "sigmoid", "silu", "gelu", "gelu_tanh")},
    **{name: (Sample((f("T", 4),), given={0: positive("f32", "T", 4)}),) for name in ("log", "sqrt", "rsqrt",
                                                                                   "reciprocal")},
    **{name: (Sample((f("T", 3, 4), f("T", 1, 4))), Sample((f("T", 4), f())), Sample((t("i32", "T"), t("i32", "T"))))
       for name in ("add", "sub", "mul", "max", "min")},
    "div": (Sample((f("T", 4), f(4)), given={1: positive("f32", 4)}),),
    "pow": (Sample((f("T", 4), f()), given={0: positive("f32", "T", 4)}),),
    "compare": tuple(Sample((f("T", 4), f("T", 1)), {"predicate": p}) for p in ("lt", "le", "gt", "ge", "eq", "ne")),
    "select": (Sample((t("i1", "T", 1), f("T", 4), f())),),
    "cast": tuple(Sample((f("T", 4),), {"dtype": d}) for d in ("f16", "bf16", "f64", "i32", "i64", "i8", "i1")),
    "group": (Sample((f("T", 4), f("T", 1)), {"body": BODY, "yields": (5, 2)}),),
    "constant": (Sample((), {"value": 1.5, "shape": (2, 3)}), Sample((), {"value": (1, 2), "shape": (2,),
                                                                         "dtype": "i32"})),
    "reshape": (Sample((f("T", 6),), {"shape": ("T", 2, 3)}), Sample((f(1, "T", 6),), {"shape": ("T", 6)})),
    "transpose": (Sample((f("T", 2, 3),), {"perm": (2, 0, 1)}),),
    "broadcast": (Sample((f("T", 1, 3),), {"shape": ("T", 4, 3), "dims": (0, 1, 2)}),
                  Sample((f(3), t("i32", "T")), {"shape": (2, "T", 3), "dims": (2,)}),
                  Sample((f(1, 3), t("i32", "T")), {"shape": ("T", 3), "dims": (0, 1)})),
    "slice": (Sample((f("T", 7),), {"starts": (0, 1), "limits": (-1, 6), "strides": (1, 2)}),),
    "concat": (Sample((f("T", 3), f("T", 2), f("T", 1)), {"axis": 1}),),
    "pad": (Sample((f("T", 3),), {"low": (0, 1), "high": (0, 2), "value": -1.0}),),
    "reduce": tuple(Sample((f("T", 3, 4),), {"kind": k, "axes": a, "keepdims": keep})
                    for k, a, keep in (("sum", (2,), False), ("mean", (1, 2), True), ("max", (1,), False),
                                       ("min", (1,), True))),
    "gather_rows": (Sample((f("T", 2, 3), t("i32", "S")), given={1: below("T", "S")}),),
    "dot_general": (Sample((f("T", 8), f(5, 8)), {"contract_x": (1,), "contract_y": (1,)}),
                    Sample((f(2, "T", 8), f(2, 8, 3)), {"batch": (0,), "contract_x": (2,), "contract_y": (1,)})),
    "embedding": (Sample((t("i32", "T"), f(11, 6)), given={0: below(11)}),),
    "linear": (Sample((f("T", 64), f(5, 64))), Sample((f("T", 64), f(5, 64), f(5))),
               Sample((*CODES, f(5, 64), f(5)), given=quantized(64))),
    "linears": (Sample((f("T", 64), f(5, 64), f(3, 64))), Sample((*CODES, f(5, 64), f(3, 64)), given=quantized(64)),
                Sample((f("T", 64), f(5, 64), f(5), f(3, 64), f(4, 64), f(4)))),
    "gated_linear": (*(Sample((f("T", 64), f(5, 64), f(5, 64)), {"act": a}) for a in ("silu", "gelu_tanh", "gelu")),
                     Sample((f("T", 64), f(5, 64), f(5, 64), f(5)), {"act": "silu"}),
                     Sample((f("T", 64), f(5, 64), f(5), f(5, 64), f(5)), {"act": "silu"}),
                     Sample((*CODES, f(5, 64), f(5, 64)), {"act": "silu"}, quantized(64))),
    "rms_norm": (Sample((f("T", 6), f(6)), {"eps": 1e-5}), Sample((f("T", 3, 6), f(6)), {"eps": 1e-6})),
    "add_rms_norm": (Sample((f("T", 6), f("T", 6), f(6)), {"eps": 1e-5}),),
    "layer_norm": (Sample((f("T", 6), f(6)), {"eps": 1e-5}), Sample((f("T", 3, 6), f(6), f(6)), {"eps": 1e-6})),
    "add_layer_norm": (Sample((f("T", 6), f("T", 6), f(6)), {"eps": 1e-5}),
                       Sample((f("T", 6), f("T", 6), f(6), f(6)), {"eps": 1e-6})),
    "top_k": (Sample((f("T", 7),), {"k": 3}), Sample((f("T", 2, 4),), {"k": 1})),
    "take_along": (Sample((f("T", 7), t("i32", "T", 3)), given={1: lambda r, s: r.integers(0, 7, (s["T"], 3), np.int32)}),),
    "expert_linear": tuple(
        Sample((x, t("i32", "T", 2), f(6, 5, 8), *bias), given={1: lambda r, s: r.integers(0, 4, (s["T"], 2), np.int32)})
        for x, bias in ((f("T", 8), ()), (f("T", 2, 8), (f(6, 5),)))),
    "head_linear": (Sample((f("T", 3, 8), f(20, 8)), {"start": 2, "step": 6, "rows": 4}),
                    Sample((f("T", 3, 4), f(20, 8)), {"start": 2, "step": 6, "rows": 4, "transposed": True})),
    "quantize": (Sample((f("T", 64),), {"group": 32}),),
    "rope": (Sample((f("T", 3, 8), f("T", 8), f("T", 8))),
             *(Sample((f("T", 3, 12), f("T", table), f("T", table)), {"interleaved": pairs, "turned": turned})
               for pairs in (False, True) for turned, table in ((0, 12), (0, 6), (8, 8), (8, 4)))),
    "attention": (Sample((*HEADS, KV), {"scaling": 0.3}, ATTENTION),
                  Sample((*HEADS, replace(KV, dtype="bf16", window=2)), {"scaling": 0.3, "window": 2, "softcap": 5.0},
                         ATTENTION),
                  *(Sample((*HEADS, KV, *[f(4)] * len(extras)), {"scaling": 0.3, "extras": extras}, ATTENTION)
                    for extras in (("sinks",), ("slopes",), ("sinks", "slopes"))),
                  Sample((*HEADS, KV, f("T", 4), f("T", 4, 3)), {"scaling": 0.3, "extras": ("query_sinks", "distances")},
                         ATTENTION),
                  Sample((*HEADS, KV, t("i32", "T", 2)), {"scaling": 0.3, "extras": ("rows",)}, ATTENTION | EARLIER)),
    "index_rows": (Sample(INDEXED, {"top_k": 3, "scaling": 0.3}, ATTENTION),),
    "index_blocks": tuple(Sample((*INDEXED[:2], *WHERE, INDEX), {"top_k": 2, "block": 2, "local": local}, places(2))
                          for local in (0, 1)),
    "recall": tuple(Sample((HEADS[0], *HEADS[3:], KV, *[f(4)] * len(extras)), {"scaling": 0.3, "extras": extras},
                           {1: ATTENTION[3], 2: ATTENTION[4], 3: filled}) for extras in ((), ("sinks",))),
    "latent_attention": (Sample((f("T", 4, 8), f("T", 8), *WHERE, LATENT), {"scaling": 0.3, "value_width": 6}, places(2)),
                         Sample((f("T", 4, 8), f("T", 8), *WHERE, LATENT, t("i32", "T", 2)),
                                {"scaling": 0.3, "value_width": 6, "extras": ("rows",)}, places(2) | {5: EARLIER[6]})),
    "convolve": tuple(Sample((f("T", 6), f(6, 4), *WHERE, StateSpec.fixed("window", 3, 6), *bias), given=places(2))
                      for bias in ((), (f(6),))),
    "recur": tuple(Sample((f("T", 2, k), f("T", 2, k), f("T", 2, v), f("T", 2, decays), *WHERE,
                           StateSpec.fixed("state", 2, k * v), *beta), {"read": read}, places(4))
                   for k, v, decays, beta, read in ((4, 3, 4, (f("T", 2),), "after"), (4, 1, 1, (), "before"),
                                                    (1, 1, 1, (), "after"), (3, 5, 3, (), "after"))),
    "running_max": (Sample((f("T", 6), f("T", 6), *WHERE, StateSpec.fixed("max", 1, 6)), given=places(2)),),
}

LEAVES = {"recall", "convolve", "recur", "running_max", "expert_linear", "top_k", "attention", "latent_attention", "index_rows", "index_blocks", "quantize",
          "constant", "reshape", "transpose", "broadcast", "slice",
          "concat", "pad", "reduce", "gather_rows", "dot_general", "compare", "select", "cast", "neg", "abs", "exp",
          "log", "sqrt", "rsqrt", "reciprocal", "cos", "sin", "tanh", "erf", "add", "sub", "mul", "div", "max", "min",
          "pow"}
"""Operators that are given in terms of no others: a backend must have them."""

CASES = [pytest.param(name, sample, id=f"{name}-{i}") for name, samples in SAMPLES.items()
         for i, sample in enumerate(samples)]
SIZES = ({"T": 5, "S": 3, "R": 2}, {"T": 1, "S": 1, "R": 1})
"""Sizes that symbols take: a prefill step, and a decode step, whose dynamic dimensions look like static ones."""


def values(sample: Sample, sizes: Mapping[str, int] = SIZES[0]) -> list:
    rng = np.random.default_rng(3)
    made = []
    for i, spec in enumerate(sample.operands):
        if i in sample.given:
            made.append(sample.given[i](rng, sizes))
        elif isinstance(spec, StateSpec):
            made.append(oracle_state(spec))
        else:
            drawn = rng.normal(scale=2, size=[sizes.get(d, d) for d in spec.shape])
            made.append(np.asarray(drawn).astype(NUMPY[spec.dtype]))
    return made


def attrs_of(name: str, sample: Sample) -> dict[str, Any]:
    return row(name).complete(sample.attrs)


def evaluate_row(name: str, sample: Sample, operands: list) -> tuple:
    return row(name).meaning(attrs_of(name, sample), *operands)


class Evaluator:
    """The builder's interface over arrays: operators are decomposed as far as they go, then evaluated."""

    def __getattr__(self, name: str):
        return lambda *operands, **attrs: self.op(name, *operands, **attrs)

    def op(self, name: str, *operands, **attrs):
        operator = row(name)
        full = operator.complete(attrs)
        made = (operator.decompose(self, full, *operands) if operator.decompose
                else operator.meaning(full, *operands))
        return made[0] if len(made) == 1 else made

    def scalar(self, value, dtype: str = "f32"):
        return self.constant(value=value, shape=(), dtype=dtype)

    def dtype(self, value) -> str:
        return next(name for name, kind in NUMPY.items() if kind == value.dtype)

    def shape(self, value) -> tuple:
        return value.shape

    def rank(self, value) -> int:
        return value.ndim

    def activation(self, operands):
        return split_activation(operands)


# ---- samples against rows


def test_every_row_has_a_sample():
    assert set(SAMPLES) == set(table())


@pytest.mark.parametrize("sizes", SIZES, ids=("prefill", "decode"))
@pytest.mark.parametrize("name,sample", CASES)
def test_inference_says_what_the_meaning_gives(name, sample, sizes):
    inferred = row(name).results(sample.attrs, sample.operands)
    made = evaluate_row(name, sample, values(sample, sizes))
    assert len(inferred) == len(made)
    for spec, array in zip(inferred, made):
        assert array.shape == tuple(sizes.get(d, d) for d in spec.shape)
        assert array.dtype == NUMPY[spec.dtype]


@pytest.mark.parametrize("sizes", SIZES, ids=("prefill", "decode"))
@pytest.mark.parametrize("name,sample", [c for c in CASES if row(c.values[0]).decompose])
def test_decomposition_means_the_same(name, sample, sizes):
    operands = values(sample, sizes)
    wanted = evaluate_row(name, sample, operands)
    got = row(name).decompose(Evaluator(), attrs_of(name, sample), *operands)
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6 * max(1.0, np.abs(b).max()))


def test_what_has_no_decomposition_is_a_documented_leaf():
    assert {name for name, r in table().items() if r.decompose is None} == LEAVES


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_rows_are_well_formed_and_factors_fit(name):
    operator = row(name)
    assert problem(operator) == ""
    if operator.factors == "...":
        return
    right = operator.factors.split("->")[1].split(",")
    for sample in SAMPLES[name]:
        results = operator.results(sample.attrs, sample.operands)
        assert right[0].endswith("*") or len(right) == len(results)
        for term, spec in zip(right, results):
            assert len(term.strip(".*")) <= len(spec.shape)


@pytest.mark.parametrize("name,sample", CASES)
def test_axes_are_independent_slices(name, sample):
    """Permuting an axis of every operand that has it permutes the result: token locality, and what sharding may cut."""
    operator, specs = row(name), sample.operands
    if operator.state is not None:
        pytest.skip("tokens meet in the state")
    operands = values(sample)
    made = evaluate_row(name, sample, operands)
    inferred = operator.results(sample.attrs, specs)
    for number, result in enumerate(made):
        mapped = axis_map(operator, attrs_of(name, sample), specs, inferred, number)
        for axis, length in enumerate(result.shape):
            places = [(i, a) for i, axes in enumerate(mapped) for a, to in enumerate(axes)
                      if to == axis and operands[i].shape[a] == length]
            if length < 2 or not places:
                continue
            order = np.roll(np.arange(length), 1)
            turned = list(operands)
            for i, a in places:
                turned[i] = np.take(turned[i], order, a)
            got = evaluate_row(name, sample, turned)[number]
            np.testing.assert_allclose(got, np.take(result, order, axis), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name,sample", CASES)
def test_flags_are_true_to_the_meaning(name, sample):
    operator, operands = row(name), values(sample)
    made = evaluate_row(name, sample, operands)
    if operator.views:
        np.testing.assert_array_equal(np.sort(made[0], axis=None), np.sort(operands[0], axis=None))
    if operator.aliases:
        np.testing.assert_array_equal(made[0].ravel(), operands[0].ravel())
    if operator.elementwise:
        wide = np.broadcast_shapes(*(x.shape for x in operands))
        spread = [np.ascontiguousarray(np.broadcast_to(x, wide)).ravel() for x in operands]
        flat = operator.meaning(attrs_of(name, sample), *spread)
        for a, b in zip(flat, made):
            np.testing.assert_array_equal(a, np.broadcast_to(b, wide).ravel())
    if operator.gathers:
        which, rows = operator.gathers
        unread = np.setdiff1d(np.arange(len(operands[which])), operands[rows])
        spoiled = list(operands)
        spoiled[which] = operands[which].copy()
        spoiled[which][unread] = np.nan
        np.testing.assert_array_equal(operator.meaning(attrs_of(name, sample), *spoiled)[0], made[0])


# ---- what rows refuse

REFUSED = [
    ("add", (f("T", 4), f("S", 4)), {}, "dimension 0 is T and S"),
    ("add", (f("T", 4), f(5, 4)), {}, "dimension 0 is T and 5"),
    ("add", (f(4), t("i32", 4)), {}, "dtypes f32, i32; insert a cast"),
    ("add", (f(4),), {}, r"got 1 operands, expected \(x, y\)"),
    ("add", (f(4), KV), {}, "operand 1 must be a tensor"),
    ("exp", (t("i32", 4),), {}, "exp: isn't defined on i32"),
    ("div", (t("i32", 4), t("i32", 4)), {}, "div: isn't defined on i32"),
    ("neg", (t("i1", 4),), {}, "neg: isn't defined on i1"),
    ("exp", (f(4),), {"base": 2}, "unknown attribute 'base'; it has: none"),
    ("cast", (f(4),), {}, "attribute 'dtype' is missing"),
    ("cast", (f(4),), {"dtype": "f8"}, "unknown dtype 'f8'"),
    ("select", (f(4), f(4), f(4)), {}, "condition must be i1"),
    ("compare", (f(4), f(4)), {"predicate": "lte"}, "unknown predicate 'lte'"),
    ("group", (f(4),), {"body": (("linear", (0, 0), ()),), "yields": (1,)}, "'linear' isn't elementwise"),
    ("group", (f(4),), {"body": (("exp", (1,), ()),), "yields": (1,)}, "reads a value that comes after it"),
    ("group", (f(4),), {"body": (("exp", (0,), ()),), "yields": (2,)}, "yields a value that it doesn't have"),
    ("group", (f(4),), {"body": (("constant", (), (("shape", (4,)), ("value", 0.0))),), "yields": (1,)}, "has shape"),
    ("constant", (), {"value": 0.0, "shape": ("T",)}, "must be static"),
    ("constant", (), {"value": (1, 2, 3), "shape": (2,)}, "doesn't fill"),
    ("constant", (), {"value": ((1, 2), (3,)), "shape": (2, 2)}, "doesn't fill"),
    ("reshape", (f("T", 6),), {"shape": ("T", 5)}, "other elements"),
    ("reshape", (f("T", "S"),), {"shape": ("S", "T")}, "more than one dynamic dimension"),
    ("broadcast", (f(3),), {"shape": ("T", 3), "dims": (1,)}, "nothing says how long T is"),
    ("broadcast", (f(3), t("i32", "S")), {"shape": ("T", 3), "dims": (1,)}, "nothing says how long T is"),
    ("broadcast", (f("S", 3), t("i32", "T")), {"shape": ("S", "T", 3), "dims": (0, 2)}, "isn't the second operand's"),
    ("broadcast", (f(3, 4),), {"shape": (4, 3), "dims": (1, 0)}, "must ascend"),
    ("broadcast", (f(3),), {"shape": (4,), "dims": (0,)}, "operand axis of 3 doesn't fit"),
    ("transpose", (f(3, 4),), {"perm": (0, 0)}, "no permutation"),
    ("slice", (f("T", 4),), {"starts": (1, 0), "limits": (-1, 4), "strides": (1, 1)}, "T can't be cut"),
    ("slice", (f(4),), {"starts": (0,), "limits": (5,), "strides": (1,)}, "leaves a dimension of 4"),
    ("slice", (f(4, 4),), {"starts": (0,), "limits": (4,), "strides": (1,)}, "starts has 1 entries"),
    ("concat", (f("T", 3), f("T", 3)), {"axis": 0}, "dynamic"),
    ("concat", (f(3), f(3)), {"axis": -1}, "aren't different axes"),
    ("concat", (f(3), t("i32", 3)), {"axis": 0}, "dtypes f32, i32"),
    ("pad", (f("T", 3),), {"low": (1, 0), "high": (0, 0)}, "T can't be padded"),
    ("pad", (f(3),), {"low": (-1,), "high": (0,)}, "can't be negative"),
    ("reduce", (f(3),), {"kind": "sum", "axes": (1,)}, "aren't different axes"),
    ("reduce", (f(3),), {"kind": "prod", "axes": (0,)}, "unknown kind 'prod'"),
    ("reduce", (f(3),), {"kind": "sum", "axes": (0,), "keepdims": 1}, "'keepdims' must be of kind bool"),
    ("gather_rows", (f("T", 3), f("S")), {}, "rows are f32"),
    ("dot_general", (f(2, 3), f(3, 2)), {"contract_x": (0, 1), "contract_y": (1, 0)}, "expected one; reshape first"),
    ("dot_general", (f(2, 3), f(3, 2)), {"contract_x": (1,), "contract_y": (1,)}, "contracted axes are 3 and 2"),
    ("embedding", (f("T"), f(9, 4)), {}, "ids are f32"),
    ("linear", (f("T", 8), f(4, 9)), {}, r"expected \[T, K\] and \[N, K\]"),
    ("linear", (f("T", 8), f(4, 8), f(5)), {}, "the bias is"),
    ("linear", (f("T", 8), f(4, 8), f(4), f(4)), {}, "got 4 operands"),
    ("linear", (t("i8", "T", 64), f("T", 2)), {}, "got 2 operands"),
    ("linears", (f("T", 8), f(4, 8), f(4), f(3, 8), f(4)), {}, "the bias is"),
    ("linears", (f("T", 8), f(4, 8), f(4), f(4)), {}, r"the weight must be \[N, K\]"),
    ("gated_linear", (f("T", 8), f(4, 8), f(4)), {"act": "silu"}, "got 1 weights, expected gate and up"),
    ("rope", (f("T", 2, 8), f("T", 6), f("T", 6)), {"turned": 8}, "one a pair"),
    ("rope", (f("T", 2, 8), f("T", 8), f("T", 8)), {"turned": 10}, "10 of 8 columns turn"),
    ("rope", (f("T", 2, 8), f("T", 3), f("T", 3)), {"turned": 3}, "an even number"),
    ("linear", (t("i8", "T", 64), f("T", 3), f("T", 4), f(4, 64)), {}, "must be quantize's results"),
    ("linears", (f("T", 8),), {}, "got 1 operands"),
    ("gated_linear", (f("T", 8), f(4, 8), f(5, 8)), {"act": "silu"}, "gate is"),
    ("gated_linear", (f("T", 8), f(4, 8), f(4, 8)), {"act": "relu9"}, "unknown activation 'relu9'"),
    ("rms_norm", (f("T", 8), f(9)), {"eps": 1e-5}, "the weight"),
    ("add_rms_norm", (f("T", 8), f("S", 8), f(8)), {"eps": 1e-5}, "the residual"),
    ("quantize", (f("T", 33),), {"group": 32}, "33 columns don't divide"),
    ("quantize", (f(4, "T"),), {"group": 32}, "K static"),
    ("rope", (f("T", 2, 7), f("T", 7), f("T", 7)), {}, "expected an even number"),
    ("head_linear", (f("T", 3, 8), f(20, 8)), {"step": 6, "rows": 9}, "aren't apart within 20 rows"),
    ("head_linear", (f("T", 3, 8), f(20, 8)), {"start": 5, "step": 6, "rows": 4}, "aren't apart within 20 rows"),
    ("head_linear", (f("T", 3, 8), f(20, 8)), {"step": 6, "rows": 4, "transposed": True}, "8 columns a head, its matrix takes 4"),
    ("latent_attention", (f("T", 4, 8), f("T", 8), *HEADS[3:], KV), {"scaling": 1.0, "value_width": 6}, "rows of one part"),
    ("latent_attention", (f("T", 4, 6), f("T", 8), *HEADS[3:], LATENT), {"scaling": 1.0, "value_width": 6}, "one head of D"),
    ("latent_attention", (f("T", 4, 8), f("T", 8), *HEADS[3:], LATENT), {"scaling": 1.0, "value_width": 9}, "first 9 of 8"),
    ("attention", (*HEADS, f("T")), {"scaling": 1.0}, "operand 5 must be a state"),
    ("attention", (*HEADS, KV), {"scaling": 1.0, "window": 4}, "window 4, the state's is 0"),
    ("attention", (*HEADS, KV), {"scaling": 1.0, "chunked": True}, "chunked without a window"),
    ("attention", (f("T", 3, 8), *HEADS[1:], KV), {"scaling": 1.0}, "don't divide"),
    ("attention", (*HEADS[:3], t("i32", "S"), t("i32", "S"), KV), {"scaling": 1.0}, "expected one a token"),
    ("attention", (*HEADS, KV), {"scaling": 1.0, "softcap": "none"}, "'softcap' must be of kind float"),
    ("attention", (*HEADS, KV, f(4)), {"scaling": 1.0}, "got 7 operands"),
    ("attention", (*HEADS, KV), {"scaling": 1.0, "extras": ("sinks",)}, r"with extras \['sinks'\]"),
    ("attention", (*HEADS, KV, f(4), f(4)), {"scaling": 1.0, "extras": ("slopes", "sinks")}, "in this order"),
    ("attention", (*HEADS, KV, f(4)), {"scaling": 1.0, "extras": ("slope",)}, "expected some of"),
    ("attention", (*HEADS, KV, f(3)), {"scaling": 1.0, "extras": ("slopes",)}, r"slopes are f32\[3\]"),
    ("attention", (*HEADS, KV, f(4), f("T", 4)), {"scaling": 1.0, "extras": ("sinks", "query_sinks")}, "sinks of heads beside"),
    ("attention", (*HEADS, KV, f(4, 3)), {"scaling": 1.0, "extras": ("distances",)}, r"distances are f32\[4, 3\]"),
    ("attention", (*HEADS, StateSpec.fixed("state", 2, 8)), {"scaling": 1.0}, "kind 'fixed', expected 'rows'"),
    ("convolve", (f("T", 6), f(6, 1), *WHERE, StateSpec.fixed("window", 0, 6)), {}, r"\[6, W\] with W > 1"),
    ("convolve", (f("T", 6), f(5, 4), *WHERE, StateSpec.fixed("window", 3, 6)), {}, "weight is f32"),
    ("convolve", (f("T", 6), f(6, 4), *WHERE, StateSpec.fixed("window", 4, 6)), {}, "expected one part of 3 heads"),
    ("convolve", (f("T", 6), f(6, 4), *WHERE, KV), {}, "kind 'rows', expected 'fixed'"),
    ("recur", (f("T", 2, 4), f("T", 2, 4), f("T", 2, 3), f("T", 2, 4), *WHERE, StateSpec.fixed("state", 2, 12)),
     {"read": "now"}, "read is 'now', expected after or before"),
    ("recur", (f("T", 2, 4), f("T", 2, 4), f("T", 2, 3), f("T", 2, 2), *WHERE, StateSpec.fixed("state", 2, 12)), {},
     "decay is"),
    ("recur", (f("T", 2, 4), f("T", 2, 4), f("T", 2, 3), f("T", 2, 4), *WHERE, StateSpec.fixed("state", 2, 12), f("T", 3)),
     {}, "beta is"),
    ("running_max", (f("T", 6), f("T", 1), *WHERE, StateSpec.fixed("max", 1, 6)), {}, "decay is"),
    ("attention", (*HEADS, KV, t("i32", "S", 2)), {"scaling": 1.0, "extras": ("rows",)}, "rows are i32"),
    ("attention", (*HEADS, replace(KV, window=4), t("i32", "T", 2)), {"scaling": 1.0, "window": 4, "extras": ("rows",)},
     "with a window of 4"),
    ("index_rows", INDEXED, {"top_k": 0}, "top_k is 0"),
    ("index_rows", (*INDEXED[:5], KV), {"top_k": 3}, "the state keeps"),
    ("index_rows", (f("T", 3, 9), *INDEXED[1:]), {"top_k": 3}, "the query is"),
    ("index_blocks", (*INDEXED[:2], *WHERE, INDEX), {"top_k": 2, "block": 4, "local": 3}, "3 of them those nearest"),
    ("index_blocks", (*INDEXED[:2], *WHERE, KV), {"top_k": 2, "block": 4}, "the state keeps"),
    ("index_blocks", (f("T", 3, 9), INDEXED[1], *WHERE, INDEX), {"top_k": 2, "block": 4}, "the query is"),
]


@pytest.mark.parametrize("name,operands,attrs,message", REFUSED, ids=[f"{r[0]}-{i}" for i, r in enumerate(REFUSED)])
def test_misfits_are_refused_by_name(name, operands, attrs, message):
    with pytest.raises(LegalityError, match=message) as error:
        row(name).results(attrs, operands)
    assert name in str(error.value)


def test_unknown_operator_lists_the_table():
    with pytest.raises(LegalityError, match="unknown operator 'lineer'.*linear"):
        row("lineer")


def test_attribute_kinds_follow_defaults():
    assert row("attention").complete({"scaling": 1.0, "softcap": 30})["softcap"] == 30.0
    assert type(row("attention").complete({"scaling": 1.0, "softcap": 30})["softcap"]) is float
    assert row("dot_general").complete({"batch": [0], "contract_x": (1,), "contract_y": (1,)})["batch"] == (0,)


PRIMES = {"T": 5, "S": 7, "R": 11}
DIMS = st.lists(st.sampled_from((1, 2, 3, "T", "S", "R")), max_size=4).map(tuple)


@settings(deadline=None, derandomize=True)
@given(st.lists(DIMS, min_size=1, max_size=3))
def test_broadcasting_is_numpys_with_names_for_sizes(shapes):
    real = [tuple(PRIMES.get(d, d) for d in s) for s in shapes]
    try:
        wanted = np.broadcast_shapes(*real)
    except ValueError:
        with pytest.raises(LegalityError, match="dimension .* broadcast only when") as error:
            broadcast_shapes("add", *shapes)
        assert all(str(s) in str(error.value) for s in shapes)
        return
    assert tuple(PRIMES.get(d, d) for d in broadcast_shapes("add", *shapes)) == wanted


@given(st.integers(2, 9))
def test_a_symbol_never_meets_a_static_size(n):
    with pytest.raises(LegalityError, match=f"T and {n}"):
        broadcast_shapes("add", ("T",), (n,))


# ---- meanings against independent ones


def rope_tables(tokens: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(tokens)[:, None] * torch.rand(width // 2)[None]
    both = torch.cat([angles, angles], -1)
    return both.cos(), both.sin()


def test_rope_is_transformers():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    torch.manual_seed(0)
    x, (cos, sin) = torch.randn(6, 3, 8), rope_tables(6, 8)
    heads_first = x.transpose(0, 1)[None]
    wanted = apply_rotary_pos_emb(heads_first, heads_first, cos[None], sin[None])[0][0].transpose(0, 1)
    (got,) = row("rope").meaning(row("rope").complete({}), x.numpy(), cos.numpy(), sin.numpy())
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_rope_of_pairs_and_of_a_part_is_transformers():
    from transformers.models.cohere2.modeling_cohere2 import apply_rotary_pos_emb as of_pairs
    from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as of_a_part

    torch.manual_seed(0)
    x, (cos, sin) = torch.randn(6, 3, 12), rope_tables(6, 8)
    first = x.transpose(0, 1)[None]
    wanted = of_a_part(first, first, cos[None], sin[None])[0][0].transpose(0, 1)
    attrs = row("rope").complete({"interleaved": True, "turned": 8})
    (got,) = row("rope").meaning(attrs, x.numpy(), cos[:, :4].numpy(), sin[:, :4].numpy())
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
    cos, sin = (v[:, :4].repeat_interleave(2, -1) for v in (cos, sin))
    part = first[..., :8]
    wanted = of_pairs(part, part, cos[None], sin[None])[0][0].transpose(0, 1)
    (got,) = row("rope").meaning(attrs, x.numpy(), cos.numpy(), sin.numpy())
    np.testing.assert_allclose(got[..., :8], wanted, rtol=1e-6, atol=1e-6)


def test_rms_norm_is_torchs():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64) * 30, torch.randn(64)
    (got,) = row("rms_norm").meaning({"eps": 1e-6}, x.numpy(), weight.numpy())
    wanted = torch.nn.functional.rms_norm(x.double(), (64,), weight.double(), 1e-6)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


TORCH = {
    "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu, "tanh": torch.tanh, "erf": torch.erf,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"), "sigmoid": torch.sigmoid, "exp": torch.exp,
    "log": torch.log, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal, "cos": torch.cos,
    "sin": torch.sin, "neg": torch.neg, "abs": torch.abs,
}


@pytest.mark.parametrize("name", sorted(UNARY))
def test_functions_are_torchs_in_float64_rounded_once(name):
    x = np.concatenate([np.linspace(-20, 20, 401), [0.0, -0.0, 1e-30, 88.0, -88.0, 1e4]]).astype(np.float32)
    # torch's own gelus cancel in the tail: 1e-15 of absolute error there
    x = np.abs(x) + np.float32(1e-6) if name in ("log", "sqrt", "rsqrt", "reciprocal") else x
    wanted = TORCH[name](torch.from_numpy(x).double()).numpy()
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(UNARY[name](x), wanted.astype(np.float32), rtol=1.2e-7, atol=1e-15)


@given(st.lists(st.floats(width=32), min_size=1, max_size=8))
@settings(deadline=None, derandomize=True)
def test_stored_values_round_as_torch_rounds(numbers):
    x = np.array(numbers, np.float32)
    for dtype, kind in (("bf16", torch.bfloat16), ("f16", torch.float16), ("f32", torch.float32)):
        np.testing.assert_array_equal(store(x, dtype), torch.from_numpy(x).to(kind).float().numpy())


def test_bf16_keeps_nan_whatever_its_payload():
    payloads = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(rounded(payloads, "bf16")).all()


def plain_attention(q, k, v, *, scaling, window, softcap):
    """Softmax attention of one sequence with a mask, in float64 torch: [T, H, D] each."""
    q, k, v = (torch.from_numpy(x).double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    at = torch.arange(len(q))
    seen = at[:, None] >= at[None]
    if window:
        seen &= at[:, None] - at[None] < window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v).numpy()


def test_codes_are_a_127th_of_their_rows_largest_value_apart():
    rows = np.array([[[254, -127, 1, 3]], [[0, 0, 0, 0]], [[1e-44, 0, 0, -1e-44]], [[1, np.inf, 0, 0]]], np.float32)
    got = store(rows, "i8", "f32")
    assert got[:2].tolist() == [[[254, -128, 0, 4]], [[0, 0, 0, 0]]]  # ties go to even codes
    assert np.isfinite(got[2]).all() and np.isnan(got[3]).all()
    many = np.random.default_rng(0).normal(size=(50, 2, 8)).astype(np.float32)
    assert (np.abs(store(many, "i8", "f32") - many) <= np.abs(many).max(-1, keepdims=True) * (0.5 / 127 + 1e-6)).all()


@pytest.mark.parametrize("dtype", ("f32", "f16", "bf16", "i8"))
@pytest.mark.parametrize("window,softcap", [(0, 0.0), (3, 0.0), (0, 2.0), (1, 2.0)])
@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (4, 2), (4, 1)])
def test_attention_is_softmax_attention_over_stored_rows(heads, kv_heads, window, softcap, dtype):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(9, h, d)).astype(np.float32) * 2 for h, d in ((heads, 8), (kv_heads, 8), (kv_heads, 6)))
    attrs = {"scaling": 0.4, "window": window, "softcap": softcap}
    full = row("attention").complete(attrs)
    scale = "f32" if dtype == "i8" else ""
    spec = StateSpec((("k", kv_heads, 8), ("v", kv_heads, 6)), dtype, window, 0, 0, 0, scale)

    def run(cuts: list[int]) -> np.ndarray:
        state, pieces = RowState(spec), []
        for lo, hi in zip([0, *cuts], [*cuts, 9]):
            places = np.arange(lo, hi, dtype=np.int32)
            chunk = (x[lo:hi] for x in (q, k, v))
            pieces += row("attention").meaning(full, *chunk, places, np.zeros_like(places), state)
        return np.concatenate(pieces)

    whole = run([])
    np.testing.assert_allclose(whole, plain_attention(q, store(k, dtype, scale), store(v, dtype, scale), **attrs), rtol=1e-5,
                               atol=1e-6)
    np.testing.assert_array_equal(run([1, 2, 7]), whole)


def test_a_value_of_fixed_size_is_there_for_the_lengths_that_a_step_may_start_from():
    """The last two, so that a step can be tried again; before the first token the initial value."""
    state = oracle_state(StateSpec.fixed("max", 1, 2))
    rows, decay = np.array([[1, 5], [3, 2], [0, 4]], np.float32), np.full((3, 2), -1, np.float32)

    def step(lo: int, hi: int, request: int = 0) -> list:
        at = np.arange(lo, hi, dtype=np.int32)
        (got,) = row("running_max").meaning({}, rows[lo:hi], decay[lo:hi], at, np.full_like(at, request), state)
        return got.tolist()

    assert step(0, 2) == [[1, 5], [3, 4]] and step(0, 1, request=7) == [[1, 5]]
    assert step(2, 3) == step(2, 3) == [[2, 4]] and step(0, 1) == [[1, 5]]
    with pytest.raises(LegalityError, match="request 0 has no value of state .* after 2 tokens"):
        step(2, 3)
    with pytest.raises(LegalityError, match="request 7 has no value"):
        step(2, 3, request=7)


def chunks_of(name: str, arrays: list, state: StateSpec, cuts: list[int], **attrs) -> np.ndarray:
    """Results of a stateful operator over one request cut at ``cuts``. ``arrays``: its operands, None for positions,
    requests and the state."""
    held, tokens, pieces = oracle_state(state), len(arrays[0]), []
    for lo, hi in zip([0, *cuts], [*cuts, tokens]):
        at = np.arange(lo, hi, dtype=np.int32)
        own = iter((at, np.zeros_like(at), held))
        given = [next(own) if a is None else a[lo:hi] if len(a) == tokens else a for a in arrays]
        pieces += row(name).meaning(row(name).complete(attrs), *given)
    return np.concatenate(pieces)


def test_convolve_is_torchs_over_any_chunks():
    rng = np.random.default_rng(0)
    x, weight, bias = (rng.standard_normal(s).astype(np.float32) for s in ((9, 6), (6, 4), (6,)))
    padded = torch.nn.functional.pad(torch.tensor(x).T[None], (3, 0))
    wanted = torch.nn.functional.conv1d(padded, torch.tensor(weight)[:, None], torch.tensor(bias), groups=6)[0].T
    for cuts in ([], [1, 2, 7], list(range(1, 9))):
        got = chunks_of("convolve", [x, weight, None, None, None, bias], StateSpec.fixed("window", 3, 6), cuts)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_recur_is_transformers_gated_delta_rule_over_any_chunks():
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule as authors

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((9, 2, n)).astype(np.float32) for n in (8, 8, 6))
    decay = -rng.random((9, 2)).astype(np.float32)
    beta = rng.random((9, 2)).astype(np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    wanted = authors(*(torch.tensor(a)[None] for a in (q, k, v, decay, beta)))[0][0]
    for cuts in ([], [1, 2, 7], list(range(1, 9))):
        operands = [q / np.float32(8**0.5), k, v, decay[..., None], None, None, None, beta]
        got = chunks_of("recur", operands, StateSpec.fixed("state", 2, 48), cuts)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_a_sink_is_a_score_without_a_value():
    """Torch's softmax over the scores and the sink, whose column is then dropped (transformers' gpt-oss)."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((5, h, 8)).astype(np.float32) for h in (4, 2, 2))
    sinks = rng.standard_normal(4).astype(np.float32)
    state = RowState(StateSpec((("k", 2, 8), ("v", 2, 8)), "f32", 0, 0, 0, 0))
    (got,) = row("attention").meaning(row("attention").complete({"scaling": 0.3, "extras": ("sinks",)}), q, k, v,
                                      np.arange(5), np.zeros(5, int), state, sinks)
    wide = lambda x: torch.tensor(x).repeat_interleave(2, 1).transpose(0, 1).double()  # noqa: E731
    scores = torch.tensor(q).transpose(0, 1).double() @ wide(k).transpose(1, 2) * 0.3
    scores = scores.masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
    scores = torch.cat([scores, torch.tensor(sinks).double()[:, None, None].expand(4, 5, 1)], -1)
    want = (scores.softmax(-1)[..., :-1] @ wide(v)).transpose(0, 1)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_chunked_attention_ends_at_a_chunks_start():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((7, 2, 8)).astype(np.float32) for _ in range(3))
    attrs = row("attention").complete({"scaling": 0.3, "window": 3, "chunked": True})
    state = RowState(StateSpec((("k", 2, 8), ("v", 2, 8)), "f32", 3, 0, 0, 0))
    (got,) = row("attention").meaning(attrs, q, k, v, np.arange(7), np.zeros(7, int), state)
    for lo, hi in ((0, 3), (3, 6), (6, 7)):
        want = plain_attention(q[lo:hi], k[lo:hi], v[lo:hi], scaling=0.3, window=0, softcap=0.0)
        np.testing.assert_allclose(got[lo:hi], want, rtol=1e-5, atol=1e-6)


def test_a_slope_is_a_bias_by_distance():
    """Torch's softmax over scores and ALiBi's bias, as its paper has it."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((5, h, 8)).astype(np.float32) for h in (4, 2, 2))
    slopes = np.float32([0.5, 0.25, 0.125, 2.0])
    state = RowState(StateSpec((("k", 2, 8), ("v", 2, 8)), "f32", 0, 0, 0, 0))
    (got,) = row("attention").meaning(row("attention").complete({"scaling": 0.3, "extras": ("slopes",)}), q, k, v,
                                      np.arange(5), np.zeros(5, int), state, slopes)
    wide = lambda x: torch.tensor(x).repeat_interleave(2, 1).transpose(0, 1).double()  # noqa: E731
    scores = torch.tensor(q).transpose(0, 1).double() @ wide(k).transpose(1, 2) * 0.3
    scores = scores + torch.tensor(slopes)[:, None, None] * torch.arange(5)
    scores = scores.masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
    np.testing.assert_allclose(got, (scores.softmax(-1) @ wide(v)).transpose(0, 1), atol=1e-6)


def test_distances_are_a_bias_of_each_query():
    """Inkling's relative position bias (transformers' ``InklingRelativeLogits``), over a window and without."""
    rng = np.random.default_rng(0)
    q, k, v, bias = (rng.standard_normal((5, h, d)).astype(np.float32) for h, d in ((2, 8), (2, 8), (2, 8), (2, 3)))
    distance = torch.arange(5)[:, None] - torch.arange(5)
    dense = torch.tensor(bias).transpose(0, 1).double().gather(-1, distance.clamp(0, 2).expand(2, 5, 5))
    dense = dense.masked_fill((distance < 0) | (distance >= 3), 0.0)
    for window in (0, 2):
        state = RowState(StateSpec((("k", 2, 8), ("v", 2, 8)), "f32", window, 0, 0, 0))
        attrs = row("attention").complete({"scaling": 0.3, "extras": ("distances",), "window": window})
        (got,) = row("attention").meaning(attrs, q, k, v, np.arange(5), np.zeros(5, int), state, bias)
        scores = torch.tensor(q).transpose(0, 1).double() @ torch.tensor(k).permute(1, 2, 0).double() * 0.3 + dense
        scores = scores.masked_fill((distance < 0) | (distance >= (window or 5)), -torch.inf)
        want = (scores.softmax(-1) @ torch.tensor(v).transpose(0, 1).double()).transpose(0, 1)
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_attention_over_chosen_rows_is_attention_with_the_others_masked():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((6, h, 8)).astype(np.float32) for h in (4, 2, 2))
    rows = np.int32([[0, -1, -1], [0, 1, -1], [1, -1, -1], [0, 2, 3], [2, 4, -1], [0, 1, 5]])
    state = RowState(StateSpec((("k", 2, 8), ("v", 2, 8)), "f32", 0, 0, 0, 0))
    (got,) = row("attention").meaning(row("attention").complete({"scaling": 0.3, "extras": ("rows",)}), q, k, v,
                                      np.arange(6), np.zeros(6, int), state, rows)
    wide = lambda x: torch.tensor(x).repeat_interleave(2, 1).transpose(0, 1).double()  # noqa: E731
    scores = torch.tensor(q).transpose(0, 1).double() @ wide(k).transpose(1, 2) * 0.3
    seen = torch.tensor([[i in chosen for i in range(6)] for chosen in rows.tolist()])
    want = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ wide(v)).transpose(0, 1)
    np.testing.assert_allclose(got, want, atol=1e-6)
    with pytest.raises(LegalityError, match="position 0 chooses"):
        row("attention").meaning(row("attention").complete({"scaling": 0.3, "extras": ("rows",)}), q, k, v,
                                 np.arange(6), np.zeros(6, int), state, np.full((6, 1), 3, np.int32))


def test_an_index_chooses_as_deepseeks_does():
    """transformers' own indexer, told what to project to."""
    from transformers import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

    torch.manual_seed(0)
    own = DeepseekV32Indexer(DeepseekV32Config(hidden_size=16, index_n_heads=3, index_head_dim=8, qk_rope_head_dim=4,
                                               index_topk=4, q_lora_rank=12), 0)
    hidden, q, (cos, sin) = torch.randn(1, 9, 16), torch.randn(1, 9, 12), rope_tables(9, 4)
    mask = torch.zeros(9, 9).masked_fill(~torch.ones(9, 9).tril().bool(), -math.inf)[None]
    turned = []
    patched = lambda *args, **kwargs: turned.append(apply(*args, **kwargs)) or turned[-1]  # noqa: E731
    apply = DeepseekV32Indexer.forward.__wrapped__.__wrapped__.__globals__["apply_rotary_pos_emb"]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setitem(DeepseekV32Indexer.forward.__wrapped__.__wrapped__.__globals__, "apply_rotary_pos_emb", patched)
        chosen = own(hidden, q, (cos[None], sin[None]), mask, None)[0]
        query, key = own.wq_b(q).view(9, 3, 8), own.k_norm(own.wk(hidden)).view(9, 8)
        query, key = (torch.cat([part[0].view(*x.shape[:-1], 4), x[..., 4:]], -1) for part, x in zip(turned[0], (query, key)))
        weights = own.weights_proj(hidden)[0] * 3**-0.5
    places, state = np.arange(9, dtype=np.int32), RowState(replace(INDEX, dtype="f32"))
    (got,) = row("index_rows").meaning({"top_k": 4, "scaling": 8**-0.5}, query.numpy(), key.numpy(), weights.numpy(),
                                       places, 0 * places, state)
    for position, (ours, theirs) in enumerate(zip(got.tolist(), chosen.tolist())):
        assert [p for p in ours if p >= 0] == sorted(p for p in theirs if p <= position)
        assert ours == sorted(ours, key=lambda p: p % 100)


def test_an_index_of_blocks_chooses_as_minimaxs_does():
    """transformers' own indexer; of its blocks, the positions up to each token's own."""
    from transformers import MiniMaxM3VLTextConfig
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer

    torch.manual_seed(0)
    own = MiniMaxM3VLIndexer(MiniMaxM3VLTextConfig(hidden_size=16, index_n_heads=2, index_head_dim=8, index_block_size=3,
                                                   index_topk_blocks=3, index_local_blocks=2), 0)
    places = np.arange(17, dtype=np.int32)
    with torch.no_grad():
        hidden, none, one = torch.randn(1, 17, 16), torch.zeros(1, 17, 8), torch.ones(1, 17, 8)
        blocks = own(hidden, (one, none), None, torch.arange(17)[None])[0]
        query, key = own.q_norm(own.q_proj(hidden).view(17, 2, 8)), own.k_norm(own.k_proj(hidden)[0])
    (got,) = row("index_blocks").meaning({"top_k": 3, "block": 3, "local": 2}, query.numpy(), key.numpy(), places, 0 * places,
                                         RowState(replace(INDEX, dtype="f32")))
    for position in places.tolist():
        for ours, theirs in zip(got[position].tolist(), blocks[:, position].tolist()):
            assert ours == sorted(p for p in places if p <= position and p // 3 in theirs) + [-1] * ours.count(-1)


def test_top_k_takes_the_lower_index_of_equal_elements():
    values, indices = row("top_k").meaning({"k": 3}, np.array([[1, 5, 5, -np.inf], [2, 2, 2, 2]], np.float32))
    assert values.tolist() == [[5, 5, 1], [2, 2, 2]] and indices.tolist() == [[1, 2, 0], [0, 1, 2]]


def test_layer_norm_is_torchs():
    rng = np.random.default_rng(0)
    x, w, b = (rng.standard_normal(s).astype(np.float32) for s in ((4, 3, 6), (6,), (6,)))
    (got,) = row("layer_norm").meaning({"eps": 1e-5}, x, w, b)
    want = torch.nn.functional.layer_norm(*map(torch.tensor, (x,)), (6,), torch.tensor(w), torch.tensor(b), 1e-5)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_attention_names_a_request_whose_rows_are_missing():
    sample = SAMPLES["attention"][0]
    operands = values(sample)
    operands[3] = operands[3] + 2
    with pytest.raises(LegalityError, match="request 0 lacks rows"):
        evaluate_row("attention", sample, operands)


def test_quantize_follows_its_rule():
    x = np.zeros((2, 64), np.float32)
    x[0, :4] = (127.0, 0.5, 1.5, -2.5)
    x[1, 32:] = np.linspace(-1, 1, 32)
    codes, scales, sums = row("quantize").meaning({"group": 32}, x)
    assert codes[0, :4].tolist() == [127, 0, 2, -2]  # halves go to even
    assert scales.tolist() == [[1.0, 0.0], [0.0, float(np.float32(1) / np.float32(127))]]
    assert not codes[0, 32:].any() and not codes[1, :32].any()
    whole = codes.reshape(2, 4, 16).sum(-1).astype(np.float32)
    np.testing.assert_array_equal(sums, whole * np.repeat(scales, 2, 1))
    assert (np.abs(codes * np.repeat(scales, 32, 1) - x) <= np.repeat(scales, 32, 1) * 0.5001).all()


def test_quantize_stays_in_range_where_the_scale_is_subnormal():
    tiny = np.full((1, 32), 190 * 2.0**-149, np.float32)
    assert np.abs(row("quantize").meaning({"group": 32}, tiny)[0].astype(int)).max() == 127


def test_integer_inputs_of_linear_maps_are_their_value():
    x = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    weight = np.random.default_rng(1).normal(size=(5, 64)).astype(np.float32)
    parts = row("quantize").meaning({"group": 32}, x)
    value = parts[0].astype(np.float64) * np.repeat(parts[1].astype(np.float64), 32, 1)
    np.testing.assert_allclose(row("linear").meaning({}, *parts, weight)[0], value @ weight.T, rtol=1e-5, atol=1e-5)


# ---- costs


def packed(fmt, shape) -> int:
    return shape[0] * shape[1] * fmt.bits // 8


def priced(op: str, operands: tuple, **attrs):
    return cost_of(OpSpec(op, operands, row(op).results(attrs, operands), attrs), packed)


def test_cost_of_linear():
    cost = priced("linear", (f("T", 64), TensorSpec("f32", (48, 64), FORMATS["q4_1"])))
    assert cost.flops == {"T": 2 * 48 * 64}
    assert cost.traffic == {"T": 4 * (64 + 48), "": 48 * 64 // 2}
    assert cost.dtype == "f32"
    assert priced("linear", (*CODES, f(48, 64))).dtype == "i8"


def test_cost_of_embedding_is_the_rows_it_reads():
    cost = priced("embedding", (t("i32", "T"), TensorSpec("f32", (1000, 64), FORMATS["q8_0"])))
    assert cost.flops == {} and cost.traffic == {"T": 4 + 64 + 4 * 64}
    rows = priced("gather_rows", (f("T", 64), t("i32", "S")))
    assert rows.traffic == {"S": 4 * 64 + 4 + 4 * 64}


def test_cost_of_rms_norm():
    cost = priced("rms_norm", (f("T", 64), f(64)), eps=1e-5)
    assert cost.flops == {"T": 4 * 64} and cost.traffic == {"T": 2 * 4 * 64, "": 4 * 64}


def test_cost_of_attention_ends_at_the_window():
    full = priced("attention", (*HEADS, KV), scaling=1.0)
    assert full.flops == {"C*T": 2 * 4 * (8 + 6)}
    row_bytes = 2 * (2 * 8 + 2 * 6)
    assert full.traffic == {"T": 4 * (4 * 8 + 2 * 8 + 2 * 6 + 1 + 1 + 4 * 6) + row_bytes, "R*C": row_bytes}
    near = priced("attention", (*HEADS, replace(KV, window=16)), scaling=1.0, window=16)
    symbols = {"T": 3, "R": 1, "C": 100}
    assert evaluate(full.flops, symbols) == 3 * 100 * 112
    assert evaluate(near.flops, symbols) == 3 * 16 * 112
    assert evaluate(near.flops, symbols | {"C": 4}) == 3 * 4 * 112


def test_cost_of_an_index_and_of_what_it_chooses():
    index = priced("index_rows", INDEXED, top_k=16)
    assert index.flops == {"C*T": 2 * 3 * (8 + 1)} and index.traffic["R*C"] == 2 * 8
    near = priced("attention", (*HEADS, KV, t("i32", "T", 16)), scaling=1.0, extras=("rows",))
    assert near.flops == {"C<16*T": 2 * 4 * (8 + 6)} and near.traffic["T*C<16"] == 2 * (2 * 8 + 2 * 6)


def test_cost_of_a_group_is_its_bodys():
    cost = priced("group", (f("T", 4), f("T", 1)), body=BODY, yields=(5,))
    assert cost.flops == {"T": 3 * 4}


def test_cost_of_dot_general_has_the_contracted_symbol():
    cost = priced("dot_general", (f(8, "T"), f("T", 3)), contract_x=(1,), contract_y=(0,))
    assert cost.flops == {"T": 2 * 8 * 3}


def test_sizes_multiply_names():
    assert size(("T", 9, 64)) == {"T": 576} and size(()) == {"": 1} and size(("T", "R", 2)) == {"R*T": 2}


# ---- rows from other packages

PLUGIN = """
from adaptc.ops.table import OpRow
PROTOCOL = 1
def infer(attrs, operands): return (operands[0],)
ROWS = [OpRow({name!r}, ("x",), infer, lambda a, x: (x + 1,))]
"""


def in_package(folder, name: str, code: str) -> str:
    """Standard output of ``code`` in a process where a package brings an operator ``name``."""
    (folder / "extra_ops.py").write_text(PLUGIN.format(name=name))
    info = folder / "extra_ops-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra-ops\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[adaptc.operators]\nextra = extra_ops\n")
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_an_installed_package_adds_a_row(tmp_path):
    code = "from adaptc.ops.table import row, table\nprint(row('plus_one').meaning({}, 41)[0], 'linear' in table())"
    assert in_package(tmp_path, "plus_one", code) == "42 True"


def test_rows_are_frozen():
    with pytest.raises(AttributeError):
        row("linear").name = "other"
    assert all(isinstance(r, OpRow) and name == r.name for name, r in table().items())
