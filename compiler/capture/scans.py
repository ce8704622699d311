"""What recurrences go by in the authors' code, and how each is restated by the operators of ``capture.recurrence``.

A restatement takes the arguments of the authors' function. Norms, softplus, steps of time, skips, gates and heads that
share a group stay around the operators, in torch. Each row's example is computed both ways before a function of that
name is replaced: one that computes something else is refused, not replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as F

from adaptc.capture import block_index, key_bias, pooled_index
from adaptc.errors import CaptureError

CHUNK = 16
"""Tokens that examples have authors' code take at once, where it takes several."""


def _recur(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor,
           beta: torch.Tensor | None = None, read: str = "after") -> torch.Tensor:
    return torch.ops.adaptc.recur(query, key, value, decay, beta, read)


def _before(x: torch.Tensor, first: float) -> torch.Tensor:
    """x[1,T,C] of the token before each one, and ``first`` where there is none."""
    taps = torch.arange(1, -1, -1, dtype=x.dtype, device=x.device).expand(x.shape[2], 2)
    shifted = torch.ops.adaptc.convolve(x, taps, None)
    return shifted if first == 0 else torch.where(_at_start(x), first, shifted)


def _at_start(x: torch.Tensor) -> torch.Tensor:
    """[1,T,1]: whether a token of x[1,T,...] is the first of its request."""
    return (torch.arange(x.shape[1], device=x.device) == 0)[None, :, None]


