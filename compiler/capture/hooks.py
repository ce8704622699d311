"""Attention, masks, experts and rope by length through transformers' own extension points, recorded as operators of their own.

    adaptc::mask(like[1,T,D], padding, kind, window, blocks[1,T]) -> [1,1,T,T]    stands for a mask, which is never computed
    adaptc::attention(q[1,H,T,D], k[1,Hkv,T,D], v[1,Hkv,T,Dv], mask, extras, names, scaling, window, softcap) -> [1,T,H,Dv]
        ``extras`` are the optional operands of attention's row that ``names`` names, in the row's order; and a last one,
        "pairs" [1,H,T,T], which is added to scores, until ``capture.attention`` has raised it to one of these
    adaptc::index_rows(query[1,T,H,D], key[1,T,D], weights[1,T,H], top_k, scaling) -> i32[1,T,top_k]
    adaptc::index_blocks(query[1,T,H,D], key[1,T,D], top_k, block, local) -> i32[1,T,H,top_k · block]
    adaptc::constant(values, shape, dtype, device) -> shape    numbers that Python has
    adaptc::request_length(positions) -> as positions          tokens that each token's request may come to have
    adaptc::expert_linear(x[T,K] or [T,k,K], experts[T,k], weight[E,N,K], bias[E,N], transposed) -> [T,k,N]
"""

from __future__ import annotations

import functools
import inspect
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Iterator
from unittest import mock

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from adaptc.capture import recurrence
from adaptc.capture.key_bias import KeyBias
from adaptc.capture.known import KnownValues
from adaptc.capture.loops import ExpertLoops
from adaptc.capture.pooled_index import ChosenKeys
from adaptc.capture.problems import Problems
from adaptc.capture.sorted_experts import SortedExperts
from adaptc.errors import CaptureError

IMPLEMENTATION = "adaptc"
"""The name under which transformers finds our attention and experts while a module is traced."""

MASKS = {
    "create_causal_mask": "causal",
    "create_sliding_window_causal_mask": "sliding",
    "create_chunked_causal_mask": "chunked",
    "create_bidirectional_mask": "bidirectional",
    "create_bidirectional_sliding_window_mask": "bidirectional_sliding",
}
"""Mask builders of ``transformers.masking_utils`` and the kind of mask each one makes."""

WIDTHS = {"sliding": "sliding_window", "chunked": "attention_chunk_size", "bidirectional_sliding": "sliding_window"}
"""Kind of mask → the configuration key that says how wide it is."""

MASK_INPUTS = ("config", "inputs_embeds", "attention_mask", "cache", "past_key_values", "position_ids", "layer_idx",
               "allow_is_causal_skip", "allow_is_bidirectional_skip", "block_sequence_ids")
"""What may be given to a mask builder: what else it takes may change which keys a token sees."""

PAIRS = "pairs"
"""Name of the operand of ``adaptc::attention`` that holds a bias for every pair of tokens."""

IGNORED = ("position_ids", "cache_position", "use_cache", "cache", "past_key_values", "output_attentions",
           "output_hidden_states", "return_dict", "logits_to_keep")
"""Keywords that reach attention functions and say nothing about the attention itself."""


