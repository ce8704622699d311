"""One pass a file, and ``pipeline``, which has their order."""

from __future__ import annotations

import pkgutil

NO_PASSES = ("base", "pipeline")
"""Modules of this package that aren't passes."""


def names() -> tuple[str, ...]:
    """The passes' names, which are their files'."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in NO_PASSES))
