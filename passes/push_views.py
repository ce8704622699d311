"""Moves reshapes and transposes up, towards the operators' inputs, until they meet and cancel.

A view V of f(x, y) becomes f(V x, V y), with V restated for each operand's own (broadcast) shape and f's attributes
restated for the new axes. Which operators let a view pass, and how, is the table ``THROUGH``; all elementwise
operators do. An operator is only moved when all its users are views, and the same one or reshapes (which can be
taken from each other): nothing is computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, ClassVar, Iterator

from torch_mlir import ir

from adaptc.ir.module import Program
from adaptc.ir.rewrite import Node, merge_equal, nodes, remove_dead, rewrite, spec
from adaptc.passes.clean_up import all_rules

Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class PushViews:
    """See the module. Ends when no view can move."""

    name: ClassVar[str] = "push_views"
    requires: ClassVar[tuple[str, ...]] = ("no_unit_dims",)
    ensures: ClassVar[tuple[str, ...]] = ("no_dead_code",)

    def run(self, program: Program) -> None:
        rules = all_rules()
        while True:
            with program.editing():
                moved = sum(_push(node) for f in program.functions().values() for node in reversed(nodes(f)))
                for function in program.functions().values():
                    merge_equal(function)
                    remove_dead(function)
            rewrite(program, rules)
            if not moved:
                return


def _push(node: Node) -> bool:
    """Moves the view that all users of ``node`` are above it; False when there is none or it can't pass."""
    if node.row is None or len(node.results) != 1 or not node.operands:
        return False
    users = node.users
    if not users or not all(u.row and u.row.views for u in users):
        return False
    if not all(u.row.aliases for u in users) and len({(u.name, str(u.attrs)) for u in users}) != 1:
        return False
    through = THROUGH.get(node.name, _elementwise if node.row.elementwise and not node.op.regions else None)
    chosen = min(users, key=lambda u: len(spec(u.results[0]).shape))
    view = _view(chosen)
    restated = through(node, view) if through else None
    if restated is None:
        return False
    shapes, attrs = restated
    b = node.builder()
    new = b.op(node.name, *(view.apply(b, v, s) for v, s in zip(node.operands, shapes)), **attrs)
    assert spec(new) == spec(chosen.results[0]), f"push_views: {node.name} became {spec(new)}"
    for user in users:
        same = spec(user.results[0]) == spec(new)
        user.replace(new if same else b.reshape(new, shape=spec(user.results[0]).shape))
    node.op.erase()
    return True


# ---- views, as correspondences of axes


@dataclass(frozen=True)
class Reshape:
    """From shape ``old`` to ``new``. ``groups`` pairs runs of old axes with runs of new axes that hold the same
    elements; axes of size 1 are in no group."""

    old: Shape
    new: Shape
    groups: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    def restate(self, shape: Shape) -> Shape | None:
        """The shape that an operand of ``shape`` (which broadcasts to ``old``) has in the new one's terms."""
        padded = (1,) * (len(self.old) - len(shape)) + shape
        result: list[int | str] = [1] * len(self.new)
        for old_axes, new_axes in self.groups:
            part = [padded[a] for a in old_axes]
            if part == [self.old[a] for a in old_axes]:
                for axis in new_axes:
                    result[axis] = self.new[axis]
            elif any(d != 1 for d in part):
                return None
        return _strip(tuple(result)) if len(shape) < len(self.old) else tuple(result)

    def apply(self, b, value: ir.Value, shape: Shape) -> ir.Value:
        return value if spec(value).shape == shape else b.reshape(value, shape=shape)

    def axis(self, axis: int) -> int | None:
        """The new axis that is exactly the old one, if there is one."""
        return next((n[0] for o, n in self.groups if o == (axis,) and len(n) == 1), None)

    def unit_axis(self, axis: int) -> int | None:
        """A new axis of size 1 that stands where the old axis (of size 1) does, between the same other axes."""
        left = sum(o[-1] < axis for o, _ in self.groups)
        if any(o[0] < axis < o[-1] for o, _ in self.groups):
            return None
        low = self.groups[left - 1][1][-1] if left else -1
        high = self.groups[left][1][0] if left < len(self.groups) else len(self.new)
        fits = [i for i in range(low + 1, high) if self.new[i] == 1]
        return fits[-1] if fits else None


