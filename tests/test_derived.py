"""What is made of a model's description is kept: as made anew, without torch, and under a key of all it follows from."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import captured
import numpy as np
import pytest
import tiny_gguf
import tiny_models
from adaptc.capture import capture
from adaptc.content_cache import ContentCache
from adaptc.sources import derived, open_source
from adaptc.sources.derived import Derived
from adaptc.artifact_format import TextInfo
from adaptc.sources.text import TextBundle

COMPILE = """
import importlib.abc, json, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[3:]:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
import adaptc
adaptc.compile(sys.argv[1], output=sys.argv[2], page_size=4, max_step_tokens=32)
print(json.dumps([name for name in ("torch", "transformers") if name in sys.modules]))
"""


def compile_(model: Path, out: Path, cache: Path, *blocked: str) -> list[str]:
    """Which of torch and transformers a process imports that compiles ``model``, without those that are blocked."""
    done = subprocess.run([sys.executable, "-c", COMPILE, model, out, *blocked], check=True, stdout=subprocess.PIPE,
                          env=os.environ | {"ADAPTC_CACHE": str(cache)})
    return json.loads(done.stdout)


def files_of(artifact: Path) -> dict[str, str]:
    return {path.relative_to(artifact).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in artifact.rglob("*") if path.is_file()}


@pytest.fixture(params=("gguf", "folder"))
def model(request, tmp_path) -> Path:
    if request.param == "gguf":
        return tiny_gguf.write(tmp_path / "m.gguf", "gemma3", raw_metadata=VOCABULARY)
    return tiny_models.write(tmp_path / "m")


VOCABULARY = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.tokens": [*(chr(ord("A") + i) for i in range(tiny_gguf.VOCABULARY - 1)), "AB"],
    "tokenizer.ggml.token_type": [1] * tiny_gguf.VOCABULARY, "tokenizer.ggml.merges": ["A B"],
}


def test_a_hit_gives_the_same_artifact_without_torch(model, tmp_path):
    cache, kernels = tmp_path / "cache", ContentCache.named("kernels").folder
    cache.mkdir()
    if kernels is not None:  # which aren't looked at here
        kernels.mkdir(parents=True, exist_ok=True)
        (cache / "kernels").symlink_to(kernels)
    assert compile_(model, tmp_path / "cold.adapt", cache) == ["torch", "transformers"]
    assert compile_(model, tmp_path / "hit.adapt", cache, "torch", "transformers") == []
    expected = files_of(tmp_path / "cold.adapt")
    assert files_of(tmp_path / "hit.adapt") == expected and "tokenizer.json" in expected
    for path in (cache / "capture").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-1])
    assert compile_(model, tmp_path / "damaged.adapt", cache) == ["torch", "transformers"]
    assert files_of(tmp_path / "damaged.adapt") == expected


# ---- the key


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As in a process that hasn't imported transformers, with a cache of its own."""
    monkeypatch.setenv("ADAPTC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "transformers", raising=False)


def known(path: Path, **options) -> bool:
    """Whether something has been kept of the model's description; it is from now on."""
    entries = open_source(path, **options).derived
    found = entries.get("mark") is not None
    entries.put("mark", b"")
    return found


def test_values_of_weights_are_no_part_of_the_key(fresh, tmp_path):
    assert not known(tiny_gguf.write(tmp_path / "a.gguf"))
    assert known(tiny_gguf.write(tmp_path / "b.gguf", seed=1))


@pytest.mark.parametrize("changes", [
    {"metadata": {"rope.freq_base": 6000.0}}, {"raw_metadata": {"general.name": "x"}}, {"raw_metadata": VOCABULARY},
    {"tensors": {"output.weight": np.zeros((tiny_gguf.VOCABULARY, tiny_gguf.HIDDEN), np.float32)}},
    {"tensors": {"output_norm.weight": None}}, {"formats": ("q8_0",)}, {"architecture": "gemma3"},
    {"tensors": {"output_norm.weight": np.ones(tiny_gguf.HIDDEN + 32, np.float32)}},
], ids=str)  # fmt: skip
def test_all_that_a_gguf_file_says_is_in_the_key(fresh, tmp_path, changes):
    assert not known(tiny_gguf.write(tmp_path / "a.gguf"))
    assert not known(tiny_gguf.write(tmp_path / "b.gguf", **changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_models.write(tmp_path_factory.mktemp("models") / "m")


def _json(name: str, **changes):
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | changes))

    return edit


def _tensors(change):
    def edit(folder: Path) -> None:
        from safetensors.numpy import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return edit


@pytest.mark.parametrize("edit", [
    _json("config.json", rope_theta=7.0), _json("config.json", unknown_key=1), _json("tokenizer_config.json", x=1),
    _json("tokenizer.json", version="2"), lambda folder: (folder / "chat_template.jinja").write_text("x"),
    _tensors(lambda t: t.update(extra=np.zeros(3, np.float32))), _tensors(lambda t: t.pop("model.norm.weight")),
    _tensors(lambda t: t.update({"model.norm.weight": np.zeros(65, np.float32)})),
    _tensors(lambda t: t.update({"model.norm.weight": np.zeros(64, np.float16)})),
])  # fmt: skip
def test_all_that_a_folder_says_is_in_the_key(fresh, folder, tmp_path, edit):
    import shutil

    copy = shutil.copytree(folder, tmp_path / "m")
    assert not known(folder) and known(copy)
    edit(copy)
    assert not known(copy)


def test_own_code_of_a_folder_is_in_the_key_if_it_may_run(fresh, folder, tmp_path):
    import shutil

    copy = shutil.copytree(folder, tmp_path / "m")
    (copy / "deeper").mkdir()
    code = copy / "deeper" / "modeling_mine.py"
    code.write_text("x = 1")
    assert not known(copy) and not known(copy, trust_remote_code=True)
    code.write_text("x = 2")
    assert known(copy) and not known(copy, trust_remote_code=True)
    _json("config.json", auto_map={"AutoModelForCausalLM": "someone/else--modeling.Model"})(copy)
    assert not known(copy) and known(copy)
    assert not known(copy, trust_remote_code=True) and not known(copy, trust_remote_code=True)


def test_code_and_versions_are_in_the_key(fresh, tmp_path, monkeypatch):
    path = tiny_gguf.write(tmp_path / "m.gguf")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "inner.py").write_text("x = 1")
    (tmp_path / "alone.py").write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(derived, "CODE", (*derived.CODE, "mine", "alone"))
    assert not known(path) and known(path)
    (tmp_path / "mine" / "inner.py").write_text("x = 2")
    assert not known(path) and known(path)
    (tmp_path / "alone.py").write_text("x = 2")
    assert not known(path) and known(path)
    monkeypatch.setattr(derived, "version", lambda name: "another" if name == "torch" else "1")
    assert not known(path) and known(path)


