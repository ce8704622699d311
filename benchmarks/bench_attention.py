"""Speed of the cpu attention kernels on one thread: prefill and decode, in ms a layer and GB/s of cache.

Seconds are those of the thread (the system's clock of it), the least of many: other programs' time doesn't count, what
they take from memory and caches does.

    python benchmarks/bench_attention.py [level]
"""

from __future__ import annotations

import pathlib
import sys
import time

import numpy as np
from adaptc.backends.cpu.kernels import attention
from adaptc.options import KEPT
from adaptc.protocol import OpSpec, StateSpec, TensorSpec
from adaptc.targets import target

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
from cpu_kernel import aligned, native

KEY_BLOCK = target("cpu").key_block


def best_of(call, seconds: float = 0.5) -> float:
    call()
    times, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 5:
        start = time.thread_time_ns()
        call()
        times.append(time.thread_time_ns() - start)
    return min(times) / 1e9


def case(heads, kv_heads, width, kept, tokens, context, window, level, page_size=16):
    """Seconds of (kv_append, attention) for ``tokens`` new tokens at the end of ``context``, and bytes of its cache."""
    pages = -(-context // page_size)
    dtype, scale = KEPT[kept]
    state = StateSpec((("k", kv_heads, width), ("v", kv_heads, width)), dtype, window, page_size, KEY_BLOCK, pages, scale)
    row = lambda h: TensorSpec("f32", ("T", h, width))
    index = TensorSpec("i32", ("T",))
    spec = OpSpec("attention", (row(heads), row(kv_heads), row(kv_heads), index, index, state), (row(heads),),
                  {"scaling": width**-0.5, "window": window, "softcap": 0.0})
    rng = np.random.default_rng(0)
    q, k, v = (aligned(rng.standard_normal((context, h, width)).astype(np.float32)) for h in (heads, kv_heads, kv_heads))
    pool = np.zeros((pages, page_size * state.token_bytes()), np.uint8)
    table = rng.permutation(pages).astype(np.int32)[None]
    out = aligned(np.empty((context, heads, width), np.float32))
    selection = attention.SELECT["attention"](spec)
    scratch = [aligned(np.zeros(s.shape, np.float32)) for s in selection.scratch]

    def step(first: int):
        """A call of (append, all else) over positions from ``first`` on."""
        where = np.arange(first, context, dtype=np.int32), np.zeros(context - first, np.int32)
        values = {"operand:0": q[first:], "operand:1": k[first:], "operand:2": v[first:], "operand:3": where[0],
                  "operand:4": where[1], "state:5": pool, "pages:5": table, "result:0": out}
        values |= {f"scratch:{i}": s for i, s in enumerate(scratch)}
        calls = [(native(attention.FAMILIES[use.kernel.family], dict(use.kernel.params), level),
                  [values[name] for name in use.args]) for use in selection.uses]
        run = lambda some: [kernel(buffers, (context - first, 1, 1)) for kernel, buffers in some]
        return lambda: run(calls[:1]), lambda: run(calls[1:])

    fill, _ = step(0)
    fill()
    append, attend = step(context - tokens)
    return best_of(append), best_of(attend), state.token_bytes() * min(context, window or context)


def main(level: str = "x86-64-v3") -> None:
    print("   heads width  kept tokens context window append ms attend ms  speed")
    smollm, gemma, llama = (9, 3, 64), (4, 1, 256), (32, 8, 128)
    decode = [(*model, "f16", 1, context, 0) for model in (smollm, gemma, llama) for context in (256, 1024, 4096, 16384)]
    others = [(*smollm, kept, 1, 4096, 0) for kept in ("f32", "bf16", "int8")] + [(*gemma, "f16", 1, 4096, 512)]
    prefill = [(*model, "f16", 256, context, 0) for model in (smollm, gemma, llama, (8, 8, 64)) for context in (256, 1024)]
    for heads, kv_heads, width, kept, tokens, context, window in (*decode, *others, *prefill):
        append, attend, size = case(heads, kv_heads, width, kept, tokens, context, window, level)
        pairs = sum(min(p, window or p) for p in range(context - tokens + 1, context + 1)) * heads
        speed = f"{pairs * width * 4 / attend / 1e9:.1f} GFLOP/s" if tokens > 1 else f"{size / attend / 1e9:.1f} GB/s"
        print(f"{heads:>5}/{kv_heads:<2} {width:>5} {kept:>5} {tokens:>6} {context:>7} {window:>6} {append * 1e3:>9.3f} "
              f"{attend * 1e3:>9.3f}  {speed}")


if __name__ == "__main__":
    main(*sys.argv[1:])
