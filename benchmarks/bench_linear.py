"""Speed of the cpu backend's matrix kernels by weight format and kind of activations.

    python benchmarks/bench_linear.py [--formats q4_1,q8_0] [--levels x86-64-v3,native] [--threads 1] [--rows 1,64]
        [--choices ahead=0,tile=8]

Kernels have their default choices of tiles and the like, or ``--choices`` (``adaptc.tuning``). For each shape (those of SmolLM2-135M, and one whose weights exceed the caches): GB/s of packed weights read and
GFLOP/s (2 · M · N · K), best of ``--repeat``. Levels take turns. The first line is the reading speed of the machine,
measured in the same run.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from adaptc.backends.cpu.codegen import CODEGEN
from adaptc.backends.cpu.elf import Image
from adaptc.backends.cpu.kernels.linear import FAMILIES
from adaptc.backends.cpu.levels import DEFAULT, level_of
from adaptc.backends.cpu.packing import pack, packed_bytes
from adaptc.backends.cpu.toolchain import compile_mlir
from adaptc.formats import FORMATS, WeightFormat

SHAPES = {"attn out": (576, 576), "gate": (1536, 576), "down": (576, 1536), "large": (131072, 1024)}
KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


def codes_of(format: WeightFormat, n: int, k: int) -> dict[str, np.ndarray]:
    """Codes of moderate values; what they are doesn't change the time."""
    rng = np.random.default_rng(0)
    if format.is_float:
        values = rng.integers(1, 64, (n, k), np.uint8).astype(np.float16 if format.codes == "f16" else np.float32)
        return {"codes": (values.view(np.uint32) >> 16).astype(np.uint16) if format.codes == "bf16" else values}
    top = 1 << (format.bits - (format.codes == "i8"))
    codes = {"codes": rng.integers(0, top, (n, k), np.uint8).view(np.int8 if format.codes == "i8" else np.uint8)}
    kinds = {"f16": np.float16, "u6": np.uint8, "i8": np.int8}
    for name, levels in (("scale", format.scale), ("min", format.minimum)):
        for i, kind in enumerate(levels):
            width = (format.group, format.superblock)[i]
            codes[f"{name}{i}"] = np.ones((n, k // width), kinds[kind])
    return codes


def repeated(function, arrays: list[np.ndarray], m: int, loops: int):
    """call(tid, threads) that runs the kernel ``loops`` times on m rows."""
    buffers = (ctypes.c_void_p * len(arrays))(*[a.ctypes.data for a in arrays])
    symbols = (ctypes.c_int64 * 3)(m, 0, 0)

    def call(tid: int, threads: int) -> None:
        for _ in range(loops):
            function(ctypes.addressof(buffers), ctypes.addressof(symbols), tid, threads)

    call.keep = arrays  # the buffers hold only addresses
    return call


def best(call, repeat: int, pool: ThreadPoolExecutor, threads: int) -> float:
    """Seconds of the fastest of ``repeat`` runs of call(tid, threads) on all threads."""
    def once() -> float:
        start = time.perf_counter()
        if threads == 1:
            call(0, 1)
        else:
            list(pool.map(lambda tid: call(tid, threads), range(threads)))
        return time.perf_counter() - start

    return min(once() for _ in range(repeat + 1))


def read_speed(pool: ThreadPoolExecutor, threads: int, repeat: int) -> float:
    """GB/s of numpy summing 256 MB."""
    data = np.ones(1 << 25, np.int64)
    share = len(data) // threads
    return data.nbytes / 1e9 / best(lambda tid, n: data[tid * share : (tid + 1) * share].max(), repeat, pool, threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--levels", default=DEFAULT)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", default="1,64")
    parser.add_argument("--choices", default="")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    pool = ThreadPoolExecutor(args.threads)
    print(f"reading: {read_speed(pool, args.threads, args.repeat):.1f} GB/s with {args.threads} thread(s)")
    heads = "".join(f"{'M=' + m:>24}" for m in args.rows.split(","))
    print(f"{'format':8}{'x':5}{'shape':10}{'level':21}{'compile':>8}  {heads}")
    for name in args.formats.split(","):
        for shape in args.shapes.split(","):
            n, k = SHAPES[shape]
            if k % max(FORMATS[name].superblock, 1):
                n, k = n * k // (k // 256 * 256), k // 256 * 256
            weight = np.frombuffer(pack(FORMATS[name], (n, k), codes_of(FORMATS[name], n, k)), np.uint8)
            for x in ("f32", "i8"):
                bench(name, shape, n, k, x, weight, args, pool)


def bench(name: str, shape: str, n: int, k: int, x: str, weight: np.ndarray, args, pool: ThreadPoolExecutor) -> None:
    params = {"rows": "T", "k": k, "x": x, "weights": ((name, n),), "bias": (False,)}
    params |= {choice: int(value) for choice, _, value in (c.partition("=") for c in args.choices.split(",") if c)}
    images, compiled, cells = {}, {}, {}
    for level in map(CODEGEN.level, args.levels.split(",")):
        start = time.perf_counter()
        text = FAMILIES["linears"].emit(params, "kernel", level_of(level))
        images[level] = Image({"kernel": compile_mlir(text, level)})
        compiled[level], cells[level] = time.perf_counter() - start, []
    for m in map(int, args.rows.split(",")):
        if shape == "large" and m > 8:
            continue
        xs = [np.ones((m, k), np.float32)]
        if x == "i8":
            xs = [np.ones((m, k), np.int8), np.ones((m, k // 32), np.float32), np.ones((m, k // 16), np.float32)]
        out = np.zeros((m, n), np.float32)
        loops = max(1, int(2e7 / (m * n * k)))
        arrays = [*xs, weight, out]
        calls = {v: repeated(KERNEL(i.address("kernel")), arrays, m, loops) for v, i in images.items()}
        times = dict.fromkeys(calls, float("inf"))
        for _ in range(args.repeat):
            for level, call in calls.items():
                times[level] = min(times[level], best(call, 1, pool, args.threads) / loops)
        for level, seconds in times.items():
            gbs = packed_bytes(FORMATS[name], (n, k)) / seconds / 1e9
            cells[level].append(f"{gbs:8.1f} GB/s {2e-9 * m * n * k / seconds:6.0f} GF/s")
    for level, columns in cells.items():
        print(f"{name:8}{x:5}{shape:10}{level:21}{compiled[level]:7.2f}s  " + " ".join(columns), flush=True)


if __name__ == "__main__":
    main()
