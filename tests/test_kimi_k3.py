"""Kimi K3, scaled down as its files are published, against formulas written out for it (``tiny_k3``)."""

from __future__ import annotations

import json
from types import SimpleNamespace

import families
import numpy as np
import pytest
import tiny_k3
import torch
from safetensors.torch import load_file, save_file

import adaptc
from adaptc import artifact_format, driver
from adaptc.capture import build, capture, hooks, parts
from adaptc.capture.problems import Problems
from adaptc.errors import AdaptcError, UnusedError
from adaptc.ir.module import Program
from adaptc.sources import open_described, open_source

pytestmark = pytest.mark.usefixtures("kept_captures")
torch.set_num_threads(1)

TOKENS = families.tokens_of(41, 0)


@pytest.fixture(scope="module")
def k3(tmp_path_factory):
    """The folder, what was compiled of it, and what the formulas say."""
    place = tmp_path_factory.mktemp("k3")
    folder = tiny_k3.write(place / "model")
    reference = tiny_k3.Reference(folder)
    logits = reference.logits(TOKENS)
    report = families.compile_family(folder, place / "a.adapt")
    return SimpleNamespace(folder=folder, artifact=place / "a.adapt", report=report, reference=reference, logits=logits)


def close(got: np.ndarray, expected: np.ndarray) -> bool:
    return bool((np.abs(got - expected).max(-1) <= families.TOLERANCE * np.abs(expected).max(-1)).all())


def test_prefill_chunks_and_steps_are_the_formulas(k3):
    result = families.compare(k3.artifact, TOKENS, k3.logits, np.min(k3.reference.margins, axis=0), threads=2)
    assert result.same and result.worst <= families.TOLERANCE and result.near <= 0.05
    assert not [row.op for row in k3.report.coverage if row.status == "missing"]


def test_after_a_prefix_hit_the_bits_are_the_same(k3):
    """A prompt of 21 tokens has its first 20 found again by one that goes on otherwise, and by one that is longer."""
    with adaptc.load(k3.artifact, threads=1) as session:
        whole, engine = session.score(TOKENS), session.engine
        rows = np.empty((len(TOKENS) - 22, whole.shape[1]), np.float32)
        hits = []
        for start in (lambda: engine.add(TOKENS[:21], max_tokens=3), lambda: engine.score(TOKENS, rows, start=22)):
            start()
            while engine.active:
                engine.step()
            hits.append(engine.statistics.hit_tokens)
        assert hits == [0, 20] and np.array_equal(rows, whole[22:])


def test_what_is_kept_is_what_k3_keeps(k3):
    """A row of latent and shared key a token; a window and a matrix a head a request; experts in four bits."""
    program = Program.parse((k3.artifact / artifact_format.LAID_OUT).read_text())
    states = [(slot.spec.kind, *part) for slot in program.states().values() for part in slot.spec.parts]
    assert sorted(states) == sorted([("fixed", "window", 3, 3 * 64), ("fixed", "state", 4, 16 * 16)] * 3
                                    + [("rows", "latent", 1, 32 + 8)] * 2)
    experts = [weight.spec.format.name for name, weight in program.weights().items() if ".experts." in name]
    assert experts == ["mxfp4"] * 8
    assert not k3.report.conversion_errors and not k3.report.format_notes
    said = " ".join(k3.report.left_out)
    assert all(words in said for words in ("'mm_projector.proj.0.weight'", "layers.0.self_attention_res_proj.weight'",
                                           "before the first layer there is none"))


def test_gates_and_blocks_are_as_in_published_weights(k3):
    """Log-decays of a head's 128 columns have a norm near 17, and scores choose among several blocks."""
    norms = [np.sqrt((decay**2).mean() * 128) for decay in k3.reference.decays]
    assert all(14 < norm < 22 for norm in norms) and min(d.min() for d in k3.reference.decays) < -4
    rates = np.concatenate([k3.reference[f"layers.{i}.self_attn.A_log"] for i in range(3)])
    assert rates.shape == (24,) and (np.exp(rates[:4]) >= 0.62).all() and (np.exp(rates) <= 2.75).all()
    c = k3.reference.c
    assert c["num_hidden_layers"] % c["attn_res_block_size"] == 1 and c["num_hidden_layers"] > 2 * c["attn_res_block_size"]


