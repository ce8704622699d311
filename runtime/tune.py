"""Which of a kernel's legal variants is fastest on this machine, measured in the steps of the model's own plan.

There every kernel finds its caches as it does in use: a weight has been driven out since it was last read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from adaptc.plan import ALIGNMENT, Kernel, Plan
from adaptc.protocol import Executable, Launcher

ROUNDS, PATIENCE, STILL = 30, 5, 0.01
"""Variants take turns, and the least reading counts: other load only ever adds. They end when ``PATIENCE`` rounds have
lowered nothing by more than ``STILL`` of it: soon on a quiet machine, later on a busy one, after ``ROUNDS`` at last."""

GAIN = 0.02
"""A choice must save this part of the default's time to replace it. Two readings of one kernel differ by less."""

BATCH = 8
"""Requests of the step that stands for decoding several together."""

PLACES = 2
"""Places of a kernel that are measured in longer steps, where what it finds in caches hardly counts."""

_POOL = 1 << 28
"""Bytes of stand-in weights, unless one is larger: more than a machine's last-level cache."""

_FILL = 0x3C
"""Every byte of them: as a code, an f16 scale (1.06), a bf16 or an f32 number (0.01) it is an ordinary value."""

Choices = Mapping[str, int]
"""Choice → value."""

Times = Mapping[str, Mapping[str, float]]
"""Kernel → kind of step → seconds."""


def steps(plan: Plan) -> dict[str, dict[str, int]]:
    """The kinds of steps that count, all the same: symbol values by name."""
    most = {symbol.name: symbol.max for symbol in plan.symbols}
    sizes = {"decode": (1, 1, 1), "batch": (BATCH, BATCH, BATCH), "prefill": (plan.max_step_tokens, 1, 1)}
    return {name: {symbol: min(size, most[symbol]) for symbol, size in zip("TRS", each) if symbol in most}
            for name, each in sizes.items()}


def choose(kernels: Mapping[str, Mapping[str, Sequence[int]]],
           measure: Callable[[Sequence[Mapping[str, Choices]]], Sequence[Times]],
           progress: Callable[[int, int], None] = lambda done, total: None) -> dict[str, tuple[Choices, float]]:
    """By kernel what to choose instead of its defaults, and the part of the defaults' time that it takes.

    kernels   kernel → its choices, each with its legal values, the default first
    measure   times of several variants of all kernels, taken together; a variant says each kernel's choices

    Choices are made one after the other, in the order of their names in the kernel, on top of those made before: their
    effects hardly depend on each other, and all combinations would be too many to compile. At last what was chosen is
    measured once more against the defaults, and only kernels that gain again are in the result.
    """
    best: dict[str, dict[str, int]] = {kernel: {} for kernel in kernels}
    names = list(dict.fromkeys(name for choices in kernels.values() for name in choices))
    for done, name in enumerate(names):
        progress(done, len(names))
        values = {kernel: choices.get(name, ())[1:] for kernel, choices in kernels.items()}
        variants = [{kernel: best[kernel] | ({name: v[i]} if i < len(v) else {}) for kernel, v in values.items()}
                    for i in range(max(map(len, values.values()), default=0))]
        before, *tried = measure([dict(best), *variants])
        for kernel, own in values.items():
            ratios = [_ratio(times[kernel], before[kernel]) for times in tried[: len(own)]]
            if ratios and min(ratios) <= 1 - GAIN:
                best[kernel] = {**best[kernel], name: own[ratios.index(min(ratios))]}
    before, after = measure([{kernel: {} for kernel in kernels}, best])
    ratios = {kernel: _ratio(after[kernel], before[kernel]) for kernel, choices in best.items() if choices}
    progress(len(names), len(names))
    return {kernel: (best[kernel], ratio) for kernel, ratio in ratios.items() if ratio <= 1 - GAIN}


