"""That a forward is a function of its tokens: it draws nothing at random, and keeps nothing for the next forward."""

from __future__ import annotations

from collections.abc import Set

import torch

from adaptc.capture.constants import name_of
from adaptc.capture.places import PREFIX, place_of
from adaptc.capture.problems import Problems
from adaptc.errors import CaptureError


def check_random(exported: torch.export.ExportedProgram, problems: Problems) -> None:
    """Adds an error for dropout that isn't switched off: ``F.dropout`` drops unless it is told not to."""
    for node in exported.graph.nodes:
        if name_of(node) == "aten.dropout" and node.args[1] and node.args[2]:
            problems.add(CaptureError(f"{node.target} in {place_of(node)} drops elements at random, in evaluation too.",
                                      hint="Give it training=self.training."))


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers and other tensors that modules hold, by name; parameters apart."""
    held = ((f"{path}.{name}", value) for path, one in module.named_modules()
            for name, value in (*one._buffers.items(), *vars(one).items()))
    return {name: value for name, value in held if isinstance(value, torch.Tensor)}


def check_assigned(exported: torch.export.ExportedProgram, assigned: Set[str]) -> None:
    """CaptureError where a forward reads a tensor that it puts another one in the place of, by ``assigned`` names."""
    needed = _before(next(node for node in exported.graph.nodes if node.op == "output"))
    signature = exported.graph_signature
    held = signature.inputs_to_buffers | signature.inputs_to_lifted_tensor_constants
    read = {held.get(node.name) for node in needed if node.op == "placeholder"}
    for name in sorted(assigned):
        if name in read:
            raise CaptureError(f"{_said(name)} is replaced by a forward {_NEXT}", hint=_HINT)


def check_kept(exported: torch.export.ExportedProgram, result: torch.fx.Node, problems: Problems) -> None:
    """Adds an error for each buffer that a forward writes, and that the next one's ``result`` depends on. The graph must
    have no operators that write."""
    signature = exported.graph_signature
    if not (written := signature.buffers_to_mutate):
        return
    needed = _before(result)
    nodes = {node.name: node for node in exported.graph.nodes}
    held = {target: nodes[name] for name, target in signature.inputs_to_buffers.items()}
    for name, target in written.items():
        if held[target] in needed and nodes[name] is not held[target]:
            where = place_of(nodes[name])
            problems.add(CaptureError(f"{_said(target)} is written by a forward, in {where}, {_NEXT}", hint=_HINT))


_NEXT = "and read by the next one, so that a request's result depends on those before it."
_HINT = "Keep what earlier tokens of a request leave by an operator with state (docs/adding.md)."


def _said(name: str) -> str:
    path, _, own = name.removeprefix(f"{PREFIX}.").rpartition(".")
    return f"the tensor {own!r} of module {path or '<root>'}"


def _before(node: torch.fx.Node) -> set[torch.fx.Node]:
    """The nodes that a node's value depends on, itself among them."""
    found, waiting = {node}, [node]
    while waiting:
        sources = set(waiting.pop().all_input_nodes) - found
        found |= sources
        waiting += sources
    return found
