"""Attention whose scores rise by a number of each key, and that reads the keys with the largest ones (Doge's dynamic mask).

    mask = number of each key, each key head its own [1,H,T] → future masked → the k largest stay, the others are masked

As long as there are no more than k tokens, all of them are the largest. Restated, the authors' method that makes the mask
gives a ``KeyBias`` in its place, which takes attention apart: the numbers are one more column of keys, by which queries have
1/scaling, and the k largest are chosen by ``adaptc.index_blocks`` as products with queries that pick a head's number out of
one row for all heads. Attention then is one for each key head, which reads its own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from adaptc.errors import CaptureError

COLUMNS = 8
"""Widths that are added are multiples of it, as kernels of backends want them."""

KEPT = 6
"""How many keys an example keeps."""


@dataclass(frozen=True)
class KeyBias:
    """The mask, of ``numbers`` [1,H,T] and a ``mask`` that says which keys a token sees; ``shape``: its own, in which key
    heads may be repeated for the query heads that share them."""

    numbers: torch.Tensor
    mask: torch.Tensor
    kept: int
    shape: tuple

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, index: Any) -> "KeyBias":
        whole = slice(None)
        if self.ndim != 4 or index not in ((whole, whole, None), (whole, whole, None, whole, whole)):
            raise _unknown(f"indexed by {index}")
        return replace(self, shape=(*self.shape[:2], 1, *self.shape[2:]))

    def expand(self, *shape: Any) -> "KeyBias":
        if self.ndim != 5 or len(shape) != 5:
            raise _unknown("expanded")
        return replace(self, shape=(*self.shape[:2], shape[2], *self.shape[3:]))

    def reshape(self, *shape: Any) -> "KeyBias":
        merged = (self.shape[0], self.shape[1] * self.shape[2], *self.shape[3:]) if self.ndim == 5 else None
        if merged is None or len(shape) != 4 or shape[1] != merged[1]:
            raise _unknown("reshaped")
        return replace(self, shape=merged)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise _unknown(f"given to {getattr(function, '__name__', function)}")

    def attend(self, of_groups: Callable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               scaling: float) -> torch.Tensor:
        """``of_groups(query, key, value, mask, rows)`` of what stands for the bias and the choice."""
        heads, numbers = self.numbers.shape[1], self.numbers
        if key.shape[1] != heads or self.ndim != 4 or self.shape[1] not in (heads, query.shape[1]):
            raise _unknown(f"given for {query.shape[1]} heads of queries and {key.shape[1]} of keys")
        width = -(-heads // COLUMNS) * COLUMNS
        picks = torch.tensor([[float(column == head) for column in range(width)] for head in range(heads)])
        tokens = numbers.shape[2]
        rows = torch.ops.adaptc.index_blocks(picks.expand(1, tokens, heads, width), widened(numbers.transpose(1, 2), width),
                                             self.kept, 1, 0)
        factor = torch.full_like(query[..., :1], 1 / scaling)
        query = torch.cat([query, widened(factor, COLUMNS)], -1)
        key = torch.cat([key, widened(numbers.unsqueeze(-1), COLUMNS)], -1)
        return of_groups(query, key, value, self.mask, rows)


def widened(x: torch.Tensor, width: int) -> torch.Tensor:
    """x with columns of zeros behind its own, ``width`` in all."""
    more = width - x.shape[-1]
    return torch.cat([x, torch.zeros_like(x[..., :1]).expand(*x.shape[:-1], more)], -1) if more else x


def _unknown(what: str) -> CaptureError:
    return CaptureError(f"a mask that keeps the largest numbers of keys is {what}; adaptc captures it for attention alone, "
                        "with key heads repeated for the query heads that share them.")


def dynamic_mask(self, hidden_states, dt_states, keep_window_size=2048, attention_mask=None):
    """numbers [1,H,T], the mask of who sees whom [1,1,T,T] → ``KeyBias``."""
    if attention_mask is None:
        raise CaptureError("a mask that keeps the largest numbers of keys is made without one of the keys that tokens see.")
    tokens = dt_states.shape[2]
    return KeyBias(dt_states, attention_mask, keep_window_size, (*dt_states.shape[:2], tokens, tokens))


def example(module: Any, tokens: int) -> tuple[tuple, dict[str, Any]]:
    least = torch.finfo(torch.float32).min
    seen = torch.zeros(tokens, tokens).masked_fill(~torch.ones(tokens, tokens).tril().bool(), least)
    return (module, torch.zeros(1, tokens, 4), torch.randn(1, 2, tokens), KEPT, seen[None, None]), {}


def compared(args: tuple, result: Any) -> torch.Tensor:
    """The numbers of keys that are kept, [1,H,T,T], 0 for others; the authors' least number masks."""
    if not isinstance(result, KeyBias):
        return result.masked_fill(result == torch.finfo(result.dtype).min, 0)
    numbers = result.numbers[:, :, None].expand(result.shape).masked_fill(result.mask != 0, float("-inf"))
    kept = numbers.topk(min(result.kept, result.shape[3]), -1)
    return torch.zeros_like(numbers).scatter(-1, kept.indices, kept.values.masked_fill(kept.values == float("-inf"), 0))
