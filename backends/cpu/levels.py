"""CPU levels: the instruction sets that code may assume. Standard library only (launch reads it too).

A level's name is a base, those of the x86-64 psABI (https://gitlab.com/x86-psABIs/x86-64-ABI, "Micro-architecture
levels") or of Arm's architecture versions, and after it features that not every machine of the base has:
``x86-64-v4+avx512vnni``.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterable
from dataclasses import dataclass, replace

from adaptc.errors import OptionError, one_of

DEFAULT = "x86-64-v3"

NATIVE = "native"
"""Asks for the highest level that the compiling machine runs."""


@dataclass(frozen=True)
class Level:
    """One level.

    target_cpu       LLVM's name of the processor to generate and schedule for
    target_features  LLVM features; with ``target_cpu`` they decide the code, whatever the compiling host is
    flags            what /proc/cpuinfo must list on a machine that runs the code; a CPU with these has what they imply
    vector_bytes     width of the widest vector register
    """

    name: str
    machine: str
    target_cpu: str
    target_features: tuple[str, ...]
    flags: tuple[str, ...]
    vector_bytes: int

    @property
    def lanes(self) -> int:
        """f32 elements of one vector register."""
        return self.vector_bytes // 4

    def has(self, feature: str) -> bool:
        """Whether code may use an LLVM feature; only those that the level names count, not what they imply."""
        return "+" + feature in self.target_features

    def missing(self, machine: str, flags: Iterable[str]) -> tuple[str, ...]:
        """What a machine lacks to run the code: nothing, its kind (if it is of another), or flags."""
        return (self.machine,) if machine != self.machine else tuple(f for f in self.flags if f not in set(flags))


_V2_FEATURES = ("+cx16", "+popcnt", "+sse4.2")
_V2_FLAGS = ("cx16", "lahf_lm", "popcnt", "sse4_2")
_V3_FEATURES = ("+avx", "+avx2", "+bmi", "+bmi2", "+cx16", "+f16c", "+fma", "+lzcnt", "+movbe", "+popcnt", "+sse4.2")
_V3_FLAGS = ("avx", "avx2", "bmi1", "bmi2", "cx16", "f16c", "fma", "abm", "lahf_lm", "movbe", "popcnt", "sse4_2")
_V4_FEATURES = ("+avx512bw", "+avx512cd", "+avx512dq", "+avx512f", "+avx512vl")
_V4_FLAGS = ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")

LEVELS: dict[str, Level] = {
    level.name: level
    for level in (
        Level("x86-64-v2", "x86_64", "x86-64-v2", _V2_FEATURES, _V2_FLAGS, 16),
        Level("x86-64-v3", "x86_64", "x86-64-v3", _V3_FEATURES, _V3_FLAGS, 32),
        Level("x86-64-v4", "x86_64", "x86-64-v4", _V3_FEATURES + _V4_FEATURES, _V3_FLAGS + _V4_FLAGS, 64),
        Level("armv8-a", "aarch64", "generic", ("+fp-armv8", "+neon"), ("fp", "asimd"), 16),
    )
}
"""Every base by name; of one machine, the better one later."""


@dataclass(frozen=True)
class Extra:
    """A feature that may follow the names of some bases: LLVM's name is the same, /proc/cpuinfo's is ``flag``."""

    flag: str
    bases: tuple[str, ...]


EXTRAS: dict[str, Extra] = {
    "avx512vnni": Extra("avx512_vnni", ("x86-64-v4",)),
    "avxvnni": Extra("avx_vnni", ("x86-64-v3",)),
}
"""Extra features by name."""


@functools.cache
def level_of(name: str) -> Level:
    """The level called ``name``; OptionError listing the valid bases or features otherwise."""
    base, *extras = name.split("+")
    if base not in LEVELS:
        raise one_of("cpu level", base, LEVELS)
    level = LEVELS[base]
    for extra in sorted(set(extras)):
        valid = [e for e in EXTRAS if base in EXTRAS[e].bases]
        if extra not in valid:
            raise one_of(f"extra feature of cpu level {base}", extra, valid or ["none"])
        level = replace(
            level,
            name=f"{level.name}+{extra}",
            target_features=(*level.target_features, f"+{extra}"),
            flags=(*level.flags, EXTRAS[extra].flag),
        )
    return level


def host_flags() -> frozenset[str]:
    """What /proc/cpuinfo says that this CPU has; OptionError where that can't be found out."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = (line.partition(":") for line in file)
            return frozenset(next((v for k, _, v in lines if k.strip() in ("flags", "Features")), "").split())
    except OSError as error:
        raise OptionError(f"can't find out what this CPU supports: {error}.") from error


def rank(level: Level) -> tuple[int, int]:
    """Sorts levels of one machine from the least to the best."""
    base, *extras = level.name.split("+")
    return [*LEVELS].index(base), len(extras)


def native_level() -> Level:
    """The best level that this machine runs, with every extra feature that it has."""
    machine, flags = platform.machine(), host_flags()
    running = [level for level in LEVELS.values() if not level.missing(machine, flags)]
    if not running:
        raise OptionError(f"this {machine} CPU runs none of the levels {', '.join(LEVELS)}.")
    best = max(running, key=rank)
    extras = [name for name, extra in EXTRAS.items() if best.name in extra.bases and extra.flag in flags]
    return level_of("+".join([best.name, *extras]))
