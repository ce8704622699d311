"""The index of blockwise sparse attention: ``kv_append`` writes the step's index keys, ``index_block_scores`` scores blocks
for steps of few tokens, ``index_blocks`` chooses.

A head's score of a key is a product whose terms are added in the order of ``online_softmax.Stored``, and that of a block is
its largest: its bits depend on the token's query and on the block's keys alone. Chosen are blocks as keys are in ``index``.
Keys are scored in units of whole blocks and whole ``key_block`` of the cache; threads share tokens and heads or, in steps
of at most ``FEW`` tokens, first the units of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from adaptc.backends.cpu.kernels.attention import uses_of
from adaptc.backends.cpu.kernels.base import Emitter, Family, Value
from adaptc.backends.cpu.kernels.division import Count
from adaptc.backends.cpu.kernels.index import FEW, Candidates
from adaptc.backends.cpu.kernels.online_softmax import Stored
from adaptc.backends.cpu.kernels.pages import COLUMNS, Block, Pages, load_index, page_elements, room
from adaptc.backends.cpu.levels import Level
from adaptc.options import KEPT
from adaptc.protocol import OpSpec, Selection, StateSpec, TensorSpec


class Scorer:
    """The scores of a token's head for the blocks of a unit."""

    def __init__(self, e: Emitter, params: Mapping[str, Any], query: Value, pool: Value, table: Value):
        self.e, self.params, self.query = e, params, query
        self.stored = Block(e, params, Pages(e, params, pool, table))
        self.scores = room(e, params["key_block"] + e.lanes)

    def __call__(self, row: Value, request: Value, base: Value, end: Value, out: Value) -> None:
        """Scores of the blocks of the unit that starts at the key ``base``, of keys before ``end``, to ``out`` on; ``row``
        is the token's number among those of all heads."""
        e, block, step = self.e, self.params["block"], self.params["key_block"]
        query = e.at(self.query, e.mul(row, self.params["width"]), "f32")
        with e.loop(0, _unit(self.params) // block) as place:
            e.store(e.const(-math.inf, "f32"), e.at(out, place.index, "f32"))
        limit = e.min(e.add(base, _unit(self.params)), end)
        with e.loop(base, limit, step) as start:
            count = e.sub(e.min(e.add(start.index, step), limit), start.index)
            place = self.stored.find(request, e.const(0, "i64"), start.index, e.add(start.index, count))
            data = Stored(e, self.params, place, None)
            with e.loop(0, count, data.lanes) as key:
                ((dots,),) = data.dots([query], key.index, 1)
                if self.params["scale"]:
                    dots = e.mul(dots, e.load(data.scale(0, key.index), data.floats))
                e.store(dots, e.at(self.scores, key.index, "f32"))
            with e.loop(0, count) as key:
                here = e.at(out, e.div(e.sub(e.add(start.index, key.index), base), block), "f32")
                e.store(e.max(e.load(here, "f32"), e.load(e.at(self.scores, key.index, "f32"), "f32")), here)


def _unit(params: Mapping[str, Any]) -> int:
    """Keys that are scored together: whole blocks, and whole blocks of the cache."""
    return max(params["block"], params["key_block"])


def _units(e: Emitter, params: Mapping[str, Any], end: Value) -> Value:
    return e.div(e.add(end, _unit(params) - 1), _unit(params))


def emit_scores(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    """Each token's and head's row of ``scores``, if there are few tokens."""
    e = Emitter(level)
    query, positions, requests, pool, table, scores = (e.buffer(i) for i in range(6))
    heads, unit = params["heads"], _unit(params)
    scorer, tokens = Scorer(e, params, query, pool, table), e.size("T")
    with e.when(e.compare("sle", tokens, FEW)), e.loop(0, tokens) as token:
        request, end = load_index(e, requests, token.index), e.add(load_index(e, positions, token.index), 1)
        low, high = e.share(_units(e, params, end))
        with e.loop(low, high) as number, e.loop(0, heads) as head:
            row, base = e.add(e.mul(token.index, heads), head.index), e.mul(number.index, unit)
            place = e.add(e.mul(row, _room(params)), e.mul(number.index, unit // params["block"]))
            scorer(row, request, base, end, e.at(scores, place, "f32"))
    return e.text(symbol)


def emit_blocks(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    e = Emitter(level)
    query, positions, requests, pool, table, scores, out = (e.buffer(i) for i in range(7))
    heads, top_k, block, unit = (*(params[k] for k in ("heads", "top_k", "block")), _unit(params))
    few = e.compare("sle", e.size("T"), FEW)
    scorer, chosen, count = Scorer(e, params, query, pool, table), Candidates(e, top_k), Count(e)
    here, numbers = room(e, unit // block), room(e, top_k, "i32")
    low, high = e.share(e.mul(e.size("T"), heads))
    with e.loop(low, high) as row:
        token = e.div(row.index, heads)
        request, position = load_index(e, requests, token), load_index(e, positions, token)
        end, own = e.add(position, 1), e.div(position, block)
        chosen.clear()
        with e.loop(0, _units(e, params, end)) as number:
            first = e.mul(number.index, unit // block)
            with e.when(e.xor(few, True)):
                scorer(row.index, request, e.mul(number.index, unit), end, here)
            kept = e.at(scores, e.add(e.mul(row.index, _room(params)), first), "f32")
            found = e.select(few, kept, here)
            with e.loop(first, e.min(e.add(first, unit // block), e.add(own, 1))) as place:
                score = e.load(e.at(found, e.sub(place.index, first), "f32"), "f32")
                near = e.compare("sgt", place.index, e.sub(own, params["local"]))
                chosen.offer(e.select(near, math.inf, score) if params["local"] else score, place.index)
        chosen.finish(numbers)
        result = e.at(out, e.mul(row.index, top_k * block), "i32")
        count.set(e.const(0, "i64"))
        with e.loop(0, top_k) as entry:
            begin = e.mul(e.cast("extsi", e.load(e.at(numbers, entry.index, "i32"), "i32"), "i64"), block)
            with e.when(e.compare("sge", begin, 0)), e.loop(begin, e.min(e.add(begin, block), end)) as key:
                e.store(e.cast("trunci", key.index, "i32"), e.at(result, count.get(), "i32"))
                count.set(e.add(count.get(), 1))
        with e.loop(count.get(), top_k * block) as rest:
            e.store(e.const(-1, "i32"), e.at(result, rest.index, "i32"))
    return e.text(symbol)


# ---- declaration


def _room(params: Mapping[str, Any]) -> int:
    """Blocks that a token may see, in whole units."""
    unit = _unit(params)
    return -(-params["max_pages"] * params["page_size"] // unit) * (unit // params["block"])


def scores_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    state = f"state:{params['dtype']}[pages,{page_elements(params)}]", f"pages:i32[R,{params['max_pages']}]"
    return (f"in:f32[T,{params['heads']},{params['width']}]", "in:i32[T]", "in:i32[T]", *state,
            f"scratch:f32[{FEW},{params['heads']},{_room(params)}]")


def blocks_signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    return (*scores_signature(params), f"out:i32[T,{params['heads']},{params['top_k'] * params['block']}]")


FAMILIES = {"index_block_scores": Family(emit_scores, scores_signature),
            "index_blocks": Family(emit_blocks, blocks_signature)}


def select(spec: OpSpec) -> Selection | None:
    """Every key is written before any is read, and every score before any is chosen: a kernel each. None for widths
    that don't fill vectors, and for blocks of which neither the cache's nor the index's hold whole ones of the other."""
    query, *_, state = spec.operands
    assert isinstance(state, StateSpec)
    heads, width = query.shape[1:]
    block = spec.attrs["block"]
    if width % COLUMNS or state.key_block % COLUMNS or (state.dtype, state.scale) not in KEPT.values():
        return None
    if max(block, state.key_block) % min(block, state.key_block):
        return None
    paging = {
        "dtype": state.dtype, "kv_heads": 1, "latent": True, "max_pages": state.max_pages,
        "page_size": state.page_size, "rate": state.rate, "scale": state.scale, "width": width,
    }  # fmt: skip
    scores = paging | {"block": block, "heads": heads, "key_block": state.key_block}
    blocks = scores | {"local": spec.attrs["local"], "top_k": spec.attrs["top_k"]}
    where, cache = ("operand:2", "operand:3"), ("state:4", "pages:4")
    reads = ("operand:0", *where, *cache, "scratch:0")
    uses = [("kv_append", paging, ("operand:1", *where, *cache)), ("index_block_scores", scores, reads),
            ("index_blocks", blocks, (*reads, "result:0"))]
    return Selection(uses_of(uses), (TensorSpec("f32", (FEW, heads, _room(scores))),))


SELECT = {"index_blocks": select}

NEEDS = {"index_blocks": f"a width of keys that is a multiple of {COLUMNS}, and blocks that the cache's hold whole ones of, "
                         "or that hold whole ones of the cache's"}
