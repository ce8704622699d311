"""Operator level: every kernel variant of the plan called alone, against what its operator means.

A variant is an operator's kernels with the operator's static description; each is called through the artifact's own
objects, of every CPU level that this machine runs, over numbers of rows and ranges of values, with the artifact's own
weights. Results and scratch start as NaN, so what a kernel leaves unwritten shows; and three threads must give what
one gives, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adaptc.ops.elementwise import NUMPY
from adaptc.ops.table import row
from adaptc.protocol import OpSpec, Selection, StateSpec, TensorSpec
from adaptc.verify import tolerances
from adaptc.verify.cases import RANGES, ROWS, Case, Maker
from adaptc.verify.past import Cache, aligned, earlier, last_step
from adaptc.verify.report import Finding, Level
from adaptc.verify.subject import Place, Subject


@dataclass(frozen=True)
class Variant:
    """Kernels and the description they carry out, and the plan's operators that they do so for."""

    kernels: tuple[str, ...]
    spec: OpSpec
    operators: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """How far a call's results are from what is wanted, and what was called."""

    excess: tolerances.Excess
    what: str


def check(subject: Subject, progress: Callable) -> Level:
    level = Level("operator")
    if not hasattr(subject.backend, "library"):
        level.left_out.append(f"the backend {subject.plan.backend!r} has no way to call a kernel alone (`library`, "
                              "adaptc.protocol.Launcher)")
        return level
    caller = Caller(subject)
    able = []
    for variant in variants(subject):
        if reason := caller.unable(variant):
            level.left_out.append(f"{' '.join(subject.describe(variant.operators[0]))}: {reason}")
        else:
            able.append(variant)
    worst, calls = 0.0, 0
    for number, name in enumerate(subject.levels):
        caller.use(name)
        for done, variant in enumerate(able):
            outcomes = list(caller.outcomes(variant))
            furthest = max(outcomes, key=lambda outcome: outcome.excess.ratio)
            worst, calls = max(worst, min(furthest.excess.ratio, 1e9)), calls + len(outcomes)
            if furthest.excess.ratio > 1:
                level.findings.append(_finding(subject, variant, furthest, name))
            progress("operators", number * len(able) + done + 1, len(able) * len(subject.levels))
    _cover(subject, level, able, calls)
    level.figures["worst error over what is allowed"] = worst
    return level


def _finding(subject: Subject, variant: Variant, outcome: Outcome, level: str) -> Finding:
    name, module = subject.describe(variant.operators[0])
    others = f"; the same kernels stand at {len(variant.operators)} places" if len(variant.operators) > 1 else ""
    what = (f"kernels {', '.join(variant.kernels)} for {level} don't give what the operator means with {outcome.what}"
            f"{others}")
    return Finding(what, name, module, *outcome.excess)


def _cover(subject: Subject, level: Level, able: Sequence[Variant], calls: int) -> None:
    called = {kernel for variant in able for kernel in variant.kernels}
    planned = {kernel.symbol for kernel in subject.plan.kernels}
    named = {call.kernel for operator in subject.plan.operators() for call in operator.calls}
    level.covered.append(
        f"{len(able)} variants with {len(called)} of {len(planned)} kernels, for {', '.join(subject.levels)}, {calls} "
        f"calls: rows {', '.join(map(str, ROWS))} and the plan's most; values {', '.join(RANGES)}; 1 and 3 threads")
    own = sorted({f"{v.spec.op}: {', '.join(row(v.spec.op).ranges)}" for v in able if row(v.spec.op).ranges})
    level.covered.append(f"operators {', '.join(sorted({v.spec.op for v in able}))}"
                         + (f"; ranges of their own for {'; '.join(own)}" if own else ""))
    if idle := sorted(planned - named):
        level.left_out.append(f"{len(idle)} kernels that no operator calls: {', '.join(idle)}")
    level.left_out += [f"kernels for {name}: not run ({reason})" for name, reason in subject.not_run.items()]
    if others := [name for name in subject.levels if name != subject.level]:
        level.left_out.append(f"whole steps with kernels for {', '.join(others)}: loading takes {subject.level} on "
                              "this machine, and the other levels of verification run that")


def variants(subject: Subject) -> list[Variant]:
    """The plan's distinct (kernels, description), in the order of their first place."""
    groups: dict[tuple, list[int]] = {}
    for operator, place in zip(subject.plan.operators(), subject.places):
        key = (tuple(call.kernel for call in operator.calls), repr(place.spec))
        groups.setdefault(key, []).append(operator.id)
    return [Variant(kernels, subject.places[ids[0]].spec, tuple(ids)) for (kernels, _), ids in groups.items()]


