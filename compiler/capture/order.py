"""A traced graph's nodes in an order that depends on nothing but the graph.

A trace's own order is the order in which Python ran: modelling code that loops over a set gives another one in every
process. Here the calls within each module call, and its own operators, stand as late as their first use allows, and
operands in their order; module calls stay whole. Nodes that the output doesn't need are left out.
"""

from __future__ import annotations

from typing import Iterator

import torch

from adaptc.capture.places import PREFIX

Call = tuple[str, str]
"""A module call on a node's stack: torch's key (a further call of a module ends in @n) and the module's path."""


def ordered(graph: torch.fx.Graph) -> list[tuple[torch.fx.Node, str]]:
    """Operators with the path of their module call, e.g. model.layers.0.mlp; a module's second call within the same
    call around it is named model.layers.0@1."""
    nodes = [n for n in needed(graph) if n.op == "call_function"]
    paths = _Paths()
    return [(node, paths.of(_stack(node))) for node in _arranged(nodes, 0)]


def needed(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The nodes that the output needs, itself among them, in the graph's order."""
    found = {node for node in graph.nodes if node.op == "output"}
    for node in reversed(graph.nodes):
        if node in found:
            found.update(node.all_input_nodes)
    return [node for node in graph.nodes if node in found]


def _stack(node: torch.fx.Node) -> tuple[Call, ...]:
    """Module calls around a node, from the authors' module inwards."""
    calls = [(key, name) for key, (name, _) in (node.meta.get("nn_module_stack") or {}).items()]
    return tuple((key, name) for key, name in calls if name == PREFIX or name.startswith(f"{PREFIX}."))


def _arranged(nodes: list[torch.fx.Node], depth: int) -> Iterator[torch.fx.Node]:
    """The nodes of one module call, the calls within it arranged themselves: scheduled backwards, depth first."""
    items = _items(nodes, depth)
    home = {node: item for item, members in enumerate(items) for node in members}
    uses = [_sources(members, home, item) for item, members in enumerate(items)]
    waiting = [0] * len(items)
    for sources in uses:
        for source in sources:
            waiting[source] += 1
    ready = [item for item, count in enumerate(waiting) if not count]
    backwards = []
    while ready:
        item = ready.pop()
        backwards.append(item)
        for source in uses[item]:
            waiting[source] -= 1
            if not waiting[source]:
                ready.append(source)
    assert len(backwards) == len(items), "a trace runs a module call in one piece"
    for item in reversed(backwards):
        members = items[item]
        yield from members if len(members) == 1 else _arranged(members, depth + 1)


def _items(nodes: list[torch.fx.Node], depth: int) -> list[list[torch.fx.Node]]:
    """Nodes by the call they are in at ``depth``; an operator of the surrounding call itself stands alone."""
    items: dict[object, list[torch.fx.Node]] = {}
    for node in nodes:
        stack = _stack(node)
        items.setdefault(stack[depth] if len(stack) > depth else node, []).append(node)
    return list(items.values())


def _sources(members: list[torch.fx.Node], home: dict[torch.fx.Node, int], item: int) -> list[int]:
    """Items that these nodes read, in the order of first use."""
    inputs = (source for node in members for source in node.all_input_nodes)
    return list(dict.fromkeys(home[source] for source in inputs if home.get(source, item) != item))


class _Paths:
    """Paths of module calls, numbered in the order in which they are asked for."""

    def __init__(self):
        self.calls: dict[tuple[str, str], list[str]] = {}

    def of(self, stack: tuple[Call, ...]) -> str:
        path, around = "", ""
        for key, name in stack:
            step = name.removeprefix(around).removeprefix(".")
            seen = self.calls.setdefault((path, step), [])
            if key not in seen:
                seen.append(key)
            number = seen.index(key)
            path = f"{path}.{step}" + (f"@{number}" if number else "")
            around = name
        return path.removeprefix(f".{PREFIX}").removeprefix(".")
