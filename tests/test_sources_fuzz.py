"""The file readers on damaged and hostile files: one AdaptcError, or exactly what the formats' own readers load.

``ADAPTC_FUZZ=20`` runs twenty times as many examples. Each example may take 20 seconds and 1 GiB at most.
"""

from __future__ import annotations

import copy
import json
import os
import resource
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors
import tiny_gguf
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from adaptc import blocks
from adaptc.capture.build import build, stored_shapes, tied
from adaptc.errors import AdaptcError
from adaptc.sources import open_source

torch.set_num_threads(1)
MEMORY = 1 << 30


def fuzzed(examples: int):
    return settings(max_examples=examples * int(os.environ.get("ADAPTC_FUZZ", "1")), derandomize=True, database=None,
                    deadline=timedelta(seconds=20), suppress_health_check=list(HealthCheck))


@contextmanager
def limited_memory():
    """Address space for MEMORY more bytes than now: an allocation by a number from the file fails."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def loaded(load: Callable):
    """What ``load`` returns, or None when it refuses in a sentence; any other error is a bug."""
    with limited_memory():
        try:
            return load()
        except AdaptcError as error:
            assert len(str(error)) > 20
            return None


# ---- edits

EXTREMES = (0, 1, 2, 3, 7, 8, 31, 32, 33, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**60,
            2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1)


@st.composite
def damaged(draw, data: bytes, header: int, numbers: tuple[tuple[int, int], ...] = ()):
    """``data`` after one to three edits, most of them within the ``header``; ``numbers`` are (offset, width) of fields."""
    out = bytearray(data)
    at = st.one_of(st.integers(0, header - 1), st.integers(0, header - 1), st.integers(0, len(data) - 1))
    for _ in range(draw(st.integers(1, 3))):
        kinds = ["flip", "extreme", "cut", "insert", "remove", "repeat"] + ["number"] * (4 if numbers else 0)
        kind, i = draw(st.sampled_from(kinds)), min(draw(at), max(len(out) - 1, 0))
        width = draw(st.integers(1, 40))
        if kind == "flip" and out:
            out[i] ^= draw(st.integers(1, 255))
        elif kind == "extreme":
            width = draw(st.sampled_from((1, 2, 4, 8)))
            out[i : i + width] = (draw(st.sampled_from(EXTREMES)) % 256**width).to_bytes(width, "little")
        elif kind == "number":
            i, width = draw(st.sampled_from(numbers))
            old = int.from_bytes(data[i : i + width], "little")
            new = draw(st.one_of(st.sampled_from(EXTREMES), st.integers(-3, 3).map(lambda d: old + d),
                                 st.integers(0, 64)))
            out[i : i + width] = (new % 256**width).to_bytes(width, "little")
        elif kind == "cut":
            del out[i:]
        elif kind == "insert":
            out[i:i] = draw(st.binary(min_size=1, max_size=40))
        elif kind == "remove":
            del out[i : i + width]
        else:
            out[i:i] = out[i : i + width]
    return bytes(out)


VALUES = st.one_of(
    st.none(), st.booleans(), st.sampled_from(EXTREMES), st.sampled_from(EXTREMES).map(lambda n: -n),
    st.sampled_from([float("inf"), float("nan"), 0.5, 1e308, -1e-30, 1e30]), st.text(max_size=8),
    st.sampled_from(["llama", "F32", "BF16", "I64", "model.safetensors", "../model.safetensors", "default", "silu"]),
    st.just([]), st.just({}), st.just([0]), st.just([2**62, 4]), st.just([[[]]]), st.just({"a": {"b": 1}}),
).map(copy.deepcopy)


def _places(content, path=()):
    yield path
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield from _places(value, (*path, key))


@st.composite
def damaged_json(draw, content: dict):
    """JSON text of ``content`` with one to three values replaced, taken away, added or stated twice."""
    content = json.loads(json.dumps(content))
    twice = None
    for _ in range(draw(st.integers(1, 3))):
        *path, key = draw(st.sampled_from([place for place in _places(content) if place]))
        inner = content
        for step in path:
            inner = inner[step]
        kind = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add", "twice"]))
        if kind == "replace":
            inner[key] = draw(VALUES)
        elif kind == "remove":
            del inner[key]
        elif kind == "add" and isinstance(inner, dict):
            inner[draw(st.text(max_size=8))] = draw(VALUES)
        elif kind == "twice" and not path:
            twice = key, draw(VALUES)
        if not content:
            break
    text = json.dumps(content)
    if twice is not None and content:
        text = text[:-1] + ", " + json.dumps({twice[0]: twice[1]})[1:]
    return text.encode()


# ---- GGUF


def _container() -> bytes:
    """A small model with metadata of every type and tensors of several formats."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = tiny_gguf.write(Path(folder) / "m.gguf", formats=("q4_k", "q8_0", "f32", "f16"), raw_metadata={
            "general.name": "naïve", "general.tags": ["a", "bc"], "general.author": "me", "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.tokens": ["<s>", *map(chr, range(97, 97 + tiny_gguf.VOCABULARY - 1))],
            "tokenizer.ggml.scores": [0.5] * tiny_gguf.VOCABULARY,
        })
        return path.read_bytes()


