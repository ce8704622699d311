"""Loops over chosen experts, as modelling code writes them where it doesn't use transformers' interface for experts.

    mask = one_hot(chosen, count).permute(2, 1, 0)              # [count, k, T], or with one class more than experts
    for expert in (mask.sum((-1, -2)) > 0).nonzero():           # which experts, only a run knows
        slot, token = torch.where(mask[expert])
        y = linear(x[token], weight[expert]) …
        result.index_add_(0, token, y * weights[token, slot, None])

The body is the authors' own and runs here as it is, for all choices [T, k] at once: ``x[token]`` is every token's row,
``weight[expert]`` stands for the weights of each choice's own expert, and a linear map by it is ``adaptc::expert_linear``.
Python in the body may ask which expert it is (experts that compute nothing, or are modules of their own): the body runs
once for each stretch of experts that it treats alike, and others' choices count nothing there. Two experts are treated
alike if the body calls the same functions with the same numbers and tensors, the expert's own weights apart. Where all
that it asks are comparisons, they say where stretches may end. Where it takes the number itself, all experts are tried,
or, where there are many, those that bisection asks for: one that is treated unlike its neighbours, which are treated
alike, wouldn't be found then.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from adaptc.errors import CaptureError

_OURS = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))

FEW = 256
"""Experts up to which a body that takes their numbers is asked for each of them how it treats it."""


@dataclass(frozen=True)
class _Mask:
    """``mask``: elements [count, k, T] that say which expert is chosen where; by ``chosen`` [T, k]."""

    chosen: torch.Tensor
    count: int
    experts_first: bool = False
    reduced: bool = False


@dataclass(frozen=True)
class _Weights:
    """Each choice's own slice of ``whole`` [E, …], the last two dimensions exchanged if ``turned``."""

    whole: torch.Tensor
    turned: bool = False

    @property
    def T(self) -> "_Weights":
        return _Weights(self.whole, not self.turned)

    def transpose(self, i: int, j: int) -> "_Weights":
        if {i % 2, j % 2} != {0, 1}:
            raise CaptureError(f"a loop over experts exchanges the dimensions {i} and {j} of an expert's weights; "
                               "expected the last two.")
        return self.T

    t = property(lambda self: lambda: self.T)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise CaptureError(f"a loop over experts gives an expert's weights to {_name(function)}; adaptc captures linear "
                           "maps by them.")


class _Some:
    """How many tokens chose an expert: only a run knows more than that there are some."""

    def _whether(self, other: Any, answer: bool) -> bool:
        if type(other) is not int or other != 0:
            raise CaptureError("a loop over experts compares how many tokens chose one with another number than 0.")
        return answer

    def __eq__(self, other: object) -> bool:
        return self._whether(other, False)

    def __gt__(self, other: Any) -> bool:
        return self._whether(other, True)

    def __le__(self, other: Any) -> bool:
        return self._whether(other, False)

    def __bool__(self) -> bool:
        return True

    def _number(self, *_: Any) -> Any:
        raise CaptureError("a loop over experts computes with how many tokens chose one, so that a token's result depends on "
                           "other tokens.")

    __hash__ = __index__ = __int__ = __float__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _number
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __pow__ = __rpow__ = __mod__ = __neg__ = _number


class _Choices:
    """Where one expert is chosen: as ``squeeze`` and ``torch.where`` are asked for it."""

    def squeeze(self, *_: int) -> "_Choices":
        return self

    def numel(self) -> _Some:
        return _Some()

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise CaptureError(f"a loop over experts gives the choices of one to {_name(function)}; adaptc captures rows of "
                           "tokens and weights of choices that they pick.")


class _Tokens(_Choices):
    """The tokens that chose it."""


class _Slots(_Choices):
    """Which of their choices it was."""


