"""Bad input as its owner meets it: what is refused, by which kind of error, and what the sentence must name."""

from __future__ import annotations

import json
import os
import tempfile

os.environ.setdefault("HF_MODULES_CACHE", tempfile.mkdtemp(prefix="adaptc-tests-modules-"))

import struct
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tiny_gguf
import tiny_models
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import adaptc
from adaptc.capture import capture
from adaptc.cli import main
from adaptc.errors import (AdapterError, DamagedFileError, DynamicError, InputError, LocalityError, OptionError,
                           PickleError, UnsupportedError, UnusedError)
from adaptc.sources import open_source


@pytest.fixture
def model(tmp_path) -> Path:
    return tiny_models.write(tmp_path / "model", num_hidden_layers=1)


def test_heads_of_a_width_that_kernels_lack(tmp_path):
    model = tiny_models.write(tmp_path / "m", num_hidden_layers=1, head_dim=10)
    with pytest.raises(UnsupportedError, match="attention.*kernels take widths of keys and values that are multiples of 4"):
        adaptc.compile(model, "cpu", output=tmp_path / "a.adapt")


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def adaptc_(*args, code: int = 0):
    done = CliRunner().invoke(main, [str(a) for a in args])
    assert done.exit_code == code, (done.output, done.exception)
    return done


# ---- what nothing uses, and --waive


def test_an_unread_key_names_its_file_and_the_way_on(model):
    edit(model / "config.json", attention_temperature=0.7, extra={"a": 1, "b": 2})
    done = adaptc_("inspect", model, code=2)
    assert done.stderr.startswith("adaptc: [E0104] nothing in the model's code reads 'attention_temperature'")
    for words in ("model (config.json)", "--waive attention_temperature --waive extra.a --waive extra.b"):
        assert words in done.stderr


def test_what_is_waived_is_recorded_by_its_own_name(model, tmp_path):
    edit(model / "config.json", attention_temperature=0.7, extra={"a": 1, "b": 2})
    waive = ("--waive", "attention_temperature", "--waive", "extra.*")
    report = json.loads(adaptc_("compile", model, "-o", tmp_path / "a.adapt", *waive, "--json").stdout)
    names = ["attention_temperature", "extra.a", "extra.b"]
    assert report["options"]["waive"] == names
    assert json.loads((tmp_path / "a.adapt/manifest.json").read_text())["options"]["waive"] == names
    assert json.loads(adaptc_("inspect", tmp_path / "a.adapt", "--json").stdout)["summary"]["options"]["waive"] == names
    assert json.loads(adaptc_("inspect", model, *waive, "--json").stdout)["summary"]["options"]["waive"] == names
    adaptc_("coverage", model, *waive)
    # the same from Python; one name needs no list
    edit(model / "config.json", extra=None)
    found = adaptc.compile(model, output=tmp_path / "b.adapt", waive="attention_temperature")
    assert found.options["waive"] == ("attention_temperature",)


@pytest.mark.parametrize(("name", "words"), [
    ("rms_norm_eps", "needs no waiver"),  # is read
    ("use_cache", "needs no waiver"),  # is known to mean nothing
    ("model.norm.weight", "needs no waiver"),
    ("*.weight", "needs no waiver"),
    ("atention_temperature", "no configuration key, metadata key or tensor of that name"),
])
def test_a_waiver_of_what_is_used_or_absent_is_an_error(model, name, words):
    edit(model / "config.json", attention_temperature=0.7)
    done = adaptc_("inspect", model, "--waive", "attention_temperature", "--waive", name, code=2)
    assert f"[E0300] --waive {name}: " in done.stderr and words in done.stderr


def test_bad_waivers(model, tmp_path):
    with pytest.raises(OptionError, match="waive must be names"):
        adaptc.compile(model, output=tmp_path / "a.adapt", waive=[""])
    (tmp_path / "x.mlir").write_text("module {}")
    assert "no model is opened" in adaptc_("opt", tmp_path / "x.mlir", "--to", "fused", "--waive", "x", code=2).stderr


