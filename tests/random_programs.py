"""Random small programs, built from the operator table's rows, for property tests of what passes keep.

``program(draw)`` writes a captured-form decoder: @step embeds the tokens, calls a random body of token-local operators
(with an attention now and then) once or several times with other weights, and projects to the vocabulary. Elementwise
operators are those that the table has, whatever they are; the others have a rule here that says what fits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from torch_mlir import ir
from torch_mlir.dialects import func

from adaptc.backends.reference.interpreter import Reference
from adaptc.ir import dialect
from adaptc.ir.build import Builder
from adaptc.ir.module import Program, StateSlot, Weight
from adaptc.ops.table import table
from adaptc.protocol import StateSpec, TensorSpec

VOCABULARY, HIDDEN, HEADS, WIDTH = 12, 32, 2, 16
UNBOUNDED = {"exp", "log", "sqrt", "rsqrt", "reciprocal", "div", "pow", "compare", "select", "cast", "group"}
"""Elementwise operators whose results leave the range of ordinary numbers on some inputs, or that need other types."""

Draw = Callable[[Any], Any]


def _spec(dtype: str, *shape) -> ir.Type:
    return dialect.to_type(TensorSpec(dtype, shape))


def elementwise(arity: int) -> list[str]:
    """Names of the table's elementwise operators of so many operands, on ordinary floats."""
    return sorted(name for name, row in table().items() if row.elementwise and name not in UNBOUNDED
                  and len(row.operands) == arity and not any(o[-1] in "?*+" for o in row.operands) and not row.attrs)


