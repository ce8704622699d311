"""Loops over chosen experts, as modelling code writes them where it doesn't use transformers' interface for experts.

    mask = one_hot(chosen, count).permute(2, 1, 0)              # [count, k, T], or with one class more than experts
    for expert in (mask.sum((-1, -2)) > 0).nonzero():           # which experts, only a run knows
        slot, token = torch.where(mask[expert])
        y = linear(x[token], weight[expert]) …
        result.index_add_(0, token, y * weights[token, slot, None])

The body is the authors' own and runs here as it is, for all choices [T, k] at once: ``x[token]`` is every token's row,
``weight[expert]`` stands for the weights of each choice's own expert, and a linear map by it is ``adaptc::expert_linear``.
Python in the body may ask which expert it is (experts that compute nothing): the body runs once for each stretch of
experts that it treats alike, and others' choices count nothing there. Stretches are found by bisection, so an expert
that is treated unlike its neighbours, which are treated alike, wouldn't be found: the loop is run for all of them
where there are few.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from adaptc.errors import CaptureError

_OURS = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))

FEW = 64
"""Experts up to which the body is asked for each of them how it treats it."""


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


class _Choices:
    """Where one expert is chosen: as ``squeeze`` and ``torch.where`` are asked for it."""

    def squeeze(self, *_: int) -> "_Choices":
        return self

    def numel(self) -> int:
        return 1

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise CaptureError(f"a loop over experts gives the choices of one to {_name(function)}; adaptc captures rows of "
                           "tokens and weights of choices that they pick.")


class _Tokens(_Choices):
    """The tokens that chose it."""


class _Slots(_Choices):
    """Which of their choices it was."""


class _Row:
    """One row of ``nonzero``: an expert's number."""

    def __init__(self, number: int):
        self.number = number

    def __getitem__(self, index: int) -> int:
        return self.number

    def item(self) -> int:
        return self.number

    __int__ = __index__ = item


@dataclass
class _Loop:
    """A running loop: ``expert`` is the number of the present one, ``first`` to ``last`` those it stands for, and ``seen``
    what its body has done; ``trial`` when only that is wanted."""

    mask: _Mask
    expert: int = 0
    first: int = 0
    last: int = 0
    trial: bool = True
    seen: list[tuple] = field(default_factory=list)


