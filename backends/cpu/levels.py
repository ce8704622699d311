"""CPU levels: the instruction sets that code may assume. Standard library only (launch reads it too).

The names are those of the x86-64 psABI (https://gitlab.com/x86-psABIs/x86-64-ABI, "Micro-architecture levels").
"""

from __future__ import annotations

from dataclasses import dataclass

from adaptc.errors import one_of


@dataclass(frozen=True)
class Level:
    """One level.

    target_cpu       LLVM's name of the processor to generate and schedule for
    target_features  LLVM features; with ``target_cpu`` they decide the code, whatever the compiling host is
    flags            what /proc/cpuinfo must list on a machine that runs the code
    """

    name: str
    machine: str
    target_cpu: str
    target_features: tuple[str, ...]
    flags: tuple[str, ...]


_V3_FEATURES = ("+avx", "+avx2", "+bmi", "+bmi2", "+cx16", "+f16c", "+fma", "+lzcnt", "+movbe", "+popcnt", "+sse4.2")
_V3_FLAGS = ("avx", "avx2", "bmi1", "bmi2", "cx16", "f16c", "fma", "abm", "movbe", "popcnt", "sse4_2")
_V4_FEATURES = ("+avx512bw", "+avx512cd", "+avx512dq", "+avx512f", "+avx512vl")
_V4_FLAGS = ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")

LEVELS: dict[str, Level] = {
    level.name: level
    for level in (
        Level("x86-64-v3", "x86_64", "x86-64-v3", _V3_FEATURES, _V3_FLAGS),
        Level("x86-64-v4", "x86_64", "x86-64-v4", _V3_FEATURES + _V4_FEATURES, _V3_FLAGS + _V4_FLAGS),
    )
}
"""Every CPU level by name."""


def level_of(name: str) -> Level:
    """The level called ``name``; OptionError listing the valid ones otherwise."""
    if name not in LEVELS:
        raise one_of("cpu level", name, LEVELS)
    return LEVELS[name]
