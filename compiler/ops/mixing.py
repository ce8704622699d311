"""Operators that see other tokens, through positions or a state: rope and attention."""

from __future__ import annotations

import numpy as np

from adaptc.errors import LegalityError
from adaptc.ops.elementwise import rounded
from adaptc.ops.table import REQUIRED, OpRow, context_symbol, expect, scaled, size
from adaptc.protocol import StateSpec, TensorSpec


def store(values: np.ndarray, dtype: str, scale: str = "") -> np.ndarray:
    """``values`` rounded to what a state keeps them in, back as float32. With a ``scale``, each row (the last axis)
    is codes from -127 to 127 of its largest value; a row with a value that is infinite or not a number has no codes,
    and none of its values is a number."""
    if not scale:
        return rounded(values, dtype).astype(np.float32)
    rows = values.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scales = rounded(np.abs(rows).max(-1, keepdims=True) / np.float32(127), scale).astype(np.float32)
        coded = (scales > 0) & np.isfinite(scales)
        return np.where(coded, np.rint(rows / scales).clip(-127, 127), np.float32(0)) * scales


class RowState:
    """The oracle's rows of one state: per request, one array a part, indexed by position, or by that divided by the
    state's rate."""

    def __init__(self, spec: StateSpec):
        self.spec = spec
        self.rows: dict[int, list[dict[int, np.ndarray]]] = {}

    def append(self, request: int, position: int, parts) -> None:
        """The row of the token at ``position``, if it is one that has a row (``plan.State``)."""
        if (position + 1) % self.spec.rate == 0:
            self.put(request, position // self.spec.rate, parts)

    def put(self, request: int, number: int, parts) -> None:
        table = self.rows.setdefault(request, [{} for _ in self.spec.parts])
        for rows, value in zip(table, parts):
            rows[number] = store(value, self.spec.dtype, self.spec.scale)

    def seen(self, position: int) -> int:
        """How many rows a token at ``position`` may see."""
        return (position + 1) // self.spec.rate

    def read(self, request: int, lo: int, hi: int) -> list[np.ndarray]:
        """Rows lo..hi-1 of each part, [hi - lo, heads, width]."""
        if lo == hi:
            return [np.zeros((0, heads, width), np.float32) for _, heads, width in self.spec.parts]
        return [np.stack([rows[p] for p in range(lo, hi)]) for rows in self.rows[request]]


class FixedState:
    """The oracle's values of one state of fixed size: per request, one array a part and length, float32. Of lengths
    the last two are kept, as a step that is run again starts from the one before."""

    def __init__(self, spec: StateSpec):
        self.spec = spec
        self.values: dict[int, dict[int, list[np.ndarray]]] = {}

    def read(self, request: int, length: int, initial: float = 0.0) -> list[np.ndarray]:
        """The value after ``length`` tokens, [heads, width] each part; ``initial`` everywhere after none."""
        if length == 0:
            return [np.full((heads, width), initial, np.float32) for _, heads, width in self.spec.parts]
        found = self.values.get(request, {})
        if length not in found:
            raise LegalityError(f"request {request} has no value of state {self.spec.parts} after {length} tokens.")
        return found[length]

    def write(self, request: int, start: int, length: int, parts) -> None:
        """The value after ``length`` tokens, made from that after ``start`` of them."""
        found = self.values.get(request, {})
        kept = {start: found[start]} if start in found else {}
        self.values[request] = kept | {length: [np.asarray(part, np.float32) for part in parts]}


def oracle_state(spec: StateSpec) -> RowState | FixedState:
    """What a stateful operator's meaning takes for a state."""
    return {"rows": RowState, "fixed": FixedState}[spec.kind](spec)


def _infer_rope(attrs, operands):
    x, cos, sin = operands
    kinds = sorted({o.dtype for o in operands})
    expect(kinds == ["f32"], f"rope: operands have dtypes {', '.join(kinds)}, expected f32.")
    expect(cos.shape == sin.shape, f"rope: cos is {cos.shape} and sin {sin.shape}.")
    expect(len(x.shape) == 3 and isinstance(x.shape[2], int), f"rope: the input is {x.shape}, expected [T, H, D].")
    turned = attrs["turned"] or x.shape[2]
    expect(0 < turned <= x.shape[2] and turned % 2 == 0,
           f"rope: {turned} of {x.shape[2]} columns turn; expected an even number, and no more than there are.")
    expect(cos.shape in ((x.shape[0], turned), (x.shape[0], turned // 2)),
           f"rope: the input is {x.shape} and cos {cos.shape}; expected [T, {turned}], one a column that turns, or "
           f"[T, {turned // 2}], one a pair.")
    return (TensorSpec("f32", x.shape),)


def _rope(attrs, x, cos, sin):
    """Columns i and i + D/2 are a pair, or with ``interleaved`` 2i and 2i + 1: (a, b) → (a·cos - b·sin,
    b·cos + a·sin). Only the first ``turned`` columns turn (0: all)."""
    turned = attrs["turned"] or x.shape[-1]
    half, part = turned // 2, x[..., :turned]
    if attrs["interleaved"]:
        other = np.stack([-part[..., 1::2], part[..., ::2]], -1).reshape(part.shape)
        wide = lambda v: np.repeat(v, 2, -1)  # noqa: E731
    else:
        other = np.concatenate([-part[..., half:], part[..., :half]], -1)
        wide = lambda v: np.concatenate([v, v], -1)  # noqa: E731
    cos, sin = ((v if v.shape[-1] == turned else wide(v))[:, None, :] for v in (cos, sin))
    return (np.concatenate([part * cos + other * sin, x[..., turned:]], -1),)


def _rope_down(b, a, x, cos, sin):
    t, heads, width = b.shape(x)
    turned = a["turned"] or width
    half, end = turned // 2, -1 if isinstance(t, str) else t

    def columns(value, low, high):
        return b.slice(value, starts=(0, 0, low), limits=(end, heads, high), strides=(1, 1, 1))

    def wide(table):
        """A table with an entry for each column, for all heads."""
        if b.shape(table)[1] == half:
            pairs = b.broadcast(table, shape=(t, half, 2), dims=(0, 1)) if a["interleaved"] else None
            table = b.concat(table, table, axis=1) if pairs is None else pairs
        return b.reshape(table, shape=(t, 1, turned))

    part = x if turned == width else columns(x, 0, turned)
    if a["interleaved"]:
        pairs = b.reshape(part, shape=(t, heads, half, 2))
        first, second = (b.slice(pairs, starts=(0, 0, 0, i), limits=(end, heads, half, i + 1), strides=(1, 1, 1, 1))
                         for i in (0, 1))
        other = b.reshape(b.concat(b.neg(second), first, axis=3), shape=(t, heads, turned))
    else:
        other = b.concat(b.neg(columns(x, half, turned)), columns(x, 0, half), axis=2)
    result = b.add(b.mul(part, wide(cos)), b.mul(other, wide(sin)))
    return (result if turned == width else b.concat(result, columns(x, turned, width), axis=2),)


def _expect_rows(name: str, rows, tokens, window: int) -> None:
    expect(rows.dtype == "i32" and len(rows.shape) == 2 and rows.shape[0] == tokens and not window,
           f"{name}: rows are {rows.dtype}{list(rows.shape)} with a window of {window}; expected i32[T, K] and none.")


def _chosen(name: str, rows: np.ndarray, position: int, seen: int) -> np.ndarray:
    """What a token's ``rows`` name, of the ``seen`` rows that it sees."""
    places = rows[rows >= 0]
    expect(places.max(initial=-1) < seen and bool(len(places)) == bool(seen),
           f"{name}: position {position} chooses {places.tolist()} of the {seen} rows that it sees; expected some of them.")
    return places


def _infer_attention(attrs, operands):
    q, k, v, *rest = operands
    (_, hk, dk), (_, hv, dv) = _keys_and_values("attention", rest[2])
    expect((k.dtype, v.dtype) == ("f32", "f32"), f"attention: k is {k.dtype} and v {v.dtype}, expected f32.")
    expect(
        all(len(o.shape) == 3 and o.shape[0] == q.shape[0] for o in (q, k, v)) and q.shape[2] == k.shape[2],
        f"attention: q is {q.shape}, k {k.shape}, v {v.shape}; expected [T, H, D], [T, Hkv, D], [T, Hkv, Dv].",
    )
    expect(
        k.shape[1:] == (hk, dk) and v.shape[1:] == (hv, dv),
        f"attention: k is {k.shape} and v {v.shape}, but the state keeps {rest[2].parts}.",
    )
    return _infer_recall(attrs, (q, *rest), "attention")


def _keys_and_values(name: str, state: StateSpec):
    expect(len(state.parts) == 2 and state.rate == 1, f"{name}: the state keeps {state.parts}, a row for every {state.rate} "
                                                      "tokens; expected keys and values of each.")
    return state.parts


def _infer_recall(attrs, operands, name="recall"):
    q, positions, requests, state, *extras = operands
    (_, hk, dk), (_, hv, dv) = _keys_and_values(name, state)
    kinds = (q.dtype, positions.dtype, requests.dtype)
    expect(kinds == ("f32", "i32", "i32"),
           f"{name}: operands are {', '.join(kinds)}; expected q in f32, positions and requests in i32.")
    expect(len(q.shape) == 3 and q.shape[2] == dk, f"{name}: q is {q.shape}, expected [T, H, {dk}], as wide as keys.")
    expect(
        positions.shape == requests.shape == q.shape[:1],
        f"{name}: positions are {positions.shape}, requests {requests.shape}; expected one a token, {q.shape[:1]}.",
    )
    for extra, given in zip(attrs["extras"], extras):
        if extra == "rows":
            _expect_rows(name, given, q.shape[0], attrs["window"])
            continue
        shape, what = {
            "query_sinks": (q.shape[:2], "one a query"),
            "distances": ((*q.shape[:2], *(given.shape[2:3] or ("D",))), "[T, H, D]"),
        }.get(extra, (q.shape[1:2], "one a query head"))
        expect(given.dtype == "f32" and given.shape == shape,
               f"{name}: {extra} are {given.dtype}{list(given.shape)}, expected f32, {what}.")
    expect(not {"sinks", "query_sinks"} <= {*attrs["extras"]}, f"{name}: sinks of heads beside those of queries.")
    expect(hk == hv, f"{name}: {hk} key heads and {hv} value heads.")
    expect(q.shape[1] % hk == 0, f"{name}: {q.shape[1]} query heads don't divide over {hk} key heads.")
    expect(attrs["window"] == state.window, f"{name}: window {attrs['window']}, the state's is {state.window}.")
    expect(attrs["window"] or not attrs["chunked"], f"{name}: chunked without a window, a chunk's tokens.")
    return (TensorSpec("f32", (q.shape[0], q.shape[1], dv)),)


def first_key(attrs, position: int) -> int:
    """The first position that a token sees: of all, of the last ``window``, or with ``chunked`` of its own chunk of so
    many."""
    window = attrs["window"]
    return 0 if not window else position - position % window if attrs["chunked"] else max(0, position - window + 1)


def _attention(attrs, q, k, v, positions, requests, state: RowState, *extras):
    """The step's keys and values appended, then ``_recall``."""
    for t, (position, request) in enumerate(zip(positions.tolist(), requests.tolist())):
        state.append(request, position, (k[t], v[t]))
    return _recall(attrs, q, positions, requests, state, *extras)


def _recall(attrs, q, positions, requests, state: RowState, *extras):
    """softmax(q·kᵀ·scaling [softcapped] [+ bias]) · v over the rows each token may see, in float64: those from
    ``first_key`` to its own, or of them those that its row of ``rows`` names (-1: none). The bias of a key d positions
    before the query is -slope · d, by the head's slope (ALiBi, https://arxiv.org/abs/2108.12409), and the query's own
    distances[d], where it has so many. A head's sink, or a query's own, is one more score, whose value is 0."""
    given = dict(zip(attrs["extras"], extras))
    (_, heads, _), (_, _, width) = state.spec.parts
    shape = (heads, q.shape[1] // heads, -1)
    result = np.empty((q.shape[0], q.shape[1], width), np.float32)
    for t, (position, request) in enumerate(zip(positions.tolist(), requests.tolist())):
        lo = first_key(attrs, position)
        try:
            keys, values = state.read(request, lo, position + 1)
        except KeyError:
            raise LegalityError(f"attention: request {request} lacks rows for positions below {position}.") from None
        places = np.arange(lo, position + 1)
        if "rows" in given:
            places = _chosen("attention", given["rows"][t], position, position + 1)
            keys, values = keys[places], values[places]
        query = q[t].reshape(shape).astype(np.float64)
        scores = np.einsum("hgd,phd->hgp", query, keys.astype(np.float64)) * attrs["scaling"]
        if attrs["softcap"]:
            scores = attrs["softcap"] * np.tanh(scores / attrs["softcap"])
        if "slopes" in given:
            scores = scores + given["slopes"].reshape(shape).astype(np.float64) * (places - position)
        if "distances" in given:
            near = given["distances"][t].astype(np.float64)
            near = np.pad(near, ((0, 0), (0, max(0, position + 1 - near.shape[1]))))[:, position - places]
            scores = scores + near.reshape(scores.shape)
        sinks = given["query_sinks"][t] if "query_sinks" in given else given.get("sinks")
        if sinks is not None:
            scores = np.concatenate([scores, sinks.reshape(shape).astype(np.float64)], -1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        weights = weights[..., : len(places)]
        result[t] = np.einsum("hgp,phd->hgd", weights, values.astype(np.float64)).reshape(q.shape[1], -1)
    return (result,)


def _rows_read(attrs, operands) -> str:
    """The rows of the context that each request reads, or that each token chooses, if ``rows`` say which."""
    rate = next(o.rate for o in operands if isinstance(o, StateSpec))
    rows = _rows_of(attrs, operands)
    return f"T*{context_symbol(rows[0].shape[1], rate)}" if rows else f"R*{context_symbol(attrs['window'], rate)}"


def _rows_of(attrs, operands) -> list:
    given = operands[len(operands) - len(attrs["extras"]) :]
    return [o for name, o in zip(attrs["extras"], given) if name == "rows"]


def _attention_flops(attrs, operands, results):
    q, (result,) = operands[0], results
    context = _rows_read(attrs, operands).split("*")[1]
    return scaled(size((q.shape[0], q.shape[1], context, q.shape[2] + result.shape[2])), 2)


_EXTRAS, _FACTORS = ("sinks?", "query_sinks?", "slopes?", "distances?", "rows?"), "h,th,h,thn,tk"
_ATTENTION = {"scaling": REQUIRED, "window": 0, "chunked": False, "softcap": 0.0, "extras": ()}
_READ = {"rows_read": _rows_read, "earlier": ("rows",)}


def _infer_latent(attrs, operands):
    query, row, positions, requests, state, *rows = operands
    for chosen in rows:
        _expect_rows("latent_attention", chosen, query.shape[0], state.window)
    kinds = tuple(o.dtype for o in operands[:4])
    expect(kinds == ("f32", "f32", "i32", "i32"), f"latent_attention: operands are {', '.join(kinds)}; expected query "
                                                  "and row in f32, positions and requests in i32.")
    expect(state.kind == "rows" and len(state.parts) == 1,
           f"latent_attention: the state keeps {state.kind} of {state.parts}; expected rows of one part.")
    expect(attrs["window"] == state.window, f"latent_attention: window {attrs['window']}, the state's is {state.window}.")
    expect(state.rate == 1 or not state.window,
           f"latent_attention: the state has a row for every {state.rate} tokens, and a window of {state.window}.")
    (_, heads, width), = state.parts
    expect(
        len(query.shape) == 3 and row.shape == (query.shape[0], width) and query.shape[2] == width and heads == 1,
        f"latent_attention: the query is {query.shape}, the row {row.shape}, the state keeps {state.parts}; expected "
        "[T, H, D], [T, D] and one head of D.",
    )
    expect(
        positions.shape == requests.shape == query.shape[:1],
        f"latent_attention: positions are {positions.shape}, requests {requests.shape}; expected one a token, "
        f"{query.shape[:1]}.",
    )
    values = attrs["value_width"]
    expect(0 < values <= width, f"latent_attention: values are the first {values} of {width} columns.")
    result = TensorSpec("f32", (*query.shape[:2], values))
    return (result, TensorSpec("f32", query.shape[:2])) if attrs["lse"] else (result,)


def _latent(attrs, query, row, positions, requests, state: RowState, chosen=None):
    """softmax(query·rowsᵀ·scaling)·values, in float64: all heads share the rows that a token sees, or of them those that
    it has chosen, and the first ``value_width`` columns of a row are its value. A token that sees none gets zeros. With
    ``lse`` there is log Σ exp(query·rowᵀ·scaling) beside it, -∞ of none, by which attention over several states is
    put together (https://arxiv.org/abs/2501.01005)."""
    places = list(enumerate(zip(positions.tolist(), requests.tolist())))
    for t, (position, request) in places:
        state.append(request, position, (row[t][None],))
    result = np.zeros((*query.shape[:2], attrs["value_width"]), np.float32)
    lse = np.full(query.shape[:2], -np.inf, np.float32)
    for t, (position, request) in places:
        seen = state.seen(position)
        try:
            (rows,) = state.read(request, max(0, seen - attrs["window"]) if attrs["window"] else 0, seen)
        except KeyError:
            raise LegalityError(f"latent_attention: request {request} lacks rows for positions below {position}.") from None
        rows = rows[:, 0].astype(np.float64)
        rows = rows if chosen is None else rows[_chosen("latent_attention", chosen[t], position, seen)]
        if not len(rows):
            continue
        scores = query[t].astype(np.float64) @ rows.T * attrs["scaling"]
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        result[t] = weights / total @ rows[:, : attrs["value_width"]]
        lse[t] = (top + np.log(total))[:, 0]
    return (result, lse) if attrs["lse"] else (result,)


def _latent_flops(attrs, operands, results):
    tokens, heads, width = operands[0].shape
    context = _rows_read(attrs, operands).split("*")[1]
    return scaled(size((tokens, heads, context, width + attrs["value_width"])), 2)


ROWS = [
    OpRow("rope", ("x", "cos", "sin"), _infer_rope, _rope, attrs={"interleaved": False, "turned": 0},
          factors="thd,td,td->the",
          cost=lambda a, o, r: scaled(size(o[0].shape), 4), decompose=_rope_down),
    OpRow("attention", ("q", "k", "v", "positions", "requests", "state", *_EXTRAS), _infer_attention, _attention,
          attrs=_ATTENTION, factors=f"thd,thd,the,t,t,{_FACTORS}->the", cost=_attention_flops, state=5, **_READ),
    OpRow("recall", ("q", "positions", "requests", "state", *_EXTRAS), _infer_recall, _recall, attrs=_ATTENTION,
          factors=f"thd,t,t,{_FACTORS}->the", cost=_attention_flops, state=3, appends=False, **_READ),
    OpRow("latent_attention", ("query", "row", "positions", "requests", "state", "rows?"), _infer_latent, _latent,
          attrs={"scaling": REQUIRED, "value_width": REQUIRED, "window": 0, "lse": False, "extras": ()},
          factors="thd,td,t,t,tk->the,th*",
          cost=_latent_flops, state=4, **_READ),
]
"""``recall`` is attention over rows that another operator of the step appends: layers that share keys and values."""
