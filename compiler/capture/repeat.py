"""Layers that are traced once a kind: a deep stack is cut to its first layers, and the others follow from these.

A layer is left out where its module tree, plain attributes, buffers, parameter shapes and slice of the configuration
are those of two traced ones at least, and where it does what they do: the whole module is run once for a few numbers of
tokens without data, and every layer that is left out must call the operators of the one it repeats, in its order, on its
own weights, on what the layers before it gave at the same distance, and on the same values of everything else. So a loop
that counts layers, or a layer that asks for its number, is seen by what it computes; and one that reads the choices of
the third layer before it is of another kind than one that reads those of the second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch_mlir import ir

from adaptc.capture import dataless
from adaptc.capture.walk import Stored
from adaptc.ir import dialect
from adaptc.ir.module import Program, source_of

LEAST = 2
"""Traced layers of each kind that is left out: folding makes a body of what stands twice."""

INDEX = ("layer_idx", "layer_id", "layer_number", "layer_index", "idx")
"""Attributes by which a layer's modules know its number, which doesn't make them another kind."""


class NotRepeated(Exception):
    """The traced layers don't say what those left out compute."""


@dataclass(frozen=True)
class Stack:
    """A list of layers, each of the kind ``kinds`` says of it."""

    path: str
    kinds: tuple[int, ...]

    @property
    def traced(self) -> int:
        """How many layers at the start make the rest: two of each kind that comes later, and the last of the last one's
        kind, so that what follows the layers reads from it what it reads in the whole module. All, if there are none."""
        for traced in range(LEAST, len(self.kinds)):
            seen = Counter(self.kinds[:traced])
            if self.kinds[traced - 1] == self.kinds[-1] and all(seen[kind] >= LEAST for kind in self.kinds[traced:]):
                return traced
        return len(self.kinds)

    def like(self, number: int) -> int:
        """The traced layer that layer ``number`` repeats, itself if it is traced: of its kind, after most layers of the
        kinds of those before it."""
        if number < self.traced:
            return number
        same = [i for i in range(self.traced) if self.kinds[i] == self.kinds[number]]
        return max(same, key=lambda i: (self._alike(i, number), i))

    def _alike(self, one: int, other: int) -> int:
        """How many layers before two are of the same kinds, one by one."""
        pairs = zip(reversed(self.kinds[:one]), reversed(self.kinds[:other]))
        return next((n for n, (a, b) in enumerate(pairs) if a != b), min(one, other))


def stacks(module: torch.nn.Module, config: Any) -> tuple[Stack, ...]:
    """The outermost lists of layers of which some need not be traced, by what their layers are made of."""
    found: list[Stack] = []
    for path, layers in module.named_modules():
        inside = any(path.startswith(f"{stack.path}.") for stack in found)
        if isinstance(layers, torch.nn.ModuleList) and not inside:
            stack = _stack(path, layers, config)
            if stack.traced < len(layers):
                found.append(stack)
    return tuple(found)


def _stack(path: str, layers: torch.nn.ModuleList, config: Any) -> Stack:
    count = len(layers)
    numbered = list(_lists(vars(config)))
    return Stack(path, _kinds((described(layer, i), tuple(_slice(values, i, count) for values in numbered))
                              for i, layer in enumerate(layers)))


def _kinds(described: Iterable[Hashable]) -> tuple[int, ...]:
    """Equal ones get equal numbers."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(one, len(numbers)) for one in described)


def _lists(content: dict[str, Any]) -> Iterator[Sequence]:
    """Every list in a configuration, nested ones too. Looking here isn't reading a key: see ``sources.accounting``."""
    for value in dict.values(content):
        if isinstance(value, (list, tuple)):
            yield value
        elif isinstance(value, dict) or hasattr(value, "attribute_map"):
            yield from _lists(value if isinstance(value, dict) else vars(value))


def _slice(values: Any, number: int, count: int) -> Any:
    """What a list of the configuration says of layer ``number`` of ``count``: one that has each number once may be of
    layers' numbers."""
    if len(values) == count and list(values) != list(range(count)):  # which names every layer
        return repr(values[number])
    numbers = [value for value in values if isinstance(value, int)]
    return number in numbers and len({*numbers}) == len(values)


