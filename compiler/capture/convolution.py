"""Convolutions over tokens, and whatever else looks a fixed number of tokens back, raised to ``adaptc.convolve``.

    pad(x, W - 1 in front) → conv1d            conv1d(x, padding = W - 1) → [:T]            pad(x, n in front, -n behind)
    pad(x, W - 1 in front) → unfold(W)         cat(rows of the first n tokens, x[:-n])

A padded tensor is followed as what it holds at its tokens and before them (``Padded``) until it has as many elements as
there are tokens again. One that never has, or is used otherwise, stays in the graph, where the walk refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from adaptc.capture import hooks
from adaptc.capture.attention import COPIES, Inserter
from adaptc.capture.walk import key

CONVOLUTIONS = ("aten.conv1d", "aten.convolution")
PADS = ("aten.pad", "aten.constant_pad_nd")
POINTWISE = ("aten.silu", "aten.gelu", "aten.relu", "aten.sigmoid", "aten.tanh", *COPIES)
"""Operators of one operand that may stand between a convolution and the cut to the number of tokens."""

ENDLESS = 2**31
"""Integers from here on mean the end of a dimension."""


@dataclass(frozen=True)
class Padded:
    """A tensor [1,C,lead + T + trail], or with tokens along axis 1.

    rows     what it holds at tokens, [1,T,C]
    start    what it holds at each place before the first, [1,1,C]; None: 0
    """

    rows: torch.fx.Node
    axis: int
    lead: int = 0
    trail: int = 0
    start: torch.fx.Node | None = None


def raised(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with ``adaptc.convolve`` in place of convolutions over tokens and of shifts, changed in place."""
    hooks.operators()
    graph = exported.graph
    _Raising(graph).run()
    graph.eliminate_dead_code()
    exported.graph_module.recompile()
    return exported


class _Raising:
    def __init__(self, graph: torch.fx.Graph):
        self.graph = graph
        self.ids = next(n for n in graph.nodes if n.op == "placeholder" and n.name == "input_ids")
        self.tokens = self.ids.meta["val"].shape[1].node.expr
        self.padded: dict[torch.fx.Node, Padded] = {}

    def run(self) -> None:
        for node in list(self.graph.nodes):
            rule = RULES.get(key(node)) if node.op == "call_function" else None
            if rule is None:
                continue
            with self.graph.inserting_before(node):
                self.new = Inserter(self.graph, node)
                found = rule(self, node)
                if isinstance(found, Padded) and (found.lead, found.trail) == (0, 0):
                    found = self.turned(found.rows, found.axis)
            if isinstance(found, Padded):
                self.padded[node] = found
            elif found is not None:
                node.replace_all_uses_with(found)

    # ---- shapes

    def beyond(self, size: Any) -> int | None:
        """The c of a size T + c; None of another one."""
        if not isinstance(size, torch.SymInt):
            return None
        more = size.node.expr - self.tokens
        return int(more) if more.is_number else None

    def of(self, x: Any, axis: int | None = None) -> Padded | None:
        """x as a padded tensor, if it is one or has the step's tokens along ``axis``."""
        if not isinstance(x, torch.fx.Node):
            return None
        if x in self.padded:
            return self.padded[x] if axis in (None, self.padded[x].axis) else None
        value = x.meta.get("val")
        plain = isinstance(value, torch.Tensor) and value.ndim == 3 and value.shape[0] == 1 and axis in (1, 2)
        if not plain or self.beyond(value.shape[axis]) != 0 or not isinstance(value.shape[3 - axis], int):
            return None
        return Padded(self.turned(x, axis), axis)

    # ---- what is put into the graph

    def turned(self, x: torch.fx.Node, axis: int) -> torch.fx.Node:
        """Tokens along axis 1 from tokens along ``axis``, or the other way round."""
        return x if axis == 1 else self.new(torch.ops.aten.transpose.int, x, 1, 2)

    def shifted(self, rows: torch.fx.Node, back: int) -> torch.fx.Node:
        """[1,T,C] of ``back`` tokens before; 0 where there are none."""
        if back == 0:
            return rows
        value = rows.meta["val"]
        one = {"dtype": value.dtype, "device": value.device}
        taps = [self.new(torch.ops.aten.full.default, [value.shape[2], n], x, **one) for n, x in ((1, 1), (back, 0))]
        weight = self.new(torch.ops.aten.cat.default, taps, 1)
        return self.new(torch.ops.adaptc.convolve.default, rows, weight, None)

    def first(self, rows: torch.fx.Node, number: int) -> torch.fx.Node:
        """i1[1,T,1]: whether a token has this position."""
        count = self.new(torch.ops.aten.sym_size.int, self.ids, 1)
        place = self.new(torch.ops.aten.arange.default, count, device=rows.meta["val"].device)
        found = self.new(torch.ops.aten.eq.Scalar, place, number)
        return self.new(torch.ops.aten.unsqueeze.default, self.new(torch.ops.aten.unsqueeze.default, found, 0), 2)


