"""Continuous batching over an executable: ``add`` requests, ``step`` until they end, ``abort`` at will.

A step packs running decodes first and then prefill chunks, of any lengths, up to the plan's limits. It is a
transaction: rows that it writes lie beyond every request's length, which only a commit moves, and pages that it takes
belong to nobody until then; when it fails, the same step can be tried again and gives the same.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from adaptc.errors import RequestError
from adaptc.plan import CacheGroup, Plan
from adaptc.protocol import Executable
from adaptc.runtime.pages import BlockTable, PagePool, pages_needed
from adaptc.runtime.sampler import Sampling, check, sample


@dataclass(frozen=True)
class Event:
    """Something that a step did for a request: a new ``token`` (None for a scored prompt), or its end: ``finish`` is
    "stop" (the token is a stop token) or "length" (its declared maximum is reached, or all its rows are scored)."""

    request: int
    token: int | None
    finish: str | None


class _Request:
    """A request's state. ``tokens[:count]`` are known, ``length`` of them are in the caches; length < count."""

    __slots__ = ("id", "tokens", "count", "length", "prompt", "sampling", "stop_ids", "logits_from", "logits_out",
                 "chunk", "budget", "tables", "maximum")  # fmt: skip


@dataclass(frozen=True)
class _Chunk:
    """``count`` tokens of a request from position ``start``; the last ``rows`` of them want logits."""

    request: _Request
    start: int
    count: int
    rows: int


@dataclass(frozen=True)
class _Outcome:
    """What a chunk's commit makes true, in absolute values, so that committing twice is committing once."""

    request: _Request
    length: int
    count: int
    token: int | None
    finish: str | None


