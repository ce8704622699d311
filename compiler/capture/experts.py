"""Experts that are computed for every token and then mostly multiplied by 0, raised to what their choices alone give.

    chosen = topk(scores [T, E]).indices                     score = 0 for the others: scatter, then sigmoid, say
    x = hidden.repeat(E, 1) * score.T.reshape(-1, 1)         [E·T, K], or [E, T, K]
    sum over experts of f(x.view(E, T, K) @ weight [E, K, N]) …

A value [E, T, …] of the region between the choice and the sum is followed as two: what it is at each token's k choices,
[T, k, …], and the one number that it is everywhere else, where that is known. A number is known of what the scatter
writes into, of elementwise operators on known numbers, and where 0 is multiplied: a product with weights, without bias,
keeps it. Where the sum's operand is 0 but at the choices, it is the sum over them, of ``adaptc::expert_linear`` by the
weights of each. Scores may so stand before or after the experts, which isn't the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from adaptc.capture import hooks
from adaptc.capture.attention import COPIES, VIEWS, Inserter, drop_checks
from adaptc.capture.constants import name_of as key
from adaptc.capture.functional import functional

PRODUCTS = ("aten.bmm", "aten.matmul")
TURNS = ("aten.transpose", "aten.permute", "aten.t", "aten.numpy_T")
PIECES = ("aten.split", "aten.split_with_sizes", "aten.chunk")
FILLS = {"aten.full_like": 1, "aten.full": 1, "aten.new_full": 2, "aten.zeros_like": 0, "aten.zeros": 0, "aten.new_zeros": 0}
"""Tensors of one number → the place of the number among their arguments, 0 for zeros."""


class _Dense(Exception):
    """Experts that aren't known to matter at their choices alone."""


@dataclass(frozen=True)
class _Chosen:
    """A value at each token's choices, ``node`` [T, k or 1, …], and elsewhere: ``other``, None for what isn't known."""

    node: Any
    other: float | None


