"""What an artifact costs to run: time to the first token, time per token, throughput and memory, over prompt lengths
and concurrency; and its attention and matrix kernels by themselves. Same artifact, same seed, same prompts.

Figures of different runs are comparable only on one machine with the same other load: nothing here judges them.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from numbers import Integral

import numpy as np

from adaptc.chart import COLOURS, Axis, Chart
from adaptc.errors import TooLongError
from adaptc.plan import Operator, Plan, evaluate
from adaptc.runtime.host import processor
from adaptc.runtime.sampler import check, check_seed
from adaptc.runtime.session import Session
from adaptc.runtime.watch import Watched, side_engine

Progress = Callable[[str, int, int], None]

OPERATOR_SECONDS = 0.02
"""Each kind of operator is repeated for about this long: kernels take microseconds to milliseconds."""

COMMANDS = 20
"""… and at least this often."""


@dataclass(frozen=True)
class Point:
    """``concurrency`` prompts of ``prompt_tokens`` tokens that arrive at once, ``new_tokens`` generated for each. Times
    are seconds over requests: ttft from arrival to the first token, queueing included; tpot between tokens after it,
    None when there are none.
    Throughput counts all requests together: tokens of prompts while they are read, new tokens from arrival to the end.
    """

    prompt_tokens: int
    concurrency: int
    new_tokens: int
    ttft_median: float
    ttft_worst: float
    tpot_median: float | None
    tpot_worst: float | None
    prefill_per_second: float
    generated_per_second: float


@dataclass(frozen=True)
class OperatorPoint:
    """One kind of operator of the plan, its kernels run alone, every place in turn so that each reads its own weights.
    ``seconds`` for one place; ``flops`` and ``bytes`` of one place by the plan."""

    phase: str
    tokens: int
    context: int
    op: str
    kernels: tuple[str, ...]
    places: int
    seconds: float
    flops: float
    bytes: float


@dataclass(frozen=True)
class Bench:
    """``digest`` names the artifact's content, ``machine`` what it ran on. ``memory`` in bytes: weights and caches as
    mapped, the arena, and the most that this process has had resident."""

    artifact: str
    digest: str
    machine: str
    level: str
    threads: int
    seed: int
    memory: dict[str, int]
    points: tuple[Point, ...]
    operators: tuple[OperatorPoint, ...]

    def to_dict(self) -> dict:
        return asdict(self)


def prompt(seed: int, length: int, index: int, vocabulary: int) -> np.ndarray:
    """Token ids of a prompt, the same on every machine: a function of the arguments alone."""
    key = np.array([seed, length << 32 | index], np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).integers(0, vocabulary, length)


def bench(session: Session, *, prompt_lengths: Sequence[int], concurrency: Sequence[int], new_tokens: int = 32,
          seed: int = 0, operators: bool = False, rounds: int = 1,
          progress: Progress = lambda what, done, total: None) -> Bench:  # fmt: skip
    """Measures ``session``: every point once in each of ``rounds``, of which medians count. Raises TooLongError when a prompt and its new tokens don't fit the artifact's context."""
    plan = session.plan
    given = {"prompt_lengths": prompt_lengths, "concurrency": concurrency, "new_tokens": [new_tokens],
             "rounds": [rounds]}  # fmt: skip
    for name, values in given.items():
        for value in values:
            check(name, value, Integral, "positive integers", lambda v: v >= 1)
    check_seed(seed)
    if max(prompt_lengths) + new_tokens > plan.max_context:
        raise TooLongError(f"{max(prompt_lengths)} prompt tokens and {new_tokens} new ones are more than the "
                           f"artifact's context, {plan.max_context}.", hint="Choose fewer.")  # fmt: skip
    grid = [(length, many) for length in prompt_lengths for many in concurrency]
    measured: dict[tuple[int, int], list[Point]] = {place: [] for place in grid}
    _point(session, min(prompt_lengths), 1, 2, seed)  # pages of memory and caches are warm from here on
    for number in range(rounds):  # rounds outside: what disturbs the machine for a while falls on every point
        for done, place in enumerate(grid):
            progress("bench", done + len(grid) * number, len(grid) * rounds)
            measured[place].append(_point(session, *place, new_tokens, seed))
    progress("bench", len(grid) * rounds, len(grid) * rounds)
    alone = [found for place in grid for found in _operators(session, *place, seed)] if operators else []
    points = [_median(taken) for taken in measured.values()]
    artifact = session.artifact
    return Bench(str(artifact.path), artifact.manifest["digest"], processor(), session.level, session.threads, seed,
                 _memory(session), tuple(points), tuple(alone))  # fmt: skip


def _point(session: Session, length: int, many: int, new_tokens: int, seed: int) -> Point:
    engine, plan = side_engine(session), session.plan
    start = time.perf_counter()
    requests = [engine.add(prompt(seed, length, i, plan.vocabulary), max_tokens=new_tokens) for i in range(many)]
    arrivals: dict[int, list[float]] = {request: [] for request in requests}
    while engine.active:
        for event in engine.step():
            arrivals[event.request].append(time.perf_counter() - start)
    first = [times[0] for times in arrivals.values()]
    gaps = [(times[-1] - times[0]) / (len(times) - 1) for times in arrivals.values() if len(times) > 1]
    end = max(times[-1] for times in arrivals.values())
    return Point(length, many, new_tokens, statistics.median(first), max(first),
                 statistics.median(gaps) if gaps else None, max(gaps, default=None),
                 many * length / max(first), many * new_tokens / end)  # fmt: skip


def _median(points: Sequence[Point]) -> Point:
    """The median of every figure by itself."""
    columns = {f.name: [getattr(point, f.name) for point in points] for f in fields(Point)}
    return Point(**{name: None if None in values else statistics.median(values) for name, values in columns.items()})


def _memory(session: Session) -> dict[str, int]:
    plan = session.plan
    pools = {group.name: session.engine.pools[group.name].pages for group in plan.groups}
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "weights": sum(b.bytes for b in plan.buffers if b.kind == "weight"),
        "arena": plan.arena_bytes,
        "caches": sum(pools[s.group] * s.page_bytes(plan.page_size) for s in plan.states),
        "resident, most": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
    }


# ---- a baseline ------------------------------------------------------------------------------------------------

SUITE = {"prompt_lengths": (32, 256, 1024), "concurrency": (1, 2, 4, 8), "new_tokens": 32, "rounds": 3}
"""What a baseline measures, of a context that is long enough; compare baselines of one machine only."""


def suite(session: Session, *, seed: int = 0, progress: Progress = lambda what, done, total: None) -> Bench:
    """The baseline of ``session``: ``SUITE``, without prompts that don't fit its context."""
    most = session.plan.max_context - SUITE["new_tokens"]
    lengths = [length for length in SUITE["prompt_lengths"] if length <= most]
    return bench(session, **SUITE | {"prompt_lengths": lengths or [max(1, most)]}, seed=seed, progress=progress)


