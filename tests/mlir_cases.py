"""The checker behind tests/passes/*.mlir.

A file is a prelude of type aliases and cases separated by ``// -----``. In a case:

    // RUN: name             the pass (file, class and test share the name)
    // OPTIONS: k=v …        fields of the pass, as Python literals
    // LACKS: name …         operators that the backend it asks lacks (FakeCodegen; without this line it has all)
    // CHECK: text           the printed result has this text, after the previous match
    // CHECK-NEXT: text      … on the line after the previous match
    // CHECK-SAME: text      … on the line of the previous match
    // CHECK-NOT: text       … nowhere
    // COUNT 2: text         … on exactly 2 lines
    // ERROR: text           the pass raises an error with this text
    // DECLINE: why          the pass leaves the program as it was
    // TOLERANCE: 0.1        how far the meaning may move (default 1e-5)
"""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import dataclass, fields
from pathlib import Path

from fake_codegen import FakeCodegen

FOLDER = Path(__file__).parent / "passes"


@dataclass(frozen=True)
class Case:
    file: str
    number: int
    text: str

    @property
    def name(self) -> str:
        return f"{self.file}-{self.number}"

    def directives(self) -> list[tuple[str, str]]:
        return re.findall(r"^// ([A-Z-]+(?: \d+)?): ?(.*)$", self.text, re.M)

    def get(self, key: str) -> str | None:
        return next((value for name, value in self.directives() if name == key), None)


def cases() -> list[Case]:
    found = []
    for path in sorted(FOLDER.glob("*.mlir")):
        prelude, _, _ = path.read_text().partition("// RUN")
        parts = path.read_text()[len(prelude) :].split("// -----\n")
        found += [Case(path.stem, i, prelude + part) for i, part in enumerate(parts)]
    return found


def pass_class(name: str):
    """The class of passes/<name>.py."""
    module = importlib.import_module(f"adaptc.passes.{name}")
    return next(c for c in vars(module).values() if isinstance(c, type) and getattr(c, "name", None) == name)


def build(case: Case):
    options = dict(item.split("=") for item in (case.get("OPTIONS") or "").split())
    found, codegen = pass_class(case.get("RUN")), FakeCodegen(*(case.get("LACKS") or "").split())
    asked = {"codegen": codegen, "supports": lambda spec: codegen.select(spec) is not None}
    backend = {f.name: asked[f.name] for f in fields(found) if f.name in asked}
    return found(**backend, **{k: ast.literal_eval(v) for k, v in options.items()})


def check(case: Case, text: str) -> None:
    """Asserts the case's CHECK lines against a printed program."""
    lines = text.splitlines()
    line, column = 0, 0
    for kind, wanted in case.directives():
        place = f"{case.name}: {kind}: {wanted}\nin\n{text}"
        if kind == "CHECK":
            rest = [(i, t.find(wanted, column if i == line else 0)) for i, t in enumerate(lines) if i >= line]
            hit = next(((i, c) for i, c in rest if c >= 0), None)
            assert hit is not None, place
            line, column = hit[0], hit[1] + len(wanted)
        elif kind == "CHECK-NEXT":
            assert line + 1 < len(lines) and wanted in lines[line + 1], place
            line, column = line + 1, lines[line + 1].find(wanted) + len(wanted)
        elif kind == "CHECK-SAME":
            assert wanted in lines[line][column:], place
        elif kind == "CHECK-NOT":
            assert wanted not in text, place
        elif kind.startswith("COUNT"):
            assert sum(wanted in t for t in lines) == int(kind.split()[1]), place
