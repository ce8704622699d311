"""Families that people run, as tiny Hugging Face directories with random weights, and the check that each must pass.

    python tests/families.py [NAME ...] [--seeds N] [--verify]     lists what fails, and why

A family is a row: transformers' model_type and configuration keys. Hidden size 64, head widths multiples of 4,
windows of 8 tokens, at least one layer of each type.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence
from unittest import mock

import numpy as np

VOCABULARY = 128
PROMPT, STEPS = 17, 24
PAGE = 4
"""Tokens a page: fewer than a window."""

TOLERANCE = 1e-4
"""Largest difference of a row's logits, as a share of the row's largest one."""

NEAR_TIE = 1e-5
"""A router whose k-th and next score are closer than this may choose another expert in another order of sums, and an
index other tokens."""

MASKED = -1e30
"""Scores from here down are masked: what is chosen with one of them isn't seen."""

BASE = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)
HEADS = BASE | dict(head_dim=16)
SLIDING_FULL = dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=8)
EXPERTS = HEADS | dict(num_experts_per_tok=2, moe_intermediate_size=32)
MLA = BASE | dict(
    num_hidden_layers=3, num_key_value_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
    v_head_dim=16, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=32,
    first_k_dense_replace=1)


@dataclass(frozen=True)
class Family:
    """``model_type`` and configuration ``keys``; ``dense`` says that no router chooses anything."""

    model_type: str
    keys: Mapping[str, Any] = field(default_factory=dict)


