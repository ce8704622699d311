"""Models in folders as the Hugging Face hub holds them: config.json, safetensors and tokenizer files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from adaptc.errors import DamagedFileError, InputError, PickleError, UnsupportedError
from adaptc.formats import FORMATS
from adaptc.models.modules import MODULES
from adaptc.sources import text
from adaptc.sources.accounting import leaves
from adaptc.sources.binding import Binding
from adaptc.sources.classes import causal_model
from adaptc.sources.compressed import BYTES, PackedTensor, is_part, paired
from adaptc.sources.conversion import ConvertedTensor, converted, narrowed
from adaptc.sources.derived import python_files
from adaptc.sources.gguf_file import map_bytes
from adaptc.sources.quantization import FIELD, MXFP4_PAIRS, quantization
from adaptc.sources.source import Source
from adaptc.sources.tensor import SourceTensor, locate, whole_numbers
from adaptc.sources.waiver import Waiver
from adaptc.sources.wrapper import text_model

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TEXT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "generation_config.json", "tokenizer.model", "vocab.json", "merges.txt",
)
_DESCRIBING = (".jinja", ".json", ".model", ".txt")
"""Suffixes of the files that transformers reads configurations and tokenizers from."""

_INTEGERS = {"I32": "<i4", "I64": "<i8"}
"""Tables of numbers, of the experts of each token id for example."""

_DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}

ADAPTER = "adapter_config.json"
"""What a folder of an adapter has; transformers would apply it to whatever model it lies beside."""

PATTERNS = ("config.json", ADAPTER, "model*.safetensors", _INDEX, *_TEXT_FILES)
"""Files of a hub repository that are read."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""What the names of pickled weights end in."""

_PICKLED = (b"PK\x03\x04", b"\x80\x02\x8a", b"\x80\x04\x95", b"\x80\x05\x95")
"""What pickled weights start with: the archive that torch.save writes, what it wrote before, or a bare pickle."""

_OTHER_WEIGHTS = (".h5", ".msgpack", ".onnx", ".ot")

PLAUSIBLE_LAYERS = 1024
"""Layers that a configuration may state whatever the files hold; beyond, each must have a tensor at least."""