@functools.cache
def operators() -> None:
    """Registers the operators with torch, once in a process: torch can't take them back safely."""
    torch.library.define("adaptc::mask", "(Tensor like, Tensor? padding, str kind, int window, "
                         "Tensor? blocks=None) -> Tensor")
    torch.library.define(
        "adaptc::attention",
        "(Tensor q, Tensor k, Tensor v, Tensor mask, Tensor[] extras, str[] names, float scaling, int window, "
        "float softcap) -> Tensor",
    )
    torch.library.define(
        "adaptc::expert_linear",
        "(Tensor x, Tensor experts, Tensor weight, Tensor? bias, bool transposed) -> Tensor",
    )
    torch.library.define("adaptc::index_rows",
                         "(Tensor query, Tensor key, Tensor weights, int top_k, float scaling) -> Tensor")
    torch.library.register_fake("adaptc::index_rows", _index_shape)
    torch.library.impl("adaptc::index_rows", "CPU", _index_rows)
    torch.library.define("adaptc::index_blocks",
                         "(Tensor query, Tensor key, int top_k, int block, int local) -> Tensor")
    torch.library.register_fake("adaptc::index_blocks", _blocks_shape)
    torch.library.impl("adaptc::index_blocks", "CPU", _index_blocks)
    torch.library.define("adaptc::constant",
                         "(float[] values, int[] shape, ScalarType dtype, Device device) -> Tensor")
    torch.library.register_fake("adaptc::constant", lambda values, shape, dtype, device: torch.empty(
        shape, dtype=dtype, device=device))
    torch.library.define("adaptc::request_length", "(Tensor positions) -> Tensor")
    torch.library.register_fake("adaptc::request_length", torch.empty_like)
    torch.library.register_fake("adaptc::mask", _mask_shape)
    torch.library.register_fake("adaptc::attention", _attention_shape)
    torch.library.register_fake("adaptc::expert_linear", _expert_linear_shape)
    recurrence.operators()


def _mask_shape(like, padding, kind, window, blocks=None):
    """As transformers' written out attention has it: it adds 0 or the least number to scores."""
    return like.new_empty((like.shape[0], 1, like.shape[1], like.shape[1]), dtype=torch.float32)


def _attention_shape(q, k, v, mask, extras, names, scaling, window, softcap):
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3]))


def _index_shape(query, key, weights, top_k, scaling):
    return query.new_empty((*query.shape[:2], top_k), dtype=torch.int32)


def _index_rows(query, key, weights, top_k, scaling):
    """Written out, to compute examples with."""
    at = torch.arange(key.shape[1])
    scores = ((query @ key.transpose(-1, -2)[:, None] * scaling).relu() * weights[..., None]).sum(2)
    best, chosen = scores.masked_fill(at > at[:, None], float("-inf")).topk(min(top_k, len(at)))
    chosen = chosen.masked_fill(best == float("-inf"), len(at)).sort().values
    chosen = F.pad(chosen, (0, top_k - chosen.shape[-1]), value=len(at))
    return chosen.masked_fill(chosen == len(at), -1).int()


def _blocks_shape(query, key, top_k, block, local):
    return query.new_empty((*query.shape[:3], top_k * block), dtype=torch.int32)


def _index_blocks(query, key, top_k, block, local):
    """Written out, to compute examples with."""
    at = torch.arange(key.shape[1])
    scores = torch.einsum("thd,sd->hts", query[0], key[0]).masked_fill(at > at[:, None], float("-inf"))
    pooled = torch.stack([part.amax(-1) for part in scores.split(block, -1)], -1)
    numbers, own = torch.arange(pooled.shape[-1]), at[:, None] // block
    pooled = pooled.masked_fill((numbers <= own) & (numbers > own - local), float("inf"))
    best, chosen = pooled.topk(min(top_k, len(numbers)), -1)
    rows = chosen[..., None] * block + torch.arange(block)
    rows = rows.masked_fill(best[..., None] == float("-inf"), len(at)).flatten(-2)
    rows = rows.masked_fill(rows > at[:, None], len(at)).sort(-1).values
    rows = F.pad(rows, (0, top_k * block - rows.shape[-1]), value=len(at))
    return rows.masked_fill(rows == len(at), -1).transpose(0, 1)[None].int()


def _expert_linear_shape(x, experts, weight, bias, transposed):
    return x.new_empty((*experts.shape, weight.shape[2 if transposed else 1]))


