"""The cpu toolchain: MLIR text → the same object bytes in every process, the kernel cache, the compiler processes."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from cpu_kernel import aligned

from adaptc.backends.cpu.codegen import CODEGEN, compile_texts
from adaptc.backends.cpu.context import CYCLES, DRIVER_OBJECT, RUN, STEP, WORKER
from adaptc.backends.cpu.driver_kernel import driver_text
from adaptc.backends.cpu.elf import read_object
from adaptc.backends.cpu.launch import Library
from adaptc.backends.cpu.levels import LEVELS, level_of
from adaptc.backends.cpu.toolchain import compile_mlir
from adaptc.backends.cpu.worker import Worker
from adaptc.content_cache import ContentCache
from adaptc.errors import AdaptcError, OptionError
from adaptc.protocol import KernelSpec

LEVEL = "x86-64-v3"


def elementwise(symbol: str, body: str, result: str = "%y") -> str:
    """A kernel that applies ``body`` (from %x to ``result``) to rows of 8 floats, T of them."""
    return f"""
llvm.func @{symbol}(%buffers: !llvm.ptr, %symbols: !llvm.ptr, %tid: i64, %n: i64) {{
  %zero = arith.constant 0 : i64
  %one = arith.constant 1 : i64
  %p = llvm.load %buffers : !llvm.ptr -> !llvm.ptr
  %rows = llvm.load %symbols : !llvm.ptr -> i64
  scf.for %i = %zero to %rows step %one : i64 {{
    %at = llvm.getelementptr %p[%i] : (!llvm.ptr, i64) -> !llvm.ptr, vector<8xf32>
    %x = llvm.load %at : !llvm.ptr -> vector<8xf32>
    {body}
    llvm.store {result}, %at : vector<8xf32>, !llvm.ptr
  }}
  llvm.return
}}
"""


TWICE = elementwise("twice", "%y = arith.addf %x, %x : vector<8xf32>")
RAMP = """
    %c = arith.constant dense<[1.0, 2.0, 3.0, 4.5, 6.0, 7.0, 8.0, 9.0]> : vector<8xf32>
    %y = func.call @scale(%x, %c) : (vector<8xf32>, vector<8xf32>) -> vector<8xf32>
"""
HELPER = """
func.func private @scale(%x: vector<8xf32>, %c: vector<8xf32>) -> vector<8xf32> {
  %k = arith.constant dense<2.5> : vector<8xf32>
  %y = math.fma %x, %c, %k : vector<8xf32>
  return %y : vector<8xf32>
}
"""


def run(text: str, symbol: str, values: np.ndarray) -> np.ndarray:
    array = aligned(np.asarray(values, np.float32))
    Library({"k.o": compile_mlir(text, LEVEL)}).call(symbol, [array], [len(values)])
    return array


def test_constants_helpers_and_loops():
    x = np.arange(24, dtype=np.float32).reshape(3, 8)
    c = np.array([1, 2, 3, 4.5, 6, 7, 8, 9], np.float32)
    np.testing.assert_array_equal(run(HELPER + elementwise("ramp", RAMP), "ramp", x), x * c + np.float32(2.5))


def test_func_func_and_object_contents():
    text = TWICE.replace("llvm.func", "func.func").replace("llvm.return", "return")
    assert read_object(compile_mlir(text, LEVEL), "k.o").exports() == ("twice",)


def test_products_and_sums_are_not_fused():
    """x*x - round(x*x) is the rounding error if fused and exactly 0 if not."""
    body = """
    %m = arith.mulf %x, %x : vector<8xf32>
    %k = arith.constant dense<0x3FA66667> : vector<8xf32>
    %s = arith.mulf %x, %k : vector<8xf32>
    %y = arith.subf %s, %m : vector<8xf32>
    """
    x = np.full((1, 8), np.float32(1.3).item(), np.float32)
    expected = x * np.array(0x3FA66667, np.uint32).view(np.float32) - x * x
    np.testing.assert_array_equal(run(elementwise("f", body), "f", x), expected)


def test_reductions_keep_their_order():
    body = """
    %s = vector.reduction <add>, %x : vector<8xf32> into f32
    %y = vector.broadcast %s : f32 to vector<8xf32>
    """
    x = np.array([[1e8, 1, -1e8, 1, 3e7, 1, -3e7, 0.1]], np.float32)
    total = np.float32(0)
    for value in x[0]:
        total += value
    np.testing.assert_array_equal(run(elementwise("f", body), "f", x)[0], np.full(8, total))


def test_loops_do_not_become_calls():
    """LLVM would otherwise call memset, which kernels can't reach."""
    text = """
llvm.func @clear(%buffers: !llvm.ptr, %symbols: !llvm.ptr, %tid: i64, %n: i64) {
  %zero = arith.constant 0 : i64
  %one = arith.constant 1 : i64
  %nothing = arith.constant 0 : i8
  %p = llvm.load %buffers : !llvm.ptr -> !llvm.ptr
  %size = llvm.load %symbols : !llvm.ptr -> i64
  scf.for %i = %zero to %size step %one : i64 {
    %at = llvm.getelementptr %p[%i] : (!llvm.ptr, i64) -> !llvm.ptr, i8
    llvm.store %nothing, %at : i8, !llvm.ptr
  }
  llvm.return
}
"""
    array = aligned(np.full(100, 7, np.uint8))
    Library({"k.o": compile_mlir(text, LEVEL)}).call("clear", [array], [90])
    assert not array[:90].any() and (array[90:] == 7).all()


