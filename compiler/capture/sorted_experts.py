"""Experts to whom rows are sorted, as modelling code writes them that cuts a run of rows for each expert.

    sizes = zeros.scatter(1, chosen, 1).long().sum(0).tolist()       # rows for each expert, only a run knows
    order = chosen.flatten().sort(0)[1]                               # [T·k]: choices by expert
    parts = x[order // k].split(sizes, dim=0)
    y = cat([linear(parts[i], weight[i]) for i in range(E)]) …
    result = zeros.index_add(0, order // k, y * weights.flatten()[order][:, None])

Each row goes through its expert alone, and comes back to its place: in which order rows stand meanwhile says nothing.
They stay where they are, [T, k, …] in place of [T·k, …], and a linear map of all parts, each by its own expert's slice of
one weight, is ``adaptc::expert_linear``. What rows go through on the way must treat each by itself and count dimensions from
the last one; anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from adaptc.capture.known import in_place
from adaptc.errors import CaptureError

ROWWISE = frozenset(
    "add sub mul div true_divide __add__ __radd__ __sub__ __mul__ __rmul__ __truediv__ neg exp tanh sigmoid silu gelu relu "
    "square clamp to float type_as chunk split linear matmul __matmul__ dropout contiguous clone".split())
"""Functions that do with rows [T, k, …] what they do with [T·k, …]."""

COUNTED = ("to", "long", "int", "contiguous", "cpu")
"""Functions that leave numbers as they are."""


class _Sorted:
    """What stands for what is known in a run alone. Torch's functions take it for a tensor."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise _unknown(function)


@dataclass(frozen=True, eq=False)
class _Order(_Sorted):
    """The places of choices [T, k], or with ``tokens`` their tokens, sorted by what is chosen."""

    chosen: torch.Tensor
    tokens: bool = False

    def div(self, slots: int, rounding_mode: str | None = None) -> "_Order":
        if self.tokens or slots != self.chosen.shape[1] or rounding_mode not in ("trunc", "floor"):
            raise _unknown("div")
        return _Order(self.chosen, True)

    def floor_divide(self, slots: int) -> "_Order":
        return self.div(slots, "floor")

    __floordiv__ = floor_divide


@dataclass(frozen=True, eq=False)
class _Size(_Sorted):
    """How many choose expert ``number`` of ``count``."""

    chosen: torch.Tensor
    number: int
    count: int

    def item(self) -> "_Size":
        return self


@dataclass(frozen=True, eq=False)
class _Part(_Sorted):
    """Of ``rows`` [T, k, …] those of one expert."""

    rows: torch.Tensor
    chosen: torch.Tensor
    number: int
    count: int


@dataclass(frozen=True)
class _Note:
    """What a tensor is known to be: ``zeros``; the choices ``flat``; which are made ``hits`` [T, E]; by how many ``counts``
    [E]; ``rows`` [T, k, …] in place of [T·k, …]; or the ``slice`` of number ``number`` of ``whole``."""

    kind: str
    chosen: torch.Tensor | None = None
    count: int = 0
    whole: torch.Tensor | None = None
    number: int = 0