def test_tensors_can_be_waived_whatever_they_hold(model):
    path = model / "model.safetensors"
    save_file({**load_file(path), "extra.bias": torch.zeros(3), "extra.count": torch.zeros(3, dtype=torch.int16)}, path,
              {"format": "pt"})
    with pytest.raises(UnsupportedError, match="'extra.count' in model.safetensors is stored as I16"):
        open_source(model)
    with pytest.raises(UnusedError, match="no use for 'extra.bias', which model.safetensors holds.*--waive extra.bias"):
        capture(open_source(model, waive=["extra.count"]))
    source = open_source(model, waive=["extra.*"])
    capture(source)
    assert source.waiver.names == ("extra.bias", "extra.count")


def test_metadata_can_be_waived(tmp_path):
    path = tiny_gguf.write(tmp_path / "m.gguf", raw_metadata={"other.key": 1})
    with pytest.raises(UnusedError, match="these metadata keys of m.gguf mean: other.key.*--waive other.key"):
        open_source(path).config
    source = open_source(path, waive=["other.key"])
    capture(source)
    assert source.waiver.names == ("other.key",)
    with pytest.raises(OptionError, match="--waive llama.block_count: m.gguf has that"):
        capture(open_source(path, waive=["other.key", "llama.block_count"]))


# ---- adapters and pickles


@pytest.mark.parametrize("beside", [False, True])
def test_a_folder_of_an_adapter(model, tmp_path, beside):
    folder = model if beside else tmp_path / "lora"
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base", "peft_type": "LORA"}')
    save_file({"lora_A.weight": torch.zeros(2, 2)}, folder / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"adapter \(adapter_config.json\) for org/base.*merge_and_unload"):
        open_source(folder)


@pytest.mark.parametrize(("kind", "error", "words"), [
    ("adapter", AdapterError, "m.gguf holds an adapter.*llama-export-lora"),
    ("mmproj", UnsupportedError, "its general.type is 'mmproj'"),
])
def test_a_gguf_file_that_is_no_model(tmp_path, kind, error, words):
    path = tiny_gguf.write(tmp_path / "m.gguf", raw_metadata={"general.type": kind})
    with pytest.raises(error, match=words):
        open_source(path)


class Bomb:
    """Runs code when unpickled."""

    def __reduce__(self):
        return os.abort, ()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "model.pth",
                                  "consolidated.00.pth", "last.ckpt"])
@pytest.mark.parametrize("config", [True, False])
def test_pickled_weights_are_named_and_never_loaded(model, name, config):
    (model / "model.safetensors").unlink()
    torch.save(Bomb(), model / name)
    if not config:
        (model / "config.json").unlink()
    for what in (model, model / name):
        with pytest.raises(PickleError, match=rf"{name}( holds pickled weights)?, which can hold code.*save_pretrained"):
            open_source(what)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_weights_under_the_name_of_safetensors(model, zipped):
    torch.save(Bomb(), model / "model.safetensors", _use_new_zipfile_serialization=zipped)
    with pytest.raises(PickleError, match="model.safetensors holds pickled weights, whatever its name says"):
        open_source(model)


def test_safetensors_are_taken_where_both_lie(model):
    torch.save(Bomb(), model / "pytorch_model.bin")
    source = open_source(model)
    assert {tensor.file for tensor in source.tensors.values()} == {"model.safetensors"}
    assert "pytorch_model.bin" not in source.hashes


# ---- code that can't be captured, in files that come with the model

CODE = '''
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP


class OwnConfig(LlamaConfig):
    model_type = "own"


def helper(x):
    {helper}
    return x


class OwnMLP(LlamaMLP):
    def __init__(self, config):
        super().__init__(config)
        self.conv = torch.nn.Conv1d(config.hidden_size, config.hidden_size, 3, padding=1)

    def forward(self, x):
        {body}
        return super().forward(helper(x))


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = OwnMLP(config)
'''


@pytest.fixture
def own(tmp_path):
    """A writer of model folders whose own code has the given lines in a forward, or in a function that it calls."""

    def write(body: str = "pass", helper: str = "pass") -> Path:
        from transformers import AutoConfig, LlamaForCausalLM

        folder = tmp_path / "own"
        config = AutoConfig.for_model("llama", **tiny_models.LLAMA | {"num_hidden_layers": 1})
        module = LlamaForCausalLM(config)
        for layer in module.model.layers:
            layer.mlp.conv = torch.nn.Conv1d(64, 64, 3)
        module.save_pretrained(folder)
        (folder / "modeling_own.py").write_text(CODE.format(body=body, helper=helper))
        edit(folder / "config.json", model_type="own", architectures=["OwnForCausalLM"],
             auto_map={"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"})
        return folder

    return write


