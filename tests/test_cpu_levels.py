"""CPU levels: what code each one gets, that those of this machine compute what they must, and that none leaks elsewhere.

Levels that this machine can't run are generated and disassembled here as the others are; running them is reported as
"not run".
"""

from __future__ import annotations

import platform
import re

import capstone
import cpu_kernel
import numpy as np
import pytest
import test_cpu_attention
import test_cpu_head_linear
import test_cpu_kernels
import test_cpu_linear
import test_cpu_recurrent
from cpu_kernel import aligned, native

from adaptc.backends.cpu import codegen, levels, toolchain
from adaptc.backends.cpu.codegen import CODEGEN
from adaptc.backends.cpu.driver_kernel import MACHINES, driver_text
from adaptc.backends.cpu.elf import read_object
from adaptc.backends.cpu.kernels import instructions
from adaptc.backends.cpu.kernels.base import Emitter, Family, vec
from adaptc.backends.cpu.levels import EXTRAS, LEVELS, host_flags, level_of, native_level
from adaptc.backends.cpu.toolchain import compile_mlir
from adaptc.backends.cpu.packing import pack
from adaptc.errors import OptionError
from adaptc.formats import FORMATS
from adaptc.protocol import KernelSpec

VNNI = "x86-64-v4+avx512vnni"
X86 = ("x86-64-v2", "x86-64-v3", "x86-64-v3+avxvnni", "x86-64-v4", VNNI)
EVERY = (*X86, "armv8-a")

STATE = {"dtype": "f16", "kv_heads": 1, "latent": False, "max_pages": 4, "page_size": 4, "rate": 1, "scale": "",
         "value_width": 16, "width": 16}
MERGE = {"chunked": False, "heads": 2, "key_block": 16, "lse": False, "query_sinks": False, "rate": 1, "sets": 1,
         "sinks": False, "slots": 9, "span": 32, "value_width": 16, "width": 16, "window": 0}
ATTEND = STATE | MERGE | {"scaling": 0.25, "distances": 0, "slopes": False, "softcap": 0.0}
AS = lambda dtype: (("dtype", dtype),)
BODY = (("cast", (0,), AS("f32")), ("exp", (1,), ()), ("pow", (2, 1), ()), ("cos", (3,), ()), ("cast", (4,), AS("f16")))
SAMPLE = {
    "codes": ("linears", {"rows": "T", "k": 256, "x": "i8", "weights": (("q4_k", 24),), "bias": (False,)}),
    "signed codes": ("linears", {"rows": "T", "k": 32, "x": "i8", "weights": (("q8_0", 24),), "bias": (False,)}),
    "values": ("linears", {"rows": "T", "k": 32, "x": "f32", "weights": (("mxfp4", 24),), "bias": (False,)}),
    "gated": ("gated_linear", {"rows": "T", "k": 32, "x": "f32", "weights": (("q5_1", 24),) * 2, "act": "silu",
                               "bias": (False, True)}),
    "halves": ("linears", {"rows": "T", "k": 40, "x": "f32", "weights": (("f16", 20),), "bias": (True,)}),
    "append": ("kv_append", STATE),
    "attend": ("attend", ATTEND),
    "attend entries": ("attend", ATTEND | {"latent": True, "lse": True, "rate": 4}),
    "pool": ("pool", {"bias": True, "channels": 20, "rate": 4, "series": 2}),
    "merge": ("attend_merge", MERGE),
    "group": ("group", {"body": BODY, "operands": (("f16", ("T", 24)),), "results": ("f16",), "shape": ("T", 24),
                        "yields": (5,)}),
    "norm": ("rms_norm", {"shape": ("T", 40), "eps": 1e-5}),
    "quantize": ("quantize", {"rows": "T", "k": 64}),
    "embedding": ("embedding", {"format": "q6_k", "k": 256, "n": 40, "rows": "T"}),
    "rope": ("rope", {"tokens": "T", "heads": 2, "width": 48, "turned": 48, "table": 24,
                      "interleaved": True}),
    "convolve": ("convolve", {"bias": True, "channels": 40, "taps": 4}),
    "recur": ("recur", {"before": False, "beta": True, "decays": 8, "heads": 2, "value_width": 40, "width": 8}),
    "reduce": ("reduce", {"axes": (1,), "dtype": "f32", "kind": "sum", "result": ("T",), "shape": ("T", 40)}),
}  # fmt: skip
"""Kernels of every family that has vector code."""