class SortedExperts(TorchFunctionMode):
    """Within the block, rows that are sorted to experts are traced as what they become."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[int, tuple[torch.Tensor, _Note]] = {}
        self.maps: dict[tuple, tuple[tuple, torch.Tensor]] = {}

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", str(function))
        found = self._sorted(name, args, kwargs)
        if found is not NotImplemented:
            return found
        self._check(function, name, args, kwargs)
        result = function(*args, **kwargs)
        made = self._made(name, args, kwargs, result)
        if in_place(name, kwargs) and not made:
            for changed in (*args[:1], kwargs.get("out")):
                self.notes.pop(id(changed), None)
        return result

    def _note(self, tensor: Any, note: _Note) -> Any:
        self.notes[id(tensor)] = tensor, note
        return tensor

    def _of(self, tensor: Any, kind: str) -> _Note | None:
        note = self.notes[id(tensor)][1] if id(tensor) in self.notes else None
        return note if note is not None and note.kind == kind else None

    # ---- what is known of tensors that are

    def _made(self, name: str, args: tuple, kwargs: dict, result: Any) -> bool:
        """Notes what a call has made; whether there was anything to note."""
        if note := self._known(name, args, kwargs, result):
            self._note(result, note)
            return True
        chosen = next((note.chosen for x in args if (note := self._of(x, "rows"))), None)
        parts = [x for x in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(x, torch.Tensor)]
        for part in parts if chosen is not None else ():
            self._note(part, _Note("rows", chosen))
        return chosen is not None

    def _known(self, name: str, args: tuple, kwargs: dict, result: Any) -> _Note | None:
        """What a call's result is known to be, of what it is made of."""
        first = args[0] if args else None
        if name in ("zeros", "zeros_like", "new_zeros"):
            return _Note("zeros")
        if name in ("flatten", "view", "reshape") and _is_choice(first):
            return _Note("flat", first) if isinstance(result, torch.Tensor) and result.ndim == 1 else None
        if name in ("scatter", "scatter_") and self._of(first, "zeros") and len(args) == 4:
            _, dim, chosen, value = args
            one = dim in (1, -1) and _is_choice(chosen) and isinstance(value, (int, float)) and value == 1
            return _Note("hits", chosen, result.shape[1]) if one else None
        if name in COUNTED and (note := self._of(first, "hits") or self._of(first, "counts")):
            return note
        if name == "sum" and (note := self._of(first, "hits")):
            return _Note("counts", note.chosen, note.count) if (args[1:] or (kwargs.get("dim"),)) == (0,) else None
        if name == "__getitem__" and isinstance(args[1], int) and isinstance(first, torch.nn.Parameter):
            return _Note("slice", whole=first, number=args[1] % first.shape[0])
        return None

    def _check(self, function: Callable, name: str, args: tuple, kwargs: dict) -> None:
        """CaptureError for what would take the two dimensions of rows for something else."""
        rows = [x for x in (*args, *kwargs.values()) if self._of(x, "rows")]
        if not rows:
            return
        if name == "__get__" and function.__self__.__name__ in ("dtype", "device"):
            return
        others = [x.ndim for x in args if isinstance(x, torch.Tensor) and not self._of(x, "rows") and x.ndim > 1]
        matrix = others == [2] and name in ("linear", "matmul", "__matmul__")
        along = [kwargs["dim"]] if "dim" in kwargs else list(args[2:3]) or [0] if name in ("chunk", "split") else [-1]
        if name not in ROWWISE or others and not matrix or along[0] >= 0:
            raise _unknown(function)

    # ---- what only a run knows

    def _sorted(self, name: str, args: tuple, kwargs: dict) -> Any:
        """What stands for a call's result; NotImplemented for one that means what it says."""
        first = args[0] if args else None
        if name in ("sort", "argsort") and (note := self._of(first, "flat")) and not (
                kwargs.get("descending") or any(x is True for x in args[2:])):
            order = _Order(note.chosen)
            return order if name == "argsort" else (self._note(note.chosen.clone(), _Note("rows", note.chosen)), order)
        if name in ("div", "floor_divide", "__floordiv__") and isinstance(first, _Order):
            return first.div(args[1], kwargs.get("rounding_mode", "floor" if name != "div" else None))
        if name in ("unbind", "tolist") and (note := self._of(first, "counts")):
            return [_Size(note.chosen, number, note.count) for number in range(note.count)]
        if name == "__getitem__" and isinstance(args[1], _Order):
            return self._note(_rows(first, args[1]), _Note("rows", args[1].chosen))
        if name == "__getitem__" and self._of(first, "rows") and first.ndim == 2 and args[1] == (slice(None), None):
            return self._note(first.unsqueeze(-1), self._of(first, "rows"))
        if name == "unsqueeze" and self._of(first, "rows") and first.ndim == 2 and args[1:] in ((1,), (-1,)):
            return self._note(first.unsqueeze(-1), self._of(first, "rows"))
        if name == "split" and (note := self._of(first, "rows")) and isinstance(args[1], (list, tuple)) and any(
                isinstance(size, _Size) for size in args[1]):
            return self._parts(first, note, args[1], kwargs.get("dim", args[2] if len(args) > 2 else 0))
        if name == "linear" and isinstance(first, _Part):
            return self._linear(*args, **kwargs)
        if name in ("cat", "concat") and any(isinstance(part, _Part) for part in first):
            return self._joined(first, kwargs.get("dim", args[1] if len(args) > 1 else 0))
        if name in ("index_add", "index_add_") and len(args) == 4 and isinstance(args[2], _Order):
            return self._back(name, *args, **kwargs)
        return NotImplemented

    def _parts(self, rows: torch.Tensor, note: _Note, sizes: Any, dim: int) -> tuple[_Part, ...]:
        numbers = [(id(size.chosen), size.number) if isinstance(size, _Size) else None for size in sizes]
        if dim != 0 or numbers != [(id(note.chosen), number) for number in range(len(sizes))] or (
                len(sizes) != sizes[0].count):
            raise _unknown("split")
        return tuple(_Part(rows, note.chosen, size.number, size.count) for size in sizes)

    def _linear(self, part: _Part, weight: torch.Tensor, bias: Any = None) -> _Part:
        note = self._of(weight, "slice")
        if note is None or note.number != part.number or note.whole.ndim != 3 or note.whole.shape[0] != part.count or (
                bias is not None):
            raise _unknown("linear")
        made = id(part.rows), id(note.whole)
        if made not in self.maps:
            mapped = torch.ops.adaptc.expert_linear(part.rows, part.chosen, note.whole, None, False)
            self.maps[made] = (part.rows, note.whole), self._note(mapped, _Note("rows", part.chosen))
        return _Part(self.maps[made][1], part.chosen, part.number, part.count)

    def _joined(self, parts: Any, dim: int) -> torch.Tensor:
        numbers = [(id(part.rows), part.number) if isinstance(part, _Part) else None for part in parts]
        if dim != 0 or numbers != [(id(parts[0].rows), number) for number in range(parts[0].count)]:
            raise _unknown("cat")
        return parts[0].rows

    def _back(self, name: str, base: torch.Tensor, dim: int, order: _Order, values: torch.Tensor) -> torch.Tensor:
        """Rows added at their places, or at their tokens'."""
        note = self._of(values, "rows")
        if note is None or note.chosen is not order.chosen or dim != 0:
            raise _unknown(name)
        added = values.sum(1) if order.tokens else values.flatten(0, 1)
        zeros = self._of(base, "zeros")
        if name == "index_add":
            return added if zeros else base + added
        self.notes.pop(id(base), None)
        return base.add_(added)


def _is_choice(x: Any) -> bool:
    """Whether a tensor is whole numbers [T, k]."""
    return isinstance(x, torch.Tensor) and x.dtype == torch.int64 and x.ndim == 2 and isinstance(x.shape[1], int)


def _rows(x: torch.Tensor, order: _Order) -> torch.Tensor:
    """``x[order]`` where the rows are: [T, k, …]."""
    slots = order.chosen.shape[1]
    if order.tokens:
        return x.unsqueeze(1).expand(-1, slots, *(-1 for _ in x.shape[1:]))
    return x.reshape(-1, slots, *x.shape[1:])


def _unknown(function: Any) -> CaptureError:
    name = getattr(function, "__name__", str(function))
    return CaptureError(f"rows that are sorted to experts go through {name}; adaptc captures linear maps of each expert's "
                        "rows by its slice of one weight, and what treats every row by itself.")
