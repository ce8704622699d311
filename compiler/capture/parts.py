"""Parts of layers that are traced once a kind, where layers as a whole don't repeat: a model may put the same attention
and feed-forward layers together in another way in every layer (residuals over blocks of layers, say).

A part is a child of a layer that is made of further modules and takes one tensor that is its own. Parts that are alike in
all but their number and their weights, and that do the same in a run without data, are left out of the trace but for the
first: an operator stands in for each of the others, and the first one's operators are put in its place afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch_mlir import ir

from adaptc.capture import dataless
from adaptc.capture.repeat import NotRepeated, described, id_of, rename
from adaptc.capture.walk import Stored
from adaptc.ir import dialect
from adaptc.ir.module import Program, source_of

Alike = Mapping[str, str]
"""Path of a part that is left out → of the traced one that it repeats."""


def alike(module: torch.nn.Module) -> dict[str, str]:
    """Parts that may be left out, by what they are made of."""
    found: dict[str, str] = {}
    first: dict[tuple, str] = {}
    for path, layers in module.named_modules():
        inside = any(path.startswith(f"{part}.") for part in (*found, *first.values()))
        if inside or not isinstance(layers, torch.nn.ModuleList):
            continue
        for i, layer in enumerate(layers):
            for name, part in layer.named_children():
                if next(part.children(), None) is not None and not isinstance(part, torch.nn.ModuleList):
                    like = first.setdefault((path, name, described(part, i)), f"{path}.{i}.{name}")
                    if like != f"{path}.{i}.{name}":
                        found[f"{path}.{i}.{name}"] = like
    return found


def proved(module: torch.nn.Module, found: Alike, lengths: Sequence[int]) -> dict[str, str]:
    """Those of ``found`` that do, of so many tokens without data, what the parts do that they repeat."""
    same = dict(found)
    for length in lengths:
        with _Record(module, {*found, *found.values()}) as record:
            try:
                dataless.run(module, length)
            except Exception:  # torch has no base class for what a run without data can't do
                return {}
        same = {path: like for path, like in same.items()
                if record.done.get(path) is not None and record.done[path] == record.done.get(like)}
    return same


def _given(args: Any) -> torch.Tensor | None:
    """The tensor that is a part's own among what it is called with: the first of numbers, not of ids or conditions."""
    return next((x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor) and x.is_floating_point()), None)