def routed(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with only what is chosen computed of experts that it computes for every token, changed in place.
    What isn't proved to be the same stays."""
    if not any(key(node) in PRODUCTS and _is_stack(node) for node in exported.graph.nodes):
        return exported
    exported = functional(exported)
    graph = exported.graph
    drop_checks(graph)
    for node in [node for node in graph.nodes if key(node) == "aten.sum" and list(node.args[1:]) == [[0]]]:
        try:
            region = _Region(graph, node)
            found = region.at(node.args[0])
            if found.other != 0:
                continue
            with graph.inserting_before(node):
                total = Inserter(graph, node)(torch.ops.aten.sum.dim_IntList, found.node, [1], **node.kwargs)
            node.replace_all_uses_with(total)
        except (_Dense, RuntimeError):  # torch's, of shapes that don't meet
            continue
    graph.eliminate_dead_code()
    exported.graph_module.recompile()
    return exported


def _is_stack(node: torch.fx.Node) -> bool:
    """Whether a product is one of rows [E, T, K] and a stack of weights [E, K, N]."""
    x, weight = (n.meta["val"].shape for n in node.args)
    static = all(isinstance(d, int) for d in weight)
    return static and len(x) == len(weight) == 3 and isinstance(x[0], int) and isinstance(x[1], torch.SymInt)


class _Region:
    """What leads to a sum over experts, of [E, T, …]."""

    def __init__(self, graph: torch.fx.Graph, total: torch.fx.Node):
        hooks.operators()
        self.graph, self.total = graph, total
        count, tokens, *_ = (*total.args[0].meta["val"].shape, None, None)
        if not isinstance(count, int) or not isinstance(tokens, torch.SymInt):
            raise _Dense
        self.count, self.tokens = count, tokens.node.expr
        self.memo: dict[torch.fx.Node, _Chosen] = {}
        choices = {node.args[2] for node in self._before(total.args[0]) if key(node) == "aten.scatter"}
        if len(choices) != 1:
            raise _Dense
        (self.choices,) = choices
        made = self.choices
        while key(made) in COPIES:
            made = made.args[0]
        if key(made) != "getitem" or key(made.args[0]) != "aten.topk" or made.args[1] != 1:
            raise _Dense  # of which no token is known to choose an expert once at most

    def _before(self, node: torch.fx.Node) -> set[torch.fx.Node]:
        """``node`` and all that it comes of whose elements belong to an expert and a token."""
        found, waiting = set(), [node]
        while waiting:
            node = waiting.pop()
            if node not in found and self._rest(node) is not None:
                found.add(node)
                waiting += node.all_input_nodes
        return found

    # ---- shapes

    def _is_tokens(self, dim: Any, times: int = 1) -> bool:
        return isinstance(dim, torch.SymInt) and dim.node.expr == self.tokens * times

    def _rest(self, node: torch.fx.Node) -> tuple | None:
        """The dimensions behind those of experts and tokens; None where there aren't both."""
        value = node.meta.get("val")
        shape = tuple((value[0] if isinstance(value, (list, tuple)) else value).shape) if value is not None and not (
            isinstance(value, torch.SymInt)) else ()
        if self._is_tokens(shape[0] if shape else None, self.count):
            return shape[1:]
        if len(shape) >= 2 and shape[0] == self.count and self._is_tokens(shape[1]):
            return shape[2:]
        return () if self._by_token(node) else None

    def _by_token(self, node: torch.fx.Node) -> bool:
        """Whether it is [T, E]: scores."""
        value = node.meta.get("val")
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        return len(shape) == 2 and shape[1] == self.count and self._is_tokens(shape[0])

    # ---- values

    def at(self, node: torch.fx.Node) -> _Chosen:
        """``node``, whose elements belong to an expert and a token, at the choices."""
        if node not in self.memo:
            with self.graph.inserting_before(self.total):
                self.memo[node] = self._made(node, Inserter(self.graph, self.total))
        return self.memo[node]

    def _made(self, node: torch.fx.Node, new: Inserter) -> _Chosen:
        name, rest = key(node), self._rest(node)
        if rest is None:
            raise _Dense
        if name == "aten.scatter":
            return self._written(node, new)
        if name in PRODUCTS and _is_stack(node):
            x = self.at(node.args[0])
            rows = new(torch.ops.aten.squeeze.dim, x.node, 1) if x.node.meta["val"].shape[1] == 1 else x.node
            product = new(torch.ops.adaptc.expert_linear.default, rows, self.choices, node.args[1], None, True)
            return _Chosen(product, 0.0 if x.other == 0 else None)
        if name in TURNS and len(node.meta["val"].shape) == 2 and self._by_token(node.args[0]):
            return self.at(node.args[0])
        if name in ("aten.repeat", "aten.expand"):
            return self._for_all(node, new)
        if name in (*VIEWS, "aten.clone", "aten.contiguous") and not self._by_token(node):
            if self._by_token(node.args[0]):
                raise _Dense  # tokens first, in one dimension with experts
            x = self.at(node.args[0])
            shape = [-1, x.node.meta["val"].shape[1], *rest]
            same = x.node.meta["val"].shape[2:] == torch.Size(rest)
            return _Chosen(x.node if same else new(torch.ops.aten.reshape.default, x.node, shape), x.other)
        if name in PIECES:
            dim = self._behind(node, node.args[0], node.args[2] if len(node.args) > 2 else 0)
            x = self.at(node.args[0])
            return _Chosen(new(node.target, x.node, node.args[1], dim), x.other)
        if name == "aten.slice":
            dim = self._behind(node, node.args[0], node.args[1])
            x = self.at(node.args[0])
            return _Chosen(new(node.target, x.node, dim, *node.args[2:]), x.other)
        if name == "getitem":
            x = self.at(node.args[0])
            value = self.graph.call_function(node.target, (x.node, node.args[1]))
            value.meta = {**x.node.meta, "val": x.node.meta["val"][node.args[1]]}
            return _Chosen(value, x.other)
        pointwise = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
        if pointwise or name in COPIES:
            return self._elementwise(node, new)
        if self._by_token(node):
            return _Chosen(new(torch.ops.aten.gather.default, node, 1, self.choices), None)
        raise _Dense

    def _written(self, node: torch.fx.Node, new: Inserter) -> _Chosen:
        """``scatter``: what is written at the choices, and elsewhere the number that it is written over."""
        base, dim, index, source = node.args
        if index is not self.choices or dim not in (1, -1) or not self._by_token(node):
            raise _Dense
        if not isinstance(source, torch.fx.Node):
            kind = node.meta["val"].dtype
            source = new(torch.ops.aten.full_like.default, index, source, dtype=kind)
        place = FILLS.get(key(base))
        return _Chosen(source, None if place is None else float(base.args[place]) if place else 0.0)

    def _for_all(self, node: torch.fx.Node, new: Inserter) -> _Chosen:
        """What is the same for all experts: [T, K] repeated, or [1, T, K]."""
        x = node.args[0]
        shape, times = x.meta["val"].shape, list(node.args[1])
        if self._is_tokens(shape[0]) and key(node) == "aten.repeat" and times == [self.count] + [1] * (len(shape) - 1):
            return _Chosen(new(torch.ops.aten.unsqueeze.default, x, 1), None)
        own = tuple(node.meta["val"].shape)
        if len(shape) >= 2 and shape[0] == 1 and self._is_tokens(shape[1]) and len(own) == len(shape) and (
                list(shape[2:]) == list(own[2:])):
            return _Chosen(self._shared(x, new), None)
        raise _Dense

    def _shared(self, x: torch.fx.Node, new: Inserter) -> torch.fx.Node:
        """x[1, T, …] as [T, 1, …]."""
        return new(torch.ops.aten.transpose.int, x, 0, 1)

    def _behind(self, node: torch.fx.Node, x: torch.fx.Node, dim: int) -> int:
        """A dimension behind those of experts and tokens, counted from the last one."""
        rank, rest = len(x.meta["val"].shape), self._rest(x)
        if self._by_token(x) or rest is None or dim % rank < rank - len(rest):
            raise _Dense
        return dim % rank - rank

    def _elementwise(self, node: torch.fx.Node, new: Inserter) -> _Chosen:
        others: list[Any] = []

        def given(leaf: Any) -> Any:
            if not isinstance(leaf, torch.fx.Node):
                others.append(leaf)
                return leaf
            found = self._operand(leaf, node, new)
            others.append(found.other)
            return found.node

        args = pytree.tree_map(given, tuple(node.args))
        return _Chosen(new(node.target, *args, **node.kwargs), _elsewhere(node, others))

    def _operand(self, x: torch.fx.Node, node: torch.fx.Node, new: Inserter) -> _Chosen:
        """An operand of the elementwise ``node`` at the choices."""
        if self._rest(x) is not None:
            return self.at(x)
        shape, rank = tuple(x.meta["val"].shape), len(node.meta["val"].shape)
        behind = len(self._rest(node))
        if self._by_token(node):
            if len(shape) == 2 and self._is_tokens(shape[0]) and shape[1] == 1 or math.prod(shape) == 1:
                return _Chosen(x, None)
        elif len(shape) <= behind:
            return _Chosen(x, None)
        elif len(shape) == rank == behind + 2 and shape[0] == 1 and self._is_tokens(shape[1]):
            return _Chosen(self._shared(x, new), None)
        raise _Dense


def _elsewhere(node: torch.fx.Node, others: list[Any]) -> float | None:
    """The number that an elementwise operator gives where its operands are ``others``."""
    name = key(node)
    if name in COPIES:
        return others[0]
    finite = not any(isinstance(other, float) and not math.isfinite(other) for other in others)
    if finite and (name == "aten.mul" and 0.0 in others or name == "aten.div" and others[0] == 0.0):
        return 0.0
    if any(other is None for other in others) or len(others) != len(node.args):
        return None
    given = [torch.tensor(float(other)) if isinstance(arg, torch.fx.Node) else other
             for arg, other in zip(node.args, others)]
    return float(node.target(*given, **node.kwargs))