FUSED = ("gated", "halves", "attend", "group", "norm", "convolve", "recur")
"""Of them, those with products that are added without rounding in between, where a level can."""

here = pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86-64 hosts generate x86-64 code")


def spec(name: str) -> KernelSpec:
    family, params = SAMPLE[name]
    return KernelSpec(family, tuple(sorted(params.items())))


def text(name: str, level: str) -> str:
    family, params = SAMPLE[name]
    return codegen._rows("FAMILIES")[family].emit(params, "kernel", level_of(level))


def disassembled(data: bytes) -> str:
    """Instructions of the code, one a line."""
    decoder = capstone.Cs(capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    lines = []
    for section in read_object(data, "k.o").sections:
        if section is not None and section.flags & 4 and section.size:
            code = bytes(section.content)
            found = list(decoder.disasm(code, 0))
            assert found and sum(i.size for i in found) == len(code), "the disassembler stopped early"
            lines += [f"{i.mnemonic} {i.op_str}" for i in found]
    return "\n".join(lines)


# ---- code of every level, run or not


@here
@pytest.mark.parametrize("name", SAMPLE)
def test_instructions_of_each_level(name):
    code = [disassembled(compile_mlir(text(name, level), level)) for level in ("x86-64-v2", "x86-64-v3", "x86-64-v4")]
    v2, v3, v4 = code
    assert not re.search(r"[yz]mm|^v", v2, re.MULTILINE), "neither AVX registers, nor VEX instructions, FMA among them"
    assert "zmm" not in v3 and "{k" not in v3 and not re.search(r"[xy]mm(1[6-9]|2\d|3[01])", v3), "nothing of AVX-512"
    assert "ymm" in v3
    if name in FUSED:
        assert all(re.search(r"^vfmadd", listing, re.MULTILINE) for listing in (v3, v4))
    assert "zmm" in v4 or name == "embedding"  # which takes eight columns at a time
    assert not any("vpdpbusd" in listing for listing in code)


@here
@pytest.mark.parametrize("name", ["codes", "signed codes"])
def test_dot_instructions_only_where_they_are_named(name):
    assert re.search(r"vpdpbusd zmm", disassembled(compile_mlir(text(name, VNNI), VNNI)))
    assert _has_vex_dots("x86-64-v3+avxvnni", name) and not _has_vex_dots("x86-64-v3", name)


def _has_vex_dots(level: str, name: str) -> bool:
    """VEX.256.66.0F38.W0 50 /r, AVX-VNNI's form: C4; any of R, X, B, and map 2; W 0, any register, 256 bits, 66; 50."""
    sections = read_object(compile_mlir(text(name, level), level), "k.o").sections
    code = b"".join(bytes(s.content) for s in sections if s is not None and s.flags & 4)
    second, third = (bytes(range(256))[mask] for mask in (slice(2, 256, 32), slice(5, 128, 8)))
    return re.search(b"\xc4[" + re.escape(second) + b"][" + re.escape(third) + b"]\x50", code) is not None


@pytest.mark.parametrize("name", SAMPLE)
def test_other_machines_get_no_x86(name):
    """The generator's form for aarch64 holds no x86 intrinsic, lowers to LLVM's dialect, and calls nothing."""
    from torch_mlir import ir
    from torch_mlir.passmanager import PassManager

    source = text(name, "armv8-a")
    assert "x86" not in source
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(source)
        PassManager.parse(f"builtin.module({','.join(toolchain.PIPELINE)})").run(module.operation)
        assert not re.search(r"llvm\.call |x86", str(module))


def test_intrinsics_of_a_machine_stand_in_one_table():
    import inspect
    import pkgutil

    from adaptc.backends.cpu import kernels

    for found in pkgutil.iter_modules(kernels.__path__):
        module = __import__(f"{kernels.__name__}.{found.name}", fromlist=["_"])
        assert ("llvm.x86" in inspect.getsource(module)) == (module is instructions), module
    assert instructions.TABLE.keys() == instructions.FALLBACKS.keys()


@pytest.mark.parametrize("machine", MACHINES)
def test_the_driver_of_each_machine_lowers(machine):
    from torch_mlir import ir
    from torch_mlir.passmanager import PassManager

    assert {level.machine for level in LEVELS.values()} == MACHINES.keys()
    source = driver_text(machine)
    assert ("x86" in source) == (machine == "x86_64")
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(source)
        PassManager.parse(f"builtin.module({','.join(toolchain.PIPELINE)})").run(module.operation)
        assert module.operation.verify()


# ---- names


def test_names():
    assert level_of("x86-64-v4+avx512vnni").flags[-1] == "avx512_vnni"
    assert level_of("x86-64-v4+avx512vnni+avx512vnni").name == VNNI
    assert [level_of(name).lanes for name in LEVELS] == [4, 8, 16, 4]
    for name, words in (
        ("x86-64-v9", "unknown cpu level 'x86-64-v9'.*x86-64-v2"),
        ("x86-64-v4+avx10", r"extra feature of cpu level x86-64-v4 'avx10'.*avx512vnni"),
        ("x86-64-v2+avxvnni", "extra feature of cpu level x86-64-v2 'avxvnni'.*none"),
    ):
        with pytest.raises(OptionError, match=words):
            level_of(name)
    assert all(base in LEVELS for extra in EXTRAS.values() for base in extra.bases)


@pytest.mark.parametrize("machine, flags, name", [
    ("x86_64", level_of(VNNI).flags, VNNI),
    ("x86_64", level_of("x86-64-v4").flags, "x86-64-v4"),
    ("x86_64", level_of("x86-64-v3+avxvnni").flags, "x86-64-v3+avxvnni"),
    ("x86_64", level_of("x86-64-v2").flags, "x86-64-v2"),
    ("aarch64", ("fp", "asimd", "evtstrm"), "armv8-a"),
])  # fmt: skip
def test_native_is_the_highest_of_the_machine(monkeypatch, machine, flags, name):
    monkeypatch.setattr(levels.platform, "machine", lambda: machine)
    monkeypatch.setattr(levels, "host_flags", lambda: frozenset(flags))
    assert native_level().name == name == CODEGEN.level("native")


def test_a_machine_below_every_level(monkeypatch):
    monkeypatch.setattr(levels, "host_flags", lambda: frozenset({"sse2"}))
    with pytest.raises(OptionError, match="runs none of the levels x86-64-v2"):
        native_level()


def test_code_of_another_machine_is_refused(monkeypatch):
    other, name = ("aarch64", "armv8-a") if platform.machine() == "x86_64" else ("x86_64", "x86-64-v3")
    with pytest.raises(OptionError, match=f"{name} can't be compiled here.*code generator for the machine.*{other}'s"):
        CODEGEN.check_level(name)
    with pytest.raises(OptionError, match="can't be compiled here"):
        compile_mlir(text("norm", name), name)
    monkeypatch.setattr(toolchain.platform, "machine", lambda: other)  # as that machine sees it
    CODEGEN.check_level(name)
    own = ", ".join(level for level in LEVELS if LEVELS[level].machine == other)
    for refused in (level for level in LEVELS if LEVELS[level].machine != other):
        with pytest.raises(OptionError, match=f"which is {other}, and the level is .*or for one of {own}"):
            CODEGEN.check_level(refused)


def test_symbols_are_the_same_whatever_level_is_compiled():
    assert len({CODEGEN.symbol(spec(name)) for name in SAMPLE}) == len(SAMPLE)


# ---- results of the levels that this machine runs


def runs(level: str):
    """A parameter: the level, or "not run" with what the machine lacks."""
    missing = level_of(level).missing(platform.machine(), host_flags())
    return pytest.param(level, marks=pytest.mark.skipif(bool(missing), reason=f"not run: no {', '.join(missing)}"))


@pytest.fixture(params=[runs(level) for level in EVERY if level != levels.DEFAULT])  # the default's tests are elsewhere
def level(request, monkeypatch) -> str:
    monkeypatch.setattr(cpu_kernel, "LEVEL", request.param)
    return request.param


LINEAR = [
    lambda: test_cpu_linear.test_linear("q4_1", "i8"), lambda: test_cpu_linear.test_linear("q8_0", "i8"),
    lambda: test_cpu_linear.test_linear("q6_k", "i8"), lambda: test_cpu_linear.test_linear("q5_k", "f32"),
    lambda: test_cpu_linear.test_linear("f16", "f32"), lambda: test_cpu_linear.test_bias("f32", 13),
    lambda: test_cpu_linear.test_linears_of_mixed_formats_equal_each_alone("i8"),
    lambda: test_cpu_linear.test_gated_linear("gelu_tanh", "f32"),
    lambda: test_cpu_linear.test_extreme_codes_and_subnormal_scales("q6_k"),
    lambda: test_cpu_linear.test_embedding_has_the_bits_of_dequantize("q4_k"), test_cpu_linear.test_quantize,
]  # fmt: skip
OTHERS = [
    lambda: test_cpu_kernels.test_function("exp"), lambda: test_cpu_kernels.test_function("cos"),
    lambda: test_cpu_kernels.test_function("erf"), lambda: test_cpu_kernels.test_function("log"),
    lambda: test_cpu_kernels.test_norms(("T", 40)), lambda: test_cpu_kernels.test_norms(("T", 576)),
    lambda: test_cpu_kernels.test_rope(3, 48, 20, True, True), lambda: test_cpu_kernels.test_cast("f32", "f16"),
    lambda: test_cpu_kernels.test_cast("f16", "f32"), lambda: test_cpu_kernels.test_reduce("sum", (1, 2), False),
    lambda: test_cpu_kernels.test_moves("u8"), test_cpu_kernels.test_padding_lanes_change_no_bits,
    lambda: test_cpu_kernels.test_layer_norm(("T", 20), True), lambda: test_cpu_kernels.test_layer_norm(("T", 64), False),
    lambda: test_cpu_kernels.test_top_k(("T", 3)),
    lambda: test_cpu_kernels.test_expert_linear("q4_k", 256, True, True, 13),
    lambda: test_cpu_kernels.test_expert_linear("bf16", 64, False, False, 24),
    lambda: test_cpu_head_linear.test_heads_rows_by_their_own_matrices("bf16", True, 24, 64),
    lambda: test_cpu_head_linear.test_heads_rows_by_their_own_matrices("q6_k", False, 24, 512),
]  # fmt: skip
ATTENTION = [
    lambda: test_cpu_attention.test_formula_over_page_sizes_and_dtypes(3, "f16"),
    lambda: test_cpu_attention.test_shapes(8, 1, 24, 40, 8), lambda: test_cpu_attention.test_shapes(5, 1, 8, 48, 16),
    lambda: test_cpu_attention.test_shapes(9, 3, 64, 64, 32), lambda: test_cpu_attention.test_windows(17, 16),
    lambda: test_cpu_attention.test_bits_over_threads_chunks_and_batches(11, 3, 3, "i8"),
    lambda: test_cpu_attention.test_bits_over_spans(3, 1, 0, 0.0, 16, "f16"), lambda: test_cpu_attention.test_sinks(5, 23),
    lambda: test_cpu_attention.test_latent_rows_are_keys_and_values(40, 24, 16, 3, "bf16"),
]  # fmt: skip
RECURRENT = [lambda name=name: test_cpu_recurrent.test_formula(test_cpu_recurrent.CASES[name])
             for name in ("convolve", "delta rule", "many rows", "numbers", "running_max")]


@pytest.mark.parametrize("checks", [LINEAR, OTHERS, ATTENTION, RECURRENT],
                         ids=["linear", "others", "attention", "recurrent"])
def test_a_sample_of_the_kernels_tests_at_each_level(level, checks):
    """The tests that the default level passes: same formulas, same bounds, same bit-for-bit laws."""
    if "vnni" in level and checks is not LINEAR:
        pytest.skip("not run: only matrix kernels use the feature")
    for check in checks:
        check()


def unary(name: str, source: str, result: str, level: str, lanes: int = 8):
    """A kernel that converts or computes ``lanes`` numbers."""

    def emit(params, symbol, level):
        e = Emitter(level)
        x = e.load(e.buffer(0), vec(lanes, source))
        e.store(e.cast(name, x, result), e.buffer(1))
        return e.text(symbol)

    return native(Family(emit, lambda p: ()), {"name": name, "source": source, "lanes": lanes}, level)


HALF_LEVELS = ["x86-64-v2", "x86-64-v3"]


@pytest.mark.parametrize("level", [runs(name) for name in HALF_LEVELS])
def test_halves_to_floats_bit_for_bit(level):
    bits = np.arange(1 << 16, dtype=np.uint16)
    got, source = aligned(np.zeros(1 << 16, np.uint32)), aligned(bits)
    call = unary("extf", "f16", "f32", level, 64)
    for start in range(0, len(bits), 64):
        call([source[start:], got[start:]])
    want = bits.view(np.float16).astype(np.float32).view(np.uint32)
    signalling = (bits & 0x7C00 == 0x7C00) & (bits & 0x03FF != 0) & (bits & 0x0200 == 0)
    assert np.array_equal(got, want | signalling.astype(np.uint32) << 22)


@pytest.mark.parametrize("level", [runs(name) for name in HALF_LEVELS])
def test_floats_to_halves_bit_for_bit(level):
    rng = np.random.default_rng(0)
    halves = np.arange(1 << 15, dtype=np.uint16).view(np.float16)[:0x7C01].astype(np.float32)
    with np.errstate(all="ignore"):
        middles = (halves[:-1].astype(np.float64) + halves[1:].astype(np.float64)).astype(np.float32) / 2
    middles[-1] = 65520
    near = [np.nextafter(middles, x, dtype=np.float32) for x in (np.float32(0), np.float32(np.inf))]
    anything = rng.integers(0, 1 << 32, 5000, np.uint32).view(np.float32)
    special = np.array([np.inf, np.nan, 0.0, 65519.996, 65504], np.float32)
    values = np.concatenate([halves, middles, *near, anything, special])
    values = np.concatenate([values, -values])
    values = np.concatenate([values, np.zeros(-len(values) % 64, np.float32)])
    source, got = aligned(values), aligned(np.zeros(len(values), np.uint16))
    call = unary("truncf", "f32", "f16", level, 64)
    for start in range(0, len(values), 64):
        call([source[start:], got[start:]])
    with np.errstate(over="ignore"):
        want = values.astype(np.float16).view(np.uint16)
    nan = np.isnan(values)
    assert np.array_equal(got[~nan], want[~nan]) and np.isnan(got.view(np.float16)[nan]).all()


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q5_0", "mxfp4"])
def test_integer_products_are_the_same_at_every_level(name):
    """They are exact; with scales of 1 so are their sums, and every level has the bits of integer arithmetic."""
    format, (m, n, k), rng = FORMATS[name], (5, 40, 96), np.random.default_rng(1)
    codes = rng.integers(-128, 128, (n, k)).astype(np.int8)
    if format.codes != "i8":
        codes = rng.integers(0, 1 << format.bits, (n, k), np.uint8)
    x = rng.integers(-127, 128, (m, k)).astype(np.int8)
    sums = x.reshape(m, -1, 16).sum(-1, dtype=np.float32)
    one = np.uint8(128) if format.values else np.float16(1)
    weight = pack(format, (n, k), {"codes": codes, "scale0": np.full((n, k // 32), one)})
    operands = [*map(aligned, (x, np.ones((m, k // 32), np.float32), sums, np.frombuffer(weight, np.uint8)))]
    params = {"rows": "T", "k": k, "x": "i8", "weights": ((name, n),), "bias": (False,)}
    meant = np.array(format.values)[codes] if format.values else codes.astype(np.int64) - format.zero
    want = x.astype(np.int64) @ meant.T
    for level in (name for name in X86 if not level_of(name).missing(platform.machine(), host_flags())):
        out = aligned(np.zeros((m, n), np.float32))
        native(codegen._rows("FAMILIES")["linears"], params, level)([*operands, out], (m, 1, m))
        assert np.array_equal(out, want), level
