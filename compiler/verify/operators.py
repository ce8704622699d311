"""Operator level: every kernel variant of the plan called alone, against what its operator means.

A variant is an operator's kernels with the operator's static description; each is called through the artifact's own
objects, over numbers of rows and ranges of values, with the artifact's own weights. Results and scratch start as NaN,
so what a kernel leaves unwritten shows; caches start as NaN, so what it must not read shows; and three threads must
give what one gives, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from adaptc.ops.dense import split_activation
from adaptc.ops.elementwise import NUMPY
from adaptc.ops.mixing import RowState
from adaptc.ops.table import OpRow, row
from adaptc.protocol import OpSpec, Selection, StateSpec, TensorSpec
from adaptc.verify import tolerances
from adaptc.verify.report import Finding, Level
from adaptc.verify.subject import Place, Subject

ROWS = (1, 2, 3, 5, 17)
"""Numbers of tokens, requests and sampled rows, beside the plan's maximum: remainders of every tile of kernels."""
LONG = 600
"""Tokens before a step of one case of a stateful operator: kernels may treat long contexts in pieces."""
LARGE_FLOPS = 2e9
"""Above this, a case takes the oracle more than a second; the largest number of rows is then left to fewer ranges."""


def _normal(rng, shape):
    return rng.standard_normal(shape)


def _outliers(rng, shape):
    """One value in fifty is 10⁴ times as large, as in real models' residual streams."""
    return rng.standard_normal(shape) * np.where(rng.random(shape) < 0.02, 1e4, 1.0)


def _equal(rng, shape):
    return np.broadcast_to(rng.standard_normal((*shape[:-1], 1)) if shape else 1.0, shape)


RANGES: Mapping[str, Callable] = {
    "normal": _normal,
    "outliers": _outliers,
    "equal": _equal,
    "zero": lambda rng, shape: np.zeros(shape),
    "subnormal": lambda rng, shape: rng.standard_normal(shape) * 1e-40,
    "small": lambda rng, shape: rng.standard_normal(shape) * 1e-12,
    "infinite": lambda rng, shape: np.where(rng.random(shape) < 0.2, -np.inf, rng.standard_normal(shape)),
}
"""Ranges of float operands. "infinite" (masks) only where no element meets another: on elementwise operators whose
parts don't turn -inf into NaN, and on views."""


@dataclass(frozen=True)
class Variant:
    """Kernels and the description they carry out, and the plan's operators that they do so for."""

    kernels: tuple[str, ...]
    spec: OpSpec
    operators: tuple[int, ...]


@dataclass
class Case:
    """One call: sizes of the symbols, values of the operands; a state comes as (pool, block table, oracle's rows), and
    one request has at least ``past`` tokens behind it as far as the context allows."""

    sizes: dict[str, int]
    operands: list
    what: str
    past: int = 0


def check(subject: Subject, progress: Callable) -> Level:
    level = Level("operator")
    if not hasattr(subject.backend, "library"):
        level.left_out.append(f"the backend {subject.plan.backend!r} has no way to call a kernel alone (`library`, "
                              "adaptc.protocol.Launcher)")
        return level
    caller = Caller(subject)
    found = variants(subject)
    cases = 0
    for done, variant in enumerate(found):
        reason = caller.unable(variant)
        if reason:
            level.left_out.append(f"{_name(subject, variant)}: {reason}")
        else:
            count, finding = _variant(caller, variant, done)
            cases += count
            level.findings += [finding] if finding else []
        progress("operators", done + 1, len(found))
    kernels = {k for v in found for k in v.kernels}
    level.covered.append(
        f"{len(found)} variants with {len(kernels)} of {len(subject.plan.kernels)} kernels, {cases} calls: rows "
        f"{', '.join(map(str, ROWS))} and the plan's most; values {', '.join(RANGES)}; 1 and 3 threads"
    )
    level.figures["worst error over what is allowed"] = caller.worst
    return level


def variants(subject: Subject) -> list[Variant]:
    """The plan's distinct (kernels, description), in the order of their first place."""
    groups: dict[tuple, list[int]] = {}
    for operator, place in zip(subject.plan.operators(), subject.places):
        key = (tuple(call.kernel for call in operator.calls), repr(place.spec))
        groups.setdefault(key, []).append(operator.id)
    return [Variant(kernels, subject.places[ids[0]].spec, tuple(ids)) for (kernels, _), ids in groups.items()]


def _name(subject: Subject, variant: Variant) -> str:
    return " ".join(subject.describe(variant.operators[0]))


