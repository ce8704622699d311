"""A configuration alone: sizes at full size against what is published, layers traced once a kind, bad files refused."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from click.testing import CliRunner
from families import EXPERTS, HEADS

from adaptc import blocks, driver
from adaptc.capture import build, capture_module, repeat
from adaptc.cli import main
from adaptc.errors import AdaptcError, InputError, UnsupportedError, UnusedError
from adaptc.formats import FORMATS
from adaptc.report import sizes_text
from adaptc.sources import open_described, open_source
from adaptc.sources.quantization import quantization

torch.set_num_threads(1)

FP8 = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])
MXFP4 = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                                           "model.embed_tokens", "lm_head"])
PACKED = dict(quant_method="compressed-tensors", format="pack-quantized", ignore=["lm_head", "re:.*self_attn.*"],
              config_groups={"group_0": {"targets": ["Linear"], "weights": {
                  "num_bits": 4, "type": "int", "group_size": 32, "strategy": "group", "symmetric": True}}})

LLAMA_8B = dict(model_type="llama", hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
                num_hidden_layers=32, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
                tie_word_embeddings=False, torch_dtype="bfloat16")
LLAMA_405B = LLAMA_8B | dict(hidden_size=16384, intermediate_size=53248, num_attention_heads=128, num_hidden_layers=126)
QWEN3_235B = dict(model_type="qwen3_moe", hidden_size=4096, num_attention_heads=64, num_key_value_heads=4, head_dim=128,
                  num_hidden_layers=94, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536,
                  vocab_size=151936, tie_word_embeddings=False, norm_topk_prob=True)
GPT_OSS_120B = dict(model_type="gpt_oss", hidden_size=2880, intermediate_size=2880, num_attention_heads=64,
                    num_key_value_heads=8, head_dim=64, num_hidden_layers=36, num_local_experts=128,
                    num_experts_per_tok=4, sliding_window=128, vocab_size=201088, tie_word_embeddings=False,
                    layer_types=["sliding_attention", "full_attention"] * 18, quantization_config=MXFP4)
DEEPSEEK_V3 = dict(model_type="deepseek_v3", hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048,
                   num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128, n_routed_experts=256,
                   n_shared_experts=1, num_experts_per_tok=8, n_group=8, topk_group=4, first_k_dense_replace=3,
                   q_lora_rank=1536, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
                   vocab_size=129280, tie_word_embeddings=False, quantization_config=FP8)

SMALL = HEADS | dict(model_type="llama", num_hidden_layers=4)


def config(folder, content) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


def module_of(model_type: str, **keys):
    from transformers import AutoConfig

    made = AutoConfig.for_model(model_type, **keys)
    return build.build(made), made


# ---- published sizes

@pytest.mark.parametrize(("keys", "billions", "digits"), [
    (LLAMA_8B, 8.03, 2), (LLAMA_405B, 405.9, 1), (QWEN3_235B, 235, 0), (GPT_OSS_120B, 116.8, 1), (DEEPSEEK_V3, 671, 0),
])
def test_all_parameters_as_published(keys, billions, digits):
    keys = {key: value for key, value in keys.items() if key != "quantization_config"}
    module, _ = module_of(**keys)
    assert all(p.is_meta for p in module.parameters())
    assert round(sum(p.numel() for p in module.parameters()) / 1e9, digits) == billions


@pytest.mark.parametrize(("keys", "total", "active", "digits", "token"), [
    (LLAMA_8B, 8.03, 7.50, 2, 32 * 2 * 8 * 128 * 2),
    (GPT_OSS_120B, 116.8, 5.1, 1, 36 * 2 * 8 * 64 * 2),
    (DEEPSEEK_V3, 671, 37, 0, 61 * (512 + 64) * 2),
])
def test_parameters_that_a_token_reads_as_published(tmp_path, keys, total, active, digits, token):
    found = driver.sizes(config(tmp_path, keys))
    assert (round(found.parameters / 1e9, digits), round(found.active / 1e9, digits)) == (total, active)
    assert found.cache_token == token
    assert not found.coverage.missing
    attention = [r.count for r in found.profile if r.tokens == 1 and r.op in ("attention", "latent_attention")]
    assert sum(attention) == keys["num_hidden_layers"]


def test_a_window_bounds_what_a_request_keeps(tmp_path):
    found = driver.sizes(config(tmp_path, GPT_OSS_120B), max_context=4096, page_size=16, kv="f16")
    row = 2 * 8 * 64 * 2
    assert found.cache_request == 18 * row * 4096 + 18 * row * (128 + 16)


def test_files_that_are_quantised_are_smaller_and_nothing_else_changes(tmp_path):
    keys = EXPERTS | dict(model_type="qwen3_moe", num_hidden_layers=3, num_experts=4, hidden_size=128,
                          moe_intermediate_size=128)
    plain = driver.sizes(config(tmp_path / "plain", keys))
    packed = driver.sizes(config(tmp_path / "packed", keys | dict(quantization_config=PACKED)))
    assert (plain.parameters, plain.active, plain.bodies) == (packed.parameters, packed.active, packed.bodies)
    assert plain.weights == 2 * plain.parameters
    experts, router = 3 * 4 * 3 * 128 * 128, 3 * 4 * 128
    assert plain.weights - packed.weights == experts * 2 - (experts // 2 + experts // 32 * 2)
    decode = [sum(r.bytes for r in found.profile if r.op == "expert_linear" and r.tokens == 1) for found in (plain, packed)]
    assert decode[1] < decode[0] / 3 and router < experts


# ---- formats

@pytest.mark.parametrize("name", sorted(FORMATS))
def test_published_bytes_are_those_of_files(name):
    format = FORMATS[name]
    assert format.published_bytes((3, 8, 512)) == blocks.stored_bytes(format, (3, 8, 512))


def test_groups_of_two_dimensions_and_ragged_ones():
    fp8 = quantization(FP8, "m").format
    assert fp8.published_bytes((256, 384)) == 256 * 384 + 2 * 3 * 4
    assert fp8.published_bytes((130, 130)) == 130 * 130 + 2 * 2 * 4
    assert quantization(FP8 | dict(scale_fmt="ue8m0"), "m").format.published_bytes((128, 128)) == 128 * 128 + 1
    assert quantization(PACKED, "m").format.published_bytes((4, 64)) == 4 * (32 + 2 * 2)


def test_which_modules_are_left():
    packed, mxfp4 = quantization(PACKED, "m"), quantization(MXFP4, "m")
    assert packed.covers("model.layers.0.mlp.experts") and not packed.covers("model.layers.0.self_attn.q_proj")
    assert mxfp4.experts_only and not mxfp4.covers("model.layers.7.self_attn.q_proj") and not mxfp4.covers("lm_head")


def group(**changes):
    (name, one), = PACKED["config_groups"].items()
    return PACKED | dict(config_groups={name: one | dict(weights=one["weights"] | changes)})


@pytest.mark.parametrize(("stated", "field"), [
    ({"quant_method": "awq", "bits": 4}, "quant_method"),
    (FP8 | {"weight_block_size": [64, 64]}, "weight_block_size"),
    (FP8 | {"fmt": "e5m2"}, "fmt"),
    (FP8 | {"rotation": True}, "rotation"),
    ({"quant_method": "fp8", "fmt": "e4m3"}, "weight_block_size"),
    (MXFP4 | {"block": 16}, "block"),
    (PACKED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    (PACKED | {"config_groups": {}}, "config_groups"),
    (PACKED | {"config_groups": {"a": "Linear"}}, "config_groups"),
    (PACKED | {"format": "marlin-24"}, "format"),
    (group(num_bits=8), "weights.num_bits"),
    (group(type="float"), "weights.type"),
    (group(group_size=None), "weights.group_size"),
    (group(actorder="group"), "weights.actorder"),
    ("int4", "quant_method"),
    ({"quant_method": ["fp8"]}, "quant_method"),
])
def test_unknown_quantisation_is_refused_by_field(tmp_path, stated, field):
    with pytest.raises(UnsupportedError, match=field.replace(".", r"\.")):
        open_described(config(tmp_path, SMALL | dict(quantization_config=stated)))


# ---- layers traced once a kind

DEEP = {
    "llama": dict(HEADS, num_hidden_layers=5),
    "qwen3_moe": dict(EXPERTS, num_hidden_layers=6, num_experts=4, mlp_only_layers=[0]),
    "gpt_oss": dict(HEADS, num_hidden_layers=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    "gpt2": dict(vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=64),
}


@pytest.mark.parametrize("name", ["gpt_oss", "llama"])
def test_layers_that_are_not_traced_are_as_if_they_were(name, monkeypatch):
    module, made = module_of(name, **DEEP[name])
    added, unroll = [], repeat.unroll
    monkeypatch.setattr(repeat, "unroll", lambda program, stack, stored: added.append(stack) or unroll(program, stack, stored))
    assert capture_module(module, made).text() == capture_module(module, made, brief=False).text()
    (stack,) = added
    assert stack.traced < len(stack.kinds) == len(module.get_submodule(stack.path))


def test_layers_that_read_some_before_them_repeat_too(monkeypatch):
    """As those that share what an earlier one has chosen: kinds are A B C A B C …, where B and C are the same but for how
    far away that is."""
    module, made = module_of("llama", **DEEP["llama"] | dict(num_hidden_layers=12))
    kept = {}

    def shares(number):
        def hook(mlp, given, result):
            if number % 3 == 0:
                kept["one"] = result * 2
            return result + kept["one"]

        return hook

    for number, layer in enumerate(module.model.layers):
        layer.mlp.register_forward_hook(shares(number))
    added, unroll = [], repeat.unroll
    monkeypatch.setattr(repeat, "unroll", lambda program, stack, stored: added.append(stack) or unroll(program, stack, stored))
    assert capture_module(module, made).text() == capture_module(module, made, brief=False).text()
    assert [stack.traced for stack in added] == [9]


def test_kinds_are_told_apart():
    module, made = module_of("qwen3_moe", **DEEP["qwen3_moe"])
    (stack,) = repeat.stacks(module, made)
    assert stack.kinds == (0, 1, 1, 1, 1, 1) and stack.traced == 3
    assert [stack.like(i) for i in range(6)] == [0, 1, 2, 2, 2, 2]
    module.model.layers[2].mlp.gate.top_k = 1
    (stack,) = repeat.stacks(module, made)
    assert stack.kinds == (0, 1, 2, 1, 1, 1) and [stack.like(i) for i in (4, 5)] == [3, 3]
    module, made = module_of("llama", **DEEP["llama"])
    plain = repeat.stacks(module, made)
    made.marks = [0, 1, 2, 3, 4]  # names every layer
    assert plain and repeat.stacks(module, made) == plain
    made.marks = [0, 0, 0, 0, 1]
    assert repeat.stacks(module, made) == ()
    made.marks = [3, 3, 4]  # of no layers, as none has a number twice
    assert repeat.stacks(module, made)[0].kinds == (0,) * 5


def test_a_layer_repeats_the_one_after_the_same_layers():
    stack = repeat.Stack("layers", (0, 1, 1, 2, 3, 1, 1, 2, 3, 1, 1, 2, 3, 1, 1, 2))
    assert stack.traced == 12 and [stack.like(i) for i in (12, 13, 14, 15)] == [8, 9, 10, 11]


def test_an_attribute_that_counts_layers_is_seen():
    module, made = module_of("gpt2", **DEEP["gpt2"], scale_attn_by_inverse_layer_idx=True)
    assert repeat.stacks(module, made) == ()


def scales_by_number(model, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    for number, layer in enumerate(model.layers):
        layer.mlp.layer_idx = number
    original = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: original(self, x) * (2.0 if self.layer_idx % 2 else 1.0))


def scales_between(model, monkeypatch):
    model.layers[3].register_forward_pre_hook(lambda layer, given: (given[0] * 2, *given[1:]))


def reads_an_early_layer(model, monkeypatch):
    kept = []
    model.layers[0].register_forward_hook(lambda layer, given, result: kept.append(result))
    model.layers[4].mlp.register_forward_hook(lambda mlp, given, result: result + kept[-1])


def reads_anothers_weights(model, monkeypatch):
    model.layers[4].mlp.register_forward_hook(lambda mlp, given, result: result * model.layers[2].input_layernorm.weight)


def counts(model, monkeypatch):
    """Every fourth layer that is run does something else."""
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.clear())
    for layer in model.layers:
        layer.mlp.register_forward_hook(lambda mlp, given, result: seen.append(0) or result * (-1.0 if len(seen) == 4 else 1.0))


@pytest.mark.parametrize("change", [scales_by_number, scales_between, reads_an_early_layer, reads_anothers_weights, counts])
def test_layers_that_do_something_else_are_all_traced(monkeypatch, change):
    module, made = module_of("llama", **DEEP["llama"])
    plain = capture_module(module, made, brief=False).text()
    change(module.model, monkeypatch)
    assert repeat.stacks(module, made)
    changed = capture_module(module, made).text()
    assert changed == capture_module(module, made, brief=False).text() != plain


# ---- files

def test_of_a_wrapper_it_is_the_text_model(tmp_path):
    wrapper = dict(model_type="some_vision_model", architectures=["SomeForConditionalGeneration"], image_token_id=3,
                   vision_config={"hidden_size": 8, "depth": 2}, tie_word_embeddings=True, text_config=SMALL)
    found = driver.sizes(config(tmp_path, wrapper))
    assert found.architecture == "LlamaForCausalLM" and "some_vision_model" in found.notes[0]
    alone = driver.sizes(config(tmp_path / "b", SMALL | dict(tie_word_embeddings=True)))
    assert (alone.parameters, alone.active) == (found.parameters, found.active)


def test_the_other_parts_of_a_wrapper_are_counted(tmp_path):
    vision = dict(model_type="clip_vision_model", hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                  num_attention_heads=2, image_size=8, patch_size=4)
    wrapper = dict(model_type="llava", text_config=SMALL, vision_config=vision)
    found = driver.sizes(config(tmp_path, wrapper))
    made = transformers.AutoModelForImageTextToText.from_config(transformers.LlavaConfig.from_dict(wrapper))
    assert found.parameters + found.other_parts == sum(p.numel() for p in made.parameters()) and found.other_parts > 3000
    assert "with the wrapper's other parts" in sizes_text(found)
    assert driver.sizes(config(tmp_path / "b", SMALL)).other_parts == 0


def test_a_class_says_what_its_model_type_does_not(tmp_path):
    wrapper = dict(model_type="a", text_config=SMALL | dict(model_type="b", architectures=["LlamaForCausalLM"]))
    assert open_described(config(tmp_path, wrapper)).config.model_type == "llama"


def test_what_transformers_lacks_is_refused_with_its_keys(tmp_path):
    content = dict(model_type="novel", hidden_size=8, loops={"depth": 3}, torch_dtype="bfloat16")
    with pytest.raises(UnsupportedError) as caught:
        driver.sizes(config(tmp_path, content))
    assert all(word in str(caught.value) for word in ("'novel'", "'hidden_size'", "'loops.depth'"))
    assert "torch_dtype" not in str(caught.value)
    with pytest.raises(UnusedError, match="'loops.depth'"):
        driver.sizes(config(tmp_path / "b", SMALL | dict(loops={"depth": 3})))
    driver.sizes(config(tmp_path / "c", SMALL | dict(loops={"depth": 3})), waive=("loops.*",))


def test_code_that_comes_with_a_model_is_not_run(tmp_path):
    folder = config(tmp_path, SMALL | dict(auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert driver.sizes(folder).architecture == "LlamaForCausalLM" and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("content", "words"), [
    ([1], "expected an object"), ({}, "model_type"), (SMALL | dict(num_hidden_layers=10**9), "num_hidden_layers"),
    (SMALL | dict(num_hidden_layers="many"), "num_hidden_layers"), (SMALL | dict(torch_dtype="int3"), "int3"),
    (SMALL | dict(hidden_size=-4), "llama"), (SMALL | dict(text_config={}), "model_type"),
    (SMALL | dict(architectures=7, model_type="x"), "'x'"),
])
def test_bad_configurations(tmp_path, content, words):
    with pytest.raises(AdaptcError, match=words):
        driver.sizes(config(tmp_path, content))


def test_only_a_configuration_has_no_weights(tmp_path):
    config(tmp_path, SMALL)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match="without weights"):
        driver.sizes(tmp_path)
    with pytest.raises(InputError):  # compile has no use for it
        open_source(config(tmp_path / "b", SMALL))


def test_the_command(tmp_path):
    folder = config(tmp_path, SMALL)
    shown = CliRunner().invoke(main, ["inspect", folder])
    assert shown.exit_code == 0, shown.output
    for part in ("LlamaForCausalLM", "parameters", "active, a token", "cache (bf16), a token", "body0 × 4",
                 "Compute profile", "Operator coverage"):
        assert part in shown.output
    data = json.loads(CliRunner().invoke(main, ["inspect", f"{folder}/config.json", "--json"]).output)
    assert data["cache_token"] == 4 * 2 * 2 * 16 * 2 and data["bodies"] == {"body0": 4}
    rows = json.loads(CliRunner().invoke(main, ["inspect", folder, "--profile-table", "--json"]).output)
    assert rows == data["profile"]
    refused = CliRunner().invoke(main, ["inspect", folder, "--plan"])
    assert refused.exit_code == 2 and "--plan needs weights" in refused.output


def test_experts_that_constructors_fill_with_zeros_take_no_memory():
    """Two terabytes of them, as Llama 4 makes its experts."""
    from transformers import Llama4TextConfig

    from adaptc.capture.build import build, stored_shapes

    config = Llama4TextConfig(hidden_size=8192, num_hidden_layers=1, num_local_experts=512, intermediate_size=2**16, vocab_size=64)
    shapes = stored_shapes(build(config))
    assert shapes["model.layers.0.feed_forward.experts.gate_up_proj"] == (512, 8192, 2**17)
