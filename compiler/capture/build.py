"""The authors' module without its weights: parameters on the meta device, buffers computed for real."""

from __future__ import annotations

import traceback
from contextlib import contextmanager
from math import prod
from typing import Any, Iterator

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from adaptc.capture.places import running
from adaptc.errors import AdaptcError, InputError
from adaptc.sources.classes import causal_model


def build(config: Any, trust_remote_code: bool = False) -> torch.nn.Module:
    """The causal LM that we or transformers have for ``config``, in float32; with ``trust_remote_code`` the one that
    comes with the model, if the config names one. InputError when its code fails on the configuration.

    Each parameter moves to the meta device as it is registered, so that initialising it costs nothing, while the
    constructors' own arithmetic (rotary frequencies, embedding scales) runs on the CPU. Memory pages of parameters
    are never touched, and what is larger than ``LARGE`` isn't even reserved: a layer's experts can take more than the
    machine has.
    """
    handle = register_module_parameter_registration_hook(_on_meta)
    try:
        with _Reserving():
            return causal_model(config, trust_remote_code).eval()
    except AdaptcError:
        raise
    except Exception as error:  # whatever the authors' constructors and torch raise on sizes that make no sense
        place = running(traceback.walk_tb(error.__traceback__), {}, "__init__")
        raise InputError(f"no {config.model_type} model can be built from the configuration: {type(error).__name__}: "
                         f"{str(error).partition(chr(10))[0]} ({place.source or 'nowhere in its own code'}).") from error
    finally:
        handle.remove()


LARGE = 1 << 24
"""Elements from which on a tensor of no content has nothing behind it while a module is built."""


class _Reserving(TorchFunctionMode):
    """Large tensors of no content, nothing or zeros, are made on the meta device."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (torch.empty, torch.zeros) and _elements(args, kwargs) >= LARGE:
            kwargs = kwargs | {"device": "meta"}
        return function(*args, **kwargs)


def _elements(args: tuple, kwargs: dict[str, Any]) -> int:
    size = kwargs.get("size", args[0] if args and isinstance(args[0], (tuple, list)) else args)
    return prod(int(n) for n in size)


def _on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None):
    """The registered parameter's stand-in; None keeps what is registered, so that tied parameters stay one object."""
    if parameter is None or parameter.is_meta:
        return None
    return torch.nn.Parameter(parameter.to("meta"), requires_grad=False)


def stored_shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """What a checkpoint of the module holds: parameters, tied ones once, and persistent buffers."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    persistent = module.state_dict(keep_vars=True)
    buffers = {name: tuple(b.shape) for name, b in module.named_buffers(remove_duplicate=False) if name in persistent}
    return shapes | buffers


def tied(module: torch.nn.Module) -> dict[str, str]:
    """Parameters that share storage with an earlier one, and which."""
    owners = {id(parameter): name for name, parameter in module.named_parameters()}
    everything = module.named_parameters(remove_duplicate=False)
    return {name: owners[id(p)] for name, p in everything if owners[id(p)] != name}


@contextmanager
def on_one_device(module: torch.nn.Module) -> Iterator[None]:
    """Buffers where the parameters are, as tracing needs it; put back afterwards."""
    device = next(module.parameters()).device
    saved = [(m, name, b) for m in module.modules() for name, b in m._buffers.items() if b is not None]
    try:
        for m, name, b in saved:
            m._buffers[name] = b.to(device)
        yield
    finally:
        for m, name, b in saved:
            m._buffers[name] = b
