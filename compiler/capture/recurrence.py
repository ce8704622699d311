"""Recurrences of the authors' code in traces: three operators that keep a value of fixed size a request.

    adaptc::convolve(x[1,T,C], weight[C,W], bias[C]?) -> [1,T,C]     y = bias + Σ weight[w] · x of W - 1 - w tokens before
    adaptc::recur(query[1,T,H,K], key[1,T,H,K], value[1,T,H,V], decay[1,T,H,K|1], beta[1,T,H]?, read) -> [1,T,H,V]
    adaptc::running_max(x[1,T,C], decay[1,T,C]) -> [1,T,C]           m = max(m + decay, x), from -inf

``recur`` holds S[K,V] a head, zeros at first: S = exp(decay) · S + key · uᵀ with u the value or, with ``beta``,
beta · (value - keyᵀ · exp(decay) · S); the result is queryᵀ · S, of S "before" or "after" the token.

``capture.scans`` has what recurrences go by in the authors' code, and restates each by these operators; where a function
of that name computes something else, the model is refused. Convolutions need no name: see ``capture.convolution``.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

from adaptc.capture.scans import CHUNK, SAYS_HOW, SCANS, Scan
from adaptc.errors import CaptureError

@functools.cache
def operators() -> None:
    """Registers the operators with torch, once in a process: torch can't take them back safely."""
    torch.library.define("adaptc::convolve", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    torch.library.define("adaptc::recur", "(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? beta, str read)"
                                          " -> Tensor")
    torch.library.define("adaptc::running_max", "(Tensor x, Tensor decay) -> Tensor")
    torch.library.register_fake("adaptc::convolve", lambda x, weight, bias: torch.empty_like(x))
    torch.library.register_fake("adaptc::recur", lambda query, key, value, decay, beta, read: torch.empty_like(value))
    torch.library.register_fake("adaptc::running_max", lambda x, decay: torch.empty_like(x))
    for name, written_out in (("convolve", _convolve), ("recur", _recur), ("running_max", _running_max)):
        torch.library.impl(f"adaptc::{name}", "CPU", written_out)


# ---- the operators written out, to compute examples with


def _convolve(x, weight, bias):
    past = F.pad(x, (0, 0, weight.shape[1] - 1, 0))
    result = sum(past[:, i : i + x.shape[1]] * weight[:, i] for i in range(weight.shape[1]))
    return result if bias is None else result + bias


def _recur(query, key, value, decay, beta, read):
    held, results = value.new_zeros(1, *key.shape[2:], value.shape[3], dtype=torch.float64), []
    for t in range(query.shape[1]):
        before, held = held, decay[:, t].double().exp()[..., None] * held
        update = value[:, t].double()
        if beta is not None:
            update = beta[:, t, :, None] * (update - torch.einsum("bhk,bhkv->bhv", key[:, t].double(), held))
        held = held + key[:, t, :, :, None] * update[:, :, None]
        results.append(torch.einsum("bhk,bhkv->bhv", query[:, t].double(), before if read == "before" else held))
    return torch.stack(results, 1).to(value.dtype)


def _running_max(x, decay):
    held, results = torch.full_like(x[:, 0], -math.inf), []
    for t in range(x.shape[1]):
        held = torch.maximum(held + decay[:, t], x[:, t])
        results.append(held)
    return torch.stack(results, 1)


# ---- where the authors' code has them

AT_ONCE = ("max_inference_chunksize",)
"""Configuration keys that say how many tokens a forward takes at once, and nothing about what it computes."""


class _All(int):
    """A number of tokens that no number is larger than, without torch being asked whether T is."""

    def __lt__(self, other: Any) -> bool:
        return False

    __le__ = __lt__


@contextmanager
def installed(module: torch.nn.Module) -> Iterator[None]:
    """Traces of ``module`` within the block have our operators in place of the authors' scans. Code that goes by the
    name of a scan and computes something else stays as it is."""
    operators()
    same: dict[Any, bool] = {}
    with ExitStack() as stack:
        for found in _found(module):
            code = found.authors, id(found.module) if found.scan.place == "method" else None  # which may read its module
            if code not in same:
                same[code] = _computes_the_same(found)
            if same[code]:
                stack.enter_context(mock.patch.dict(found.namespace, {found.name: found.placed()}))
        for config in {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}.values():
            for key in AT_ONCE:
                if hasattr(config, key):
                    stack.enter_context(mock.patch.object(config, key, _All()))
        yield


@dataclass(frozen=True)
class _Found:
    """A scan that a module may call: the namespace that holds it and its name there, the authors' function and what
    stands in its place, both unbound; ``module``: the one that it is bound to, if it is."""

    scan: Scan
    namespace: dict[str, Any]
    name: str
    authors: Callable[..., Any]
    restated: Callable[..., Any]
    module: torch.nn.Module | None = None

    def placed(self) -> Callable[..., Any]:
        """The restatement, which refuses arguments that mean something to the authors' function alone: the example
        says nothing of them."""
        ours = inspect.signature(self.restated).parameters
        theirs = {name: p.default for name, p in inspect.signature(self.authors).parameters.items()
                  if name not in ours and name not in SAYS_HOW and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        placed = self.restated if self.module is None else functools.partial(self.restated, self.module)

        @functools.wraps(self.restated)
        def checked(*args: Any, **keywords: Any) -> Any:
            given = [name for name, default in theirs.items() if keywords.get(name, default) is not default]
            if given:
                raise CaptureError(f"{self.name} is given {', '.join(given)}, and adaptc knows this recurrence without.")
            return placed(*args, **keywords)

        return checked if theirs else placed


def _found(module: torch.nn.Module) -> Iterator[_Found]:
    files = {one for m in module.modules() if (one := sys.modules.get(type(m).__module__)) is not None}
    for namespace in map(vars, sorted(files, key=lambda file: file.__name__)):
        for name, value in list(namespace.items()):
            if (found := _function(value)) is not None:
                scan, authors = found
                yield _Found(scan, namespace, name, authors, scan.restated)
    for one in module.modules():
        for name, value in list(vars(one).items()):
            if isinstance(value, functools.partial) and (found := _function(value.func)) is not None:
                scan, authors = found
                both = (functools.partial(f, *value.args, **value.keywords) for f in (authors, scan.restated))
                yield _Found(scan, vars(one), name, *both)
        for name, scan in SCANS.items():
            if _has(one, name, scan):
                name = name if scan.place == "method" else "forward"
                yield _Found(scan, vars(one), name, getattr(type(one), name), scan.restated, one)


def _has(module: torch.nn.Module, name: str, scan: Scan) -> bool:
    """Whether a module has the recurrence that goes by ``name``."""
    if scan.place == "parts":
        return all(hasattr(module, part) for part in name.split())
    return scan.place != "function" and hasattr(type(module), name)


def _function(value: Any) -> tuple[Scan, Callable[..., Any]] | None:
    """The scan that a function goes by, and what it computes in torch: the decorator
    ``transformers.integrations.hub_kernels.use_kernel_func_from_hub_with_fallback`` holds both the name under which it
    looks for other implementations and the authors' own one."""
    if not inspect.isfunction(value):
        return None
    held = dict(zip(value.__code__.co_freevars, value.__closure__ or ()))
    decorated = {"func_name", "torch_function"} <= held.keys()
    name = held["func_name"].cell_contents if decorated else value.__name__
    scan = SCANS.get(name)
    if scan is None or scan.place != "function":
        return None
    return scan, held["torch_function"].cell_contents if decorated else value


def _computes_the_same(found: _Found) -> bool:
    """Whether the authors' function gives what its restatement gives, over several chunks of the scan's example."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        args, keywords = found.scan.example(found.module, SEVERAL * CHUNK + 5)
        try:
            wanted = found.authors(*args, **keywords)
        except Exception:  # whatever code raises that takes other arguments
            return False
        got = found.restated(*args, **keywords)
    wanted, got = (found.scan.compared(args, x) for x in (wanted, got))
    if not isinstance(wanted, torch.Tensor) or wanted.shape != got.shape:
        return False
    return bool((got - wanted).abs().max() <= TOLERANCE * wanted.abs().max())


SEVERAL = 9
"""Chunks of an example: more tokens than authors' code may take at once whatever it is told."""

TOLERANCE = 1e-4
"""Largest difference, as a share of the largest element, of two ways to compute the same in float32."""
