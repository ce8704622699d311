"""The index of sparse attention: ``kv_append`` writes the step's index keys, ``index_scores`` scores keys for steps of
few tokens, ``index_rows`` chooses.

A token's score of a key is a sum over heads, in their order, of a weight and a product whose terms are added in the
order of ``online_softmax.Stored``: its bits depend on the token's query and weights and on the key alone. Which scores
are the largest, of equal ones those at the lower positions, has one answer; so chunks, batches, pages and threads
change nothing.

A thread chooses for a whole token. As it runs over the keys it keeps those that may yet be chosen, in their order, and
no more than twice as many as are wanted: when there is no room for another, the wanted-th largest score is found, bit
by bit from the highest, and what is below it goes. Steps with more tokens than ``FEW`` are scored as they are chosen
from; of fewer, threads share the scoring of each token's blocks, which is most of the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from adaptc.backends.cpu.kernels.attention import uses_of
from adaptc.backends.cpu.kernels.base import Emitter, Family, Value
from adaptc.backends.cpu.kernels.division import Count, seen
from adaptc.backends.cpu.kernels.online_softmax import TOGETHER, Stored
from adaptc.backends.cpu.kernels.pages import COLUMNS, Block, Pages, load_index, page_elements, room
from adaptc.backends.cpu.levels import Level
from adaptc.options import KEPT
from adaptc.protocol import OpSpec, Selection, StateSpec, TensorSpec

FEW = 16
"""Most tokens of a step whose scores threads share."""


class Scorer:
    """The scores of a token for the keys of a block."""

    def __init__(self, e: Emitter, params: Mapping[str, Any], query: Value, weights: Value, pool: Value, table: Value):
        self.e, self.params, self.query, self.weights = e, params, query, weights
        self.stored = Block(e, params, Pages(e, params, pool, table))

    def __call__(self, token: Value, request: Value, base: Value, end: Value, out: Value) -> None:
        """Scores of the keys [base, end) of a block that starts at ``base`` to ``out`` on, and of up to a vector more
        that are anything."""
        e, heads = self.e, self.params["heads"]
        place = self.stored.find(request, e.const(0, "i64"), base, end)
        data = Stored(e, self.params, place, None)
        lanes, floats = data.lanes, data.floats
        together = TOGETHER if heads % TOGETHER == 0 else 1
        with e.loop(0, e.sub(end, base), lanes) as key:
            with e.loop(0, heads, together, [e.const(0.0, floats)]) as head:
                rows = [e.add(e.mul(token, heads), e.add(head.index, i)) for i in range(together)]
                queries = [e.at(self.query, e.mul(row, self.params["width"]), "f32") for row in rows]
                (total,) = head.args
                for row, (dots,) in zip(rows, data.dots(queries, key.index, 1)):
                    if self.params["scale"]:
                        dots = e.mul(dots, e.load(data.scale(0, key.index), floats))
                    weight = e.splat(e.load(e.at(self.weights, row, "f32"), "f32"), lanes)
                    total = e.fma(weight, e.max(e.mul(dots, self.params["scaling"]), 0.0), total)
                head.end(total)
            e.store(head.results[0], e.at(out, key.index, "f32"))


class Candidates:
    """Positions that may yet be chosen, ascending, with their scores as integers that are ordered as the scores are,
    unsigned."""

    def __init__(self, e: Emitter, wanted: int):
        self.e, self.wanted, self.capacity = e, wanted, -(-2 * wanted // e.lanes) * e.lanes
        self.scores, self.places = (room(e, self.capacity + e.lanes, "i32") for _ in range(2))
        self.count, self.least = Count(e), Count(e)

    def clear(self) -> None:
        self.count.set(self.e.const(0, "i64"))
        self.least.set(self.e.const(-1, "i64"))

    def offer(self, score: Value, position: Value) -> None:
        """Keeps a position, later than those before it, whose score (f32) is above that of the last one wanted."""
        e = self.e
        bits = e.cast("bitcast", e.add(score, 0.0), "i32")  # -0, as underflow leaves it, is no less than 0
        ordered = e.xor(bits, e.or_(e.sar(bits, 31), -(2**31)))
        with e.when(e.compare("sgt", e.cast("extui", ordered, "i64"), self.least.get())):
            with e.when(e.compare("eq", self.count.get(), self.capacity)):
                self.cut()
            count = self.count.get()
            e.store(ordered, e.at(self.scores, count, "i32"))
            e.store(e.cast("trunci", position, "i32"), e.at(self.places, count, "i32"))
            self.count.set(e.add(count, 1))

    def cut(self) -> None:
        """Leaves the wanted ones, of more: those above the wanted-th largest score, and of its equals the first."""
        e, count = self.e, self.count.get()
        e.store(e.const(0, e.words), e.at(self.scores, count, "i32"))  # the last vector's rest is below every bound
        with e.loop(0, 32, init=[e.const(0, "i32")]) as bit:
            (found,) = bit.args
            mask = e.shl(e.const(1, "i32"), e.sub(31, e.cast("trunci", bit.index, "i32")))
            bound = e.or_(found, mask)
            bit.end(e.select(e.compare("sge", self._from(bound, count), self.wanted), bound, found))
        (bound,) = bit.results
        above = e.select(e.compare("eq", bound, -1), e.const(0, "i64"), self._from(e.add(bound, 1), count))
        with e.loop(0, count, init=[e.const(0, "i64"), e.sub(self.wanted, above)]) as entry:
            kept, equals = entry.args
            score, place = (e.load(e.at(part, entry.index, "i32"), "i32") for part in (self.scores, self.places))
            equal = e.and_(e.compare("eq", score, bound), e.compare("sgt", equals, 0))
            stays = e.or_(e.compare("ugt", score, bound), equal)
            e.store(score, e.at(self.scores, kept, "i32"))
            e.store(place, e.at(self.places, kept, "i32"))
            entry.end(e.add(kept, e.cast("extui", stays, "i64")), e.sub(equals, e.cast("extui", equal, "i64")))
        self.count.set(entry.results[0])
        self.least.set(e.cast("extui", bound, "i64"))

    def _from(self, bound: Value, count: Value) -> Value:
        """How many of ``count`` scores are ``bound`` (i32, not 0) or above."""
        e = self.e
        bounds, ones = e.splat(bound), e.const(1, e.words)
        with e.loop(0, count, e.lanes, [e.const(0, e.words)]) as entry:
            scores = e.load(e.at(self.scores, entry.index, "i32"), e.words)
            entry.end(e.add(entry.args[0], e.select(e.compare("uge", scores, bounds), ones, 0)))
        return e.cast("extui", e.reduce(e.add, entry.results[0]), "i64")

    def finish(self, out: Value) -> None:
        """The wanted positions (i32), then -1."""
        e = self.e
        with e.when(e.compare("sgt", self.count.get(), self.wanted)):
            self.cut()
        with e.loop(0, self.count.get()) as entry:
            e.store(e.load(e.at(self.places, entry.index, "i32"), "i32"), e.at(out, entry.index, "i32"))
        with e.loop(self.count.get(), self.wanted) as entry:
            e.store(e.const(-1, "i32"), e.at(out, entry.index, "i32"))


def _blocks(e: Emitter, params: Mapping[str, Any], low: Value, high: Value, end: Value,
            body: Callable[[Value, Value], None]) -> None:
    """``body(first key, the one after its last)`` for each of the blocks [low, high), of keys before ``end``."""
    with e.loop(low, high) as block:
        base = e.mul(block.index, params["key_block"])
        body(base, e.min(e.add(base, params["key_block"]), end))


def emit_scores(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    """Each token's row of ``scores``, if there are few tokens."""
    e = Emitter(level)
    query, weights, positions, requests, pool, table, scores = (e.buffer(i) for i in range(7))
    tokens = e.size("T")
    scorer = Scorer(e, params, query, weights, pool, table)
    with e.when(e.compare("sle", tokens, FEW)), e.loop(0, tokens) as token:
        request, end = load_index(e, requests, token.index), seen(e, params, load_index(e, positions, token.index))
        row = e.at(scores, e.mul(token.index, _room(params)), "f32")
        low, high = e.share(e.div(e.add(end, params["key_block"] - 1), params["key_block"]))
        _blocks(e, params, low, high, end, lambda base, stop: scorer(token.index, request, base, stop,
                                                                     e.at(row, base, "f32")))
    return e.text(symbol)