def chart(found: Bench) -> Chart:
    """Throughput over concurrency, a colour a prompt length: new tokens (lines) and prompt tokens (dashed)."""
    many = sorted({point.concurrency for point in found.points})
    rates = [rate for point in found.points for rate in (point.generated_per_second, point.prefill_per_second)]
    drawing = Chart(f"{found.artifact}: {found.level}, {found.threads} thread(s), {found.machine}",
                    Axis.over("requests at once", many, whole=True), Axis.over("tokens a second", rates, log=True))  # fmt: skip
    for number, length in enumerate(sorted({point.prompt_tokens for point in found.points})):
        row = sorted((p for p in found.points if p.prompt_tokens == length), key=lambda p: p.concurrency)
        colour = COLOURS[number % len(COLOURS)]
        for name, dashed in (("generated_per_second", False), ("prefill_per_second", True)):
            line = [(point.concurrency, getattr(point, name)) for point in row]
            what = "prompt tokens (dashed)" if dashed else "new tokens"
            drawing.line(line, colour, "" if dashed else f"prompts of {length}", dashed)
            for point, place in zip(row, line):
                pace = f", TPOT {1e3 * point.tpot_median:.2f} ms" if point.tpot_median else ""
                drawing.dot(place, colour,
                            title=f"{place[1]:.1f} {what} a second, TTFT {1e3 * point.ttft_median:.1f} ms{pace}")
            drawing.text(line[-1], what, colour)
    return drawing


# ---- operators alone -------------------------------------------------------------------------------------------


def _alone(watched: Watched, operators: Sequence[int]) -> float:
    """Seconds that these operators take with the last step's symbols, one after the other."""
    return sum(watched.executable.run(watched.symbols, only=operators, times=True).values())


def _operators(session: Session, length: int, many: int, seed: int) -> list[OperatorPoint]:
    """Runs an engine to a step of each phase, whose inputs then stay in place while operators are repeated. Those write
    into the caches, so a phase ends with its requests."""
    plan, found = session.plan, []
    reading = -(-many * length // max(1, plan.max_step_tokens - many))  # steps at most until all prompts are read
    for phase, new in (("prefill", 1), ("decode", 3 + reading)):
        watched = Watched(session.executable)
        engine = side_engine(session, watched)
        for i in range(many):
            engine.add(prompt(seed, length, i, plan.vocabulary), max_tokens=new)
        engine.step()
        if phase == "decode":
            while watched.symbols["T"] != watched.symbols["R"] and engine.active:  # until no prompt is being read
                engine.step()
        found += _phase(plan, watched, phase, min(length, plan.max_step_tokens) if phase == "prefill" else length + 1)
    return found


def _phase(plan: Plan, watched: Watched, phase: str, context: int) -> list[OperatorPoint]:
    symbols = watched.symbols
    groups: dict[tuple, list[Operator]] = {}
    for operator in plan.operators():
        if _counts(plan, operator):
            groups.setdefault((operator.op, tuple(call.kernel for call in operator.calls)), []).append(operator)
    values = {**symbols, "C": context}
    found = []
    for (op, kernels), places in groups.items():
        if not evaluate(places[0].flops, values):
            continue  # no rows of it in this step: in the middle of a prompt nobody asks for logits
        once = [operator.id for operator in places]
        # one native run of many, since waking the threads takes as long as a small kernel
        rounds = -(-COMMANDS // len(once))
        spent = _alone(watched, once * rounds)
        rounds = max(rounds, int(rounds * OPERATOR_SECONDS / max(spent, 1e-9)))
        spent = _alone(watched, once * rounds)
        found.append(OperatorPoint(phase, symbols["T"], context, op, kernels, len(places),
                                   spent / rounds / len(places), evaluate(places[0].flops, values),
                                   evaluate(places[0].traffic, values)))  # fmt: skip
    return found


def _counts(plan: Plan, operator: Operator) -> bool:
    """Attention and matrix products, whatever they are called: arithmetic on a state, or on a weight of two axes."""
    buffers = {buffer.handle: buffer for buffer in plan.buffers}
    read = [buffers[handle] for call in operator.calls for handle in call.buffers]
    matrix = any(b.kind == "weight" and (b.dtype == "u8" or len(b.shape) > 1) for b in read)
    return bool(operator.flops) and (matrix or any(b.kind == "state" for b in read))
