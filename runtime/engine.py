"""Continuous batching over an executable: ``add`` requests, ``step`` until they end, ``abort`` at will.

A step packs running decodes first and then prefill chunks, of any lengths, up to the plan's limits. It is a
transaction: rows that it writes lie beyond every request's length, which only a commit moves, fixed states go from one
slot to another, and pages that it takes belong to nobody until then; when it fails, the same step can be tried again
and gives the same.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral

import numpy as np

from adaptc.errors import AdaptcError, EmptyPromptError, RequestError, TooLongError, VocabularyError
from adaptc.plan import SLOT_ENTRIES, CacheGroup, Plan
from adaptc.protocol import Executable
from adaptc.runtime.pages import BlockTable, PagePool, SlotTable, pages_needed
from adaptc.runtime.prefix import SNAPSHOT_TOKENS, Prefix, PrefixCache
from adaptc.runtime.sampler import Logprob, Sampling, check, logprob, sample


@dataclass(frozen=True)
class Event:
    """Something that a step did for a request: a new ``token`` (None for a scored prompt), or its end: ``finish`` is
    "stop" (the token is a stop token), "length" (its declared maximum is reached, or all its rows are scored) or
    "error" (no token can be drawn from its logits; ``error`` says why). Other requests of the step go on. ``logprob``
    is there when the request asked for it."""

    request: int
    token: int | None
    finish: str | None
    logprob: Logprob | None = None
    error: AdaptcError | None = None


@dataclass
class Statistics:
    """Counts since an engine was made. ``started_tokens``: of requests when they started, or started again after being
    preempted; ``hit_tokens`` of them were in the prefix cache."""

    started_tokens: int = 0
    hit_tokens: int = 0


class _Request:
    """A request's state. ``tokens[:count]`` are known, ``length`` of them are in the caches; length < count.

    Samples of one prompt are requests of one family. All but one ``wait`` for that one's prefill, with no rows and
    pages of their own, and then share its pages.
    """

    __slots__ = ("id", "tokens", "count", "length", "prompt", "prefix", "sampling", "stop_ids", "logits_from",
                 "logits_out", "chunk", "budget", "tables", "family", "waits", "maximum")  # fmt: skip


class _Family:
    """Samples of one prompt. ``shared`` pages of each cache group are full of the prompt's rows: all members hold the
    same ones, and they are promised once, until the last of the ``members`` (ids) has ended."""

    __slots__ = ("members", "shared")


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
    logprob: Logprob | None = None
    fork: _Request | None = None
    """The request whose prefill this one has waited for."""
    error: AdaptcError | None = None


class Engine:
    """Requests over one executable. Not thread-safe; ``Session`` puts a lock around it.

    pages            number of pages of each cache group's pools
    page_order_seed  hands pages out in random order, for tests that where pages lie doesn't matter
    prefix_cache     requests that start with the same tokens as others, also ended ones, take their full pages over;
                     off here, since tools want everything computed
    snapshot_tokens  how often fixed states are kept for that (``adaptc.runtime.prefix.PrefixCache``)
    """

    def __init__(self, plan: Plan, executable: Executable, pages: Mapping[str, int], *,
                 page_order_seed: int | None = None, prefix_cache: bool = False,
                 snapshot_tokens: int = SNAPSHOT_TOKENS):  # fmt: skip
        self.plan, self.executable = plan, executable
        self.pools = {group.name: PagePool(pages[group.name], page_order_seed) for group in plan.groups}
        self.prefixes = PrefixCache(plan, self.pools, snapshot_tokens) if prefix_cache else None
        self.statistics = Statistics()
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
        return self.add_samples(tokens, 1, max_tokens=max_tokens, sampling=sampling, stop_ids=stop_ids, chunk=chunk)[0]

    def add_samples(self, tokens: Sequence[int] | np.ndarray, n: int, *, max_tokens: int,
                    sampling: Sampling = Sampling(), stop_ids: Iterable[int] = (), chunk: int | None = None
                    ) -> list[int]:  # fmt: skip
        """Queues ``n`` samples of one prompt, each like a request of its own (see ``add``) that draws for itself;
        sample 0 is what one alone would be. The prompt is prefilled once; its pages are shared, and copied where
        samples write into the same one. They start together. Returns their ids.
        """
        check("max_tokens", max_tokens, Integral, "an integer ≥ 1", lambda v: v >= 1)
        check("n", n, Integral, f"an integer from 1 to {self._most}, the requests that a step takes",
              lambda v: 1 <= v <= self._most)  # fmt: skip
        prompt = self.checked(tokens)
        self._check_bias(sampling)
        last = min(len(prompt) + max_tokens, self.plan.max_context + 1)
        each = [replace(sampling, sample=sampling.sample + i) if i else sampling for i in range(n)]
        return self._queue(prompt, last, each, frozenset(stop_ids), len(prompt) - 1, None, chunk)

    def score(self, tokens: Sequence[int] | np.ndarray, logits: np.ndarray, *, start: int = 0,
              chunk: int | None = None) -> int:  # fmt: skip
        """Queues a prompt whose logits at positions ``start`` … end are written into ``logits``
        f32[len(tokens) - start, vocabulary] while steps go on; nothing is generated. Its declared maximum is its
        length. Returns the request's id."""
        prompt = self.checked(tokens)
        check("start", start, Integral, f"an integer from 0 to {len(prompt) - 1}", lambda v: 0 <= v < len(prompt))
        return self._queue(prompt, len(prompt), [Sampling()], frozenset(), start, logits, chunk)[0]

    def abort(self, request: int) -> bool:
        """Ends a request and frees its pages at once; False when it has ended already."""
        waiting = next((r for r in self._waiting if r.id == request), None)
        if waiting is not None:
            self._waiting.remove(waiting)
            waiting.family.members.discard(request)
            self._elect(waiting)
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

    def preempt(self, request: int) -> bool:
        """Makes a running request wait behind all others and gives its pages back at once; False when it doesn't run.
        Started again, it reads its tokens anew, as far as the prefix cache doesn't have them, and goes on as if nothing
        had been."""
        running = self._running.get(request)
        if running is None:
            return False
        resumed = copy.copy(running)
        resumed.family, resumed.waits = _Family(), False
        resumed.family.members, resumed.family.shared = {request}, [0] * len(self._groups)
        resumed.budget = [group_pages(self.plan, g, running.maximum, running.chunk) for g in self._groups]
        resumed.length, resumed.tables, resumed.prefix = 0, None, Prefix(running.count)
        if running.logits_out is None:
            resumed.logits_from = running.count - 1
        try:
            self._end(running)
            self._waiting.append(resumed)
        except BaseException:  # it happened, so finish it
            self._running.pop(request, None)
            if all(waiting is not resumed for waiting in self._waiting):
                self._waiting.append(resumed)
            self._rollback()
            raise
        return True

    def forget_prefixes(self) -> None:
        """Empties the prefix cache: its pages are free then."""
        if self.prefixes is not None:
            self.prefixes.forget()

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

    def checked(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Token ids i32[T] of a prompt that can be served; RequestError for any other."""
        try:
            ids = np.asarray(tokens)
        except ValueError:  # ragged
            raise RequestError("A prompt of token ids is a flat list of integers, got nested lists.") from None
        if ids.size == 0:
            raise EmptyPromptError("The prompt is empty; give at least one token.")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestError(f"A prompt of token ids is a flat list of integers, got {ids.dtype}{list(ids.shape)}.")
        if len(ids) > self.plan.max_context:
            raise TooLongError(f"The prompt has {len(ids)} tokens; the artifact's context is {self.plan.max_context}.",
                               hint="Shorten it or compile with a larger --max-context.")  # fmt: skip
        wrong = np.flatnonzero((ids < 0) | (ids >= self.plan.vocabulary))
        if len(wrong):
            raise VocabularyError(f"Token id {ids[wrong[0]]} at position {wrong[0]} is outside the vocabulary: "
                                  f"ids are 0 to {self.plan.vocabulary - 1}.")  # fmt: skip
        return ids.astype(np.int32)

    def _check_bias(self, sampling: Sampling) -> None:
        size, bias = self.plan.vocabulary, sampling.logit_bias
        for token in bias:
            if token >= size:
                raise VocabularyError(f"logit_bias names token {token}; ids are 0 to {size - 1}.")
        if len(bias) == size and max(bias.values()) == -np.inf:
            raise RequestError("logit_bias forbids every token of the vocabulary; leave at least one.")

    def _queue(self, prompt, last, samplings, stop_ids, logits_from, logits_out, chunk) -> list[int]:
        if chunk is not None:
            check("chunk", chunk, Integral, "an integer ≥ 1 (or None)", lambda v: v >= 1)
        chunk = min(chunk or self.plan.max_step_tokens, self.plan.max_step_tokens)
        maximum = len(prompt) if logits_out is not None else last - 1
        family = _Family()
        several = len(samplings) > 1
        # a window's pages and slots leave each member at its own time, so those aren't counted as shared
        family.shared = [len(prompt) // g.page_tokens(self.plan.page_size)
                         if several and g.kind == "rows" and not g.window else 0 for g in self._groups]  # fmt: skip
        budget = [group_pages(self.plan, group, maximum, chunk) - shared
                  for group, shared in zip(self._groups, family.shared)]  # fmt: skip
        for group, shared, each in zip(self._groups, family.shared, budget):
            total = shared + len(samplings) * each
            if total > self.pools[group.name].pages:
                raise TooLongError(
                    f"The request may grow to {maximum} tokens{f' in {len(samplings)} samples' if several else ''} and "
                    f"then needs {total} pages of cache group {group.name!r}; the whole pool has "
                    f"{self.pools[group.name].pages}.",
                    hint="Lower max_tokens or load with a larger cache_bytes.",
                )
        members = [self._new(prompt, last, sampling, stop_ids, logits_from, logits_out, chunk)
                   for sampling in samplings]  # fmt: skip
        family.members = {request.id for request in members}
        for request in members:
            request.family, request.budget, request.waits = family, budget, request is not members[0]
            request.maximum = maximum
        self._waiting.extend(members)
        return [request.id for request in members]

    def _new(self, prompt, last, sampling, stop_ids, logits_from, logits_out, chunk) -> _Request:
        request = _Request()
        request.tokens = np.empty(max(last, len(prompt)), np.int32)
        request.tokens[: len(prompt)] = prompt
        request.count = request.prompt = len(prompt)
        request.length, request.prefix = 0, Prefix(len(prompt))
        request.sampling, request.stop_ids = sampling, stop_ids
        request.logits_from, request.logits_out, request.chunk = logits_from, logits_out, chunk
        request.id = next(self._ids)
        return request

    def _elect(self, gone: _Request) -> None:
        """When the member that prefills is gone before its end, the next one goes on where it was."""
        if gone.waits:
            return
        others = [r for r in (*self._running.values(), *self._waiting) if r.family is gone.family and r.waits]
        if others:
            heir = others[0]
            heir.waits = False
            if heir.id in self._running:
                heir.tables, gone.tables = gone.tables, heir.tables
                heir.length, gone.length = gone.length, 0

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
        while self._waiting:
            family = self._waiting[0].family
            members = list(itertools.takewhile(lambda r: r.family is family, self._waiting))
            if len(self._running) + len(members) > self._most:
                return
            promise = [shared + len(members) * each for shared, each in zip(family.shared, members[0].budget)]
            promised = 0
            for group, pages in zip(self._groups, promise):
                if not self.pools[group.name].reserve(pages):
                    break
                promised += 1
            if promised < len(self._groups):
                for group, pages in zip(self._groups[:promised], promise):
                    self.pools[group.name].unreserve(pages)
                return
            for request in members:
                request.tables = [self._table(group) for group in self._groups]
                self.statistics.started_tokens += 0 if request.waits else request.count
            self._running |= {request.id: request for request in members}
            for _ in members:
                self._waiting.popleft()

    def _table(self, group: CacheGroup) -> BlockTable | SlotTable:
        pool = self.pools[group.name]
        if group.kind == "fixed":
            return SlotTable(pool)
        return BlockTable(pool, group.page_tokens(self.plan.page_size), group.window, group.max_pages)

    def _schedule(self) -> list[_Chunk]:
        """The next step's chunks: decodes first, then prefills in order of arrival."""
        self._admit()
        tokens, rows = self._max["T"], self._max["S"]
        ready = [r for r in self._running.values() if not r.waits]
        decodes = [r for r in ready if r.length >= r.prefix.known]
        chunks = []
        for request in itertools.chain(decodes, (r for r in ready if r.length < r.prefix.known)):
            end = request.count
            if self.prefixes is not None:
                if request.length == 0:
                    request.length = request.prefix.named = self.prefixes.reuse(request)
                    self.statistics.hit_tokens += request.length
                end = self.prefixes.chunk_end(request)
            start = request.length
            count = min(end - start, request.chunk, tokens)
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
            for group, table, out in zip(self._groups, chunk.request.tables, self._tables):
                for old, new in table.own(start):
                    self._copy_page(group, old, new)
                table.grow(end)
                out[row] = table.entries
            t += chunk.count
            self._sampled[s : s + chunk.rows] = self._range[t - chunk.rows : t]
            s += chunk.rows
        return {"T": t, "R": len(chunks), "S": s}

    def _copy_page(self, group: CacheGroup, old: int, new: int) -> None:
        for state in group.states:
            pool = self.executable.state(state)
            pool[new] = pool[old]

    def _sample(self, chunks: Sequence[_Chunk]) -> list[_Outcome]:
        """Reads the step's logits: copies those of scored prompts out and draws the next tokens."""
        outcomes, s = [], 0
        for chunk in chunks:
            request, end = chunk.request, chunk.start + chunk.count
            rows = self._logits[s : s + chunk.rows]
            s += chunk.rows
            if request.logits_out is not None:
                at = end - chunk.rows - request.logits_from
                if chunk.rows:
                    request.logits_out[at : at + chunk.rows] = rows
                finish = "length" if end == request.count else None
                outcomes.append(_Outcome(request, end, request.count, None, finish))
            elif end == request.count:
                # those that waited for this prefill come first: they take its pages before it may give them back
                waiting = [r for r in self._running.values() if r.waits and r.family is request.family]
                outcomes += [self._draw(r, end, rows[-1], request) for r in waiting]
                outcomes.append(self._draw(request, end, rows[-1], None))
            else:
                outcomes.append(_Outcome(request, end, request.count, None, None))
        return outcomes

    def _draw(self, request: _Request, length: int, logits: np.ndarray, fork: _Request | None) -> _Outcome:
        """The next token of a request, from its last row of logits."""
        sampling, finish = request.sampling, None
        try:
            token = sample(logits, sampling, request.count - request.prompt, request.tokens[: request.count])
        except AdaptcError as unusable:  # these logits are this request's alone
            return _Outcome(request, length, request.count, None, "error", None, fork, unusable)
        if token in request.stop_ids:
            finish = "stop"
        elif request.count + 1 == len(request.tokens):
            finish = "length"
        report = None if sampling.logprobs is None else logprob(logits, token, sampling.logprobs)
        return _Outcome(request, length, request.count, token, finish, report, fork)

    def _commit(self, outcomes: Sequence[_Outcome]) -> None:
        self._undelivered = [Event(o.request.id, o.token, o.finish, o.logprob, o.error) for o in outcomes
                             if o.token is not None or o.finish is not None]  # fmt: skip
        for outcome in outcomes:
            request = outcome.request
            if outcome.fork is not None and request.waits:
                for table, source in zip(request.tables, outcome.fork.tables):
                    table.fork(source, outcome.length)
                request.waits = False
            if outcome.token is not None:
                request.tokens[outcome.count] = outcome.token
                request.count = outcome.count + 1
            request.length = outcome.length
            if self.prefixes is not None:
                self.prefixes.name(request)
            for table in request.tables:
                table.slide(request.length)
            if outcome.finish is not None:
                self._end(request)

    def _end(self, request: _Request) -> None:
        if self._running.pop(request.id, None) is not None:
            self._elect(request)
            for group, table, budget in zip(self._groups, request.tables, request.budget):
                table.release()
                self.pools[group.name].unreserve(budget)
            family = request.family
            family.members.discard(request.id)
            if not family.members:
                for group, shared in zip(self._groups, family.shared):
                    self.pools[group.name].unreserve(shared)

    def _rollback(self) -> None:
        """Makes pools and tables what the running requests' lengths say, whatever was interrupted where."""
        self._waiting = deque(r for r in self._waiting if r.id not in self._running)
        families = list({id(r.family): r.family for r in self._running.values()}.values())
        for family in families:
            members = [r for r in self._running.values() if r.family is family]
            family.members = {r.id for r in members}
            if all(r.waits for r in members):  # an abort was interrupted: start the prompt again
                members[0].waits = False
        for i, group in enumerate(self._groups):
            held = [page for r in self._running.values() for page in r.tables[i].held(r.length)]
            promised = sum(r.budget[i] for r in self._running.values()) + sum(f.shared[i] for f in families)
            self.pools[group.name].recount(held, promised)


def group_pages(plan: Plan, group: CacheGroup, tokens: int, step_tokens: int | None = None) -> int:
    """The most pages (or slots) of ``group`` that a request of ``tokens`` tokens holds at once."""
    if group.kind == "fixed":
        return SLOT_ENTRIES
    step = min(tokens, step_tokens or plan.max_step_tokens)
    return pages_needed(tokens, group.page_tokens(plan.page_size), group.window, step)
