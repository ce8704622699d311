"""Layer level: every operator of whole steps, through the run time's own engine.

Three comparisons, each against an oracle that shares nothing with what it checks:

1. the plan against the laid-out program: after every operator of every step the native walk stops, its outputs are
   read, and held against what the operator means on the very inputs that the plan computed. Both then go on from the
   plan's results, so an error is reported under the operator that has it and under no other;
2. the laid-out program against the captured one: see ``meaning``;
3. the artifact against the captured program, both running freely from the same tokens: error by depth.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from adaptc.backends.reference.interpreter import Reference
from adaptc.errors import LegalityError
from adaptc.ir.build import attrs_of, short_name
from adaptc.ir.module import spec_of
from adaptc.ops.elementwise import NUMPY
from adaptc.ops.table import row
from adaptc.runtime.engine import Engine, group_pages
from adaptc.verify import tolerances
from adaptc.verify.guard import describe
from adaptc.verify.meaning import Recorder, Standing, compare_meanings
from adaptc.verify.owners import Disagrees, Watched
from adaptc.verify.report import Depth, Finding, Level
from adaptc.verify.subject import Subject

CROSSED = 64
"""Windows up to this many tokens are crossed by the layer level; the oracle takes too long for longer ones, which the
operator level crosses with the kernels alone and the equivalences with whole steps."""
SPARE_PAGES = 2
THREADS = 1
"""Stopping after every operator meets a barrier each time, which costs much where cores are shared; that threads change
nothing is what the other two levels check."""


def check(subject: Subject, tokens: Sequence[int], progress: Callable) -> tuple[Level, list[Depth]]:
    """``tokens``: a prompt of the model, or any valid ids; repeated or cut to the length that is wanted."""
    level = Level("layer")
    windows = [g.window for g in subject.plan.groups if g.window]
    crossed = max([w for w in windows if w <= CROSSED], default=0)
    long = [w for w in windows if w > CROSSED]
    length = max(20, crossed + subject.plan.page_size + 3, *(2 * g.rate + 3 for g in subject.plan.groups))
    length = min(length, subject.plan.max_context - 4)
    sequence = fitted(tokens, length)

    _contracts(subject, level)
    plan_against_laid_out(subject, sequence, level, progress)
    recorder = Recorder(subject.captured, subject.values)
    progress("captured", 0, 1)
    whole = sequence[: subject.plan.max_step_tokens]
    recorder.score(whole)
    progress("captured", 1, 1)
    standing = compare_meanings(subject, recorder, whole, level)
    depths = _depths(subject, recorder, standing, whole, level)
    if long:
        level.left_out.append(f"windows of {', '.join(map(str, sorted(set(long))))} tokens aren't crossed here; the "
                              "operator level and the equivalences cross them")
    return level, depths


def fitted(tokens: Sequence[int], length: int) -> list[int]:
    """``tokens`` repeated and cut to ``length``."""
    return [int(t) for t in np.resize(np.asarray(tokens, np.int64), length)]


def _contracts(subject: Subject, level: Level) -> None:
    """Each state says the same in the captured program and in the plan: kind, parts, window and rate. Where a pass has found a
    narrower form of the rows (the fact "restated"), that is what the plan must say."""
    states = {s.name: s for s in subject.plan.states}
    slots, restated = subject.captured.states(), subject.laid_out.fact("restated", ())
    for name, slot in slots.items():
        parts = subject.laid_out.states()[name].spec.parts if name in restated else slot.spec.parts
        wanted = (slot.spec.kind, parts, slot.spec.window, slot.spec.rate)
        held = states.get(name)
        got = (held.kind, tuple((p.name, p.heads, p.width) for p in held.parts), held.window, held.rate) if held else None
        if got != wanted:
            level.findings.append(Finding(f"the plan keeps (kind, parts, window, rate) {got}, the program says {wanted}",
                                          f"state {name}", slot.source))
    level.covered.append(f"contracts of {len(slots)} states")


# ---- 1: the plan against the laid-out program ------------------------------------------------------------------


class PlanWalk(Reference):
    """The laid-out program, evaluated beside the plan in one executable, and going on from the plan's results."""

    def __init__(self, subject: Subject, executable):
        super().__init__(subject.laid_out, subject.values)
        self.executable, self.operators, self.trying = executable, subject.plan.operators(), subject.trying
        self.symbols: dict[str, int] = {}
        self.next = 0
        self.worst: dict[int, tolerances.Excess] = {}
        """Operator id → where it is furthest from what is allowed."""

    def begin(self, symbols: dict[str, int]) -> None:
        self.symbols, self.next = symbols, 0

    def operator(self, op, source: str, operands: list) -> tuple:
        name = short_name(op)
        operator = row(name)
        attrs = operator.complete(attrs_of(op))
        before = copy.deepcopy(operands) if operator.state is not None else operands
        with np.errstate(all="ignore"):
            wanted = tuple(np.asarray(w) for w in operator.meaning(attrs, *operands))
        if operator.aliases:
            return wanted
        planned = self.operators[self.next] if self.next < len(self.operators) else None
        if planned is None or (planned.op, planned.source, len(planned.outputs)) != (name, source, len(wanted)):
            got = f"{planned.id} {planned.op} in {planned.source}" if planned else "nothing more"
            raise Disagrees(f"the laid-out program goes on with {name} in {source}, the plan with {got}")
        self.next += 1
        self.trying.put(planned.id)
        self.executable.run(self.symbols, stop_after=planned.id)
        spec = spec_of(op)
        context = int(operands[operator.operands.index("positions")].max(initial=0)) + 1 if operator.state else 1
        length = tolerances.reduction(operator, spec, self.symbols, context)
        results = []
        for i, (handle, theirs, kind) in enumerate(zip(planned.outputs, wanted, spec.results)):
            ours = _values(self.executable.read(handle, self.symbols), kind.dtype)
            if ours.shape != theirs.shape:
                raise Disagrees(f"operator {planned.id} {name} in {source}: its buffer {handle} has shape "
                                f"{ours.shape}, the program says {theirs.shape}")
            excess = tolerances.excess(operator, attrs, before, ours, i, theirs, length)
            self.worst[planned.id] = max(excess, self.worst.get(planned.id, excess), key=lambda e: e.ratio)
            results.append(ours)
        return tuple(results)


