"""Where a step's time goes: each kind of operator in each kind of module, in prefill and in decode, measured while
requests run, and how far it stays below what the machine can do."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from statistics import median

from adaptc.chart import COLOURS, Axis, Chart
from adaptc.errors import TooLongError
from adaptc.plan import Operator, Plan, evaluate, kind_of
from adaptc.runtime.bench import prompt
from adaptc.runtime.peaks import Peaks
from adaptc.runtime.sampler import check, check_seed
from adaptc.runtime.session import Session
from adaptc.runtime.watch import Watched, side_engine

PROMPT = 256
"""Tokens of a prompt, if the context has room for them."""

ROUNDS = 3
"""Prompts that prefill is measured over."""


@dataclass(frozen=True)
class Spent:
    """One kind of operator in one kind of module, all its places in one step (decode) or one prompt (prefill) together.

    seconds   median over the steps or prompts; ``share`` of all operators of the phase
    flops     multiplications and additions, of the rows that each token sees; bytes of weights, activations and caches
    dtype     what is multiplied; limit: the least seconds by the machine's roofs, bound: which one ("compute" |
              "bandwidth"); both None where the roofs aren't known
    """

    phase: str
    module: str
    op: str
    kernels: tuple[str, ...]
    places: int
    seconds: float
    share: float
    flops: float
    bytes: float
    dtype: str
    limit: float | None = None
    bound: str | None = None


@dataclass(frozen=True)
class Phase:
    """All of a phase: ``tokens`` in a step (decode) or prompt (prefill), medians of its seconds: ``operators`` by the
    native clock, ``wall`` with what the host does between steps (scheduling, sampling)."""

    name: str
    tokens: int
    context: int
    steps: int
    operators: float
    wall: float


@dataclass(frozen=True)
class Run:
    """One step as it ran: its phase, tokens, the longest request, the mean rows that its tokens see, when it began and
    how long the engine took (seconds), and seconds by operator id."""

    phase: str
    round: int
    symbols: Mapping[str, int]
    context: int
    seen: float
    began: float
    wall: float
    operators: Mapping[int, float]


@dataclass(frozen=True)
class Profile:
    artifact: str
    level: str
    peaks: Peaks | None
    phases: tuple[Phase, ...]
    rows: tuple[Spent, ...]
    runs: tuple[Run, ...]

    def to_dict(self) -> dict:
        """Without single runs, which are the trace's."""
        return asdict(replace(self, runs=()))


def profile(session: Session, *, prompt_tokens: int | None = None, concurrency: int = 1, steps: int = 16, seed: int = 0,
            peaks: Peaks | None = None) -> Profile:  # fmt: skip
    """Runs ``concurrency`` prompts of ``prompt_tokens`` tokens (None: ``PROMPT``, or as many as fit) and ``steps`` decode
    steps after them. Raises TooLongError when they don't fit the artifact's context."""
    plan = session.plan
    if prompt_tokens is None:
        prompt_tokens = max(1, min(PROMPT, plan.max_context - steps - 1))
    for name, value in {"prompt_tokens": prompt_tokens, "concurrency": concurrency, "steps": steps}.items():
        check(name, value, Integral, "a positive integer", lambda v: v >= 1)
    check_seed(seed)
    if prompt_tokens + steps + 1 > plan.max_context:
        raise TooLongError(f"{prompt_tokens} prompt tokens and {steps} steps are more than the artifact's context, "
                           f"{plan.max_context}.", hint="Choose fewer.")  # fmt: skip
    watched = Watched(session.executable, times=True)
    runs: list[Run] = []
    for number in range(-1, ROUNDS):  # the first one warms caches and pages
        new = steps + 1 if number == ROUNDS - 1 else 1
        engine = side_engine(session, watched)
        for i in range(concurrency):
            ids = prompt(seed, prompt_tokens, i + concurrency * (number + 1), plan.vocabulary)
            engine.add(ids, max_tokens=new)
        while engine.active:
            began = time.perf_counter()
            engine.step()
            if number >= 0:
                runs.append(_run(watched, number, began))
    rows = tuple(row for phase in ("prefill", "decode") for row in _rows(plan, phase, runs, peaks))
    phases = tuple(found for phase in ("prefill", "decode") if (found := _phase(phase, runs)))
    return Profile(str(session.artifact.path), session.level, peaks, phases, rows, tuple(runs))


def _run(watched: Watched, number: int, began: float) -> Run:
    """The step that has just ended."""
    wall = time.perf_counter() - began
    tokens = watched.symbols["T"]
    rows = watched.inputs("positions")[:tokens] + 1
    phase = "decode" if tokens == watched.symbols["R"] and rows.min() > 1 else "prefill"
    return Run(phase, number, watched.symbols, int(rows.max()), float(rows.mean()), began, wall, watched.spent)


def _total(runs: list[Run], value) -> float:
    """Median over decode steps, or over prompts of the sum of their chunks."""
    totals: dict[int, float] = {}
    for number, run in enumerate(runs):
        key = run.round if run.phase == "prefill" else number
        totals[key] = totals.get(key, 0.0) + value(run)
    return median(totals.values())


