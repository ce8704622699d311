"""How many pages, or slots, each cache group gets.

Groups are sized together, so that none runs out before the others: for whole requests of ``max_context`` tokens, and
snapshots of their fixed states, if one fits, else for one request of the longest context that does.
"""

from __future__ import annotations

from adaptc.errors import OptionError
from adaptc.plan import Plan
from adaptc.runtime.engine import group_pages

SNAPSHOTS = 2
"""Slots for snapshots, a request of ``max_context`` tokens: after its prompt and after what it has generated."""


def default_cache_bytes(plan: Plan, memory: int) -> int:
    """Room for ``max_requests`` requests of ``max_context`` tokens, but at most a quarter of ``memory`` bytes;
    in any case room for one."""
    one = _bytes(plan, _whole(plan))
    return max(one, min(plan.max_requests * one, memory // 4))


def split_pages(plan: Plan, cache_bytes: int) -> dict[str, int]:
    """Pages by cache group that take at most ``cache_bytes`` together; no more than the plan's requests can use.

    Raises OptionError when not even a request of one token fits.
    """
    least = _bytes(plan, _pages(plan, 1))
    if cache_bytes < least:
        raise OptionError(f"cache_bytes is {cache_bytes}; a request of one token takes {least} bytes.",
                          hint=f"Give at least {_bytes(plan, _pages(plan, plan.max_context))} for one request of "
                               f"{plan.max_context} tokens.")  # fmt: skip
    whole = _whole(plan)
    unit = _bytes(plan, whole)
    if cache_bytes >= unit:
        share = min(cache_bytes, plan.max_requests * unit)
        return {name: count * share // unit for name, count in whole.items()}
    low, high = 1, plan.max_context + 1  # a request of `low` tokens fits, one of `high` does not or is too long
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _bytes(plan, _pages(plan, middle)) <= cache_bytes else (low, middle)
    return _pages(plan, low)


def _whole(plan: Plan) -> dict[str, int]:
    pages = _pages(plan, plan.max_context)
    return {g.name: pages[g.name] + (SNAPSHOTS if g.kind == "fixed" else 0) for g in plan.groups}


def _pages(plan: Plan, tokens: int) -> dict[str, int]:
    return {group.name: group_pages(plan, group, tokens) for group in plan.groups}


def _bytes(plan: Plan, pages: dict[str, int]) -> int:
    return sum(pages[state.group] * state.page_bytes(plan.page_size) for state in plan.states)
