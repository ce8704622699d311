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


def case(heads, kv_heads, width, kept, tokens, context, window, level, latent=0, page_size=16):
    """Seconds of (kv_append, attention) for ``tokens`` new tokens at the end of ``context``, and bytes of its cache.
    With ``latent`` one row a token is the key of all heads, and so many of its columns their value."""
    pages = -(-context // page_size)
    dtype, scale = KEPT[kept]
    parts = (("latent", 1, width),) if latent else (("k", kv_heads, width), ("v", kv_heads, width))
    state = StateSpec(parts, dtype, window, page_size, KEY_BLOCK, pages, scale)
    shapes = [(heads, width), *([(width,)] if latent else [(kv_heads, width)] * 2)]
    rows, index = [TensorSpec("f32", ("T", *shape)) for shape in shapes], TensorSpec("i32", ("T",))
    result = TensorSpec("f32", ("T", heads, latent or width))
    attrs = {"scaling": width**-0.5} | ({"value_width": latent} if latent else {"window": window, "softcap": 0.0})
    spec = OpSpec("latent_attention" if latent else "attention", (*rows, index, index, state), (result,), attrs)
    rng = np.random.default_rng(0)
    given = [aligned(rng.standard_normal((context, *shape)).astype(np.float32)) for shape in shapes]
    pool = np.zeros((pages, page_size * state.token_bytes()), np.uint8)
    table = rng.permutation(pages).astype(np.int32)[None]
    out = aligned(np.empty((context, heads, latent or width), np.float32))
    selection = attention.SELECT[spec.op](spec)
    scratch = [aligned(np.zeros(s.shape, np.float32)) for s in selection.scratch]

    def step(first: int):
        """A call of (append, all else) over positions from ``first`` on."""
        where = np.arange(first, context, dtype=np.int32), np.zeros(context - first, np.int32)
        values = {f"operand:{i}": x for i, x in enumerate([*(x[first:] for x in given), *where])}
        values |= {f"state:{len(values)}": pool, f"pages:{len(values)}": table, "result:0": out}
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
    print("   heads width values kept tokens context attend ms  latent attention")
    for heads, tokens, context in ((16, 1, 4096), (128, 1, 1024), (128, 1, 4096), (128, 16, 1024)):
        _, attend, _ = case(heads, 1, 576, "f16", tokens, context, 0, level, latent=512)
        speed = sum(range(context - tokens + 1, context + 1)) * heads * (576 + 512) * 2 / attend / 1e9
        print(f"{heads:>8} {576:>5} {512:>6}  f16 {tokens:>6} {context:>7} {attend * 1e3:>9.3f}  {speed:.1f} GFLOP/s")


if __name__ == "__main__":
    main(*sys.argv[1:])