def _rows(plan: Plan, phase: str, runs: list[Run], peaks: Peaks | None) -> list[Spent]:
    chosen = [run for run in runs if run.phase == phase]
    if not chosen:
        return []
    groups: dict[tuple, list[Operator]] = {}
    for operator in plan.operators():
        key = (kind_of(operator.source), operator.op, tuple(call.kernel for call in operator.calls))
        groups.setdefault(key, []).append(operator)
    found = []
    for (module, op, kernels), places in groups.items():
        seconds = _total(chosen, lambda run: sum(run.operators[place.id] for place in places))
        flops = _total(chosen, lambda run: sum(evaluate(p.flops, {**run.symbols, "C": run.seen}) for p in places))
        moved = _total(chosen, lambda run: sum(evaluate(p.traffic, {**run.symbols, "C": run.context}) for p in places))
        dtype = _dtype(plan, places[0])
        roofs = (peaks.seconds(flops, moved, dtype), peaks.bound(flops, moved, dtype)) if peaks else (None, None)
        found.append(Spent(phase, module, op, kernels, len(places), seconds, 0.0, flops, moved, dtype, *roofs))
    whole = sum(row.seconds for row in found) or 1.0
    return [replace(row, share=row.seconds / whole) for row in found]


def _phase(phase: str, runs: list[Run]) -> Phase | None:
    chosen = [run for run in runs if run.phase == phase]
    if not chosen:
        return None
    return Phase(phase, round(_total(chosen, lambda run: run.symbols["T"])), max(run.context for run in chosen),
                 len(chosen), _total(chosen, lambda run: sum(run.operators.values())),
                 _total(chosen, lambda run: run.wall))  # fmt: skip


def _dtype(plan: Plan, operator: Operator) -> str:
    """What an operator multiplies: bytes if it reads any as activations."""
    taken = {call.kernel for call in operator.calls}
    signatures = [kernel.signature for kernel in plan.kernels if kernel.symbol in taken]
    return "i8" if any(text.startswith("in:i8[") for signature in signatures for text in signature) else "f32"


# ---- drawings --------------------------------------------------------------------------------------------------


def trace(found: Profile, plan: Plan) -> dict:
    """Every step and operator as it ran, in the Trace Event Format that Perfetto and Chrome read: times in µs. What an
    operator took is known, when it began is the sum of those before it."""
    by_id = {operator.id: operator for operator in plan.operators()}
    threads = {"step": 1, "operators": 2}
    events: list[dict] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": found.artifact}}]
    events += [{"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}
               for name, tid in threads.items()]  # fmt: skip
    begin = min((run.began for run in found.runs), default=0.0)
    for run in found.runs:
        at = 1e6 * (run.began - begin)
        native = 1e6 * sum(run.operators.values())
        events.append({"ph": "X", "pid": 1, "tid": threads["step"], "name": run.phase, "ts": at, "dur": 1e6 * run.wall,
                       "args": {**run.symbols, "context": run.context}})  # fmt: skip
        at += max(0.0, 1e6 * run.wall - native) / 2  # the host prepares the step before it and samples after it
        for number, seconds in run.operators.items():
            operator, values = by_id[number], {**run.symbols, "C": run.seen}
            rate = {"GFLOP/s": evaluate(operator.flops, values), "GB/s": evaluate(operator.traffic, values)}
            events.append({"ph": "X", "pid": 1, "tid": threads["operators"], "name": operator.op, "ts": at,
                           "dur": 1e6 * seconds, "args": {
                               "id": number, "module": operator.source, "kernels": [c.kernel for c in operator.calls],
                               **{k: round(v / max(seconds, 1e-9) / 1e9, 3) for k, v in rate.items()}}})  # fmt: skip
            at += 1e6 * seconds
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def roofline(found: Profile, peaks: Peaks) -> Chart:
    """Operations a second over operations a byte: a dot a row, as large as its share, below the machine's roofs."""
    rows = [row for row in found.rows if row.flops and row.bytes and row.seconds]
    intensities = [row.flops / row.bytes for row in rows]
    x = Axis.over("operations a byte", [*intensities, peaks.operations["f32"] / peaks.bandwidth], log=True)
    speeds = [row.flops / row.seconds / 1e9 for row in rows if row.share > 0.001]
    y = Axis.over("Gop/s", [*speeds, *(rate / 1e9 for rate in peaks.operations.values())], log=True)
    chart = Chart(f"Roofline: {found.artifact}, {found.level}, {peaks.threads} thread(s)", x, y)
    grey = COLOURS[-1]
    low = max(x.low, y.low * 1e9 / peaks.bandwidth)
    for dtype, rate in sorted(peaks.operations.items()):
        corner = rate / peaks.bandwidth
        chart.line([(low, low * peaks.bandwidth / 1e9), (corner, rate / 1e9), (x.high, rate / 1e9)], grey)
        chart.text((corner, rate / 1e9), f"{dtype} {rate / 1e9:.0f} Gop/s", grey)
    chart.text((low * 1.5, low * 2 * peaks.bandwidth / 1e9), f"{peaks.bandwidth / 1e9:.1f} GB/s", grey)
    phases = list(dict.fromkeys(row.phase for row in rows))
    for row in sorted(rows, key=lambda r: -r.share):
        point, colour = (row.flops / row.bytes, row.flops / row.seconds / 1e9), COLOURS[phases.index(row.phase)]
        of_roof = f", {100 * row.limit / row.seconds:.0f} % of the roof" if row.limit else ""
        chart.dot(point, colour, 2 + 14 * row.share**0.5, label=row.phase,
                  title=f"{row.op} in {row.module}: {100 * row.share:.1f} % of {row.phase}{of_roof}")  # fmt: skip
        if row.share > 0.08:
            chart.text(point, f"{row.op} {row.module.rpartition('.')[2]}", colour)
    return chart
