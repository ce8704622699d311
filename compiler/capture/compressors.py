"""Compressors of windows of tokens (DeepSeek-V4's compressed attention), restated so that every token has a result.

    windows of m tokens: Σ softmax(gate + bias) · value over each → norm → rope at the window's first position

The authors' code makes an entry of every whole window, T // m of them. Restated, ``adaptc.pool`` gives every token what a
window that ended with it would give; the rows of windows' last tokens are the entries, and the rest is nobody's. A mask
or a choice of entries is one of the tokens that stand for them. Which entries a token sees is ``adaptc.entries``'s to say.

Modules are recognised by their parts (``PARTS``), a compressor's index by its scorer, and the restatement is used where it
gives what the module's forward gives (``scans``).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from adaptc.errors import CaptureError

PARTS = "kv_proj gate_proj position_bias kv_norm rotary_emb compress_rate rope_layer_type head_dim"
"""What compressors are made of."""

RATE, SERIES, WIDTH, HEADS, TURNED, TOP_K = 4, 2, 8, 16, 4, 3
"""Sizes of an example; with few heads, many scores are 0, and which of them are chosen is open."""


def compressor(self, hidden_states, q_residual, position_ids, cache=None, layer_idx=None, **_):
    """hidden_states [1,T,D], position_ids [1,T] → entries [1,1,T,C] and the mask [1,1,T,T] of those that a token sees; of
    an index, the rows [1,T,k] of the entries that each token chooses, ascending, then -1."""
    if cache is not None:
        raise CaptureError("a compressor is given a cache; adaptc captures it from the start of a sequence, without.")
    entries = _entries(self, hidden_states, position_ids)
    if hasattr(self, "scorer"):
        return _chosen(self, entries, hidden_states, q_residual, position_ids)
    chosen = None
    if hasattr(self, "indexer"):
        chosen = self.indexer(hidden_states, q_residual, position_ids, cache, layer_idx)
    return entries.unsqueeze(1), torch.ops.adaptc.entries(entries, chosen, self.compress_rate)


def _entries(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """[1,T,C]: what a window that ended with each token would be pooled to."""
    apart = (-1, self.head_dim)
    value, gate = (project(hidden_states).unflatten(-1, apart) for project in (self.kv_proj, self.gate_proj))
    bias = self.position_bias.unflatten(-1, apart)
    pooled = self.kv_norm(torch.ops.adaptc.pool(value, gate, bias, self.compress_rate))
    return _rotated(self, pooled, position_ids - (self.compress_rate - 1))


def _rotated(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """x[1,T,C] or [1,T,H,C] with the rope of ``position_ids``."""
    turn = inspect.unwrap(type(self).forward).__globals__.get("apply_rotary_pos_emb")
    if turn is None:
        raise CaptureError(f"the file of {type(self).__name__}'s forward has no apply_rotary_pos_emb.")
    cos, sin = self.rotary_emb(x, position_ids=position_ids, layer_type=self.rope_layer_type)
    heads = x if x.ndim == 4 else x.unsqueeze(2)
    turned = turn(heads.transpose(1, 2), cos, sin).transpose(1, 2)
    return turned if x.ndim == 4 else turned.squeeze(2)


def _chosen(self, keys: torch.Tensor, hidden_states: torch.Tensor, q_residual: torch.Tensor,
            position_ids: torch.Tensor) -> torch.Tensor:
    query = _rotated(self, self.q_b_proj(q_residual).unflatten(-1, (-1, self.head_dim)), position_ids)
    weights = self.scorer.weights_proj(hidden_states) * self.scorer.weights_scaling
    return torch.ops.adaptc.index_rows(query, keys, weights, self.index_topk, self.scorer.softmax_scale, self.compress_rate)


# ---- an example


def example(module: Any, tokens: int) -> tuple[tuple, dict[str, Any]]:
    """A module of the same class with small parts, and what its forward is given."""
    kind, index = type(module), hasattr(module, "scorer")
    one = kind.__new__(kind)
    torch.nn.Module.__init__(one)
    one.compress_rate, one.head_dim, one.num_heads, one.index_topk = RATE, WIDTH, HEADS, TOP_K
    series = SERIES if index or hasattr(module, "indexer") else 1
    frequencies = torch.tensor([1.0, 0.3])[: TURNED // 2]

    def rotary(x, position_ids, layer_type=None):
        angles = position_ids[..., None].float() * frequencies
        return angles.cos(), angles.sin()

    def projection(rows: int, columns: int = 16):
        weight = torch.randn(rows, columns)
        return lambda x: torch.nn.functional.linear(x, weight)

    parts = {"kv_proj": projection(series * WIDTH), "gate_proj": projection(series * WIDTH), "rotary_emb": rotary,
             "kv_norm": lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6),
             "q_b_proj": projection(HEADS * WIDTH, 12)}
    if index:
        one.scorer = _scorer(type(module.scorer), projection(HEADS))
    elif hasattr(module, "indexer"):
        seen = (torch.arange(tokens) + 1) // RATE
        rows = torch.stack([seen - 1, torch.where(seen > 2, 0, -1)], -1)[None]
        parts["indexer"] = lambda *args: rows
    for name, part in parts.items():
        object.__setattr__(one, name, part)
    one.position_bias = torch.nn.Parameter(torch.randn(RATE, series * WIDTH), requires_grad=False)
    return (one, torch.randn(1, tokens, 16), torch.randn(1, tokens, 12), torch.arange(tokens)[None], None, 0), {}


def _scorer(kind: type, projection: Any) -> Any:
    one = kind.__new__(kind)
    torch.nn.Module.__init__(one)
    one.softmax_scale, one.weights_scaling = WIDTH**-0.5, HEADS**-0.5
    object.__setattr__(one, "weights_proj", projection)
    return one


def compared(args: tuple, result: Any) -> torch.Tensor:
    """What results of an example have in common: entries of whole windows and who sees them; which are chosen."""
    tokens = args[1].shape[1]
    if isinstance(result, torch.Tensor):
        return torch.sort(result.float(), -1).values
    entries, seen = result
    if entries.shape[2] == tokens:
        entries, seen = entries[:, :, RATE - 1 :: RATE], seen[..., RATE - 1 :: RATE]
    return torch.cat([entries.flatten(), seen.isinf().float().flatten()])