def test_the_module_is_the_formulas_in_torch(k3):
    source = open_source(k3.folder)
    module = build.build(source.config)
    bound = source.bind(build.stored_shapes(module), {})
    module = type(module)._from_config(source.config, dtype=torch.float32).eval()
    module.load_state_dict({name: torch.from_numpy(source_values(source, one)) for name, one in bound.items()})
    with torch.inference_mode():
        assert close(module(torch.tensor([TOKENS])).logits[0].numpy(), k3.logits)


def source_values(source, binding) -> np.ndarray:
    from adaptc import blocks

    return blocks.dequantize(*source.load(binding))


def test_parts_that_do_otherwise_are_traced(monkeypatch):
    """Layers differ in how many blocks they read; their parts repeat, unless they compute something else."""
    from adaptc.models.kimi_k3 import KimiK3MLP

    module = build.build(described(tiny_k3.config()).config)
    repeats = {"1.self_attn": "0.self_attn", "2.self_attn": "0.self_attn", "2.mlp": "1.mlp", "3.mlp": "1.mlp",
               "4.self_attn": "3.self_attn", "4.mlp": "1.mlp"}
    for number, layer in enumerate(module.model.layers):
        for part in layer.modules():
            part.layer_idx = number
    original = KimiK3MLP.forward
    for odd in (None, 3):
        monkeypatch.setattr(KimiK3MLP, "forward", lambda self, x: original(self, x) * (2 if self.layer_idx == odd else 1))
        found = parts.alike(module)
        with hooks.installed(module, Problems()):
            proved = parts.proved(module, found, (13,))
        expected = {k: v for k, v in repeats.items() if k != f"{odd}.mlp"}
        assert {k.removeprefix("model.layers."): v.removeprefix("model.layers.") for k, v in proved.items()} == expected


def test_parameters_as_published():
    text = dict(hidden_size=7168, num_hidden_layers=93, vocab_size=163840, intermediate_size=33792, attn_res_block_size=12,
                num_attention_heads=96, num_key_value_heads=96, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
                qk_rope_head_dim=64, v_head_dim=128, num_experts=896, num_experts_per_token=16, moe_intermediate_size=3072,
                routed_expert_hidden_size=3584)
    full = [*range(4, 93, 4), 93]
    text["linear_attn_config"] = dict(
        full_attn_layers=full, kda_layers=[i for i in range(1, 94) if i not in full], gate_lower_bound=-5.0, head_dim=128,
        num_heads=96, short_conv_kernel_size=4, use_full_rank_gate=True)
    module = build.build(described(tiny_k3.config(**text)).config)
    count = sum(p.numel() for p in module.parameters())
    assert round(count / 1e9, 1) == 2779.5


def described(content):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(content))
        return open_described(place)


# ---- what is refused


def edited(k3, place, **text):
    """The folder with other keys of the text model."""
    for path in k3.folder.iterdir():
        (place / path.name).symlink_to(path)
    (place / "config.json").unlink()
    content = json.loads((k3.folder / "config.json").read_text())
    content["text_config"] |= text
    (place / "config.json").write_text(json.dumps(content))
    return place


def group(**changes):
    (one,) = tiny_k3.PACKED["config_groups"].values()
    return tiny_k3.PACKED | {"config_groups": {"group_0": one | {"weights": one["weights"] | changes}}}


@pytest.mark.parametrize("text, words", [
    ({"mla_use_nope": False}, "mla_use_nope is False"),
    ({"hidden_act": "silu"}, "hidden_act is 'silu'"),
    ({"num_expert_group": 2}, "num_expert_group is 2"),
    ({"linear_attn_config": tiny_k3.TEXT["linear_attn_config"] | {"kda_layers": [1, 2]}}, "neither or both"),
    ({"linear_attn_config": tiny_k3.TEXT["linear_attn_config"] | {"use_full_rank_gate": False}}, "use_full_rank_gate"),
    ({"quantization_config": group(group_size=16)}, "weights.type|group_size"),
    ({"quantization_config": group(num_bits=8)}, "weights.num_bits"),
    ({"quantization_config": group(rotation=1)}, "weights.rotation"),
    ({"quantization_config": tiny_k3.PACKED | {"format": "nvfp4-pack-quantized"}}, "compressed-tensors"),
    ({"quantization_config": tiny_k3.PACKED | {"transform_config": {"a": 1}}}, "transform_config"),
    ({"quantization_config": None}, r"weight_(packed|scale)' .* stored as U8"),
])
def test_what_is_no_k3_is_refused_by_name(k3, tmp_path, text, words):
    with pytest.raises(AdaptcError, match=words):
        driver.stage_text(edited(k3, tmp_path, **text), "captured")


