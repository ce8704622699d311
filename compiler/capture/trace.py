"""``torch.export`` of a causal LM on token ids alone, with a dynamic number of tokens.

Positions aren't given: the reference is the class's own forward without them, which some families don't derive by
counting (RoBERTa counts non-padding tokens). Where the module counts tokens itself, the graph has an ``arange`` over
T, and that is the step's positions.
"""

from __future__ import annotations

import torch

from adaptc.errors import AdaptcError, CaptureError

TOKENS = "T"
SAMPLE = 13
"""Tokens of the traced example: not a size that models have, so that no dimension is T by accident."""


class _Logits(torch.nn.Module):
    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.module(input_ids=input_ids, use_cache=False).logits


PREFIX = "module"
"""The name of the authors' module within what is traced."""


def trace(module: torch.nn.Module) -> torch.export.ExportedProgram:
    """The graph of ids i64[1, T] → logits [1, T, V]. CaptureError when torch can't trace it with T dynamic."""
    ids = torch.zeros((1, SAMPLE), dtype=torch.int64, device=next(module.parameters()).device)
    try:
        return _export(module, ids, deferred=False)
    except AdaptcError:
        raise
    except Exception:  # torch has no base class for what export raises; guards on T pass as assertions at run time
        try:
            return _export(module, ids, deferred=True)
        except AdaptcError:
            raise
        except Exception as error:
            raise CaptureError(
                f"torch.export can't trace {type(module).__name__} with a dynamic number of tokens: "
                f"{_first_line(error)}"
            ) from error


def _export(module: torch.nn.Module, ids: torch.Tensor, *, deferred: bool) -> torch.export.ExportedProgram:
    shapes = {"input_ids": {1: torch.export.Dim(TOKENS, min=2)}}
    with torch.no_grad():
        return torch.export.export(_Logits(module), (ids,), dynamic_shapes=shapes, strict=False,
                                   prefer_deferred_runtime_asserts_over_guards=deferred)


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
