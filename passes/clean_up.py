"""Removes what carries no meaning, and writes what can be said in several ways in one way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from adaptc.ir.functions import bodies
from adaptc.ir.module import Program
from adaptc.ir.rewrite import Node, find, merge_equal, nodes, remove_dead, rewrite, scalar, spec
from adaptc.ops.table import broadcast_shapes, row, table

FOLDED = 4096
"""Most elements of a constant that folding may make: rope's frequencies, but no masks or position tables."""


# ---- identities: op(x) → x


def _neutral(number: float, *places: int):
    """op(x, number) → x, with the number at one of the operand ``places``."""

    def rule(b, node: Node):
        for place in places:
            other = node.operands[1 - place]
            if scalar(node.operands[place]) == number and spec(other) == spec(node.results[0]):
                return other
        return None

    return rule


def _same_type(b, node: Node):
    """A cast, reshape, broadcast, slice, pad or concat of x that has x's type is x."""
    if len(node.operands) == 1 and spec(node.operands[0]) == spec(node.results[0]):
        return node.operands[0]
    return None


def _empty(b, node: Node):
    """A concat doesn't need operands without elements."""
    full = [v for v in node.operands if spec(v).shape[node.attrs["axis"]] != 0]
    return b.concat(*full, axis=node.attrs["axis"]) if 0 < len(full) < len(node.operands) else None


def _square(b, node: Node):
    """pow(x, 2) → x·x"""
    return b.mul(node.operands[0], node.operands[0]) if scalar(node.operands[1]) == 2 else None


def _rsqrt(b, node: Node):
    """pow(x, -1/2) → rsqrt(x)"""
    return b.rsqrt(node.operands[0]) if scalar(node.operands[1]) == -0.5 else None


def _reciprocal_root(b, node: Node):
    """1/√x → rsqrt(x)"""
    root = find(node.operands[0], "sqrt")
    return b.rsqrt(root.operands[0]) if root else None


def _silu(b, node: Node):
    """x·σ(x) → silu(x)"""
    for x, gate in node.swaps():
        sigmoid = find(gate, "sigmoid")
        if sigmoid and sigmoid.operands[0] == x:
            return b.silu(x)
    return None


# ---- constants


def _array(node: Node) -> np.ndarray:
    return row("constant").meaning(node.attrs)[0]


def _constant(b, array: np.ndarray, dtype: str):
    same = array.size and (array == array.flat[0]).all()
    value = array.flat[0].item() if same else array.tolist()
    return b.constant(value=value, shape=tuple(array.shape), dtype=dtype)


def _fold(b, node: Node):
    """Floor operators on constants only are evaluated."""
    operands = [find(v, "constant") for v in node.operands]
    result = spec(node.results[0])
    small = all(isinstance(d, int) for d in result.shape) and np.prod(result.shape, dtype=np.int64) <= FOLDED
    if not operands or not all(operands) or len(node.results) != 1 or not small:
        return None
    (array,) = node.row.meaning(node.row.complete(node.attrs), *(_array(n) for n in operands))
    return _constant(b, np.asarray(array), result.dtype)


# ---- broadcasts


def _implicit_broadcast(b, node: Node):
    """An elementwise operator broadcasts its operands itself: explicit broadcasts, and leading unit dimensions that
    only align ranks, are dropped."""
    slim = [_slim(b, v) for v in node.operands]
    if slim == list(node.operands):
        return None
    shape = spec(node.results[0]).shape
    for i in range(len(slim)):
        trial = [s if j <= i else v for j, (s, v) in enumerate(zip(slim, node.operands))]
        if broadcast_shapes(node.name, *(spec(v).shape for v in trial)) != shape:
            slim[i] = node.operands[i]
    if slim == list(node.operands):
        return None
    return b.op(node.name, *slim, **node.attrs)


def _slim(b, value):
    """``value`` before a broadcast, or before a reshape of a static tensor that only put unit dimensions in front (of
    token tensors push_views takes care, which keeps all uses of one in one shape)."""
    source = find(value, "broadcast", "reshape")
    if source is None:
        return value
    x = source.operands[0]
    shape = spec(x).shape
    if source.name == "broadcast":
        rank, dims = len(spec(value).shape), source.attrs["dims"]
        aligned = dims == tuple(range(rank - len(dims), rank))
        return x if aligned else value
    aligns = spec(value).shape == (1,) * (len(spec(value).shape) - len(shape)) + shape
    return x if aligns and all(isinstance(d, int) for d in shape) else value


