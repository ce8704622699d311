"""Steps under a tool's eyes: an executable that remembers its last step, and an engine beside a session's own."""

from __future__ import annotations

from collections.abc import Mapping

from adaptc.runtime.engine import Engine
from adaptc.runtime.session import Session


class Watched:
    """An executable that remembers the symbols of its last step and, with ``times``, seconds by operator id."""

    def __init__(self, executable, times: bool = False):
        self.executable, self.symbols, self.spent = executable, {}, {}
        self._times = {"times": True} if times else {}

    def __getattr__(self, name: str):
        return getattr(self.executable, name)

    def run(self, symbols: Mapping[str, int], **options):
        self.symbols = dict(symbols)
        self.spent = self.executable.run(symbols, **self._times, **options)


def side_engine(session: Session, executable=None) -> Engine:
    """An engine of its own over the session's executable and pages, which nobody else uses meanwhile. The session's
    prefix cache is emptied: its pages will hold something else. This engine has none."""
    session.engine.forget_prefixes()
    return Engine(session.plan, executable or session.executable,
                  {name: pool.pages for name, pool in session.engine.pools.items()})  # fmt: skip
