"""The ``adaptc`` dialect's types and attributes, and the bridge between MLIR and plain Python values.

Types. A tensor with dynamic dimensions names them: ``tensor<?x576xf32, #adaptc.dims<["T", "_"]>>`` ("_" for static
ones). A weight's type says how it is stored: ``tensor<576x576xf32, #adaptc.packed<{codes = "u4", ...}>>`` is float32
in meaning and packed in memory. A state's type is its contract: ``!adaptc.state<{kind = "rows", ...}>``.

Besides the table's operators the dialect has, in a module: ``adaptc.weight`` and ``adaptc.state_slot`` (module-level
declarations by ``sym_name``), ``adaptc.get`` (their value in a function, by ``symbol``), and ``adaptc.yield``.
"""

from __future__ import annotations

import sys
import types
from functools import cache, lru_cache
from typing import Any

import numpy as np
from torch_mlir import ir

from adaptc.errors import LegalityError
from adaptc.formats import FORMATS, WeightFormat
from adaptc.plan import STATE_KINDS
from adaptc.protocol import StateSpec, TensorSpec


def context() -> ir.Context:
    """A fresh MLIR context for the dialect. Single-threaded, so that diagnostics keep their order.

    The dialect's definition is the operator table and its verifier ``legality.check``, not IRDL: IRDL's variadic
    operands must all have one type, and most of our variadic operators (merged projections, groups) mix types.
    """
    # the bindings look for a Python module of the dialect at every operation they show; not finding one costs 35 µs
    sys.modules.setdefault("torch_mlir.dialects.adaptc", types.ModuleType("torch_mlir.dialects.adaptc"))
    result = ir.Context()
    result.enable_multithreading(False)
    result.allow_unregistered_dialects = True
    return result


# ---- attributes


def to_attr(value: Any) -> ir.Attribute:
    """A plain Python value as an attribute; numpy arrays of numbers become nested arrays."""
    if isinstance(value, ir.Attribute):
        return value
    if isinstance(value, (bool, np.bool_)):
        return ir.BoolAttr.get(bool(value))
    if isinstance(value, (int, np.integer)):
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), int(value))
    if isinstance(value, (float, np.floating)):
        return ir.FloatAttr.get(ir.F64Type.get(), float(value), loc=ir.Location.unknown())
    if isinstance(value, str):
        return ir.StringAttr.get(value)
    if isinstance(value, np.ndarray):
        return to_attr(value.tolist())
    if isinstance(value, (tuple, list)):
        return ir.ArrayAttr.get([to_attr(v) for v in value])
    if isinstance(value, dict):
        return ir.DictAttr.get({k: to_attr(v) for k, v in value.items()})
    raise TypeError(f"no attribute for {value!r}")


def from_attr(attr: ir.Attribute) -> Any:
    """The plain Python value of an attribute; arrays become tuples."""
    if isinstance(attr, ir.BoolAttr):
        return attr.value
    if isinstance(attr, (ir.IntegerAttr, ir.FloatAttr, ir.StringAttr)):
        return attr.value
    if isinstance(attr, ir.ArrayAttr):
        return tuple(from_attr(a) for a in attr)
    if isinstance(attr, ir.DictAttr):
        return {named.name: from_attr(named.attr) for named in attr}
    if isinstance(attr, ir.FlatSymbolRefAttr):
        return attr.value
    if isinstance(attr, ir.TypeAttr):
        return attr.value
    raise LegalityError(f"attribute {attr} has a kind that adaptc operators don't use.")


def attrs(op) -> dict[str, Any]:
    """An operation's own attributes, without the notes beside them."""
    named = op.operation.attributes
    return {n: from_attr(named[n]) for n in named if n not in NOTES}


LOWERED = ("kernels", "scratch", "buffers", "frame")
"""What the lowered stage notes on operations."""

NOTES = ("source", *LOWERED)
"""Attributes that any operation may carry beside its row's: where it comes from, and what lowering decided."""


def _inner(text: str, prefix: str) -> Any:
    return from_attr(ir.Attribute.parse(text[len(prefix) + 1 : -1]))


# ---- types

_ELEMENT = {name: name for name in ("f64", "f32", "f16", "bf16", "i64", "i32", "i8", "i1")} | {"u8": "ui8"}
_DTYPE = {element: dtype for dtype, element in _ELEMENT.items()}


def format_to_dict(fmt: WeightFormat) -> dict[str, Any]:
    return {
        "codes": fmt.codes, "zero": fmt.zero, "group": (1, fmt.group), "scale": fmt.scale, "minimum": fmt.minimum,
        "min_sign": fmt.min_sign, "superblock": fmt.superblock,
    } | ({"values": fmt.values} if fmt.values else {})