def line_of(folder: Path, code: str) -> int:
    return next(n for n, line in enumerate((folder / "modeling_own.py").read_text().splitlines(), 1)
                if line.strip() == code)


DYNAMIC = {
    "branch": "if x.sum() > 0: x = -x",
    "item": "x = x * x.sum().item()",
    "item_branch": "x = x if x.max().item() < 3 else x / 2",
    "nonzero": "x = x + (x[0].sum(-1) > 0).nonzero().sum()",
    "selection": "x = x + x[0][x[0].sum(-1) > 0].sum()",
    "while": "while x.abs().max() > 1: x = x / 2",
    "range": "for _ in range(int(x[0, 0, 0])): x = x + 1",
    "assertion": "assert not torch.isnan(x).any()",
    "numpy": "x = x + float(x.detach().numpy().sum())",
    "length": "if x.shape[1] > 10: x = x * 2",
    "parity": "if x.shape[1] % 2: x = x * 2",
    "tokens": "x = torch.stack([t * 2 for t in x[0]])[None]",
}


@pytest.mark.parametrize(("kind", "where"), [(kind, ("body", "helper")[i % 2]) for i, kind in enumerate(DYNAMIC)])
def test_control_flow_that_can_not_be_captured(own, kind, where, capfd):
    folder = own(**{where: DYNAMIC[kind]})
    with pytest.raises(DynamicError) as caught:
        capture(open_source(folder, trust_remote_code=True))
    line = line_of(folder, DYNAMIC[kind])
    assert f"module model.layers.0.mlp (modeling_own.py:{line}: {DYNAMIC[kind]})" in str(caught.value)
    assert caught.value.hint
    out, err = capfd.readouterr()
    assert "def forward" not in out + err, "torch prints the graph so far"


def test_code_that_fails_is_shown_where_it_fails(own):
    folder = own(helper='raise ValueError("not today")')
    with pytest.raises(adaptc.errors.CaptureError, match=r"modeling_own.py:\d+: raise ValueError.*not today"):
        capture(open_source(folder, trust_remote_code=True))
    text = (folder / "modeling_own.py").read_text()
    (folder / "modeling_own.py").write_text(text.replace("        for layer in", "        config.absent\n        for layer in"))
    with pytest.raises(InputError, match=r"no own model can be built.*absent.*\(modeling_own.py:\d+: config.absent\)"):
        capture(open_source(folder, trust_remote_code=True))


MIXING = {
    "mean": ("x = x + x.mean(1, keepdim=True)", "reduce"),
    "cumsum": ("x = x.cumsum(1)", "aten.cumsum"),
    "roll": ("x = x.roll(1, 1)", "aten.roll"),
    "shift": ("x = torch.cat((x[:, :1], x[:, :-1]), 1)", "aten.slice"),
    "flip": ("x = x.flip(1)", "aten.flip"),
    "convolution": ("x = x + conv(x)", "aten.conv"),
}


@pytest.mark.parametrize("kind", MIXING)
def test_code_across_tokens_names_operator_and_line(own, kind):
    code, operator = MIXING[kind]
    if kind == "convolution":
        code = "x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)"
        folder = own(body=code)
    else:
        folder = own(helper=code)
    with pytest.raises(adaptc.errors.CaptureError) as caught:
        capture(open_source(folder, trust_remote_code=True))
    assert operator in str(caught.value)
    place = "model.layers.0.mlp" + (".conv" if kind == "convolution" else "")
    of_program = isinstance(caught.value, LocalityError)  # found in the program, whose locations have no code
    assert of_program == (kind == "mean")
    line = f"modeling_own.py:{line_of(folder, code)}" + ("" if of_program else f": {code}")
    assert f"module {place} ({line})" in str(caught.value), caught.value


# ---- damaged and unreadable files


