"""Graphs without writes into memory: what changes a tensor in place becomes what makes a new one.

Torch does that by tracing the whole graph anew. Where each write is into a tensor that an operator has made, or into
slices of one, its later readers can be given the new tensor right here, which takes no time; the rest is torch's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

SCATTERS = {torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
            torch.ops.aten.select.int: torch.ops.aten.select_scatter.default}
"""View → the operator that gives the viewed tensor with the view's elements replaced."""


def functional(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program without operators that write, changed in place or traced anew."""
    graph = exported.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in [node for node in graph.nodes if writes(node)]:
        chain = _chain(node.args[0])
        made = _functional(node)
        if made is None or chain is None or _seen_elsewhere(chain, node, order):
            exported.graph_module.recompile()
            return exported.run_decompositions({})
        _replace(graph, node, made, chain, order)
    exported.graph_module.recompile()
    return exported


def writes(node: torch.fx.Node) -> bool:
    """Whether an operator changes a tensor in place."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _functional(node: torch.fx.Node) -> torch._ops.OpOverload | None:
    """The operator that gives what ``node`` writes. None where torch has none, or where numbers of other types meet, as
    the result of that would be of theirs."""
    name, overload = node.target._schema.name.split("::")[1], node.target._schema.overload_name or "default"
    written = [a for a in node.target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if not name.endswith("_") or len(written) != 1 or node.args[0] not in node.all_input_nodes:
        return None
    copies = name == "copy_"
    dtypes = {x.meta["val"].dtype for x in node.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor)}
    kind = node.args[0].meta["val"].dtype
    if not copies and any(d != kind for d in dtypes if d.is_floating_point or not kind.is_floating_point):
        return None
    return getattr(packet, overload, None)


def _source(node: torch.fx.Node) -> torch.fx.Node | None:
    """The tensor whose memory ``node`` may share; None where it has its own."""
    if node.op != "call_function":
        return None
    if node.target is torch.ops.aten.dropout.default:  # which gives its very operand outside of training
        return node.args[0]
    if not isinstance(node.target, torch._ops.OpOverload):  # one of several results
        inner = node.args[0] if node.args and isinstance(node.args[0], torch.fx.Node) else None
        return None if inner is None else _source(inner)
    shared = [i for i, a in enumerate(node.target._schema.arguments) if a.alias_info is not None and i < len(node.args)]
    if not shared:
        return None
    source = node.args[shared[0]]
    mine, its = node.meta.get("val"), source.meta.get("val")
    cast = isinstance(mine, torch.Tensor) and isinstance(its, torch.Tensor) and mine.dtype != its.dtype
    return None if cast else source


def _chain(node: torch.fx.Node) -> list[torch.fx.Node] | None:
    """From what is written up to the tensor whose memory it is. None where that isn't made in the graph, or where another
    view than a slice lies between."""
    chain = [node]
    while (source := _source(chain[-1])) is not None:
        if chain[-1].target not in SCATTERS:
            return None
        chain.append(source)
    return chain if chain[-1].op == "call_function" else None


def _family(base: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """All that may share the memory of ``base``."""
    waiting = [base]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [user for user in node.users if _source(user) is not None and node in user.all_input_nodes]


def _seen_elsewhere(chain: list[torch.fx.Node], write: torch.fx.Node, order: dict[torch.fx.Node, int]) -> bool:
    """Whether what is written is read afterwards through another view that was made before."""
    at = order[write]
    return any(order.get(user, -1) > at for one in _family(chain[-1]) if order.get(one, -1) < at and one not in chain
               for user in one.users)


def _replace(graph: torch.fx.Graph, write: torch.fx.Node, made: torch._ops.OpOverload, chain: list[torch.fx.Node],
             order: dict[torch.fx.Node, int]) -> None:
    """What is read after ``write`` is the new whole, or views of that, so that later writes into these reach it too."""
    at = order[write]
    with graph.inserting_before(write):
        new = graph.call_function(made, write.args, write.kwargs)
        new.meta = dict(write.meta)
        for view, whole in zip(chain, chain[1:]):
            new = graph.call_function(SCATTERS[view.target], (whole, new, *view.args[1:]), view.kwargs)
            new.meta = write.meta | {"val": whole.meta["val"]}
        for old, view in zip(reversed(chain), [*reversed(chain[:-1]), None]):
            order[new] = at
            old.replace_all_uses_with(new, delete_user_cb=lambda user: order.get(user, -1) > at)
            if view is not None:
                new = graph.call_function(view.target, (new, *view.args[1:]), view.kwargs)
                new.meta = dict(view.meta)
    write.replace_all_uses_with(new)
    graph.erase_node(write)
