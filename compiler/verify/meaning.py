"""Do the passes keep the meaning? The laid-out program held against the captured one, operator by operator.

The two have different operators, so values are paired by what they are: a float result of the laid-out program stands
for the captured value of the same layer, with the same elements a token, that it agrees with best. After every pair
the laid-out program goes on from the captured value, so the error of a pair is the error of what lies between it and
the pairs before it, and the bound can be a few roundings.

A result without a counterpart (of a fused form that the authors never compute) is no error by itself. When the next
pair, or the layer's output, disagrees, the first such operator on the way is named: everything before it agreed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from adaptc.backends.reference.interpreter import Reference
from adaptc.ir.build import short_name
from adaptc.ir.module import spec_of
from adaptc.ops.mixing import oracle_state
from adaptc.ops.table import row
from adaptc.protocol import TensorSpec
from adaptc.verify import tolerances
from adaptc.verify.report import Finding, Level
from adaptc.verify.subject import Subject

Heads = tuple[int, ...]
"""What is known of a laid-out value: indices of the operators since the last pairs that have no counterpart, in program
order; none = it is the captured value."""

Standing = list[tuple[tuple[int, int], np.ndarray]]
"""((laid-out operator, result), the captured rows that it stands for), for every pair and layer output."""

LOOSE = 0.25
"""Above this relative error, two values aren't taken for the same thing."""


@dataclass(frozen=True)
class Value:
    """A captured value: the module and operator that made it, and its elements [tokens, the rest]."""

    source: str
    op: str
    rows: np.ndarray


@dataclass
class Call:
    """A call of a body: its module path, all values made since the call before it, and its results' rows (None for
    one without a token dimension)."""

    source: str
    values: list[Value]
    outputs: list[np.ndarray | None] = field(default_factory=list)


def by_token(array: np.ndarray, spec: TensorSpec) -> np.ndarray | None:
    """An array as [tokens (or sampled rows), everything else in order]; None without exactly one dynamic dimension."""
    axis = _token_axis(spec)
    return None if axis is None else np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)


def _token_axis(spec: TensorSpec) -> int | None:
    axes = [i for i, d in enumerate(spec.shape) if isinstance(d, str)]
    return axes[0] if len(axes) == 1 else None


def layer_of(source: str) -> str:
    """The layer that a module belongs to: its path up to the first number; "" when there is none."""
    parts = source.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else ""