def _variant(caller: Caller, variant: Variant, seed: int) -> tuple[int, Finding | None]:
    """(calls made, the worst disagreement)."""
    rng = np.random.default_rng(seed)
    worst: tuple[float, float, float, str] | None = None
    count = 0
    for number, case in enumerate(caller.cases(variant, rng)):
        place = variant.operators[number % len(variant.operators)]
        error, bound, what = caller.run(variant, place, case)
        count += 1
        ratio = error / bound if bound else (np.inf if error else 0.0)
        if worst is None or ratio > worst[0]:
            worst = (ratio, error, bound, what)
    if worst is None or worst[0] <= 1:
        return count, None
    name, module = caller.subject.describe(variant.operators[0])
    others = f"; the same kernels stand at {len(variant.operators)} places" if len(variant.operators) > 1 else ""
    what = f"kernels {', '.join(variant.kernels)} don't give what the operator means with {worst[3]}{others}"
    return count, Finding(what, name, module, worst[1], worst[2])


class Caller:
    """Makes operands up and calls a variant's kernels."""

    def __init__(self, subject: Subject):
        self.subject, self.plan = subject, subject.plan
        self.library = subject.library()
        self.most = {s.name: s.max for s in self.plan.symbols}
        self.signatures = {k.symbol: k.signature for k in self.plan.kernels}
        self.worst = 0.0
        self.selections: dict[str, Selection | None] = {}

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
        return ""

    # ---- cases

    def cases(self, variant: Variant, rng) -> Iterator[Case]:
        """Every number of rows with ordinary values, then every range with few rows and, unless that takes the oracle
        long, with many."""
        operator, spec = row(variant.spec.op), variant.spec
        dynamic = any(isinstance(d, str) for t in (*spec.operands, *spec.results) if isinstance(t, TensorSpec)
                      for d in t.shape)
        large = self.flops(operator, spec, self.most) > LARGE_FLOPS
        for count in dict.fromkeys((*ROWS, max(self.most.values()))) if dynamic else (1,):
            yield self.case(spec, count, "normal", rng)
        if operator.state is not None:
            yield replace(self.case(spec, 3, "normal", rng), past=LONG)
        for name in RANGES:
            if name == "infinite" and not (operator.elementwise or operator.views):
                continue
            for count in ((3,) if large or not dynamic else (3, max(self.most.values()))):
                yield self.case(spec, count, name, rng)

    @staticmethod
    def flops(operator: OpRow, spec: OpSpec, sizes: Mapping[str, int]) -> float:
        form = operator.cost(spec.attrs, spec.operands, spec.results)
        total = 0.0
        for symbols, factor in form.items():
            total += factor * np.prod([float(sizes.get(s, 64)) for s in symbols.split("*") if s])
        return total

    def case(self, spec: OpSpec, count: int, values: str, rng) -> Case:
        sizes = {name: min(count, most) for name, most in self.most.items()}
        what = f"{', '.join(f'{k}={v}' for k, v in sizes.items())}, {values} values"
        return Case(sizes, [self.operand(spec, i, sizes, values, rng) for i in range(len(spec.operands))], what)

    def operand(self, spec: OpSpec, index: int, sizes: Mapping[str, int], values: str, rng):
        """An operand's array; None for what the place supplies (weights) or comes later (quantised parts, states)."""
        operator, kind = row(spec.op), spec.operands[index]
        if isinstance(kind, StateSpec) or kind is None or kind.format is not None:
            return None
        shape = tuple(sizes[d] if isinstance(d, str) else d for d in kind.shape)
        dtype = NUMPY[kind.dtype]
        if kind.dtype in tolerances.UNIT:
            return np.ascontiguousarray(RANGES[values](rng, shape)).astype(dtype)
        if kind.dtype == "i1":
            return rng.random(shape) < 0.5
        if kind.dtype in ("i8", "u8"):
            return rng.integers(-127 if kind.dtype == "i8" else 0, 128, shape).astype(dtype)
        return rng.integers(0, self.limit(spec, operator, index, sizes), shape).astype(dtype)

    def limit(self, spec: OpSpec, operator: OpRow, index: int, sizes: Mapping[str, int]) -> int:
        """Integers below this are valid in operand ``index``."""
        if operator.gathers and operator.gathers[1] == index:
            rows = spec.operands[operator.gathers[0]].shape[0]
            return sizes[rows] if isinstance(rows, str) else rows
        return self.plan.max_context

    # ---- one call

    def run(self, variant: Variant, place: int, case: Case) -> tuple[float, float, str]:
        """(error, bound, what) of the result that is furthest from what is allowed."""
        self.subject.trying.put(place)
        spec, operator = variant.spec, row(variant.spec.op)
        where = self.subject.places[place]
        operands = [self.value(where, i, o) for i, o in enumerate(case.operands)]
        operands = quantized(spec, operands)
        attrs = operator.complete(spec.attrs)
        length = tolerances.reduction(operator, spec, case.sizes, 1)
        if operator.state is not None:
            return self.run_stateful(variant, where, case, operands, attrs)
        with np.errstate(all="ignore"):
            wanted = [np.asarray(w) for w in operator.meaning(attrs, *operands)]
        got = self.call(variant, where, case.sizes, operands, 1)
        again = self.call(variant, where, case.sizes, operands, 3)
        return self.compare(operator, attrs, operands, got, again, wanted, length, case.what)

    def compare(self, operator, attrs, operands, got, again, wanted, length, what) -> tuple[float, float, str]:
        found = (0.0, 1.0, what)
        for i, (ours, thrice, theirs) in enumerate(zip(got, again, wanted)):
            if ours.tobytes() != thrice.tobytes():
                return np.inf, 0.0, what + ", where three threads give other bits than one"
            error, bound = tolerances.excess(operator, attrs, operands, ours, i, theirs, length)
            ratio = error / bound if bound else (np.inf if error else 0.0)
            self.worst = max(self.worst, min(ratio, 1e9))
            if ratio > found[0] / found[1]:
                found = (error, bound, what if len(wanted) == 1 else f"{what} (result {i})")
        return found

    def value(self, where: Place, index: int, made):
        symbol, kind = where.symbols[index], where.spec.operands[index]
        if symbol is not None and not isinstance(kind, StateSpec):
            return self.subject.values(symbol)
        if made is None and isinstance(kind, TensorSpec):
            raise AssertionError(f"operand {index} of {where.source} is a packed value that no symbol names")
        return made

    def call(self, variant: Variant, where: Place, sizes: Mapping[str, int], operands: Sequence, threads: int,
             state=None) -> list[np.ndarray]:
        """The kernels' results. Threads take turns in reverse order: kernels have no barrier inside."""
        spec, selection = variant.spec, self.selection(variant.spec)
        shape = lambda t: tuple(sizes[d] if isinstance(d, str) else d for d in t.shape)  # noqa: E731
        fresh = lambda t: aligned(max(1, int(np.prod(shape(t))) * _bytes(t)), np.uint8, 0xFF)  # noqa: E731
        results, scratch = [fresh(t) for t in spec.results], [fresh(t) for t in selection.scratch]
        inputs = [self.buffer(where, i, o) for i, o in enumerate(operands)]
        find = {"operand": inputs.__getitem__, "result": results.__getitem__, "scratch": scratch.__getitem__,
                "state": lambda i: state[0], "pages": lambda i: state[1]}
        symbols = [sizes[s.name] for s in self.plan.symbols]
        for kernel, use in zip(variant.kernels, selection.uses):
            arrays = [find[kind](int(i)) for kind, i in (a.split(":") for a in use.args)]
            for tid in reversed(range(threads)):
                self.library.call(kernel, arrays, symbols, tid, threads)
        return [r[: int(np.prod(shape(t))) * _bytes(t)].view(NUMPY[t.dtype]).reshape(shape(t))
                for r, t in zip(results, spec.results)]

    def buffer(self, where: Place, index: int, value):
        kind, symbol = where.spec.operands[index], where.symbols[index]
        if isinstance(kind, StateSpec) or value is None:
            return None
        if kind.format is not None:
            return np.frombuffer(self.subject.artifact.weights[symbol], np.uint8)
        return aligned(value.shape, value.dtype, value)

    # ---- stateful operators

    def run_stateful(self, variant: Variant, where: Place, case: Case, operands: list,
                     attrs: Mapping) -> tuple[float, float, str]:
        """The case as the last step of requests that have a past: one reaches over the window and over pages, the
        others begin. Pages are handed out in random order, and hold NaN where nothing was written or may be read."""
        operator, spec = row(variant.spec.op), variant.spec
        kind: StateSpec = spec.operands[operator.state]
        cache = _Cache(kind, self.most["R"], self.plan.max_context)
        names = operator.operands
        tokens, requests = case.sizes["T"], max(1, min(case.sizes["R"], case.sizes["T"]))
        past = max(case.past, (kind.window or 2 * kind.key_block) + kind.page_size + 3)
        past = min(self.plan.max_context - tokens, past)
        rng = np.random.default_rng(tokens)
        start, step = 0, max(1, self.most["T"])
        while start < past:  # the past, in steps as large as they may be
            count = min(step, past - start)
            ins = self.rows(spec, count, rng)
            ins[names.index("positions")] = np.arange(start, start + count, dtype=np.int32)
            ins[names.index("requests")] = np.zeros(count, np.int32)
            cache.hold(0, start + count)
            sizes = {**case.sizes, "T": count}
            self.call(variant, where, sizes, self.with_past(ins, cache), 1, cache.memory)
            cache.append(operator, attrs, ins)
            start += count
        cache.forget(0, past)
        share = np.sort(np.arange(tokens) % requests)  # every request has a run of tokens
        counts = np.bincount(share, minlength=requests)
        positions = np.concatenate([(past if r == 0 else 0) + np.arange(n) for r, n in enumerate(counts)])
        operands = list(operands)
        operands[names.index("positions")] = positions.astype(np.int32)
        operands[names.index("requests")] = share.astype(np.int32)
        for r, n in enumerate(counts):
            cache.hold(r, (past if r == 0 else 0) + n)
        operands[operator.state] = cache.rows
        before = copy.deepcopy(operands)
        pool = cache.memory[0].copy()
        got = self.call(variant, where, case.sizes, operands, 1, cache.memory)
        cache.memory[0][...] = pool
        again = self.call(variant, where, case.sizes, operands, 3, cache.memory)
        with np.errstate(all="ignore"):
            wanted = [np.asarray(w) for w in operator.meaning(attrs, *operands)]
        length = tolerances.reduction(operator, spec, case.sizes, past + tokens)
        return self.compare(operator, attrs, before, got, again, wanted, length, f"{case.what} after {past} tokens")

    def rows(self, spec: OpSpec, count: int, rng) -> list:
        sizes = {**self.most, "T": count}
        return [self.operand(spec, i, sizes, "normal", rng) for i in range(len(spec.operands))]

    @staticmethod
    def with_past(operands: list, cache: _Cache) -> list:
        return [cache.rows if o is None else o for o in operands]


