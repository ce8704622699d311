"""What of a model can't be captured: all of it at once, not one thing a run."""

from __future__ import annotations

import re

from adaptc.errors import AdaptcError, CaptureError

_NUMBERED = re.compile(r"(?<=\.)\d+\b")
"""A layer's number in a module path."""


class Problems:
    """Errors that are put off until everything has been looked at. What differs by layer alone is told once."""

    def __init__(self) -> None:
        self.found: list[AdaptcError] = []

    def add(self, error: AdaptcError) -> None:
        self.found.append(error)

    def check(self) -> None:
        """Raises the one error, as it is, or a CaptureError that lists all of them."""
        places: dict[str, list[AdaptcError]] = {}
        for error in self.found:
            places.setdefault(_NUMBERED.sub("N", error.message), []).append(error)
        firsts = [errors[0] for errors in places.values()]
        if len(firsts) == 1:
            raise firsts[0]
        if firsts:
            listed = " ".join(f"({number}) {errors[0].message}" + (f" So in {len(errors) - 1} more place(s)." if errors[1:] else "")
                              for number, errors in enumerate(places.values(), 1))
            hints = dict.fromkeys(error.hint for error in firsts if error.hint)
            raise CaptureError(f"adaptc can't capture {len(firsts)} things of this model. {listed}", hint=" ".join(hints))