def _values(array: np.ndarray, dtype: str) -> np.ndarray:
    """What was read from memory as the oracle's arrays are: bfloat16 bits as float32 values."""
    if dtype == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(NUMPY[dtype], copy=False)


class Beside(Watched):
    """Evaluates the program beside every step."""

    def __init__(self, walk: PlanWalk, level: Level):
        super().__init__()
        self.walk, self.level = walk, level
        self.steps = 0

    def run(self, symbols, **options):
        tokens, positions, rows = (self.role(name, symbols["T"]) for name in ("tokens", "positions", "requests"))
        requests, right = self.owners.of(tokens, positions, rows)
        wrong = np.flatnonzero(positions != right)
        if len(wrong):
            first = wrong[0]
            self.level.findings.append(Finding(
                f"the run time feeds position {positions[first]} where request {requests[first]} goes on at "
                f"{right[first]}", "run time: the step's positions", self.walk.operators[0].source))
        self.walk.begin(symbols)
        lengths = None
        if "lengths" in self.walk.program.roles:  # by row of this step there, by request here
            lengths = np.zeros(requests.max() + 1, np.int32)
            lengths[requests] = self.role("lengths", symbols["R"])[rows]
        self.walk.step(tokens, right, requests, self.role("sampled", symbols["S"]), lengths=lengths)
        self.executable.run(symbols, **options)
        self.steps += 1


