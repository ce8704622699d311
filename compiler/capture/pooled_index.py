"""The index of sparse attention over means of keys (Qwen4's), restated by the operators that choose single rows.

    key of each whole window of m tokens: norm of their mean, with the rope of the first
    Σ over heads of relu(q·k) → top-k windows, and the tokens after the last whole one

Restated, every token has the key that a window which ended with it would have: a convolution gives the mean, another one
the rope of m - 1 tokens before. One more head of ``adaptc.index_rows`` takes what isn't a window's last token out of the
choice. As long as there are no more whole windows than are chosen, a token reads all before it; else the chosen rows name
windows.

The authors' module gives a mask of pairs of tokens, which is laid over the causal one; restated, ``ChosenKeys`` stands for it.
Modules are recognised by their parts, and the restatement is used where it chooses what the module's forward does
(``scans``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from adaptc.capture.key_bias import COLUMNS, widened
from adaptc.errors import CaptureError

PARTS = "index_qk_proj q_layernorm k_layernorm compress_ratio token_budget block_topk index_head_dim"
"""What such indexes are made of."""

NEVER = -1e30
"""Weight of the head that takes a row out of the choice."""

RATIO, TOP_K, HEADS, WIDTH = 3, 2, 16, 8
"""Sizes of an example; with few heads, many scores are 0, and which of them are chosen is open."""


@dataclass(frozen=True)
class ChosenKeys:
    """A mask of the keys that ``rows`` i32[1,T,K] name, of those that ``mask`` lets a token see; ``others``: of all but
    those."""

    rows: torch.Tensor
    mask: Any = None
    others: bool = False

    def __invert__(self) -> "ChosenKeys":
        return replace(self, others=not self.others)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", str(function))
        if name == "masked_fill" and isinstance(args[1], ChosenKeys) and args[1].others and args[2] <= NEVER:
            return replace(args[1], mask=args[0], others=False)
        raise CaptureError(f"a mask of chosen keys is given to {name}; adaptc captures it where all other keys are masked.")

    def attend(self, of_groups: Callable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               scaling: float) -> torch.Tensor:
        """``of_groups(query, key, value, mask, rows)`` of one group of heads."""
        if self.others or self.mask is None:
            raise CaptureError("attention is given a mask of chosen keys that wasn't laid over a causal one.")
        return of_groups(query, key, value, self.mask, self.rows.unsqueeze(2))


def index(self, hidden_states, position_embeddings, attention_mask=None, cache=None):
    """hidden_states [1,T,D], tables (cos, sin) [1,T,C] → ``ChosenKeys``."""
    if cache is not None or self.index_kv_heads != 1:
        raise CaptureError("an index over means of keys is given a cache, or has several heads of keys.")
    rotate = inspect.unwrap(type(self).forward).__globals__["apply_rotary_pos_emb"]
    heads, width, window = self.index_n_heads, self.index_head_dim, self.compress_ratio
    query, raw = self.index_qk_proj(hidden_states).split([heads * width, width], -1)
    query = self.q_layernorm(query.unflatten(-1, (heads, width)))
    query = rotate(query, cos=position_embeddings[0], sin=position_embeddings[1], unsqueeze_dim=2)
    mean = torch.ops.adaptc.convolve(raw, torch.full((width, window), 1 / window, device=raw.device), None)
    cos, sin = _earlier(torch.cat(position_embeddings, -1), window - 1).chunk(2, -1)
    keys = rotate(self.k_layernorm(mean).unsqueeze(2), cos=cos, sin=sin, unsqueeze_dim=2).squeeze(2)
    at = torch.arange(hidden_states.shape[1], device=raw.device)
    whole = torch.floor((at + 1.5) / window)  # of integers: far from where rounding would matter
    inside = (at + 1 - whole * window > 0).to(keys.dtype)[None, :, None]
    out = torch.tensor([0.0] * width + [1.0] + [0.0] * (COLUMNS - 1)).expand(*query.shape[:2], 1, width + COLUMNS)
    chosen = torch.ops.adaptc.index_rows(
        torch.cat([widened(query, width + COLUMNS), out], 2), torch.cat([keys, widened(inside, COLUMNS)], -1),
        torch.tensor([1.0] * heads + [NEVER]).expand(*query.shape[:2], heads + 1), self.block_topk, 1.0)
    return ChosenKeys(_rows(chosen, at, whole.int(), window))


def _earlier(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """x[1,T,C] of so many tokens before, zeros where there are none."""
    taps = torch.tensor([1.0] + [0.0] * tokens).expand(x.shape[2], tokens + 1)
    return torch.ops.adaptc.convolve(x, taps, None)


def _rows(chosen: torch.Tensor, at: torch.Tensor, whole: torch.Tensor, window: int) -> torch.Tensor:
    """Positions i32[1,T,k·window + window - 1], ascending, then -1: of the windows whose last tokens are ``chosen``
    i32[1,T,k], and after ``whole`` [T] windows; all up to the token's own ``at`` [T] while no more windows are whole."""
    top_k, at = chosen.shape[2], at.int()[None, :, None]
    whole = whole[None, :, None]
    windows = (chosen.unsqueeze(-1) + torch.arange(1 - window, 1, dtype=torch.int32, device=chosen.device)).flatten(2)
    numbers = torch.arange(top_k * window + window - 1, dtype=torch.int32, device=chosen.device)
    rest = whole * window + numbers[: window - 1]
    rows = torch.where(whole <= top_k, numbers, torch.cat([windows, rest], -1))
    return torch.where(rows <= at, rows, -1)


# ---- an example


def example(module: Any, tokens: int) -> tuple[tuple, dict[str, Any]]:
    """A module of the same class with small parts, and what its forward is given."""
    kind = type(module)
    one = kind.__new__(kind)
    torch.nn.Module.__init__(one)
    one.index_n_heads, one.index_kv_heads, one.index_head_dim, one.compress_ratio = HEADS, 1, WIDTH, RATIO
    one.token_budget, one.block_topk, one.layer_idx = TOP_K * RATIO, TOP_K, 0
    weight = torch.randn((HEADS + 1) * WIDTH, 16)
    object.__setattr__(one, "index_qk_proj", lambda x: F.linear(x, weight))
    for name in ("q_layernorm", "k_layernorm"):
        object.__setattr__(one, name, lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))
    angles = torch.arange(tokens)[:, None] * torch.tensor([1.0, 0.3]).repeat(2)
    seen = torch.ones(tokens, tokens).tril().bool()[None, None]
    return (one, torch.randn(1, tokens, 16), (angles.cos()[None], angles.sin()[None]), seen, None), {}


def compared(args: tuple, result: Any) -> torch.Tensor:
    """Whose keys each token chooses [1,1,T,T]."""
    if isinstance(result, ChosenKeys):
        result = (result.rows[..., None] == torch.arange(args[1].shape[1])).any(-2).unsqueeze(1)
    return result.float()
