"""What a model's files are to the rest of the compiler."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from adaptc import blocks
from adaptc.errors import InputError
from adaptc.formats import FORMATS, WeightFormat
from adaptc.sources.accounting import ConfigReads, leaves, recorded_reads
from adaptc.sources.binding import Binding, bind, listed, unused
from adaptc.sources.derived import Derived
from adaptc.sources.tensor import SourceTensor, check_finite
from adaptc.sources.text import TextBundle
from adaptc.sources.waiver import Waiver


class Source(ABC):
    """A model as published. Opening it checks the files' structure; everything else happens when it is asked for.

    kind      "gguf", "huggingface" or "module"
    name      the file's or folder's name, or the hub id
    tensors   the files' tensors by the files' own names
    waiver    what of it may go unused because the caller says so
    """

    kind: str
    name: str
    tensors: Mapping[str, SourceTensor]
    waiver: Waiver
    trust_remote_code: bool = False
    """Whether modelling code that comes with the model may run."""
    unread: str = ""
    """Why transformers' own reader of these files makes another model of them, or none; "" when it makes this one."""

    @cached_property
    @abstractmethod
    def config(self) -> Any:
        """The transformers configuration. InputError or UnsupportedError when the files don't describe one."""

    @abstractmethod
    def given_config(self) -> Mapping[str, Any]:
        """The configuration keys that the files state, as stated; what is to be accounted for."""

    def place(self) -> str:
        """What errors call the place where the configuration is stated."""
        return self.name

    def stated(self) -> set[str]:
        """Every name that the files state: configuration keys and tensors."""
        return {*dict(leaves(self.given_config())), *self.tensors}

    @abstractmethod
    def files(self) -> tuple[Path, ...]:
        """Every file that the model is read from."""

    @abstractmethod
    def supplier(self, parameter: str) -> Binding:
        """Which tensor a parameter of transformers' module comes from, whether or not it exists."""

    @abstractmethod
    def description(self) -> Iterable[str | bytes | memoryview] | None:
        """All that the files say but the values of weights, byte for byte; None when the model is more than that."""

    @abstractmethod
    def read_text(self) -> TextBundle:
        """Tokenizer, chat template and stop tokens, made by transformers from the files."""

    def text(self) -> TextBundle:
        """Tokenizer, chat template and stop tokens."""
        if (kept := self.derived.get("text")) is not None:
            return TextBundle.from_bytes(kept)
        text = self.read_text()
        self.derived.put("text", text.to_bytes())
        return text

    @cached_property
    def derived(self) -> Derived:
        """What has been made of this model before."""
        options = json.dumps([self.trust_remote_code, self.waiver.patterns])
        description = self.description()
        return Derived.of(None if description is None else (self.kind, options, *description))

    @cached_property
    def computed(self) -> dict[str, SourceTensor]:
        """Tables that the model's code computes and no file has, by name, as capture finds them or has kept them."""
        return _unpacked(kept) if (kept := self.derived.get("computed")) is not None else {}

    def compute(self, values: Mapping[str, np.ndarray]) -> None:
        """Notes tables (float32) that the program reads as weights."""
        if values:
            self.computed = _tensors(values)
            self.derived.put("computed", save(dict(values)))

    def tensor(self, name: str) -> SourceTensor:
        """A tensor that a weight of the program is."""
        return self.computed[name] if name in self.computed else self.tensors[name]

    def module(self) -> Any:
        """The authors' module without weights, if the source has one; None when it is built from ``config``."""
        return None

    def built(self, module: Any) -> None:
        """Called with the module that has been built of ``config``, before it is bound."""

    @cached_property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of each file, by file name."""
        return {path.name: _sha256(path) for path in sorted(self.files(), key=lambda path: path.name)}

    def bind(self, parameters: Mapping[str, tuple[int, ...]], tied: Mapping[str, str],
             ignored: Sequence[str] = ()) -> dict[str, Binding]:
        """How each of a transformers module's ``parameters`` (name → shape) is obtained; see ``binding.bind``."""
        return bind(self.tensors, self.supplier, parameters, tied, ignored, self.waiver)

    def left_out(self, parameters: Iterable[str], ignored: Sequence[str] = ()) -> tuple[str, ...]:
        """Sentences that say which tensors supply none of ``parameters`` and why, for a model that has been bound."""
        return _by_reason(unused(self.tensors, self.supplier, parameters, ignored, self.waiver))

    def format_notes(self) -> tuple[str, ...]:
        """Sentences that say which tensors aren't held in the format that the files store them in, and why."""
        return _by_reason({name: tensor.note for name, tensor in self.tensors.items() if tensor.note})

    def load(self, binding: Binding) -> tuple[WeightFormat, blocks.Codes]:
        """A parameter's codes, rows in the parameter's order, and their format: the stored one, bit for bit, or f32
        where the binding changes values. InputError naming the tensor when a value isn't finite."""
        tensor = self.tensor(binding.tensor)
        format, codes = tensor.format, tensor.codes()
        if binding.shape:
            codes = {name: array.reshape(*binding.shape[:-1], array.shape[-1]) for name, array in codes.items()}
        if binding.add:
            codes = {"codes": blocks.dequantize(format, codes) + blocks.FLOAT_DTYPES["f32"].type(binding.add)}
            format = FORMATS["f32"]
        check_finite(tensor, format, codes)
        if binding.transposed:
            if not format.is_float:  # groups of columns would become groups of rows
                format, codes = FORMATS["f32"], {"codes": blocks.dequantize(format, codes)}
            return format, {"codes": np.ascontiguousarray(codes["codes"].swapaxes(-1, -2))}
        rows = binding.rows(tensor.shape[0] if tensor.shape else 1)
        return format, codes if rows is None else blocks.take_rows(codes, rows)

    def stored(self) -> dict[str, SourceTensor]:
        """The files' own tensors, by name: those that ``tensors`` are, or are made of."""
        return {leaf.name: leaf for tensor in self.tensors.values() for leaf in _leaves(tensor)}

    def digests(self) -> dict[str, str]:
        """SHA-256 of each tensor's float32 values, row-major and little-endian, by name."""
        what = "digests of " + json.dumps(self.hashes)
        if (kept := self.derived.get(what)) is not None:
            return json.loads(kept)
        every = {**self.tensors, **self.computed}
        digests = {name: _sha256_of(tensor.values()) for name, tensor in sorted(every.items())}
        self.derived.put(what, json.dumps(digests).encode())
        return digests

    def check_finite(self, tensor: str) -> None:
        """InputError when the tensor of that name contains NaN or infinity."""
        self.tensor(tensor).check_finite()

    @contextmanager
    def account_config(self) -> Iterator[ConfigReads]:
        """Records which configuration keys are read within the block: build and trace the module there, then call
        ``check()`` on what this yields."""
        with recorded_reads(self.config, self.given_config(), self.place(), self.waiver) as reads:
            yield reads

    def check_waived(self) -> None:
        """After capture: OptionError when the caller waives what is used, or what isn't there."""
        self.waiver.check(self.stated(), self.name)


def _leaves(tensor: Any) -> Iterator[SourceTensor]:
    """The files' own tensors that ``tensor`` is, or is made of."""
    for part in getattr(tensor, "parts", ()):
        yield from _leaves(part)
    if not hasattr(tensor, "parts"):
        yield tensor


def _tensors(values: Mapping[str, np.ndarray]) -> dict[str, SourceTensor]:
    return {name: SourceTensor(name, array.shape, FORMATS["f32"], np.ascontiguousarray(array, "<f4").view(np.uint8).reshape(-1),
                               "the model's code") for name, array in values.items()}


def _unpacked(kept: bytes) -> dict[str, SourceTensor]:
    return _tensors(load(kept))


def _by_reason(reasons: Mapping[str, str]) -> tuple[str, ...]:
    """Tensor → reason, as one sentence a reason."""
    names: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names.setdefault(why, []).append(name)
    return tuple(f"{listed(tensors, 2)}: {why}." for why, tensors in names.items())


def _sha256_of(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values, "<f4")).hexdigest()


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror or error}.") from error
