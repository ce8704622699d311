"""Runs cpu kernels by themselves: select, compile, map, call; for tests and benchmarks."""

from __future__ import annotations

import ctypes
import functools
import hashlib

import numpy as np
from adaptc.backends.cpu.elf import Image
from adaptc.backends.cpu.levels import DEFAULT, level_of
from adaptc.backends.cpu.toolchain import compile_mlir

NUMPY = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "i64": np.int64, "i32": np.int32, "i8": np.int8,
         "u8": np.uint8, "i1": np.bool_}
LEVEL = DEFAULT
"""The level that tests run at unless they say another; test_cpu_levels sets it to run them again."""
KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


@functools.cache
def _image(text: str, symbol: str, level: str) -> tuple[Image, KERNEL]:
    image = Image({"kernel.o": compile_mlir(text, level)})
    return image, KERNEL(image.address(symbol))


def native(family, params, level: str | None = None):
    """The kernel as a callable(buffers, symbols, tid, n) over numpy arrays; for ``LEVEL`` by default."""
    level = level or LEVEL
    symbol = "kernel_" + hashlib.sha256(repr(sorted(params.items())).encode()).hexdigest()[:12]
    _, function = _image(family.emit(params, symbol, level_of(level)), symbol, level)

    def call(buffers, symbols=(1, 1, 1), tid=0, n=1):
        pointers = (ctypes.c_void_p * len(buffers))(*(b.ctypes.data for b in buffers))
        values = (ctypes.c_int64 * 3)(*symbols)
        function(ctypes.addressof(pointers), ctypes.addressof(values), tid, n)

    return call


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy that starts on a cache line, as the arena's buffers do, with a guard of 64 bytes after it."""
    raw = np.zeros(array.nbytes + 192, np.uint8)
    start = -raw.ctypes.data % 64
    view = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def run(module, spec, operands, symbols, threads: int = 1, level: str | None = None):
    """Results of an operator by ``module``'s kernels. A state operand is given as (pool, block table). Threads take
    turns in reverse order: kernels have no barrier inside, so any order must do."""
    selection = module.SELECT[spec.op](spec)
    assert selection is not None, f"no kernel for {spec}"
    values = dict(zip("TRS", symbols))
    size = lambda shape: tuple(values[d] if isinstance(d, str) else d for d in shape)
    results = [aligned(np.full(size(r.shape), 77, NUMPY[r.dtype])) for r in spec.results]
    scratch = [aligned(np.full(size(s.shape), 77, NUMPY[s.dtype])) for s in selection.scratch]
    inputs = [tuple(map(np.asarray, o)) if isinstance(o, tuple) else aligned(np.asarray(o)) for o in operands]
    find = {
        "operand": lambda i: inputs[i], "result": lambda i: results[i], "scratch": lambda i: scratch[i],
        "state": lambda i: inputs[i][0], "pages": lambda i: inputs[i][1],
    }  # fmt: skip
    for use in selection.uses:
        params = dict(use.kernel.params)
        family = module.FAMILIES[use.kernel.family]
        assert len(family.signature(params)) == len(use.args)
        buffers = [find[kind](int(number)) for kind, number in (arg.split(":") for arg in use.args)]
        call = native(family, params, level)
        for tid in reversed(range(threads)):
            call(buffers, symbols, tid, threads)
    return results