class _Row:
    """One row of ``nonzero``, and the expert's number in it. What it is compared with is noted, and whether the number
    itself is taken."""

    def __init__(self, number: int):
        self.number, self.bounds, self.taken = number, set(), False

    def __getitem__(self, index: int) -> "_Row":
        return self

    def item(self) -> "_Row":
        return self

    def _compared(self, other: Any, *steps: int) -> int:
        """The other number; experts from it on, or the next, may be treated otherwise."""
        other = int(other)
        self.bounds |= {other + step for step in steps}
        return other

    def __eq__(self, other: object) -> bool:
        return self.number == self._compared(other, 0, 1)

    def __lt__(self, other: Any) -> bool:
        return self.number < self._compared(other, 0)

    def __ge__(self, other: Any) -> bool:
        return self.number >= self._compared(other, 0)

    def __gt__(self, other: Any) -> bool:
        return self.number > self._compared(other, 1)

    def __le__(self, other: Any) -> bool:
        return self.number <= self._compared(other, 1)

    def __bool__(self) -> bool:
        return self != 0

    def __index__(self) -> int:
        self.taken = True
        return self.number

    __int__ = __index__

    def __hash__(self) -> int:
        return hash(int(self))

    def __float__(self) -> float:
        return float(int(self))

    def __str__(self) -> str:
        return str(int(self))


def _computed(name: str, swapped: bool) -> Callable:
    function = getattr(operator, name)
    return (lambda row, other: function(other, int(row))) if swapped else (lambda row, *other: function(int(row), *other))


for _operator in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(_Row, f"__{_operator}__", _computed(_operator, False))
    setattr(_Row, f"__r{_operator}__", _computed(_operator, True))
_Row.__neg__ = _computed("neg", False)


@dataclass
class _Loop:
    """A running loop: ``row`` has the number of the present expert, ``first`` to ``last`` are those it stands for.

    seen      what the body has done: functions, with their operands by what they are to it
    trial     when only that is wanted; own: whether a plain number of this expert's may be its place among the weights
    read, written   tensors (by id) whose rows the body has read, and those that it has added results to
    """

    mask: _Mask
    row: _Row
    first: int
    last: int
    own: bool
    trial: bool = True
    seen: list[tuple] = field(default_factory=list)
    made: dict[int, tuple] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)
    read: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)

    def note(self, name: str, args: tuple, kwargs: dict, result: Any) -> None:
        operands = tuple(self._operand(name, leaf) for leaf in pytree.tree_leaves((args, kwargs)))
        for number, leaf in enumerate(pytree.tree_leaves(result)):
            self.made.setdefault(id(leaf), ("made", len(self.seen), number))
            self.alive.append(leaf)  # or another would get its id
        self.seen.append((name, operands))

    def _operand(self, name: str, leaf: Any) -> Any:
        if id(leaf) in self.made:
            return self.made[id(leaf)]
        if isinstance(leaf, _Row) or name == "__getitem__" and self.is_expert(leaf):
            return ("expert",)
        if isinstance(leaf, torch.Tensor):
            self.alive.append(leaf)
            return ("other", id(leaf))
        return type(leaf), repr(leaf)

    def is_expert(self, index: Any) -> bool:
        """Whether an index is the present expert's number."""
        taken = self.own or self.row.taken
        return isinstance(index, _Row) or taken and type(index) is int and index == self.row.number


