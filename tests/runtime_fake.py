"""A tiny causal model in numpy behind the backend protocol, and artifacts of it: the runtime without a compiler.

Each layer appends its token's row to its paged state through the block table and then adds up the visible rows as
stored, key by key in order of position, so a wrong page, a stale row, a missed window or a NaN shows in the logits.
A fixed state is a running sum that forgets: a wrong slot shows in all logits that follow.
"""

from __future__ import annotations

import numpy as np

from adaptc.artifact import ArtifactContents, Weight
from adaptc.artifact_format import TextInfo
from adaptc.plan import Buffer, CacheGroup, Kernel, Plan, State, StatePart, Symbol, page_rows, page_tokens
from adaptc.runtime.engine import Engine, group_pages
from adaptc.runtime.pages import BlockTable, PagePool, SlotTable
from adaptc.runtime.prefix import PrefixCache

VOCABULARY, WIDTH, HEADS, LONG = 40, 4, 2, 20
DTYPES = {"f32": np.float32, "f16": np.float16}


def plan(
    *, page_size=4, windows=(0, 5), rates=(), max_context=48, max_step_tokens=8, max_requests=4, max_rows=4, layers=2, fixed=1,
    lengths=False,
) -> Plan:
    """One cache group a window and one a rate, ``layers`` states in each, and one of ``fixed`` fixed states. With ``lengths``, requests
    that may come to have more than ``LONG`` tokens are computed otherwise."""
    groups, states = [], []
    for i, (window, rate) in enumerate([*((window, 1) for window in windows), *((0, rate) for rate in rates)]):
        names = tuple(f"layer{i}.{j}" for j in range(layers))
        groups.append(CacheGroup(f"group{i}", window, names, -(-max_context // page_tokens(page_size, rate)), rate=rate))
        parts = (StatePart("k", HEADS, WIDTH), StatePart("v", HEADS, WIDTH))
        states += [State(name, "rows", f"group{i}", "f16", window, parts, rate=rate) for name in names]
    if fixed:
        names = tuple(f"fixed.{j}" for j in range(fixed))
        groups.append(CacheGroup("fixed", 0, names, 2, "fixed"))
        states += [State(name, "fixed", "fixed", "f32", 0, (StatePart("state", HEADS, WIDTH),)) for name in names]
    embedding = VOCABULARY * HEADS * WIDTH * 4
    buffers = [
        Buffer("tokens", "input", "i32", ("T",), 4 * max_step_tokens),
        Buffer("positions", "input", "i32", ("T",), 4 * max_step_tokens),
        Buffer("requests", "input", "i32", ("T",), 4 * max_step_tokens),
        Buffer("sampled", "input", "i32", ("S",), 4 * max_rows),
        *([Buffer("lengths", "input", "i32", ("R",), 4 * max_requests)] if lengths else []),
        Buffer("logits", "output", "f32", ("S", VOCABULARY), 4 * max_rows * VOCABULARY),
        Buffer("embedding", "weight", "f32", (VOCABULARY, HEADS * WIDTH), embedding, source="embedding"),
    ]
    return Plan(
        target="cpu", levels=("x86-64-v3",), backend="fake", vocabulary=VOCABULARY, max_context=max_context,
        max_step_tokens=max_step_tokens, max_requests=max_requests, page_size=page_size, key_block=4, arena_bytes=0,
        symbols=(Symbol("T", max_step_tokens), Symbol("R", max_requests), Symbol("S", max_rows)),
        buffers=tuple(buffers), kernels=(Kernel("step", "fake.o", ()),), states=tuple(states), groups=tuple(groups),
        segments=(), outputs={"logits": "logits"},
        inputs={"tokens": "tokens", "positions": "positions", "requests": "requests", "sampled": "sampled",
                **({"lengths": "lengths"} if lengths else {}), **{f"pages:{g.name}": f"pages:{g.name}" for g in groups}},
    )  # fmt: skip


def embedding(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((VOCABULARY, HEADS * WIDTH)).astype(np.float32)


def contents(plan_: Plan, *, seed: int = 0, **changes) -> ArtifactContents:
    raw = embedding(seed).tobytes()
    values = dict(
        model="fake", plan=plan_, captured="module {}\n", laid_out="module { }\n",
        objects={"x86-64-v3/fake.o": b"\x7fELFcode"},
        weights=[Weight("embedding", len(raw), lambda: raw), Weight("another", 100, lambda: bytes(range(100)))],
        text=TextInfo(stop_ids=(39,)), sources={"model.gguf": "ab" * 32}, tensors={"token_embd": "cd" * 32},
    )  # fmt: skip
    return ArtifactContents(**{**values, **changes})


class FakeExecutable:
    """See adaptc.protocol.Executable. ``fail`` (a callable given the step's number) may raise in mid-step."""

    def __init__(self, plan_: Plan, weights, pages):
        self.plan, self.pages, self.closed, self.steps, self.fail = plan_, pages, False, [], lambda step: None
        self.embedding = np.frombuffer(weights["embedding"], np.float32)[: VOCABULARY * HEADS * WIDTH]
        self.embedding = self.embedding.reshape(VOCABULARY, HEADS * WIDTH)
        limit = {s.name: s.max for s in plan_.symbols}
        self._inputs = {"tokens": np.zeros(limit["T"], np.int32), "positions": np.zeros(limit["T"], np.int32),
                        "requests": np.zeros(limit["T"], np.int32),
                        "sampled": np.zeros(limit["S"], np.int32)}  # fmt: skip
        if "lengths" in plan_.inputs:
            self._inputs["lengths"] = np.zeros(limit["R"], np.int32)
        for g in plan_.groups:
            self._inputs[f"pages:{g.name}"] = np.full((limit["R"], g.max_pages), -7, np.int32)
        self._logits = np.zeros((limit["S"], plan_.vocabulary), np.float32)
        self._states = {s.name: np.full((pages[s.group], s.page_bytes(plan_.page_size)), 0xFF, np.uint8)
                        for s in plan_.states}  # fmt: skip

    def inputs(self, role):
        return self._inputs[role]

    def outputs(self, role):
        assert role == "logits"
        return self._logits

    def state(self, name):
        return self._states[name]

    def close(self):
        self.closed = True

    def run(self, symbols, *, stop_after=None, times=False):
        assert not self.closed
        T, R, S = symbols["T"], symbols["R"], symbols["S"]
        assert 0 < T <= len(self._inputs["tokens"]) and 0 < R <= self.plan.max_requests and S <= len(self._logits)
        self.steps.append((T, R, S))
        tokens, positions, requests = (self._inputs[k][:T] for k in ("tokens", "positions", "requests"))
        assert requests.min() >= 0 and requests.max() == R - 1
        x = self.embedding[tokens] + 0.01 * positions[:, None].astype(np.float32)
        if "lengths" in self._inputs:
            x = x * np.where(self._inputs["lengths"][requests] > LONG, 2, 1)[:, None]
        for i, state in enumerate(self.plan.states):
            layer = self._fixed if state.kind == "fixed" else self._layer
            x = layer(state, x.astype(np.float32), positions, requests)
            if i == 0:
                self.fail(len(self.steps))
        for s, row in enumerate(self._inputs["sampled"][:S]):
            assert 0 <= row < T
            self._logits[s] = (x[row] * self.embedding).sum(-1) * 3
        self._logits[S:] = np.nan

    def _fixed(self, state, x, positions, requests):
        pool, table = self._states[state.name].view(np.float32), self._inputs[f"pages:{state.group}"]
        out, begun = np.empty_like(x), set()
        for t, r in enumerate(requests):
            read, written = table[r]
            assert read != written and 0 <= written < len(pool) and (r in begun or (read >= 0) == (positions[t] > 0))
            if r not in begun:
                begun.add(r)
                pool[written] = pool[read] if read >= 0 else 0
            pool[written] = forgetting(pool[written], x[t])
            out[t] = np.tanh(x[t] + pool[written])
        return out

    def _layer(self, state, x, positions, requests):
        page_size, rate = page_rows(self.plan.page_size, state.rate), state.rate
        pool = self._states[state.name].view(DTYPES[state.dtype]).reshape(-1, 2, HEADS, page_size, WIDTH)
        table = self._inputs[f"pages:{state.group}"]

        def page(request, number):
            entry = table[request, number // page_size]
            assert 0 <= entry < len(pool), f"entry {entry} for row {number}"
            return entry

        rows = x.reshape(-1, HEADS, WIDTH)
        for t, (p, r) in enumerate(zip(positions, requests)):
            if (p + 1) % rate == 0:
                pool[page(r, p // rate), 0, :, p // rate % page_size] = np.tanh(rows[t])
                pool[page(r, p // rate), 1, :, p // rate % page_size] = rows[t] * 0.5
        out = np.empty_like(rows)
        for t, (p, r) in enumerate(zip(positions, requests)):
            total, weight = np.zeros((HEADS, WIDTH), np.float32), np.zeros((HEADS, 1), np.float32)
            for q in range(max(0, p - state.window + 1) if state.window else 0, (p + 1) // rate):
                key, value = pool[page(r, q), :, :, q % page_size].astype(np.float32)
                score = np.exp((rows[t] * key).sum(-1, keepdims=True) * np.float32(0.3))
                total, weight = total + score * value, weight + score
            out[t] = np.tanh(rows[t] + total / np.maximum(weight, 1e-30))
        return out.reshape(len(x), -1)


class FakeLauncher:
    name = "fake"

    def __init__(self):
        self.loaded = []

    def choose_level(self, plan_, wanted=None):
        return wanted or plan_.levels[0]

    def load(self, plan_, objects, weights, *, threads, pages):
        assert objects == {"fake.o": b"\x7fELFcode"}
        self.loaded.append((threads, dict(pages)))
        return FakeExecutable(plan_, weights, pages)


def forgetting(total: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.float32(0.9) * total + x


def plain(tokens, plan_: Plan, seed: int = 0) -> np.ndarray:
    """Logits [T, vocabulary] of the same model without pages, chunks or batches: rows in plain lists."""
    table = embedding(seed)
    x = table[np.asarray(tokens)] + 0.01 * np.arange(len(tokens), dtype=np.float32)[:, None]
    for state in plan_.states:
        if state.kind == "fixed":
            total, x = np.zeros(HEADS * WIDTH, np.float32), x.astype(np.float32)
            for t, row in enumerate(x):
                total = forgetting(total, row)
                x[t] = np.tanh(row + total)
            continue
        rows = x.astype(np.float32).reshape(-1, HEADS, WIDTH)
        keys = np.tanh(rows).astype(DTYPES[state.dtype]).astype(np.float32)
        values = (rows * 0.5).astype(DTYPES[state.dtype]).astype(np.float32)
        out = np.empty_like(rows)
        for p in range(len(rows)):
            total, weight = np.zeros((HEADS, WIDTH), np.float32), np.zeros((HEADS, 1), np.float32)
            for q in range(state.rate - 1 + (max(0, p - state.window + 1) if state.window else 0), p + 1, state.rate):
                score = np.exp((rows[p] * keys[q]).sum(-1, keepdims=True) * np.float32(0.3))
                total, weight = total + score * values[q], weight + score
            out[p] = np.tanh(rows[p] + total / np.maximum(weight, 1e-30))
        x = out.reshape(len(x), -1)
    return np.stack([(row * table).sum(-1) * 3 for row in x])


def greedy(prompt, count, plan_: Plan, seed: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(plain(tokens, plan_, seed)[-1].argmax()))
    return tokens[len(prompt) :]


# ---- engines over it -----------------------------------------------------------------------------------------------

WEIGHTS = {"embedding": embedding().tobytes()}


def engine(plan_=None, pages=None, **options) -> Engine:
    plan_ = plan_ or plan()
    pages = pages or {g.name: 2 * group_pages(plan_, g, plan_.max_context) + (20 if g.kind == "fixed" else 0)
                      for g in plan_.groups}  # fmt: skip
    return Engine(plan_, FakeExecutable(plan_, WEIGHTS, pages), pages, **options)


def drain(eng: Engine) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    while eng.active:
        for event in eng.step():
            if event.token is not None:
                tokens.setdefault(event.request, []).append(event.token)
    return tokens


def score(eng: Engine, tokens, start=0, chunk=None) -> np.ndarray:
    logits = np.full((len(tokens) - start, VOCABULARY), np.nan, np.float32)
    eng.score(tokens, logits, start=start, chunk=chunk)
    drain(eng)
    return logits


def consistent(eng: Engine) -> None:
    """Every page has holders or is free, tables hold what lengths and windows say, promises are kept."""
    for i, group in enumerate(eng.plan.groups):
        pool, held = eng.pools[group.name], []
        for request in eng._running.values():
            table, size = request.tables[i].entries, group.page_tokens(eng.plan.page_size)
            if group.kind == "fixed":  # a slot has the value after each length, and none is written between steps
                assert (table[0] >= 0) == (request.length > 0) and table[1] == -1
                held += table[table >= 0].tolist()
                continue
            first = max(0, request.length - group.window + 1) // size if group.window else 0
            last = -(-request.length // size)
            assert (table[first:last] >= 0).all() and (table[:first] == -1).all() and (table[last:] == -1).all()
            held += table[first:last].tolist()
            assert last - first <= request.budget[i] + request.family.shared[i]
        assert sorted([*set(held), *pool.free_pages, *pool.idle_pages]) == list(range(pool.pages))
        assert all(pool._pages[key] == page for page, key in enumerate(pool._keys) if key is not None)
        assert all(pool._keys[page] is not None for page in pool.idle_pages)
        assert all(pool._keys[page] is None for page in pool.free_pages)
        assert pool._references == [held.count(page) for page in range(pool.pages)]
        families = {id(r.family): r.family for r in eng._running.values()}.values()
        promised = sum(r.budget[i] for r in eng._running.values()) + sum(f.shared[i] for f in families)
        assert pool.reserved == promised <= pool.pages and len(set(held)) <= promised


def empty(eng: Engine) -> None:
    consistent(eng)
    assert not eng.active
    assert all(len(p.free_pages) + len(p.idle_pages) == p.pages and p.reserved == 0 for p in eng.pools.values())


def owner_of(place: str) -> tuple[type, str]:
    """The class and the method that ``place`` names, "SlotTable.slide" or, of the first that has it, "slide"."""
    owner, _, method = place.rpartition(".")
    return next((c, method) for c in (PagePool, BlockTable, SlotTable, Engine, PrefixCache)
                if method in vars(c) and owner in ("", c.__name__))  # fmt: skip


def go_on_through_interrupts(monkeypatch, place: str, after: bool, rng, chance: float, eng: Engine, ids: list[int],
                             expected: list[list[int]]) -> None:
    """Runs the requests ``ids`` to their ends with Ctrl-C just before or ``after`` calls of the method ``place``, by
    chance, one a step at most and twelve in all: they give what is expected, and nothing is lost in between."""
    owner, method = owner_of(place)
    real, left, armed = getattr(owner, method), 12, False

    def interrupted(self, *args):
        nonlocal left, armed
        now = armed and left > 0 and rng.random() < chance
        left, armed = left - now, armed and not now
        if now and not after:
            raise KeyboardInterrupt
        result = real(self, *args)
        if now:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, method, interrupted)
    tokens, interrupts = {i: [] for i in ids}, 0
    while eng.active:
        armed = True
        try:
            for event in eng.step():
                tokens[event.request].append(event.token)
        except KeyboardInterrupt:
            interrupts += 1
        consistent(eng)
        eng.poison_free_pages()
    assert [tokens[i] for i in ids] == expected and interrupts
    empty(eng)