@contextmanager
def installed(module: torch.nn.Module, problems: Problems) -> Iterator[None]:
    """Traces of ``module`` within the block contain our operators; afterwards everything is as before."""
    from transformers import masking_utils
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    operators()
    names = {id(m): name for name, m in module.named_modules()}
    before = module.config._attn_implementation
    with ExitStack() as stack:
        stack.enter_context(recurrence.installed(module))
        attention = _attention(names, problems)
        for interface in {id(one): one for one in (ALL_ATTENTION_FUNCTIONS, *_interfaces(module))}.values():
            stack.enter_context(mock.patch.dict(interface._local_mapping, {IMPLEMENTATION: attention}))
        experts = ALL_EXPERTS_FUNCTIONS._local_mapping
        stack.enter_context(mock.patch.dict(experts, {IMPLEMENTATION: _experts}))
        for name, kind in MASKS.items():
            for place in _holders(name, getattr(masking_utils, name)):
                stack.enter_context(mock.patch.dict(place, {name: _mask(getattr(masking_utils, name), kind, problems)}))
        module.set_attn_implementation(IMPLEMENTATION)
        stack.callback(module.set_attn_implementation, before)
        device = next(module.parameters()).device
        stack.enter_context(mock.patch.object(torch, "tensor", _tensor(torch.tensor, device)))
        stack.enter_context(_ListsInIndices())
        # distributions ask about the values of their parameters, which a trace hasn't
        stack.enter_context(mock.patch.object(torch.distributions.Distribution, "_validate_args", False))
        for namespace in {id(n): n for n in map(_namespace, module.modules())}.values():
            stack.enter_context(mock.patch.dict(namespace, {"min": _least(namespace.get("min", min))}))
        for one in module.modules():
            if _by_length(one):
                stack.enter_context(mock.patch.dict(vars(one), {"forward": _rope(one)}))
        for config in {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}.values():
            if hasattr(config, _EXPERTS):
                stack.callback(setattr, config, _EXPERTS, getattr(config, _EXPERTS))
                setattr(config, _EXPERTS, IMPLEMENTATION)
        yield


def _tensor(original: Callable, device_of_module: torch.device) -> Callable:
    """``torch.tensor`` whose numbers survive on the meta device: an operator of the graph holds them."""

    @functools.wraps(original)
    def tensor(data: Any, *args: Any, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any):
        if args or kwargs:
            return original(data, *args, dtype=dtype, device=device, **kwargs)
        if isinstance(data, (bool, int, float)):
            return torch.full((), data, dtype=dtype, device=device)
        if isinstance(data, (list, tuple)) and (numbers := _numbers(data)):
            made = original(data, dtype=dtype, device="cpu")
            return torch.ops.adaptc.constant([float(x) for x in numbers], list(made.shape), made.dtype,
                                             device_of_module if device is None else torch.device(device))
        return original(data, dtype=dtype, device=device)

    return tensor


def _numbers(data: Any) -> list | None:
    """The numbers in lists of lists, in order; None if there is anything else."""
    if isinstance(data, (bool, int, float)):
        return [data]
    if not isinstance(data, (list, tuple)):
        return None
    found = [_numbers(part) for part in data]
    return None if any(part is None for part in found) else [x for part in found for x in part]


class _ListsInIndices(TorchFunctionMode):
    """Lists in indices (``x[..., [-2], :]``) become tensors by ``torch.tensor``, as torch would make them itself."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            index = tuple(torch.tensor(part) if isinstance(part, list) and part and _numbers(part) else part
                          for part in args[1])
            args = (args[0], index)
        return function(*args, **(kwargs or {}))


def run(module: Any, ids: torch.Tensor) -> Any:
    """What ``module``'s forward gives for ids [1, T], with loops over experts and parts of rows as what they compute, and
    values that follow from no token. The modes are entered here, above torch.export's own, which would look into indices
    first; a patched forward would hide the module's path."""
    with KnownValues(), SortedExperts(), ExpertLoops():
        return module(input_ids=ids, use_cache=False)