class ExpertLoops(TorchFunctionMode):
    """Within the block, loops over chosen experts are traced as what they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[int, tuple[torch.Tensor, _Mask]] = {}
        self.stretches: dict[tuple, tuple[bool, list[tuple[int, int]]]] = {}
        self.loop: _Loop | None = None

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, loop = kwargs or {}, self.loop
        name = _name(function)
        if loop is None:
            return self._outside(name, function, args, kwargs)
        result = self._inside(name, args, kwargs)
        if result is NotImplemented:
            if name != "__get__":  # a tensor's dtype or device says nothing of its elements
                loop.read.update(id(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            result = function(*args, **kwargs)
        if loop.trial:
            loop.note(name, args, kwargs, result)
        if loop.read & loop.written:
            raise CaptureError("a loop over experts reads what it adds experts' results to, so that their order matters.")
        return result

    # ---- before a loop: which tensors are masks of choices

    def _outside(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        mask = self._mask(args[0]) if args else None
        if name == "nonzero" and mask is not None and mask.experts_first and mask.reduced:
            return self._experts(mask, _place(mask.count))
        result = function(*args, **kwargs)
        if name == "one_hot" and args[0].ndim == 2:
            count = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
            self._note(result, _Mask(args[0], count))
        elif mask is not None and name == "permute" and _flat(args[1:]) == (2, 1, 0):
            self._note(result, _Mask(mask.chosen, mask.count, True))
        elif mask is not None and mask.experts_first and (_counts(mask, name, args, kwargs) or _any(mask, name, args, kwargs)):
            self._note(result, _Mask(mask.chosen, mask.count, True, True))
        return result

    def _note(self, tensor: torch.Tensor, mask: _Mask) -> None:
        self.masks[id(tensor)] = tensor, mask

    def _mask(self, tensor: Any) -> _Mask | None:
        return self.masks[id(tensor)][1] if id(tensor) in self.masks else None

    # ---- the loop

    def _experts(self, mask: _Mask, where: tuple) -> Iterator[_Row]:
        """A row for each stretch of experts that the body treats alike, after trials that find them, once for all
        loops at one place of the authors' code in one module."""
        try:
            if where not in self.stretches:
                done: dict[int, tuple] = {}
                taken = yield from self._compared(mask, done)
                if taken:
                    done.clear()
                    yield from self._tried(mask, 0, mask.count - 1, done)
                numbers = sorted(done)
                starts = [0] + [n for before, n in zip(numbers, numbers[1:]) if done[before] != done[n]]
                ends = [*(start - 1 for start in starts[1:]), mask.count - 1]
                # a body that does nothing is that of a class that stands for no expert
                self.stretches[where] = taken, [(start, end) for start, end in zip(starts, ends) if done[start]]
            taken, stretches = self.stretches[where]
            for start, end in stretches:
                self.loop = _Loop(mask, _Row(start), start, end, taken, trial=False)
                yield self.loop.row
        finally:
            self.loop = None

    def _trial(self, mask: _Mask, expert: int, own: bool, done: dict[int, tuple]) -> Iterator[_Row]:
        """A row for one expert; ``done``: expert → what the body does."""
        self.loop = _Loop(mask, _Row(expert), expert, expert, own)
        yield self.loop.row
        done[expert] = tuple(self.loop.seen)

    def _compared(self, mask: _Mask, done: dict[int, tuple]) -> Iterator[_Row]:
        """Rows of the experts between whose numbers the body's comparisons don't tell; whether it takes a number."""
        bounds = {0}
        while waiting := sorted(bounds - done.keys()):
            yield from self._trial(mask, waiting[0], False, done)
            bounds |= {bound for bound in self.loop.row.bounds if 0 <= bound < mask.count}
            if self.loop.row.taken:
                return True
        return False

    def _tried(self, mask: _Mask, first: int, last: int, done: dict[int, tuple]) -> Iterator[_Row]:
        """Rows of experts from ``first`` to ``last``, until all neighbours that differ are among ``done``."""
        for expert in sorted({first, last} - done.keys()):
            yield from self._trial(mask, expert, True, done)
        if last - first > 1 and (done[first] != done[last] or mask.count <= FEW):
            middle = (first + last) // 2
            yield from self._tried(mask, first, middle, done)
            yield from self._tried(mask, middle, last, done)

    def _inside(self, name: str, args: tuple, kwargs: dict) -> Any:
        """What a call in the body gives; NotImplemented for one that means what it says."""
        if name == "__getitem__":
            return self._picked(*args)
        if name == "where" and len(args) == 1 and isinstance(args[0], _Choices):
            return _Slots(), _Tokens()
        if name in ("linear", "matmul", "__matmul__", "mm") and len(args) > 1 and isinstance(args[1], _Weights):
            return self._linear(name, *args, **kwargs)
        if name in ("index_add_", "index_add") and any(isinstance(a, _Tokens) for a in args):
            return self._added(name, *args, **kwargs)
        if name in ("view", "reshape") and args[0].ndim == 3 and _flat(args[1:]) == (-1, args[0].shape[-1]):
            return args[0]  # rows of choices, which stand in two dimensions here
        return NotImplemented

    def _added(self, name: str, result: torch.Tensor, dim: int, tokens: _Tokens, values: torch.Tensor,
               alpha: float = 1) -> torch.Tensor:
        if dim != 0 or alpha != 1 or values.ndim != 3:
            raise CaptureError(f"a loop over experts adds {alpha} times values {tuple(values.shape)} along dimension {dim}; "
                               "expected once, rows of choices, along dimension 0.")
        self.loop.written.add(id(result))
        if self.loop.trial:
            return result
        added = (values.masked_fill(~self._counted().unsqueeze(-1), 0) if self._part() else values).sum(1).to(result.dtype)
        return result.add_(added) if name == "index_add_" else result + added

    def _picked(self, tensor: torch.Tensor, index: Any) -> Any:
        loop, indices = self.loop, index if isinstance(index, tuple) else (index,)
        if self._mask(tensor) is not None and loop.is_expert(index):
            return _Choices()
        if any(isinstance(i, _Tokens) for i in indices):
            loop.read.add(id(tensor))
            if any(isinstance(i, _Slots) for i in indices):
                return tensor.unsqueeze(-1) if indices[-1] is None else tensor
            return tensor.unsqueeze(1).expand(-1, loop.mask.chosen.shape[1], -1)
        if loop.is_expert(index) and not tensor.is_floating_point():
            raise CaptureError("a loop over experts picks an expert's part of whole numbers; expected weights.")
        return _Weights(tensor) if loop.is_expert(index) else NotImplemented

    def _part(self) -> bool:
        """Whether other experts than those of the present stretch may be chosen."""
        return (self.loop.first, self.loop.last) != (0, self.loop.mask.count - 1)

    def _counted(self) -> torch.Tensor:
        return (self.loop.mask.chosen >= self.loop.first) & (self.loop.mask.chosen <= self.loop.last)

    def _linear(self, name: str, x: torch.Tensor, weights: _Weights, bias: Any = None) -> torch.Tensor:
        chosen = self.loop.mask.chosen
        if self._part():
            chosen = chosen.clamp(self.loop.first, self.loop.last)
        transposed = weights.turned == (name == "linear")
        bias = bias.whole if isinstance(bias, _Weights) else bias
        return torch.ops.adaptc.expert_linear(x, chosen, weights.whole, bias, transposed)


def _place(count: int) -> tuple:
    """What a loop is known by: the authors' code that is running, the innermost that is neither torch's nor ours, whose
    it is, and the number of classes."""
    frame = sys._getframe()
    while frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame.f_code, id(frame.f_locals.get("self")), count


def _counts(mask: _Mask, name: str, args: tuple, kwargs: dict) -> bool:
    """Whether a call sums a mask over all choices of each expert."""
    dims = kwargs.get("dim", _flat(args[1:]))
    dims = dims if isinstance(dims, (tuple, list)) else (dims,)
    return name == "sum" and not mask.reduced and {d % 3 for d in dims} == {1, 2}


def _any(mask: _Mask, name: str, args: tuple, kwargs: dict) -> bool:
    """Whether a call asks which experts are chosen at all."""
    return name in ("greater", "gt") and mask.reduced and kwargs.get("other", args[-1]) == 0


def _name(function: Callable) -> str:
    return getattr(function, "__name__", str(function))


def _flat(args: tuple) -> tuple:
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list, torch.Size)) else tuple(args)