@pytest.mark.parametrize(
    "text, said",
    [
        ("llvm.func @f( {", "expected"),
        (elementwise("f", "%y = arith.addf %x, %z : vector<8xf32>"), "undeclared SSA value"),
        ('func.func @f() { %0 = "foo.bar"() : () -> i64\n return }', "unregistered dialect"),
        ("func.func @f(%a: tensor<8xf32>) -> tensor<8xf32> { return %a : tensor<8xf32> }", "func.func"),
        (elementwise("f", "%y = math.exp %x : vector<8xf32>"), "calls expf"),
        ("llvm.func @g()\nllvm.func @f() { llvm.call @g() : () -> ()\n llvm.return }", "'g' has no body"),
        ('llvm.func @f() { llvm.call_intrinsic "llvm.x86.nope"() : () -> ()\n llvm.return }', "llvm.x86.nope"),
    ],
)
def test_what_is_wrong_is_said(text, said):
    with pytest.raises(AdaptcError, match=said):
        compile_mlir(text, LEVEL)


def test_the_place_of_an_error_is_shown():
    with pytest.raises(AdaptcError, match=r"   10 \|     %y = arith.addf %x, %z"):
        compile_mlir(elementwise("f", "%y = arith.addf %x, %z : vector<8xf32>"), LEVEL)


def test_unknown_level():
    with pytest.raises(OptionError, match="x86-64-v3"):
        compile_mlir(TWICE, "x86-64-v9")


def test_every_function_is_compiled_for_the_level_whatever_the_host():
    """The host's own features never show: the engine's wrappers are part of the object, and carry the level too."""
    objects = {level: compile_mlir(TWICE, level) for level in LEVELS if level_of(level).machine == platform.machine()}
    assert b"_mlir_twice" in objects[LEVEL] and read_object(objects[LEVEL], "k.o").exports() == ("twice",)
    wide = elementwise("wide", "%y = arith.addf %x, %x : vector<8xf32>").replace("8xf32", "16xf32")
    assert b"\x62" not in _code(compile_mlir(wide, "x86-64-v3"))  # EVEX, the encoding of AVX-512
    assert b"\x62" in _code(compile_mlir(wide, "x86-64-v4"))


def _code(data: bytes) -> bytes:
    return b"".join(bytes(s.content) for s in read_object(data, "k.o").sections if s is not None and s.flags & 4)


def test_same_bytes_in_other_processes(tmp_path):
    script = (
        "import hashlib, sys; from adaptc.backends.cpu.toolchain import compile_mlir;"
        "print(hashlib.sha256(compile_mlir(sys.stdin.read(), 'x86-64-v3')).hexdigest())"
    )
    text = driver_text("x86_64")
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            input=text.encode(),
            stdout=subprocess.PIPE,
            check=True,
            cwd=folder,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed, folder in (("1", tmp_path), ("2", "/"))
    }
    assert len(digests) == 1