def _interfaces(module: torch.nn.Module) -> Iterator[Any]:
    """The attention interfaces that modelling code looks functions up in: some files have one of their own."""
    from transformers.modeling_utils import AttentionInterface

    for namespace in {id(n): n for n in map(_namespace, module.modules())}.values():
        yield from (value for value in namespace.values() if isinstance(value, AttentionInterface))


def _namespace(module: torch.nn.Module) -> dict:
    """The globals that the module's forward sees."""
    return getattr(inspect.unwrap(type(module).forward), "__globals__", {})


def _least(original: Callable) -> Callable:
    """``min`` that doesn't ask which of a number and the number of tokens T is less, where that depends on T."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    @functools.wraps(original)
    def least(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 2 or kwargs or not any(isinstance(a, torch.SymInt) for a in args):
            return original(*args, **kwargs)
        known = next((a for a, b in (args, args[::-1]) if statically_known_true(a <= b)), None)
        return torch.sym_min(*args) if known is None else known

    return least


_EXPERTS = "_experts_implementation_internal"
"""Where a configuration keeps which implementation its experts use; ``set_experts_implementation`` also asks whether
the class's source mentions the decorator, which says nothing for classes of other files."""


def _holders(name: str, function: Callable) -> list[dict]:
    """Namespaces of loaded modules that hold ``function`` under its name: modelling code imports it by name."""
    return [vars(m) for m in list(sys.modules.values()) if getattr(m, "__dict__", {}).get(name) is function]


def _mask(original: Callable, kind: str, problems: Problems) -> Callable:
    @functools.wraps(original)
    def marker(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        given.update(given.pop("kwargs", {}))
        config = given["config"]
        changed = [key for key, value in given.items() if value is not None and key not in MASK_INPUTS]
        if changed:
            problems.add(CaptureError(
                f"{original.__name__} of a {config.model_type} model is given {', '.join(changed)}, a mask that adaptc "
                "has no operator for; it captures causal and sliding-window attention."
            ))
        causal = getattr(config, "is_causal", True)
        width = getattr(config, WIDTHS[kind]) if kind in WIDTHS else 0
        padding = given.get("attention_mask")
        if padding is not None and (not isinstance(padding, torch.Tensor) or padding.ndim != 2):
            problems.add(CaptureError(f"{original.__name__} of a {config.model_type} model is given a mask that isn't a row "
                                      "of tokens to keep, which adaptc has no operator for."))
            padding = None
        return torch.ops.adaptc.mask(given["inputs_embeds"], padding, kind if causal else "bidirectional",
                                     int(width or 0), given.get("block_sequence_ids"))

    return marker


def _attention(names: dict[int, str], problems: Problems) -> Callable:
    def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None,
                  softcap=None, is_causal=None, s_aux=None, indices=None, position_bias=None, sinks=None,
                  block_indices=None, **keywords):
        name = names.get(id(module), type(module).__name__)
        unknown = [k for k, v in keywords.items() if v is not None and v is not False and k not in IGNORED]
        unknown += ["dropout"] if dropout else []
        unknown += ["position_bias beside softcap"] if position_bias is not None and softcap else []
        beside = {"softcap": softcap, "s_aux": s_aux, "indices": indices, "position_bias": position_bias, "sinks": sinks}
        apart = block_indices is not None or isinstance(attention_mask, (KeyBias, ChosenKeys))
        unknown += [f"{k} beside keys that heads choose" for k, v in beside.items() if apart and v is not None]
        unknown += ["block_indices"] if block_indices is not None and block_indices.shape[1] != query.shape[2] else []
        if unknown:
            problems.add(CaptureError(
                f"attention in module {name} ({type(module).__name__}) is given {', '.join(unknown)}, which adaptc's "
                "attention operator doesn't have; it has scaling, sliding_window, softcap, s_aux, sinks, indices and "
                "position_bias."
            ))
        extras = {"sinks": s_aux, "query_sinks": sinks, "rows": indices, PAIRS: position_bias}
        extras = {name: x for name, x in extras.items() if x is not None}
        scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        if apart and not unknown:
            of_groups = functools.partial(_of_groups, attention, module, scaling=scaling, sliding_window=sliding_window)
            if block_indices is not None:
                return of_groups(query, key, value, attention_mask, block_indices), None
            return attention_mask.attend(of_groups, query, key, value, scaling), None
        if isinstance(query.shape[1], torch.SymInt) and attention_mask is None and not (extras or softcap or is_causal):
            return _within_tokens(query, key, value, scaling), None
        if attention_mask is None:
            raise CaptureError(
                f"attention in module {name} ({type(module).__name__}) is given no mask, so that what a token sees "
                "depends on the implementation."
            )
        if sinks is not None:  # [1,H,T,1], a score of each query's own
            extras["query_sinks"] = sinks.squeeze(-1).transpose(1, 2).squeeze(0)
        return (
            torch.ops.adaptc.attention(query, key, value, attention_mask, [*extras.values()], [*extras], scaling,
                                       int(sliding_window or 0), float(softcap or 0.0)),
            None,
        )

    return attention