def rewritten(path: Path, header: dict | bytes, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("header", [
    {"a": entry(0, 16, [4]), "b": entry(8, 24, [4])},  # overlapping
    {"a": entry(0, 16, [4]), "b": entry(20, 24, [1])},  # a hole between
    {"a": entry(4, 24, [5])},  # a hole at the start
    {"a": entry(0, 20, [5])},  # bytes that are no tensor's
    {"a": entry(0, 24, [5])},  # another size than the shape's
    {"a": entry(0, 24, [2**62, 4])},  # sizes that overflow
    {"a": entry(0, 2**64 - 8, [6])},
    {"a": entry(24, 0, [6])},
    {"a": entry(0, 24, [6], "F99")},
    b'{"a":{"dtype":"F32","shape":[6],"data_offsets":[0,24]},"a":{"dtype":"F32","shape":[3,2],"data_offsets":[0,24]}}',
    b"[" * 100000,
])
def test_hostile_safetensors_headers(model, header):
    rewritten(model / "model.safetensors", header, bytes(24))
    with pytest.raises(DamagedFileError, match="model.safetensors"):
        open_source(model)


@pytest.mark.parametrize("size", [2**63, 2**64 - 1, 2**40, 100_000_001])
def test_safetensors_headers_longer_than_the_file(model, size):
    (model / "model.safetensors").write_bytes(size.to_bytes(8, "little") + b'{"a":1}')
    with pytest.raises(DamagedFileError, match="model.safetensors is damaged or incomplete"):
        open_source(model)


def test_a_tensor_in_two_shards(model):
    tensors = load_file(model / "model.safetensors")
    first = min(tensors)
    save_file(tensors, model / "x.safetensors", {"format": "pt"})
    save_file({first: tensors[first]}, model / "y.safetensors", {"format": "pt"})
    (model / "model.safetensors").unlink()
    index = {"weight_map": {name: "x.safetensors" for name in tensors} | {"other": "y.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="y.safetensors of model lacks the tensor 'other'"):
        open_source(model)
    save_file({first: tensors[first], "other": tensors[first].clone()}, model / "y.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=f"the tensor '{first}' of model is in x.safetensors and y.safetensors"):
        open_source(model)


@pytest.mark.parametrize("text", ['{"model_type": "llama", "hidden_size": 1, "hidden_size": 64}',
                                  '{"model_type": "llama", "rope_scaling": {"factor": 1, "factor": 2}}', "[1]", "\ufeff{}",
                                  '{"model_type": "llama"', "[" * 100000])
def test_bad_json(model, text):
    (model / "config.json").write_text(text)
    with pytest.raises(DamagedFileError, match="config.json (is not valid JSON|holds list)"):
        open_source(model)


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer"])
@pytest.mark.parametrize("count", [10**6, 2**62, 1e30])
def test_more_layers_than_the_files_can_hold(model, key, count):
    kind = {"num_hidden_layers": "llama", "n_layer": "gpt2"}[key]
    (model / "config.json").write_text(json.dumps({"model_type": kind, key: count}))
    with pytest.raises(InputError, match=f"says {key} = .*, and its files hold 11 tensors|no valid configuration"):
        open_source(model).config


@pytest.mark.parametrize("changes", [
    {"num_attention_heads": 0}, {"hidden_size": -1}, {"vocab_size": 2**40, "hidden_size": 2**20}, {"head_dim": 2**60},
    {"hidden_act": "wobble"}, {"rope_scaling": {"rope_type": "wobble"}},
])
def test_configurations_that_make_no_module(model, changes):
    edit(model / "config.json", **changes)
    with pytest.raises(InputError, match="no valid configuration|no llama model can be built from the configuration|"
                       "configuration and the tensors don't"):
        capture(open_source(model))


@pytest.mark.parametrize(("find", "change", "words"), [
    (b"token_embd.weight", (4, struct.pack("<QQ", 2**62, 4)), "takes .* bytes"),
    (b"token_embd.weight", (4, struct.pack("<QQ", 0, 4)), "holds no elements"),
    (b"token_embd.weight", (0, struct.pack("<I", 5)), "5 dimensions, expected 1 to 4"),
    (b"token_embd.weight", (-25, struct.pack("<Q", 2**64 - 1)), "takes 18446744073709551615 bytes"),
    (b"blk.0.attn_q.weight", (24, struct.pack("<Q", 2**63)), "expected byte"),
    (b"blk.0.attn_q.weight", (24, struct.pack("<Q", 0)), "expected byte"),  # over another tensor
])
def test_hostile_gguf_tables(tmp_path, find, change, words):
    path = tiny_gguf.write(tmp_path / "m.gguf", formats=("f32",))
    data = bytearray(path.read_bytes())
    at = data.index(find) + len(find) + change[0]
    data[at : at + len(change[1])] = change[1]
    path.write_bytes(data)
    with pytest.raises(InputError, match=f"m.gguf is damaged or incomplete: .*{words}"):
        open_source(path)


@pytest.mark.parametrize("count", [8, 16])
@pytest.mark.parametrize("number", [2**31, 2**40, 2**64 - 1])
def test_counts_that_a_gguf_file_can_not_hold(tmp_path, count, number):
    path = tiny_gguf.write(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    data[count : count + 8] = number.to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(DamagedFileError, match="m.gguf is damaged or incomplete: .* don't fit"):
        open_source(path)


def test_things_of_a_gguf_file_that_occur_twice(tmp_path):
    path = tiny_gguf.write(tmp_path / "m.gguf", raw_metadata={"general.name": "a", "general.nome": "b"})
    whole = path.read_bytes()
    for old, new, words in ((b"general.nome", b"general.name", "metadata key 'general.name' occurs twice"),
                            (b"blk.1.attn_q.weight", b"blk.0.attn_q.weight", "tensor 'blk.0.attn_q.weight' occurs twice")):
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(DamagedFileError, match=words):
            open_source(path)


def test_links_are_followed_and_broken_ones_named(model, tmp_path):
    """The hub's own cache is a folder of links into another one."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in model.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert open_source(snapshot).hashes == open_source(model).hashes
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match="snapshot has neither model.safetensors nor"):
        open_source(snapshot)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(snapshot / "config.json")
    with pytest.raises(InputError, match="has no config.json"):
        open_source(snapshot)


@contextmanager
def as_nobody():
    """Root may read everything; within the block this process isn't root."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("what", ["config.json", "model.safetensors", "tokenizer.json", ".", "m.gguf"])
def test_files_that_may_not_be_read(what):
    with tempfile.TemporaryDirectory() as outside:  # pytest's own folders are closed to others altogether
        folder = tiny_models.write(Path(outside) / "model", num_hidden_layers=1)
        tiny_gguf.write(folder / "m.gguf")
        opened = folder / what if what == "m.gguf" else folder
        open_source(opened).text()
        for path in (Path(outside), folder):
            path.chmod(0o755)
        (folder / what).chmod(0)
        with as_nobody(), pytest.raises(InputError, match=r"can't be read|no tokenizer"):
            open_source(opened).text()
        folder.chmod(0o755)


def test_a_model_without_tokenizer_runs_on_ids(model, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    adaptc.compile(model, output=tmp_path / "a.adapt")
    assert "tokenizer" in adaptc_("run", tmp_path / "a.adapt", "Hi", code=2).stderr
    with adaptc.load(tmp_path / "a.adapt", threads=1) as session:
        assert np.isfinite(session.score([3, 4, 5])).all()


def test_goldens_that_can_not_be_written(model, tmp_path):
    (tmp_path / "g.safetensors").mkdir()
    for output in (tmp_path / "absent" / "g.safetensors", tmp_path / "g.safetensors"):
        assert "[E08" in adaptc_("golden", model, "-o", output, "--steps", 1, code=2).stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g.safetensors", "model"]


def test_golden_and_verify_run_a_folders_code_only_when_trusted(own, tmp_path):
    folder = own()
    tiny_models._tokenizer(folder)
    artifact, golden = tmp_path / "a.adapt", tmp_path / "g.safetensors"
    adaptc_("golden", folder, "-o", golden, "--steps", 2, code=2)
    adaptc_("golden", folder, "-o", golden, "--steps", 2, "--trust-remote-code")
    adaptc_("compile", folder, "-o", artifact, "--trust-remote-code", "--goldens", golden)
    args = ("verify", artifact, "--level", "model", "--against", folder)
    assert "trust-remote-code" in adaptc_(*args, code=2).stderr
    adaptc_(*args, "--trust-remote-code")
