"""Values of a traced graph that follow from numbers alone, computed as the graph is read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

MOST = 1 << 16
"""Elements of the largest value that is computed."""


def name_of(node: torch.fx.Node) -> str:
    """The node's operator as tables spell it: ``aten.add``, without the overload."""
    target = node.target
    return str(target.overloadpacket) if isinstance(target, torch._ops.OpOverload) else getattr(
        target, "__name__", str(target))


def is_function(node: torch.fx.Node) -> bool:
    """Whether an operator gives the same for the same operands."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return name_of(node) == "getitem"
    return torch.Tag.nondeterministic_seeded not in node.target.tags and (
        node.target.namespace == "aten" or name_of(node) in ("adaptc.mask", "adaptc.constant"))


def constant(values: list[float], shape: list[int], dtype: torch.dtype, *_: Any) -> torch.Tensor:
    """What ``adaptc.constant`` gives, on the CPU."""
    return torch.tensor(values, dtype=torch.float64).reshape(list(shape)).to(dtype)


def compute(graph: torch.fx.Graph, nodes: Iterable[torch.fx.Node]) -> None:
    """Puts ``adaptc.constant`` in the place of those of ``nodes`` that follow from numbers alone."""
    memo: dict[torch.fx.Node, torch.Tensor | None] = {}
    for node in nodes:
        if (value := _value(node, memo)) is None:
            continue
        given = ([float(x) for x in value.reshape(-1).tolist()], list(value.shape), value.dtype, node.meta["val"].device)
        with graph.inserting_before(node):
            new = graph.call_function(torch.ops.adaptc.constant.default, given)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    graph.eliminate_dead_code()


def _value(node: torch.fx.Node, memo: dict[torch.fx.Node, torch.Tensor | None]) -> torch.Tensor | None:
    if node not in memo:
        memo[node] = _computed(node, memo)
    return memo[node]


def _computed(node: torch.fx.Node, memo: dict[torch.fx.Node, torch.Tensor | None]) -> torch.Tensor | None:
    meta = node.meta.get("val")
    if node.op != "call_function" or not isinstance(meta, torch.Tensor) or not is_function(node):
        return None
    if not all(isinstance(d, int) for d in meta.shape) or meta.numel() > MOST or name_of(node) == "adaptc.mask":
        return None
    leaves, tree = pytree.tree_flatten((node.args, node.kwargs))
    given = [_value(leaf, memo) if isinstance(leaf, torch.fx.Node) else leaf for leaf in leaves]
    if any(isinstance(leaf, torch.fx.Node) and value is None for leaf, value in zip(leaves, given)):
        return None
    cpu = torch.device("cpu")
    args, kwargs = pytree.tree_unflatten([cpu if isinstance(x, torch.device) else x for x in given], tree)
    return constant(*args) if name_of(node) == "adaptc.constant" else node.target(*args, **kwargs)
