"""Writes the pages that say what the tables in the code say: docs/errors.md, docs/operators.md, docs/passes.md.

    python docs/generate.py

tests/test_docs.py compares the files with what this makes.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
NOTE = "<!-- Written by docs/generate.py from the code; edit that instead. -->"


def errors() -> str:
    """One section a kind of error."""
    from adaptc.errors import kinds

    parts = ["# Errors", NOTE,
             "An error that a person can act on is one line on standard error, `adaptc: [E0301] …`, and exit code 2. Its id never changes; "
             "in Python it is the exception's `code`, and the exception can be caught by its class or by any class that the class is a kind of."]
    for kind in kinds():
        if not kind.__module__.startswith("adaptc."):
            continue
        base = kind.__mro__[1]
        above = f", a kind of [`{base.__name__}`](#{base.code.lower()})" if hasattr(base, "code") else ""
        parts.append(f"## {kind.code}\n\n**{kind.title}** (`{kind.__name__}`{above})\n\n{_text(kind)}\n\nWhat to do: {kind.remedy}")
    return "\n\n".join(parts) + "\n"


def operators() -> str:
    """One line a row of the operator table, by the module that declares it."""
    from adaptc.ops import dense, elementwise, index, mixing, recurrent, routing, shape
    from adaptc.ops.table import REQUIRED

    show = lambda value: "required" if value is REQUIRED else f"`{value!r}`"  # noqa: E731
    parts = ["# Operators", NOTE,
             "What a program of the `adaptc` dialect is made of: the rows of the operator table (`compiler/ops/`; `OpRow` says what the columns mean). "
             "*Decomposes* is whether a backend without a kernel for it gets lower operators instead."]
    for module in (mixing, index, recurrent, routing, dense, shape, elementwise):
        lines = [f"## {module.__name__.rpartition('.')[2]}", "", _summary(module.__doc__), "",
                 "| operator | operands | attributes | factors | flags | decomposes |", "|---|---|---|---|---|---|"]
        for row in module.ROWS:
            attrs = ", ".join(f"{name}: {show(value)}" for name, value in row.attrs.items())
            flags = [name for name in ("views", "aliases", "elementwise") if getattr(row, name)]
            flags += [f"state ({row.keeps})"] if row.state is not None else []
            operands = ", ".join(row.operands)
            lines.append(f"| `{row.name}` | {_cell(operands)} | {_cell(attrs)} | `{row.factors}` | {', '.join(flags)} | "
                         f"{'yes' if row.decompose else ''} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def passes() -> str:
    """One row a line of the pipeline, with its reason."""
    from adaptc.passes import pipeline
    from adaptc.passes.base import PROPERTIES

    parts = ["# Passes", NOTE,
             "In the order of `passes/pipeline.py`. `adaptc opt FILE.mlir --passes NAME,NAME` runs some of them, `--to STAGE` those up to a stage.",
             "`opt` and `compile` take `--print-after NAME,NAME` (or `all`) and `--time-passes`; a compile runs each pass once, whatever the levels."]
    for function in (pipeline.fusion, pipeline.layout, pipeline.lowering):
        stages, _, rest = _summary(function.__doc__).partition(": ")
        lines = [f"## {stages}", "", rest[:1].upper() + rest[1:], "", "| pass | what | why here | requires | ensures |", "|---|---|---|---|---|"]
        for name, reason in _lines(function):
            kind = getattr(pipeline, name)
            lines.append(f"| `{kind.name}` | {_cell(_text(kind))} | {_cell(reason)} | {_list(kind.requires)} | {_list(kind.ensures)} |")
        parts.append("\n".join(lines))
    parts.append("Properties that passes may require and ensure, beside a stage: " + ", ".join(f"`{p}`" for p in PROPERTIES) + ".")
    return "\n\n".join(parts) + "\n"


def _lines(function) -> list[tuple[str, str]]:
    """(class, the comment above it) for every pass that a function of the pipeline lists; a pass that stands without a
    comment of its own belongs to the one before."""
    found, comment = [], []
    for line in inspect.getsource(function).splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped.lstrip("# "))
        elif (match := re.match(r"([A-Z]\w+)\(", stripped)) is not None:
            found.append((match[1], " ".join(comment) or ("with the one before" if found else "")))
            comment = []
    return found


def _text(kind: type) -> str:
    """A class's docstring as one line; one that refers to its module's has that one's beginning in its place."""
    text = " ".join(inspect.cleandoc(kind.__doc__).split())
    return text.replace("See the module.", _summary(sys.modules[kind.__module__].__doc__))


def _summary(text: str) -> str:
    return " ".join(inspect.cleandoc(text).split("\n\n")[0].split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _list(names) -> str:
    return ", ".join(f"`{name}`" for name in names)


PAGES = {"errors.md": errors, "operators.md": operators, "passes.md": passes}


def main() -> None:
    for name, page in PAGES.items():
        (HERE / name).write_text(page())
        print(f"docs/{name}", file=sys.stderr)


if __name__ == "__main__":
    main()