def described(layer: torch.nn.Module, number: int) -> tuple:
    """All of a layer but its number and its weights' values."""
    return tuple((name, type(part), *_contents(part, number)) for name, part in layer.named_modules())


def _contents(part: torch.nn.Module, number: int) -> tuple:
    plain = tuple((k, _value(v)) for k, v in sorted(vars(part).items())
                  if not k.startswith("_") and not (k in INDEX and v == number))
    tensors = tuple((k, None if v is None else (tuple(v.shape), v.dtype)) for k, v in part._parameters.items())
    return plain, tensors, tuple((k, _value(v)) for k, v in part._buffers.items())


def _value(value: Any) -> Any:
    """A value for comparing: plain ones by what they are, others by which object they are."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, None if value.is_meta else value.numpy(force=True).tobytes()
    if isinstance(value, (list, tuple)):
        return tuple(map(_value, value))
    if isinstance(value, dict):
        return tuple((repr(k), _value(v)) for k, v in dict.items(value))
    plain = isinstance(value, (bool, int, float, str, type(None)))
    return (type(value), repr(value)) if plain else id(value)


@contextmanager
def cut(module: torch.nn.Module, found: Sequence[Stack]) -> Iterator[None]:
    """``module`` with the traced layers alone within the block."""
    everything: list[tuple[torch.nn.ModuleList, dict]] = []
    try:
        for stack in found:
            layers = module.get_submodule(stack.path)
            everything.append((layers, dict(layers._modules)))
            for i in range(stack.traced, len(stack.kinds)):
                del layers._modules[str(i)]
        yield
    finally:
        for layers, modules in everything:
            layers._modules.clear()
            layers._modules.update(modules)


# ---- that layers do the same


def proved(module: torch.nn.Module, found: Sequence[Stack], lengths: Sequence[int]) -> tuple[Stack, ...]:
    """``found`` with the layers' kinds by what they do as well: ``module``, whose parameters are on the meta device, is
    run on so many tokens. NotRepeated where its layers aren't called one after the other, or are all of their own."""
    for length in lengths:
        with _Record(module, found) as record:
            try:
                dataless.run(module, length)
            except Exception as error:  # torch has no base class for what a run without data can't do
                raise NotRepeated(f"the module doesn't run without data: {error}") from error
        found = tuple(_refined(stack, [record.done.get((number, i)) for i in range(len(stack.kinds))],
                               record.between[number]) for number, stack in enumerate(found))
    return found


def _refined(stack: Stack, done: Sequence[tuple | None], between: Sequence[str]) -> Stack:
    if between:
        raise NotRepeated(f"{between[0]} stands between the layers of {stack.path}")
    if None in done:
        raise NotRepeated(f"{stack.path}.{done.index(None)} isn't called")
    refined = Stack(stack.path, _kinds(zip(stack.kinds, done)))
    if refined.traced == len(refined.kinds):
        raise NotRepeated(f"each layer of {stack.path} does something else")
    return refined


