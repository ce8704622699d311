"""A tuning: what kernels of one level were measured to do best with. It is an input of a compile, like the model.

A tuning file is JSON: ``{"tuning": 1, "backend", "level", "kernels": [{"family", "params", "choices", "time"}]}``.
``family`` and ``params`` say the kernel as the backend selects it, ``choices`` what is set in it instead of the defaults
(``Codegen.choices`` says what may be), and ``time`` the part of the defaults' time that it took; it is for people.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from adaptc.artifact_format import canonical
from adaptc.errors import DamagedFileError, OptionError, one_of
from adaptc.protocol import Codegen, KernelSpec, OpSpec, Selection

VERSION = 1

_AGAIN = "Make it again with `adaptc compile --tune`."


def tunable(codegen: Codegen, kernels: Iterable[KernelSpec]) -> dict[str, tuple[KernelSpec, Mapping[str, Any]]]:
    """By symbol the kernels with something to choose, and what."""
    choices = getattr(codegen, "choices", lambda family: {})
    return {codegen.symbol(kernel): (kernel, found) for kernel in kernels if (found := choices(kernel.family))}


def chosen(kernel: KernelSpec, choices: Mapping[str, int]) -> KernelSpec:
    """The kernel with ``choices`` set."""
    return replace(kernel, params=tuple(sorted((dict(kernel.params) | choices).items())))


def key_of(kernel: KernelSpec) -> str:
    """What a kernel is called in a tuning: its canonical JSON."""
    return json.dumps({"family": kernel.family, "params": dict(kernel.params)}, sort_keys=True)


@dataclass(frozen=True)
class Tuning:
    """``choices`` by kernel (``key_of``); ``times`` likewise, the part of the defaults' time."""

    backend: str
    level: str
    choices: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict, compare=False)

    def used(self, kernels: Iterable[KernelSpec]) -> Tuning:
        """Without what isn't for one of these kernels (as selected with this tuning), and without times: what of it an
        artifact depends on."""
        there = {key_of(kernel) for kernel in kernels}
        return Tuning(self.backend, self.level, {
            key: choices for key, choices in self.choices.items()
            if key_of(chosen(_kernel(json.loads(key)), choices)) in there
        })

    def to_json(self) -> bytes:
        """The file: the same text for the same content."""
        rows = [json.loads(key) | {"choices": dict(self.choices[key])}
                | ({"time": round(self.times[key], 3)} if key in self.times else {})
                for key in sorted(self.choices)]
        return canonical({"tuning": VERSION, "backend": self.backend, "level": self.level, "kernels": rows})

    @property
    def digest(self) -> str:
        """SHA-256 over everything but the times."""
        return hashlib.sha256(replace(self, times={}).to_json()).hexdigest()


def _kernel(row: Mapping[str, Any]) -> KernelSpec:
    return KernelSpec(row["family"], tuple(sorted(row["params"].items())))


def read(path: str | os.PathLike, codegen: Codegen) -> Tuning:
    """The tuning in a file. DamagedFileError and OptionError say what isn't so: that it is one, that it is for this
    backend, and that what it chooses can be chosen. Choices that are the defaults are left out."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise DamagedFileError(f"{path} can't be read: {error.strerror or error}.") from error
    return parse(text, os.fspath(path), codegen)


def parse(text: bytes, where: str, codegen: Codegen) -> Tuning:
    """As ``read``, from the file's bytes."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{where} is no tuning: it can't be read as JSON ({error}).", hint=_AGAIN) from error
    _fields(data, {"tuning": int, "backend": str, "level": str, "kernels": list}, where)
    if data["tuning"] != VERSION:
        raise DamagedFileError(f"{where} is a tuning of version {data['tuning']}; this adaptc reads {VERSION}.",
                               hint=_AGAIN)
    if data["backend"] != codegen.name:
        raise OptionError(f"{where} is a tuning for the backend {data['backend']!r}, but the target's is "
                          f"{codegen.name!r}.")
    choices: dict[str, dict[str, int]] = {}
    times: dict[str, float] = {}
    for number, row in enumerate(data["kernels"]):
        here = f"{where}, kernel {number}"
        _fields(row, {"family": str, "params": dict, "choices": dict}, here, {"time": (int, float)})
        key = key_of(_kernel(row))
        if key in choices:
            raise DamagedFileError(f"{here}: this kernel stands there twice.", hint=_AGAIN)
        choices[key] = _checked(row, here, codegen)
        if "time" in row:
            times[key] = row["time"]
    made = {key: own for key, own in choices.items() if own}
    return Tuning(data["backend"], data["level"], made, {key: t for key, t in times.items() if key in made})


def _fields(data: Any, kinds: Mapping[str, type], where: str, optional: Mapping[str, Any] = {}) -> None:
    if not isinstance(data, dict):
        raise DamagedFileError(f"{where} is no tuning: expected an object, got {type(data).__name__}.", hint=_AGAIN)
    known = {**kinds, **optional}
    for name in sorted({*kinds, *data} - {*(optional.keys() - data.keys())}):
        if name not in data or name not in known:
            what = "is missing" if name in known else "is unknown"
            raise DamagedFileError(f"{where}: the field {name!r} {what}.", hint=_AGAIN)
        if not isinstance(data[name], known[name]) or isinstance(data[name], bool):
            raise DamagedFileError(f"{where}: the field {name!r} can't be {data[name]!r:.80}.", hint=_AGAIN)


def _checked(row: Mapping[str, Any], where: str, codegen: Codegen) -> dict[str, int]:
    """A row's choices without those that are the defaults."""
    try:
        legal = getattr(codegen, "choices", lambda family: {})(row["family"])
    except OptionError as error:
        raise DamagedFileError(f"{where}: {error}", hint=_AGAIN) from error
    for name, value in row["choices"].items():
        values = legal.get(name, ())
        if type(value) is not int or value not in values:
            allowed = f"one of {', '.join(map(str, values))}" if values else "none"
            raise DamagedFileError(f"{where}: {name} = {value!r:.40} can't be chosen for {row['family']}; allowed is "
                                   f"{allowed}.", hint=_AGAIN)
    return {name: value for name, value in row["choices"].items() if value != legal[name][0]}


@dataclass(frozen=True)
class Tuned:
    """A backend that selects kernels with the choices of a tuning."""

    codegen: Codegen
    tuning: Tuning

    def __getattr__(self, name: str) -> Any:
        return getattr(self.codegen, name)

    def select(self, spec: OpSpec) -> Selection | None:
        selection = self.codegen.select(spec)
        if selection is None:
            return None
        return replace(selection, uses=tuple(
            replace(use, kernel=chosen(use.kernel, self.tuning.choices.get(key_of(use.kernel), {})))
            for use in selection.uses
        ))