# ---- views


def _view_of_view(b, node: Node):
    """reshape∘reshape → reshape, transpose∘transpose → transpose"""
    inner = find(node.operands[0], node.name)
    if inner is None:
        return None
    if node.name == "reshape":
        return b.reshape(inner.operands[0], shape=node.attrs["shape"])
    outer = node.attrs["perm"]
    return b.transpose(inner.operands[0], perm=tuple(inner.attrs["perm"][p] for p in outer))


def _unit_transpose(b, node: Node):
    """A transpose that moves only unit dimensions is a reshape (or nothing)."""
    x, perm = node.operands[0], node.attrs["perm"]
    wide = [p for p in perm if spec(x).shape[p] != 1]
    if wide != sorted(wide):
        return None
    return x if spec(x) == spec(node.results[0]) else b.reshape(x, shape=spec(node.results[0]).shape)


def _reshape_of_transpose(b, node: Node):
    """reshape∘transpose → transpose∘reshape when the reshape only adds or drops unit dimensions, so that reshapes
    meet reshapes and transposes meet transposes."""
    inner = find(node.operands[0], "transpose")
    if inner is None:
        return None
    x, perm = inner.operands[0], inner.attrs["perm"]
    shape, target = spec(x).shape, node.attrs["shape"]
    order = [p for p in perm if shape[p] != 1]  # x's wide axes in the order the result has them
    if [shape[p] for p in order] != [d for d in target if d != 1]:
        return None
    wide = sorted(order)
    units = len(target) - len(wide)
    places = iter(order)
    spare = iter(range(units))
    final = tuple(next(spare) if d == 1 else units + wide.index(next(places)) for d in target)
    flat = b.reshape(x, shape=(1,) * units + tuple(shape[p] for p in wide))
    return b.transpose(flat, perm=final)


RULES = {
    "add": (_neutral(0, 0, 1),),
    "sub": (_neutral(0, 1),),
    "mul": (_neutral(1, 0, 1), _silu),
    "div": (_neutral(1, 1),),
    "pow": (_neutral(1, 1), _square, _rsqrt),
    "reciprocal": (_reciprocal_root,),
    "cast": (_same_type,),
    "broadcast": (_same_type,),
    "slice": (_same_type,),
    "concat": (_empty, _same_type),
    "pad": (_same_type,),
    "reshape": (_same_type, _view_of_view, _reshape_of_transpose),
    "transpose": (_view_of_view, _unit_transpose),
}
"""Operator → rules, each with the identity it uses."""


def all_rules() -> dict[str, tuple]:
    """``RULES`` and, for every elementwise operator and view, what holds for all of them."""
    rules = {}
    for name, one in table().items():
        general = (_fold,) if one.elementwise or one.views else ()
        general += (_implicit_broadcast,) if one.elementwise and name != "group" else ()
        rules[name] = RULES.get(name, ()) + general
    return rules


@dataclass(frozen=True)
class CleanUp:
    """Dead code, common subexpressions, identities, constant folding, chains of views, unused functions; reads of
    weights and states come first in @step, so that no rewriting is in their way."""

    name: ClassVar[str] = "clean_up"
    requires: ClassVar[tuple[str, ...]] = ()
    ensures: ClassVar[tuple[str, ...]] = ("no_dead_code",)

    def run(self, program: Program) -> None:
        rules = all_rules()
        for _, function, calls in bodies(program):
            if not calls:
                function.operation.erase()
        _gets_first(program)
        while True:
            changed = rewrite(program, rules)
            with program.editing():
                for function in program.functions().values():
                    changed += merge_equal(function) + remove_dead(function)
            if not changed:
                break


def _gets_first(program: Program) -> None:
    gets = [n for n in nodes(program.step) if n.name == "get"]
    others = [n for n in nodes(program.step) if n.name != "get"]
    for node in gets:
        if others[0].before(node):
            node.op.move_before(others[0].op)