def _of_groups(attention: Callable, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor,
               value: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor, **given: Any) -> torch.Tensor:
    """Attention of groups of key heads that read each their own rows [1,T,G,K]: one for each group."""
    groups = rows.shape[2]
    if key.shape[1] % groups:
        raise CaptureError(f"attention ({type(module).__name__}) of {key.shape[1]} key heads reads what {groups} heads of an "
                           "index choose; expected the same rows for all query heads that share a key head.")
    heads = [x.chunk(groups, 1) for x in (query, key, value)]
    results = [attention(module, *parts, mask, indices=rows[:, :, group], **given)[0]
               for group, parts in enumerate(zip(*heads))]
    return torch.cat(results, 2)


def _within_tokens(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attention [1,T,n,D] over what each token has itself [1,T,m,D], such as the states of layers before: as it is."""
    scores = (query.unsqueeze(-2) * key.unsqueeze(-3)).sum(-1) * scaling
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return (weights.unsqueeze(-1) * value.unsqueeze(-3)).sum(-2).transpose(1, 2)


def _experts(module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
             top_k_weights: torch.Tensor) -> torch.Tensor:
    """What ``transformers.integrations.moe.batched_mm_experts_forward`` computes: each token's chosen experts one by
    one, their results added in the order of the choice. Gate, activation and norm are the authors' own."""
    if hidden_states.ndim != 2 or top_k_index.ndim != 2:
        raise CaptureError(f"experts ({type(module).__name__}) are given {tuple(hidden_states.shape)} and choices "
                           f"{tuple(top_k_index.shape)}; expected [T, K] and [T, k].")

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        return torch.ops.adaptc.expert_linear(x, top_k_index, getattr(module, name), bias, module.is_transposed)

    inner = project(hidden_states, "gate_up_proj" if module.has_gate else "up_proj")
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    result = project(inner, "down_proj")
    if module.has_post_expert_norm:
        result = module.post_expert_norm(result)
    return (result * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)


# ---- rotary embeddings whose frequencies depend on the sequence's length

DYNAMIC = ("dynamic", "longrope")
"""Kinds of rope (``rope_type``) that choose their frequencies anew in every forward."""


def _by_length(module: torch.nn.Module) -> bool:
    """Whether ``transformers.modeling_rope_utils.dynamic_rope_update`` wraps the module's forward, and does anything."""
    forward = type(module).forward
    wrapped = getattr(forward, "__qualname__", "") != "" and hasattr(forward, "__wrapped__") and (
        forward.__code__.co_name == "wrapper" and "rope_type" in forward.__code__.co_varnames)
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return wrapped and any(kind and any(d in kind for d in DYNAMIC) for kind in kinds)


def _name(which: str, layer_type: str | None) -> str:
    return f"adaptc_{which}_inv_freq" + (f"_{layer_type}" if layer_type else "")


@contextmanager
def both_frequencies(module: torch.nn.Module) -> Iterator[None]:
    """Rotary embeddings with a set of frequencies for short and one for long sequences hold both as buffers within
    the block; the authors' own forward keeps one and copies the other over it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    added = []
    for one in module.modules():
        kinds = getattr(one, "rope_type", None) if _by_length(one) else None
        for layer_type, kind in (kinds.items() if isinstance(kinds, dict) else ((None, kinds),)):
            if kind != "longrope":
                continue
            rope = one.config.rope_parameters if layer_type is None else one.config.rope_parameters[layer_type]
            layer = {} if layer_type is None else {"layer_type": layer_type}
            for which, length in (("short", 0), ("long", 1)):
                length += rope["original_max_position_embeddings"]
                values, _ = ROPE_INIT_FUNCTIONS[kind](one.config, torch.device("cpu"), seq_len=length, **layer)
                added.append((one, _name(which, layer_type)))
                one.register_buffer(added[-1][1], values, persistent=False)
    try:
        yield
    finally:
        for one, name in added:
            delattr(one, name)


def _rope(module: torch.nn.Module) -> Callable:
    """The module's forward with the length that a request declares in place of the longest position of the forward:
    a step that continues a sequence must rotate as the steps before it did, and a step holds several sequences."""
    forward = type(module).forward.__wrapped__

    def given(inverse: torch.Tensor, layer_type: str | None, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        layer = {} if layer_type is None else {"layer_type": layer_type}
        buffers = dict(module._buffers)
        try:
            module._buffers[name] = inverse
            return forward(module, x, position_ids, **layer)
        finally:
            module._buffers.clear()
            module._buffers.update(buffers)

    def by_length(x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
        rope = module.config.rope_parameters if layer_type is None else module.config.rope_parameters[layer_type]
        layer = {} if layer_type is None else {"layer_type": layer_type}
        if not any(d in kind for d in DYNAMIC):
            return forward(module, x, position_ids, **layer)
        length = torch.ops.adaptc.request_length(position_ids)

        if kind == "longrope":
            short, long = (given(module._buffers[_name(which, layer_type)], layer_type, x, position_ids)
                           for which in ("short", "long"))
            return _choose(length > rope["original_max_position_embeddings"], long, short)

        def frequencies(seq_len: Any) -> torch.Tensor:
            return ROPE_INIT_FUNCTIONS[kind](module.config, x.device, seq_len=seq_len, **layer)[0]

        rows = given(_PerToken(frequencies(length.transpose(0, 1))), layer_type, x, position_ids.transpose(0, 1))
        return tuple(v.transpose(0, 1) for v in rows) if isinstance(rows, tuple) else rows.transpose(0, 1)

    return by_length


@dataclass(frozen=True)
class _PerToken:
    """Frequencies [T, D/2], each token its own, where the authors' code expects [D/2] for all: tokens stand where that
    code has the batch, in both ways in which it multiplies frequencies and positions."""

    values: torch.Tensor

    def __getitem__(self, index: Any) -> torch.Tensor:
        """[None, :, None]: to be multiplied as a column with positions [T, 1, 1]."""
        if index != (None, slice(None), None):
            raise CaptureError(f"a rotary embedding takes {index} of its frequencies; expected [None, :, None].")
        return self.values[:, :, None]

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """To be multiplied as a row with positions [T, 1, 1]."""
        return self.values[:, None, :].to(*args, **kwargs)


def _choose(condition: torch.Tensor, yes: Any, no: Any) -> Any:
    """``yes`` or ``no`` for each token: tensors [1, T, D], or tuples of them."""
    if isinstance(yes, tuple):
        return tuple(_choose(condition, a, b) for a, b in zip(yes, no))
    return torch.where(condition.unsqueeze(-1), yes, no)
