"""The cpu backend's kernels other than linear maps and attention, against float64 formulas and bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from adaptc import blocks
from adaptc.backends.cpu.kernels import elementwise, move, norm, reduce, routing, rows, vmath
from adaptc.backends.cpu.kernels.base import Emitter, Family, vec
from adaptc.backends.cpu.packing import pack, unpack
from adaptc.formats import FORMATS
from adaptc.protocol import OpSpec, TensorSpec
from cpu_kernel import NUMPY, native, run

T, R, S = 5, 2, 3
SYMBOLS = (T, R, S)
SIZES = {"T": T, "R": R, "S": S}


def sized(shape):
    return tuple(SIZES.get(d, d) for d in shape)


def tensor(shape, seed=0, dtype="f32", scale=1.0):
    x = scale * np.random.default_rng(seed).standard_normal(sized(shape))
    return x.astype(NUMPY[dtype])


def check(module, op, operands, shapes, attrs=None, dtypes=None, specs=None):
    """Results of ``op``, the same bits for 1, 2 and 3 threads."""
    specs = specs or [TensorSpec({np.dtype(v): k for k, v in NUMPY.items() if k != "bf16"}[x.dtype], s)
                      for x, s in zip(operands, shapes)]
    results = tuple(TensorSpec(d, s) for d, s in zip(dtypes or ["f32"] * 9, shapes[len(operands) :]))
    spec = OpSpec(op, tuple(specs), results, attrs or {})
    first = run(module, spec, operands, SYMBOLS)
    for threads in (2, 3):
        for a, b in zip(first, run(module, spec, operands, SYMBOLS, threads)):
            assert a.tobytes() == b.tobytes()
    return first


# ---- vmath

SPECIAL = np.array(
    [0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 1e-45, -1e-45, 1e-38, 88.72, 88.73, -87.3, -103.97, -104, 3.4e38, -3.4e38,
     0.5, -0.5, 2, 3, -2, -3, 2.5], np.float32)  # fmt: skip


def everywhere() -> np.ndarray:
    """Special values, random bits (every exponent) and the range that matters."""
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    near = rng.normal(0, 4, 100_000), rng.uniform(-110, 95, 50_000)
    return np.concatenate([SPECIAL, bits, *near]).astype(np.float32)


def _erf(x):
    return np.array([math.erf(v) for v in x.tolist()])


def _erfc(x):
    return np.array([math.erfc(v) for v in x.tolist()])


FUNCTIONS = {
    # name: (formula in float64, largest error in ulp, largest absolute error where |x| < 30)
    "exp": (np.exp, 1.0, None),
    "sigmoid": (lambda x: np.where(x < 0, np.exp(x), 1.0) / (1 + np.exp(-np.abs(x))), 3.0, 2e-7),
    "tanh": (np.tanh, 2.0, 2e-7),
    "erf": (_erf, 1.5, 1e-7),
    "silu": (lambda x: x * np.where(x < 0, np.exp(x), 1.0) / (1 + np.exp(-np.abs(x))), None, 3e-6),
    "gelu": (lambda x: x * _erfc(-x / math.sqrt(2)) / 2, None, 3e-6),
    "gelu_tanh": (lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))), None, 3e-6),
    "log": (np.log, 0.51, None),
    "sqrt": (np.sqrt, 0.51, None),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 1.5, None),
    "reciprocal": (lambda x: 1 / x, 0.51, None),
    "neg": (np.negative, 0, None),
    "abs": (np.abs, 0, None),
    "sin": (np.sin, 0.51, None),
    "cos": (np.cos, 0.51, None),
}


def same_limits(got, want):
    return (got == want) | (np.isnan(got) & np.isnan(want))


@np.errstate(all="ignore")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    formula, ulps, absolute = FUNCTIONS[name]
    x = everywhere()
    if name in ("sin", "cos"):
        rng = np.random.default_rng(2)
        x = np.concatenate([rng.uniform(-1e6, 1e6, 100_000), np.arange(50_000), SPECIAL[np.abs(SPECIAL) < 1e6]])
        x = x.astype(np.float32)
    (got,) = check(elementwise, name, [x], [x.shape, x.shape])
    wide = formula(x.astype(np.float64))
    want = wide.astype(np.float32)
    finite = np.isfinite(want) & np.isfinite(x)
    if ulps is not None:
        assert same_limits(got, want)[~finite].all(), x[~finite & ~same_limits(got, want)]
        error = np.where(finite, np.abs(got - wide) / np.spacing(np.abs(want)), 0)
        assert error.max() <= ulps, (error.max(), x[error.argmax()])
    if absolute is not None:
        error = np.where(finite & (np.abs(x) < 30), np.abs(got - wide), 0)
        assert error.max() <= absolute, (error.max(), x[error.argmax()])
    assert np.isnan(got[np.isnan(x)]).all()


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_an_activation_keeps_its_digits_where_it_is_small(name):
    """For gates down to -9 the value is as right, relative to itself, as rounding its argument allows."""
    x = np.linspace(-9, 9, 20_001).astype(np.float32)
    wanted = {
        "silu": lambda v: v / (1 + np.exp(-v)),
        "gelu": lambda v: v * _erfc(-v / math.sqrt(2)) / 2,
        "gelu_tanh": lambda v: v / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
    }[name](x.astype(np.float64))
    (got,) = check(elementwise, name, [x], [x.shape, x.shape])
    argument = np.abs(x) + x**2 / 2 * (1 + np.abs(x) / 10)  # of the exponential; an ulp of it is an ulp of the result
    assert (np.abs(got - wanted) <= 4 * 2.0**-24 * (2 + argument) * np.abs(wanted)).all()


@np.errstate(all="ignore")
def test_power():
    grid = np.array(np.meshgrid(SPECIAL, SPECIAL)).reshape(2, -1)
    rng = np.random.default_rng(3)
    x = np.concatenate([grid[0], np.abs(rng.normal(0, 3, 5000)), rng.normal(0, 3, 500)]).astype(np.float32)
    y = np.concatenate([grid[1], rng.normal(0, 10, 5000), rng.integers(-9, 9, 500)]).astype(np.float32)
    (got,) = check(elementwise, "pow", [x, y], [x.shape] * 3)
    wide = np.power(x.astype(np.float64), y.astype(np.float64))
    want = wide.astype(np.float32)
    finite = np.isfinite(want)
    assert same_limits(got, want)[~finite].all()
    assert (np.abs(got - wide)[finite] <= 0.51 * np.spacing(np.abs(want[finite]))).all()
    assert (np.signbit(got) == np.signbit(want))[~np.isnan(want)].all()


@pytest.mark.parametrize("exponent", [2.0, 0.5, -0.5, 3.0, -1.0, 1.0, 1.7])
def test_power_with_a_constant_exponent(exponent):
    x = np.abs(tensor((100,)))
    body = (("constant", (), (("dtype", "f32"), ("shape", ()), ("value", exponent))), ("pow", (0, 1), ()))
    (got,) = check(elementwise, "group", [x], [(100,)] * 2, {"body": body, "yields": (2,)})
    np.testing.assert_allclose(got, x.astype(np.float64) ** exponent, rtol=2.5e-7)


def test_activations_are_usable_by_other_kernels():
    """gated_linear calls ACTIVATIONS[name](emitter, value)."""

    def emit(params, symbol, level):
        e = Emitter(level)
        source, target = e.buffer(0), e.buffer(1)
        e.store(vmath.ACTIVATIONS["silu"](e, e.load(source, vec(8, "f32"))), target)
        return e.text(symbol)

    x, out = tensor((8,)), np.empty(8, np.float32)
    native(Family(emit, lambda p: ()), {"name": "silu"})([x, out])
    np.testing.assert_allclose(out, x / (1 + np.exp(-x.astype(np.float64))), rtol=4e-7)


# ---- elementwise


@pytest.mark.parametrize(
    "a, b",
    [
        (("T", 40), ("T", 40)), (("T", 37), (37,)), (("T", 3, 12), ("T", 1, 12)), (("T", 3, 12), (3, 1)),
        (("T", 1), (1, 9)), (("T", 3, 5), ()), ((1,), ("T", 2)), (("T",), ("T",)), ((), ()), (("T", 1, 7), (4, 1)),
        (("T", 4, 1, 6), (1, 1, 3, 1)), (("T", 2500), ("T", 1)), ((1, 3000), (3000,)), ((2, "T"), ("T",)),
    ],
)  # fmt: skip
def test_broadcasting(a, b):
    rank = max(len(a), len(b))
    shape = tuple(
        y if x == 1 else x for x, y in zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b)
    )
    x, y = tensor(a), tensor(b, 1)
    for op, formula in {"sub": np.subtract, "div": np.divide}.items():
        (got,) = check(elementwise, op, [x, y], [a, b, shape])
        np.testing.assert_array_equal(got, formula(x, y))


def test_group_of_several_results_and_shapes():
    x, y, scale = tensor(("T", 3, 13)), tensor(("T", 1, 13), 1), tensor(("T", 1, 1), 2)
    body = (
        ("mul", (0, 1), ()), ("silu", (3,), ()), ("add", (4, 0), ()), ("mul", (1, 2), ()),
        ("compare", (5, 3), (("predicate", "gt"),)), ("select", (7, 5, 3), ()),
    )  # fmt: skip
    shapes = [x.shape, y.shape, scale.shape]
    named = [("T", 3, 13), ("T", 1, 13), ("T", 1, 1)]
    got = check(elementwise, "group", [x, y, scale], [*named, named[0], named[1], named[0]],
                {"body": body, "yields": (8, 6, 5)})
    product = x * y
    total = product / (1 + np.exp(-product.astype(np.float64))) + x
    np.testing.assert_allclose(got[0], np.where(total > product, total, product), rtol=2e-6, atol=2e-7)
    np.testing.assert_array_equal(got[1], y * scale)
    np.testing.assert_allclose(got[2], total, rtol=2e-6, atol=2e-7)
    assert [g.shape for g in got] == [shapes[0], shapes[1], shapes[0]]


@pytest.mark.parametrize("dtype", ["f32", "i32", "i64"])
@pytest.mark.parametrize("predicate", ["lt", "le", "gt", "ge", "eq", "ne"])
def test_compare(predicate, dtype):
    x = np.random.default_rng(0).integers(-2, 3, (5, 11)).astype(NUMPY[dtype])
    y = np.random.default_rng(1).integers(-2, 3, (5, 11)).astype(NUMPY[dtype])
    if dtype == "f32":
        x[0, :3] = np.nan
    want = {"lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y, "eq": x == y, "ne": x != y}[predicate]
    (got,) = check(elementwise, "compare", [x, y], [("T", 11)] * 3, {"predicate": predicate}, ["i1"])
    np.testing.assert_array_equal(got, want)


def test_select_reads_truth_values():
    c, x, y = tensor(("T", 19)) > 0, tensor(("T", 19), 1), tensor((19,), 2)
    (got,) = check(elementwise, "select", [c, x, y], [("T", 19), ("T", 19), (19,), ("T", 19)])
    np.testing.assert_array_equal(got, np.where(c, x, y))


@pytest.mark.parametrize("source", ["f32", "f16", "i64", "i32", "i8", "u8", "i1"])
@pytest.mark.parametrize("target", ["f32", "f16", "i64", "i32", "i8", "u8", "i1"])
def test_cast(source, target):
    x = np.random.default_rng(0).uniform(0 if "u8" in (source, target) else -90, 90, (5, 13)).astype(NUMPY[source])
    x.reshape(-1)[:2] = 0, 1
    (got,) = check(elementwise, "cast", [x], [("T", 13)] * 2, {"dtype": target}, [target])
    np.testing.assert_array_equal(got, x.astype(NUMPY[target]))


def test_constants_in_a_group_have_their_dtype():
    body = (("constant", (), (("dtype", "f16"), ("shape", ()), ("value", 0.1))), ("cast", (1,), (("dtype", "f32"),)),
            ("add", (0, 2), ()))
    (got,) = check(elementwise, "group", [np.zeros(9, np.float32)], [(9,)] * 2, {"body": body, "yields": (3,)})
    np.testing.assert_array_equal(got, np.float32(np.float16(0.1)))


def test_maximum_keeps_nan():
    x = np.array([1, np.nan, 3, np.inf], np.float32)
    y = np.array([np.nan, 0, 4, 1], np.float32)
    np.testing.assert_array_equal(check(elementwise, "max", [x, y], [(4,)] * 3)[0], np.maximum(x, y))
    np.testing.assert_array_equal(check(elementwise, "min", [x, y], [(4,)] * 3)[0], np.minimum(x, y))


def test_integers_and_truth_values():
    x, y = (np.random.default_rng(i).integers(-9, 9, (5, 10)).astype(np.int32) for i in (0, 1))
    for op, want in {"add": x + y, "sub": x - y, "mul": x * y, "max": np.maximum(x, y)}.items():
        np.testing.assert_array_equal(check(elementwise, op, [x, y], [("T", 10)] * 3, dtypes=["i32"])[0], want)
    np.testing.assert_array_equal(check(elementwise, "abs", [x], [("T", 10)] * 2, dtypes=["i32"])[0], np.abs(x))
    a, b = x > 0, y > 0
    np.testing.assert_array_equal(check(elementwise, "mul", [a, b], [("T", 10)] * 3, dtypes=["i1"])[0], a & b)
    np.testing.assert_array_equal(check(elementwise, "max", [a, b], [("T", 10)] * 3, dtypes=["i1"])[0], a | b)


def test_what_cannot_be_emitted_is_declined():
    x = TensorSpec("i32", ("T", 8))
    assert elementwise.SELECT["exp"](OpSpec("exp", (x,), (x,))) is None
    packed = TensorSpec("f32", (8, 8), FORMATS["f32"])
    assert elementwise.SELECT["neg"](OpSpec("neg", (packed,), (packed,))) is None


def test_padding_lanes_change_no_bits():
    x = tensor((40,), scale=5)
    for name in vmath.UNARY:
        with np.errstate(all="ignore"):
            (whole,) = check(elementwise, name, [x], [(40,)] * 2)
            (part,) = check(elementwise, name, [x[:13]], [(13,)] * 2)
        assert whole[:13].tobytes() == part.tobytes(), name


# ---- norm


@pytest.mark.parametrize("shape", [("T", 576), ("T", 3, 64), ("T", 40), ("T", 13), (1, 8), ("T", 2, 7)])
def test_norms(shape):
    x, residual, weight, eps = tensor(shape, scale=3), tensor(shape, 1), tensor(shape[-1:], 2), 1e-5

    def formula(x):
        wide = x.astype(np.float64)
        return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * weight

    (got,) = check(norm, "rms_norm", [x, weight], [shape, shape[-1:], shape], {"eps": eps})
    np.testing.assert_allclose(got, formula(x), rtol=1e-6, atol=1e-7)
    got, total = check(norm, "add_rms_norm", [x, residual, weight], [shape, shape, shape[-1:], shape, shape],
                       {"eps": eps})
    np.testing.assert_array_equal(total, residual + x)
    np.testing.assert_allclose(got, formula(residual + x), rtol=1e-6, atol=1e-7)


def test_norm_of_small_numbers_keeps_eps():
    x, weight = np.full((1, 64), 1e-4, np.float32), np.ones(64, np.float32)
    (got,) = check(norm, "rms_norm", [x, weight], [(1, 64), (64,), (1, 64)], {"eps": 1e-6})
    np.testing.assert_allclose(got, 1e-4 / np.sqrt(1e-8 + 1e-6), rtol=1e-6)


@pytest.mark.parametrize("shape", [("T", 64), ("T", 20), ("T", 3, 8)])
@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm(shape, bias):
    x, weight, shift = tensor(shape) + 3, tensor(shape[-1:]), tensor(shape[-1:])
    extra = [shift] if bias else []
    (got,) = check(norm, "layer_norm", [x, weight, *extra], [shape, *[shape[-1:]] * (1 + bias), shape], {"eps": 1e-5})
    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    want = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + (shift if bias else 0)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
    residual = tensor(shape, 1)
    got, total = check(norm, "add_layer_norm", [x - residual, residual, weight, *extra],
                       [shape, shape, *[shape[-1:]] * (1 + bias), shape, shape], {"eps": 1e-5})
    np.testing.assert_array_equal(total, residual + (x - residual))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# ---- routing


@pytest.mark.parametrize("lead", [("T",), ("T", 3)])
def test_top_k(lead):
    x = np.round(tensor((*lead, 11)), 1)  # ties
    x[0, ..., 3:] = -np.inf
    x[1] = 2.0
    spec = OpSpec("top_k", (TensorSpec("f32", (*lead, 11)),), tuple(TensorSpec(d, (*lead, 4)) for d in ("f32", "i32")),
                  {"k": 4})
    for threads in (1, 3):
        values, indices = run(routing, spec, [x], (T, 1, 1), threads)
        order = np.argsort(-x, axis=-1, kind="stable")[..., :4]
        np.testing.assert_array_equal(indices, order)
        np.testing.assert_array_equal(values, np.take_along_axis(x, order, -1))


@pytest.mark.parametrize("format, k", [("f32", 40), ("bf16", 64), ("q8_0", 64), ("q4_k", 256)])
@pytest.mark.parametrize("each, bias, n", [(False, False, 24), (True, True, 13)])
def test_expert_linear(format, k, each, bias, n):
    """Against float64; experts that nobody chose may hold anything, and a row's bits don't depend on others."""
    experts, slots = 6, 2
    rng = np.random.default_rng(4)
    stored = FORMATS[format]
    values = rng.standard_normal((experts, n, k)).astype(np.float32)
    codes = blocks.quantize(stored, values) if format != "q4_k" else random_codes(rng, stored, (experts, n, k))
    weight = blocks.dequantize(stored, codes).astype(np.float64)
    packed = np.frombuffer(pack(stored, (experts, n, k), codes), np.uint8)
    unpacked = unpack(stored, (experts, n, k), packed)
    assert all(np.array_equal(unpacked[name], codes[name]) for name in codes)
    chosen = rng.integers(0, experts - 1, (T, slots)).astype(np.int32)
    x = rng.standard_normal((T, slots, k) if each else (T, k)).astype(np.float32)
    shift = rng.standard_normal((experts, n)).astype(np.float32)
    spoiled = packed.reshape(experts, -1).copy()
    spoiled[-1] = 0xFF  # NaN in the float formats
    spoiled = spoiled.reshape(-1)

    def got(rows: slice, threads: int) -> np.ndarray:
        specs = (TensorSpec("f32", ("T", slots, k) if each else ("T", k)), TensorSpec("i32", ("T", slots)),
                 TensorSpec("f32", (experts, n, k), stored), *([TensorSpec("f32", (experts, n))] if bias else []))
        spec = OpSpec("expert_linear", specs, (TensorSpec("f32", ("T", slots, n)),), {})
        count = len(chosen[rows])
        return run(routing, spec, [x[rows], chosen[rows], spoiled, *([shift] if bias else [])], (count, 1, 1), threads)[0]

    whole = got(slice(None), 1)
    wide = x.astype(np.float64) if each else np.repeat(x[:, None], slots, 1).astype(np.float64)
    want = np.einsum("tsk,tsnk->tsn", wide, weight[chosen]) + (shift[chosen] if bias else 0)
    np.testing.assert_allclose(whole, want, atol=2e-5 * np.abs(want).max())
    assert np.array_equal(got(slice(None), 3), whole)
    for row in range(T):  # one token takes its experts one by one, many go expert by expert
        assert np.array_equal(got(slice(row, row + 1), 2)[0], whole[row])


def random_codes(rng, format, shape):
    lead, k = shape[:-1], shape[-1]
    return {
        "codes": rng.integers(0, 16, shape, np.uint8), "scale0": rng.integers(0, 64, (*lead, k // 32), np.uint8),
        "min0": rng.integers(0, 64, (*lead, k // 32), np.uint8),
        "scale1": rng.random((*lead, k // 256)).astype(np.float16) / 64,
        "min1": rng.random((*lead, k // 256)).astype(np.float16) / 64,
    }  # fmt: skip


# ---- rows


@pytest.mark.parametrize("heads, width, turned", [(9, 64, 0), (2, 6, 0), (1, 20, 0), (3, 48, 20), (2, 80, 64)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("one_a_pair", [False, True])
def test_rope(heads, width, turned, interleaved, one_a_pair):
    x, part = tensor(("T", heads, width)), turned or width
    half = part // 2
    table = half if one_a_pair else part
    angles = np.random.default_rng(1).uniform(-3, 3, (T, table))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    (got,) = check(rows, "rope", [x, cos, sin],
                   [("T", heads, width), ("T", table), ("T", table), ("T", heads, width)],
                   {"interleaved": interleaved, "turned": turned})
    wide, want = x.astype(np.float64), x.astype(np.float64)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        at_a, at_b = (i, i) if one_a_pair else (a, b)
        want[..., a] = wide[..., a] * cos[:, None, at_a] - wide[..., b] * sin[:, None, at_a]
        want[..., b] = wide[..., b] * cos[:, None, at_b] + wide[..., a] * sin[:, None, at_b]
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=3e-7)
    np.testing.assert_array_equal(got[..., part:], x[..., part:])


@pytest.mark.parametrize("dtype", ["f32", "i32", "f16", "u8"])
@pytest.mark.parametrize("shape", [("T", 20), ("T",), ("T", 3, 16), ("T", 1)])
def test_gather_rows(dtype, shape):
    x = tensor(shape, scale=50, dtype="f32").clip(0, 99).astype(NUMPY[dtype])
    index = np.array([4, 0, 4], np.int64 if dtype == "u8" else np.int32)
    (got,) = check(rows, "gather_rows", [x, index], [shape, ("S",), ("S", *shape[1:])], dtypes=[dtype])
    np.testing.assert_array_equal(got, x[index])


# ---- the floor


def moved(op, x, named, result, want, attrs, more=()):
    dtype = {np.dtype(v): k for k, v in NUMPY.items() if k != "bf16"}[x.dtype]
    (got,) = check(move, op, [x, *(a for a, _ in more)], [named, *(s for _, s in more), result], attrs, [dtype])
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["f32", "i32", "f16", "u8"])
def test_moves(dtype):
    named = ("T", 6, 20)
    x = (np.arange(T * 6 * 20) % 251).reshape(T, 6, 20).astype(NUMPY[dtype])
    moved("reshape", x, named, ("T", 120), x.reshape(T, 120), {"shape": ("T", 120)})
    moved("reshape", x, named, ("T", 3, 2, 20), x.reshape(T, 3, 2, 20), {"shape": ("T", 3, 2, 20)})
    moved("transpose", x, named, (6, "T", 20), x.transpose(1, 0, 2), {"perm": (1, 0, 2)})
    moved("transpose", x, named, (20, 6, "T"), x.transpose(2, 1, 0), {"perm": (2, 1, 0)})
    moved("slice", x, named, ("T", 2, 5), x[:, 3:5, 1:16:3],
          {"starts": (0, 3, 1), "limits": (-1, 5, 16), "strides": (1, 1, 3)})
    moved("slice", x.transpose(1, 0, 2).copy(), (6, "T", 20), (2, "T", 20), x.transpose(1, 0, 2)[2:6:2],
          {"starts": (2, 0, 0), "limits": (6, -1, 20), "strides": (2, 1, 1)})
    moved("concat", x, named, ("T", 9, 20), np.concatenate([x, x[:, :3]], 1), {"axis": 1},
          [(x[:, :3].copy(), ("T", 3, 20))])
    moved("concat", x, named, ("T", 6, 27), np.concatenate([x, x[..., :7]], 2), {"axis": 2},
          [(x[..., :7].copy(), ("T", 6, 7))])
    moved("pad", x, named, ("T", 9, 21), np.pad(x, [(0, 0), (1, 2), (1, 0)], constant_values=3),
          {"low": (0, 1, 1), "high": (0, 2, 0), "value": 3})
    moved("broadcast", x[0], (6, 20), ("T", 6, 20), np.broadcast_to(x[0], x.shape), {"shape": named, "dims": (1, 2)})
    moved("broadcast", x[:, :1].copy(), ("T", 1, 20), named, np.broadcast_to(x[:, :1], x.shape),
          {"shape": named, "dims": (0, 1, 2)})
    moved("broadcast", x[:, 0, 0].copy(), ("T",), named, np.broadcast_to(x[:, 0, 0][:, None, None], x.shape),
          {"shape": named, "dims": (0,)})
    moved("broadcast", x[0, 0, 5], (), named, np.full_like(x, x[0, 0, 5]), {"shape": named, "dims": ()})


def test_constants():
    for value, shape, dtype in [(1.5, (), "f32"), (-7, (3, 5), "i32"), (0.25, (41,), "f16"), (True, (3,), "i1")]:
        (got,) = check(move, "constant", [], [shape], {"value": value, "shape": shape, "dtype": dtype}, [dtype])
        np.testing.assert_array_equal(got, np.full(shape, value, NUMPY[dtype]))
    dense = tuple(tuple(0.1 * (i * 3 + j) for j in range(3)) for i in range(4))
    (got,) = check(move, "constant", [], [(4, 3)], {"value": dense, "shape": (4, 3), "dtype": "f32"})
    np.testing.assert_array_equal(got, np.array(dense, np.float32))


@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("axes", [(2,), (1, 2), (0,), (1,), (0, 1, 2), (0, 2)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_reduce(kind, axes, keepdims):
    shape = ("T", 3, 19)
    x = tensor(shape)
    result = tuple(1 if i in axes else d for i, d in enumerate(shape) if keepdims or i not in axes)
    (got,) = check(reduce, "reduce", [x], [shape, result], {"kind": kind, "axes": axes, "keepdims": keepdims})
    want = getattr(x.astype(np.float64), kind)(axes, keepdims=keepdims)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    "x, y, batch, cx, cy, result, einsum",
    [
        (("T", 20), (7, 20), (), 1, 1, ("T", 7), "tk,nk->tn"),
        (("T", 20), (20, 7), (), 1, 0, ("T", 7), "tk,kn->tn"),
        ((3, "T", 8), (3, 8, "T"), (0,), 2, 1, (3, "T", "T"), "htk,hku->htu"),
        (("T", 3, 9), ("T", 9), (0,), 2, 1, ("T", 3), "thk,tk->th"),
        ((4,), (4,), (), 0, 0, (), "k,k->"),
    ],
)
def test_dot_general(x, y, batch, cx, cy, result, einsum):
    a, b = tensor(x), tensor(y, 1)
    (got,) = check(reduce, "dot_general", [a, b], [x, y, result],
                   {"batch": batch, "contract_x": (cx,), "contract_y": (cy,)})
    np.testing.assert_allclose(got, np.einsum(einsum, a.astype(np.float64), b.astype(np.float64)), rtol=1e-5, atol=2e-6)
