"""From a source to a captured program: build, trace, walk, check, fold."""

from __future__ import annotations

from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from adaptc.capture import build, convolution, hooks, parts, repeat, trace
from adaptc.capture.attention import raised
from adaptc.capture.experts import routed
from adaptc.capture.fold import fold
from adaptc.capture.index import indexed
from adaptc.capture.locality import check_locality
from adaptc.capture.problems import Problems
from adaptc.capture.pure import check_random
from adaptc.capture.walk import COMPUTED, Stored, unknown, walk
from adaptc.errors import CaptureError, InputError
from adaptc.ir import legality
from adaptc.ir.module import Program

Bind = Callable[[Mapping[str, tuple[int, ...]], Mapping[str, str]], Mapping[str, Stored]]
"""(parameter → shape, tied parameter → the one whose storage it shares) → parameter → how the files store it."""


def capture(source: Any) -> Program:
    """The program of a ``sources.Source``, at stage "captured".

    CaptureError when the module can't be captured; InputError when its files say what no code reads, or lack tensors.
    OptionError when the caller waives what is used.
    """
    with source.account_config() as reads:
        module = source.module() or build.build(source.config, source.trust_remote_code)
        source.built(module)
        ignored = sorted(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())
        program = capture_module(module, source.config, lambda shapes, tied: _stored(source, shapes, tied, ignored))
    source.compute(_tables(module, program))
    reads.check()
    source.check_waived()
    if left_out := source.left_out([*build.stored_shapes(module), *build.tied(module)], ignored):
        program.set_fact("left_out", left_out)
    return program


def capture_module(module: torch.nn.Module, config: Any, bind: Bind | None = None, *, folded: bool = True,
                   brief: bool = True) -> Program:
    """The program of a transformers causal LM, whose parameters may be on the meta device.

    Without ``bind``, every parameter is a tensor of its own name. ``brief``: layers are traced once a kind where that is
    proved to give the same program (``capture.repeat``); it needs ``folded``. The module is left as it was.
    """
    tied = build.tied(module)
    stored = dict((bind or _itself)(build.stored_shapes(module), tied))
    stored |= {name: stored[owner] for name, owner in tied.items()}
    found = repeat.stacks(module, config) if brief and folded else ()
    if found:
        try:
            return _captured(module, config, stored, folded, found)
        except repeat.NotRepeated:
            pass  # all layers are traced then
    alike = parts.alike(module) if brief and folded else {}
    if alike:
        try:
            return _captured(module, config, stored, folded, alike=alike)
        except repeat.NotRepeated:
            pass
    return _captured(module, config, stored, folded)


def _captured(module: torch.nn.Module, config: Any, stored: Mapping[str, Stored], folded: bool,
              found: Sequence[repeat.Stack] = (), alike: parts.Alike = MappingProxyType({})) -> Program:
    text, problems = config.get_text_config(), Problems()
    with _evaluated(module), hooks.both_frequencies(module):
        constants = {name: buffer.detach().clone() for name, buffer in module.named_buffers(remove_duplicate=False)}
        with build.on_one_device(module), hooks.installed(module, problems):
            if found:
                found = repeat.proved(module, found, trace.samples(_context(text)))
            if alike:
                alike = parts.proved(module, alike, trace.samples(_context(text)))
            with repeat.cut(module, found), parts.left_out(module, alike):
                exported = trace.trace(module, _context(text))
    check_random(exported, problems)
    fixed = {name: value for name, value in constants.items() if name not in stored}
    try:
        exported = indexed(routed(exported), fixed, _context(text))
        exported = convolution.raised(raised(exported, fixed, _context(text)))
    except CaptureError as error:
        problems.add(error)
        unknown(exported, problems)
        problems.check()
    program = walk(exported, stored, constants, problems)
    if alike:
        parts.put_back(program, alike, stored)
    program.set_fact("context", min(filter(None, (_context(text), program.fact("context"))), default=0))
    program.set_fact("hidden", getattr(text, "hidden_size", 0))
    check_locality(program, problems)
    problems.check()
    legality.check(program)
    if folded:
        fold(program)
        for stack in found:
            repeat.unroll(program, stack, stored)
        legality.check(program)
    return program


def _tables(module: torch.nn.Module, program: Program) -> dict[str, np.ndarray]:
    """The values of those weights that are buffers which no file has, by the tensor's name."""
    tensors = (w.tensor for w in program.weights().values() if w.tensor.startswith(COMPUTED))
    return {name: module.get_buffer(name.removeprefix(COMPUTED)).float().cpu().numpy() for name in tensors}


CONTEXT = ("max_position_embeddings", "max_seq_len")
"""Keys of configurations that say how many tokens a sequence may have."""


def _context(config: Any) -> int:
    """Tokens that the configuration says a sequence may have; 0 when it doesn't. Dynamic rope stretches them."""
    most = next(filter(None, (getattr(config, name, None) for name in CONTEXT)), 0)
    rope = getattr(config, "rope_parameters", None) or {}
    if most < 0:
        raise InputError(f"the configuration says that a sequence has {most} tokens at most; expected 1 or more, or none.")
    stretched = "dynamic" in str(rope.get("rope_type"))
    return int(most * rope.get("factor", 1)) if stretched else most


def _stored(source: Any, shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str],
            ignored: Sequence[str]) -> dict[str, Stored]:
    bindings = source.bind(shapes, tied, ignored)
    return {
        name: Stored(name, b.tensor, tuple(b.row_permutation or ()), float(b.add), source.tensors[b.tensor].format.name)
        for name, b in bindings.items()
    }


def _itself(shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]) -> dict[str, Stored]:
    return {name: Stored(name, name) for name in shapes}


@contextmanager
def _evaluated(module: torch.nn.Module) -> Iterator[None]:
    """Dropout and the like off; afterwards modules have the attributes that they had, whatever forwards set."""
    before = [(m, dict(vars(m))) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, attributes in before:
            vars(m).clear()
            vars(m).update(attributes)