class HuggingFaceSource(Source):
    """A folder with config.json and safetensors, one file or an index of several."""

    kind = "huggingface"

    def __init__(self, folder: Path, name: str | None = None, *, trust_remote_code: bool = False,
                 waiver: Waiver = Waiver()):
        self.folder, self.waiver = folder, waiver
        self.trust_remote_code = trust_remote_code
        self.name = name or folder.resolve().name
        self._given = read_json(folder / "config.json")
        trusted = trust_remote_code and "auto_map" in self._given
        self._own = None if trusted else MODULES.get(str(self._given.get("model_type")))
        if self._own:
            self._given = text_model(self._given)
        self._check_config()
        self._shards = self._list_shards()
        self._module: Any = None
        self._stored: dict[str, SourceTensor] = {}
        self._headers: list[str] = []
        for shard, expected in self._shards.items():
            self._add_shard(folder / shard, expected)

    @cached_property
    def tensors(self) -> Mapping[str, SourceTensor | ConvertedTensor]:
        """As transformers' classes have them: see ``conversion``."""
        if (kept := self.derived.get("tensors")) is not None:
            return {name: self._stored[stored] for name, stored in json.loads(kept).items()}
        whole: Mapping[str, SourceTensor | PackedTensor] = paired(self._stored)
        if self._own:
            whole = {name.removeprefix(self._own.prefix): tensor for name, tensor in whole.items()}
        found = dict(converted(whole, self._module or self._bare()))
        for pattern, key in self._own.narrowed.items() if self._own else ():
            count = dict(leaves(self._given)).get(key)
            found |= {name: narrowed(name, found[name], count) for name in found if re.search(pattern, name)}
        if all(isinstance(tensor, SourceTensor) for tensor in found.values()):  # else transformers moves the elements
            self.derived.put("tensors", json.dumps({name: tensor.name for name, tensor in found.items()}).encode())
        return found

    def built(self, module: Any) -> None:
        self._module = module

    def _bare(self) -> Any:
        """The module with nothing in it, of a model whose program is known."""
        import torch

        with torch.device("meta"):
            return causal_model(self.config, self.trust_remote_code)

    @cached_property
    def config(self) -> Any:
        from transformers import CONFIG_MAPPING, AutoConfig

        kind = self._given["model_type"]
        own = "auto_map" in self._given
        if self._own:
            return self._own_config()
        if kind not in CONFIG_MAPPING and not (own and self.trust_remote_code):
            raise UnsupportedError(
                f"config.json of {self.name} has the model_type {kind!r}, which the installed transformers "
                "doesn't have.",
                hint="The folder brings code of its own: look at it, and run it with --trust-remote-code." if own
                else "Is the name right? A newer transformers may know it.",
            )
        self._check_layers(CONFIG_MAPPING[kind].attribute_map if kind in CONFIG_MAPPING else {})
        try:
            return AutoConfig.from_pretrained(self.folder, local_files_only=True,
                                              trust_remote_code=own and self.trust_remote_code)
        except Exception as error:  # validation errors of transformers share no narrower class
            raise InputError(f"config.json of {self.name} is no valid configuration: {error}") from error

    def _own_config(self) -> Any:
        made = self._own.load().CONFIG
        self._check_layers(made.attribute_map)
        try:
            return made.from_dict(self._given)
        except Exception as error:  # validation errors of transformers share no narrower class
            raise InputError(f"config.json of {self.name} is no valid configuration: {error}") from error

    def given_config(self) -> Mapping[str, Any]:
        return self._given

    def place(self) -> str:
        return f"{self.name} (config.json)"

    def files(self) -> tuple[Path, ...]:
        names = ("config.json", _INDEX, *self._shards, *_TEXT_FILES)
        return tuple(path for name in names if (path := self.folder / name).is_file())

    def supplier(self, parameter: str) -> Binding:
        """The tensor of that name, or, in a checkpoint of the model without its head, the one without the first
        step of the name."""
        short = parameter.partition(".")[2]
        return Binding(parameter if parameter in self.tensors or short not in self.tensors else short)

    def description(self) -> list[str | bytes] | None:
        """Every file that isn't weights, the weights' headers, and the folder's own code if it may run."""
        if self.trust_remote_code and "--" in json.dumps(self._given.get("auto_map")):
            return None  # code in another repository
        parts: list[str | bytes] = [*self._headers]
        try:
            for path in sorted(self.folder.iterdir()):
                if path.suffix in _DESCRIBING and path.is_file():
                    parts += (path.name, path.read_bytes())
            return [*parts, *(python_files(self.folder) if self.trust_remote_code else ())]
        except OSError as error:
            raise InputError(f"{error.filename} can't be read: {error.strerror or error}.") from error

    def read_text(self) -> text.TextBundle:
        """From transformers' tokenizer of the folder; empty when it has none."""
        if not any((self.folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            return text.TextBundle()
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise InputError(f"the tokenizer of {self.name} can't be read: {error}") from error
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise UnsupportedError(
                f"the tokenizer of {self.name} ({type(tokenizer).__name__}) isn't backed by the tokenizers library.",
                hint="Convert it to a tokenizer.json.",
            )
        generation = self.folder / "generation_config.json"
        stops = _ids(self._given, "config.json")
        if generation.is_file():
            stops += _ids(read_json(generation), generation.name)
        return text.bundle(tokenizer, stops)

    def _check_layers(self, aliases: Mapping[str, str]) -> None:
        """InputError for more layers than the files can hold, before lists and modules of that many are made."""
        names = {"num_hidden_layers", aliases.get("num_hidden_layers")}
        most = max(PLAUSIBLE_LAYERS, len(self._stored))
        for key, value in leaves(self._given):
            if key.rpartition(".")[2] in names and isinstance(value, (int, float)) and value > most:
                raise InputError(f"config.json of {self.name} says {key} = {value}, and its files hold {len(self._stored)} "
                                 "tensors.", hint="The configuration and the tensors don't belong together.")

    def _check_config(self) -> None:
        if not isinstance(self._given.get("model_type"), str):
            raise InputError(f"config.json of {self.name} doesn't say its model_type.")
        classes = self._given.get("architectures") or []
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise InputError(f"config.json of {self.name} has architectures = {classes!r}, expected names of classes.")
        stated = self._given.pop(FIELD, None) or self._given.get("compression_config")
        self.packed = bool(stated) and self._is_packed(stated)
        if stated and not self.packed:
            method = stated.get("quant_method", "unnamed") if isinstance(stated, dict) else stated
            raise UnsupportedError(
                f"{self.name} is quantised by the method {method!r} (quantization_config in config.json); adaptc reads "
                f"{', '.join(_DTYPES.values())} checkpoints, {MXFP4_PAIRS} of compressed-tensors, and GGUF files.",
                hint="Use the unquantised model, or a GGUF file of it.",
            )

    def _is_packed(self, stated: Any) -> bool:
        """Whether the files hold matrices in pairs of tensors; UnsupportedError naming a field that isn't known."""
        layout = stated.get("format") if isinstance(stated, dict) else None
        return layout == MXFP4_PAIRS and quantization(stated, self.name).layout == MXFP4_PAIRS

    def _list_shards(self) -> dict[str, set[str] | None]:
        """Weight files → the tensors that the index expects in each; None when there is no index."""
        if (self.folder / _INDEX).is_file():
            return self._indexed_shards()
        if (self.folder / _WEIGHTS).is_file():
            return {_WEIGHTS: None}
        check_pickles(self.folder, self.name)
        if others := sorted(path.name for path in self.folder.iterdir() if path.suffix in _OTHER_WEIGHTS):
            raise UnsupportedError(f"{self.name} has its weights in {others[0]}; adaptc reads safetensors.",
                                   hint="Save the model again with transformers' save_pretrained.")
        raise InputError(f"{self.name} has neither {_WEIGHTS} nor {_INDEX}.", hint="Download the folder again.")

    def _indexed_shards(self) -> dict[str, set[str] | None]:
        weight_map = read_json(self.folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(f"{_INDEX} of {self.name} has no weight_map.")
        shards: dict[str, set[str] | None] = {}
        for tensor, shard in sorted(weight_map.items()):
            if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise InputError(
                    f"{_INDEX} of {self.name} places the tensor {tensor!r} in {shard!r}; expected the name of a "
                    ".safetensors file in the same folder."
                )
            shards.setdefault(shard, set()).add(tensor)
        for shard, tensors in shards.items():
            if not (self.folder / shard).is_file():
                raise InputError(
                    f"{self.name} lacks the file {shard}, which holds {min(tensors)!r} and {len(tensors) - 1} more "
                    "tensors.",
                    hint="Download the folder again.",
                )
        return shards

    def _add_shard(self, path: Path, expected: set[str] | None) -> None:
        header, start, data = _read_safetensors(path)
        self._headers += (path.name, json.dumps(header))
        missing = sorted((expected or set()) - set(header))
        if missing:
            raise InputError(f"{path.name} of {self.name} lacks the tensor {missing[0]!r} that the index places there.")
        for name, entry in header.items():
            if name in self._stored:
                raise InputError(f"the tensor {name!r} of {self.name} is in {self._stored[name].file} and {path.name}.")
            format, shape = FORMATS.get(_DTYPES.get(entry["dtype"], "")), tuple(entry["shape"])
            first, end = (start + offset for offset in entry["data_offsets"])
            if self.packed and entry["dtype"] == "U8" and is_part(name):
                found = SourceTensor(name, shape, BYTES, data[first:end], path.name)
            elif entry["dtype"] in _INTEGERS:
                found = whole_numbers(name, shape, _INTEGERS[entry["dtype"]], data[first:end], path.name, self.waiver)
            else:
                found = locate(name, shape, format, entry["dtype"], data, first, path.name, self.waiver)
            if found is not None:
                self._stored[name] = found


def _ids(content: Mapping[str, Any], file: str) -> list[int]:
    """The eos_token_id of a JSON object, which may be one, several or none."""
    stated = content.get("eos_token_id")
    ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if not all(isinstance(id, int) for id in ids):
        raise InputError(f"{file} has eos_token_id = {stated!r}, expected token ids.")
    return ids


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; InputError naming the file when it isn't one."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamagedFileError(f"{path} can't be read: {error.strerror or error}.") from error
    return _json(content, path.name)


def _json(text: bytes, file: str) -> dict[str, Any]:
    """A JSON object without keys that occur twice: which of the two is meant, readers don't agree on."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
        return content

    try:
        content = json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{file} is not valid JSON: {error}.", hint="Download the file again.") from error
    if not isinstance(content, dict):
        raise DamagedFileError(f"{file} holds {type(content).__name__}, expected an object.")
    return content


def is_pickled(name: str, start: bytes) -> bool:
    """Whether a file is pickled weights, by its name or its first bytes."""
    return name.endswith(PICKLES) or start.startswith(_PICKLED)


def pickled(what: str) -> PickleError:
    return PickleError(f"{what}, which can hold code and are never loaded; adaptc reads safetensors.",
                       hint="If you trust it, load it with transformers' from_pretrained and save_pretrained the result.")


def check_pickles(folder: Path, name: str) -> None:
    """PickleError when a folder without safetensors has its weights pickled."""
    if found := sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES):
        raise pickled(f"{name} has pickled weights in {found[0]}")


def _read_safetensors(path: Path) -> tuple[dict[str, Any], int, Any]:
    """Header (tensor → dtype, shape, data_offsets), where the data start, and the file's bytes, memory-mapped.

    The safetensors library checks the header against the file; views are ours because it would copy each tensor.
    """
    from safetensors import SafetensorError, safe_open

    data = map_bytes(path)
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        if is_pickled("", data[:4].tobytes()):
            raise pickled(f"{path.name} holds pickled weights, whatever its name says") from error
        raise DamagedFileError(f"{path.name} is damaged or incomplete: {error}.",
                               hint="Download the file again.") from error
    size = int.from_bytes(data[:8].tobytes(), "little")
    header = _json(data[8 : 8 + size].tobytes(), f"the header of {path.name}")
    header.pop("__metadata__", None)
    return header, 8 + size, data
