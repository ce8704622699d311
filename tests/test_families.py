"""Families that people run, through ``adaptc.compile`` and native code, against transformers' own forward.

The rows are in ``families``; ``python tests/families.py --seeds 3`` runs all of them on three seeds.
"""

from __future__ import annotations

import copy

import families
import numpy as np
import pytest

import adaptc
from adaptc import driver
from adaptc.ir.module import Program
from adaptc.plan import Plan
from adaptc.verify import operators, verify
from adaptc.verify.subject import Subject

pytestmark = pytest.mark.usefixtures("kept_captures")

NAMES = sorted(families.FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_prefill_and_steps_are_the_authors_forward(name, tmp_path):
    """41 tokens through pages of 4, at once, one by one and by fives: windows, original rope lengths and pages end."""
    seed = NAMES.index(name) % 3
    folder = families.write(tmp_path / "model", name, seed)
    left: list[str] = []
    report = families.compile_family(folder, tmp_path / "a.adapt", after=families.keep_leftovers(left))
    assert not [row.op for row in report.coverage if row.status == "missing"]
    assert not left, "the fused form still has patterns that passes should have raised"
    if latent := families.latent_row(name):
        assert kept(tmp_path / "a.adapt") == {4 * latent}, "a latent row a token, not keys and values of all heads"
    result = families.check(folder, tmp_path / "a.adapt", seed, threads=1 + seed % 2)
    assert result.same, "the same sequence, cut otherwise, gives other bits"
    assert result.worst <= families.TOLERANCE
    assert result.near <= 0.05, "too many tokens with a near-tie in a router"


def kept(artifact) -> set[int]:
    """Bytes that a token takes in each state, indexes apart."""
    states = Plan.from_json((artifact / "plan.json").read_text()).states
    return {state.token_bytes() for state in states if state.parts[0].name != "index"}


def test_latent_rows_in_eight_bits(tmp_path):
    """Codes and one scale a token; what reads and writes them is as the operators mean it, over all ranges of values."""
    name = "deepseek_v2"
    folder = families.write(tmp_path / "model", name, 0)
    families.compile_family(folder, tmp_path / "a.adapt", kv="int8", weights="int8")
    assert kept(tmp_path / "a.adapt") == {families.latent_row(name) + 4}
    subject = Subject(tmp_path / "a.adapt")
    caller = operators.Caller(subject)
    caller.use(subject.level)
    mine = [v for v in operators.variants(subject) if v.spec.op in ("latent_attention", "head_linear")]
    assert len(mine) == 3
    for variant in mine:
        furthest = max(caller.outcomes(variant), key=lambda outcome: outcome.excess.ratio)
        assert furthest.excess.ratio <= 1, (variant.spec.op, furthest)


WIDER = {
    "sliding_window": 4096, "index_topk": 4096, "num_experts_per_tok": 1, "topk_method": "greedy",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "no_rope_layer_interval": 10,
    "partial_rotary_factor": 1.0, "rotary_pct": 1.0,
}
"""Keys that limit something, each with a value that lifts or moves the limit."""


def wider(row: families.Family) -> dict:
    return WIDER | {"topk_group": row.keys.get("n_group")}


@pytest.mark.parametrize("name, key", [(name, key) for name in NAMES for key in wider(families.FAMILIES[name])
                                       if families.FAMILIES[name].keys.get(key) is not None])  # fmt: skip
def test_windows_experts_groups_and_ropes_are_active(name, key):
    """The tested tokens reach each limit: without it the authors' logits are others."""
    import torch

    row = families.FAMILIES[name]
    tokens = torch.tensor([families.tokens_of(families.PROMPT + families.STEPS, 0)])
    with torch.inference_mode():
        limited, free = (families.build(row.model_type, copy.deepcopy(row.keys | changes), 0)(tokens, use_cache=False)
                         .logits for changes in ({}, {key: wider(row)[key]}))  # fmt: skip
    assert (limited - free).abs().max() > 1e-3 * limited.abs().max()
@pytest.mark.parametrize("name, mode", [
    ("mixtral", "int8"), ("gpt_neox", "f16 caches"), ("rope_dynamic", "int8, bf16 caches")])
def test_verify_finds_nothing(name, mode, tmp_path):
    """Routers that choose otherwise after 8-bit rounding, an exact gelu, rope by declared length;
    ``tests/families.py --verify`` runs every row under every mode."""
    folder = families.write(tmp_path / "model", name, 1)
    families.compile_family(folder, tmp_path / "a.adapt", **families.VERIFIED[mode])
    report = verify(tmp_path / "a.adapt", seed=1)
    assert report.passed, [f for level in report.levels for f in level.findings]


@pytest.mark.parametrize("name", ["phi3_longrope", "rope_dynamic"])
def test_requests_on_both_sides_of_a_length_share_a_step(name, tmp_path):
    """A short and a long request, each rotated by its own declared length, whatever else is in the step."""
    folder = families.write(tmp_path / "model", name, 1)
    families.compile_family(folder, tmp_path / "a.adapt", max_requests=16)
    sequences = [families.tokens_of(count, count) for count in (11, 41, 16, 17)]
    with adaptc.load(tmp_path / "a.adapt", threads=1) as session:
        alone = [session.score(tokens) for tokens in sequences]
        together = [np.empty_like(rows) for rows in alone]
        engine = session.engine
        for tokens, rows in zip(sequences, together):
            engine.score(tokens, rows, chunk=5)
        steps = 0
        while engine.active:
            steps += 1
            engine.step()
    assert steps < sum(-(-len(tokens) // 5) for tokens in sequences), "they never shared a step"
    for tokens, one, shared in zip(sequences, alone, together):
        assert np.array_equal(one, shared)
        expected, _ = families.reference(folder, tokens)
        assert np.abs(one - expected).max() <= families.TOLERANCE * np.abs(expected).max()


def test_a_generated_token_keeps_the_declared_length(tmp_path):
    """Six tokens after a prompt of 12 pass the original length of 16: from the first on, all are rotated as long."""
    folder = families.write(tmp_path / "model", "phi3_longrope", 2)
    families.compile_family(folder, tmp_path / "a.adapt")
    prompt = families.tokens_of(12, 5)
    with adaptc.load(tmp_path / "a.adapt", threads=1) as session:
        session.engine.add(prompt, max_tokens=6)
        made = []
        while session.engine.active:
            made += [event.token for event in session.engine.step() if event.token is not None]
        whole = session.score([*prompt, *made[:-1]])  # 17 tokens: the same declared length
    assert made == whole[len(prompt) - 1 :].argmax(-1).tolist()


def test_experts_are_packed_and_read_alone(tmp_path):
    """A token's bytes are those of its experts, not of all; formats convert as for other matrices."""
    folder = families.write(tmp_path / "model", "qwen3_moe", 0)
    report = families.compile_family(folder, tmp_path / "a.adapt", weights="bf16")
    assert any("experts" in tensor for tensor in report.conversion_errors)
    read = lambda tokens: sum(r.bytes for r in report.profile if r.op == "expert_linear" and r.tokens == tokens)  # noqa: E731
    matrices = 2 * (2 * 32 * 64 + 64 * 32) * 2  # two layers; gate, up and down of an expert in bf16
    assert 2 * matrices <= read(1) < 2.5 * matrices, "two of eight experts"
    assert 8 * matrices <= read(48) < 16 * matrices, "all of them, each once"
    tokens = families.tokens_of(30, 3)
    with adaptc.load(tmp_path / "a.adapt", threads=2) as session:
        logits = session.score(tokens)
        assert np.array_equal(session.score(tokens, chunk=1), logits)
    expected, _ = families.reference(folder, tokens)
    assert np.abs(logits - expected).max() < 0.05 * np.abs(expected).max()


def test_a_transposed_weight_is_bound_not_computed(tmp_path):
    """GPT-2 keeps its matrices [K, N]: no operator turns them at run time."""
    folder = families.write(tmp_path / "model", "gpt2", 0)
    program = Program.parse(driver.stage_text(folder, "fused", "cpu"))
    used = {op.operation.name for _, op in program.operators()}
    assert "adaptc.transpose" not in used and "adaptc.linear" in used
    turned = [w for w in program.weights().values() if w.rows == ("transpose", 0)]
    assert len(turned) == 8 and all(w.name == f"{w.tensor}.T" for w in turned)


def test_a_module_in_memory(tmp_path):
    """Its weights in bfloat16, one pair tied: compiled as the directory of it is, and left as it was."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = families.write(tmp_path / "written", "llama3", 0)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module.save_pretrained(tmp_path / "model")
    families.compile_family(module, tmp_path / "memory.adapt")
    families.compile_family(tmp_path / "model", tmp_path / "folder.adapt")
    logits = []
    for name in ("memory", "folder"):
        with adaptc.load(tmp_path / f"{name}.adapt", threads=1) as session:
            logits.append(session.score(families.tokens_of(30, 1)))
    assert np.array_equal(*logits)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.dtype == torch.bfloat16
    with pytest.raises(adaptc.errors.UnsupportedError, match="isn't a transformers model"):
        families.compile_family(torch.nn.Linear(2, 2), tmp_path / "x.adapt")
