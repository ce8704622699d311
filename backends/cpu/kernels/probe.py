"""What a core can do at most at a level, for rooflines: reading memory, multiplying floats, multiplying bytes.

``out`` receives what was computed, so that nothing can be left out. Called by no operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaptc.backends.cpu.kernels.base import Emitter, Family, Value
from adaptc.backends.cpu.levels import Level
from adaptc.protocol import KernelSpec, Probe

_CHAINS = 8
"""Independent chains: more than an addition's latency times its throughput on any core of today."""

_READ_BYTES = 1 << 28
"""Beyond every cache."""

_ROUNDS = 1 << 20


def _read(e: Emitter, memory: Value) -> list[Value]:
    step = _CHAINS * 4 * e.lanes
    low, high = e.share(_READ_BYTES // step)
    with e.loop(low, high, init=[e.const(0, e.words)] * _CHAINS) as loop:
        here = e.at(memory, e.mul(loop.index, step))
        loop.end(*(e.xor(a, e.load(e.at(here, 4 * e.lanes * i), e.words)) for i, a in enumerate(loop.args)))
    return list(loop.results)


def _floats(e: Emitter, memory: Value) -> list[Value]:
    one = e.load(memory, e.floats)
    with e.loop(0, _ROUNDS, init=[one] * _CHAINS) as loop:
        loop.end(*(e.fma(one, a, one) for a in loop.args))
    return list(loop.results)


def _bytes(e: Emitter, memory: Value) -> list[Value]:
    """By one instruction a vector where the level has it, else as the kernels do: pairs in 16 bits, added there."""
    one = e.load(memory, e.bytes)
    if e.native("quads"):
        with e.loop(0, _ROUNDS, init=[e.const(0, e.words)] * _CHAINS) as loop:
            loop.end(*(e.do("quads", a, one, e.cast("bitcast", a, e.bytes)) for a in loop.args))
    else:
        with e.loop(0, _ROUNDS, init=[e.const(0, e.shorts)] * _CHAINS) as loop:
            loop.end(*(e.add(a, e.do("byte_pairs", one, e.cast("bitcast", a, e.bytes))) for a in loop.args))
    return list(loop.results)


def _vector_ops(count: int) -> int:
    """Multiplications and additions of all rounds, where a register holds ``count`` numbers."""
    return 2 * count * _CHAINS * _ROUNDS


_KINDS = {"read": _read, "f32": _floats, "i8": _bytes}


def _emit(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    e = Emitter(level)
    memory, out = e.buffer(0), e.buffer(1)
    for i, value in enumerate(_KINDS[params["what"]](e, memory)):
        e.store(value, e.at(e.at(out, e.mul(e.tid, _CHAINS * 64)), 64 * i))
    return e.text(symbol)


FAMILIES = {"probe": Family(_emit, lambda params: (f"in:u8[{_source(params['what'])}]", f"out:u8[n,{_CHAINS * 64}]"))}


def _source(what: str) -> int:
    """Bytes that it reads."""
    return _READ_BYTES if what == "read" else 64


def probes(level: Level) -> dict[str, Probe]:
    """See ``adaptc.protocol.Codegen.probes``."""
    work = {"read": _READ_BYTES, "f32": _vector_ops(level.lanes), "i8": _vector_ops(4 * level.lanes)}
    return {what: Probe(KernelSpec("probe", (("what", what),)), work[what], what == "read", _source(what),
                        _CHAINS * 64) for what in _KINDS}