_BY_STRUCTURE = {tuple(sorted((k, v) for k, v in format_to_dict(f).items())): f for f in FORMATS.values()}


def _format_from_dict(data: dict[str, Any]) -> WeightFormat:
    key = tuple(sorted((k, v) for k, v in data.items() if k != "tile"))
    if key not in _BY_STRUCTURE:
        raise LegalityError(f"packed weight type {data} matches none of the formats {', '.join(FORMATS)}.")
    return _BY_STRUCTURE[key]


def to_type(spec: TensorSpec | StateSpec, tile: str = "") -> ir.Type:
    """The MLIR type of a spec; ``tile`` names the order a backend packs a weight in (layout stage)."""
    if isinstance(spec, StateSpec):
        contract = {"kind": spec.kind, "parts": spec.parts, "dtype": spec.dtype, "window": spec.window}
        if spec.scale:
            contract["scale"] = spec.scale
        if spec.page_size:
            contract |= {"page_size": spec.page_size, "key_block": spec.key_block, "max_pages": spec.max_pages}
        return ir.Type.parse(f"!adaptc.state<{to_attr(contract)}>")
    encoding = ""
    if spec.format is not None:
        data = format_to_dict(spec.format) | ({"tile": tile} if tile else {})
        encoding = f", #adaptc.packed<{to_attr(data)}>"
    elif any(isinstance(d, str) for d in spec.shape):
        names = [d if isinstance(d, str) else "_" for d in spec.shape]
        encoding = f", #adaptc.dims<{to_attr(names)}>"
    shape = "".join(f"{'?' if isinstance(d, str) else d}x" for d in spec.shape)
    return ir.Type.parse(f"tensor<{shape}{_ELEMENT[spec.dtype]}{encoding}>")


@lru_cache(maxsize=1024)  # printing a type takes longer than finding it here; few, as each keeps its context alive
def to_spec(kind: ir.Type) -> TensorSpec | StateSpec:
    """The spec that a type states; LegalityError when it isn't a type of the dialect."""
    return _parse_spec(str(kind))


@cache
def _parse_spec(text: str) -> TensorSpec | StateSpec:
    with _reader():
        return _spec_of(ir.Type.parse(text), text)


@cache
def _reader() -> ir.Context:
    """One context for reading types: making one takes 5 ms."""
    return context()


def _spec_of(kind: ir.Type, text: str) -> TensorSpec | StateSpec:
    if text.startswith("!adaptc.state<"):
        c = _inner(text, "!adaptc.state")
        if c.get("kind") not in STATE_KINDS:
            raise LegalityError(f"type {text}: a state's kind is {' or '.join(map(repr, STATE_KINDS))}.")
        return StateSpec(c["parts"], c["dtype"], c["window"], c.get("page_size", 0), c.get("key_block", 0),
                         c.get("max_pages", 0), c.get("scale", ""), c["kind"])
    if not isinstance(kind, ir.RankedTensorType):
        raise LegalityError(f"type {text} is neither a ranked tensor nor a state.")
    tensor = ir.RankedTensorType(kind)
    shape: list[int | str] = [-1 if tensor.is_dynamic_dim(i) else tensor.get_dim_size(i) for i in range(tensor.rank)]
    fmt = None
    encoding = "" if tensor.encoding is None else str(tensor.encoding)
    if encoding.startswith("#adaptc.dims<"):
        names = _inner(encoding, "#adaptc.dims")
        if len(names) != len(shape) or any((n == "_") != (d != -1) for n, d in zip(names, shape)):
            raise LegalityError(f"type {text}: a name for each dynamic dimension and '_' for each static one.")
        shape = [n if d == -1 else d for n, d in zip(names, shape)]
    elif encoding.startswith("#adaptc.packed<"):
        fmt = _format_from_dict(_inner(encoding, "#adaptc.packed"))
    elif encoding:
        raise LegalityError(f"type {text}: a tensor's encoding is #adaptc.dims or #adaptc.packed.")
    if -1 in shape:
        raise LegalityError(f"type {text}: every dynamic dimension needs a name (#adaptc.dims).")
    element = str(tensor.element_type)
    if element not in _DTYPE:
        raise LegalityError(f"type {text}: elements are {', '.join(_DTYPE)}.")
    return TensorSpec(_DTYPE[element], tuple(shape), fmt)


def tile_of(kind: ir.Type) -> str:
    """The packing order a weight's type states, "" before the layout stage."""
    return _parse_tile(str(ir.RankedTensorType(kind).encoding))


@cache
def _parse_tile(encoding: str) -> str:
    if not encoding.startswith("#adaptc.packed<"):
        return ""
    with _reader():
        return _inner(encoding, "#adaptc.packed").get("tile", "")
