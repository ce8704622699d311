"""The index of sparse attention: it chooses the rows that ``attention`` reads, one by one or in blocks."""

from __future__ import annotations

import numpy as np

from adaptc.errors import LegalityError
from adaptc.ops.mixing import RowState
from adaptc.ops.table import REQUIRED, OpRow, context_symbol, expect, scaled, size
from adaptc.protocol import TensorSpec


def _infer_index(attrs, operands):
    query, key, weights, positions, requests, state = operands
    kinds = tuple(o.dtype for o in operands[:5])
    expect(kinds == ("f32", "f32", "f32", "i32", "i32"),
           f"index_rows: operands are {', '.join(kinds)}; expected query, key and weights in f32, positions and requests "
           "in i32.")
    expect(len(query.shape) == 3 and key.shape == query.shape[::2]
           and weights.shape == query.shape[:2],
           f"index_rows: the query is {query.shape}, the key {key.shape}, weights {weights.shape}; expected [T, H, D], "
           "[T, D], [T, H].")
    expect(positions.shape == requests.shape == query.shape[:1],
           f"index_rows: positions are {positions.shape}, requests {requests.shape}; expected one a token, "
           f"{query.shape[:1]}.")
    expect(len(state.parts) == 1 and tuple(state.parts[0][1:]) == (1, key.shape[1]) and not state.window,
           f"index_rows: the state keeps {state.parts} in a window of {state.window}; expected all keys, "
           f"one head of {key.shape[1]}.")
    expect(isinstance(attrs["top_k"], int) and attrs["top_k"] >= 1,
           f"index_rows: top_k is {attrs['top_k']!r}, expected a positive number.")
    return (TensorSpec("i32", (query.shape[0], attrs["top_k"])),)


def _index(attrs, query, key, weights, positions, requests, state: RowState):
    """The ``top_k`` rows with the largest Σ over heads of weight · max(q·k · scaling, 0) among those that the token sees
    (positions up to its own; of a state with a row for several tokens, rows of those that are whole), in float64 and
    rounded once: ascending, of equal ones the lower, -1 where there are fewer."""
    for t, (position, request) in enumerate(zip(positions.tolist(), requests.tolist())):
        state.append(request, position, (key[t][None],))
    result = np.full((len(query), attrs["top_k"]), -1, np.int32)
    for t, (position, request) in enumerate(zip(positions.tolist(), requests.tolist())):
        try:
            (keys,) = state.read(request, 0, state.seen(position))
        except KeyError:
            raise LegalityError(f"index_rows: request {request} lacks rows for positions below {position}.") from None
        dots = keys[:, 0].astype(np.float64) @ query[t].astype(np.float64).T
        scores = (np.maximum(dots * attrs["scaling"], 0) @ weights[t].astype(np.float64)).astype(np.float32)
        chosen = np.sort(np.argsort(-scores, kind="stable")[: attrs["top_k"]])
        result[t, : len(chosen)] = chosen
    return (result,)


def _index_flops(attrs, operands, results):
    query, _, _, _, _, state = operands
    return scaled(size((*query.shape[:2], context_symbol(state.window, state.rate), query.shape[2] + 1)), 2)


def _infer_blocks(attrs, operands):
    query, key, positions, requests, state = operands
    kinds = tuple(o.dtype for o in operands[:4])
    expect(kinds == ("f32", "f32", "i32", "i32"),
           f"index_blocks: operands are {', '.join(kinds)}; expected query and key in f32, positions and requests in i32.")
    expect(len(query.shape) == 3 and key.shape == query.shape[::2] and positions.shape == requests.shape == query.shape[:1],
           f"index_blocks: the query is {query.shape}, the key {key.shape}, positions {positions.shape}, requests "
           f"{requests.shape}; expected [T, H, D], [T, D], [T], [T].")
    expect(len(state.parts) == 1 and tuple(state.parts[0][1:]) == (1, key.shape[1]) and not state.window and state.rate == 1,
           f"index_blocks: the state keeps {state.parts} in a window of {state.window}, a row for every {state.rate} tokens; "
           f"expected all keys, one head of {key.shape[1]}.")
    top_k, block, local = (attrs[name] for name in ("top_k", "block", "local"))
    expect(top_k >= 1 and block >= 1 and 0 <= local <= top_k,
           f"index_blocks: {top_k} blocks of {block} are chosen, {local} of them those nearest; expected positive numbers, "
           "and no more than are chosen.")
    return (TensorSpec("i32", (*query.shape[:2], top_k * block)),)


def _blocks(attrs, query, key, positions, requests, state: RowState):
    """For each head the positions up to the token's own in the ``top_k`` blocks, of ``block`` positions each, whose largest
    q·k among those positions is the largest, in float64 and rounded once: ascending, of equal blocks the lower, then -1.
    The token's own block and the ``local`` - 1 before it come before all others."""
    for t, (position, request) in enumerate(zip(positions.tolist(), requests.tolist())):
        state.append(request, position, (key[t][None],))
    tokens, heads, _ = query.shape
    result = np.full((tokens, heads, attrs["top_k"] * attrs["block"]), -1, np.int32)
    for t, (position, request) in enumerate(zip(positions.tolist(), requests.tolist())):
        try:
            (keys,) = state.read(request, 0, position + 1)
        except KeyError:
            raise LegalityError(f"index_blocks: request {request} lacks rows for positions below {position}.") from None
        scores = (query[t].astype(np.float64) @ keys[:, 0].astype(np.float64).T).astype(np.float32)
        blocks = np.maximum.reduceat(scores, np.arange(0, position + 1, attrs["block"]), axis=1)
        if attrs["local"]:
            blocks[:, -attrs["local"] :] = np.inf
        for head, order in enumerate(np.argsort(-blocks, axis=1, kind="stable")[:, : attrs["top_k"]]):
            places = (np.sort(order)[:, None] * attrs["block"] + np.arange(attrs["block"])).ravel()
            places = places[places <= position]
            result[t, head, : len(places)] = places
    return (result,)


def _blocks_flops(attrs, operands, results):
    query, *_, state = operands
    return scaled(size((*query.shape[:2], context_symbol(state.window), query.shape[2])), 2)


ROWS = [
    OpRow("index_rows", ("query", "key", "weights", "positions", "requests", "state"), _infer_index, _index,
          attrs={"top_k": REQUIRED, "scaling": 1.0}, factors="thd,td,th,t,t->tk", cost=_index_flops, state=5),
    OpRow("index_blocks", ("query", "key", "positions", "requests", "state"), _infer_blocks, _blocks,
          attrs={"top_k": REQUIRED, "block": REQUIRED, "local": 0}, factors="thd,td,t,t->thk", cost=_blocks_flops, state=4),
]
