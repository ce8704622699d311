"""The cpu backend's matrix kernels, quantize and embedding against float64 arithmetic, and their bit-for-bit laws."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from cpu_kernel import NUMPY, native

from adaptc.backends.cpu.kernels import embedding, linear, quantize
from adaptc.backends.cpu.packing import pack
from adaptc.blocks import dequantize
from adaptc.formats import FORMATS, WeightFormat
from adaptc.protocol import OpSpec, TensorSpec

SELECT = {**linear.SELECT, **quantize.SELECT, **embedding.SELECT}
FAMILIES = {**linear.FAMILIES, **quantize.FAMILIES, **embedding.FAMILIES}
GUARD = 64
"""Elements after each result that must stay as they were."""


def run(spec: OpSpec, operands: list[np.ndarray], rows: int, threads: int = 1,
        choices: Mapping[str, int] = {}) -> list[np.ndarray]:
    """The operator by the kernel that the backend selects, with ``choices`` of a tuning; weights are given packed
    (uint8)."""
    (use,) = SELECT[spec.op](spec).uses
    family, params = FAMILIES[use.kernel.family], dict(use.kernel.params) | choices
    results = []
    for result in spec.results:
        shape = [rows if isinstance(d, str) else d for d in result.shape]
        results.append((np.full(math.prod(shape) + GUARD, 77, NUMPY[result.dtype]), shape))
    places = {f"operand:{i}": a for i, a in enumerate(operands)} | {f"result:{i}": r for i, (r, _) in enumerate(results)}
    signature = family.signature(params)
    assert len(signature) == len(use.args)
    for entry, arg in zip(signature, use.args):
        assert entry.startswith("out:") == arg.startswith("result:")
    call = native(family, params)
    for tid in range(threads):
        call([places[arg] for arg in use.args], (rows, 12345, rows), tid, threads)
    for array, _ in results:
        assert (array[-GUARD:] == 77).all(), "written beyond the result"
    return [array[:-GUARD].reshape(shape) for array, shape in results]


def finite_codes(format: WeightFormat, n: int, k: int, seed: int) -> dict[str, np.ndarray]:
    """Random codes over their whole range, smallest and largest included, with scales of both signs."""
    rng = np.random.default_rng(seed)
    if format.is_float:
        values = rng.standard_normal((n, k)).astype(np.float16 if format.codes == "f16" else np.float32)
        return {"codes": (values.view(np.uint32) >> 16).astype(np.uint16) if format.codes == "bf16" else values}
    levels = {
        "f16": lambda shape: (rng.standard_normal(shape) / 16).astype(np.float16),
        "u6": lambda shape: rng.integers(0, 64, shape, np.uint8),
        "i8": lambda shape: rng.integers(-128, 128, shape, np.int8),
        "e8m0": lambda shape: rng.integers(118, 130, shape, np.uint8),
    }
    signed = format.codes == "i8"
    codes = {"codes": levels["i8"]((n, k)) if signed else rng.integers(0, 1 << format.bits, (n, k), np.uint8)}
    codes["codes"][0, :32] = codes["codes"].min()
    codes["codes"][-1, -32:] = codes["codes"].max()
    for name, kinds in (("scale", format.scale), ("min", format.minimum)):
        for i, kind in enumerate(kinds):
            codes[f"{name}{i}"] = levels[kind]((n, k // (format.group, format.superblock)[i]))
    return codes


def weight(name: str, n: int, k: int, seed: int = 1) -> tuple[dict[str, np.ndarray], np.ndarray]:
    codes = finite_codes(FORMATS[name], n, k, seed)
    return codes, packed(name, codes)


def packed(name: str, codes: dict[str, np.ndarray]) -> np.ndarray:
    return np.frombuffer(pack(FORMATS[name], codes["codes"].shape, codes), np.uint8)


def activations(rows: int, k: int, seed: int = 2) -> np.ndarray:
    """Normal numbers with rows and groups of zeros and outliers among them."""
    x = np.random.default_rng(seed).standard_normal((rows, k)).astype(np.float32)
    x[:, 5] *= 1000
    if rows > 2:
        x[1], x[2, :32] = 0, 0
    return x


def quantized(x: np.ndarray) -> list[np.ndarray]:
    """The rule of ``quantize`` in numpy."""
    rows, k = x.shape
    groups = x.reshape(rows, k // 32, 32)
    scales = np.abs(groups).max(-1) / np.float32(127)
    divisor = np.where(scales == 0, np.float32(1), scales)[..., None]
    codes = np.rint(groups / divisor)
    sums = codes.reshape(rows, k // 32, 2, 16).sum(-1).astype(np.float32) * scales[..., None]
    return [codes.reshape(rows, k).astype(np.int8), scales, sums.reshape(rows, k // 16)]


def spec(op: str, x: str, k: int, weights: list[tuple[str, int]], bias: bool | tuple[bool, ...] = False,
         **attrs) -> OpSpec:
    inputs = [TensorSpec("f32", ("T", k))]
    if x == "i8":
        inputs = [TensorSpec("i8", ("T", k)), TensorSpec("f32", ("T", k // 32)), TensorSpec("f32", ("T", k // 16))]
    maps = ((TensorSpec("f32", (n, k), FORMATS[f]), TensorSpec("f32", (n,))) for f, n in weights)
    biased = bias if isinstance(bias, tuple) else (bias,) * len(weights)
    operands = [*inputs, *(operand for pair, with_bias in zip(maps, biased) for operand in pair[: 1 + with_bias])]
    widths = [n for _, n in weights][: 1 if op == "gated_linear" else None]
    return OpSpec(op, tuple(operands), tuple(TensorSpec("f32", ("T", n)) for n in widths), attrs)


def exact(name: str, codes: dict[str, np.ndarray], operands: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(x · weightᵀ in float64, the sum of the magnitudes of what is added up to get it)."""
    format, n, k = FORMATS[name], *codes["codes"].shape
    if len(operands) == 1 or format.is_float:
        x = operands[0].astype(np.float64)
        if len(operands) == 3:
            x *= np.repeat(operands[1].astype(np.float64), 32, axis=1)
        values = dequantize(format, codes).astype(np.float64)
        terms = np.abs(values)
        if format.minimum:  # a value may be the difference of larger numbers
            terms += 2 * np.abs(np.repeat(level(format, codes, "min"), format.group, axis=1))
        return x @ values.T, np.abs(x) @ terms.T
    group, rows = format.group, len(operands[0])
    q = operands[0].astype(np.int64).reshape(rows, k // group, group)
    meant = np.array(format.values)[codes["codes"]] if format.values else codes["codes"].astype(np.int64)
    c = meant.reshape(n, k // group, group)
    scales = np.repeat(operands[1].astype(np.float64), 32 // group, axis=1)[:, None]
    sums = operands[2].astype(np.float64).reshape(rows, k // group, group // 16).sum(-1)[:, None]
    dots, sizes = np.einsum("rgi,ngi->rng", q, c), np.einsum("rgi,ngi->rng", abs(q), abs(c))
    by_scale = level(format, codes, "scale")
    result = (by_scale * (dots * scales - format.zero * sums)).sum(-1)
    size = (abs(by_scale) * (sizes * scales + format.zero * abs(sums))).sum(-1)
    if format.minimum:
        by_min = format.min_sign * level(format, codes, "min")
        result, size = result + (by_min * sums).sum(-1), size + abs(by_min * sums).sum(-1)
    return result, size


def level(format: WeightFormat, codes: dict[str, np.ndarray], name: str) -> np.ndarray:
    value = codes[f"{name}0"].astype(np.float64)
    if format.scale == ("e8m0",):
        return 2.0 ** (value - 128)
    if f"{name}1" in codes:
        value = value * np.repeat(codes[f"{name}1"].astype(np.float64), format.superblock // format.group, axis=1)
    return value


def operands_of(x: str, values: np.ndarray) -> list[np.ndarray]:
    return [values] if x == "f32" else quantized(values)


def assert_close(got: np.ndarray, want: np.ndarray, size: np.ndarray, tolerance: float = 1e-6) -> None:
    error = np.abs(got - want)
    worst = np.unravel_index(np.argmax(error - tolerance * size), error.shape)
    assert (error <= tolerance * size).all(), f"at {worst}: got {got[worst]}, want {want[worst]}, terms {size[worst]}"


def shapes(name: str) -> list[tuple[int, int]]:
    return [(19, 512)] if FORMATS[name].superblock == 256 else [(19, 96), (8, 576)]


@pytest.mark.parametrize("x", ["f32", "i8"])
@pytest.mark.parametrize("name", FORMATS)
def test_linear(name, x):
    """Right for every number of rows, and the same bits for a row alone, in any batch and on any number of threads."""
    for n, k in shapes(name):
        codes, data = weight(name, n, k)
        op, values = spec("linear", x, k, [(name, n)]), activations(17, k)
        operands = operands_of(x, values)
        (whole,) = run(op, [*operands, data], 17)
        assert_close(whole, *exact(name, codes, operands))
        for rows in (0, 1, 2, 3, 5):
            (got,) = run(op, [*(a[:rows].copy() for a in operands), data], rows)
            assert got.tobytes() == whole[:rows].tobytes(), rows
        for row in (1, 6, 16):
            (got,) = run(op, [*(a[row : row + 1].copy() for a in operands), data], 1)
            assert got.tobytes() == whole[row].tobytes(), row
        for threads in (2, 3):
            (got,) = run(op, [*operands, data], 17, threads)
            assert got.tobytes() == whole.tobytes(), threads


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_float_weights_of_any_number_of_columns(name):
    for k in (1, 31, 67):
        codes, data = weight(name, 9, k)
        x = activations(5, max(k, 6))[:, :k].copy()
        (got,) = run(spec("linear", "f32", k, [(name, 9)]), [x, data], 5)
        assert_close(got, *exact(name, codes, [x]))


def test_rows_beyond_a_cache_chunk():
    """Chunks of rows, the last of fewer than a tile, give the bits of the whole."""
    _, data = weight("q4_1", 12, 64)
    x = activations(22, 64)
    op = spec("linear", "f32", 64, [("q4_1", 12)])
    (whole,) = run(op, [x, data], 22)
    (got,) = run(op, [x, data], 22, choices={"chunk": 1 << 11})  # 8 rows of x
    assert got.tobytes() == whole.tobytes()


@pytest.mark.parametrize("x", ["f32", "i8"])
@pytest.mark.parametrize("n", [16, 13])
def test_bias(x, n):
    _, data = weight("q8_0", n, 64)
    bias = np.random.default_rng(3).standard_normal(n).astype(np.float32)
    operands = operands_of(x, activations(6, 64))
    (plain,) = run(spec("linear", x, 64, [("q8_0", n)]), [*operands, data], 6)
    (got,) = run(spec("linear", x, 64, [("q8_0", n)], bias=True), [*operands, data, bias], 6)
    assert got.tobytes() == (plain + bias).tobytes()


@pytest.mark.parametrize("x", ["f32", "i8"])
def test_linears_of_mixed_formats_equal_each_alone(x):
    weights = [("q4_k", 24), ("q8_0", 11), ("q6_k", 8), ("bf16", 3)]
    packs = [weight(name, n, 256, seed)[1] for seed, (name, n) in enumerate(weights)]
    operands = operands_of(x, activations(5, 256))
    alone = [run(spec("linear", x, 256, [w]), [*operands, data], 5)[0] for w, data in zip(weights, packs)]
    for threads in (1, 2, 3):
        together = run(spec("linears", x, 256, weights), [*operands, *packs], 5, threads)
        assert [t.tobytes() for t in together] == [a.tobytes() for a in alone], threads


@pytest.mark.parametrize("x", ["f32", "i8"])
def test_maps_with_biases_equal_each_alone(x):
    """Whichever of them has one; gate and up too."""
    weights, biased = [("q8_0", 11), ("q4_0", 16), ("bf16", 11)], (True, False, True)
    packs = [weight(name, n, 64, seed)[1] for seed, (name, n) in enumerate(weights)]
    biases = [np.random.default_rng(n).standard_normal(n).astype(np.float32) for _, n in weights]
    maps = [(p, b) if has else (p,) for p, b, has in zip(packs, biases, biased)]
    operands = operands_of(x, activations(6, 64) / 8)
    alone = [run(spec("linear", x, 64, [w], bias=has), [*operands, *one], 6)[0]
             for w, one, has in zip(weights, maps, biased)]
    for threads in (1, 3):
        together = run(spec("linears", x, 64, weights, bias=biased), [*operands, *maps[0], *maps[1], *maps[2]], 6,
                       threads)
        assert [t.tobytes() for t in together] == [a.tobytes() for a in alone], threads
    gated = spec("gated_linear", x, 64, [weights[0], weights[2]], bias=(True, True), act="silu")
    (got,) = run(gated, [*operands, *maps[0], *maps[2]], 6)
    gate, up = alone[0].astype(np.float64), alone[2].astype(np.float64)
    with np.errstate(over="ignore"):
        want = gate / (1 + np.exp(-gate)) * up
    assert_close(got, want, np.abs(want) + 1e-3 * np.abs(up))


# function, and the part of |gate| that its rounding errors relate to
ACTIVATIONS = {
    "silu": (lambda v: v / (1 + np.exp(-v)), 1e-3),
    "gelu": (lambda v: v * 0.5 * np.vectorize(math.erfc)(-v / math.sqrt(2)), 1e-3),
    "gelu_tanh": (lambda v: v * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))), 1e-3),
}


@pytest.mark.parametrize("x", ["f32", "i8"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_gated_linear(act, x):
    weights, (function, part) = [("q4_0", 13), ("q5_1", 13)], ACTIVATIONS[act]
    packs = [weight(name, n, 96, seed)[1] for seed, (name, n) in enumerate(weights)]
    operands = operands_of(x, activations(5, 96) / 8)
    gate, up = (run(spec("linear", x, 96, [w]), [*operands, d], 5)[0].astype(np.float64) for w, d in zip(weights, packs))
    for threads in (1, 3):
        (got,) = run(spec("gated_linear", x, 96, weights, act=act), [*operands, *packs], 5, threads)
        want = function(gate) * up
        assert_close(got, want, np.abs(want) + np.abs(up) * np.maximum(1e-3, part * np.abs(gate)))


@pytest.mark.parametrize("name", [f for f in FORMATS if not FORMATS[f].is_float])
def test_extreme_codes_and_subnormal_scales(name):
    """Largest codes against largest activation codes of one sign fill the 16-bit sums; subnormal scales count."""
    format, n, k = FORMATS[name], 8, 256
    codes = finite_codes(format, n, k, 4)
    top = np.iinfo(np.int8).min if format.codes == "i8" else (1 << format.bits) - 1
    codes["codes"][:4] = top
    outer = f"scale{len(format.scale) - 1}"
    codes[outer][::2] = np.float16(6e-8)
    data = packed(name, codes)
    for sign in (1, -1):
        x = np.full((5, k), np.float32(sign * 127))
        for kind in ("f32", "i8"):
            operands = operands_of(kind, x)
            (got,) = run(spec("linear", kind, k, [(name, n)]), [*operands, data], 5)
            assert_close(got, *exact(name, codes, operands))


def test_f32_activations_keep_small_values_beside_outliers():
    """A weight that is exactly its zero point contributes exactly nothing, whatever its activation."""
    for name in ("q4_0", "q5_0", "q6_k"):
        format = FORMATS[name]
        codes = finite_codes(format, 8, 256, 5)
        codes["codes"][:, 1::2] = format.zero
        x = activations(5, 256)
        x[:, 1::2] = 1e30
        (got,) = run(spec("linear", "f32", 256, [(name, 8)]), [x, packed(name, codes)], 5)
        x[:, 1::2] = 0
        assert_close(got, *exact(name, codes, [x]))


def test_quantize():
    op = OpSpec("quantize", (TensorSpec("f32", ("T", 96)),),
                (TensorSpec("i8", ("T", 96)), TensorSpec("f32", ("T", 3)), TensorSpec("f32", ("T", 6))), {"group": 32})
    x = activations(7, 96)
    x[3, :32] = np.arange(32) + np.float32(0.5)  # ties
    x[3, 32:64] = np.float32(1e-45)  # the scale rounds to 0
    x[4, :64] = np.float32(1e-39) * np.arange(-32, 32)
    x[3, 31] = 127
    want = quantized(x)
    assert want[0][3, :3].tolist() == [0, 2, 2] and want[1][3, 1] == 0 and not want[0][3, 32:64].any()
    for threads in (1, 2, 3):
        got = run(op, [x], 7, threads)
        assert [g.tobytes() for g in got] == [w.tobytes() for w in want], threads
    assert run(op, [x[:0]], 0)[0].shape == (0, 96)


def test_quantize_holds_codes_within_127_when_the_scale_is_subnormal():
    x = np.zeros((1, 32), np.float32)
    x[0, :2] = np.float32(1e-45) * 190, np.float32(-1e-45) * 190
    op = OpSpec("quantize", (TensorSpec("f32", ("T", 32)),),
                (TensorSpec("i8", ("T", 32)), TensorSpec("f32", ("T", 1)), TensorSpec("f32", ("T", 2))), {"group": 32})
    codes, scales, sums = run(op, [x], 1)
    assert codes[0, :3].tolist() == [127, -127, 0] and scales[0, 0] > 0 and sums[0, 0] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_quantizing_hides_nothing_that_is_not_finite(bad):
    """Every product with the row's group shows it, whatever the format; other rows and groups don't."""
    op = OpSpec("quantize", (TensorSpec("f32", ("T", 256)),),
                (TensorSpec("i8", ("T", 256)), TensorSpec("f32", ("T", 8)), TensorSpec("f32", ("T", 16))), {"group": 32})
    for column in (32, 50, 63):
        x = activations(3, 256)
        x[1, column] = bad
        operands = run(op, [x], 3)
        assert np.argwhere(~np.isfinite(operands[1])).tolist() == [[1, 1]]
        for name in FORMATS:
            (got,) = run(spec("linear", "i8", 256, [(name, 8)]), [*operands, weight(name, 8, 256)[1]], 3)
            assert not np.isfinite(got[1]).any() and np.isfinite(got[[0, 2]]).all(), name


@pytest.mark.parametrize("name", FORMATS)
def test_embedding_has_the_bits_of_dequantize(name):
    n, k = shapes(name)[0]
    codes, data = weight(name, n, k)
    op = OpSpec("embedding", (TensorSpec("i32", ("T",)), TensorSpec("f32", (n, k), FORMATS[name])),
                (TensorSpec("f32", ("T", k)),))
    ids = np.array([18, 0, 3, 7, 8, 18], np.int32)
    for threads in (1, 2, 3):
        (got,) = run(op, [ids, data], len(ids), threads)
        assert got.tobytes() == dequantize(FORMATS[name], codes)[ids].tobytes(), threads


def test_what_is_not_supported_is_left_to_others():
    q4_k = spec("linear", "f32", 256, [("q4_k", 8)])
    assert SELECT["linear"](q4_k) is not None
    assert SELECT["linear"](spec("linear", "f32", 96, [("q4_k", 8)])) is None
    assert SELECT["linears"](spec("linears", "f32", 96, [("q8_0", 8), ("q6_k", 8)])) is None
    assert SELECT["gated_linear"](spec("gated_linear", "f32", 96, [("q8_0", 8)] * 2, act="unheard_of")) is None
    assert SELECT["linear"](spec("linear", "i8", 48, [("f32", 8)])) is None
    other = WeightFormat("q4_1", "u4", 0, 64, ("f16",), ("f16",), superblock=64)
    operands = (q4_k.operands[0], TensorSpec("f32", (8, 256), other))
    assert SELECT["linear"](OpSpec("linear", operands, q4_k.results)) is None
    x = TensorSpec("f32", ("T", 96))
    assert SELECT["quantize"](OpSpec("quantize", (x,), (), {"group": 16})) is None


@pytest.mark.parametrize("rows", ["T", "S"])
def test_rows_may_be_tokens_or_samples(rows):
    codes, data = weight("q8_0", 8, 64)
    op = OpSpec("linear", (TensorSpec("f32", (rows, 64)), TensorSpec("f32", (8, 64), FORMATS["q8_0"])),
                (TensorSpec("f32", (rows, 8)),))
    x = activations(3, 64)
    (got,) = run(op, [x, data], 3)
    assert_close(got, *exact("q8_0", codes, [x]))
