"""Equivalences: one result whatever the way, bit for bit.

Chunked = one-shot, cached = recomputed, batched = alone, any number of threads, any order of pages with NaN in every
free one, pages that other requests have left, and prefixes that are found again. Each way runs in the run time's own engine. When two ways differ,
both are run again with every operator's rows recorded, and the first operator whose rows differ is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from adaptc.ops.table import row
from adaptc.runtime.engine import Engine, group_pages
from adaptc.runtime.sampler import Sampling
from adaptc.verify.guard import Crashed, Failed, guarded
from adaptc.verify.owners import Disagrees, Watched
from adaptc.verify.report import Finding, Level
from adaptc.verify.subject import Subject

MOST = 640
"""Tokens of the longest sequence; longer windows than that leaves room for aren't crossed."""
ROWS = 16
"""Last positions whose logits are compared; the ones before them decide them through the caches."""
DECODED = 24
"""Tokens that go one by one."""
RECORDED = 64
"""Sequences up to this long are recorded with every operator, longer ones with those that have a state."""


@dataclass(frozen=True)
class Way:
    """How prompts are run. ``before``: other prompts that the engine has served and dropped. ``reuse``: what those left is
    found again, also after a preemption in the middle."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    chunk: int | None = None
    threads: int = 1
    order: int | None = None
    before: tuple[tuple[int, ...], ...] = ()
    reuse: bool = False


def check(subject: Subject, tokens: Sequence[int], progress: Callable) -> Level:
    level, plan = Level("equivalences"), subject.plan
    windows = [g.window for g in plan.groups if g.window]
    wanted = max([w for w in windows if w + plan.page_size + 8 <= MOST], default=0) + plan.page_size + 8
    length = max(1, min(max(40, wanted), MOST, plan.max_context))
    prompt = tuple(int(t) for t in np.resize(np.asarray(tokens), length))
    short, other = prompt[:DECODED], tuple(reversed(prompt))
    alone = Way("one-shot", (prompt,))
    few = Way("one-shot", (short,))
    pairs = [
        (alone, replace(alone, name="chunks of 7", chunk=7)),
        (few, replace(few, name="one token a step", chunk=1)),
        (alone, replace(alone, name="2 threads", threads=2)),
        (alone, replace(alone, name="3 threads", threads=3)),
        (alone, replace(alone, name="pages in random order", chunk=max(1, length // 3), order=subject.seed)),
        (few, replace(few, name="pages that another request left", before=(other[: 2 * DECODED],),
                      order=subject.seed + 1)),
        (alone, replace(alone, name="a prefix found again", before=(prompt,), chunk=max(1, length // 3), reuse=True)),
    ]
    if min(s.max for s in plan.symbols) > 1:
        batch = tuple(other[i : i + n] for i, n in ((0, 5), (3, DECODED)))[: min(s.max for s in plan.symbols) - 1]
        pairs.append((few, replace(few, name="batched with other requests", prompts=(short, *batch), chunk=5)))
    for done, (first, second) in enumerate(pairs, 1):
        _guarded(subject, level, second, lambda: _compare(subject, first, second))
        progress("ways", done, len(pairs) + 1)
    _guarded(subject, level, few, lambda: _decoding(subject, short))
    progress("ways", len(pairs) + 1, len(pairs) + 1)
    level.covered.append(f"bit for bit, {length} tokens (last {min(ROWS, length)} rows of logits) and {len(short)}: "
                         + ", ".join(second.name for _, second in pairs))
    if plan.max_context > len(short):
        level.covered.append("greedy decoding = the best tokens of the sequence recomputed")
    else:
        level.left_out.append("greedy decoding: the context has no room for it")
    if any(w + plan.page_size + 8 > MOST for w in windows):
        level.left_out.append(f"windows of more than {MOST - plan.page_size - 8} tokens aren't crossed")
    return level


def _guarded(subject: Subject, level: Level, way: Way, check: Callable[[], list[Finding]]) -> None:
    """Adds what ``check`` finds; when it crashes, the operator at which the way does so when run one by one."""
    try:
        level.findings += guarded(check, subject.trying)
    except (Crashed, Failed) as first:
        what = f"native code crashed ({first.cause})" if isinstance(first, Crashed) else str(first)
        operator, where, module = getattr(first, "operator", None), "run time", ""
        try:
            guarded(lambda: score(subject, way, watch=_Rows(subject, 0, range(len(subject.plan.operators())))),
                    subject.trying)
        except Crashed as again:
            operator = again.operator
        except Failed as again:
            what = f"{what}; {again}"
        if operator is not None:
            where, module = subject.describe(operator)
        level.findings.append(Finding(f"{way.name}: {what}", where, module))


def _compare(subject: Subject, first: Way, second: Way) -> list[Finding]:
    expected, got = score(subject, first)[0], score(subject, second)[0]
    if got.tobytes() == expected.tobytes():
        return []
    off = float(np.abs(got.astype(np.float64) - expected).max())
    differ = f"logits differ by up to {off:.2e}" if np.isfinite(off) else "some logits are not numbers"
    where, module, what = "run time: what is found again" if second.reuse else "logits", "", ""
    try:  # of what is found again no operator computes the rows
        found = None if second.reuse else _first_difference(subject, first, second)
    except Disagrees as error:
        found, where, what = None, "run time: the step's inputs", f": {error}"
    if found:
        index, position = found
        (where, module), what = subject.describe(index), f"; it differs first at position {position}"
    return [Finding(f"{second.name} gives other bits than {first.name}{what} ({differ})", where, module)]


def _decoding(subject: Subject, prompt: tuple[int, ...]) -> list[Finding]:
    """Greedy tokens from the caches, against the best tokens of the whole sequence recomputed."""
    plan = subject.plan
    steps = min(8, plan.max_context - len(prompt))
    if steps < 1:
        return []
    pages = {g.name: group_pages(plan, g, len(prompt) + steps) + 1 for g in plan.groups}
    executable = subject.load(1, pages)
    try:
        engine = Engine(plan, executable, pages)
        engine.poison_free_pages()
        engine.add(prompt, max_tokens=steps, sampling=Sampling())
        made: list[int] = []
        while engine.active:
            made += [int(e.token) for e in engine.step() if e.token is not None]
            engine.poison_free_pages()
    finally:
        executable.close()
    if len(made) < steps:
        return [Finding(f"greedy decoding ends after {len(made)} of {steps} tokens: no token can be drawn", "logits")]
    whole = score(subject, Way("recomputed", ((*prompt, *made[:-1]),)), rows=len(made))[0]
    again = whole.argmax(1).tolist()
    if again == made:
        return []
    at = next(i for i, (a, b) in enumerate(zip(made, again)) if a != b)
    return [Finding(f"decoding gives token {made[at]} at position {len(prompt) + at}, recomputing the sequence gives "
                    f"{again[at]}", "logits")]


def score(subject: Subject, way: Way, *, rows: int = ROWS, watch: _Rows | None = None) -> list[np.ndarray]:
    """The last ``rows`` logits of each of the way's prompts."""
    plan = subject.plan
    together = lambda g: sum(group_pages(plan, g, len(p), way.chunk) + 2 for p in way.prompts)  # noqa: E731
    pages = {g.name: max(together(g), *(group_pages(plan, g, len(p)) + 2 for p in way.before), 0) for g in plan.groups}
    executable = subject.load(way.threads, pages)
    try:
        used = watch.over(executable) if watch else executable
        engine = Engine(plan, used, pages, page_order_seed=way.order, prefix_cache=way.reuse)
        engine.poison_free_pages()
        for prompt in way.before:
            _run(engine, plan, [prompt], None, rows, watch)
        return _run(engine, plan, way.prompts, way.chunk, rows, watch, preempted=way.reuse)
    finally:
        executable.close()


