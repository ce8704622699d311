"""The two published models, compiled whole and compared with what transformers computed in float32.

``tests/data/*.safetensors`` are goldens made by ``adaptc golden`` (the module docstring of ``adaptc.golden`` gives
their contents); ``benchmarks/compare.py`` repeats the comparison against transformers itself, over every logit.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

import adaptc
from adaptc.backends import codegen
from adaptc.formats import FORMATS

pytestmark = pytest.mark.usefixtures("kept_captures")

DATA = Path(__file__).parent / "data"
TOLERANCE = 5e-4
MARGIN = 1e-3
MODELS = ("smollm2", "gemma3")


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory, smollm2_gguf, gemma3_gguf):
    """Both models, ``--weights auto --activations f32``, and SmolLM2 with int8 activations."""
    folder = tmp_path_factory.mktemp("real")
    compiled = {}
    for name, path, options in (
        ("smollm2", smollm2_gguf, {}),
        ("gemma3", gemma3_gguf, {"max_context": 2048}),
        ("smollm2-int8", smollm2_gguf, {"activations": "int8"}),
    ):
        compiled[name] = folder / f"{name}.adapt"
        adaptc.compile(path, "cpu", output=compiled[name], **options)
    return compiled


@pytest.fixture(scope="session", params=MODELS)
def case(request, artifacts):
    with adaptc.load(artifacts[request.param], threads=2, cache_bytes=128 << 20) as session:
        yield session, load_file(DATA / f"{request.param}.safetensors"), artifacts[request.param]


def sequences(golden):
    for tokens, length in zip(golden["tokens"], golden["prompt_lengths"]):
        yield tokens[tokens >= 0].tolist(), int(length)


def test_teacher_forced_logits(case):
    session, golden, _ = case
    steps = golden["log_sum_exp"].shape[1]
    worst = 0.0
    for i, (tokens, length) in enumerate(sequences(golden)):
        logits = session.score(tokens[:-1], start=length - 1)
        assert logits.shape == (steps, session.plan.vocabulary)
        top = np.take_along_axis(logits, golden["top_ids"][i].astype(np.int64), 1)
        probes = logits[:, golden["probe_ids"]]
        wide = logits.astype(np.float64)
        peak = wide.max(1)
        total = peak + np.log(np.exp(wide - peak[:, None]).sum(1))
        worst = max(worst, np.abs(top - golden["top_logits"][i]).max(),
                    np.abs(probes - golden["probe_logits"][i]).max(), np.abs(total - golden["log_sum_exp"][i]).max())
    assert worst < TOLERANCE


def test_greedy_tokens(case):
    session, golden, _ = case
    margins = golden["top_logits"][:, :, 0] - golden["top_logits"][:, :, 1]
    wanted = list(sequences(golden))
    results = session.generate([tokens[:length] for tokens, length in wanted], max_tokens=margins.shape[1],
                               ignore_eos=True)
    for (tokens, length), result, margin in zip(wanted, results, margins):
        close = np.flatnonzero(margin < MARGIN)
        end = int(close[0]) if len(close) else len(margin)
        assert list(result.token_ids[:end]) == tokens[length : length + end]


def test_one_result_whatever_the_way(case):
    """Chunked = one-shot, cached = recomputed, batched = alone, 1 = 2 = 3 threads; pages in random order, NaN in
    every free one."""
    session, golden, path = case
    tokens = [t for t, _ in sequences(golden)]
    # long enough to leave Gemma's window of 512 and to need several steps
    long = [t for _ in range(2) for row in tokens for t in row][:600]
    whole = session.score(long, start=590)
    for threads in (1, 3):
        with adaptc.load(path, threads=threads, cache_bytes=128 << 20) as other:
            assert np.array_equal(other.score(long, start=590), whole)
    from adaptc.runtime.session import load

    with load(path, threads=2, cache_bytes=128 << 20, page_order_seed=7) as shuffled:
        shuffled.poison_free_pages()
        for chunk in (97, 256):
            assert np.array_equal(shuffled.score(long, start=590, chunk=chunk), whole)
        short = tokens[0][:40]
        assert np.array_equal(shuffled.score(short, chunk=1), shuffled.score(short))
        prompts = [row[:12] for row in tokens]
        together = shuffled.generate(prompts, max_tokens=12, ignore_eos=True)
        alone = [shuffled.generate(p, max_tokens=12, ignore_eos=True) for p in prompts[:3]]
        assert [r.token_ids for r in together[:3]] == [r.token_ids for r in alone]


def test_packed_weights_are_the_files_values(case, smollm2_gguf, gemma3_gguf):
    """Unpacking every packed weight gives, bit for bit, what the gguf package dequantises; no bytes are added."""
    from adaptc.backends.cpu import packing
    from adaptc import blocks
    from adaptc.ir.module import Program
    from adaptc.runtime.loader import load_artifact
    from adaptc.sources.binding import Binding
    from adaptc.sources.gguf_file import read_gguf, size_of

    _, _, path = case
    source = smollm2_gguf if "smollm2" in path.name else gemma3_gguf
    # the container by our own reader: the package's takes 20 s for Gemma's vocabulary (test_sources_gguf compares both)
    file = read_gguf(source)
    stored = {t.name: t for t in file.tensors}
    artifact = load_artifact(path)
    program = Program.parse((path / "ir/laid_out.mlir").read_text())
    packed_bytes = file_bytes = 0
    seen = set()
    for name, weight in program.weights().items():
        tensor = stored[weight.tensor]
        seen.add(weight.tensor)
        kind = gguf.GGMLQuantizationType(tensor.type)
        raw = file.data[tensor.offset : tensor.offset + size_of(tensor)]
        exact = gguf.quants.dequantize(raw.reshape(*tensor.shape[:-1], -1), kind)
        data = artifact.weights[name]
        if weight.spec.format is None:
            got = np.frombuffer(data, np.float32)[: exact.size].reshape(exact.shape)
        else:
            assert weight.spec.format == FORMATS[kind.name.lower()]
            got = blocks.dequantize(weight.spec.format, packing.unpack(weight.spec.format, weight.spec.shape, data))
            packed_bytes += codegen("cpu").packed_bytes(weight.spec.format, weight.spec.shape)
            file_bytes += raw.size
        order = Binding(weight.tensor, weight.rows or None).rows(exact.shape[0])
        expected = exact if order is None else exact[order]
        assert np.array_equal(got.view(np.uint32), expected.view(np.uint32)), name
    assert seen == set(stored), "every tensor is stored once"
    assert packed_bytes <= 1.02 * file_bytes
    assert (path / "weights.safetensors").stat().st_size <= 1.02 * source.stat().st_size


def test_int8_activations_stay_close(artifacts):
    golden = load_file(DATA / "smollm2.safetensors")
    with adaptc.load(artifacts["smollm2-int8"], threads=2, cache_bytes=64 << 20) as session:
        divergence = []
        for i, (tokens, length) in enumerate(sequences(golden)):
            logits = session.score(tokens[:-1], start=length - 1).astype(np.float64)
            ours = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)) - logits.max(1, keepdims=True)
            theirs = golden["top_logits"][i].astype(np.float64) - golden["log_sum_exp"][i][:, None]
            mine = np.take_along_axis(ours, golden["top_ids"][i].astype(np.int64), 1)
            divergence.append((np.exp(theirs) * (theirs - mine)).sum(1))
        assert np.mean(np.concatenate(divergence)) < 0.01


def test_one_native_segment_and_stop_after(artifacts):
    """A step is one native segment; it can stop after any operator, time each, and give each one's output."""
    with adaptc.load(artifacts["smollm2"], threads=2, cache_bytes=64 << 20) as session:
        assert [s.kind for s in session.plan.segments] == ["native"]
        operators = session.plan.operators()
        assert [op.id for op in operators] == list(range(len(operators)))
        symbols = {"T": 1, "R": 1, "S": 1}
        session.score([1, 2, 3])  # leaves valid inputs in place
        times = session.executable.run(symbols, times=True)
        assert set(times) == {op.id for op in operators} and all(t >= 0 for t in times.values())
        first = operators[0]
        session.executable.run(symbols, stop_after=first.id)
        assert np.isfinite(session.executable.read(first.outputs[0], symbols)).all()


def test_tied_table_is_stored_once(artifacts):
    from adaptc.runtime.loader import load_artifact

    weights = load_artifact(artifacts["smollm2"]).weights
    tables = [name for name, data in weights.items() if len(data) > 25e6]
    assert len(tables) == 1
