"""Prefix reuse: what the caches hold of a prompt's first pages needn't be computed again.

A full page's content follows from the tokens in it and before it, and from nothing else of its request but the declared
maximum where a plan has ``lengths``; the page's key is a digest of all that. Fixed states are kept as snapshots: the slot
that held the values after a page's last token has that page's key in the slots' pool. Keys say what pages hold; that
those stay until somebody needs room is ``PagePool``'s.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

from adaptc.plan import Plan
from adaptc.runtime.pages import BlockTable, PagePool

SNAPSHOT_TOKENS = 512
"""Default distance of snapshots: of a prompt of several thousand tokens, a hit then misses a few percent of what it could
have reused, and the prompt takes few slots from others."""

DIGEST_BYTES = 16


class Prefix:
    """The tokens of one request as pages, with their keys. ``known`` of them were there when it started (or started
    again); keys of the first ``named`` tokens have been given to the pages that hold them."""

    __slots__ = ("known", "named", "keys")

    def __init__(self, known: int):
        self.known, self.named = known, 0
        self.keys: list[bytes] = []


class PrefixCache:
    """Which pages and slots are worth finding again, and finding them.

    snapshot_tokens  fixed states are kept after so many tokens, rounded up to whole pages (of every group, where their
                     pages are of different numbers of tokens), and their multiples; always
                     after the last full page from which a repetition of the prompt could go on, and, while tokens are
                     generated, after the last full page
    """

    def __init__(self, plan: Plan, pools: Mapping[str, PagePool], snapshot_tokens: int):
        sizes = [group.page_tokens(plan.page_size) for group in plan.groups if group.kind == "rows"] or [plan.page_size]
        self._pools = pools
        self._grain, self._size = math.gcd(*sizes), math.lcm(*sizes)
        """Tokens from one key to the next: every page ends at one. And from one position to the next at which pages of all
        groups end, so that a request can start there."""
        self._depends_on_maximum = "lengths" in plan.inputs
        self._rhythm = -(-snapshot_tokens // self._size) * self._size
        self._snapshots = any(group.kind == "fixed" for group in plan.groups)

    def reuse(self, request) -> int:
        """Takes over what the caches hold of a fresh request's first pages; returns their tokens. Computed anew is, at
        least, what follows the first position whose logits are wanted, and that itself."""
        most = min(request.logits_from, request.count - 1) // self._size * self._size
        self._keys(request, most)
        if tokens := self._longest(request, most):
            for table in request.tables:
                table.adopt(tokens, [table.pool.find(self._key(request, end)) for _, end in table.needs(tokens)])
        return tokens

    def chunk_end(self, request) -> int:
        """The position at which the request's next chunk ends at the latest, so that a snapshot can be taken there."""
        if not self._snapshots:
            return request.count
        last, regular = self._last(request), (request.length // self._rhythm + 1) * self._rhythm
        return min(regular, last if last > request.length else request.count)

    def name(self, request) -> None:
        """Lets the pages that a request has filled, up to its length, be found. Once or twice is the same."""
        length, size = request.length, self._size
        if length // self._grain == request.prefix.named // self._grain:  # as in most decode steps
            return
        self._keys(request, length)
        for table in request.tables:
            if isinstance(table, BlockTable):
                for end, page in table.filled(request.prefix.named, length):
                    table.pool.name(page, self._key(request, end))
            elif length % size == 0 and (length % self._rhythm == 0 or length >= self._last(request)):
                table.pool.name(table.next_read, self._key(request, length))
                if (before := length - size) > request.prefix.known and before % self._rhythm:
                    table.pool.forget(self._key(request, before))  # of generated tokens the last full page is enough
        request.prefix.named = length

    def forget(self) -> None:
        """Nothing is found any more."""
        for pool in self._pools.values():
            pool.forget()

    def _last(self, request) -> int:
        return (request.prefix.known - 1) // self._size * self._size

    def _key(self, request, end: int) -> bytes:
        """The key of what ends after so many of the request's tokens."""
        return request.prefix.keys[end // self._grain - 1]

    def _keys(self, request, tokens: int) -> None:
        """Makes the keys of the request's pages, at least of the full ones below ``tokens``."""
        keys, size = request.prefix.keys, self._grain
        root = request.maximum.to_bytes(8, "little") if self._depends_on_maximum else b""
        for index in range(len(keys), tokens // size):
            page = request.tokens[index * size : (index + 1) * size].tobytes()
            keys.append(hashlib.blake2b((keys[-1] if keys else root) + page, digest_size=DIGEST_BYTES).digest())

    def _longest(self, request, most: int) -> int:
        """Of how many tokens, ``most`` at most, the pools have all that a request which starts after them reads."""
        tokens, before = most, -1
        while tokens != before:
            before = tokens
            for table in request.tables:
                # no start after a missing page's begin and up to this one can do without that page
                while tokens and (lost := next((start for start, end in table.needs(tokens) if table.pool.find(
                        self._key(request, end)) is None), -1)) >= 0:
                    tokens = lost // self._size * self._size
        return tokens
