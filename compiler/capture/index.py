"""The index of sparse attention, raised to the operator that stands for it.

    scores = Σ over heads of weight · relu(q·kᵀ · a) → causal mask → top-k → ``adaptc.attention``'s rows

(DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, and families after it.) The mask is decided by its elements, as that of
attention that is written out is. The chosen positions may go to attention alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._sympy.functions import Min

from adaptc.capture import hooks
from adaptc.capture.attention import (AFFINE, COPIES, PRODUCTS, VIEWS, Inserter, Masks, Unproven, drop_checks,
                                      finished, is_of_pairs, pairs_stay)
from adaptc.capture.functional import functional
from adaptc.capture.places import place_of
from adaptc.capture.walk import key

HINT = ("adaptc's index sums weight · relu(q·k) over its heads, looks at all tokens before one, and gives what it chooses "
        "to attention alone.")

CUT = ("aten.relu", "aten.clamp_min")
"""Operators that make negative products 0."""


@dataclass(frozen=True)
class Found:
    """One index: query[1, T, H, D], keys[1, 1, D, T], weights[1, T, 1, H]; ``taken`` are the chosen positions as
    attention gets them."""

    choice: torch.fx.Node
    query: torch.fx.Node
    keys: torch.fx.Node
    weights: torch.fx.Node
    scaling: float
    top_k: int
    taken: tuple[torch.fx.Node, ...]


def indexed(exported: torch.export.ExportedProgram, constants: Mapping[str, torch.Tensor],
            context: int) -> torch.export.ExportedProgram:
    """The program with ``adaptc.index_rows`` in place of every choice among all pairs of tokens, changed in place.

    constants   buffers, by name, that no file stores; context: most tokens of a sequence, 0 if it isn't known.
    CaptureError naming every such choice that is made in another way.
    """
    if not any(_is_choice(node) for node in exported.graph.nodes):
        return exported
    exported = functional(exported)
    graph, problems = exported.graph, []
    drop_checks(graph)
    masks = Masks(exported, constants, context)
    for node in [node for node in graph.nodes if _is_choice(node)]:
        try:
            _replace(graph, _found(node, masks, context))
        except Unproven as reason:
            problems.append(f"{node.target} in {place_of(node)} isn't an index that adaptc has: {reason}")
    return finished(exported, problems, HINT)


def _is_choice(node: torch.fx.Node) -> bool:
    return key(node) == "aten.topk" and is_of_pairs(node.args[0].meta["val"].shape)


def _found(choice: torch.fx.Node, masks: Masks, context: int) -> Found:
    if len(choice.args) > 2 and choice.args[2] not in (-1, len(choice.args[0].meta["val"].shape) - 1):
        raise Unproven("it chooses among the tokens that look, not among those that are seen")
    node, chain = choice.args[0], []
    while key(node) in AFFINE:
        data = [source for source in node.all_input_nodes if not masks.fixed(source)]
        if len(data) != 1:
            raise Unproven(f"its scores meet what depends on tokens in {place_of(node)}")
        if key(node) in VIEWS and not pairs_stay(data[0], node):
            break
        chain.insert(0, node)
        node = data[0]
    if not all(choice.args[3:4]) or not choice.kwargs.get("largest", True):
        raise Unproven("it chooses the smallest scores")
    rule = masks.rule(node, chain)
    if rule.slopes:
        raise Unproven("a bias by distance is added to its scores")
    if rule.window or rule.scaling <= 0:
        raise Unproven("it looks at some of the tokens before one" if rule.window else "it chooses the smallest scores")
    weights, scores = _weighed(node)
    query, keys, scaling = _scored(scores)
    return Found(choice, query, keys, weights, scaling, _count(choice.args[1], context), tuple(_taken(choice)))


def _weighed(node: torch.fx.Node) -> tuple[torch.fx.Node, torch.fx.Node]:
    """The heads' weights [1, T, 1, H] and their scores [1, T, H, T], of the sum over heads."""
    if key(node) in VIEWS:
        node = node.args[0]
    if key(node) in PRODUCTS and len(node.args) == 2:
        weights, scores = node.args
        (*_, one, heads), shape = weights.meta["val"].shape, scores.meta["val"].shape
        if len(shape) == 4 and one == 1 and shape[-2] == heads and len(weights.meta["val"].shape) == 4:
            return weights, scores
    raise Unproven(f"its scores are {node.target} in {place_of(node)}, not a sum over heads of products with weights")


def _scored(node: torch.fx.Node) -> tuple[torch.fx.Node, torch.fx.Node, float]:
    """Query, keys and factor of scores, relu(q·kᵀ · factor)."""
    scaling, cut = 1.0, False
    while key(node) not in PRODUCTS:
        name, operands = key(node), node.args
        number = operands[1] if len(operands) > 1 and isinstance(operands[1], (int, float)) else None
        if name in CUT and not number:
            cut = True
        elif name in ("aten.mul", "aten.div") and number is not None and number > 0:
            scaling *= number if name == "aten.mul" else 1 / number
        elif name not in COPIES:
            raise Unproven(f"its scores go through {node.target} in {place_of(node)}")
        node = operands[0]
    query, keys = node.args[-2:]
    if not cut or len(query.meta["val"].shape) != 4 or tuple(keys.meta["val"].shape[:2]) != (1, 1):
        raise Unproven(f"its scores are {node.target} in {place_of(node)} of {tuple(query.meta['val'].shape)} and "
                       f"{tuple(keys.meta['val'].shape)}" + ("" if cut else ", negative ones too"))
    return query, keys, scaling


def _count(given: Any, context: int) -> int:
    """How many tokens are chosen where there are as many: k of min(k, T)."""
    if isinstance(given, int):
        return given
    expression = given.meta["val"].node.expr
    numbers = [int(a) for a in expression.args if a.is_Integer] if isinstance(expression, Min) else []
    if len(numbers) == 1 and len(expression.args) == 2:
        return numbers[0]
    if expression.is_Symbol and context:
        return context
    raise Unproven(f"it chooses {expression} tokens")


def _taken(choice: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The chosen positions, and casts of them, as attention reads them."""
    for part in choice.users:
        if part.args[1] != 1:
            raise Unproven("the scores that it chooses are used too")
        waiting = [part]
        while waiting:
            node = waiting.pop()
            readers = [user for user in node.users if key(user) not in COPIES]
            for user in readers:
                if key(user) != "adaptc.attention":
                    raise Unproven(f"what it chooses goes through {user.target} in {place_of(user)}")
            if readers:
                yield node
            waiting += [user for user in node.users if key(user) in COPIES]


def _replace(graph: torch.fx.Graph, found: Found) -> None:
    hooks.operators()
    with graph.inserting_before(found.choice):
        new = Inserter(graph, found.choice.args[0])
        keys = new(torch.ops.aten.squeeze.dim, new(torch.ops.aten.transpose.int, found.keys, -2, -1), 1)
        weights = new(torch.ops.aten.squeeze.dim, found.weights, 2)
        rows = new(torch.ops.adaptc.index_rows.default, found.query, keys, weights, found.top_k, found.scaling)
    for node in found.taken:
        node.replace_all_uses_with(rows)