def plan_against_laid_out(subject: Subject, sequence: list[int], level: Level, progress: Callable) -> None:
    """One request in chunks; a second that joins, decodes and ends; a third in the pages that it leaves."""
    plan = subject.plan
    pages = {g.name: 2 * group_pages(plan, g, len(sequence)) + SPARE_PAGES for g in plan.groups}
    executable = subject.load(THREADS, pages)
    walk = PlanWalk(subject, executable)
    watched = Beside(walk, level).over(executable)
    ended: Finding | None = None
    try:
        engine = Engine(plan, watched, pages, page_order_seed=subject.seed)
        engine.poison_free_pages()
        logits = np.empty((1, plan.vocabulary), np.float32)
        chunk = max(1, -(-len(sequence) // 3))
        some = sequence[: max(2, min(5, len(sequence) // 3))]
        joined = min(s.max for s in plan.symbols) > 1

        def add(tokens, max_tokens):
            watched.owners.promise(tokens, more=True)
            return engine.add(tokens, max_tokens=max_tokens)

        watched.owners.promise(sequence, more=False)
        engine.score(sequence, logits, start=len(sequence) - 1, chunk=chunk)
        total = 7
        _step(engine, watched, progress, total)
        if joined:
            add(some[::-1], 2)
        _drain(engine, watched, progress, total)
        add(some, 2)
        add(some[1:], 2)
        _drain(engine, watched, progress, total)
    except (Disagrees, LegalityError) as error:
        ended = Finding(str(error), "run time: the step's inputs or the plan's operators")
    except Exception as error:  # also the oracle's own, on values that make no sense
        ended = Finding(f"the steps ended in an error: {describe(error)}", "run time")
    finally:
        executable.close()
        progress("steps", 1, 1)
    for index, excess in sorted(walk.worst.items()):
        if excess.ratio > 1:
            level.findings.append(Finding("the plan's result isn't what the operator means on the same inputs",
                                          *subject.describe(index), *excess))
    level.findings += [ended] if ended else []
    level.covered.append(f"{len(walk.worst)} of {len(plan.operators())} operators in {watched.steps} steps of the run "
                         f"time ({len(sequence)} tokens in chunks, requests that join and reuse pages; free pages hold "
                         "NaN), each against its meaning")
    ratios = [excess.ratio for excess in walk.worst.values()]
    level.figures["worst operator error over what is allowed"] = max(ratios, default=0.0)


def _step(engine: Engine, watched: Beside, progress: Callable, total: int) -> None:
    engine.step()
    engine.poison_free_pages()
    progress("steps", min(watched.steps, total - 1), total)


def _drain(engine: Engine, watched: Beside, progress: Callable, total: int) -> None:
    while engine.active:
        _step(engine, watched, progress, total)


# ---- 3: error by depth -----------------------------------------------------------------------------------------


def _depths(subject: Subject, recorder: Recorder, standing: Standing, tokens: list[int], level: Level) -> list[Depth]:
    """The artifact's layer outputs and logits against the captured program's, all in one step."""
    kind = tolerances.kind_of(subject.artifact.manifest["options"])
    worst, least = tolerances.LAYERS[kind]
    spare = -(-len(tokens) // tolerances.SPARE) if kind != "f32" and subject.chooses else 0
    outputs = list(_outputs(subject, recorder, standing, tokens))
    for depth, (module, got, wanted) in enumerate(outputs):
        error, cosine = _agreement(got, wanted, spare)
        if not (error <= worst and cosine >= least):
            level.findings.append(Finding(
                f"running freely, the artifact's values differ from the captured program's (cosine {cosine:.6f})",
                f"layer {depth}" if module else "logits", module, error, worst))
            break
    but = f", but for the {spare} tokens furthest off, for which routers may choose otherwise" if spare else ""
    level.covered.append(f"outputs of {len(outputs) - 1} of {len(recorder.layers())} layers and the logits on "
                         f"{len(tokens)} tokens against the captured program (allowed: relative error {worst:g}, "
                         f"cosine {least:g}, for {kind} values{but})")
    return [Depth(depth, module, *_agreement(got, wanted)) for depth, (module, got, wanted) in enumerate(outputs)]


def _agreement(got: np.ndarray, wanted: np.ndarray, spare: int = 0) -> tuple[float, float]:
    """(relative error, cosine) over all rows but the ``spare`` ones that are furthest off."""
    if got.shape != wanted.shape:
        return np.inf, 0.0
    if spare:
        off = np.nan_to_num(np.abs(got - wanted).max(1), nan=np.inf)
        kept = np.argsort(off, kind="stable")[: max(1, len(off) - spare)]
        got, wanted = got[kept], wanted[kept]
    return tolerances.relative(got, wanted), tolerances.cosine(got, wanted)


def _outputs(subject: Subject, recorder: Recorder, standing: Standing, tokens: list[int],
             ) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(layer, its output's rows, the captured program's) for each layer whose output the plan has, then the logits."""
    plan, operators = subject.plan, subject.plan.operators()
    executable = subject.load(THREADS, {g.name: group_pages(plan, g, len(tokens)) + SPARE_PAGES for g in plan.groups})
    try:
        symbols = _one_step(executable, plan, tokens)
        for layer, wanted in recorder.layers().items():
            place = next((p for p, rows in reversed(standing) if rows is wanted or np.array_equal(rows, wanted)), None)
            if place is not None and place[0] < len(operators):
                executable.run(symbols, stop_after=place[0])
                got = executable.read(operators[place[0]].outputs[place[1]], symbols).reshape(-1, wanted.shape[1])
                # what only the logits need is computed for the sampled rows alone, which are the last ones
                yield layer, got, wanted[-len(got) :]
        executable.run(symbols)
        logits = executable.read(plan.outputs["logits"], symbols)
        yield "", logits, recorder.logits[-len(logits) :]
    finally:
        executable.close()


def _one_step(executable, plan, tokens: list[int]) -> dict[str, int]:
    """Inputs of one step over a whole sequence of one request; the last rows' logits are wanted."""
    count = len(tokens)
    sampled = min(count, {s.name: s.max for s in plan.symbols}["S"])
    executable.inputs("tokens")[:count] = tokens
    executable.inputs("positions")[:count] = np.arange(count)
    executable.inputs("requests")[:count] = 0
    executable.inputs("sampled")[:sampled] = np.arange(count - sampled, count)
    if "lengths" in plan.inputs:
        executable.inputs("lengths")[:1] = count
    for group in plan.groups:
        table = executable.inputs(f"pages:{group.name}")
        table[...] = -1
        first = [-1, 0] if group.kind == "fixed" else np.arange(-(-count // group.page_tokens(plan.page_size)))
        table[0, : len(first)] = first
    return {"T": count, "R": 1, "S": sampled}
