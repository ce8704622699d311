"""Backends, found by name: a folder here, or an installed package with an entry point in the group ``adaptc.backends``.

An entry point's value is the package that holds the modules ``codegen`` (compile time) and ``launch`` (run time); it
says the ``PROTOCOL`` that it is written for (``adaptc.packages``).
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from dataclasses import replace
from typing import TYPE_CHECKING

from adaptc.errors import one_of
from adaptc.packages import BACKENDS, Extension, extensions, load, module

if TYPE_CHECKING:
    from adaptc.protocol import Codegen, Launcher


def codegen(name: str) -> Codegen:
    """The compile-time side of backend ``name``; OptionError listing those that have one."""
    return _side(name, "codegen", "CODEGEN")


def launcher(name: str) -> Launcher:
    """The run-time side of backend ``name``; OptionError listing those that have one."""
    return _side(name, "launch", "LAUNCHER")


def package_of(name: str) -> str | None:
    """The installed package that brings the backend ``name``; None for our own."""
    found = _found().get(name)
    return found.package if isinstance(found, Extension) else None


def _found() -> dict[str, str | Extension]:
    """Every backend by name: its module here, or its entry point. An installed package can't replace one of ours."""
    found: dict[str, str | Extension] = {e.name: e for e in extensions(BACKENDS)}
    return dict(sorted((found | _own()).items()))


def _own() -> dict[str, str]:
    return {m.name: f"{__name__}.{m.name}" for m in pkgutil.iter_modules(__path__) if m.ispkg}


def _side(name: str, side: str, attribute: str):
    own = _own()  # ours first: looking at every installed package takes a tenth of loading
    backend = own[name] if name in own else _found().get(name)
    if isinstance(backend, Extension):
        for other in extensions(BACKENDS):
            if other.name == name and other != backend:
                raise backend.error(f"backend {name!r} is also brought by {other}.")
        module(backend)
        if _has(backend.value, side):
            return load(replace(backend, value=f"{backend.value}.{side}:{attribute}"))
    elif backend is not None and _has(backend, side):
        return getattr(importlib.import_module(f"{backend}.{side}"), attribute)
    raise one_of("backend", name, [n for n, b in _found().items() if _has(getattr(b, "value", b), side)])


def _has(package: str, side: str) -> bool:
    try:
        return importlib.util.find_spec(f"{package}.{side}") is not None
    except Exception:  # an entry point of a package that is gone, or does anything when it is imported
        return False
