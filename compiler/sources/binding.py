"""Which stored tensor supplies which parameter: every tensor exactly once, every parameter, in the right shape."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adaptc.errors import InputError, UnusedError
from adaptc.models import waivers
from adaptc.sources.tensor import SourceTensor
from adaptc.sources.waiver import Waiver, way_on

_RULES: dict[str, Callable[[int, int], np.ndarray]] = {
    "rope_halves": lambda rows, heads: np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1),
}
"""Row permutations by name: (rows, argument) → the stored row that each of the parameter's rows is.

rope_halves: within each of ``heads`` heads, stored rows alternate between the two rotary halves
(llama.cpp convert_hf_to_gguf.py, LlamaModel.permute); the parameter holds one half after the other."""


@dataclass(frozen=True)
class Binding:
    """How a parameter is obtained: the stored ``tensor``'s rows, permuted by ``row_permutation`` (a rule's name and
    its argument), plus ``add``."""

    tensor: str
    row_permutation: tuple[str, int] | None = None
    add: float = 0.0
    shape: tuple[int, ...] = ()
    """What the tensor's elements are read as before that, of the same columns; () for its own shape."""

    @property
    def transposed(self) -> bool:
        return self.row_permutation is not None and self.row_permutation[0] == TRANSPOSE

    def rows(self, count: int) -> np.ndarray | None:
        """The stored row of each of the parameter's ``count`` rows, int64; None when rows stay where they are."""
        if self.row_permutation is None or self.transposed:
            return None
        rule, argument = self.row_permutation
        return _RULES[rule](count, argument)


TRANSPOSE = "transpose"
"""The rule that isn't a permutation of rows: the tensor's last two axes are exchanged."""


def bind(
    tensors: Mapping[str, SourceTensor],
    supplier: Callable[[str], Binding],
    parameters: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    ignored: Sequence[str] = (),
    waiver: Waiver = Waiver(),
) -> dict[str, Binding]:
    """Bindings of all ``parameters`` (name → shape). ``tied`` maps a parameter to the one whose storage it shares.

    ``supplier`` says which tensor a parameter comes from, whether or not the file has it. ``ignored`` are regular
    expressions of tensors that the model's class leaves out. InputError naming all missing parameters, wrong shapes, and
    tensors that nothing uses and ``waiver`` doesn't cover (these alone: UnusedError), or tied parameters that the file
    stores twice and differently.
    """
    groups: dict[str, list[str]] = {}
    for name in [*parameters, *tied]:
        groups.setdefault(tied.get(name, name), [tied.get(name, name)]).append(name)
    bindings: dict[str, Binding] = {}
    consumed: dict[str, str] = {}
    missing = []
    for owner, names in groups.items():
        names = list(dict.fromkeys(names))
        present = {name: binding for name in names if (binding := supplier(name)).tensor in tensors}
        if not present:
            missing.append(owner)
            continue
        _check_equal(tensors, present)
        for name, binding in present.items():
            if binding.tensor in consumed:
                raise InputError(
                    f"the tensor {binding.tensor!r} would supply both {consumed[binding.tensor]!r} and {name!r}, "
                    "which aren't tied."
                )
            consumed[binding.tensor] = name
        bindings.update(dict.fromkeys(names, next(iter(present.values()))))
    problems = []
    if missing:
        problems.append(InputError(f"the model's files have no tensor for {listed(missing)}.",
                                   hint="Is a file missing, or is the model of another architecture than it says?"))
    problems += _wrong_shapes(tensors, bindings, parameters)
    needed = [name for name, why in unused(tensors, supplier, (*parameters, *tied), ignored, waiver).items() if not why]
    if needed:
        problems.append(UnusedError(f"the model has no use for {listed(needed)}, which {tensors[needed[0]].file} holds.",
                                    hint="A model compiled without it might not be the authors' model. " + way_on(needed)))
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise InputError(" ".join(f"({number}) {problem}" for number, problem in enumerate(problems, 1)))
    return {name: bindings[name] for name in parameters}


def unused(tensors: Iterable[str], supplier: Callable[[str], Binding], parameters: Iterable[str],
           ignored: Sequence[str] = (), waiver: Waiver = Waiver()) -> dict[str, str]:
    """The tensors that supply no parameter, and why each may be left out ("" where nothing says so). ``waiver`` is asked
    last: about what nothing else excuses."""
    used = {supplier(name).tensor for name in parameters}
    found = {}
    for name in (name for name in tensors if name not in used):
        pattern = next((pattern for pattern in ignored if re.search(pattern, name)), None)
        own = f"the model's class leaves out what matches {pattern!r}" if pattern else ""
        known = waivers.reason(waivers.TENSORS, name) or own
        found[name] = known or ("waived by the caller" if waiver.covers(name) else "")
    return found


def _check_equal(tensors: Mapping[str, SourceTensor], present: Mapping[str, Binding]) -> None:
    first, *others = present.items()
    for name, binding in others:
        ours, theirs = tensors[first[1].tensor], tensors[binding.tensor]
        same_format = (ours.stored, ours.shape) == (theirs.stored, theirs.shape)
        if not same_format or not np.array_equal(ours.raw, theirs.raw):
            raise InputError(
                f"the configuration ties {name!r} to {first[0]!r}, but the tensors {binding.tensor!r} and "
                f"{first[1].tensor!r} differ.",
                hint="Set tie_word_embeddings to false if both are meant.",
            )


def _wrong_shapes(
    tensors: Mapping[str, SourceTensor], bindings: Mapping[str, Binding], parameters: Mapping[str, tuple[int, ...]]
) -> list[InputError]:
    """The error that names parameters of other shapes than their tensors', if there are any."""
    wrong = []
    for name, shape in parameters.items():
        if name not in bindings:
            continue
        tensor = tensors[bindings[name].tensor]
        *lead, n, k = (1, 1, *shape) if len(shape) < 2 else shape
        wanted = (*lead, k, n) if bindings[name].transposed else tuple(shape)
        if wanted != tensor.shape:
            how = ", which is stored transposed" if bindings[name].transposed else ""
            wrong.append(f"the parameter {name!r} has the shape {tuple(shape)}{how}, but the tensor {tensor.name!r} in "
                         f"{tensor.file} has {tensor.shape}")
    if not wrong:
        return []
    more = f"; so are the shapes of {len(wrong) - SHOWN} more parameters" if len(wrong) > SHOWN else ""
    return [InputError(f"{'; '.join(wrong[:SHOWN])}{more}.", hint="The configuration and the tensors don't belong together.")]


SHOWN = 5
"""Names that an error has of many."""


def listed(names: Iterable[str], most: int = SHOWN) -> str:
    """'a', 'b' and 3 more."""
    names = list(names)
    shown = ", ".join(map(repr, names[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