class _Record(TorchDispatchMode):
    """What each layer does within the block: its operators with their operands, each by what it is to the layer."""

    def __init__(self, module: torch.nn.Module, found: Sequence[Stack]):
        super().__init__()
        self.done: dict[tuple[int, int], tuple] = {}
        self.between: list[list[str]] = [[] for _ in found]
        self._now: tuple[int, int] | None = None
        self._last: list[int] = [-1] * len(found)
        self._waiting: list[list[str]] = [[] for _ in found]
        self._calls: list[tuple] = []
        self._names: dict[int, tuple] = {}
        self._alive: list[Any] = []
        self._results = dataless.Results()
        self._hooks: list[Any] = []
        owned = {}
        for number, stack in enumerate(found):
            for i, layer in enumerate(module.get_submodule(stack.path)):
                owned |= {id(t): ((number, i), name) for name, t in
                          (*layer.named_parameters(), *layer.named_buffers())}
                self._hooks += [layer.register_forward_pre_hook(self._entering(number, i)),
                                layer.register_forward_hook(self._leaving(number, i))]
        self._owned = owned

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        self._alive.clear()

    def _entering(self, number: int, i: int) -> Callable:
        def hook(*_: Any) -> None:
            if self._now is not None or self._last[number] != i - 1:
                raise NotRepeated(f"layer {i} isn't called once, after layer {i - 1}")
            self._now, self._calls = (number, i), []
            if i:
                self.between[number] += self._waiting[number]

        return hook

    def _leaving(self, number: int, i: int) -> Callable:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            results = tuple(self._operand(leaf) for leaf in pytree.tree_leaves(output))
            self.done[number, i] = (tuple(self._calls), results)
            self._now, self._last[number], self._waiting[number] = None, i, []

        return hook

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = tuple(self._operand(leaf) for leaf in pytree.tree_leaves((args, kwargs or {})))
        results = self._results(function, args, kwargs or {})
        if self._now is None:
            for waiting in self._waiting:
                waiting.append(str(function))
        for k, leaf in enumerate(pytree.tree_leaves(results)):
            if isinstance(leaf, torch.Tensor):
                self._alive.append(leaf)  # or another would get its id
                self._names.setdefault(id(leaf), (self._now, len(self._calls), k) if self._now else (None, id(leaf)))
        if self._now is not None:
            self._calls.append((str(function), operands))
        return results

    def _operand(self, leaf: Any) -> Any:
        """An operand by what it is to the layer that runs."""
        if not isinstance(leaf, torch.Tensor):
            return type(leaf), repr(leaf)
        self._alive.append(leaf)
        now = self._now or (None, 0)
        if id(leaf) in self._owned:
            (number, i), name = self._owned[id(leaf)]
            return ("own", i - now[1], name) if number == now[0] else ("other", id(leaf))
        place, *which = self._names.get(id(leaf), (None, id(leaf)))
        if place is None or place[0] != now[0]:
            return ("other", *which)
        return "given", place[1] - now[1], *which


def unroll(program: Program, stack: Stack, stored: Mapping[str, Stored]) -> None:
    """Adds the layers that weren't traced to a folded program. NotRepeated where they don't follow."""
    with program.editing():
        _Unroll(program, stack, stored).run()


