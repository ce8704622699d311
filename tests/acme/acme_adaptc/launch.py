"""Run time: interprets the plan over numpy memory. Knows the plan and its own objects, and nothing of the compiler."""

from __future__ import annotations

import json
from math import prod

import numpy as np

DTYPES = {"f32": np.float32, "i32": np.int32, "i1": np.bool_, "u8": np.uint8}
UNARY = {"cos": np.cos, "exp": np.exp, "neg": np.negative, "reciprocal": np.reciprocal, "sin": np.sin, "tanh": np.tanh,
         "rsqrt": lambda x: 1 / np.sqrt(x)}
BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


def broadcast(a, x, *like):
    own = dict(zip(a["dims"], x.shape))
    return x.reshape([own.get(i, 1) for i in range(len(a["shape"]))])


def cut(a, x):
    return x[tuple(slice(lo, None if hi == -1 else hi, step) for lo, hi, step in
                   zip(a["starts"], a["limits"], a["strides"]))]


KERNELS = {
    **{name: lambda a, x, f=f: f(x) for name, f in UNARY.items()},
    **{name: lambda a, x, y, f=f: f(x, y) for name, f in BINARY.items()},
    "broadcast": broadcast, "cast": lambda a, x: x, "concat": lambda a, *xs: np.concatenate(xs, a["axis"]),
    "constant": lambda a: np.array(a["value"]), "gather_rows": lambda a, x, rows: x[rows],
    "dot_general": lambda a, x, y: np.tensordot(x, y, (a["contract_x"], a["contract_y"])),
    "reduce": lambda a, x: getattr(x, a["kind"])(tuple(a["axes"]), keepdims=a["keepdims"]),
    "reshape": lambda a, x: x, "slice": cut, "transpose": lambda a, x: x.transpose(a["perm"]),
}


class AcmeExecutable:
    def __init__(self, plan, objects, weights, pages):
        self.plan, self.most = plan, {s.name: s.max for s in plan.symbols}
        self.kernels = json.loads(objects["kernels.json"])
        self.states = {state.name: state for state in plan.states}
        self.pools = {name: np.zeros((pages[s.group], s.page_bytes(plan.page_size)), np.uint8)
                      for name, s in self.states.items()}
        arena = np.zeros(plan.arena_bytes, np.uint8)
        self.buffers, self.memory = {b.handle: b for b in plan.buffers}, {}
        for b in plan.buffers:
            self.memory[b.handle] = (arena[b.offset : b.offset + b.bytes] if b.kind == "arena" else
                                     np.frombuffer(weights[b.source], np.uint8) if b.kind == "weight" else
                                     np.zeros(b.bytes, np.uint8))

    def array(self, handle, sizes, dtype=None, shape=None):
        buffer = self.buffers[handle]
        kind = np.dtype(DTYPES[dtype or buffer.dtype])
        dims = [sizes.get(d, d) for d in (buffer.shape if shape is None else shape)]
        return self.memory[handle][: prod(dims) * kind.itemsize].view(kind).reshape(dims)

    def inputs(self, role):
        return self.array(self.plan.inputs[role], self.most)

    def outputs(self, role):
        return self.array(self.plan.outputs[role], self.most)

    def read(self, handle, symbols):
        return self.array(handle, symbols).copy()

    def state(self, name):
        return self.pools[name]

    def close(self):
        pass

    def run(self, symbols, *, stop_after=None, times=False):
        for operator in self.plan.operators():
            for call in operator.calls:
                self.call(call, symbols)
            if operator.id == stop_after:
                return

    def call(self, call, sizes):
        kernel = self.kernels[call.kernel]
        attrs, shapes = json.loads(kernel["attrs"]), iter(kernel["shapes"])
        stateful = kernel["op"] == "attention"
        handles = [*call.buffers[:5], call.buffers[7]] if stateful else call.buffers
        *operands, result = (self.array(handle, sizes, *next(shapes)) for handle in handles)
        if stateful:
            state, table = self.states[call.buffers[5].removeprefix("state:")], self.array(call.buffers[6], sizes)
            result[...] = self.attention(attrs, state, table, *operands)
        else:
            made = KERNELS[kernel["op"]](attrs, *operands)
            result[...] = made.reshape(result.shape) if kernel["op"] == "reshape" else made

    def attention(self, a, state, table, q, k, v, positions, requests):
        """Rows lie in pages as the plan says: for each part [heads][page_size][width]."""
        size, keys = self.plan.page_size, state.parts[0].heads * state.parts[0].width * self.plan.page_size
        pool = self.pools[state.name].view(np.float32)

        def rows(request, position):
            page = pool[table[request, position // size]]
            parts = zip((page[:keys], page[keys:]), state.parts)
            return [data.reshape(part.heads, size, part.width)[:, position % size] for data, part in parts]

        for t, at in enumerate(zip(requests, positions)):
            for place, row in zip(rows(*at), (k[t], v[t])):
                place[...] = row
        out = np.empty((*q.shape[:2], v.shape[2]), np.float32)
        for t, (request, position) in enumerate(zip(requests, positions)):
            first = max(0, position - a["window"] + 1) if a["window"] else 0
            seen = [rows(request, p) for p in range(first, position + 1)]
            ks, vs = (np.repeat(np.stack(part), q.shape[1] // k.shape[1], 1) for part in zip(*seen))
            scores = np.exp(np.einsum("hd,phd->hp", q[t], ks) * a["scaling"])
            out[t] = np.einsum("hp,phd->hd", scores / scores.sum(-1, keepdims=True), vs)
        return out


class AcmeLauncher:
    name = "acme"

    def choose_level(self, plan, wanted=None):
        return wanted or plan.levels[0]

    def load(self, plan, objects, weights, *, threads, pages):
        return AcmeExecutable(plan, objects, weights, pages)


LAUNCHER = AcmeLauncher()