# ---- rules: (raising, node) → the padded tensor, what replaces the node, or None


def _pad(r: _Raising, node: torch.fx.Node) -> Padded | None:
    x, pads = node.args[:2]
    rest = [*node.args[2:], *node.kwargs.values()]
    if any(a not in ("constant", 0, 0.0, None) for a in rest) or not all(isinstance(p, int) for p in pads):
        return None
    given = [i for i in range(0, len(pads), 2) if (pads[i], pads[i + 1]) != (0, 0)]
    if len(given) != 1:
        return None
    found = r.of(x, x.meta["val"].ndim - 1 - given[0] // 2)
    if found is None or found.lead or found.trail:
        return None
    lead, trail = pads[given[0]], pads[given[0] + 1]
    if lead > 0 and trail == -lead:
        return Padded(r.shifted(found.rows, lead), found.axis)
    return replace(found, lead=lead, trail=trail) if lead >= 0 else None


def _convolution(r: _Raising, node: torch.fx.Node) -> Padded | None:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups") if key(node) == "aten.conv1d" else (
        "input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups")
    given = {"bias": None, "stride": [1], "padding": [0], "dilation": [1], "groups": 1} | dict(
        zip(names, node.args)) | node.kwargs
    weight, bias, groups = given["weight"], given["bias"], given["groups"]
    around, width = given["padding"], weight.meta["val"].shape[2]
    plain = list(given["stride"]) == list(given["dilation"]) == [1] and not given.get("transposed")
    x = r.of(given["input"], 2) if plain and isinstance(around, (list, tuple)) else None
    if x is None or around[0] and (x.lead or x.trail) or x.lead + around[0] < width - 1:
        return None
    outputs = weight.meta["val"].shape[0]
    alone = groups == outputs == x.rows.meta["val"].shape[2]
    weigh = _each_channel if alone else _groups_of_channels(groups)
    aten = torch.ops.aten
    added = None if bias is None else r.new(aten.reshape.default, bias, [1, 1, outputs])
    rows, start = x.rows, added
    if x.start is not None:  # a constant before the first token: what it gives is one too, and the rest starts from 0
        rows = r.new(aten.sub.Tensor, rows, x.start)
        taps = r.new(aten.sum.dim_IntList, weight, [2], True)
        start = weigh(r, x.start, taps)
        start = start if added is None else r.new(aten.add.Tensor, start, added)
    rows = weigh(r, rows, weight)
    rows = rows if start is None else r.new(aten.add.Tensor, rows, start)
    return Padded(rows, 2, x.lead + around[0] - (width - 1), x.trail + around[0], start)


def _each_channel(r: _Raising, rows: torch.fx.Node, weight: torch.fx.Node) -> torch.fx.Node:
    """A depthwise convolution of [1,T,C] by [C,1,W]."""
    channels, _, width = weight.meta["val"].shape
    if width == 1:
        return r.new(torch.ops.aten.mul.Tensor, rows, r.new(torch.ops.aten.reshape.default, weight, [1, 1, channels]))
    flat = r.new(torch.ops.aten.reshape.default, weight, [channels, width])
    return r.new(torch.ops.adaptc.convolve.default, rows, flat, None)