class _Unroll:
    def __init__(self, program: Program, stack: Stack, stored: Mapping[str, Stored]):
        self.program, self.stack, self.stored = program, stack, stored
        self.block = program.step.entry_block
        ops = [op.operation for op in self.block.operations]
        self.regions = [self._region(ops, j) for j in range(stack.traced)]
        self.made = {r: (j, n, k) for j, region in enumerate(self.regions) for n, op in enumerate(region)
                     for k, r in enumerate(op.results)}
        """Result → the layer, operator and number of it, of traced layers."""
        self.gets = {op.attributes["symbol"].value: op for op in ops if op.name == "adaptc.get"}
        declared = [op.operation for op in program.module.body.operations if "sym_name" in op.operation.attributes]
        self.declared = {op.attributes["sym_name"].value: op for op in declared if op.name != "func.func"}

    def run(self) -> None:
        after = self._after()
        last = self.stack.traced - 1
        anchors = [self._last(self.declared, last), self._last(self.gets, last), self.regions[last][-1]]
        for number in range(self.stack.traced, len(self.stack.kinds)):
            self.regions.append(self._layer(number, anchors))
        for user, operand in after:
            user.operands[operand] = self._of(user.operands[operand], len(self.stack.kinds) - self.stack.traced)

    def _after(self) -> list[tuple[Any, int]]:
        """(operator, operand): what reads the layers from outside of them, which must be the last one."""
        inside = {id_of(op) for region in self.regions for op in region}
        found = []
        for value, (layer, _, _) in self.made.items():
            for use in value.uses:
                if id_of(use.owner.operation) not in inside:
                    if layer != self.stack.traced - 1:
                        raise NotRepeated(f"more than other layers read {self.stack.path}.{layer}")
                    found.append((use.owner.operation, use.operand_number))
        return found

    def _region(self, ops: list, number: int) -> list:
        """The operators of a layer, which stand together."""
        path = f"{self.stack.path}.{number}"
        places = [i for i, op in enumerate(ops) if source_of(op) == path or source_of(op).startswith(f"{path}.")]
        if not places or places[-1] - places[0] + 1 != len(places):
            raise NotRepeated(f"{path} isn't one stretch of operators")
        return ops[places[0] : places[-1] + 1]

    def _of(self, value: Any, further: int) -> Any:
        """What stands for a traced layer's result so many layers further on; other values are the same everywhere."""
        if value not in self.made:
            return value
        layer, number, result = self.made[value]
        if self.stack.kinds[layer] != self.stack.kinds[layer + further]:
            raise NotRepeated(f"{self.stack.path}.{layer + further} isn't of the kind of {self.stack.path}.{layer}")
        ours, theirs = self.regions[layer], self.regions[layer + further]
        if [_called(op) for op in ours] != [_called(op) for op in theirs]:
            raise NotRepeated(f"{self.stack.path}.{layer + further} is read in another way than {self.stack.path}.{layer}")
        return theirs[number].results[result]

    def _last(self, named: Mapping[str, Any], number: int) -> Any:
        mine = [op for name, op in named.items() if name.startswith(f"{self.stack.path}.{number}.")]
        if not mine:
            raise NotRepeated(f"{self.stack.path}.{number} reads no weights")
        return mine[-1]

    def _layer(self, number: int, anchors: list) -> list:
        """The operators of a copy of the layer that ``number`` is like, after all that stand already."""
        like = self.stack.like(number)
        values: dict[Any, Any] = {}
        for name, op in list(self.gets.items()):
            if (own := self._renamed(name, like, number)) != name:
                anchors[0] = self._declare(name, own, anchors[0], like, number)
                copy = self._copy(op, anchors[1])
                copy.attributes["symbol"] = type(op.attributes["symbol"]).get(own)
                values[op.results[0]] = copy.results[0]
                anchors[1] = copy
        copies = []
        for op in self.regions[like]:
            copy = self._copy(op, anchors[2])
            copy.attributes["source"] = dialect.to_attr(self._renamed(source_of(op), like, number))
            for index, operand in enumerate(op.operands):
                copy.operands[index] = values[operand] if operand in values else self._of(operand, number - like)
            values.update(zip(op.results, copy.results))
            copies.append(copy)
            anchors[2] = copy
        return copies

    def _declare(self, name: str, own: str, anchor: Any, like: int, number: int) -> Any:
        copy = self._copy(self.declared[name], anchor)
        rename(copy, own, self.stored, lambda source: self._renamed(source, like, number))
        return copy

    def _copy(self, op: Any, anchor: Any) -> Any:
        copy = op.clone(ip=ir.InsertionPoint(op)).operation
        copy.move_after(anchor)
        return copy

    def _renamed(self, path: str, old: int, new: int) -> str:
        head = f"{self.stack.path}.{old}"
        return f"{self.stack.path}.{new}{path[len(head):]}" if path == head or path.startswith(f"{head}.") else path


def rename(declared: Any, own: str, stored: Mapping[str, Stored], place: Callable[[str], str]) -> None:
    """Makes a copy of a weight's or a state's declaration that of ``own``; ``place``: the copied one's module → its own."""
    declared.attributes["sym_name"] = dialect.to_attr(own)
    if own in stored:
        declared.attributes["tensor"] = dialect.to_attr(stored[own].tensor)
        if "stored" in declared.attributes:
            declared.attributes["stored"] = dialect.to_attr(stored[own].format)
    elif "source" in declared.attributes:
        declared.attributes["source"] = dialect.to_attr(place(declared.attributes["source"].value))


def _called(op: Any) -> tuple:
    """An operator's name, the body that it calls if it is a call, and what it gives."""
    return op.name, str(op.attributes["callee"]) if "callee" in op.attributes else "", tuple(str(r.type) for r in op.results)


def id_of(op: Any) -> int:
    """An operation's identity: Python objects for one come and go."""
    return hash(op)