class Caller:
    """Calls variants' kernels, those of one CPU level at a time."""

    def __init__(self, subject: Subject):
        self.subject, self.plan = subject, subject.plan
        self.most = {s.name: s.max for s in self.plan.symbols}
        self.signatures = {k.symbol: k.signature for k in self.plan.kernels}
        self.selections: dict[str, Selection | None] = {}

    def use(self, level: str) -> None:
        self.library = self.subject.library(level)

    def selection(self, spec: OpSpec) -> Selection | None:
        key = repr(spec)
        if key not in self.selections:
            self.selections[key] = self.subject.codegen.select(spec)
        return self.selections[key]

    def unable(self, variant: Variant) -> str:
        """Why a variant can't be called alone; "" when it can."""
        selection = self.selection(variant.spec)
        if selection is None:
            return "this version of the backend has no kernel for it, so nothing says what its buffers are"
        if [len(u.args) for u in selection.uses] != [len(self.signatures.get(k, ())) for k in variant.kernels]:
            return "this version of the backend calls it in another way than the plan does"
        operator = row(variant.spec.op)
        if operator.state is not None and not {"positions", "requests"} <= set(operator.operands):
            return "its state isn't addressed by positions and requests"
        if operator.state is not None and not operator.appends:
            return "it reads rows that another operator appends; whole steps run it"
        return ""

    def outcomes(self, variant: Variant) -> Iterable[Outcome]:
        """Of every case, each with the weights of another place."""
        rng = self.subject.random("operands", *variant.operators)
        run = self.run if row(variant.spec.op).state is None else self.run_stateful
        most = self.most
        if row(variant.spec.op).state is not None:  # a step can be longer than all that its requests may hold
            most = {**most, "T": min(most["T"], most["R"] * self.plan.max_context)}
        maker = Maker(variant.spec, most, self.plan.max_context, rng)
        for number, case in enumerate(maker.cases()):
            place = variant.operators[number % len(variant.operators)]
            self.subject.trying.put(place)
            yield run(variant, self.subject.places[place], maker, case)

    def run(self, variant: Variant, where: Place, maker: Maker, case: Case) -> Outcome:
        operands = [self.value(where, i, o) for i, o in enumerate(case.operands)]
        return self.compare(variant, where, case, operands, operands, 1)

    def run_stateful(self, variant: Variant, where: Place, maker: Maker, case: Case) -> Outcome:
        """The case as the last step of requests of which the first has a past that reaches over the window and over
        pages, and the others begin."""
        operator, names = row(variant.spec.op), row(variant.spec.op).operands
        kind: StateSpec = variant.spec.operands[operator.state]
        tokens, requests = case.sizes["T"], max(1, min(case.sizes["R"], case.sizes["T"]))
        past = max(case.past, ((kind.window or 2 * kind.key_block) + kind.page_size) * kind.rate + 3)
        past = min(self.plan.max_context - -(-tokens // requests), past)
        cache = Cache.of(kind, self.most["R"], self.plan.max_context, self.most["T"], self.subject.random("pages"))
        self.fill(variant, where, maker, cache, past)
        positions, owners, lengths = last_step(tokens, requests, past)
        for request, length in lengths.items():
            cache.hold(request, length)
        operands = list(case.operands)
        for index, made in ((names.index("positions"), positions), (names.index("requests"), owners),
                            (operator.state, cache.state), *self.earlier(variant, positions)):
            operands[index] = made
        operands = [self.value(where, i, o) for i, o in enumerate(operands)]
        case = Case(case.sizes, operands, f"{case.what} after {past} tokens")
        return self.compare(variant, where, case, operands, copy.deepcopy(operands), int(positions.max()) + 1, cache)

    def fill(self, variant: Variant, where: Place, maker: Maker, cache: Cache, past: int) -> None:
        """The first request's past, by the kernels, in steps as large as they may be, and in the oracle's state."""
        operator = row(variant.spec.op)
        attrs, names = operator.complete(variant.spec.attrs), operator.operands
        for start in range(0, past, self.most["T"]):
            count = min(self.most["T"], past - start)
            sizes = {**self.most, "T": count}
            operands = [self.value(where, i, o) for i, o in enumerate(maker.operands(sizes))]
            operands[names.index("positions")] = np.arange(start, start + count, dtype=np.int32)
            operands[names.index("requests")] = np.zeros(count, np.int32)
            for index, made in self.earlier(variant, operands[names.index("positions")]):
                operands[index] = made
            cache.hold(0, start + count)
            self.call(variant, where, sizes, operands, 1, cache)
            cache.append(operator, attrs, operands)
        cache.forget(0, past)

    def earlier(self, variant: Variant, positions: np.ndarray) -> Iterable[tuple[int, np.ndarray]]:
        """(index, value) of the operands that name earlier positions."""
        spec, operator = variant.spec, row(variant.spec.op)
        for index, place in enumerate(operator.places(spec.attrs, len(spec.operands))):
            if operator.operands[place].rstrip("?") in operator.earlier:
                most = spec.operands[index].shape[1]
                rate = spec.operands[operator.state].rate
                yield index, earlier(positions, most, rate, self.subject.random("earlier", len(positions), int(positions.max())))

    def compare(self, variant: Variant, where: Place, case: Case, operands: list, before: list, context: int,
                cache: Cache | None = None) -> Outcome:
        """The result that is furthest from what is allowed. ``before``: the operands with the state as it was."""
        spec, operator = variant.spec, row(variant.spec.op)
        attrs = operator.complete(spec.attrs)
        pool, kept = (cache.memory[0].copy(), cache.kept()) if cache else (None, None)
        got = self.call(variant, where, case.sizes, operands, 1, cache)
        if cache:
            if cache.kept().tobytes() != kept.tobytes():
                return Outcome(tolerances.Excess(np.inf, 0.0), f"{case.what}, where they change what isn't theirs to write")
            cache.memory[0][...] = pool
        again = self.call(variant, where, case.sizes, operands, 3, cache)
        if any(ours.tobytes() != thrice.tobytes() for ours, thrice in zip(got, again)):
            return Outcome(tolerances.Excess(np.inf, 0.0), f"{case.what}, where three threads give other bits than one")
        with np.errstate(all="ignore"):
            wanted = [np.asarray(w) for w in operator.meaning(attrs, *operands)]
        length = tolerances.reduction(operator, spec, case.sizes, context)
        excesses = [tolerances.excess(operator, attrs, before, ours, i, theirs, length)
                    for i, (ours, theirs) in enumerate(zip(got, wanted))]
        worst = max(range(len(excesses)), key=lambda i: excesses[i].ratio)
        return Outcome(excesses[worst], case.what + (f" (result {worst})" if len(excesses) > 1 else ""))

    def value(self, where: Place, index: int, made):
        """An operand: the weight that stands there, or what was made up."""
        symbol, kind = where.symbols[index], where.spec.operands[index]
        if symbol is not None and not isinstance(kind, StateSpec):
            return self.subject.values(symbol)
        if made is None and isinstance(kind, TensorSpec):
            raise AssertionError(f"operand {index} of {where.source} is a packed value that no symbol names")
        return made

    def call(self, variant: Variant, where: Place, sizes: Mapping[str, int], operands: Sequence, threads: int,
             cache: Cache | None) -> list[np.ndarray]:
        """The kernels' results. Threads take turns in reverse order: kernels have no barrier inside."""
        spec, selection = variant.spec, self.selection(variant.spec)
        results, scratch = ([_unwritten(t, sizes) for t in some] for some in (spec.results, selection.scratch))
        inputs = [self.buffer(where, i, o) for i, o in enumerate(operands)]
        find = {"operand": inputs.__getitem__, "result": results.__getitem__, "scratch": scratch.__getitem__,
                "state": lambda i: cache.memory[0], "pages": lambda i: cache.memory[1]}
        symbols = [sizes[s.name] for s in self.plan.symbols]
        for kernel, use in zip(variant.kernels, selection.uses):
            arrays = [find[kind](int(i)) for kind, i in (a.split(":") for a in use.args)]
            for tid in reversed(range(threads)):
                self.library.call(kernel, arrays, symbols, tid, threads)
        return results

    def buffer(self, where: Place, index: int, value):
        kind, symbol = where.spec.operands[index], where.symbols[index]
        if isinstance(kind, StateSpec) or value is None:
            return None
        if kind.format is not None:
            return np.frombuffer(self.subject.artifact.weights[symbol], np.uint8)
        return aligned(value.shape, value.dtype, value)


def _unwritten(kind: TensorSpec, sizes: Mapping[str, int]) -> np.ndarray:
    """A buffer whose bits are all 1: NaN, -1."""
    shape = tuple(sizes[d] if isinstance(d, str) else d for d in kind.shape)
    array = aligned(shape, NUMPY[kind.dtype], 0)
    array.reshape(-1).view(np.uint8)[...] = 0xFF
    return array