@pytest.mark.parametrize("group", derived.EXTENSIONS)
def test_packages_that_take_part_are_in_the_key(fresh, tmp_path, monkeypatch, group):
    path = tiny_gguf.write(tmp_path / "m.gguf")
    assert not known(path)
    (tmp_path / "vendor_ops.py").write_text("ROWS = []")
    (tmp_path / "vendor_ops-1.dist-info").mkdir()
    (tmp_path / "vendor_ops-1.dist-info" / "METADATA").write_text("Name: vendor-ops\nVersion: 1\n")
    (tmp_path / "vendor_ops-1.dist-info" / "entry_points.txt").write_text(f"[{group}]\nvendor = vendor_ops:ROWS\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert not known(path) and known(path)
    (tmp_path / "vendor_ops.py").write_text("ROWS = [ ]")
    assert not known(path) and known(path)


def test_nothing_is_kept_where_classes_may_have_been_changed(fresh, tmp_path, monkeypatch):
    path = tiny_gguf.write(tmp_path / "m.gguf")
    assert not known(path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert not known(path)


def test_nothing_is_kept_of_a_model_in_memory(fresh):
    entries = Derived.of(None)
    entries.put("mark", b"")
    assert entries.get("mark") is None


# ---- entries


def test_a_program_is_kept_with_the_values_that_it_follows_from(fresh, tmp_path, monkeypatch):
    """Capture looks at few values of weights, such as rotary factors or tables that should be equal."""
    first, same, other = (tiny_gguf.write(tmp_path / f"{i}.gguf", formats=("f32",), seed=seed)
                          for i, seed in enumerate((0, 0, 1)))
    made = []

    def run(source):
        made.append(source.name)
        source.tensors["output_norm.weight"].values()
        return captured.captured()

    import adaptc.capture.pipeline

    sys.modules.pop("transformers", None)  # which that may have imported
    monkeypatch.setattr(adaptc.capture.pipeline, "capture", run)
    texts = [capture(open_source(path)).text() for path in (first, same, other, same)]
    assert made == ["0.gguf", "2.gguf", "1.gguf"] and len(set(texts)) == 1  # one entry a description: the latest


def test_what_was_waived_is_kept_too(fresh, tmp_path, monkeypatch):
    """It is noted in the artifact, by name, while capture asks about it."""
    import adaptc.capture.pipeline

    path = tiny_gguf.write(tmp_path / "m.gguf")
    sys.modules.pop("transformers", None)
    monkeypatch.setattr(adaptc.capture.pipeline, "capture",
                        lambda source: (source.waiver.covers("llama.new"), captured.captured())[1])
    for _ in range(2):
        source = open_source(path, waive=["llama.*"])
        capture(source)
        assert source.waiver.names == ("llama.new",)
    assert open_source(path, waive=["llama.n*"]).derived.get("program") is None


def test_rotary_factors_count_as_looked_at(tmp_path):
    path = tiny_gguf.write(tmp_path / "m.gguf", tensors={"rope_freqs.weight": np.ones(tiny_gguf.HEAD // 2, np.float32)})
    source = open_source(path)
    source.given_config()
    assert [name for name, tensor in source.stored().items() if tensor.looked_at] == ["rope_freqs.weight"]


def test_tables_that_must_be_equal_count_as_looked_at(folder, tmp_path):
    import shutil

    copy = shutil.copytree(folder, tmp_path / "m")
    _tensors(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))(copy)
    source = open_source(copy)
    names = {name: tensor.shape for name, tensor in source.tensors.items() if name != "lm_head.weight"}
    source.bind(names, {"lm_head.weight": "model.embed_tokens.weight"})
    looked_at = {name for name, tensor in source.stored().items() if tensor.looked_at}
    assert looked_at == {"lm_head.weight", "model.embed_tokens.weight"}


def test_text_survives_being_kept():
    for text in (TextBundle(), TextBundle(b'{"a":\n1}', "{{ x }}\n", TextInfo(1, True, (2, 5), {"eos_token": "</s>"}))):
        again = TextBundle.from_bytes(text.to_bytes())
        assert again == text and list(again.info.special_tokens) == list(text.info.special_tokens)