def rope(kind: str, **keys: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **keys}}


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", HEADS),
    "llama3": Family("llama", HEADS | dict(tie_word_embeddings=True) | rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)),
    "mistral": Family("mistral", HEADS | dict(sliding_window=8)),
    "qwen2": Family("qwen2", BASE | dict(use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    "qwen3": Family("qwen3", HEADS),
    "rope_linear": Family("llama", HEADS | rope("linear", factor=4.0)),
    "rope_yarn": Family("llama", HEADS | rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "rope_dynamic": Family("llama", HEADS | dict(max_position_embeddings=16) | rope("dynamic", factor=4.0)),
    "gemma2": Family("gemma2", HEADS | SLIDING_FULL | dict(query_pre_attn_scalar=16)),
    "gemma3": Family("gemma3_text", HEADS | SLIDING_FULL | dict(query_pre_attn_scalar=16)),
    "phi3": Family("phi3", BASE | dict(sliding_window=8)),
    "phi3_longrope": Family("phi3", BASE | dict(sliding_window=None, original_max_position_embeddings=16) | rope(
        "longrope", short_factor=[1.0 + 0.05 * i for i in range(8)], long_factor=[2.0 + 0.5 * i for i in range(8)],
        original_max_position_embeddings=16)),
    "rope_partial": Family("phi3", BASE | dict(sliding_window=8, num_attention_heads=4) | rope(
        "longrope", short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0, 2.5, 3.0, 4.0], partial_rotary_factor=0.5,
        original_max_position_embeddings=16)),
    "glm4": Family("glm4", HEADS | dict(partial_rotary_factor=0.5)),
    "olmo2": Family("olmo2", BASE),
    "granite": Family("granite", BASE | dict(embedding_multiplier=12.0, residual_multiplier=0.22,
                                             attention_multiplier=0.0625, logits_scaling=8.0)),
    "smollm3": Family("smollm3", BASE | dict(num_hidden_layers=4, no_rope_layer_interval=4)),
    "cohere2": Family("cohere2", HEADS | SLIDING_FULL | dict(logit_scale=0.25)),
    "starcoder2": Family("starcoder2", BASE | dict(sliding_window=8, use_bias=True)),
    "gpt2": Family("gpt2", dict(vocab_size=VOCABULARY, n_embd=64, n_head=4, n_layer=2, n_positions=64, n_inner=96,
                                bos_token_id=1, eos_token_id=2)),
    "gpt_neox": Family("gpt_neox", {k: v for k, v in BASE.items() if k != "num_key_value_heads"}
                       | dict(rotary_pct=0.5)),
    "opt": Family("opt", dict(vocab_size=VOCABULARY, hidden_size=64, ffn_dim=96, num_hidden_layers=2,
                              num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=64,
                              bos_token_id=1, eos_token_id=2, pad_token_id=0)),
    "mixtral": Family("mixtral", HEADS | dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=8)),
    "qwen3_moe": Family("qwen3_moe", EXPERTS | dict(num_experts=8, mlp_only_layers=[], norm_topk_prob=True)),
    "gpt_oss": Family("gpt_oss", HEADS | SLIDING_FULL | dict(num_local_experts=4, num_experts_per_tok=2) | rope(
        "yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=16)),
    # the best of a group counts for it: only fewer groups than experts limit the choice
    "deepseek_v2": Family("deepseek_v2", MLA | dict(q_lora_rank=None, n_routed_experts=16, n_group=4, topk_group=1,
                                                    topk_method="group_limited_greedy", routed_scaling_factor=1.5)),
    "deepseek_v3": Family("deepseek_v3", MLA | dict(q_lora_rank=32, n_group=4, topk_group=2,
                                                    routed_scaling_factor=2.5) | rope(
        "yarn", factor=4.0, mscale=1.0, mscale_all_dim=1.0, beta_fast=32.0, beta_slow=1.0,
        original_max_position_embeddings=16)),
    "glm_moe_dsa": Family("glm_moe_dsa", MLA | dict(
        num_hidden_layers=2, q_lora_rank=32, n_group=2, topk_group=1, index_topk=8, index_n_heads=8, index_head_dim=16,
        mlp_layer_types=["dense", "sparse"], indexer_types=["full", "shared"])),
}


def latent_row(family: str) -> int:
    """Columns of the one row a token that latent attention needs; 0 for a family without."""
    keys = FAMILIES[family].keys
    return keys["kv_lora_rank"] + keys["qk_rope_head_dim"] if "kv_lora_rank" in keys else 0


def write(folder: Path, family: str, seed: int = 0, **changes: Any) -> Path:
    """A model directory of the family; ``changes`` are configuration keys."""
    row = FAMILIES[family]
    model = build(row.model_type, row.keys | changes, seed)
    model.save_pretrained(folder)
    return folder


def build(model_type: str, keys: Mapping[str, Any], seed: int):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    config = AutoConfig.for_model(model_type, **keys)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model)
    return model


def randomise(model) -> None:
    """Weights that keep activations near 1 and give logits that aren't flat; norms and biases of their own."""
    import torch

    with torch.no_grad():
        biases = ((name, buffer) for name, buffer in persistent_buffers(model) if buffer.ndim <= 1)
        for name, tensor in [*model.named_parameters(), *biases]:  # other buffers are tables that constructors compute
            if not tensor.is_floating_point():
                if tensor.ndim == 2:  # experts of each token id
                    experts = model.config.get_text_config().n_routed_experts
                    tensor.copy_(torch.rand(len(tensor), experts).topk(tensor.shape[1]).indices)
                continue
            vector = tensor.ndim <= 1 or name.endswith("bias")
            centre = 1.0 if tensor.ndim == 1 and bool((tensor == 1).all()) else 0.0
            scale = 0.1 if vector else 1.5 * min(tensor.shape[-1], 64) ** -0.5
            tensor.copy_(torch.randn_like(tensor) * scale + centre)


def persistent_buffers(model):
    kept = model.state_dict(keep_vars=True)
    return [(name, b) for name, b in model.named_buffers() if name in kept]


def reference(folder: Path, tokens) -> tuple[np.ndarray, np.ndarray]:
    """``forward`` of a model directory."""
    import torch
    from transformers import AutoModelForCausalLM

    return forward(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokens)


def forward(model, tokens) -> tuple[np.ndarray, np.ndarray]:
    """(logits f32[T, V] of the authors' own forward, smallest margin of the choices of routers and indexes up to each
    token: later tokens see what an earlier one has become)."""
    import torch

    model.eval()
    margins = np.full(len(tokens), np.inf)
    original = torch.Tensor.topk

    def topk(scores, k, *args, **kwargs):
        of_tokens = scores.ndim > 1 and len(tokens) in (scores.shape[-2], scores.numel() // scores.shape[-1])
        if of_tokens and k < scores.shape[-1]:
            heads = scores.reshape(-1, len(tokens), scores.shape[-1]).float()  # which choose each for itself
            ordered = original(heads, k + 1).values
            margin = ordered[..., k - 1] - ordered[..., k]  # nan or beyond all scores: what is masked isn't chosen from
            margin = margin.masked_fill(ordered[..., k] <= MASKED, np.inf).detach().numpy()
            margins[:] = np.fmin(margins, np.fmin.reduce(margin))
        return original(scores, k, *args, **kwargs)

    with mock.patch.object(torch, "topk", topk), mock.patch.object(torch.Tensor, "topk", topk), torch.inference_mode():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()
    return logits, np.minimum.accumulate(margins)


def tokens_of(count: int, seed: int, distinct: bool = False) -> list[int]:
    """Token ids, with ``distinct`` none of them twice."""
    rng = np.random.default_rng(seed)
    return (3 + rng.permutation(VOCABULARY - 3)[:count] if distinct else rng.integers(3, VOCABULARY, count)).tolist()


@dataclass(frozen=True)
class Result:
    """``worst`` relative difference of a counted row, ``near`` share of rows that weren't counted, and whether one
    shot, single tokens and chunks gave the same bits."""

    worst: float
    near: float
    same: bool


def check(folder: Path, artifact: Path, seed: int = 0, threads: int = 1) -> Result:
    """Prefill and single-token steps of one sequence against the authors' forward."""
    tokens = tokens_of(PROMPT + STEPS, seed)
    return compare(artifact, tokens, *reference(folder, tokens), threads=threads)


def compare(artifact: Path, tokens, expected: np.ndarray, margins: np.ndarray, threads: int = 1) -> Result:
    """``tokens`` scored by the artifact in three ways, against ``expected`` logits."""
    import adaptc

    with adaptc.load(artifact, threads=threads) as session:
        whole = session.score(tokens)
        steps = session.score(tokens, chunk=1)
        pieces = session.score(tokens, chunk=5)
    error = np.abs(whole - expected).max(-1) / np.abs(expected).max(-1)
    counted = margins >= NEAR_TIE
    same = np.array_equal(whole, steps) and np.array_equal(whole, pieces)
    return Result(float(error[counted].max()), float(1 - counted.mean()), same)


def compile_family(folder: Path, out: Path, **options: Any):
    import adaptc

    return adaptc.compile(folder, "cpu", output=out, workers=1,
                          **{"page_size": PAGE, "max_step_tokens": 48, "max_requests": 4} | options)


def keep_leftovers(found: list[str]):
    """For ``compile_family``'s ``after``: adds the ``leftovers`` of the fused program to ``found``."""

    def after(program, done) -> None:
        if (done.stage, done.name) == ("fused", "group_elementwise"):
            found.extend(leftovers(program))

    return after


def leftovers(fused) -> list[str]:
    """What the fused form of a program still has of patterns that passes raise: the arithmetic of norms, rotations
    that aren't rope's (something else reads what was made of a cosine or sine), and maps of one input that aren't one
    operator."""
    from adaptc.ir.module import callee
    from adaptc.ir.rewrite import nodes

    found: list[str] = []

    def walk(function, angles: set) -> set[int]:
        """Results of a function that are made of ``angles``, which are among its arguments."""
        maps: dict = {}
        for node in nodes(function):
            rows = [(row[0], dict(row[2])) for row in node.attrs["body"]] if node.name == "group" else (
                [(node.name, node.attrs)] if node.row else [])
            for name, attrs in rows:
                if name in ("sqrt", "rsqrt") or attrs.get("kind") == "mean":
                    found.append(f"{name} in module {node.source}")
            if node.name == "linear":
                if node.operands[0] in maps:
                    found.append(f"linear in module {node.source}, beside that of {maps[node.operands[0]]}")
                maps[node.operands[0]] = node.source
            read = [v in angles for v in node.operands]
            if node.name == "func.call":
                callees = fused.functions()[callee(node.op)]
                inner = {a for a, has in zip(callees.entry_block.arguments, read) if has}
                angles |= {node.results[i] for i in walk(callees, inner)}
            elif node.name == "func.return":
                return {i for i, has in enumerate(read) if has}
            elif any(name in ("cos", "sin") for name, _ in rows) or (any(read) and node.name != "rope"):
                angles |= set(node.results)
                if node.name in ("attention", "linear", "linears"):
                    found.append(f"{node.name} in module {node.source} reads what no rope has turned")
        return set()

    walk(fused.step, set())
    return sorted(set(found))


VERIFIED: Mapping[str, Mapping[str, str]] = {
    "f32": {},
    "f16 caches": {"kv": "f16"},
    "bf16 caches": {"kv": "bf16"},
    "int8": {"weights": "int8", "activations": "int8"},
    "int8, bf16 caches": {"weights": "int8", "activations": "int8", "kv": "bf16"},
}
"""Options under which ``--verify`` runs ``adaptc verify``."""


def compared(place: Path, name: str, seed: int) -> Iterator[tuple[bool, str]]:
    """Whether the family passes against the authors' forward, and what to say of it."""
    left: list[str] = []
    report = compile_family(write(place / "model", name, seed), place / "a.adapt", after=keep_leftovers(left))
    result = check(place / "model", place / "a.adapt", seed)
    lowered = [r.op for r in report.coverage if r.status.startswith("decomposed")]
    good = result.worst <= TOLERANCE and result.same and result.near <= 0.05
    yield good and not left, f"{result} {lowered or ''} {left or ''}"


def verified(place: Path, name: str, seed: int) -> Iterator[tuple[bool, str]]:
    """The same of ``adaptc verify``, once for each row of VERIFIED."""
    from adaptc.verify import verify

    folder = write(place / "model", name, seed)
    for mode, options in VERIFIED.items():
        compile_family(folder, place / "a.adapt", **options)
        report = verify(place / "a.adapt", seed=seed)
        ratios = [f"{v:.2g}" for level in report.levels for k, v in level.figures.items() if k.startswith("worst")]
        last = report.depths[-1] if report.depths else None
        yield report.passed, f"{mode}: worst {' '.join(ratios)}, logits {last and last.error:.1e}" + "".join(
            f"\n     {level.name}: {finding}" for level in report.levels for finding in level.findings)
        shutil.rmtree(place / "a.adapt")


def main(names: Sequence[str], seeds: int, verify: bool) -> int:
    """How many of the checks failed."""
    failed = 0
    for name in names or FAMILIES:
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as place:
                start = time.perf_counter()
                try:
                    for good, said in (verified if verify else compared)(Path(place), name, seed):
                        failed += not good
                        seconds = time.perf_counter() - start
                        print(f"{'ok  ' if good else 'FAIL'} {name:13} {said} {seconds:.1f}s", flush=True)
                        start = time.perf_counter()
                except Exception as error:
                    failed += 1
                    where = traceback.extract_tb(error.__traceback__)[-1]
                    print(f"FAIL {name:13} {type(error).__name__}: {str(error)[:400]} "
                          f"({Path(where.filename).name}:{where.lineno})", flush=True)
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FAMILIES))
    parser.add_argument("--seeds", type=int, default=1, help="how many sets of weights and tokens")
    parser.add_argument("--verify", action="store_true", help="run `adaptc verify` under several options instead")
    given = parser.parse_args()
    sys.exit(min(main(given.names, given.seeds, given.verify), 1))
