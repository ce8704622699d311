"""Imports point one way: models → capture → IR → passes → plan → codegen → artifact → runtime → launch.

Every import statement counts, wherever it stands (inside functions, under TYPE_CHECKING, relative). The roof
(``__init__``, ``cli``, ``driver``) may import everything, and nothing imports it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"compiler": "adaptc", "passes": "adaptc.passes", "backends": "adaptc.backends",
           "runtime": "adaptc.runtime", "models": "adaptc.models"}
ROOF = {"adaptc", "adaptc.cli", "adaptc.driver"}
SHARED = {"adaptc.errors", "adaptc.formats", "adaptc.plan", "adaptc.protocol", "adaptc.artifact_format",
          "adaptc.options", "adaptc.chart", "adaptc.packages", "adaptc.content_cache"}
RUN_TIME = ("numpy", "safetensors", "tokenizers", "jinja2")


def modules() -> dict[str, Path]:
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join((package, *parts))] = path
    return found


MODULES = modules()


def imports(name: str) -> set[str]:
    """Everything a module imports, as absolute names; of adaptc, resolved to modules."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            inner = {f"{base}.{alias.name}" for alias in node.names} & set(MODULES)
            found |= inner or {base}
            if inner != {f"{base}.{alias.name}" for alias in node.names}:
                found.add(base)
    return found


def ours(name: str) -> set[str]:
    return {i for i in imports(name) if i == "adaptc" or i.startswith("adaptc.")}


def room(name: str) -> str:
    """The folder a module is in. ``verify`` lies in ``compiler/``, but stands right of all rooms and is one of its own."""
    for package in ("adaptc.passes", "adaptc.backends", "adaptc.runtime", "adaptc.models", "adaptc.verify"):
        if name == package or name.startswith(package + "."):
            return package
    return "adaptc"


LEVELS = (
    # what stands left of what: a module may import its own level and those before it
    ("adaptc.models", "adaptc.blocks"),
    ("adaptc.ops",),
    ("adaptc.ir",),
    ("adaptc.sources",),
    ("adaptc.capture", "adaptc.weights", "adaptc.golden"),
    ("adaptc.passes",),
    ("adaptc.targets", "adaptc.planner", "adaptc.report", "adaptc.tuning"),
    ("adaptc.backends",),
    ("adaptc.artifact",),
    ("adaptc.runtime",),
    ("adaptc.verify",),  # reads what both ends made: the oracle's programs and the run time; only the roof is above it
)


def level(name: str) -> int | None:
    best = None
    for index, names in enumerate(LEVELS):
        for prefix in names:
            if name == prefix or name.startswith(prefix + "."):
                best = index
    return best


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_one_way(name):
    if name in ROOF:
        return
    assert not ours(name) & {"adaptc.cli", "adaptc.driver"}, "nothing imports the roof"
    mine = level(name)
    if name in SHARED:
        assert ours(name) <= SHARED, f"{name} is shared by all and may import only what is shared"
        return
    assert mine is not None, f"{name} has no place in the order: give it one in LEVELS"
    for imported in ours(name) - SHARED - {"adaptc"}:
        assert level(imported) is not None and level(imported) <= mine, f"{name} imports {imported}, to its right"


def test_no_two_folders_import_each_other():
    edges = {(room(n), room(i)) for n in MODULES if n not in ROOF for i in ours(n) - SHARED - {"adaptc"}}
    assert not {(a, b) for a, b in edges if a != b and (b, a) in edges}


@pytest.mark.parametrize("name", sorted(SHARED))
def test_shared_modules_are_standard_library_only(name):
    outside = {i.partition(".")[0] for i in imports(name)} - {"adaptc"}
    assert outside <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("name", [n for n in MODULES if room(n) == "adaptc.runtime" or ".launch" in n])
def test_run_time_needs_no_compiler(name):
    """What an artifact needs to run imports, directly or not, only the standard library and four packages."""
    seen, queue = set(), [name]
    while queue:
        current = queue.pop()
        if current in seen:
            continue
        seen.add(current)
        for imported in imports(current):
            if imported in MODULES:
                queue.append(imported)
            elif not imported.startswith("adaptc"):
                top = imported.partition(".")[0]
                assert top in sys.stdlib_module_names or top in RUN_TIME, f"{current} imports {imported}"
    reached = seen - ROOF - SHARED
    assert not [m for m in reached if ".codegen" in m or ".kernels" in m or ".toolchain" in m], "launch meets codegen"
    assert all(room(m) in ("adaptc.runtime", "adaptc.backends") for m in reached), reached


def test_codegen_never_meets_launch():
    for name in MODULES:
        if ".codegen" in name or ".kernels" in name:
            seen, queue = set(), [name]
            while queue:
                current = queue.pop()
                if current not in seen:
                    seen.add(current)
                    queue += [i for i in ours(current) if i in MODULES and i != "adaptc"]
            assert not [m for m in seen if ".launch" in m], name


def test_what_is_derived_is_keyed_by_all_code_that_makes_it():
    """Everything of ours that capture and sources import is part of the key of what they make."""
    from adaptc.sources.derived import CODE

    seen, queue = set(), ["adaptc.capture.pipeline", *(m for m in MODULES if m.startswith("adaptc.sources"))]
    while queue:
        current = queue.pop()
        if current not in seen:
            seen.add(current)
            queue += [i for i in ours(current) if i in MODULES and i != "adaptc"]
    assert not [m for m in seen if not any(m == name or m.startswith(name + ".") for name in CODE)]


@pytest.mark.parametrize("command", ["import adaptc", "from adaptc.cli import main; main(['--help'], standalone_mode=False)"])
def test_light_start(command):
    """``import adaptc`` and ``adaptc --help`` load nothing heavy."""
    heavy = ("torch", "transformers", "torch_mlir", "jax", "onnx", "numpy")
    code = f"{command}\nimport sys; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip().endswith("[]"), out
