"""Are the packed weights the model's own? Every tensor's values against the digest that the manifest has of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from adaptc.formats import FORMATS
from adaptc.ir.module import Weight
from adaptc.sources.binding import Binding
from adaptc.verify.report import Finding, Level
from adaptc.verify.subject import DENSE, Subject


def check(subject: Subject, progress: Callable) -> Level:
    """Unpacks every weight, undoes its order of rows, and compares SHA-256 digests.

    A weight that was converted to another format has other values than its tensor: its digest can't be checked, and
    the level says so (``--against`` compares it with the file's values).
    """
    level = Level("weights")
    tensors, converted, seen = subject.artifact.manifest["tensors"], [], set()
    for done, (name, weight) in enumerate(subject.stored.items()):
        seen.add(weight.tensor)
        if weight.tensor not in tensors:
            level.findings.append(Finding("the manifest has no digest of this tensor", f"tensor {weight.tensor}",
                                          _module(subject, name)))
        elif not lossless(weight):
            converted.append(name)
        elif digest(subject, weight) != tensors[weight.tensor]:
            level.findings.append(Finding(_damage(subject, name), f"tensor {weight.tensor}", _module(subject, name)))
        progress("weights", done + 1, len(subject.stored))
    level.covered.append(f"{len(subject.stored) - len(converted)} of {len(subject.stored)} packed weights against the "
                         "SHA-256 of their source tensors")
    if converted:
        level.left_out.append(f"{len(converted)} weights were converted to another format, which their source digests "
                              "can't confirm; --against MODEL compares them with the file's values")
    if unused := sorted(set(tensors) - seen):
        level.left_out.append(f"{len(unused)} tensors that no operator reads: {', '.join(unused[:5])}")
    return level


def lossless(weight: Weight) -> bool:
    """Whether the stored values are the file's, bit for bit: its own format, or float32 in place of it."""
    return (weight.spec.format or DENSE) in (FORMATS[weight.stored], DENSE)


def tensor_order(weight: Weight, values: np.ndarray) -> np.ndarray:
    """A parameter's ``values`` with rows, or the last two axes, back where the file has them."""
    binding = Binding(weight.tensor, weight.rows or None)
    if binding.transposed:
        return values.swapaxes(-1, -2)
    order = binding.rows(len(values))
    if order is None:
        return values
    stored = np.empty_like(values)
    stored[order] = values
    return stored


def digest(subject: Subject, weight: Weight) -> str:
    return hashlib.sha256(np.ascontiguousarray(tensor_order(weight, subject.values(weight.name)), "<f4")).hexdigest()


def _module(subject: Subject, name: str) -> str:
    """The module that the parameter belongs to, by its name; a pass may have added that it is read transposed."""
    return subject.stored[name].name.removesuffix(".T").rpartition(".")[0]


def _damage(subject: Subject, name: str) -> str:
    users = ", ".join(subject.describe(i)[0] for i in subject.users(name)) or "no operator"
    return f"the packed values aren't the model's: their digest differs from the manifest's (read by {users})"
