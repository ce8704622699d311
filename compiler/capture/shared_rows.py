"""Attention whose keys are its values, raised to latent attention: a row a token is kept once.

    attention(q, x, x, mask)                                    → latent_attention(q, x)
    attention(q, cat(x, entries), …, cat(mask, mask of entries)) → one latent_attention for each, put together

Each part keeps rows of its own and gives, beside its result, the logarithm of the sum of its weights. By these, results
over parts of the keys are that over all of them, and a sink is one more score (split keys,
https://arxiv.org/abs/2501.01005).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from adaptc.capture import hooks
from adaptc.capture.attention import COPIES, Inserter, Unproven, finished
from adaptc.capture.places import place_of
from adaptc.capture.walk import key

HINT = ("adaptc's attention over several kinds of rows takes, beside a token's own ones, entries that stand for windows of "
        "tokens, each with a mask of its own.")

KINDS = ("causal", "sliding")
"""Masks of a token's own rows that latent attention has."""

KEPT_APART = ("sinks",)
"""Operands of attention that need no part of it."""


@dataclass(frozen=True)
class _Part:
    """Rows [1,1,T,D], which of them a token sees, and those that it has chosen, if it has."""

    rows: torch.fx.Node
    mask: torch.fx.Node
    chosen: torch.fx.Node | None


def raised(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with ``adaptc.latent_attention`` in place of attention whose keys are its values, changed in place.
    CaptureError naming every attention over parts that aren't rows of tokens and entries."""
    graph, problems = exported.graph, []
    for node in [node for node in graph.nodes if key(node) == "adaptc.attention"]:
        _, k, v, mask, _, names, _, window, softcap = node.args
        mask = _plain(mask)
        several = key(mask) == "aten.cat"
        wide = k.meta["val"].shape[1] != 1 or softcap or {*names} - {*KEPT_APART} or k is not v
        if not several and (wide or key(mask) != "adaptc.mask" or mask.args[2] not in KINDS):
            continue
        try:
            if wide:
                raise Unproven("it has several heads of keys, values of their own, or more than sinks beside them")
            _replace(graph, node, _parts(k, mask, window) if several else [_part(k, mask, window)])
        except Unproven as reason:
            problems.append(f"{node.target} in {place_of(node)} isn't attention over rows and entries that adaptc has: "
                            f"{reason}")
    return finished(exported, problems, HINT)


def _plain(node: torch.fx.Node) -> torch.fx.Node:
    while key(node) in COPIES:
        node = node.args[0]
    return node


def _parts(rows: torch.fx.Node, mask: torch.fx.Node, window: int) -> list[_Part]:
    rows = _plain(rows)
    if key(rows) != "aten.cat" or rows.args[1:] not in ((2,), (-2,)) or mask.args[1:] not in ((-1,), (3,)):
        raise Unproven(f"its mask has parts and its keys come of {rows.target} in {place_of(rows)}")
    if len(rows.args[0]) != len(mask.args[0]):
        raise Unproven(f"its keys have {len(rows.args[0])} parts and its mask {len(mask.args[0])}")
    return [_part(*pair, window) for pair in zip(rows.args[0], mask.args[0])]


def _part(rows: torch.fx.Node, mask: torch.fx.Node, window: int) -> _Part:
    mask = _plain(mask)
    if key(mask) == "adaptc.entries":
        return _Part(rows, mask, mask.args[1])
    if key(mask) != "adaptc.mask" or mask.args[2] not in KINDS:
        raise Unproven(f"a part of its mask comes of {mask.target} in {place_of(mask)}")
    if window not in (0, mask.args[3]):
        raise Unproven(f"it is given a window of {window} and a mask with one of {mask.args[3]}")
    return _Part(rows, mask, None)


def _replace(graph: torch.fx.Graph, node: torch.fx.Node, parts: Sequence[_Part]) -> None:
    hooks.operators()
    aten, ours = torch.ops.aten, torch.ops.adaptc
    q, _, _, _, sinks, _, scaling, _, _ = node.args
    with graph.inserting_before(node):
        new = Inserter(graph, node)
        results = []
        for part in parts:
            both = new(ours.latent_attention.default, q, part.rows, part.mask, part.chosen, scaling)
            results.append([new(operator.getitem, both, i) for i in range(2)])
        whole = results[0][0]
        if len(results) > 1 or sinks:
            scores = [lse for _, lse in results] + list(sinks)
            top = scores[0]
            for score in scores[1:]:
                top = new(aten.maximum.default, top, score)
            weights = [new(aten.exp.default, new(aten.sub.Tensor, score, top)) for score in scores]
            total = weights[0]
            for weight in weights[1:]:
                total = new(aten.add.Tensor, total, weight)
            whole = None
            for (result, _), weight in zip(results, weights):
                share = new(aten.unsqueeze.default, new(aten.div.Tensor, weight, total), -1)
                weighed = new(aten.mul.Tensor, result, share)
                whole = weighed if whole is None else new(aten.add.Tensor, whole, weighed)
        out = node.meta["val"].dtype
        whole = whole if whole.meta["val"].dtype == out else new(aten.to.dtype, whole, out)
    node.replace_all_uses_with(whole)
    graph.erase_node(node)

