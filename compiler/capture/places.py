"""Where a node of a torch graph comes from: the module call and the line of source."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from adaptc.capture.trace import PREFIX

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_OURS = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))

_REMOTE = "transformers_modules"
"""Package that transformers puts a model folder's code in, under a name with a hash of it."""


@dataclass(frozen=True)
class Place:
    """``module`` is a module path such as model.layers.0.mlp, with @n for the n-th further call of one module."""

    module: str
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        source = f" ({self.file}:{self.line})" if self.file else ""
        return f"module {self.module or '<root>'}{source}"


def place_of(node: torch.fx.Node, module: str | None = None) -> Place:
    """``module``: the path of the call, where it is known; else that of the module."""
    return Place(_module(node) if module is None else module, *_line(node.stack_trace or ""))


def _module(node: torch.fx.Node) -> str:
    names = [name for name, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return names[-1].removeprefix(PREFIX).removeprefix(".") if names else ""


def _line(trace: str) -> tuple[str, int]:
    """The innermost frame of the authors' code, its file relative to where Python found it."""
    frames = [(file, int(line)) for file, line in _FRAME.findall(trace) if not file.startswith(_OURS)]
    if not frames:
        return "", 0
    file, line = frames[-1]
    roots = [root for root in sys.path if root and file.startswith(root.rstrip("/") + "/")]
    if _REMOTE in Path(file).parts:  # a copy that transformers has made of the model's folder
        return Path(file).name, line
    return (file[len(max(roots, key=len).rstrip("/")) + 1 :] if roots else Path(file).name), line