def from_rows(rows: np.ndarray, like: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """``by_token`` undone."""
    axis = _token_axis(spec)
    moved = np.moveaxis(like, axis, 0).shape
    return np.ascontiguousarray(np.moveaxis(rows.reshape(moved), 0, axis))


class Recorder(Reference):
    """The captured program, keeping every float value that has a token dimension."""

    def __init__(self, program, weights: Callable[[str], np.ndarray]):
        super().__init__(program, weights)
        self.calls: list[Call] = []
        self.tail: list[Value] = []
        self.logits: np.ndarray | None = None
        self.kept: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def layers(self) -> dict[str, np.ndarray]:
        """Layer → rows of its output, its last value, in program order."""
        values = [v for call in self.calls for v in call.values] + self.tail
        return {layer: v.rows for v in values if (layer := layer_of(v.source))}

    def score(self, tokens, **options) -> np.ndarray:
        self.logits = super().score(tokens, **options)
        return self.logits

    def operator(self, op, source, operands):
        results = super().operator(op, source, operands)
        for array, spec in zip(results, spec_of(op).results):
            rows = by_token(array, spec) if array.dtype.kind == "f" else None
            if rows is not None:
                self.kept[id(array)] = (array, rows)
                self.tail.append(Value(source, short_name(op), rows))
        return results

    def called(self, source, results):
        outputs = [self.kept[id(r)][1] if id(r) in self.kept else None for r in results]
        self.calls.append(Call(source, self.tail, outputs))
        self.tail, self.kept = [], {}
        return results


class _Paired(Reference):
    """The laid-out program, paired with the recorded values as it goes.

    What it rounds on purpose is left out, so that two programs are compared and not two precisions: caches keep
    float32, and what takes 8-bit activations takes what they were made of. (The plan's own rounding is held against
    the operators' meanings, and error by depth shows what it amounts to.)
    """

    def __init__(self, subject: Subject, recorder: Recorder, weights: Callable[[str], np.ndarray]):
        super().__init__(subject.laid_out, weights)
        self.states = {name: oracle_state(replace(state.spec, dtype="f32", scale="")) for name, state in self.states.items()}
        self.recorder = recorder
        self.names: list[tuple[str, str]] = []
        self.heads: dict[int, tuple[np.ndarray, Heads]] = {}
        self.floats: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """id of 8-bit codes → they, and what they were made of."""
        self.call = 0
        self.aligned = True
        self.pairs = 0
        self.worst = 0.0
        self.blamed: dict[int, tuple[float, str]] = {}
        self.alone: list[int] = []
        self.makers: dict[int, tuple[int, int]] = {}
        self.standing: Standing = []

    def candidates(self) -> list[Value]:
        """Values that may be meant where the program is: of this call, and of @step before the first."""
        calls = self.recorder.calls
        if not self.aligned:
            return [v for c in calls for v in c.values] + self.recorder.tail
        here = calls[self.call].values if self.call < len(calls) else self.recorder.tail
        return here + (calls[0].values if self.call else [])

    def heads_of(self, array) -> Heads:
        return self.heads[id(array)][1] if id(array) in self.heads else ()

    def know(self, array: np.ndarray, heads: Heads) -> np.ndarray:
        self.heads[id(array)] = (array, heads)
        return array

    def operator(self, op, source, operands):
        spec, operator = spec_of(op), row(short_name(op))
        if operator.quantized(spec.operands) and id(operands[0]) in self.floats:
            operands = [self.floats[id(operands[0])][1], *operands[3:]]
        results = super().operator(op, source, operands)
        heads = tuple(sorted({h for o in operands for h in self.heads_of(o)}))
        if operator.aliases or (operator.views and len(operands) == 1):
            for array in results:
                self.know(array, heads)
                if id(operands[0]) in self.makers:
                    self.makers[id(array)] = self.makers[id(operands[0])]
            if operator.aliases:
                return results
        index = len(self.names)
        self.names.append((short_name(op), source))
        if any(r.dtype in ("i8", "u8") for r in spec.results):
            self.floats[id(results[0])] = (results[0], operands[0])
            return results
        made = tuple(self.pair((index, i), array, kind, heads)
                     for i, (array, kind) in enumerate(zip(results, spec.results)))
        self.makers |= {id(array): (index, i) for i, array in enumerate(made)}
        return made

    def pair(self, place: tuple[int, int], array: np.ndarray, kind: TensorSpec, heads: Heads) -> np.ndarray:
        """The value to go on with: the captured one when there is a pair."""
        index, _ = place
        rows = by_token(array, kind) if array.dtype.kind == "f" else None
        if rows is None:  # integers, or values that depend on weights alone: who reads them is compared
            return self.know(array, heads)
        found = self.closest(rows, place)
        if found is None:
            self.alone.append(index)
            return self.know(array, heads or (index,))
        error, value = found
        self.pairs += 1
        self.standing.append((place, value.rows))
        self.judge(index, heads, error, f"{value.op} in {value.source}")
        return self.know(from_rows(value.rows, array, kind).astype(array.dtype, copy=False), ())

    def closest(self, rows: np.ndarray, place: tuple[int, int]) -> tuple[float, Value] | None:
        """The candidate that ``rows`` agree with best.

        One that differs by more than rounding must be of the same module: two values of different modules may well be
        alike. And an operator's first result, which is what its module names, isn't taken for another module's value
        when its own module has one of that shape: swapped projections are right values in the wrong place.
        """
        own = self.names[place[0]][1]
        errors = [(tolerances.relative(rows, v.rows), v) for v in self.candidates() if v.rows.shape == rows.shape]
        mine = [pair for pair in errors if pair[1].source == own]
        here = _best(mine, LOOSE)
        elsewhere = _best([pair for pair in errors if pair[1].source != own], tolerances.MEANING)
        if here is not None and (here[0] <= tolerances.MEANING or elsewhere is None):
            return here
        return None if mine and place[1] == 0 else elsewhere

    def judge(self, index: int, heads: Heads, error: float, counterpart: str) -> None:
        self.worst = max(self.worst, error)
        guilty = min((*heads, index))
        if not error <= max(tolerances.MEANING, self.blamed.get(guilty, (0.0, ""))[0]):
            self.blamed[guilty] = (error, counterpart)

    def called(self, source, results):
        """The layer's results are pairs by position, whatever became of the values within."""
        if not self.aligned:
            return results
        call = self.recorder.calls[self.call]
        self.call += 1
        made = []
        for array, rows in zip(results, call.outputs, strict=True):
            if rows is None or array.size != rows.size:
                made.append(array)
                continue
            if heads := self.heads_of(array):
                error = tolerances.relative(array.reshape(rows.shape), rows)
                self.judge(len(self.names) - 1, heads, error, f"the output of {source}")
            if id(array) in self.makers:
                self.standing.append((self.makers[id(array)], rows))
            made.append(self.know(rows.reshape(array.shape).astype(array.dtype, copy=False), ()))
        return made


def _best(pairs: list[tuple[float, Value]], most: float) -> tuple[float, Value] | None:
    return min((pair for pair in pairs if pair[0] <= most), key=lambda pair: pair[0], default=None)


SMALL = 2.0**-10
"""Two programs are compared as functions, so on any weights. With matrices scaled by this, values are so small that an
epsilon weighs, which is lost in rounding at most real ones; a power of two changes no other rounding."""


def compare_meanings(subject: Subject, recorder: Recorder, tokens: list[int], level: Level) -> Standing:
    """Adds findings to ``level``: laid-out operators that give other values than the captured program, with the
    model's weights (as ``recorder`` has run it) and with small ones. Returns which laid-out result ((operator, result
    index)) stands for which captured rows."""
    paired = _compared(_Paired(subject, recorder, subject.values), tokens, level, "")

    def small(name: str) -> np.ndarray:
        values = subject.values(name)
        return values * np.float32(SMALL) if values.ndim > 1 else values

    again = Recorder(subject.captured, small)
    again.score(tokens)
    _compared(_Paired(subject, again, small), tokens, level, ", weights scaled down")
    level.covered.append(f"{len(paired.names)} laid-out operators against the captured program on {len(tokens)} "
                         f"tokens, with the model's weights and with small ones: {paired.pairs} values have a "
                         f"counterpart, {len(paired.alone)} only through what reads them")
    level.figures["worst laid-out error against captured"] = paired.worst
    return paired.standing


def _compared(paired: _Paired, tokens: list[int], level: Level, how: str) -> _Paired:
    recorder = paired.recorder
    calls = paired.program.calls()
    paired.aligned = len(calls) == len(recorder.calls) and all(
        len(call.operation.results) == len(c.outputs) for call, c in zip(calls, recorder.calls))
    logits = paired.score(tokens)
    error = tolerances.relative(logits, recorder.logits)
    paired.judge(len(paired.names) - 1, paired.heads_of(logits), error, "the logits")
    for index, (error, counterpart) in sorted(paired.blamed.items()):
        op, source = paired.names[index]
        level.findings.append(Finding(
            f"the laid-out operator's value isn't that of the captured program ({counterpart}{how})", f"{index} {op}",
            source, error, tolerances.MEANING))
    return paired