def _ratio(times: Mapping[str, float], before: Mapping[str, float]) -> float:
    """Geometric mean over the kinds of steps."""
    return math.prod(times[step] / before[step] for step in before) ** (1 / len(before))


def measure(plan: Plan, variants: Sequence[Mapping[str, Kernel]], objects: Mapping[str, bytes], launcher: Launcher,
            threads: int) -> list[Times]:
    """Times of every variant: a variant says for kernels of the plan, by symbol, which stands in their place. Weights
    and inputs are made up. ``objects`` hold all of them."""
    names = {kernel for variant in variants for kernel in variant}
    places = [(o.id, call.kernel) for o in plan.operators() for call in o.calls if call.kernel in names]
    found = [{kernel: {} for _, kernel in places} for _ in variants]
    pages = {group.name: 1 for group in plan.groups}
    with ExitStack() as stack:
        loaded = [launcher.load(_with(plan, variant), objects, weights, threads=threads, pages=pages)
                  for variant, weights in zip(variants, _weights(plan, len(variants)))]
        for executable in loaded:
            stack.callback(executable.close)
        for step, symbols in steps(plan).items():
            some = _some(places) if symbols["T"] > BATCH else places
            only = None if some is places else sorted({operator for operator, _ in some})
            for times, least in zip(found, _least(loaded, symbols, only)):
                for operator, kernel in some:
                    times[kernel][step] = times[kernel].get(step, 0.0) + least[operator]
    return found


def _some(places: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """A few places of each kernel."""
    by_kernel: dict[str, list[tuple[int, str]]] = {}
    for place in places:
        by_kernel.setdefault(place[1], []).append(place)
    return [place for those in by_kernel.values() for place in those[:PLACES]]


def _least(loaded: Sequence[Executable], symbols: Mapping[str, int],
           only: Sequence[int] | None) -> list[dict[int, float]]:
    """By executable and operator the least seconds of several steps, taken in turns."""
    least: list[dict[int, float]] = [executable.run(symbols, only=only, times=True) for executable in loaded]
    lowered = 0
    for number in range(ROUNDS):
        for executable, seen in zip(loaded, least):
            spent = executable.run(symbols, only=only, times=True)
            before = sum(seen.values())
            seen.update((operator, min(taken, seen[operator])) for operator, taken in spent.items())
            if sum(seen.values()) < (1 - STILL) * before:
                lowered = number
        if number - lowered >= PATIENCE:
            break
    return least


def _with(plan: Plan, variant: Mapping[str, Kernel]) -> Plan:
    """The plan with kernels in others' places."""
    def calls(operator):
        return tuple(replace(c, kernel=variant[c.kernel].symbol) if c.kernel in variant else c for c in operator.calls)

    kernels = {k.symbol: k for k in (variant.get(kernel.symbol, kernel) for kernel in plan.kernels)}
    segments = tuple(replace(segment, operators=tuple(replace(o, calls=calls(o)) for o in segment.operators))
                     for segment in plan.segments)
    return replace(plan, kernels=tuple(kernels.values()), segments=segments)


def _weights(plan: Plan, count: int) -> list[dict[str, memoryview]]:
    """Stand-ins by name for each of ``count`` variants. All lie in one pool, one after the other and round again: what
    is read has left the caches since it was read last, by whichever variant."""
    sizes = {b.source: -(-b.bytes // ALIGNMENT) * ALIGNMENT for b in plan.buffers if b.kind == "weight"}
    size = max(min(_POOL, count * sum(sizes.values())), *sizes.values(), 0)
    raw = np.full(size + ALIGNMENT, _FILL, np.uint8)
    pool = memoryview(raw)[-raw.ctypes.data % ALIGNMENT :][:size]
    found, at = [], 0
    for _ in range(count):
        views = {}
        for name, length in sizes.items():
            at = at if at + length <= size else 0
            views[name], at = pool[at : at + length], at + length
        found.append(views)
    return found
