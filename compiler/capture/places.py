"""Where a node of a torch graph comes from: the module call and the line of source."""

from __future__ import annotations

import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from unittest import mock

import torch

PREFIX = "module"
"""The name of the authors' module within what is traced."""

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
    code: str = ""

    @property
    def source(self) -> str:
        """File, line and what stands there; "" when it isn't known."""
        return f"{self.file}:{self.line}" + (f": {self.code}" if self.code else "") if self.file else ""

    def __str__(self) -> str:
        return f"module {self.module or '<root>'}" + (f" ({self.source})" if self.file else "")


def place_of(node: torch.fx.Node, module: str | None = None) -> Place:
    """``module``: the path of the call, where it is known; else that of the module."""
    return Place(_module(node) if module is None else module, *_line(node.stack_trace or ""))


def _module(node: torch.fx.Node) -> str:
    names = [name for name, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return names[-1].removeprefix(PREFIX).removeprefix(".") if names else ""


def running(frames: Iterable[tuple[FrameType, int]], modules: Mapping[int, str], method: str = "forward") -> Place:
    """Where Python stands in ``frames``, (frame, line) from the outermost on, within a ``method`` of the authors: the
    innermost call of it on one of ``modules`` (path by id) and the authors' line."""
    frames = list(frames)
    calls = (modules[id(frame.f_locals["self"])] for frame, _ in reversed(frames)
             if frame.f_code.co_name == method and id(frame.f_locals.get("self")) in modules)
    summary = traceback.StackSummary.from_list(
        [(frame.f_code.co_filename, line, frame.f_code.co_name, "") for frame, line in frames])
    return Place(next(calls, ""), *_line("".join(_authors(summary, method).format())))


@contextmanager
def lines_of_authors() -> Iterator[None]:
    """Traces within the block know each operator's very line; torch itself stops at that of the ``forward`` above. Only
    that line's text is looked up, where torch looks up those of the whole stack."""
    with (mock.patch.object(torch.fx.proxy.TracerBase, "_filter_traceback_frames", lambda _, stack: _authors(stack)),
          mock.patch.object(torch.utils._traceback, "_extract_symbolized_tb", _summary)):
        yield


def _summary(frames: Sequence[Mapping], skip: int) -> traceback.StackSummary:
    """Torch's own, whose frames know no text until they are asked for it."""
    return traceback.StackSummary(traceback.FrameSummary(f["filename"], f["line"], f["name"], lookup_line=False)
                                  for f in reversed(frames[skip:]))


def _authors(stack: traceback.StackSummary, method: str = "forward") -> traceback.StackSummary:
    """Of a stack, the innermost frame of the file that the innermost ``method`` of the authors stands in: what helpers
    of other packages do is done by the line that calls them."""
    own = [frame for frame in stack if not frame.filename.startswith(_OURS)]
    file = next((frame.filename for frame in reversed(own) if frame.name == method), None)
    return traceback.StackSummary.from_list([frame for frame in own if frame.filename == file][-1:])


def _line(trace: str) -> tuple[str, int, str]:
    """The innermost frame of the authors' code: its file relative to where Python found it, the line, what stands there."""
    frames = [(file, int(line)) for file, line in _FRAME.findall(trace) if not file.startswith(_OURS)]
    if not frames:
        return "", 0, ""
    file, line = frames[-1]
    return _relative(file), line, linecache.getline(file, line).strip()


def _relative(file: str) -> str:
    """A source file relative to its package or, when it comes with a model, to the model's folder."""
    if _REMOTE in Path(file).parts:  # a copy that transformers has made of the model's folder
        return Path(file).name
    roots = [root for root in sys.path if root and file.startswith(root.rstrip("/") + "/")]
    return file[len(max(roots, key=len).rstrip("/")) + 1 :] if roots else Path(file).name