def _tensor_numbers(data: bytes, names) -> tuple[tuple[int, int], ...]:
    """(offset, width) of counts, and of each tensor's name length, dimensions, type and offset."""
    found = [(4, 4), (8, 8), (16, 8)]
    for name in names:
        at = data.rindex(len(name).to_bytes(8, "little") + name.encode())
        found.append((at, 8))
        at += 8 + len(name)
        count = int.from_bytes(data[at : at + 4], "little")
        found += [(at, 4), *((at + 4 + 8 * i, 8) for i in range(count)), (at + 4 + 8 * count, 4), (at + 8 + 8 * count, 8)]
    return tuple(found)


GGUF = _container()
GGUF_NAMES = tuple(tiny_gguf.shapes("llama"))
GGUF_HEADER = GGUF.rindex(GGUF_NAMES[-1].encode()) + 64
GGUF_KEYS = tuple((GGUF.index(key.encode()) + len(key), 4) for key in ("llama.block_count", "general.tags", "general.name"))


def check_gguf(path: Path, data: bytes) -> bool:
    """Whether ``data`` loads; then its tensors and metadata must be those of the ``gguf`` package's reader."""
    path.write_bytes(data)
    source = loaded(lambda: open_source(path))
    if source is None:
        return False
    reader = gguf.GGUFReader(path)
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    assert source.tensors.keys() == theirs.keys()
    for name, tensor in source.tensors.items():
        assert tensor.shape == tuple(int(d) for d in reversed(theirs[name].shape)), name
        assert tensor.stored.name == theirs[name].tensor_type.name.lower(), name
        assert tensor.raw.tobytes() == theirs[name].data.tobytes(), name
    own = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count")
    assert source.metadata.keys() == reader.fields.keys() - set(own)
    for key, value in source.metadata.items():
        value = value.tolist() if isinstance(value, np.ndarray) else value
        assert repr(value) == repr(_plain(reader.fields[key].contents())), key
    loaded(lambda: (source.config, [tensor.values() for tensor in source.tensors.values()]))
    return True


def _plain(value):
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def test_the_untouched_container_loads(tmp_path):
    assert check_gguf(tmp_path / "m.gguf", GGUF)


@fuzzed(150)
@given(data=damaged(GGUF, GGUF_HEADER, _tensor_numbers(GGUF, GGUF_NAMES) + GGUF_KEYS))
def test_damaged_gguf(data, tmp_path_factory):
    check_gguf(_scratch(tmp_path_factory, "gguf") / "m.gguf", data)


@fuzzed(60)
@given(start=st.sampled_from([b"", b"GGUF", b"GGUF\x03\0\0\0", b"GGUF\x03\0\0\0" + bytes(7) + b"\0\x01" + bytes(7)]),
       rest=st.binary(max_size=200))
def test_random_bytes_as_gguf(start, rest, tmp_path_factory):
    check_gguf(_scratch(tmp_path_factory, "gguf") / "m.gguf", start + rest)


# ---- safetensors

RNG = np.random.default_rng(1)
TENSORS = {"a": RNG.standard_normal((3, 4)).astype(np.float32), "b.weight": RNG.standard_normal(5).astype(np.float16),
           "c": np.array(3, np.float32), "d": RNG.integers(0, 1 << 16, (2, 2)).astype(np.uint16), "empty": np.zeros((0, 4), np.float32)}
