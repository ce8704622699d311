"""Models in GGUF files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from adaptc.errors import AdapterError, InputError, UnsupportedError, UnusedError
from adaptc.formats import FORMATS
from adaptc.models import waivers
from adaptc.models.gguf import (ARCHITECTURES, HALVES, PARAMETERS, ROPE_SCALINGS, ZERO_IS_NONE, Architecture,
                                llama3_scaling)
from adaptc.sources import text
from adaptc.sources.binding import TRANSPOSE, Binding
from adaptc.sources.conversion import ConvertedTensor, joined
from adaptc.sources.gguf_file import read_gguf
from adaptc.sources.source import Source
from adaptc.sources.tensor import SourceTensor, locate
from adaptc.sources.waiver import Waiver, way_on

_ROPE_FACTORS = "rope_freqs.weight"
_TURNED = "rope.dimension_count"
_COUNTS = ("attention.head_count", "attention.head_count_kv", "attention.key_length", "rope.dimension_count",
           "feed_forward_length", "expert_count", "expert_used_count", "expert_feed_forward_length",
           "expert_shared_feed_forward_length")
_MEASURES = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "rope.freq_base")
_OPTIONAL = ("attention.head_count_kv", "attention.key_length", "rope.dimension_count", "rope.freq_base",
             "expert_feed_forward_length", "expert_shared_feed_forward_length")
_ROUTER = re.compile(r"blk\.\d+\.ffn_gate_inp\.weight")
_LARGEST = 1 << 30


class GgufSource(Source):
    """A model in one GGUF file, of an architecture in ``adaptc.models.gguf``."""

    kind = "gguf"

    def __init__(self, path: Path, waiver: Waiver = Waiver()):
        self.path, self.waiver = path, waiver
        self.name = path.name
        file = read_gguf(path)
        self.metadata: Mapping[str, Any] = file.metadata
        self._header = file.header
        self._check_type()
        self._check_parts()
        self.architecture = self._architecture()
        self.tensors: dict[str, SourceTensor | ConvertedTensor] = {}
        for stored in file.tensors:
            dtype, shape = _type_name(stored.type), stored.shape
            if len(shape) == 1 and self._rules.one_row and re.search(self._rules.one_row, stored.name):
                shape = (1, *shape)
            found = locate(stored.name, shape, FORMATS.get(dtype.lower()), dtype, file.data, stored.offset, self.name,
                           waiver)
            if found is not None:
                self.tensors[stored.name] = found
        self._join_halves()

    @cached_property
    def config(self) -> Any:
        from transformers import CONFIG_MAPPING

        given = self.given_config()
        try:
            return CONFIG_MAPPING[self._rules.model_type](**given)
        except Exception as error:  # validation errors of transformers share no narrower class
            raise InputError(f"the metadata of {self.name} make no valid configuration: {error}") from error

    @cached_property
    def unread(self) -> str:
        partly = "it turns whole heads, and the file says that rope turns a part" if self._rules.turned in self._given else ""
        return self._rules.unread or partly

    def given_config(self) -> Mapping[str, Any]:
        return self._given

    def stated(self) -> set[str]:
        return {*super().stated(), *self.metadata}

    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    def supplier(self, parameter: str) -> Binding:
        known = parameter
        for pattern, replacement in PARAMETERS.items():
            known = re.sub(pattern, replacement, known)
        stem, _, suffix = known.rpartition(".")
        name = self._tensor_names.get_name(stem)
        heads = next((key for pattern, key in self._rules.heads.items() if re.search(pattern, parameter)), None)
        moved = ("rope_halves", getattr(self.config, heads)) if heads else None
        if self._rules.transposed and re.search(self._rules.transposed, parameter):
            moved = (TRANSPOSE, 0)
        return Binding(
            tensor=f"{name}.{suffix}" if name else known,
            row_permutation=moved,
            add=next((add for pattern, add in self._rules.offsets.items() if re.search(pattern, parameter)), 0.0),
        )

    def description(self) -> tuple[memoryview, ...]:
        """The file's header, metadata and tensor table."""
        return (self._header,)

    def read_text(self) -> text.TextBundle:
        return text.gguf_bundle(self.architecture, self.metadata, self.name)

    @cached_property
    def _rules(self) -> Architecture:
        row = ARCHITECTURES[self.architecture]
        has = {key: self.metadata.get(f"{self.architecture}.{key}") for key in row.variants}
        return next((row.variants[key] for key, value in has.items() if isinstance(value, int) and value), row)

    def _join_halves(self) -> None:
        for whole, halves in HALVES.items():
            for name in [name for name in self.tensors if name.split(".")[2:3] == [halves[0]]]:
                parts = [name.replace(halves[0], half) for half in halves]
                if all(part in self.tensors for part in parts):
                    target = name.replace(halves[0], whole)
                    found = tuple(self.tensors.pop(part) for part in parts)
                    self.tensors[target] = joined(target, found, self._rules.halves == "alternating")

    @cached_property
    def _tensor_names(self):
        import gguf

        return gguf.get_tensor_name_map(gguf.MODEL_ARCH[self._rules.tensor_names], self.config.num_hidden_layers)

    def _check_type(self) -> None:
        kind = self.metadata.get("general.type", "model")
        if kind == "adapter":
            raise AdapterError(f"{self.name} holds an adapter (general.type), no model.",
                               hint="Merge it into its base model with llama.cpp's `llama-export-lora`, and compile that.")
        if kind != "model":
            raise UnsupportedError(f"{self.name} holds no model: its general.type is {kind!r}.",
                                   hint="Is there a file of the model itself beside it?")

    def _check_parts(self) -> None:
        parts = self.metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise UnsupportedError(
                f"{self.name} is one of {parts} parts; adaptc reads GGUF models in one file.",
                hint="Join the parts with `llama-gguf-split --merge`.",
            )

    def _architecture(self) -> str:
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise InputError(f"{self.name} doesn't say its architecture (general.architecture is {name!r}).")
        if name not in ARCHITECTURES:
            raise UnsupportedError(
                f"{self.name} holds a model of the GGUF architecture {name!r}; adaptc reads "
                f"{', '.join(ARCHITECTURES)} from GGUF.",
                hint="Compile the model from its Hugging Face folder instead.",
            )
        return name

    @cached_property
    def _given(self) -> dict[str, Any]:
        """Configuration keys from metadata. UnusedError naming metadata that nothing reads."""
        try:
            return self._read_metadata()
        except (TypeError, ValueError, KeyError, OverflowError, ZeroDivisionError) as error:
            what = f"a value has the wrong type or is missing ({type(error).__name__}: {error})"
            raise self._damaged(what) from error

    def _damaged(self, what: str) -> InputError:
        return InputError(f"the metadata of {self.name} are damaged: {what}.", hint="Download the file again.")

    def _read_metadata(self) -> dict[str, Any]:
        own = _below(self.metadata, f"{self.architecture}.")
        names = self._config_names()
        self._check_agreement(own)
        self._check_unread(own, names)
        self._check_sizes(own, names)
        given = {"tie_word_embeddings": "output.weight" not in self.tensors}
        given |= {name: None if key in ZERO_IS_NONE and own[key] == 0 else own[key]
                  for key, name in names.items() if name and key in own}
        given |= {
            name: self.metadata[f"tokenizer.{key}"]
            for key, name in _transformers_table("tokenizer").items()
            if f"tokenizer.{key}" in self.metadata
        }
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list):
            given.setdefault("vocab_size", len(tokens))
        given.setdefault("vocab_size", self.tensors["token_embd.weight"].shape[0])
        given |= self._rules.derived(own)
        given |= self._turned(own, names)
        rope = self._rope_scaling(own)
        return given | ({"rope_scaling": rope} if rope else {})

    def _turned(self, own: Mapping[str, Any], names: Mapping[str, str | None]) -> dict[str, float]:
        """The share of a head's columns that rope turns, where the metadata say another than all and nothing else takes
        them from there."""
        width = own.get("attention.key_length", own["embedding_length"] // own["attention.head_count"])
        turned = own.get(_TURNED, width)
        if turned == width or names.get(_TURNED):
            return {}
        if not self._rules.turned or turned > width or turned % 2:
            raise UnsupportedError(f"{self.name} has {self.architecture}.{_TURNED} = {turned}, and heads of {width} columns; "
                                   f"adaptc reads models of this architecture whose rope turns "
                                   f"{'an even part' if self._rules.turned else 'all'} of them.")
        return {self._rules.turned: turned / width}

    def _config_names(self) -> dict[str, str | None]:
        return {**_transformers_table(self._rules.reader or self.architecture), **self._rules.keys}

    def _check_agreement(self, own: Mapping[str, Any]) -> None:
        for key, other in self._rules.same_as.items():
            if key in own and other in own and own[key] != own[other]:
                raise UnsupportedError(
                    f"{self.name} has {self.architecture}.{key} = {own[key]} and {self.architecture}.{other} = "
                    f"{own[other]}; adaptc can only read models where both agree."
                )

    def _check_unread(self, own: Mapping[str, Any], names: Mapping[str, str | None]) -> None:
        scaling = self._scaling_keys(own)
        read = {f"{self.architecture}.{key}" for key in (*names, *self._rules.same_as, *scaling)}
        read |= {"general.architecture", *text.read_keys()}
        unread = [key for key in self.metadata if key not in read and not waivers.reason(waivers.METADATA, key)
                  and not self.waiver.covers(key)]
        if unread:
            raise UnusedError(
                f"adaptc doesn't know what these metadata keys of {self.name} mean: {', '.join(unread)}.",
                hint="A model compiled without them might not be the authors' model. " + way_on(unread),
            )

    def _check_sizes(self, own: Mapping[str, Any], names: Mapping[str, str | None]) -> None:
        """The numbers that all else follows from, against the tensors, before anything of these sizes is built."""
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise InputError(f"{self.name} holds no embedding table (token_embd.weight).")
        layers = {name.split(".")[1] for name in self.tensors if name.startswith("blk.")}
        counted = {"block_count": len(layers), "embedding_length": embedding.shape[1]}
        counted |= {"expert_count": t.shape[0] for name, t in self.tensors.items() if _ROUTER.fullmatch(name)}
        for key, expected in counted.items():
            if key in names and own[key] != expected:
                raise self._damaged(f"{self.architecture}.{key} is {own[key]!r}, and the tensors have {expected}")
        for key in (key for key in (*_COUNTS, *_MEASURES) if key in names):
            value = own.get(key, 1) if key in _OPTIONAL else own[key]
            if not 0 < value < _LARGEST:
                raise self._damaged(f"{self.architecture}.{key} is {value!r}")
        if "expert_count" in names and own["expert_used_count"] > own["expert_count"]:
            raise self._damaged("expert_used_count is more than expert_count")
        if own["attention.head_count"] % own.get("attention.head_count_kv", own["attention.head_count"]):
            raise self._damaged("attention.head_count is no multiple of attention.head_count_kv")

    def _scaling_keys(self, own: Mapping[str, Any]) -> tuple[str, ...]:
        kind = own.get("rope.scaling.type")
        if kind is None:
            return ()
        if kind not in ROPE_SCALINGS:
            raise UnsupportedError(
                f"{self.name} scales rotary positions by the rule {kind!r}; adaptc reads {', '.join(ROPE_SCALINGS)}."
            )
        return ("rope.scaling.type", *(f"rope.scaling.{key}" for key in ROPE_SCALINGS[kind]))

    def _rope_scaling(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """transformers' rope parameters beyond the base frequency, from metadata or from stored factors."""
        kind = own.get("rope.scaling.type", "none")
        if kind == "none" and self._rules.rope:
            raise UnsupportedError(
                f"{self.name} doesn't say how rotary positions are scaled ({self.architecture}.rope.scaling.type), and "
                f"every published model of the architecture {self.architecture!r} scales them.",
                hint="Convert it again with a current llama.cpp.",
            )
        if _ROPE_FACTORS in self.tensors:
            factors = self.tensors[_ROPE_FACTORS].values().reshape(-1)
            rope = llama3_scaling(factors.tolist(), own.get("rope.freq_base", 10000.0))
            if rope is None:
                raise UnsupportedError(
                    f"the rotary factors in {_ROPE_FACTORS} of {self.name} follow no rule that adaptc knows "
                    "(it knows Llama 3's)."
                )
            if rope and kind != "none":
                raise UnsupportedError(
                    f"{self.name} scales rotary positions twice: by {_ROPE_FACTORS} and by the rule {kind!r}."
                )
            if rope:
                return rope
        if kind == "none":
            return {}
        return {"rope_type": kind, **self._rules.rope} | {
            name: own[f"rope.scaling.{key}"]
            for key, name in ROPE_SCALINGS[kind].items()
            if f"rope.scaling.{key}" in own
        }


def _transformers_table(group: str) -> Mapping[str, str | None]:
    """transformers' own table: metadata key → configuration key (None: known, and nothing to configure)."""
    from transformers.integrations import GGUF_CONFIG_MAPPING

    return GGUF_CONFIG_MAPPING[group]


def _below(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Metadata below ``prefix``; arrays of numbers as lists."""
    return {
        key.removeprefix(prefix): value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in metadata.items()
        if key.startswith(prefix)
    }


def _type_name(number: int) -> str:
    """GGML's name of a tensor type."""
    import gguf

    try:
        return gguf.GGMLQuantizationType(number).name
    except ValueError:
        return f"GGML type {number}"