@dataclass(frozen=True)
class Transpose:
    """New axis i is old axis ``perm[i]``."""

    old: Shape
    perm: tuple[int, ...]

    def restate(self, shape: Shape) -> Shape | None:
        padded = (1,) * (len(self.old) - len(shape)) + shape
        result = tuple(padded[p] for p in self.perm)
        return _strip(result) if len(shape) < len(self.old) else result

    def apply(self, b, value: ir.Value, shape: Shape) -> ir.Value:
        old = spec(value).shape
        padded = (1,) * (len(self.perm) - len(old)) + old
        wide = [p for p in self.perm if padded[p] != 1]
        if wide == sorted(wide):
            return value if old == shape else b.reshape(value, shape=shape)
        value = value if old == padded else b.reshape(value, shape=padded)
        moved = b.transpose(value, perm=self.perm)
        return moved if spec(moved).shape == shape else b.reshape(moved, shape=shape)

    def axis(self, axis: int) -> int | None:
        return self.perm.index(axis)

    unit_axis = axis


View = Reshape | Transpose


def _view(node: Node) -> View:
    old, new = spec(node.operands[0]).shape, spec(node.results[0]).shape
    if "perm" in node.attrs:
        return Transpose(old, node.attrs["perm"])
    return Reshape(old, new, tuple(_groups(old, new)))


def _groups(old: Shape, new: Shape) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The finest runs of axes (without those of size 1) that hold the same elements."""
    o, n = [i for i, d in enumerate(old) if d != 1], [i for i, d in enumerate(new) if d != 1]
    while o or n:
        left, right = [o.pop(0)] if o else [], [n.pop(0)] if n else []
        while _product(old, left) != _product(new, right):
            (a, _), (c, _) = _product(old, left), _product(new, right)
            if o and (a < c or not n):
                left.append(o.pop(0))
            elif n:
                right.append(n.pop(0))
            else:
                raise AssertionError(f"reshape of {old} to {new}")
        yield tuple(left), tuple(right)


def _product(shape: Shape, axes: list[int]) -> tuple[int, tuple[str, ...]]:
    number, names = 1, []
    for axis in axes:
        if isinstance(shape[axis], str):
            names.append(shape[axis])
        else:
            number *= shape[axis]
    return number, tuple(sorted(names))


def _strip(shape: Shape) -> Shape:
    """Without leading 1s, which broadcasting supplies."""
    first = next((i for i, d in enumerate(shape) if d != 1), len(shape))
    return shape[first:]


# ---- how operators let views pass: (node, view) → (operands' new shapes, new attributes) or None

Restated = tuple[list[Shape], dict] | None


def _elementwise(node: Node, view: View) -> Restated:
    shapes = [view.restate(spec(v).shape) for v in node.operands]
    return None if None in shapes else (shapes, node.attrs)


def _reduce(node: Node, view: View) -> Restated:
    """With kept dimensions, and one axis: the new axis is a 1 at the old one's place, or it is no longer kept."""
    attrs = node.attrs
    if len(attrs["axes"]) != 1 or not attrs["keepdims"]:
        return None
    (axis,) = attrs["axes"]
    size = spec(node.operands[0]).shape[axis]
    new = view.unit_axis(axis)
    if new is None:
        return None
    shape = list(view.restate(view.old))
    shape[new] = size
    return [tuple(shape)], {**attrs, "axes": (new,)}


def _slice(node: Node, view: View) -> Restated:
    """Axes that are cut must survive as they are."""
    attrs, x = node.attrs, spec(node.operands[0]).shape
    target = list(view.restate(view.old))
    cuts = {"starts": [0] * len(target), "strides": [1] * len(target),
            "limits": [-1 if isinstance(d, str) else d for d in target]}
    for axis, (before, after) in enumerate(zip(x, view.old)):
        if before == after:
            continue
        new = view.axis(axis)
        if new is None:
            return None
        target[new] = before
        for name in cuts:
            cuts[name][new] = attrs[name][axis]
    return [tuple(target)], {name: tuple(cut) for name, cut in cuts.items()}


def _concat(node: Node, view: View) -> Restated:
    axis = view.axis(node.attrs["axis"])
    if axis is None:
        return None
    target = view.restate(view.old)
    pieces = [spec(v).shape[node.attrs["axis"]] for v in node.operands]
    return [target[:axis] + (piece,) + target[axis + 1 :] for piece in pieces], {"axis": axis}


def _last_axis(node: Node, view: View) -> Restated:
    """The last axis, over which the operator works with its other operands, must stay the last as it is."""
    x, *others = node.operands
    if view.axis(len(view.old) - 1) != len(view.restate(view.old)) - 1:
        return None
    return [view.restate(view.old), *(spec(v).shape for v in others)], node.attrs


THROUGH: dict[str, Callable[[Node, View], Restated]] = {
    "reduce": _reduce,
    "slice": _slice,
    "concat": _concat,
    "rms_norm": _last_axis,
    "layer_norm": _last_axis,
}