def _groups_of_channels(groups: int) -> Callable[[_Raising, torch.fx.Node, torch.fx.Node], torch.fx.Node]:
    def weigh(r: _Raising, rows: torch.fx.Node, weight: torch.fx.Node) -> torch.fx.Node:
        """A convolution of [1,T,C] by [C', C / groups, W]: a product with the rows of W tokens side by side."""
        aten = torch.ops.aten
        outputs, inputs, width = weight.meta["val"].shape
        count = rows.meta["val"].shape[1]
        count = count if isinstance(count, int) else r.new(aten.sym_size.int, r.ids, 1)
        taps = (r.shifted(rows, width - 1 - i) for i in range(width))
        wide = r.new(aten.cat.default, [r.new.shaped(x, (1, count, groups, inputs)) for x in taps], 3)
        wide = r.new(aten.permute.default, wide, [0, 2, 1, 3])
        matrix = r.new(aten.reshape.default, weight, [groups, outputs // groups, inputs, width])
        matrix = r.new(aten.permute.default, matrix, [0, 3, 2, 1])
        matrix = r.new(aten.reshape.default, matrix, [1, groups, width * inputs, outputs // groups])
        result = r.new(aten.permute.default, r.new(aten.matmul.default, wide, matrix), [0, 2, 1, 3])
        return r.new.shaped(result, (1, count, outputs))

    return weigh


def _slice(r: _Raising, node: torch.fx.Node) -> Padded | None:
    x, axis, start, end, step = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
    found = r.padded.get(x)
    if found is None or axis % 3 != found.axis or step != 1:
        return None
    size = x.meta["val"].shape[found.axis].node.expr

    def place(bound: Any, default: Any) -> Any:
        """The place that a bound names, counted from the front."""
        bound = bound.meta["val"] if isinstance(bound, torch.fx.Node) else bound
        bound = bound.node.expr if isinstance(bound, torch.SymInt) else bound
        if bound is None or isinstance(bound, int) and bound >= ENDLESS:
            return default
        behind = bound < 0 if isinstance(bound, int) else bound.coeff(r.tokens) < 0
        return bound + size if behind else bound

    low, high = place(start, 0), place(end, size) - r.tokens
    if any(getattr(bound, "free_symbols", None) for bound in (low, high)) or not 0 <= low <= found.lead:
        return None
    high = min(int(high), found.lead + found.trail)
    return replace(found, lead=found.lead - int(low), trail=high - found.lead)


def _unfold(r: _Raising, node: torch.fx.Node) -> torch.fx.Node | None:
    x, axis, width, step = node.args
    found = r.padded.get(x)
    if found is None or axis % 3 != found.axis or (found.lead, found.trail, step) != (width - 1, 0, 1) or found.start:
        return None
    rows = [r.turned(r.shifted(found.rows, width - 1 - i), found.axis) for i in range(width)]
    return r.new(torch.ops.aten.stack.default, rows, 3)


def _pointwise(r: _Raising, node: torch.fx.Node) -> Padded | None:
    found = r.padded.get(node.args[0])
    if found is None or found.lead or node.meta["val"].ndim != 3:
        return None
    return replace(found, rows=r.new(node.target, found.rows, *node.args[1:], **node.kwargs), start=None)


def _joined(r: _Raising, node: torch.fx.Node) -> torch.fx.Node | None:
    """The rows of the first n tokens, then those of n tokens before each other one."""
    parts, axis = (*node.args, 0)[:2]
    if len(parts) != 2 or node.meta["val"].ndim != 3:
        return None
    head, tail = parts
    count = head.meta["val"].shape[axis]
    cut = key(tail) == "aten.slice" and r.beyond(tail.meta["val"].shape[axis]) == -count if isinstance(count, int) else False
    found = r.of(tail.args[0], axis % 3) if cut and count > 0 and tail.args[2] == 0 else None
    if found is None or found.lead or found.trail:
        return None
    rows = r.shifted(found.rows, count)
    for i in range(count):
        one = r.turned(r.new(torch.ops.aten.slice.Tensor, head, axis % 3, i, i + 1), axis % 3)
        rows = r.new(torch.ops.aten.where.self, r.first(rows, i), one, rows)
    return r.turned(rows, axis % 3)


RULES: Mapping[str, Callable[[_Raising, torch.fx.Node], Any]] = {
    **dict.fromkeys(PADS, _pad),
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    **dict.fromkeys(POINTWISE, _pointwise),
    "aten.slice": _slice,
    "aten.unfold": _unfold,
    "aten.cat": _joined,
}