class ExpertLoops(TorchFunctionMode):
    """Within the block, loops over chosen experts are traced as what they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[int, tuple[torch.Tensor, _Mask]] = {}
        self.stretches: dict[tuple, list[tuple[int, int]]] = {}
        self.loop: _Loop | None = None

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = _name(function)
        if self.loop is None:
            return self._outside(name, function, args, kwargs)
        found = self._inside(name, args, kwargs)
        self.loop.seen.append((name, *((tuple(a.whole.shape), a.turned) for a in args if isinstance(a, _Weights))))
        return function(*args, **kwargs) if found is NotImplemented else found

    # ---- before a loop: which tensors are masks of choices

    def _outside(self, name: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        mask = self._mask(args[0]) if args else None
        if name == "nonzero" and mask is not None and mask.experts_first and mask.reduced:
            return self._experts(mask, (_code(), mask.count))
        result = function(*args, **kwargs)
        if name == "one_hot" and args[0].ndim == 2:
            count = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
            self._note(result, _Mask(args[0], count))
        elif mask is not None and name == "permute" and _flat(args[1:]) == (2, 1, 0):
            self._note(result, _Mask(mask.chosen, mask.count, True))
        elif mask is not None and mask.experts_first and name in ("sum", "greater", "gt"):
            self._note(result, _Mask(mask.chosen, mask.count, True, True))
        return result

    def _note(self, tensor: torch.Tensor, mask: _Mask) -> None:
        self.masks[id(tensor)] = tensor, mask

    def _mask(self, tensor: Any) -> _Mask | None:
        return self.masks[id(tensor)][1] if id(tensor) in self.masks else None

    # ---- the loop

    def _experts(self, mask: _Mask, where: tuple) -> Iterator[_Row]:
        """A row for each stretch of experts that the body treats alike, after trials that find them, once for all
        loops at one place of the authors' code."""
        try:
            if where not in self.stretches:
                done: dict[int, tuple] = {}
                yield from self._tried(mask, 0, mask.count - 1, done)
                numbers = sorted(done)
                starts = [0] + [n for before, n in zip(numbers, numbers[1:]) if done[before] != done[n]]
                ends = [*(start - 1 for start in starts[1:]), mask.count - 1]
                # a body that does nothing is that of a class that stands for no expert
                self.stretches[where] = [(start, end) for start, end in zip(starts, ends) if done[start]]
            for start, end in self.stretches[where]:
                self.loop = _Loop(mask, start, start, end, trial=False)
                yield _Row(start)
        finally:
            self.loop = None

    def _tried(self, mask: _Mask, first: int, last: int, done: dict[int, tuple]) -> Iterator[_Row]:
        """Rows of experts from ``first`` to ``last``, until all neighbours that differ are among ``done``: expert → what
        the body does."""
        for expert in {first, last} - done.keys():
            self.loop = _Loop(mask, expert, expert, expert)
            yield _Row(expert)
            done[expert] = tuple(self.loop.seen)
        if last - first > 1 and (done[first] != done[last] or mask.count <= FEW):
            middle = (first + last) // 2
            yield from self._tried(mask, first, middle, done)
            yield from self._tried(mask, middle, last, done)

    def _inside(self, name: str, args: tuple, kwargs: dict) -> Any:
        """What a call in the body gives; NotImplemented for one that means what it says."""
        loop = self.loop
        if name == "__getitem__":
            return self._picked(*args)
        if name == "where" and len(args) == 1 and isinstance(args[0], _Choices):
            return _Slots(), _Tokens()
        if name in ("linear", "matmul", "__matmul__", "mm") and len(args) > 1 and isinstance(args[1], _Weights):
            return self._linear(name, *args, **kwargs)
        if name in ("index_add_", "index_add") and any(isinstance(a, _Tokens) for a in args):
            result, _, _, values = args
            if loop.trial:
                return result
            added = values.sum(1).to(result.dtype)
            return result.add_(added) if name == "index_add_" else result + added
        if name in ("view", "reshape") and args[0].ndim == 3 and _flat(args[1:]) == (-1, args[0].shape[-1]):
            return args[0]  # rows of choices, which stand in two dimensions here
        return NotImplemented

    def _picked(self, tensor: torch.Tensor, index: Any) -> Any:
        loop, indices = self.loop, index if isinstance(index, tuple) else (index,)
        if self._mask(tensor) is not None and self._is_expert(index):
            return _Choices()
        if any(isinstance(i, _Tokens) for i in indices):
            if any(isinstance(i, _Slots) for i in indices):
                chosen = tensor.masked_fill(~self._counted(), 0) if self._part() else tensor
                return chosen.unsqueeze(-1) if indices[-1] is None else chosen
            return tensor.unsqueeze(1).expand(-1, loop.mask.chosen.shape[1], -1)
        if self._is_expert(index) and not tensor.is_floating_point():
            raise CaptureError("a loop over experts picks an expert's part of whole numbers; expected weights.")
        return _Weights(tensor) if self._is_expert(index) else NotImplemented

    def _is_expert(self, index: Any) -> bool:
        return isinstance(index, (int, _Row)) and not isinstance(index, bool) and int(index) == self.loop.expert

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


def _code() -> Any:
    """The authors' code that is running: the innermost that is neither torch's nor ours."""
    frame = sys._getframe()
    while frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame.f_code


def _name(function: Callable) -> str:
    return getattr(function, "__name__", str(function))


def _flat(args: tuple) -> tuple:
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list, torch.Size)) else tuple(args)