def _ungrouped(x: torch.Tensor, heads: int) -> torch.Tensor:
    """x[1,T,G,D] as [1,T,heads,D]: neighbouring heads share a group."""
    _, tokens, groups, width = x.shape
    return x[:, :, :, None].expand(1, tokens, groups, heads // groups, width).reshape(1, tokens, heads, width)


def _fresh(name: str, **states: Any) -> None:
    """CaptureError where a scan is given what a forward without a cache doesn't give."""
    given = [key for key, value in states.items() if value is not None and value is not False]
    if given:
        raise CaptureError(f"{name} is given {', '.join(given)}; adaptc captures it from the start of a sequence, without.")


# ---- delta rules: fla


def gated_delta_rule(query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
                     use_qk_l2norm_in_kernel=False, cu_seqlens=None, **_):
    """Gated DeltaNet: query, key [1,T,Hk,K], value [1,T,H,V], g [1,T,H] the logarithm of the decay, beta [1,T,H]."""
    _fresh("chunk_gated_delta_rule", initial_state=initial_state, output_final_state=output_final_state,
           cu_seqlens=cu_seqlens)
    dtype, heads = query.dtype, value.shape[2]
    query, key, value, g, beta = (x.float() for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query, key = (_ungrouped(x, heads) for x in (query * query.shape[-1] ** -0.5, key))
    return _recur(query, key, value, g[..., None], beta).to(dtype), None


def delta_attention(query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
                    use_qk_l2norm_in_kernel=False, cu_seqlens=None, **_):
    """Kimi Delta Attention: query, key, g [1,T,H,K], value [1,T,H,V], beta [1,T,H]; each row of a state decays by its
    own g."""
    _fresh("chunk_kda", initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens)
    dtype = query.dtype
    query, key, value, g, beta = (x.float() for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    return _recur(query * query.shape[-1] ** -0.5, key, value, g, beta).to(dtype), None


# ---- state spaces: mamba_ssm


def _steps(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def selective_scan(hidden_states, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False,
                   return_last_state=False, **_):
    """Mamba: hidden_states, dt, z [1,C,T], A [C,N], B, C [1,N,T], D, delta_bias [C]. A channel is a head whose state has
    N rows of one column."""
    _fresh("selective_scan_fn", return_last_state=return_last_state)
    x = hidden_states.transpose(1, 2)
    dt = _steps(dt.transpose(1, 2), delta_bias, delta_softplus)
    wide = (*x.shape, A.shape[-1])
    key, query = (v.transpose(1, 2).float()[:, :, None].expand(wide) for v in (B, C))
    y = _recur(query, key, (dt * x.float())[..., None], dt[..., None] * A)[..., 0]
    y = y if D is None else y + x * D
    y = y.transpose(1, 2)
    return y if z is None else y * F.silu(z)


def chunk_scan(hidden_states, dt, A, B, C, chunk_size, D=None, dt_bias=None, initial_states=None, dt_softplus=False,
               dt_limit=(0.0, math.inf), return_final_states=False, z=None, seq_idx=None, **_):
    """Mamba-2: hidden_states [1,T,H,P], dt [1,T,H], A, D, dt_bias [H], B, C [1,T,G,N]. A head's state has N rows of P
    columns."""
    _fresh("mamba_chunk_scan_combined", initial_states=initial_states, return_final_states=return_final_states, z=z,
           seq_idx=seq_idx)
    x, heads = hidden_states.float(), hidden_states.shape[2]
    dt = _steps(dt, dt_bias, dt_softplus).float()
    dt = torch.clamp(dt, min=dt_limit[0], max=None if dt_limit[1] == math.inf else dt_limit[1])
    key, query = (_ungrouped(v.float(), heads) for v in (B, C))
    y = _recur(query, key, x * dt[..., None], (A * dt)[..., None])
    return y if D is None else y + D[..., None] * x


# ---- what has no package of its own


def rglru(self, hidden_states, recurrent_gate, reset, recurrent_states, acc_dtype=torch.float32):
    """Griffin's recurrence h = a·h + x: hidden_states and the gate a, 0 to 1, [1,T,C]; reset [1,T,1] forgets."""
    _fresh("the RG-LRU", recurrent_states=recurrent_states)
    gate = (recurrent_gate * ~reset).type(acc_dtype)
    decay = gate.clamp_min(torch.finfo(acc_dtype).tiny).log()
    x = hidden_states.type(acc_dtype)[..., None]
    one = torch.ones_like(x)
    return _recur(one, one, x, decay[..., None])[..., 0].type(hidden_states.dtype), None


def rwkv(time_decay, time_first, key, value, state=None, return_state=False):
    """RWKV's mean of values [1,T,C], with weights exp(key) that decay by exp(-exp(time_decay)) a token, and the token's
    own by exp(key + time_first). The sums are kept relative to the largest weight so far."""
    _fresh("rwkv_linear_attention", state=state, return_state=return_state)
    k, v = key.float(), value.float()
    decay = (-torch.exp(time_decay)).expand(k.shape)
    most = torch.ops.adaptc.running_max(k, decay)
    earlier = _before(most, -1e38)
    sums = _recur(torch.ones_like(k)[..., None], torch.exp(k - most)[..., None], torch.stack((v, torch.ones_like(v)), -1),
                  (earlier + decay - most)[..., None], read="before")
    own = k + time_first
    largest = torch.maximum(earlier, own)
    past, now = torch.exp(earlier - largest), torch.exp(own - largest)
    result = (past * sums[..., 0] + now * v) / (past * sums[..., 1] + now)
    return result.to(key.dtype), None


def mlstm(mlstm_chunkwise_kernel=None, mlstm_sequence_kernel=None, mlstm_step_kernel=None, *, query, key, value, fgate,
          igate, c_initial=None, n_initial=None, m_initial=None, return_last_states=True, eps=1e-6, **_):
    """xLSTM's matrix memory: query, key [1,H,T,K], value [1,H,T,V], gates before their activation [1,H,T]. Exponential
    input gates are kept relative to the largest so far, which starts at 0; the last column of a state sums the keys."""
    _fresh("the mLSTM", c_initial=c_initial, n_initial=n_initial, m_initial=m_initial)
    forget, gate = F.logsigmoid(fgate).transpose(1, 2), igate.transpose(1, 2)
    most = torch.ops.adaptc.running_max(torch.where(_at_start(gate), torch.maximum(gate, forget), gate), forget)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    k = k * torch.exp(gate - most)[..., None]
    v = torch.cat((v, torch.ones_like(v[..., :1])), -1)
    read = _recur(q * q.shape[-1] ** -0.5, k, v, (forget + _before(most, 0.0) - most)[..., None])
    norm = torch.maximum(read[..., -1:].abs(), torch.exp(-most)[..., None]) + eps
    result = (read[..., :-1] / norm).transpose(1, 2)
    return (result, None) if return_last_states else result


def lightning_attention(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **_):
    """Lightning attention, hidden_states [1,T,D]: linear attention whose heads forget by exp(-slope_rate) a token."""
    _fresh("lightning attention", attention_mask=attention_mask, cache=cache)
    qkv = self.act_fn(self.qkv_proj(hidden_states))
    qkv = qkv.reshape(*hidden_states.shape[:2], self.num_attention_heads, 3 * self.head_dim)
    query, key, value = torch.split(qkv, self.head_dim, dim=3)
    decay = -self.slope_rate.reshape(1, 1, -1, 1).expand(1, hidden_states.shape[1], -1, 1)
    result = self.norm(_recur(query, key, value, decay).flatten(2))
    return self.out_proj(F.sigmoid(self.output_gate(hidden_states)) * result), None


# ---- examples: (the module that has the recurrence or None, tokens) → arguments


def _normal(*shape: int, scale: float = 1.0, around: float = 0.0) -> torch.Tensor:
    return torch.randn(shape) * scale + around


def _log_uniform(low: float, high: float, *shape: int) -> torch.Tensor:
    return torch.exp(torch.empty(shape).uniform_(math.log(low), math.log(high)))


def _time_steps(*shape: int) -> torch.Tensor:
    """What softplus makes steps of 0.0005 to 1 of."""
    return torch.log(torch.expm1(_log_uniform(5e-4, 1.0, *shape)))


def _delta_rule_example(_, t):
    heads = 4
    g = -_log_uniform(0.01, 16, heads) * F.softplus(_time_steps(1, t, heads))
    return (_normal(1, t, 2, 8), _normal(1, t, 2, 8), _normal(1, t, heads, 12)), dict(
        g=g, beta=_normal(1, t, heads).sigmoid(), chunk_size=CHUNK, use_qk_l2norm_in_kernel=True)


def _delta_attention_example(_, t):
    forgets = -_log_uniform(0.01, 16, 3, 1) * F.softplus(_time_steps(1, t, 3, 8))
    safe = -5 * torch.sigmoid(_normal(1, t, 3, 8, scale=4.0))  # a gate with a bound below
    g = torch.where(torch.arange(3)[:, None] == 0, safe, forgets)
    return tuple(_normal(1, t, 3, 8) for _ in range(3)), dict(
        g=g, beta=_normal(1, t, 3).sigmoid(), chunk_size=CHUNK, use_qk_l2norm_in_kernel=True)


def _selective_scan_example(_, t):
    channels, width = 6, 16
    return (_normal(1, channels, t), _normal(1, channels, t, scale=0.3),
            -torch.arange(1.0, width + 1).expand(channels, width), _normal(1, width, t), _normal(1, width, t)), dict(
        D=_normal(channels), z=_normal(1, channels, t), delta_bias=_time_steps(channels), delta_softplus=True)


def _chunk_scan_example(_, t):
    heads, width = 4, 16
    return (_normal(1, t, heads, 8), _normal(1, t, heads, scale=0.3), -torch.arange(1.0, heads + 1),
            _normal(1, t, 2, width), _normal(1, t, 2, width), CHUNK), dict(
        D=_normal(heads), dt_bias=_time_steps(heads), dt_softplus=True, dt_limit=(0.001, 0.4))


def _rwkv_example(_, t):
    channels = 8
    return (torch.linspace(-6, 3, channels), _normal(channels), _normal(1, t, channels, scale=20.0),
            _normal(1, t, channels)), {}


def _mlstm_example(module, t):
    """Keys and queries of one direction: a norm near 0 would be what rounding makes of it."""
    heads = 3
    query, key = (_normal(1, heads, t, 8, around=2.0) for _ in range(2))
    return (), dict(query=query, key=key, value=_normal(1, heads, t, 12), igate=_normal(1, heads, t, scale=6.0, around=-4.0),
                    fgate=_normal(1, heads, t, scale=2.0, around=4.0), chunk_size=CHUNK)


def _rglru_example(module, t):
    channels = 8
    gate = torch.exp(-8 * _normal(1, t, channels).sigmoid() * F.softplus(torch.linspace(-9, 1, channels)))
    return (module, _normal(1, t, channels), gate, torch.arange(t)[None, :, None] == 0, None), {}


def _lightning_example(module, t):
    """A small module with the authors' decays: forwards take nothing but attributes."""
    heads, width = 2, 4
    one = SimpleNamespace(num_attention_heads=heads, head_dim=width, block_size=CHUNK, act_fn=F.silu, norm=lambda x: x / 3)
    one.slope_rate = torch.tensor([0.5, 0.01])[:, None, None]
    one.query_decay, one.key_decay, one.diagonal_decay = type(module).decay_factors(one, one.slope_rate)
    for name, rows, columns in (("qkv_proj", 3 * heads * width, 16), ("output_gate", heads * width, 16),
                                ("out_proj", 16, heads * width)):
        weight = _normal(rows, columns)
        setattr(one, name, lambda x, weight=weight: F.linear(x, weight))
    return (one, _normal(1, t, 16)), dict(position_embeddings=None, attention_mask=None)


# ---- the table


@dataclass(frozen=True)
class Scan:
    """How a recurrence is restated, and its example. ``place``: what its name is the name of, "function" (of the
    modelling file, by the name under which packages of kernels have it, if it has one there), "method" (of a module),
    "forward" (that of modules which have a method of this name) or "parts" (the forward of modules that have them all).
    ``compared``: what of a result, given the example's arguments, must be the same."""

    restated: Callable[..., Any]
    example: Callable[[Any, int], tuple[tuple, dict[str, Any]]]
    place: str = "function"
    compared: Callable[[tuple, Any], Any] = lambda args, result: result[0] if isinstance(result, tuple) else result


SAYS_HOW = ("use_associative_scan", "use_mambapy", "chunk_size", "block_size", "autocast_kernel_dtype", "enable_logging")
"""Arguments of authors' functions that say how to compute the same: restatements needn't know them."""

SCANS: Mapping[str, Scan] = {
    "chunk_gated_delta_rule": Scan(gated_delta_rule, _delta_rule_example),
    "chunk_kda": Scan(delta_attention, _delta_attention_example),
    "selective_scan_fn": Scan(selective_scan, _selective_scan_example),
    "mamba_chunk_scan_combined": Scan(chunk_scan, _chunk_scan_example),
    "rwkv_linear_attention": Scan(rwkv, _rwkv_example),
    "wrap_chunkwise_arbitrary_sequence_length": Scan(mlstm, _mlstm_example),
    "_rnn_scan": Scan(rglru, _rglru_example, "method"),
    "decay_factors": Scan(lightning_attention, _lightning_example, "forward"),
    block_index.PARTS: Scan(block_index.index, block_index.example, "parts", block_index.compared),
    pooled_index.PARTS: Scan(pooled_index.index, pooled_index.example, "parts", pooled_index.compared),
    "prepare_dynamic_mask": Scan(key_bias.dynamic_mask, key_bias.example, "method", key_bias.compared),
}
"""Name in the authors' code, or names of parts → recurrence."""
