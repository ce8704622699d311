"""Captured-form programs of tiny decoders, as capture writes them, for tests of what comes after it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch_mlir import ir
from torch_mlir.dialects import func

from adaptc.backends.reference.interpreter import Reference
from adaptc.ir import dialect
from adaptc.ir.build import Builder
from adaptc.ir.module import Program, StateSlot, Weight
from adaptc.protocol import StateSpec, TensorSpec

VOCABULARY = 48


@dataclass(frozen=True)
class Shape:
    """A decoder. ``plus_one``: norms scale by 1 + weight, where the file keeps 1 + weight; ``windows`` of the layers,
    0 = full; layers of one window share a body."""

    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    width: int = 16
    ffn: int = 96
    act: str = "silu"
    plus_one: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embed_scale: float = 0.0
    windows: tuple[int, ...] = (0, 0)


LLAMA = Shape()
GEMMA = Shape(kv_heads=1, width=32, act="gelu_tanh", plus_one=True, qk_norm=True, post_norms=True, embed_scale=8.0,
              windows=(4, 4, 0))


def _type(dtype, *shape):
    return dialect.to_type(TensorSpec(dtype, shape))


class _Writer:
    def __init__(self, s: Shape):
        self.s = s
        self.program = Program.empty("captured", vocabulary=VOCABULARY)
        self.weights: dict[str, tuple[int, ...]] = {}

    def norm(self, b: Builder, x, weight, path):
        b.source = path
        last = b.rank(x) - 1
        x = b.cast(x, dtype="f32")
        mean = b.reduce(b.pow(x, b.scalar(2.0)), kind="mean", axes=(last,), keepdims=True)
        y = b.mul(x, b.rsqrt(b.add(mean, b.scalar(1e-5))))
        return b.mul(y, b.add(b.scalar(1.0), weight)) if self.s.plus_one else b.mul(weight, b.cast(y, dtype="f32"))

    def linear(self, b: Builder, x, weight, path):
        b.source = path
        shape = b.shape(x)
        y = b.linear(b.reshape(x, shape=("T", shape[-1])), weight)
        return b.reshape(y, shape=(1, "T", b.shape(y)[1]))

    def rope(self, b: Builder, x, cos, sin, path):
        b.source = path
        _, h, t, d = b.shape(x)
        cut = lambda lo, hi: b.slice(x, starts=(0, 0, 0, lo), limits=(1, h, -1, hi), strides=(1,) * 4)  # noqa: E731
        low, high = cut(0, d // 2), cut(d // 2, d)
        return b.add(b.mul(x, cos), b.mul(b.concat(b.neg(high), low, axis=3), sin))

    def layer_weights(self) -> dict[str, tuple[int, ...]]:
        s = self.s
        shapes = {"input_norm": (s.hidden,), "q": (s.heads * s.width, s.hidden), "k": (s.kv_heads * s.width, s.hidden),
                  "v": (s.kv_heads * s.width, s.hidden), "o": (s.hidden, s.heads * s.width), "post_norm": (s.hidden,),
                  "gate": (s.ffn, s.hidden), "up": (s.ffn, s.hidden), "down": (s.hidden, s.ffn)}
        if s.qk_norm:
            shapes |= {"q_norm": (s.width,), "k_norm": (s.width,)}
        if s.post_norms:
            shapes |= {"after_attn": (s.hidden,), "after_mlp": (s.hidden,)}
        return shapes

    def state(self, window: int) -> StateSpec:
        part = (self.s.kv_heads, self.s.width)
        return StateSpec((("k", *part), ("v", *part)), "f32", window, 0, 0, 0)

    def body(self, name: str, window: int) -> None:
        s, shapes = self.s, self.layer_weights()
        x = _type("f32", 1, "T", s.hidden)
        table = _type("f32", 1, "T", s.width)
        ids = _type("i32", "T")
        types = [x, table, table, ids, ids, *(_type("f32", *v) for v in shapes.values()),
                 dialect.to_type(self.state(window))]
        f = func.FuncOp(name, (types, [x]), visibility="private", ip=ir.InsertionPoint(self.program.module.body))
        x, cos, sin, positions, requests, *ws, state = f.add_entry_block().arguments
        w = dict(zip(shapes, ws))
        b = Builder(ir.InsertionPoint(f.entry_block))
        h = self.norm(b, x, w["input_norm"], "input_layernorm")
        heads = {}
        for part, count in (("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads)):
            y = self.linear(b, h, w[part], f"self_attn.{part}_proj")
            heads[part] = b.transpose(b.reshape(y, shape=(1, "T", count, s.width)), perm=(0, 2, 1, 3))
            if s.qk_norm and part != "v":
                heads[part] = self.norm(b, heads[part], w[f"{part}_norm"], f"self_attn.{part}_norm")
        b.source = "self_attn"
        wide = [b.reshape(t, shape=(1, 1, "T", s.width)) for t in (cos, sin)]
        q, k = (self.rope(b, heads[p], *wide, "self_attn") for p in "qk")
        flat = lambda v: b.reshape(b.transpose(v, perm=(0, 2, 1, 3)), shape=("T", b.shape(v)[1], s.width))  # noqa: E731
        a = b.attention(flat(q), flat(k), flat(heads["v"]), positions, requests, state, scaling=s.width**-0.5,
                        window=window)
        a = b.reshape(b.reshape(a, shape=(1, "T", s.heads, s.width)), shape=(1, "T", s.heads * s.width))
        a = self.linear(b, a, w["o"], "self_attn.o_proj")
        if s.post_norms:
            a = self.norm(b, a, w["after_attn"], "post_attention_layernorm")
        b.source = ""
        x = b.add(x, a)
        h = self.norm(b, x, w["post_norm"], "pre_feedforward_layernorm")
        gate = self.linear(b, h, w["gate"], "mlp.gate_proj")
        b.source = "mlp"
        gate = b.op(s.act, gate)
        up = self.linear(b, h, w["up"], "mlp.up_proj")
        b.source = "mlp"
        m = self.linear(b, b.mul(gate, up), w["down"], "mlp.down_proj")
        if s.post_norms:
            m = self.norm(b, m, w["after_mlp"], "post_feedforward_layernorm")
        b.source = ""
        func.ReturnOp([b.add(x, m)], ip=ir.InsertionPoint(f.entry_block))

    def rotary(self, b: Builder, positions, base: float, path: str):
        b.source = path
        half = self.s.width // 2
        freqs = (1.0 / base ** (np.arange(half, dtype=np.float32) / np.float32(half))).astype(np.float32)
        frequencies = b.constant(value=tuple(freqs.tolist()), shape=(half,), dtype="f32")
        p = b.cast(b.reshape(b.reshape(positions, shape=(1, "T")), shape=(1, "T", 1)), dtype="f32")
        f = b.mul(p, b.reshape(frequencies, shape=(1, 1, half)))
        e = b.concat(f, f, axis=2)
        return [b.cast(b.mul(b.op(op, e), b.scalar(1.0)), dtype="f32") for op in ("cos", "sin")]

    def get(self, b: Builder, name: str, shape) -> ir.Value:
        """A weight as the module uses it: a file that keeps 1 + weight has 1 subtracted first."""
        value = b.raw("adaptc.get", [], [_type("f32", *shape)], {"symbol": name}).results[0]
        self.weights[name] = shape
        return b.add(value, b.scalar(-1.0)) if self.s.plus_one and len(shape) == 1 else value

    def write(self, stored) -> Program:
        s, p = self.s, self.program
        with p.editing():
            for window in dict.fromkeys(s.windows):
                self.body(f"layer_{window}", window)
            ids = _type("i32", "T")
            step = func.FuncOp("step", ([ids, ids, ids, _type("i32", "S")], [_type("f32", "S", VOCABULARY)]),
                               ip=ir.InsertionPoint(p.module.body))
            tokens, positions, requests, sampled = step.add_entry_block().arguments
            b = Builder(ir.InsertionPoint(step.entry_block), "model.embed_tokens")
            embedding = self.get(b, "embed", (VOCABULARY, s.hidden))
            x = b.embedding(tokens, embedding)
            x = b.reshape(x, shape=(1, "T", s.hidden))
            if s.embed_scale:
                x = b.mul(x, b.cast(b.scalar(s.embed_scale), dtype="f32"))
            tables = {w: self.rotary(b, positions, 1e4 if w else 1e5, "model.rotary_emb")
                      for w in dict.fromkeys(s.windows)}
            for i, window in enumerate(s.windows):
                b.source = f"model.layers.{i}"
                ws = [self.get(b, f"{i}.{name}", shape) for name, shape in self.layer_weights().items()]
                spec = self.state(window)
                p.declare(StateSlot(f"kv.{i}", spec, f"model.layers.{i}.self_attn"))
                state = b.raw("adaptc.get", [], [dialect.to_type(spec)], {"symbol": f"kv.{i}"}).results[0]
                call = b.raw("func.call", [x, *tables[window], positions, requests, *ws, state],
                             [x.type], {"callee": ir.FlatSymbolRefAttr.get(f"layer_{window}")})
                x = call.results[0]
            b.source = "model.norm"
            x = self.norm(b, x, self.get(b, "norm", (s.hidden,)), "model.norm")
            b.source = "lm_head"
            tied = b.raw("adaptc.get", [], [embedding.type], {"symbol": "embed"}).results[0]
            logits = b.reshape(self.linear(b, x, tied, "lm_head"), shape=("T", VOCABULARY))
            func.ReturnOp([b.gather_rows(logits, sampled)], ip=ir.InsertionPoint(step.entry_block))
            for name, shape in self.weights.items():
                p.declare(Weight(name, TensorSpec("f32", shape), f"{name}.weight", stored=stored(name, shape)))
        return p


def captured(shape: Shape = LLAMA, stored=lambda name, shape: "f32") -> Program:
    """The program of a decoder; ``stored(name, shape)`` is the format a weight's file has it in."""
    return _Writer(shape).write(stored)


def values(program: Program, seed: int = 0):
    """Random parameters by name, norm weights around 1."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, weight in program.weights().items():
        shape = weight.spec.shape
        noise = rng.standard_normal(shape).astype(np.float32)
        found[name] = 1 + noise * np.float32(0.1) if len(shape) == 1 else noise / np.float32(shape[1] ** 0.5)
    return found


def logits(program: Program, weights, chunks=(5, 1, 3), machine=Reference) -> np.ndarray:
    """Two requests, prefilled and decoded in chunks of a few tokens; logits of all sampled rows."""
    reference = machine(program, weights.__getitem__)
    rng = np.random.default_rng(7)
    position, out = 0, []
    for n in chunks:
        tokens = rng.integers(0, VOCABULARY, 2 * n)
        positions = np.tile(np.arange(position, position + n), 2)
        requests = np.repeat([0, 1], n)
        out.append(reference.step(tokens, positions, requests, np.array([n - 1, 2 * n - 1])))
        position += n
    return np.concatenate(out)


