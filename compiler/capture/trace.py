"""``torch.export`` of a causal LM on token ids alone, with a dynamic number of tokens.

Positions aren't given: the reference is the class's own forward without them, which some families don't derive by
counting (RoBERTa counts non-padding tokens). Where the module counts tokens itself, the graph has an ``arange`` over
T, and that is the step's positions.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import sympy
import torch

from adaptc.capture import hooks, pure
from adaptc.capture.places import Place, lines_of_authors, running
from adaptc.errors import AdaptcError, CaptureError, DynamicError

TOKENS = "T"
SAMPLE = 13
"""Tokens of the traced example: not a size that models have, so that no dimension is T by accident."""


LENGTHS = (*range(4, 130), 255, 256, 257, 1000, 4095, 4096, 4097, 65536)
"""Numbers of tokens for which what a trace took for granted must hold, beside those around the integers in it. Code that
asks for more than a bound or another rest of a division asks it of one of these. Torch itself asks whether sizes such as T - 1 are 0 or 1, which decides
nothing of the result."""


def samples(context: int) -> tuple[int, ...]:
    """Two numbers of tokens: the traced one, and the most that a sequence may have."""
    return tuple(sorted({SAMPLE, context or LENGTHS[-1]}))


class _Logits(torch.nn.Module):
    """``assigned``: names of tensors of modules in whose place the forward puts others."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module
        self.assigned: set[str] = set()  # not a list: torch.export puts those back

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        before = pure.tensors(self)
        logits = hooks.run(self.module, input_ids).logits
        after = pure.tensors(self)
        self.assigned.update(name for name, tensor in before.items() if after.get(name) is not tensor)
        return logits


def trace(module: torch.nn.Module, context: int = 0) -> torch.export.ExportedProgram:
    """The graph of ids i64[1, T] → logits [1, T, V], for sequences of at most ``context`` tokens (0: any number).
    DynamicError when Python decides by values or by T what is computed, CaptureError when torch can't trace the module
    with T dynamic for another reason."""
    ids = torch.zeros((1, SAMPLE), dtype=torch.int64, device=next(module.parameters()).device)
    try:
        return _export(module, ids, context, deferred=False)
    except AdaptcError:
        raise
    except Exception:  # torch has no base class for what export raises; guards on T pass as assertions at run time
        return _export(module, ids, context, deferred=True)


def _export(module: torch.nn.Module, ids: torch.Tensor, context: int, *,
            deferred: bool) -> torch.export.ExportedProgram:
    most = max(context, SAMPLE) if context else None
    shapes = {"input_ids": {1: torch.export.Dim(TOKENS, min=LENGTHS[0], max=most)}}
    modules = {id(m): name for name, m in module.named_modules()}
    logits = _Logits(module)
    with torch.no_grad(), lines_of_authors(), _quiet(), _decisions(modules) as decided:
        try:
            exported = torch.export.export(logits, (ids,), dynamic_shapes=shapes, strict=False,
                                           prefer_deferred_runtime_asserts_over_guards=deferred)
        except AdaptcError as error:
            raise _placed(error, running(traceback.walk_tb(error.__traceback__), modules)) from error
        except Exception as error:
            if not deferred:
                raise
            _check(decided, module, context)
            raise _untraceable(module, error, running(traceback.walk_tb(error.__traceback__), modules)) from error
    _check(decided, module, context)
    pure.check_assigned(exported, logits.assigned)
    return exported


def _check(decided: list[tuple[Any, Place]], module: torch.nn.Module, context: int) -> None:
    """DynamicError for the first decision that another number of tokens, of those that a sequence may have, would make
    otherwise."""
    for fact, place in decided:
        around = {int(n) + d for n in fact.atoms(sympy.Integer) for d in (-1, 0, 1)}
        lengths = sorted({n for n in {*LENGTHS, *around} if LENGTHS[0] <= n <= (context or n)} | {context or SAMPLE})
        if len(fact.free_symbols) == 1 and not all(fact.subs(dict.fromkeys(fact.free_symbols, n)) == True  # noqa: E712
                                                   for n in lengths):
            said = str(fact).replace(str(next(iter(fact.free_symbols))), TOKENS)
            raise DynamicError(f"{type(module).__name__} decides by the number of tokens what it computes, in {place}: "
                               f"of the traced example, {said} is true.", hint=_LENGTH_HINT)


def _placed(error: AdaptcError, place: Place) -> AdaptcError:
    """The error with the place in the authors' code, if it doesn't name a module yet."""
    if not isinstance(error, CaptureError) or not place.file or "in module " in error.message:
        return error
    return type(error)(f"in {place}, {error.message}", hint=error.hint)


def _untraceable(module: torch.nn.Module, error: Exception, place: Place) -> CaptureError:
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    name = type(module).__name__
    if isinstance(error, GuardOnDataDependentSymNode) or any(word in str(error) for word in _VALUES):
        return DynamicError(f"{name} decides in Python, by values that only a run has, what it computes, in {place}.",
                            hint=VALUE_HINT)
    where = f" in {place}" if place.file else ""
    return CaptureError(f"torch.export can't trace {name} with a dynamic number of tokens{where}: {_first_line(error)}")


_VALUES = ("data-dependent", ".numpy() is not supported", "meta tensors")
"""What torch's messages say of Python that reads a tensor's values, where they share no class."""

VALUE_HINT = ("A compiled model computes the same operators for every input: write a choice as torch.where or a "
               "multiplication by a mask, and a loop over a fixed number of steps; take out .item(), .tolist() and "
               "assertions on values.")
_LENGTH_HINT = ("A step holds any number of tokens, of several requests: compute by each token's own position instead, "
                "or fix the choice in the configuration.")


BOOKKEEPING = ("_make_cache_entry", "check_contiguous_sizes_strides")
"""Functions by which torch asks whether a table cut to T rows is all of it, to know how it lies in memory: that
decides nothing of its elements."""


@contextmanager
def _decisions(modules: Mapping[int, str]) -> Iterator[list[tuple[Any, Place]]]:
    """What torch takes for granted about sizes within the block because Python asked, and where it asked."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    found: list[tuple[Any, Place]] = []
    original = ShapeEnv._log_guard

    def noted(self, prefix: str, fact: Any, forcing_spec: bool) -> None:
        frames = list(traceback.walk_stack(None))
        if "suppressed" not in prefix and not any(frame.f_code.co_name in BOOKKEEPING for frame, _ in frames):
            found.append((fact, running(reversed(frames), modules)))
        original(self, prefix, fact, forcing_spec)

    with mock.patch.object(ShapeEnv, "_log_guard", noted):
        yield found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the graph so far, which torch.export prints when it fails, and without its advice to who exports."""
    loggers = [logging.getLogger(name) for name in (
        "torch.export", "torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with mock.patch("torch.export._trace.print", lambda *args, **kwargs: None, create=True):
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