class _Cache:
    """A page pool with its block table, and the oracle's rows beside it."""

    def __init__(self, kind: StateSpec, requests: int, context: int):
        page = kind.token_bytes() * kind.page_size
        pages = -(-context // kind.page_size) * 2 + requests + 2
        self.kind, self.rows = kind, RowState(kind)
        self.memory = (aligned((pages, page), np.uint8, 0xFF),
                       aligned((requests, kind.max_pages), np.int32, -1))
        self.free = list(np.random.default_rng(7).permutation(pages))

    def hold(self, request: int, tokens: int) -> None:
        table = self.memory[1][request]
        first = int(np.flatnonzero(table >= 0)[-1]) + 1 if (table >= 0).any() else 0
        for page in range(first, -(-tokens // self.kind.page_size)):
            table[page] = self.free.pop()

    def forget(self, request: int, length: int) -> None:
        """Gives back the pages that no later position reads, and poisons them."""
        if self.kind.window:
            for page in range(max(0, length - self.kind.window + 1) // self.kind.page_size):
                self.memory[0][self.memory[1][request, page]] = 0xFF
                self.memory[1][request, page] = -1

    def append(self, operator: OpRow, attrs, operands: list) -> None:
        operator.meaning(attrs, *(self.rows if o is None else o for o in operands))


def aligned(shape, dtype, fill) -> np.ndarray:
    """An array of ``fill`` that starts on a cache line, as buffers of a plan do."""
    size = int(np.prod(np.atleast_1d(shape))) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    array = raw[start : start + size].view(dtype).reshape(shape)
    array[...] = fill
    return array


def _bytes(kind: TensorSpec) -> int:
    return np.dtype(NUMPY[kind.dtype]).itemsize


def quantized(spec: OpSpec, operands: list) -> list:
    """``operands`` with the parts of a quantised activation made by ``quantize`` itself, where the operator takes
    one: codes, scales and sums that belong together, of the scales' own range."""
    operator = row(spec.op)
    if not (operator.operands and operator.operands[0].endswith("+") and spec.operands[0].dtype == "i8"):
        return operands
    parts = len(split_activation(spec.operands)[0])
    codes, scales = operands[0], operands[1]
    group = codes.shape[1] // scales.shape[1]
    with np.errstate(all="ignore"):
        floats = (codes.astype(np.float64) * np.repeat(scales.astype(np.float64), group, 1)).astype(np.float32)
    made = row("quantize").meaning({"group": group}, floats)
    return [*made, *operands[parts:]]
