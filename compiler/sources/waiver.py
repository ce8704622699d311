"""What a person says may go unused of a model's files (``--waive``)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from adaptc.errors import OptionError


class Waiver:
    """Names, or ``fnmatch`` patterns of names, of configuration keys (dotted when nested), metadata keys and tensors.

    It is asked only about what nothing uses, and notes each answer: ``names`` is what has really been waived.
    """

    def __init__(self, patterns: Iterable[str] = ()):
        self.patterns = tuple(patterns)
        self._found: dict[str, set[str]] = {pattern: set() for pattern in self.patterns}

    def covers(self, name: str) -> bool:
        """Whether ``name``, which nothing uses, is waived."""
        matching = [pattern for pattern in self.patterns if fnmatchcase(name, pattern)]
        for pattern in matching:
            self._found[pattern].add(name)
        return bool(matching)

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that has been waived, sorted."""
        return tuple(sorted(set().union(*self._found.values())))

    def check(self, known: Collection[str], model: str) -> None:
        """OptionError for a pattern that nothing unused has matched; ``known`` are all names in the model's files."""
        for pattern, found in self._found.items():
            if found:
                continue
            if any(fnmatchcase(name, pattern) for name in known):
                raise OptionError(f"--waive {pattern}: {model} has that and needs no waiver for it: it is used, or known "
                                  "to mean nothing for inference.", hint="Leave it out; what is used can't be waived.")
            raise OptionError(f"--waive {pattern}: {model} has no configuration key, metadata key or tensor of that name.",
                              hint="Leave it out, or write the name as the error that asked for it does.")


def way_on(names: Iterable[str]) -> str:
    """The hint of an error about ``names``, which nothing uses."""
    names = list(names)
    flags = " ".join(f"--waive {name}" for name in names[:3]) + (" …" if len(names) > 3 else "")
    return f"Where you know that the model is the same without, go on with {flags}; the artifact records it."
