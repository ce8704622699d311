"""Runs of a module without data, whose operators are computed once for operands of the same shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from adaptc.capture import hooks


def run(module: torch.nn.Module, length: int) -> None:
    """``module``, whose parameters are on the meta device, on ``length`` tokens."""
    hooks.run(module, torch.zeros((1, length), dtype=torch.int64, device=next(module.parameters()).device))


class Results:
    """What operators give on the meta device. Torch computes shapes in Python, which takes most of such a run."""

    def __init__(self) -> None:
        self._seen: dict[tuple, tuple] = {}

    def __call__(self, function: Any, args: tuple, kwargs: dict) -> Any:
        """``function(*args, **kwargs)``; its results are new tensors, even where they would be views."""
        leaves, form = pytree.tree_flatten((args, kwargs))
        key = (function, form, *map(_kind, leaves))
        if None in key or function._schema.is_mutable:
            return function(*args, **kwargs)
        if key not in self._seen:
            results, form = pytree.tree_flatten(function(*args, **kwargs))
            kinds = [_kind(leaf) for leaf in results]
            if None in kinds:
                return pytree.tree_unflatten(results, form)
            self._seen[key] = kinds, form
        kinds, form = self._seen[key]
        return pytree.tree_unflatten([_made(kind) for kind in kinds], form)


def _kind(leaf: Any) -> tuple | None:
    """All that an operator's results follow from; None for what may decide by more than that."""
    if isinstance(leaf, torch.Tensor):
        plain = leaf.is_meta and type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.layout is torch.strided
        return (leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.is_conj()) if plain else None
    if isinstance(leaf, (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return type(leaf), leaf
    return None


def _made(kind: tuple) -> Any:
    if len(kind) == 2:
        return kind[1]
    shape, stride, offset, dtype, _ = kind
    made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return made if not offset else made.as_strided(shape, stride, offset)