_SAVED = save(TENSORS, {"format": "pt"})
_DATA = 8 + int.from_bytes(_SAVED[:8], "little")
_HEADER = _SAVED[8:_DATA].replace(b'"U16"', b'"BF16"')  # numpy has no bf16
HEADER_SIZE = 8 + len(_HEADER)
SAFETENSORS = len(_HEADER).to_bytes(8, "little") + _HEADER + _SAVED[_DATA:]
HEADER = json.loads(SAFETENSORS[8:HEADER_SIZE])


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A folder whose config.json is read as that of a llama."""
    folder = tmp_path_factory.mktemp("safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def check_safetensors(folder: Path, data: bytes) -> bool:
    """Whether ``data`` loads; then its tensors must be those of the safetensors library."""
    (folder / "model.safetensors").write_bytes(data)
    source = loaded(lambda: open_source(folder))
    if source is None:
        return False
    theirs = dict(safetensors.deserialize(data))
    assert source.tensors.keys() == theirs.keys()
    for name, tensor in source.tensors.items():
        assert (list(tensor.shape), tensor.stored.name.upper()) == (theirs[name]["shape"], theirs[name]["dtype"])
        assert tensor.raw.tobytes() == bytes(theirs[name]["data"]), name
        assert tensor.values().shape == tensor.shape
    return True


def test_the_untouched_safetensors_load(small):
    assert check_safetensors(small, SAFETENSORS)


@fuzzed(200)
@given(data=damaged(SAFETENSORS, HEADER_SIZE, ((0, 8),)))
def test_damaged_safetensors(small, data):
    check_safetensors(small, data)


@fuzzed(200)
@given(header=damaged_json(HEADER), honest=st.integers(0, 9), more=st.integers(-2, 2))
def test_safetensors_with_other_headers(small, header, honest, more):
    size = len(header) if honest else len(header) + more
    check_safetensors(small, max(size, 0).to_bytes(8, "little") + header + SAFETENSORS[HEADER_SIZE:])


@fuzzed(60)
@given(size=st.sampled_from(EXTREMES), rest=st.binary(max_size=120))
def test_random_bytes_as_safetensors(small, size, rest):
    check_safetensors(small, size.to_bytes(8, "little") + rest)


# ---- config.json and the index

CONFIG = dict(model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=16, intermediate_size=24,
              num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4, vocab_size=32, hidden_act="silu",
              rms_norm_eps=1e-5, rope_theta=1e4, max_position_embeddings=64, tie_word_embeddings=False, eos_token_id=[1, 2],
              torch_dtype="float32", rope_scaling={"rope_type": "linear", "factor": 2.0})
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny llama in two shards."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("config")
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    values = {name: value.detach().numpy() for name, value in module.state_dict().items()}
    names = sorted(values)
    weight_map = {name: f"{'ab'[i % 2]}.safetensors" for i, name in enumerate(names)}
    for shard in "ab":
        (folder / f"{shard}.safetensors").write_bytes(
            save({n: values[n] for n in names if weight_map[n].startswith(shard)}, {"format": "pt"}))
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def check_folder(folder: Path) -> bool:
    """Whether the model of the folder opens, is built and bound; then every parameter is its own tensor's values."""

    def opened():
        source = open_source(folder)
        module = build(source.config)
        return source, source.bind(stored_shapes(module), tied(module)), source.text()

    found = loaded(opened)
    if found is None:
        return False
    source, bindings, _ = found
    assert json.dumps(source.given_config()) == json.dumps(json.loads((folder / "config.json").read_bytes()))
    stored = {}
    for shard in "ab":
        stored |= dict(safetensors.deserialize((folder / f"{shard}.safetensors").read_bytes()))
    for parameter, binding in bindings.items():
        format, codes = source.load(binding)
        assert blocks.dequantize(format, codes).tobytes() == bytes(stored[binding.tensor]["data"]), parameter
        assert binding.tensor in (parameter, "model.embed_tokens.weight")
    return True


def test_the_untouched_folder_loads(model):
    assert check_folder(model)


@contextmanager
def replaced(path: Path, content: bytes):
    whole = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(whole)


@fuzzed(80)
@given(text=damaged_json(CONFIG))
def test_other_configurations(model, text):
    with replaced(model / "config.json", text):
        check_folder(model)


@fuzzed(50)
@given(data=st.data())
def test_other_indices(model, data):
    content = json.loads((model / INDEX).read_text())
    with replaced(model / INDEX, data.draw(damaged_json(content))):
        check_folder(model)


@fuzzed(80)
@given(data=st.data(), name=st.sampled_from(["config.json", INDEX]))
def test_damaged_json(model, data, name):
    whole = (model / name).read_bytes()
    with replaced(model / name, data.draw(st.one_of(damaged(whole, len(whole)), st.binary(max_size=60)))):
        check_folder(model)


_FOLDERS: dict[str, Path] = {}


def _scratch(tmp_path_factory, name: str) -> Path:
    if name not in _FOLDERS:
        _FOLDERS[name] = tmp_path_factory.mktemp(name)
    return _FOLDERS[name]
