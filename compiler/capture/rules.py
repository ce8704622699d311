"""What operators of traced graphs become: our own rules (``aten.TABLE``) and those of installed packages."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from adaptc import packages
from adaptc.capture.aten import SKIPPED, TABLE, Rule


def rules() -> Mapping[str, Rule]:
    """Rules by the operator's name, such as "aten.add"."""
    return _tables()[0]


def package_of(name: str) -> str | None:
    """The installed package whose rule the operator ``name`` has; None for our own."""
    return _tables()[1].get(name)


@cache
def _tables() -> tuple[dict[str, Rule], dict[str, str]]:
    theirs = packages.added(packages.CAPTURE, "RULES", {*TABLE, *SKIPPED}, _problem)
    blaming = {name: packages.blaming(a.extension, f"the rule of {name!r}", a.value) for name, a in theirs.items()}
    return TABLE | blaming, {name: a.extension.package for name, a in theirs.items()}


def _problem(rule: Any) -> str:
    return "" if callable(rule) else f"{rule!r} is no rule; expected a function of the walk and the operator's arguments."
