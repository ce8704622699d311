"""Whose token is it? What a step's inputs must mean, found without asking the engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Disagrees(Exception):
    """What runs can't be walked beside what it should be; the message says where they part."""


class Watched:
    """An executable as an engine uses it, whose steps are looked at by a subclass's ``run``. ``owners`` says whose tokens
    a step has."""

    def __init__(self):
        self.owners = Owners()

    def over(self, executable) -> Watched:
        self.executable = executable
        return self

    def __getattr__(self, name: str):
        return getattr(self.executable, name)

    def role(self, name: str, count: int) -> np.ndarray:
        """A copy of the first ``count`` elements of one of the step's inputs."""
        return np.array(self.executable.inputs(name)[:count])


class Owners:
    """The requests' tokens in the order in which they were added. Which request a row of a step belongs to is found by
    what it must be: the next tokens of one of them, at the next positions."""

    def __init__(self):
        self.promised: list[list[int]] = []
        self.open: list[bool] = []
        self.done: list[int] = []

    def promise(self, tokens: Sequence[int], *, more: bool = False) -> None:
        """A request; ``more``: the engine appends tokens of its own choice."""
        self.promised.append([int(t) for t in tokens])
        self.open.append(more)
        self.done.append(0)

    def of(self, tokens: np.ndarray, positions: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(request, position) that each token of a step has by right. Disagrees when a row continues no request."""
        requests, right = np.empty(len(tokens), np.int64), np.empty(len(tokens), np.int64)
        taken: set[int] = set()
        for r in dict.fromkeys(rows.tolist()):
            mine = np.flatnonzero(rows == r)
            free = [q for q in range(len(self.promised)) if q not in taken]
            fits = [q for q in free if self._continues(q, tokens[mine])]
            exact = [q for q in fits if positions[mine].tolist() == list(self._next(q, len(mine)))]
            if not fits:
                raise Disagrees(f"the run time feeds tokens {tokens[mine][:8].tolist()} at positions "
                                f"{positions[mine][:8].tolist()}, which continue none of the requests")
            request = (exact or fits)[0]
            taken.add(request)
            requests[mine], right[mine] = request, self._next(request, len(mine))
            start = self.done[request]
            self.promised[request][start : start + len(mine)] = tokens[mine].tolist()
            self.done[request] += len(mine)
        return requests, right

    def _next(self, q: int, count: int) -> range:
        return range(self.done[q], self.done[q] + count)

    def _continues(self, q: int, tokens: np.ndarray) -> bool:
        known = self.promised[q][self.done[q] : self.done[q] + len(tokens)]
        return known == tokens[: len(known)].tolist() and (len(known) == len(tokens) or self.open[q])