def _run(engine: Engine, plan, prompts, chunk, rows: int, watch, preempted: bool = False) -> list[np.ndarray]:
    outs, requests = [], []
    for prompt in prompts:
        count = min(rows, len(prompt))
        outs.append(np.full((count, plan.vocabulary), np.nan, np.float32))
        if watch:
            watch.owners.promise(prompt)
        requests.append(engine.score(prompt, outs[-1], start=len(prompt) - count, chunk=chunk))
    if preempted:
        engine.step()
        engine.preempt(requests[0])
        engine.poison_free_pages()
    while engine.active:
        engine.step()
        engine.poison_free_pages()
    return outs


class _Rows(Watched):
    """Records operators' output rows by (operator, output) and position, of one request."""

    def __init__(self, subject: Subject, request: int, operators: Sequence[int]):
        super().__init__()
        self.subject, self.request, self.operators = subject, request, operators
        self.rows: dict[int, dict[int, bytes]] = {}
        self.buffers = {b.handle: b for b in subject.plan.buffers}

    def run(self, symbols, **options):
        requests, positions = self.owners.of(*(self.role(n, symbols["T"]) for n in ("tokens", "positions", "requests")))
        mine = np.flatnonzero(requests == self.request)
        planned = self.subject.plan.operators()
        for index in self.operators:
            self.subject.trying.put(index)
            self.executable.run(symbols, stop_after=index)
            for handle in planned[index].outputs:
                if self.buffers[handle].shape[:1] == ("T",):
                    values = self.executable.read(handle, symbols)
                    for i in mine:
                        kept = self.rows.setdefault(int(positions[i]), {})
                        kept[index] = kept.get(index, b"") + values[i].tobytes()
        self.executable.run(symbols, **options)


def _first_difference(subject: Subject, first: Way, second: Way) -> tuple[int, int] | None:
    """(operator, position) of the first rows, in program order, that differ; of the first prompt. None when only those of
    sampled rows differ. Disagrees when a way's steps are fed with tokens that are no request's next ones."""
    operators = range(len(subject.plan.operators()))
    if len(first.prompts[0]) > RECORDED:
        operators = [i for i in operators if row(subject.plan.operators()[i].op).state is not None]
    recorded = []
    for way in (first, second):
        rows = _Rows(subject, len(way.before), operators)
        score(subject, way, watch=rows)
        recorded.append(rows.rows)
    for index in operators:
        for position in sorted(recorded[0]):
            if recorded[0][position].get(index) != recorded[1].get(position, {}).get(index):
                return index, position
    return None