class _Body:
    """One body while it is written: the values at hand, and the weights that it wants."""

    def __init__(self, draw: Draw, b: Builder, x, positions, weight: Callable[[tuple[int, ...]], Any],
                 attend: Callable):
        self.draw, self.b, self.positions, self.weight, self.attend = draw, b, positions, weight, attend
        self.hidden = x  # always f32 [1, T, HIDDEN], as captured programs pass tokens
        self.values = [x]

    def pick(self):
        return self.draw(st.sampled_from(self.values))

    def keep(self, value) -> None:
        self.values.append(value)
        if self.b.shape(value) == (1, "T", HIDDEN):
            self.hidden = value

    def step(self) -> None:
        self.draw(st.sampled_from([self.unary, self.binary, self.linear, self.norm, self.gated, self.residual,
                                   self.views, self.scale, self.attention, self.reduce, self.joined, self.rope]))()

    def unary(self) -> None:
        self.keep(self.b.op(self.draw(st.sampled_from(elementwise(1))), self.pick()))

    def binary(self) -> None:
        x = self.pick()
        fits = [v for v in self.values if self.b.shape(v) == self.b.shape(x)]
        self.keep(self.b.op(self.draw(st.sampled_from(elementwise(2))), x, self.draw(st.sampled_from(fits))))

    def scale(self) -> None:
        """Arithmetic with a scalar or a weight, identities among it."""
        x, value = self.pick(), self.draw(st.sampled_from([0.0, 1.0, -1.0, 0.5]))
        other = self.weight((self.b.shape(x)[-1],)) if self.draw(st.booleans()) else self.b.scalar(value)
        self.keep(self.b.op(self.draw(st.sampled_from(["add", "mul", "sub"])), x, other))

    def _flat(self):
        return self.b.reshape(self.hidden, shape=("T", HIDDEN))

    def _map(self, x, out: int):
        bias = [self.weight((out,))] if self.draw(st.booleans()) else []
        return self.b.linear(x, self.weight((out, self.b.shape(x)[1])), *bias)

    def linear(self) -> None:
        """One or several maps of one input, as q, k, v are."""
        x = self._flat()
        for _ in range(self.draw(st.integers(1, 3))):
            self.keep(self.b.reshape(self._map(x, HIDDEN), shape=(1, "T", HIDDEN)))

    def gated(self) -> None:
        x, act = self._flat(), self.draw(st.sampled_from(["silu", "gelu_tanh", "gelu", "tanh"]))
        gate, up = self.b.op(act, self._map(x, 12)), self._map(x, 12)
        pair = (gate, up) if self.draw(st.booleans()) else (up, gate)
        down = self._map(self.b.mul(*pair), HIDDEN)
        self.keep(self.b.reshape(down, shape=(1, "T", HIDDEN)))

    def norm(self) -> None:
        """Written out, in one of the ways that authors write it: with or without the mean, a weight and a bias."""
        b, x, flip = self.b, self.hidden, lambda: self.draw(st.booleans())
        mean = lambda v: b.reduce(v, kind="mean", axes=(2,), keepdims=True)  # noqa: E731
        x = b.sub(x, mean(x)) if flip() else x
        variance = b.add(mean(b.pow(x, b.scalar(2.0)) if flip() else b.mul(x, x)), b.scalar(1e-3))
        y = b.mul(x, b.rsqrt(variance)) if flip() else b.div(x, b.sqrt(variance))
        if flip():
            weight = self.weight((HIDDEN,))
            weight = b.add(weight, b.scalar(1.0)) if flip() else weight
            y = b.mul(*((y, weight) if flip() else (weight, y)))
            y = b.add(y, self.weight((HIDDEN,))) if flip() else y
        self.keep(y)

    def rope(self) -> None:
        """A rotation of all heads or a part of each, in one of the ways that authors write it: halves or neighbours
        are pairs, their products are taken one by one or x is turned as a whole, heads come before tokens or after."""
        b, flip = self.b, lambda: self.draw(st.booleans())
        pairs, products, turned, part = flip(), flip(), flip(), self.draw(st.sampled_from([WIDTH, WIDTH // 2]))
        half = part // 2
        x = b.reshape(self.hidden, shape=(1, "T", HEADS, WIDTH))
        x = b.transpose(x, perm=(0, 2, 1, 3)) if turned else x
        lead = b.shape(x)[:-1]

        def cut(v, axis: int, low: int, high: int, step: int = 1):
            shape = b.shape(v)
            return b.slice(v, starts=tuple(low if i == axis else 0 for i in range(len(shape))), strides=tuple(
                step if i == axis else 1 for i in range(len(shape))), limits=tuple(
                high if i == axis else -1 if isinstance(d, str) else d for i, d in enumerate(shape)))

        table = half if products else part
        frequency = b.constant(value=tuple(0.5**i for i in range(table)), shape=(table,))
        places = b.reshape(b.cast(self.positions, dtype="f32"), shape=(1, 1, "T", 1) if turned else (1, "T", 1, 1))
        angle = b.mul(places, frequency)
        cos, sin = b.cos(angle), b.sin(angle)
        whole = x if part == WIDTH else cut(x, 3, 0, part)
        first, second = ((cut(whole, 3, 0, part, 2), cut(whole, 3, 1, part, 2)) if pairs
                         else (cut(whole, 3, 0, half), cut(whole, 3, half, part)))

        def join(a, c):
            if not pairs:
                return b.concat(a, c, axis=3)
            return b.reshape(b.concat(*(b.reshape(v, shape=(*lead, half, 1)) for v in (a, c)), axis=4),
                             shape=(*lead, part))

        if products:
            y = join(b.sub(b.mul(first, cos), b.mul(second, sin)), b.add(b.mul(second, cos), b.mul(sin, first)))
        else:
            whole = b.tanh(whole) if flip() and flip() else whole  # another tensor than is turned: no rotation
            y = b.add(b.mul(whole, cos), b.mul(sin, join(b.neg(second), first)))
        y = y if part == WIDTH else b.concat(y, cut(x, 3, part, WIDTH), axis=3)
        y = b.transpose(y, perm=(0, 2, 1, 3)) if turned else y
        self.keep(b.reshape(y, shape=(1, "T", HIDDEN)))

    def residual(self) -> None:
        fits = [v for v in self.values if self.b.shape(v) == (1, "T", HIDDEN)]
        self.keep(self.b.add(self.draw(st.sampled_from(fits)), self.hidden))
        if self.draw(st.booleans()):
            self.norm()

    def views(self) -> None:
        """There and back: heads split off, transposed or not, something elementwise between."""
        b = self.b
        y = b.reshape(self.hidden, shape=(1, "T", HEADS, WIDTH))
        turned = self.draw(st.booleans())
        y = b.transpose(y, perm=(0, 2, 1, 3)) if turned else y
        y = b.op(self.draw(st.sampled_from(elementwise(1))), y)
        y = b.transpose(y, perm=(0, 2, 1, 3)) if turned else y
        self.keep(b.reshape(y, shape=(1, "T", HIDDEN)))

    def joined(self) -> None:
        """Rope's halves: sliced apart, turned, put together."""
        b, x = self.b, self.hidden
        half = self.draw(st.sampled_from([HIDDEN // 4, HIDDEN // 2]))
        cut = lambda lo, hi: b.slice(x, starts=(0, 0, lo), limits=(1, -1, hi), strides=(1, 1, 1))  # noqa: E731
        self.keep(b.concat(b.neg(cut(half, HIDDEN)), cut(0, half), axis=2))

    def reduce(self) -> None:
        kind = self.draw(st.sampled_from(["sum", "mean", "max", "min"]))
        self.keep(self.b.mul(self.hidden, self.b.tanh(self.b.reduce(self.hidden, kind=kind, axes=(2,), keepdims=True))))

    def attention(self) -> None:
        b, x = self.b, self._flat()
        heads = [b.reshape(self._map(x, n * WIDTH), shape=("T", n, WIDTH)) for n in (HEADS, 1, 1)]
        y = self.attend(b, *heads)
        if y is not None:
            self.keep(b.reshape(y, shape=(1, "T", HIDDEN)))


def program(draw: Draw) -> Program:
    """A random program in the captured stage."""
    p = Program.empty("captured", vocabulary=VOCABULARY)
    calls, steps = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    shapes: list[tuple[int, ...]] = []
    state = StateSpec((("k", 1, WIDTH), ("v", 1, WIDTH)), "f32", draw(st.sampled_from([0, 3])), 0, 0, 0)
    with p.editing():
        ids, x = _spec("i32", "T"), _spec("f32", 1, "T", HIDDEN)
        body = func.FuncOp("layer", ([x, ids, ids, dialect.to_type(state)], [x]), visibility="private",
                           ip=ir.InsertionPoint(p.module.body))
        block = body.add_entry_block()
        b, used = Builder(ir.InsertionPoint(block), "mlp"), []

        def weight(shape: tuple[int, ...]):
            shapes.append(shape)
            return block.add_argument(_spec("f32", *shape), ir.Location.unknown())

        def attend(b: Builder, q, k, v):
            if used:  # a state is appended to once a step
                return None
            used.append(True)
            return b.attention(q, k, v, block.arguments[1], block.arguments[2], block.arguments[3],
                               scaling=0.5, window=state.window)

        writer = _Body(draw, b, block.arguments[0], block.arguments[1], weight, attend)
        for _ in range(steps):
            writer.step()
        func.ReturnOp([b.add(writer.hidden, b.tanh(writer.hidden))], ip=ir.InsertionPoint(block))
        body.operation.attributes["function_type"] = ir.TypeAttr.get(
            ir.FunctionType.get([a.type for a in block.arguments], [x]))
        _step(p, calls, shapes, state)
    return p


def _step(p: Program, calls: int, shapes: list[tuple[int, ...]], state: StateSpec) -> None:
    ids = _spec("i32", "T")
    step = func.FuncOp("step", ([ids, ids, ids, _spec("i32", "S")], [_spec("f32", "S", VOCABULARY)]),
                       ip=ir.InsertionPoint(p.module.body))
    tokens, positions, requests, sampled = step.add_entry_block().arguments
    b = Builder(ir.InsertionPoint(step.entry_block), "embed")

    def get(name: str, shape: tuple[int, ...]):
        p.declare(Weight(name, TensorSpec("f32", shape), f"{name}.weight"))
        return b.raw("adaptc.get", [], [_spec("f32", *shape)], {"symbol": name}).results[0]

    x = b.reshape(b.embedding(tokens, get("embed", (VOCABULARY, HIDDEN))), shape=(1, "T", HIDDEN))
    for i in range(calls):
        b.source = f"layers.{i}"
        weights = [get(f"{i}.{n}", shape) for n, shape in enumerate(shapes)]
        p.declare(StateSlot(f"kv.{i}", state, f"layers.{i}.attn"))
        slot = b.raw("adaptc.get", [], [dialect.to_type(state)], {"symbol": f"kv.{i}"}).results[0]
        x = b.raw("func.call", [x, positions, requests, slot, *weights], [x.type],
                  {"callee": ir.FlatSymbolRefAttr.get("layer")}).results[0]
    b.source = "head"
    y = b.linear(b.reshape(x, shape=("T", HIDDEN)), get("head", (VOCABULARY, HIDDEN)))
    func.ReturnOp([b.gather_rows(y, sampled)], ip=ir.InsertionPoint(step.entry_block))


def meaning(p: Program, weights) -> np.ndarray:
    """Logits of two requests over a prefill and two decode steps, by the reference backend."""
    machine = Reference(p, weights.__getitem__)
    rng, out, position = np.random.default_rng(7), [], 0
    for n in (4, 1, 1):
        rows = np.arange(position, position + n)
        out.append(machine.step(rng.integers(0, VOCABULARY, 2 * n), np.tile(rows, 2), np.repeat([0, 1], n),
                                [n - 1, 2 * n - 1]))
        position += n
    return np.concatenate(out)


def values(p: Program) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: (rng.standard_normal(w.spec.shape) * 0.25).astype(np.float32) for name, w in p.weights().items()}
