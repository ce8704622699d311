"""Speed of the cpu attention kernels on one thread: prefill and decode, in ms a layer and GB/s of cache.

    python benchmarks/bench_attention.py [level]
"""

from __future__ import annotations

import pathlib
import sys
import time

import numpy as np
from adaptc.backends.cpu.kernels import attention
from adaptc.protocol import OpSpec, StateSpec, TensorSpec

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
from cpu_kernel import aligned, native

STORED = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


def best_of(call, seconds: float = 0.5) -> float:
    call()
    times, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def case(heads, kv_heads, width, dtype, tokens, context, level, page_size=16, key_block=16):
    """Seconds of (kv_append, attend) for ``tokens`` new tokens at the end of ``context``."""
    pages = -(-context // page_size)
    state = StateSpec((("k", kv_heads, width), ("v", kv_heads, width)), dtype, 0, page_size, key_block, pages)
    row = lambda h: TensorSpec("f32", ("T", h, width))
    index = TensorSpec("i32", ("T",))
    spec = OpSpec("attention", (row(heads), row(kv_heads), row(kv_heads), index, index, state), (row(heads),),
                  {"scaling": width**-0.5, "window": 0, "softcap": 0.0})
    rng = np.random.default_rng(0)
    q, k, v = (aligned(rng.standard_normal((tokens, h, width)).astype(np.float32)) for h in (heads, kv_heads, kv_heads))
    pool = rng.standard_normal((pages, kv_heads * page_size * width * 2)).astype(np.float16)
    pool = pool if dtype == "f16" else (pool.astype(np.float32) if dtype == "f32" else
                                        (pool.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))
    table = rng.permutation(pages).astype(np.int32)[None]
    positions, requests = np.arange(context - tokens, context, dtype=np.int32), np.zeros(tokens, np.int32)
    out = aligned(np.empty((tokens, heads, width), np.float32))
    append, attend = ((native(attention.FAMILIES[u.kernel.family], dict(u.kernel.params), level))
                      for u in attention.SELECT["attention"](spec).uses)
    symbols = (tokens, 1, 1)
    return (best_of(lambda: append([k, v, positions, requests, pool, table], symbols)),
            best_of(lambda: attend([q, positions, requests, pool, table, out], symbols)))


def main(level: str = "x86-64-v3") -> None:
    print("   heads width dtype tokens context append ms attend ms  speed")
    for heads, kv_heads, width, dtype, tokens, context in (
        (9, 3, 64, "f16", 256, 256),
        (9, 3, 64, "f16", 512, 2048),
        (9, 3, 64, "f32", 256, 256),
        (9, 3, 64, "bf16", 256, 256),
        (16, 8, 128, "f16", 256, 256),
        (9, 3, 64, "f16", 1, 256),
        (9, 3, 64, "f16", 1, 4096),
        (9, 3, 64, "bf16", 1, 4096),
        (9, 3, 64, "f32", 1, 4096),
        (8, 8, 64, "f16", 1, 4096),
        (16, 8, 128, "f16", 1, 4096),
        (32, 8, 128, "f16", 1, 16384),
    ):
        append, attend = case(heads, kv_heads, width, dtype, tokens, context, level)
        pairs = sum(range(context - tokens + 1, context + 1)) * heads
        size = {"f32": 4, "f16": 2, "bf16": 2}[dtype] * 2 * kv_heads * width * context
        speed = f"{pairs * width * 4 / attend / 1e9:.1f} GFLOP/s" if tokens > 1 else f"{size / attend / 1e9:.1f} GB/s"
        print(f"{heads:>5}/{kv_heads:<2} {width:>5} {dtype:>5} {tokens:>6} {context:>7} {append * 1e3:>9.3f} "
              f"{attend * 1e3:>9.3f}  {speed}")


if __name__ == "__main__":
    main(*sys.argv[1:])
