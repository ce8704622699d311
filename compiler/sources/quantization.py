"""How published checkpoints say that their matrices are quantised; no value is read here.

A ``quantization_config`` of a known kind says in which format the matrices lie that it names. Every field is looked at:
one that isn't known, or a value of it, is refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from adaptc.errors import UnsupportedError
from adaptc.formats import FORMATS, WeightFormat

FIELD = "quantization_config"

EXPERTS = "expert_dtype"
"""A field that the first files which have it state beside the others: in which format experts are."""

MXFP4_PAIRS = "mxfp4-pack-quantized"
"""The layout whose values are read too (``sources.compressed``)."""


@dataclass(frozen=True)
class Quantization:
    """``format`` of the matrices of linear maps and of experts, or of ``experts_only``, but of the modules that ``left``
    matches: patterns of their paths, regular expressions after "re:". ``experts``: that of experts, where it is another.
    ``layout``: how compressed-tensors calls the way in which it lies in files."""

    format: WeightFormat
    left: tuple[str, ...] = ()
    experts_only: bool = False
    layout: str = ""
    experts: WeightFormat | None = None

    def covers(self, module: str) -> bool:
        """Whether the matrices of the module of that path are quantised."""
        return not any(_matches(pattern, module) for pattern in self.left)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


def quantization(stated: Any, model: str) -> Quantization | None:
    """What a ``quantization_config`` says; None for none. UnsupportedError naming the field that isn't known."""
    if not stated:
        return None
    method = stated.get("quant_method") if isinstance(stated, Mapping) else stated
    if not isinstance(method, str) or method not in KINDS:
        raise _unknown(model, "quant_method", method, KINDS)
    known, read = KINDS[method]
    _check(stated, known, FIELD, model)
    return read(stated, model)


def _check(stated: Mapping[str, Any], known: Mapping[str, tuple | None], path: str, model: str) -> None:
    """UnsupportedError for a field beyond ``known``, or with a value beyond those it lists (None: any)."""
    if not isinstance(stated, Mapping):
        raise _unknown(model, path.removeprefix(FIELD).lstrip("."), stated, known)
    for name, value in (dict.fromkeys(name for name in known if name in REQUIRED) | stated).items():
        if name not in known:
            raise UnsupportedError(f"the field {path}.{name} of {model} is none that adaptc knows for this kind; it knows "
                                   f"{', '.join(known)}.", hint="Its meaning would change sizes unseen.")
        if known[name] is not None and value not in known[name]:
            raise _unknown(model, f"{path.removeprefix(FIELD).lstrip('.')}.{name}".lstrip("."), value, known[name])


def _unknown(model: str, field: str, value: Any, valid: Any) -> UnsupportedError:
    return UnsupportedError(f"{FIELD}.{field} of {model} is {value!r}; adaptc knows the sizes of "
                            f"{', '.join(map(repr, valid))}.")


def _fp8(stated: Mapping[str, Any], model: str) -> Quantization:
    rows, columns = stated["weight_block_size"]
    scale = {None: "f32", "ue8m0": "e8m0"}[stated.get("scale_fmt")]
    format = WeightFormat(f"fp8_{rows}x{columns}", "f8", group=columns, rows=rows, scale=(scale,), superblock=columns)
    experts = FORMATS["mxfp4"] if stated.get(EXPERTS) == "fp4" else None
    return Quantization(format, tuple(stated.get("modules_to_not_convert") or ()), experts=experts)


def _mxfp4(stated: Mapping[str, Any], model: str) -> Quantization:
    return Quantization(FORMATS["mxfp4"], tuple(stated.get("modules_to_not_convert") or ()), experts_only=True)


def _compressed(stated: Mapping[str, Any], model: str) -> Quantization:
    groups = stated.get("config_groups") or {}
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _unknown(model, "config_groups", groups, ("one group",))
    (name, group), = groups.items()
    _check(group, _GROUP, f"{FIELD}.config_groups.{name}", model)
    weights = group.get("weights") or {}
    _check(weights, _WEIGHTS, f"{FIELD}.config_groups.{name}.weights", model)
    kind, size = weights.get("type"), weights.get("group_size")
    layout = group.get("format") or stated.get("format")
    if (kind, layout, size) == ("float", MXFP4_PAIRS, 32):
        format = FORMATS["mxfp4"]
    elif (kind, layout) == ("int", "pack-quantized"):
        format = WeightFormat(f"int4_g{size}", "u4", 8, size, ("bf16",), superblock=size)
    else:
        raise _unknown(model, f"config_groups.{name}.weights.type", kind, ("int", "float"))
    return Quantization(format, tuple(stated.get("ignore") or ()), layout=layout)


REQUIRED = ("weight_block_size", "fmt", "num_bits", "group_size", "strategy")
"""Fields without which nothing follows."""

_GROUP: Mapping[str, tuple | None] = {
    "targets": (["Linear"],), "weights": None, "format": ("pack-quantized", MXFP4_PAIRS, None),
    "input_activations": (None,), "output_activations": (None,),
}
_WEIGHTS: Mapping[str, tuple | None] = {
    "num_bits": (4,), "type": ("int", "float"), "group_size": (16, 32, 64, 128), "strategy": ("group",),
    "symmetric": (True,), "dynamic": (False,), "actorder": (None,), "block_structure": (None,), "observer": None,
    "observer_kwargs": None, "scale_dtype": ("torch.uint8", None), "zp_dtype": (None,),
}
KINDS: Mapping[str, tuple[Mapping[str, tuple | None], Callable[[Mapping[str, Any], str], Quantization]]] = {
    "fp8": ({"quant_method": None, "fmt": ("e4m3",), "activation_scheme": None, "weight_block_size": ([128, 128],),
             "scale_fmt": (None, "ue8m0"), "modules_to_not_convert": None, EXPERTS: ("fp8", "fp4")}, _fp8),
    "mxfp4": ({"quant_method": None, "modules_to_not_convert": None}, _mxfp4),
    "compressed-tensors": ({"quant_method": None, "config_groups": None, "ignore": None, "kv_cache_scheme": (None,),
                            "format": ("pack-quantized", MXFP4_PAIRS), "quantization_status": None,
                            "global_compression_ratio": None, "version": None, "sparsity_config": (None, {}),
                            "transform_config": (None, {})}, _compressed),
}
"""quant_method → its fields (None: any value) and what they say. FP8 in blocks (DeepSeek-V3's technical report, 3.3),
MXFP4 (OCP Microscaling 1.0) of experts alone, and compressed-tensors' packed groups of MXFP4 or int4."""
