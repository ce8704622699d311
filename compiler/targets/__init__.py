"""Targets: what an accelerator is, as data. One JSON file each, here or in an installed package.

A package adds targets by an entry point in the group ``adaptc.targets`` that loads to a directory of JSON files.
Standard library only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from adaptc.errors import InputError, OptionError, one_of
from adaptc.packages import TARGETS, Extension, extensions, load


NATIVE = "native"
"""The level that asks for the highest of the machine that compiles."""


@dataclass(frozen=True)
class MemoryLevel:
    """bytes (0 = whatever the machine has) and bandwidth in bytes/s of one device."""

    name: str
    bytes: int
    bandwidth: float


@dataclass(frozen=True)
class Target:
    """An accelerator.

    backend    whose kernels run on it
    levels     instruction-set levels that kernels can be built for, apart from extra features that the backend lets
               follow a level's name (level+feature); default_level is one of them
    compute    operations a second of one device by the dtype that is multiplied
    memory     fastest first; the last one holds the weights
    launch_s   seconds a kernel costs beyond its work (launch and barrier)
    dtypes     that caches and the inputs of linear maps may be kept in
    key_block  cache rows that attention merges at a time, at absolute positions
    """

    name: str
    backend: str
    levels: tuple[str, ...]
    default_level: str
    compute: dict[str, float]
    memory: tuple[MemoryLevel, ...]
    launch_s: float
    dtypes: tuple[str, ...]
    key_block: int

    def __post_init__(self):
        figures = {f"compute[{name}]": value for name, value in self.compute.items()}
        figures |= {f"bandwidth of {part.name}": part.bandwidth for part in self.memory}
        for name, value in {**figures, "key_block": self.key_block}.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        if self.default_level not in self.levels:
            raise ValueError(f"default_level {self.default_level!r} is none of its levels")
        if lacking := sorted(set(self.compute) - set(self.dtypes)):
            raise ValueError(f"it computes in {lacking[0]}, which is none of its dtypes")
        if not self.memory:
            raise ValueError("memory must have at least one level, which holds the weights")

    def level(self, wanted: str) -> str:
        """``wanted``, known or "native", or the default if it is empty; OptionError lists the known ones."""
        base = wanted.partition("+")[0]
        if wanted and base != NATIVE and base not in self.levels:
            raise one_of(f"level of target {self.name}", base, (*self.levels, NATIVE))
        return wanted or self.default_level

    def check_dtype(self, dtype: str, what: str) -> None:
        """OptionError when the target has no values of ``dtype``, which ``what`` asks for."""
        if dtype not in self.dtypes:
            raise OptionError(f"{what} needs {dtype}, and target {self.name} has {', '.join(self.dtypes)} only.")

    def rate(self, dtype: str) -> float:
        """Operations a second on ``dtype``; OptionError listing what the target computes in."""
        if dtype not in self.compute:
            raise one_of(f"dtype that target {self.name} computes in", dtype, self.compute)
        return self.compute[dtype]


def _files() -> dict[str, Path]:
    folders = [Path(__file__).parent]
    folders += [_folder(extension) for extension in extensions(TARGETS)]
    found: dict[str, Path] = {}
    for file in (file for folder in folders for file in sorted(folder.glob("*.json"))):
        if file.stem in found:
            raise InputError(f"target {file.stem!r} is described twice, by {found[file.stem]} and {file}.",
                             hint="Uninstall one of the packages that bring them.")
        found[file.stem] = file
    return found


def _folder(extension: Extension) -> Path:
    folder = load(extension)
    if not isinstance(folder, (str, Path)) or not Path(folder).is_dir():
        raise extension.error(f"{extension.value} is {folder!r}, expected a folder of target files.")
    return Path(folder)


def package_of(name: str) -> str | None:
    """The installed package that brings the target ``name``; None for our own."""
    folder = _files()[name].parent
    return next((e.package for e in extensions(TARGETS) if _folder(e) == folder), None)


def names() -> list[str]:
    return sorted(_files())


def target(name: str) -> Target:
    """The target called ``name``. OptionError lists the known ones; InputError says what is wrong with its file."""
    files = _files()
    if name not in files:
        raise one_of("target", name, sorted(files))
    try:
        data = json.loads(files[name].read_text())
        data["memory"] = tuple(MemoryLevel(**m) for m in data["memory"])
        for key in ("levels", "dtypes"):
            data[key] = tuple(data[key])
        if data["name"] != name:
            raise ValueError(f"it calls itself {data['name']!r}")
        return Target(**data)
    except KeyError as error:
        raise InputError(f"target file {files[name].name} is not a target: it has no {error}.",
                         hint="Compare it with cpu.json.") from error
    except (TypeError, ValueError) as error:
        raise InputError(f"target file {files[name].name} is not a target: {error}.",
                         hint="Compare it with cpu.json.") from error
