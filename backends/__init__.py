"""Backends, found by name: a folder here, or an installed package with an entry point in the group ``adaptc.backends``.

An entry point's value is the package that holds the modules ``codegen`` (compile time) and ``launch`` (run time).
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from typing import TYPE_CHECKING

from adaptc.errors import one_of

if TYPE_CHECKING:
    from adaptc.protocol import Codegen, Launcher

GROUP = "adaptc.backends"


def packages() -> dict[str, str]:
    """Package of every backend by name. Folders here come first: an installed package can't replace one."""
    from importlib.metadata import entry_points

    found = {point.name: point.value for point in entry_points(group=GROUP)}
    return dict(sorted((found | _own()).items()))


def _own() -> dict[str, str]:
    return {m.name: f"{__name__}.{m.name}" for m in pkgutil.iter_modules(__path__) if m.ispkg}


def codegen(name: str) -> Codegen:
    """The compile-time side of backend ``name``; OptionError listing those that have one."""
    return _side(name, "codegen", "CODEGEN")


def launcher(name: str) -> Launcher:
    """The run-time side of backend ``name``; OptionError listing those that have one."""
    return _side(name, "launch", "LAUNCHER")


def _side(name: str, module: str, attribute: str):
    available = _own()
    if name not in available:  # looking at every installed package takes a tenth of loading
        available = packages()
    if name in available and _has(available[name], module):
        return getattr(importlib.import_module(f"{available[name]}.{module}"), attribute)
    raise one_of("backend", name, [n for n, package in packages().items() if _has(package, module)])


def _has(package: str, module: str) -> bool:
    try:
        return importlib.util.find_spec(f"{package}.{module}") is not None
    except ModuleNotFoundError:  # an entry point of a package that is gone
        return False