class Engine:
    """Requests over one executable. Not thread-safe; ``Session`` puts a lock around it.

    pages            number of pages of each cache group's pools
    page_order_seed  hands pages out in random order, for tests that where pages lie doesn't matter
    """

    def __init__(self, plan: Plan, executable: Executable, pages: Mapping[str, int], *,
                 page_order_seed: int | None = None):  # fmt: skip
        self.plan, self.executable = plan, executable
        self.pools = {group.name: PagePool(pages[group.name], page_order_seed) for group in plan.groups}
        self._groups = plan.groups
        self._max = {symbol.name: symbol.max for symbol in plan.symbols}
        self._most = min(self._max.values())  # requests running: each then gets a token and a row in every step
        self._running: dict[int, _Request] = {}
        self._waiting: deque[_Request] = deque()
        self._ids = itertools.count()
        self._undelivered: list[Event] = []
        self._tokens = executable.inputs("tokens")
        self._positions = executable.inputs("positions")
        self._request_rows = executable.inputs("requests")
        self._sampled = executable.inputs("sampled")
        self._lengths = executable.inputs("lengths") if "lengths" in plan.inputs else None
        self._tables = [executable.inputs(f"pages:{group.name}") for group in plan.groups]
        self._logits = executable.outputs("logits")
        self._range = np.arange(max(plan.max_context, plan.max_step_tokens), dtype=np.int32)

    # ---- requests ----------------------------------------------------------------------------------------------

    def add(self, tokens: Sequence[int] | np.ndarray, *, max_tokens: int, sampling: Sampling = Sampling(),
            stop_ids: Iterable[int] = (), chunk: int | None = None) -> int:  # fmt: skip
        """Queues a prompt that up to ``max_tokens`` (≥ 1) tokens shall follow; returns the request's id.

        Its declared maximum is what it can append to the caches: prompt and generated tokens but the last, at most
        ``plan.max_context``. It starts when the pages for that can be promised. ``chunk`` limits the tokens a step
        takes of it. Raises RequestError when it could never be served.
        """
        check("max_tokens", max_tokens, Integral, "an integer ≥ 1", lambda v: v >= 1)
        prompt = self._checked(tokens)
        last = min(len(prompt) + max_tokens, self.plan.max_context + 1)
        return self._queue(prompt, last, sampling, frozenset(stop_ids), len(prompt) - 1, None, chunk)

    def score(self, tokens: Sequence[int] | np.ndarray, logits: np.ndarray, *, start: int = 0,
              chunk: int | None = None) -> int:  # fmt: skip
        """Queues a prompt whose logits at positions ``start`` … end are written into ``logits``
        f32[len(tokens) - start, vocabulary] while steps go on; nothing is generated. Its declared maximum is its
        length. Returns the request's id."""
        prompt = self._checked(tokens)
        check("start", start, Integral, f"an integer from 0 to {len(prompt) - 1}", lambda v: 0 <= v < len(prompt))
        return self._queue(prompt, len(prompt), Sampling(), frozenset(), start, logits, chunk)

    def abort(self, request: int) -> bool:
        """Ends a request and frees its pages at once; False when it has ended already."""
        waiting = next((r for r in self._waiting if r.id == request), None)
        if waiting is not None:
            self._waiting.remove(waiting)
            return True
        if request not in self._running:
            return False
        try:
            self._end(self._running[request])
        except BaseException:
            self._running.pop(request, None)
            self._rollback()
            raise
        return True

    @property
    def active(self) -> bool:
        """Whether any request runs or waits."""
        return bool(self._running or self._waiting or self._undelivered)

    def poison_free_pages(self) -> None:
        """Fills all free pages with 0xFF, NaN in every float dtype: a kernel that reads what it must not shows it."""
        for group in self._groups:
            free = list(self.pools[group.name].free_pages)
            for state in group.states:
                self.executable.state(state)[free] = 0xFF

    def _checked(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        try:
            ids = np.asarray(tokens)
        except ValueError:  # ragged
            raise RequestError("A prompt of token ids is a flat list of integers, got nested lists.") from None
        if ids.size == 0:
            raise RequestError("The prompt is empty; give at least one token.")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestError(f"A prompt of token ids is a flat list of integers, got {ids.dtype}{list(ids.shape)}.")
        if len(ids) > self.plan.max_context:
            raise RequestError(f"The prompt has {len(ids)} tokens; the artifact's context is {self.plan.max_context}.",
                               hint="Shorten it or compile with a larger --max-context.")  # fmt: skip
        wrong = np.flatnonzero((ids < 0) | (ids >= self.plan.vocabulary))
        if len(wrong):
            raise RequestError(f"Token id {ids[wrong[0]]} at position {wrong[0]} is outside the vocabulary: "
                               f"ids are 0 to {self.plan.vocabulary - 1}.")  # fmt: skip
        return ids.astype(np.int32)

    def _queue(self, prompt, last, sampling, stop_ids, logits_from, logits_out, chunk) -> int:
        if chunk is not None:
            check("chunk", chunk, Integral, "an integer ≥ 1 (or None)", lambda v: v >= 1)
        request = _Request()
        request.tokens = np.empty(max(last, len(prompt)), np.int32)
        request.tokens[: len(prompt)] = prompt
        request.count = request.prompt = len(prompt)
        request.length = 0
        request.sampling, request.stop_ids = sampling, stop_ids
        request.logits_from, request.logits_out = logits_from, logits_out
        request.chunk = min(chunk or self.plan.max_step_tokens, self.plan.max_step_tokens)
        request.maximum = maximum = len(prompt) if logits_out is not None else last - 1
        request.budget = [group_pages(self.plan, group, maximum, request.chunk) for group in self._groups]
        for group, budget in zip(self._groups, request.budget):
            if budget > self.pools[group.name].pages:
                raise RequestError(
                    f"The request may grow to {maximum} tokens and then needs {budget} pages of cache group "
                    f"{group.name!r}; the whole pool has {self.pools[group.name].pages}.",
                    hint="Lower max_tokens or load with a larger cache_bytes.",
                )
        request.id = next(self._ids)
        self._waiting.append(request)
        return request.id

    # ---- steps -------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Runs one step and returns what it did, [] when there is nothing to do. When it raises, whatever the reason,
        no request has moved and the next call tries again (an interrupt within the commit lets it finish first; the
        next call then returns its events)."""
        outcomes: list[_Outcome] | None = None
        try:
            chunks = [] if self._undelivered else self._schedule()
            if chunks:
                self.executable.run(self._fill(chunks))
                outcomes = self._sample(chunks)
                self._commit(outcomes)
        except BaseException:
            if outcomes is not None:  # an interrupt in the middle of the commit: it happened, so finish it
                self._commit(outcomes)
            self._rollback()
            raise
        events, self._undelivered = self._undelivered, []
        return events

    def _admit(self) -> None:
        """Lets waiting requests in, first come first served, while their pages can be promised."""
        while self._waiting and len(self._running) < self._most:
            request = self._waiting[0]
            promised = 0
            for group, budget in zip(self._groups, request.budget):
                if not self.pools[group.name].reserve(budget):
                    break
                promised += 1
            if promised < len(self._groups):
                for group, budget in zip(self._groups[:promised], request.budget):
                    self.pools[group.name].unreserve(budget)
                return
            request.tables = [
                BlockTable(self.pools[g.name], self.plan.page_size, g.window, g.max_pages) for g in self._groups
            ]
            self._running[request.id] = request
            self._waiting.popleft()

    def _schedule(self) -> list[_Chunk]:
        """The next step's chunks: decodes first, then prefills in order of arrival."""
        self._admit()
        tokens, rows = self._max["T"], self._max["S"]
        decodes = [r for r in self._running.values() if r.length >= r.prompt]
        chunks = []
        for request in itertools.chain(decodes, (r for r in self._running.values() if r.length < r.prompt)):
            start = request.length
            count = min(request.count - start, request.chunk, tokens)
            wanted = max(0, min(count, start + count - request.logits_from))
            if wanted > rows:  # the rest of its rows comes in later steps
                count, wanted = count - (wanted - rows), rows
            if count > 0:
                chunks.append(_Chunk(request, start, count, wanted))
                tokens, rows = tokens - count, rows - wanted
                if tokens == 0:
                    break
        return chunks

    def _fill(self, chunks: Sequence[_Chunk]) -> dict[str, int]:
        """Writes the step's inputs and takes the pages it needs; returns the symbols' values."""
        t = s = 0
        for row, chunk in enumerate(chunks):
            start, end = chunk.start, chunk.start + chunk.count
            self._tokens[t : t + chunk.count] = chunk.request.tokens[start:end]
            self._positions[t : t + chunk.count] = self._range[start:end]
            self._request_rows[t : t + chunk.count] = row
            if self._lengths is not None:
                self._lengths[row] = chunk.request.maximum
            for table, out in zip(chunk.request.tables, self._tables):
                table.grow(end)
                out[row] = table.entries
            t += chunk.count
            self._sampled[s : s + chunk.rows] = self._range[t - chunk.rows : t]
            s += chunk.rows
        return {"T": t, "R": len(chunks), "S": s}

    def _sample(self, chunks: Sequence[_Chunk]) -> list[_Outcome]:
        """Reads the step's logits: copies those of scored prompts out and draws the next tokens."""
        outcomes, s = [], 0
        for chunk in chunks:
            request, end = chunk.request, chunk.start + chunk.count
            rows = self._logits[s : s + chunk.rows]
            s += chunk.rows
            token = finish = None
            if request.logits_out is not None:
                at = end - chunk.rows - request.logits_from
                if chunk.rows:
                    request.logits_out[at : at + chunk.rows] = rows
                finish = "length" if end == request.count else None
            elif end == request.count:
                token = sample(rows[-1], request.sampling, request.count - request.prompt)
                if token in request.stop_ids:
                    finish = "stop"
                elif request.count + 1 == len(request.tokens):
                    finish = "length"
            outcomes.append(_Outcome(request, end, request.count, token, finish))
        return outcomes

    def _commit(self, outcomes: Sequence[_Outcome]) -> None:
        self._undelivered = [Event(o.request.id, o.token, o.finish) for o in outcomes
                             if o.token is not None or o.finish is not None]  # fmt: skip
        for outcome in outcomes:
            request = outcome.request
            if outcome.token is not None:
                request.tokens[outcome.count] = outcome.token
                request.count = outcome.count + 1
            request.length = outcome.length
            if outcome.finish is not None:
                self._end(request)
            else:
                for table in request.tables:
                    table.slide(request.length)

    def _end(self, request: _Request) -> None:
        if self._running.pop(request.id, None) is not None:
            for group, table, budget in zip(self._groups, request.tables, request.budget):
                table.release()
                self.pools[group.name].unreserve(budget)

    def _rollback(self) -> None:
        """Makes pools and tables what the running requests' lengths say, whatever was interrupted where."""
        self._waiting = deque(r for r in self._waiting if r.id not in self._running)
        for i, group in enumerate(self._groups):
            held = [page for r in self._running.values() for page in r.tables[i].held(r.length)]
            self.pools[group.name].recount(held, sum(r.budget[i] for r in self._running.values()))


def group_pages(plan: Plan, group: CacheGroup, tokens: int, step_tokens: int | None = None) -> int:
    """The most pages of ``group`` that a request of ``tokens`` tokens holds at once."""
    return pages_needed(tokens, plan.page_size, group.window, min(tokens, step_tokens or plan.max_step_tokens))
