"""The index of blockwise sparse attention (MiniMax-M3), restated as the operator that chooses the blocks' rows.

    scores = q·kᵀ → the largest of each block of keys → top-k blocks, those nearest to the token always among them

The authors' code gives numbers of blocks to attention, [1,H,T,k]; restated, ``adaptc.index_blocks`` gives it the rows of
those blocks, [1,T,H,k · block], which it reads alone. Modules are recognised by their parts, and the restatement is
used where it chooses what the module's forward does (``scans``).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn import functional as F

from adaptc.errors import CaptureError

PARTS = "q_proj k_proj q_norm k_norm block_size topk_blocks local_blocks num_heads head_dim"
"""What such indexes are made of."""

BLOCK, TOP_K, LOCAL, HEADS, WIDTH = 3, 3, 1, 2, 8
"""Sizes of an example."""


def index(self, hidden_states, position_embeddings, cache=None, position_ids=None, **_):
    """hidden_states [1,T,D], tables (cos, sin) [1,T,C] → rows i32[1,T,H,k · block]."""
    if cache is not None:
        raise CaptureError("an index of blocks is given a cache; adaptc captures it from the start of a sequence, without.")
    rotate = inspect.unwrap(type(self).forward).__globals__["apply_rotary_pos_emb"]
    cos, sin = (table[..., : self.head_dim] for table in position_embeddings)
    query = self.q_norm(self.q_proj(hidden_states).unflatten(-1, (self.num_heads, self.head_dim))).transpose(1, 2)
    key = self.k_norm(self.k_proj(hidden_states).unsqueeze(2)).transpose(1, 2)
    query, key = rotate(query, key, cos, sin)
    return torch.ops.adaptc.index_blocks(query.transpose(1, 2), key.squeeze(1), self.topk_blocks, self.block_size,
                                         self.local_blocks)


def example(module: Any, tokens: int) -> tuple[tuple, dict[str, Any]]:
    """A module of the same class with small parts, and what its forward is given."""
    kind = type(module)
    one = kind.__new__(kind)
    torch.nn.Module.__init__(one)
    one.block_size, one.topk_blocks, one.local_blocks, one.num_heads, one.head_dim = BLOCK, TOP_K, LOCAL, HEADS, WIDTH

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    for name, rows in (("q_proj", HEADS * WIDTH), ("k_proj", WIDTH)):
        weight = torch.randn(rows, 16)
        object.__setattr__(one, name, lambda x, weight=weight: F.linear(x, weight))
    for name in ("q_norm", "k_norm"):
        object.__setattr__(one, name, norm)
    angles = torch.arange(tokens)[:, None] * torch.tensor([1.0, 0.3]).repeat(2)
    return (one, torch.randn(1, tokens, 16), (angles.cos()[None], angles.sin()[None]), None, torch.arange(tokens)[None]), {}


def compared(args: tuple, result: torch.Tensor) -> torch.Tensor:
    """[H,T,T]: whose rows each token's heads choose, by blocks (i64) or by themselves (i32)."""
    rows, at = result[0], torch.arange(args[1].shape[1])
    if result.dtype == torch.int64:
        rows = torch.where(rows[..., None] < 0, -1, rows[..., None] * BLOCK + torch.arange(BLOCK)).flatten(-2)
    else:
        rows = rows.transpose(0, 1)
    return ((rows[..., None] == at).any(-2) & (at <= at[:, None])).float()