def test_driver_exports():
    assert read_object(compile_mlir(driver_text("x86_64"), LEVEL), "d").exports() == tuple(
        sorted((RUN, STEP, WORKER, CYCLES))
    )


# --- many kernels -----------------------------------------------------------------------------------------------------


def texts(count: int) -> dict[tuple[str, str], str]:
    body = "%k = arith.constant dense<{}.0> : vector<8xf32>\n%y = arith.mulf %x, %k : vector<8xf32>"
    return {(f"k{i}.o", f"k{i}"): elementwise(f"k{i}", body.format(i)) for i in range(count)}


def test_workers_do_not_change_bytes(tmp_path):
    seen = []
    one = compile_texts(texts(5), LEVEL, workers=1, cache=ContentCache(tmp_path / "a"))
    two = compile_texts(
        texts(5),
        LEVEL,
        workers=2,
        cache=ContentCache(tmp_path / "b"),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert one == two and list(one) == list(two) == sorted(one)
    assert seen == [(i, 5) for i in range(6)]


def test_cache_hit_miss_and_damage(tmp_path, monkeypatch):
    cache = ContentCache(tmp_path)
    made = []
    monkeypatch.setattr(Worker, "compile", lambda self, s, t, v, do=Worker.compile: made.append(s) or do(self, s, t, v))
    first = compile_texts(texts(2), LEVEL, cache=cache)
    assert sorted(made) == ["k0", "k1"]
    assert compile_texts(texts(2), LEVEL, cache=cache) == first and len(made) == 2
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert len(files) == 2
    raw = bytearray(files[0].read_bytes())
    raw[len(raw) // 2] ^= 1
    files[0].write_bytes(raw)
    files[1].write_bytes(b"")
    assert compile_texts(texts(2), LEVEL, cache=cache) == first and len(made) == 4
    files[0].write_bytes(files[1].read_bytes())  # whole, but another kernel's
    assert compile_texts(texts(2), LEVEL, cache=cache) == first and len(made) == 5
    compile_texts(texts(1), "x86-64-v4", cache=cache)
    assert len(made) == 6


def test_a_kernel_that_fails_is_named(tmp_path):
    bad = {**texts(2), ("bad.o", "bad"): elementwise("bad", "%y = arith.addf %x, %w : vector<8xf32>")}
    with pytest.raises(AdaptcError, match="(?s)kernel bad: .*undeclared SSA"):
        compile_texts(bad, LEVEL, workers=2, cache=ContentCache(tmp_path))


def test_a_kernel_that_ends_the_compiler_is_named(tmp_path):
    """LLVM aborts the process when an intrinsic isn't in the level's instruction set."""
    body = """
    %c = llvm.mlir.constant(4 : i32) : i32
    %w = llvm.load %p : !llvm.ptr -> vector<16xf32>
    %r = llvm.call_intrinsic "llvm.x86.avx512.sqrt.ps.512"(%w, %c) : (vector<16xf32>, i32) -> vector<16xf32>
    llvm.store %r, %p : vector<16xf32>, !llvm.ptr
    """
    with pytest.raises(AdaptcError, match="kernel wide: the compiler process ended"):
        compile_texts({("wide.o", "wide"): elementwise("wide", body, "%x")}, LEVEL, cache=ContentCache(tmp_path))


def test_a_kernel_must_define_its_symbol(tmp_path):
    with pytest.raises(AdaptcError, match="kernel other: its text defines no"):
        compile_texts({("k.o", "other"): TWICE}, LEVEL, cache=ContentCache(tmp_path))


def test_interrupt_stops_workers(tmp_path):
    """Ctrl-C while kernels are compiled ends the workers and surfaces as KeyboardInterrupt."""
    before = _children()
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        compile_texts(texts(400), LEVEL, workers=2, cache=ContentCache(tmp_path))
        time.sleep(10)
    timer.join()
    assert _children() == before


def _children() -> str:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read()


def test_codegen_rejects_unknown_families():
    with pytest.raises(OptionError, match="unknown kernel family 'nope'"):
        CODEGEN.symbol(KernelSpec("nope", ()))


def test_codegen_without_kernels_has_the_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("ADAPTC_CACHE", str(tmp_path))
    assert list(CODEGEN.compile([], LEVEL)) == [DRIVER_OBJECT]