def emit_rows(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    e = Emitter(level)
    query, weights, positions, requests, pool, table, scores, out = (e.buffer(i) for i in range(8))
    tokens = e.size("T")
    few = e.compare("sle", tokens, FEW)
    scorer = Scorer(e, params, query, weights, pool, table)
    here, chosen = room(e, params["key_block"]), Candidates(e, params["top_k"])
    low, high = e.share(tokens)
    with e.loop(low, high) as token:
        request, end = load_index(e, requests, token.index), seen(e, params, load_index(e, positions, token.index))
        row = e.at(scores, e.mul(token.index, _room(params)), "f32")
        chosen.clear()

        def choose(base: Value, stop: Value) -> None:
            with e.when(e.xor(few, True)):
                scorer(token.index, request, base, stop, here)
            start = e.select(few, e.at(row, base, "f32"), here)
            with e.loop(base, stop) as key:
                chosen.offer(e.load(e.at(start, e.sub(key.index, base), "f32"), "f32"), key.index)

        _blocks(e, params, e.const(0, "i64"), e.div(e.add(end, params["key_block"] - 1), params["key_block"]), end, choose)
        chosen.finish(e.at(out, e.mul(token.index, params["top_k"]), "i32"))
    return e.text(symbol)


# ---- declaration


def _room(params: Mapping[str, Any]) -> int:
    """Scores that a token may have, in whole blocks."""
    return -(-params["max_pages"] * params["page_size"] // params["key_block"]) * params["key_block"]


def scores_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    heads, width = params["heads"], params["width"]
    state = f"state:{params['dtype']}[pages,{page_elements(params)}]", f"pages:i32[R,{params['max_pages']}]"
    return (f"in:f32[T,{heads},{width}]", f"in:f32[T,{heads}]", "in:i32[T]", "in:i32[T]", *state,
            f"scratch:f32[{FEW},{_room(params)}]")


def rows_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    return (*scores_signature(params), f"out:i32[T,{params['top_k']}]")


FAMILIES = {"index_scores": Family(emit_scores, scores_signature), "index_rows": Family(emit_rows, rows_signature)}


def select(spec: OpSpec) -> Selection | None:
    """Every key is written before any is read, and every score before any is chosen: a kernel each. None for widths
    that don't fill vectors."""
    query, *_, state = spec.operands
    assert isinstance(state, StateSpec)
    heads, width = query.shape[1:]
    if width % COLUMNS or state.key_block % COLUMNS or (state.dtype, state.scale) not in KEPT.values():
        return None
    paging = {
        "dtype": state.dtype, "kv_heads": 1, "latent": True, "max_pages": state.max_pages,
        "page_size": state.page_size, "rate": state.rate, "scale": state.scale, "width": width,
    }  # fmt: skip
    scores = paging | {"heads": heads, "key_block": state.key_block, "scaling": float(spec.attrs["scaling"])}
    rows = scores | {"top_k": spec.attrs["top_k"]}
    where, cache = ("operand:3", "operand:4"), ("state:5", "pages:5")
    reads = ("operand:0", "operand:2", *where, *cache, "scratch:0")
    uses = [("kv_append", paging, ("operand:1", *where, *cache)), ("index_scores", scores, reads),
            ("index_rows", rows, (*reads, "result:0"))]
    return Selection(uses_of(uses), (TensorSpec("f32", (FEW, _room(scores))),))


SELECT = {"index_rows": select}

NEEDS = {"index_rows": f"a width of keys that is a multiple of {COLUMNS}"}