def test_keys_that_nothing_reads_are_refused_by_name():
    one = dict(num_hidden_layers=1, loops=3, linear_attn_config=tiny_k3.TEXT["linear_attn_config"] | dict(
        kda_layers=[1], full_attn_layers=[], gate_upper_bound=1))
    with pytest.raises(UnusedError, match="'linear_attn_config.gate_upper_bound', 'loops'"):
        capture(described(tiny_k3.config(**one)))


def rewritten(k3, place, change):
    """The folder with other tensors, in one file."""
    tensors = {name: value for file in sorted(k3.folder.glob("*.safetensors")) for name, value in load_file(file).items()}
    folder = edited(k3, place)
    for path in folder.glob("model*"):
        path.unlink()
    save_file(change(tensors), folder / "model.safetensors", {"format": "pt"})
    return folder


def without(tensors, name):
    return {key: value for key, value in tensors.items() if key != name}


W1 = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight"
RATES = "language_model.model.layers.0.self_attn.A_log"


@pytest.mark.parametrize("change, words", [
    (lambda t: without(t, f"{W1}_scale"), "has no .*w1.weight_scale' beside it"),
    (lambda t: without(t, f"{W1}_packed"), "has no .*w1.weight_packed' beside it"),
    (lambda t: t | {f"{W1}_scale": t[f"{W1}_scale"][:-1].clone()}, r"expected \[N, K/2\] and \[N, K/32\]"),
    (lambda t: t | {W1: torch.zeros(64, 32)}, "both packed and as it is"),
    (lambda t: t | {f"{W1}_scale": torch.full_like(t[f"{W1}_scale"], 255)}, "contains NaN or infinity"),
    (lambda t: t | {RATES: torch.ones(8)}, "zeros should follow"),
    (lambda t: t | {RATES: torch.ones(3)}, "A_log' has the shape"),
    (lambda t: t | {"language_model.model.layers.1.self_attention_res_bias": torch.ones(3)}, "self_attention_res_bias"),
    (lambda t: without(t, "language_model.model.layers.1.self_attention_res_proj.weight"), "no tensor for"),
])
def test_tensors_that_do_not_fit_are_refused_by_name(k3, tmp_path, change, words):
    folder = rewritten(k3, tmp_path, change)
    with pytest.raises(AdaptcError, match=words):
        source = open_source(folder)
        module = build.build(source.config)
        bound = source.bind(build.stored_shapes(module), {})
        for name in bound:
            if "A_log" in name or ".layers.1.mlp.experts" in name:
                source.load(bound[name])


def test_a_checkpoint_of_floats_needs_no_pairs(k3, tmp_path):
    """Which matrices are packed the tensors say, whatever quantization_config covers."""

    def unpacked(tensors):
        for name in [name.removesuffix("_packed") for name in tensors if name.endswith(".weight_packed")]:
            values = k3.reference.expert(name.removeprefix("language_model.model.").removesuffix(".weight"))
            del tensors[f"{name}_packed"], tensors[f"{name}_scale"]
            tensors[name] = torch.from_numpy(values.astype(np.float32))
        return tensors

    plain, packed = open_source(rewritten(k3, tmp_path, unpacked)), open_source(k3.folder)
    for name in ("gate_up_proj", "down_proj"):
        whole = [source.tensors[f"model.layers.2.mlp.experts.{name}"] for source in (plain, packed)]
        assert [t.stored.name for t in whole] == ["f32", "mxfp4"]
        assert np.array_equal(*(t.values() for t in whole))
