"""Values that follow from the code and the configuration alone, computed beside the trace that they are made in.

A trace has no values, and Python that asks for one stops it: ``x[mask]``, where the mask says which of a model's languages
is spoken, say. A tensor that is made of numbers, without the step's tokens or weights, has one all the same. What masks of
known values pick is picked, and written, as what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

MOST = 1 << 12
"""Elements of the largest tensor whose values are computed."""

MADE = ("ones", "zeros", "full", "arange")
"""Functions that make a tensor of numbers."""

CHANCE = ("rand", "bernoulli", "multinomial", "normal", "dropout", "exponential", "empty")
"""Parts of the names of functions that don't give the same twice."""

AUGMENTED = frozenset(f"__i{name}__" for name in "add sub mul div truediv floordiv mod pow matmul and or xor".split())

ASKED = ("item", "tolist", "__bool__", "__int__", "__index__")
"""Functions that give Python a tensor's values."""


def in_place(name: str, kwargs: dict) -> bool:
    """Whether a function of this name changes its first operand, or one that it is told to."""
    changes = name in AUGMENTED or name == "__setitem__" or name.endswith("_") and not name.endswith("__")
    return changes or kwargs.get("out") is not None


class KnownValues(TorchFunctionMode):
    """Within the block, tensors that are made of numbers alone have values."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name in ("__getitem__", "__setitem__") and (mask := self._mask(*args[:2])) is not None:
            return _picked(args[0], mask) if name == "__getitem__" else _written(args[0], mask, args[2])
        if name in ASKED and (value := self._value(args[0])) is not None:
            with _outside():
                return function(value)
        result = function(*args, **kwargs)
        if in_place(name, kwargs):
            if any(self._value(x) is not None for x in (args[0], kwargs.get("out"))):
                self.known.clear()  # what it changes may be seen through other tensors
        else:
            self._note(function, name, args, kwargs, result)
        return result

    def _value(self, x: Any) -> torch.Tensor | None:
        return self.known[id(x)][1] if id(x) in self.known else None

    def _mask(self, x: Any, index: Any) -> bool | None:
        """What all elements of a mask of the first dimensions are, where they are known and the same."""
        mask = self._value(index)
        if mask is None or mask.dtype != torch.bool or not mask.numel() or mask.ndim > 1 or self._value(x) is not None:
            return None
        with _outside():
            found = set(mask.flatten().tolist())
        return found.pop() if len(found) == 1 else None

    def _note(self, function: Callable, name: str, args: tuple, kwargs: dict, result: Any) -> None:
        """Notes the values of ``result``, if it follows from known ones."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        given, made = ([x for x in some if isinstance(x, torch.Tensor)] for some in (leaves, pytree.tree_leaves(result)))
        if not given and name not in MADE or any(id(x) not in self.known for x in given):
            return
        if any(part in name for part in CHANCE):
            return
        sizes = [d for x in made for d in x.shape]
        if any(isinstance(d, torch.SymInt) for d in (*sizes, *leaves)) or sum(x.numel() for x in made) > MOST:
            return
        cpu = torch.device("cpu")
        plain = [self._value(x) if isinstance(x, torch.Tensor) else cpu if isinstance(x, torch.device) else x
                 for x in leaves]
        args, kwargs = pytree.tree_unflatten(plain, tree)
        try:
            with _outside():
                values = pytree.tree_leaves(function(*args, **kwargs))
        except Exception:  # whatever a function raises that has no values of these
            return
        values = [value for value in values if isinstance(value, torch.Tensor)]
        if [x.shape for x in made] == [value.shape for value in values]:
            self.known |= {id(x): (x, value) for x, value in zip(made, values)}


@contextmanager
def _outside() -> Iterator[None]:
    """Without the trace, in which tensors have no values."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _picked(x: torch.Tensor, all_of_it: bool) -> torch.Tensor:
    return x.clone() if all_of_it else x.narrow(0, 0, 0)


def _written(x: torch.Tensor, all_of_it: bool, value: Any) -> None:
    if all_of_it:
        x.copy_(value) if isinstance(value, torch.Tensor) else x.fill_(value)