class _Record(TorchDispatchMode):
    """What each part does within the block: its operators, with each operand by what it is to the part. None for a part
    that is called twice, or gives anything but one tensor like the one that it takes."""

    def __init__(self, module: torch.nn.Module, paths: set[str]):
        super().__init__()
        self.done: dict[str, tuple | None] = {}
        self._now = ""
        self._calls: list[tuple] = []
        self._names: dict[int, tuple] = {}
        self._alive: list[Any] = []
        self._results = dataless.Results()
        self._hooks: list[Any] = []
        for path in paths:
            part = module.get_submodule(path)
            owned = {id(t): ("own", name) for name, t in (*part.named_parameters(), *part.named_buffers())}
            self._hooks += [part.register_forward_pre_hook(self._entering(path, owned), with_kwargs=True),
                            part.register_forward_hook(self._leaving(path), with_kwargs=True)]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        self._alive.clear()

    def _entering(self, path: str, owned: dict[int, tuple]) -> Callable:
        def hook(_part: Any, args: Any, kwargs: Any) -> None:
            self._now, self._calls, self._names = path, [], dict(owned)
            if (x := _given((args, kwargs))) is not None:
                self._names[id(x)] = ("given", tuple(x.shape), x.dtype)

        return hook

    def _leaving(self, path: str) -> Callable:
        def hook(_part: Any, args: Any, kwargs: Any, output: Any) -> None:
            x = _given((args, kwargs))
            once = isinstance(output, torch.Tensor) and x is not None and path not in self.done
            once = once and (output.shape, output.dtype) == (x.shape, x.dtype)
            self.done[path] = (tuple(self._calls), self._operand(output)) if once else None
            self._now = ""

        return hook

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = self._results(function, args, kwargs or {})
        if self._now:
            for k, leaf in enumerate(pytree.tree_leaves(results)):
                if isinstance(leaf, torch.Tensor):
                    self._names.setdefault(id(leaf), ("made", len(self._calls), k))
            operands = tuple(self._operand(leaf) for leaf in pytree.tree_leaves((args, kwargs or {})))
            self._calls.append((str(function), operands))
        self._alive += [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]  # for their ids
        return results

    def _operand(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return type(leaf), repr(leaf)
        self._alive.append(leaf)
        return self._names.get(id(leaf), ("other", id(leaf)))


# ---- the trace, and what it leaves out


@contextmanager
def left_out(module: torch.nn.Module, found: Alike) -> Iterator[None]:
    """Traces of ``module`` within the block have an operator in place of each part that is left out, and say of each
    traced one what it takes."""

    def stand_in(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.neg(_given((args, kwargs)))

    def marked(forward: Callable) -> Callable:
        def first(*args: Any, **kwargs: Any) -> torch.Tensor:
            x = _given((args, kwargs))
            args, kwargs = pytree.tree_map(lambda leaf: torch.neg(torch.neg(x)) if leaf is x else leaf, (args, kwargs))
            return forward(*args, **kwargs)

        return first

    with ExitStack() as stack:
        for path in found:
            stack.enter_context(mock.patch.dict(vars(module.get_submodule(path)), {"forward": stand_in}))
        for path in set(found.values()):
            part = module.get_submodule(path)
            stack.enter_context(mock.patch.dict(vars(part), {"forward": marked(part.forward)}))
        yield


def put_back(program: Program, found: Alike, stored: Mapping[str, Stored]) -> None:
    """Replaces what stands in for parts by the operators of those that they repeat. NotRepeated where a part takes or
    gives more than was seen in the run without data."""
    with program.editing():
        _PutBack(program, found, stored).run()


class _PutBack:
    def __init__(self, program: Program, found: Alike, stored: Mapping[str, Stored]):
        self.found, self.stored = found, stored
        self.block = program.step.entry_block
        ops = [op.operation for op in self.block.operations]
        self.gets = {op.attributes["symbol"].value: op for op in ops if op.name == "adaptc.get"}
        declared = [op.operation for op in program.module.body.operations if "sym_name" in op.operation.attributes]
        self.declared = {op.attributes["sym_name"].value: op for op in declared if op.name != "func.func"}
        self.regions: dict[str, list] = {path: [] for path in (*found, *found.values())}
        for op in ops:
            if op.name != "adaptc.get" and (part := self._part(source_of(op))):
                self.regions[part].append(op)

    def run(self) -> None:
        takes = {path: self._unmarked(path) for path in sorted(set(self.found.values()))}
        gives = {path: self._result(path) for path in takes}
        for path, like in self.found.items():
            (stand_in,) = self.regions[path]
            values = {takes[like]: stand_in.operands[0]}
            head = f"{like}."
            for name, op in [(n, o) for n, o in self.gets.items() if n.startswith(head)]:
                values[op.results[0]] = self._get(name, path, like, op)
            for op in self.regions[like]:
                copy = op.clone(ip=ir.InsertionPoint(stand_in)).operation
                copy.attributes["source"] = dialect.to_attr(path + source_of(op)[len(like):])
                for index, operand in enumerate(op.operands):
                    if operand in values:
                        copy.operands[index] = values[operand]
                values.update(zip(op.results, copy.results))
            stand_in.results[0].replace_all_uses_with(values[gives[like]])
            stand_in.erase()
        self._in_order()

    def _part(self, source: str) -> str:
        names = source.split(".")
        return next((path for n in range(len(names), 0, -1) if (path := ".".join(names[:n])) in self.regions), "")

    def _unmarked(self, path: str) -> Any:
        """What a traced part takes, which then is read without the mark."""
        once, twice = self.regions[path][:2]
        if [once.name, twice.name] != ["adaptc.neg"] * 2 or twice.operands[0] != once.results[0]:
            raise NotRepeated(f"{path} doesn't start by what it takes")
        x = once.operands[0]
        twice.results[0].replace_all_uses_with(x)
        twice.erase()
        once.erase()
        del self.regions[path][:2]
        return x

    def _result(self, path: str) -> Any:
        inside = {id_of(op) for op in self.regions[path]}
        given = [r for op in self.regions[path] for r in op.results
                 if any(id_of(use.owner.operation) not in inside for use in r.uses)]
        if len(given) != 1:
            raise NotRepeated(f"{path} gives {len(given)} values")
        return given[0]

    def _get(self, name: str, path: str, like: str, op: Any) -> Any:
        own = path + name[len(like):]
        declared = self.declared[name].clone(ip=ir.InsertionPoint(self.declared[name])).operation
        rename(declared, own, self.stored, lambda source: path + source[len(like):])
        copy = op.clone(ip=ir.InsertionPoint(op)).operation
        copy.attributes["symbol"] = type(op.attributes["symbol"]).get(own)
        self.declared[own], self.gets[own] = declared, copy
        return copy.results[0]

    def _in_order(self) -> None:
        """Weights and states stand where they are first read, as in a trace of everything."""
        names = {op.results[0]: name for name, op in self.gets.items()}
        read = (names.get(value) for op in self.block.operations for value in op.operation.operands)
        order = list(dict.fromkeys(filter(None, read)))
        for places in (self.gets, self.declared):
            mine = [places[name] for name in order if name in places]
            for before, op in zip(mine, mine[1:]):
                op.move_after(before)
