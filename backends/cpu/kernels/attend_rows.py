"""Attention over chosen rows: each token reads the positions that its row of ``rows`` names, ascending, and no others.

A token's rows are cut into blocks of ``key_block``, which are copied one after the other and visited in order with a
running maximum and sum. Which rows stand in a block depends on the token's choice alone, so its bits do too. Threads
share tokens and sets of heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaptc.backends.cpu.kernels.attention import lse_of, pieces_of, state_of
from adaptc.backends.cpu.kernels.base import Emitter, Family, Value
from adaptc.backends.cpu.kernels.online_softmax import Rows, Running, Stored, Visit
from adaptc.backends.cpu.kernels.pages import Copies, Pages, load_index, room
from adaptc.backends.cpu.levels import Level


def emit(params: Mapping[str, Any], symbol: str, level: Level) -> str:
    e = Emitter(level)
    heads, sets, most, block = (params[k] for k in ("heads", "sets", "top_k", "key_block"))
    group = heads // sets
    query, requests, pool, table, *more = (e.buffer(i) for i in range(len(signature(params))))
    lse = more.pop() if params["lse"] else None
    *sinks, chosen, out = more
    rows, visit = Rows(e, params), Visit(e, params)
    copies = Copies(e, params, Pages(e, params, pool, table))
    tops, totals = room(e, group * rows.lanes), room(e, group * rows.lanes)
    low, high = e.share(e.mul(e.size("T"), sets))
    with e.loop(low, high) as unit:
        token, part = e.div(unit.index, sets), e.rem(unit.index, sets)
        head = e.div(part, sets // params["kv_heads"])
        begins = e.mul(part, group)
        first = e.add(e.mul(token, heads), begins)
        request, mine = load_index(e, requests, token), e.at(chosen, e.mul(token, most), "i32")
        with e.loop(0, most, init=[e.const(0, "i64")]) as entry:
            there = e.compare("sge", e.load(e.at(mine, entry.index, "i32"), "i32"), 0)
            entry.end(e.add(entry.args[0], e.cast("extui", there, "i64")))
        (count,) = entry.results

        def row_of(number: Value) -> Running:
            values = e.at(out, e.mul(e.add(first, number), params["value_width"]), "f32")
            return Running(*(e.at(part, e.mul(number, rows.lanes), "f32") for part in (tops, totals)), values)

        with e.loop(0, group) as number:
            rows.clear(row_of(number.index))
        with e.loop(0, count, block) as start:
            here, data = e.min(e.sub(count, start.index), block), Stored(e, params, copies.place, None)
            with e.loop(0, here) as place:
                copies.put(place.index, request, head, load_index(e, mine, e.add(start.index, place.index)))
            for begin, end, together in pieces_of(group):
                with e.loop(begin, end, together) as number:
                    numbers = [e.add(number.index, i) for i in range(together)]
                    queries = [e.at(query, e.mul(e.add(first, n), params["width"]), "f32") for n in numbers]
                    visit(data, [row_of(n) for n in numbers], queries, e.const(0, "i64"), here)
        with e.loop(0, group) as number:
            sink = e.at(sinks[0], e.add(begins, number.index), "f32") if sinks else None
            rows.finish(row_of(number.index), sink, e.at(lse, e.add(first, number.index), "f32") if lse else None)
    return e.text(symbol)


def signature(params: Mapping[str, Any]) -> tuple[str, ...]:
    query, out = (f"f32[T,{params['heads']},{params[name]}]" for name in ("width", "value_width"))
    sinks = [f"in:f32[{params['heads']}]"] if params["sinks"] else []
    return (f"in:{query}", "in:i32[T]", *state_of(params), *sinks, f"in:i32[T,{params['top_k']}]", f"out:{out}",
            *lse_of(params))


FAMILIES = {"attend_rows": Family(emit, signature)}
