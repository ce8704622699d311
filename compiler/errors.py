"""Every error a person can cause or act on, as a sentence: what, where, expected, got, what to try.

Standard library only: every part of adaptc may import this module.
"""

from __future__ import annotations


class AdaptcError(Exception):
    """Base of all errors that adaptc reports to a person. ``exit_code`` is the CLI's exit status."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str = ""):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip() if self.hint else self.message


class InputError(AdaptcError):
    """The model's files are damaged, incomplete or contradict each other."""


class UnsupportedError(AdaptcError):
    """The input is well formed but adaptc can't handle it; the message lists what it can."""


class OptionError(AdaptcError):
    """An option or argument has a value that makes no sense; the message lists the valid ones."""


class CaptureError(AdaptcError):
    """The authors' module could not be turned into a graph; names the operator, module and source line."""


class LegalityError(AdaptcError):
    """An IR module breaks a rule of the stage it claims to be in; names the operator and its place."""


class ArtifactError(AdaptcError):
    """An artifact can't be loaded: damaged, of a newer format, or built for another machine."""


class RequestError(AdaptcError):
    """A request to a loaded session can't be served: empty, too long, or with tokens outside the vocabulary."""


class OutputError(AdaptcError):
    """The output can't be written: it exists already, or the disk is full."""


def one_of(kind: str, got: object, valid) -> OptionError:
    """The error for a name that is none of ``valid``: ``unknown target 'x'; valid targets are: cpu``."""
    return OptionError(f"unknown {kind} {got!r}; valid values are: {', '.join(map(str, valid))}.")
