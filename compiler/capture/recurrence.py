"""Recurrences of the authors' code, each restated by three operators that keep a value of fixed size a request.

    adaptc::convolve(x[1,T,C], weight[C,W], bias[C]?) -> [1,T,C]     y = bias + Σ weight[w] · x of W - 1 - w tokens before
    adaptc::recur(query[1,T,H,K], key[1,T,H,K], value[1,T,H,V], decay[1,T,H,K|1], beta[1,T,H]?, read) -> [1,T,H,V]
    adaptc::running_max(x[1,T,C], decay[1,T,C]) -> [1,T,C]           m = max(m + decay, x), from -inf

``recur`` holds S[K,V] a head, zeros at first: S = exp(decay) · S + key · uᵀ with u the value or, with ``beta``,
beta · (value - keyᵀ · exp(decay) · S); the result is queryᵀ · S, of S "before" or "after" the token. Whatever else a
recurrence has (norms, softplus, steps of time, skips, gates, heads that share a group) stays around them, in torch.

``SCANS`` says by what name each one goes in the authors' code, and what it is. Convolutions need no name: see
``capture.convolution``.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

from adaptc.errors import CaptureError


@functools.cache
def operators() -> None:
    """Registers the operators with torch, once in a process: torch can't take them back safely."""
    torch.library.define("adaptc::convolve", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    torch.library.define("adaptc::recur", "(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? beta, str read)"
                                          " -> Tensor")
    torch.library.define("adaptc::running_max", "(Tensor x, Tensor decay) -> Tensor")
    torch.library.register_fake("adaptc::convolve", lambda x, weight, bias: torch.empty_like(x))
    torch.library.register_fake("adaptc::recur", lambda query, key, value, decay, beta, read: torch.empty_like(value))
    torch.library.register_fake("adaptc::running_max", lambda x, decay: torch.empty_like(x))


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


# ---- where the authors' code has them


@dataclass(frozen=True)
class Scan:
    """How a recurrence is restated. ``place``: what its name is the name of, "function" (of the modelling file, by the
    name under which packages of kernels have it, if it has one there), "method" (of a module), or "forward" (that of
    modules which have a method of this name)."""

    restated: Callable[..., Any]
    place: str = "function"


SCANS: Mapping[str, Scan] = {
    "chunk_gated_delta_rule": Scan(gated_delta_rule),
    "chunk_kda": Scan(delta_attention),
    "selective_scan_fn": Scan(selective_scan),
    "mamba_chunk_scan_combined": Scan(chunk_scan),
    "rwkv_linear_attention": Scan(rwkv),
    "wrap_chunkwise_arbitrary_sequence_length": Scan(mlstm),
    "_rnn_scan": Scan(rglru, "method"),
    "decay_factors": Scan(lightning_attention, "forward"),
}
"""Name in the authors' code → recurrence."""

AT_ONCE = ("max_inference_chunksize",)
"""Configuration keys that say how many tokens a forward takes at once, and nothing about what it computes."""


class _All(int):
    """A number of tokens that no number is larger than, without torch being asked whether T is."""

    def __lt__(self, other: Any) -> bool:
        return False

    __le__ = __lt__


@contextmanager
def installed(module: torch.nn.Module) -> Iterator[None]:
    """Traces of ``module`` within the block have our operators in place of the authors' scans."""
    operators()
    with ExitStack() as stack:
        for place, name, restated in _places(module):
            stack.enter_context(mock.patch.dict(place, {name: restated}))
        for config in {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}.values():
            for key in AT_ONCE:
                if hasattr(config, key):
                    stack.enter_context(mock.patch.object(config, key, _All()))
        yield


def _places(module: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str, Callable[..., Any]]]:
    """(namespace, name in it, what stands there instead) of every scan that the module may call."""
    files = {one for m in module.modules() if (one := sys.modules.get(type(m).__module__)) is not None}
    for namespace in map(vars, sorted(files, key=lambda file: file.__name__)):
        for name, value in list(namespace.items()):
            if (scan := _scan(value)) is not None:
                yield namespace, name, scan.restated
    for one in module.modules():
        for name, value in list(vars(one).items()):
            if isinstance(value, functools.partial) and (scan := _scan(value.func)) is not None:
                yield vars(one), name, functools.partial(scan.restated, *value.args, **value.keywords)
        for name, scan in SCANS.items():
            if scan.place != "function" and hasattr(type(one), name):
                place = name if scan.place == "method" else scan.place
                yield vars(one), place, functools.partial(scan.restated, one)


def _scan(value: Any) -> Scan | None:
    """The scan that a function of the authors is."""
    if not inspect.isfunction(value):
        return None
    scan = SCANS.get(_published(value))
    return scan if scan is not None and scan.place == "function" else None


def _published(function: Callable[..., Any]) -> str:
    """The name by which ``transformers.integrations.hub_kernels.use_kernel_func_from_hub_with_fallback`` looks for
    other implementations of a function, which its decorator holds; the function's own where there is none."""
    held = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    return held["func_name"].cell_contents if {"func_name", "torch_function"} <= held.keys() else function.__name__
