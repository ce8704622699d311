"""Installed packages that add to adaptc, found by their entry points. Standard library only.

An entry point of a group in ``GROUPS`` names a module that says ``PROTOCOL = 1`` and holds the group's tables (of a
backend: the package with its modules; of targets: a folder of files). Nothing that adaptc has itself can be replaced,
and nothing is skipped: whatever is wrong with a package is a ``PackageError`` that names it, as leaving the package
out would silently make another artifact.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from adaptc.errors import AdaptcError, MissingPackageError, PackageError

PROTOCOL = 1
"""What packages are written against: raised when something that they use changes its meaning."""

OPERATORS, CAPTURE, CPU_KERNELS, BACKENDS, TARGETS = GROUPS = (
    "adaptc.operators",  # ROWS: rows of the operator table
    "adaptc.capture",  # RULES: what operators of traced graphs become
    "adaptc.cpu.kernels",  # FAMILIES and SELECT: kernels of the cpu backend
    "adaptc.backends",  # a package with the modules ``codegen`` and ``launch``
    "adaptc.targets",  # a folder of target files
)


@dataclass(frozen=True)
class Extension:
    """One entry point of an installed package."""

    group: str
    name: str
    value: str
    package: str
    version: str

    def __str__(self) -> str:
        return f"the package {self.package} {self.version} (entry point {self.name!r} of {self.group})"

    def error(self, what: str) -> PackageError:
        return PackageError(f"{self}: {what}", hint=f"Correct, update or uninstall {self.package}.")


def extensions(group: str) -> list[Extension]:
    """The entry points of a group, in an order that doesn't depend on where packages lie."""
    found = {
        Extension(group, point.name, point.value, point.dist.name, point.dist.version)
        for point in importlib.metadata.entry_points(group=group)
    }
    return sorted(found, key=lambda e: (e.package, e.name))


def load(extension: Extension) -> Any:
    """What the entry point names. PackageError when that can't be had."""
    module, _, attribute = extension.value.partition(":")
    try:
        loaded = importlib.import_module(module.strip())
        return functools.reduce(getattr, filter(None, attribute.strip().split(".")), loaded)
    except Exception as error:  # a module may do anything when it is imported
        raise extension.error(f"{extension.value} can't be imported: {type(error).__name__}: {error}.") from error


def module(extension: Extension) -> ModuleType:
    """The module that the entry point names, written for this adaptc's protocol."""
    found = load(extension)
    protocol = getattr(found, "PROTOCOL", None)
    if protocol != PROTOCOL:
        said = f"is written for protocol {protocol} of adaptc" if protocol is not None else "doesn't say its PROTOCOL"
        raise extension.error(f"{extension.value} {said}; this adaptc has protocol {PROTOCOL}.")
    return found


@dataclass(frozen=True)
class Added:
    """An entry of a table, and who brings it."""

    value: Any
    extension: Extension


def added(group: str, table: str, own: Container[str], check: Callable[[Any], str]) -> dict[str, Added]:
    """What packages add to adaptc's table of the names ``own``: the entries of their modules' ``table``, a mapping by
    name or a list of what has a ``name``. ``check`` says what is wrong with an entry's value, or "". """
    found: dict[str, Added] = {}
    for extension in extensions(group):
        entries = getattr(module(extension), table, None)
        if not isinstance(entries, (Mapping, list, tuple)):
            raise extension.error(f"{extension.value} has no table {table}.")
        named = list(entries.items()) if isinstance(entries, Mapping) else [(getattr(e, "name", e), e) for e in entries]
        for name, value in named:
            if problem := blaming(extension, f"reading {table} of {extension.value}", check)(value):
                raise extension.error(f"{table} of {extension.value}: {problem}")
            if name in own:
                raise extension.error(f"{name!r} of its {table} is adaptc's own, which a package can't replace.")
            if name in found:
                raise extension.error(f"{name!r} of its {table} is declared twice, first by {found[name].extension}.")
            found[name] = Added(value, extension)
    return dict(sorted(found.items()))


def blaming(extension: Extension, what: str, function: Callable) -> Callable:
    """``function`` of a package, whose failures name the package."""

    @functools.wraps(function)
    def called(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except AdaptcError:
            raise
        except Exception as error:
            raise extension.error(f"{what} failed: {type(error).__name__}: {error}.") from error

    return called


# ---- what an artifact says of them


def described(used: Mapping[str, Iterable[str]]) -> dict[str, dict[str, Any]]:
    """Package → version, digest of its files and what it was used for, of ``used`` (package → groups)."""
    known = {e.package: e for group in GROUPS for e in extensions(group)}
    return {
        package: {"version": known[package].version, "sha256": _digest(package), "for": sorted(groups)}
        for package, groups in sorted(used.items())
        if package in known
    }


def _digest(package: str) -> str:
    """Of the files of the import packages that entry points name: a version alone doesn't say what a checkout holds."""
    values = (e.value for group in GROUPS for e in extensions(group) if e.package == package)
    digest = hashlib.sha256()
    for root in sorted({value.partition(":")[0].partition(".")[0].strip() for value in values}):
        for name, path in sorted(_files(root).items()):
            content = path.read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _files(root: str) -> dict[str, Path]:
    spec = importlib.util.find_spec(root)
    if spec.submodule_search_locations is None:
        return {root: Path(spec.origin)}
    return {
        f"{root}/{path.relative_to(folder).as_posix()}": path
        for folder in spec.submodule_search_locations
        for path in Path(folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def require(provenance: Mapping[str, Any], what: str) -> None:
    """MissingPackageError when a package isn't installed that tools need to read an artifact's programs."""
    here = {e.package for group in GROUPS for e in extensions(group)}
    for package, said in sorted(provenance.get("packages", {}).items()):
        if package not in here and set(said["for"]) - {CAPTURE}:
            raise MissingPackageError(
                f"{what} was compiled with the package {package} {said['version']} ({', '.join(said['for'])}), which "
                "isn't installed.",
                hint="Install it. (To load and run the artifact, it isn't needed.)",
            )
