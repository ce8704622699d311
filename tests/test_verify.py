"""``adaptc verify``: what it covers, says and returns. That it finds faults is tests/test_verify_faults.py."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import planted
import pytest
import tiny_models
from click.testing import CliRunner
from safetensors.numpy import load, save

import adaptc
from adaptc import golden
from adaptc.cli import main
from adaptc.errors import InputError, OptionError
from adaptc.ops.table import row
from adaptc.protocol import OpSpec, StateSpec, TensorSpec
from adaptc.verify import tolerances, verify
from adaptc.verify.guard import Crashed, Failed, Note, guarded
from adaptc.verify.owners import Disagrees, Owners
from adaptc.verify.plot import drawing as draw
from adaptc.verify.report import Depth
from adaptc.verify.subject import Subject
from adaptc.verify.weights import tensor_order

pytestmark = pytest.mark.usefixtures("kept_captures")

TEXT = "Verification tells what was checked, and what was not. " * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("verify")


@pytest.fixture(scope="module")
def model(folder) -> Path:
    return tiny_models.write(folder / "llama", "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def artifact(folder, model) -> Path:
    """With goldens: two prompts of the authors' own model."""
    golden.record(str(model), folder / "goldens.safetensors", prompts=("Hello", "One more"), steps=6)
    adaptc.compile(model, "cpu", output=folder / "llama.adapt", goldens=folder / "goldens.safetensors", **planted.SIZES)
    return folder / "llama.adapt"


@pytest.fixture(scope="module")
def converted(folder, model) -> Path:
    adaptc.compile(model, "cpu", output=folder / "int8.adapt", weights="int8", kv="int8", **planted.SIZES)
    return folder / "int8.adapt"


@pytest.fixture(scope="module")
def whole(artifact, model, folder) -> dict:
    """One run of everything by the command, as JSON."""
    (folder / "text.txt").write_text(TEXT)
    done = CliRunner().invoke(main, ["verify", str(artifact), "--against", str(model), "--text",
                                     str(folder / "text.txt"), "--plot", str(folder / "depth.svg"), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def level(report: dict, name: str) -> dict:
    return next(item for item in report["levels"] if item["name"] == name)


def test_everything_is_checked_and_said(whole):
    assert whole["passed"] and [item["name"] for item in whole["levels"]] == [
        "weights", "operator", "layer", "model", "equivalences", "authors"]
    assert "20 of 20 packed weights" in level(whole, "weights")["covered"][0]
    operators = level(whole, "operator")
    assert operators["left_out"] == [] and "subnormal" in operators["covered"][0]
    model = level(whole, "model")
    assert "logits of 2 golden prompts × 6 steps" in model["covered"][0] and model["left_out"] == []
    ours, theirs = (model["figures"][f"perplexity of the text, {who}"] for who in ("artifact", "reference"))
    assert ours == pytest.approx(theirs, rel=1e-4) and ours > 1
    assert "batched with other requests" in level(whole, "equivalences")["covered"][0]


def test_error_by_depth(whole, folder):
    """Both comparisons, a point a layer and the logits, and the drawing has a mark for each."""
    depths = whole["depths"]
    wanted = ["model.layers.0", "model.layers.1", ""]
    for against in ("captured", "authors"):
        assert [d["module"] for d in depths if d["against"] == against] == wanted
    assert all(0 < d["error"] < 1e-4 and d["cosine"] > 0.999999 for d in depths)
    drawing = ET.fromstring((folder / "depth.svg").read_text())
    names = [c.find("{http://www.w3.org/2000/svg}title") for c in drawing.iter("{http://www.w3.org/2000/svg}circle")]
    assert sum(n is not None for n in names) == len(depths)


def test_the_drawing_stays_inside_itself():
    """Also with infinite errors and exact agreement."""
    drawing = ET.fromstring(draw([Depth(0, "a<b", 0.0, 1.0), Depth(1, "", float("inf"), 0.0)], "A & B").svg())
    for circle in drawing.iter("{http://www.w3.org/2000/svg}circle"):
        assert 0 <= float(circle.get("cx")) <= 760 and 0 <= float(circle.get("cy")) <= 380


def test_no_torch(artifact):
    """The artifact alone suffices, at every level: torch, transformers and the files' readers stay out."""
    code = ("import sys\nfor name in ('torch', 'transformers', 'gguf'): sys.modules[name] = None\n"
            f"from adaptc.verify import verify\nprint(verify({str(artifact)!r}).passed)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


def test_converted_weights_are_said_and_compared(converted, model):
    report = verify(converted, levels=("layer",), against=str(model))
    assert report.passed, report.first
    assert "converted to another format" in report.levels[0].left_out[0]
    assert report.levels[2].figures["largest relative RMS error of a converted weight"] > 0
    assert any("converted weights against the file's values" in line for line in report.levels[2].covered)
    apart = [d.error for d in report.depths if d.against == "authors"]
    assert apart and max(apart) < 1e-5, "the program is compared with the file's values in it"


def test_a_converted_weight_that_isnt_the_files(converted, model, tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    bad = planted.weight(converted, tmp_path / "bad.adapt", name, lambda codes: codes["codes"].__imul__(-1))
    report = verify(bad, levels=(), against=str(model))
    assert (report.first.where, report.first.module) == (f"tensor {name}", "model.layers.0.mlp.up_proj")


def test_another_model_than_the_artifacts(artifact, folder):
    """Same files by name, other values: the first module that differs is named."""
    other = tiny_models.write(folder / "other", "llama", num_hidden_layers=2, seed=1)
    report = verify(artifact, levels=(), against=str(other))
    authors = report.levels[1]
    assert "its files aren't the ones in the manifest" in authors.left_out[0]
    assert not report.passed and authors.findings[0].module.startswith("model.layers.0")


def test_goldens_are_what_the_model_says(artifact, folder):
    """Recorded probes are the logits of the recorded ids: where both the best and the probes have an id, they agree."""
    from safetensors.numpy import load_file

    data = load_file(folder / "goldens.safetensors")
    met = 0
    for top, logits, probed in zip(data["top_ids"], data["top_logits"], data["probe_logits"]):
        for ids, best, probes in zip(top, logits, probed):
            known = dict(zip(data["probe_ids"].tolist(), probes.tolist()))
            for i, value in zip(ids.tolist(), best.tolist()):
                met += i in known
                assert i not in known or known[i] == value
    assert met > 100


def test_a_golden_that_isnt_met(artifact, tmp_path):
    from safetensors.numpy import load, save

    def change(data: bytes) -> bytes:
        tensors = load(data)
        tensors["log_sum_exp"][1, 3] += 0.01
        return save(tensors)

    bad = planted.copy(artifact, tmp_path / "bad.adapt", "goldens.safetensors", change)
    done = CliRunner().invoke(main, ["verify", str(bad), "--level", "model"])
    assert done.exit_code == 1 and "golden logit of prompt 1" in done.output and "FAIL" in done.output


def test_the_command_refuses_bad_input(artifact, tmp_path):
    run = lambda *args: CliRunner().invoke(main, ["verify", *map(str, args)])  # noqa: E731
    assert run(tmp_path / "none.adapt").exit_code == 2
    assert run(artifact, "--level", "nothing").exit_code == 2
    assert run(artifact, "--text", tmp_path / "none.txt").exit_code == 2
    assert run(artifact, "--level", "operator", "--plot", tmp_path / "x.svg").exit_code == 2
    (artifact / "stray").write_text("")
    try:
        done = run(artifact)
        assert done.exit_code == 2 and "stray" in done.output
    finally:
        (artifact / "stray").unlink()
    with pytest.raises(OptionError, match="operator, layer, model, equivalences"):
        verify(artifact, levels=("everything",))
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InputError, match="no tokens"):
        verify(artifact, levels=("model",), text=tmp_path / "empty.txt")


def test_inspect_says_whether_there_are_goldens(artifact, converted):
    say = lambda path: CliRunner().invoke(main, ["inspect", str(path)]).output  # noqa: E731
    assert "goldens: present" in say(artifact) and "goldens: none" in say(converted)


# ---- the pieces --------------------------------------------------------------------------------------------------


def test_rows_go_back_where_the_file_has_them():
    from adaptc.ir.module import Weight

    weight = Weight("w", TensorSpec("f32", (8, 1)), "t", ("rope_halves", 2))
    stored = np.arange(8, dtype=np.float32)[:, None]
    parameter = stored[[0, 2, 1, 3, 4, 6, 5, 7]]  # each head's even rows, then its odd ones
    assert np.array_equal(tensor_order(weight, parameter), stored)


def linear(k: int) -> OpSpec:
    return OpSpec("linear", (TensorSpec("f32", ("T", k)), TensorSpec("f32", (4, k))), (TensorSpec("f32", ("T", 4)),))


def test_the_reductions_length_is_what_is_summed():
    sizes = {"T": 7, "R": 1, "S": 1}
    assert tolerances.reduction(row("linear"), linear(96), sizes, 1) >= 96
    state = StateSpec((("k", 2, 16), ("v", 2, 16)), "f32", 0, 4, 16, 9)
    q, k = TensorSpec("f32", ("T", 4, 16)), TensorSpec("f32", ("T", 2, 16))
    ids = TensorSpec("i32", ("T",))
    spec = OpSpec("attention", (q, k, k, ids, ids, state), (q,), {"scaling": 0.25})
    assert tolerances.reduction(row("attention"), spec, sizes, 33) >= 16 * 33
    x, chosen, experts = TensorSpec("f32", ("T", 48)), TensorSpec("i32", ("T", 2)), TensorSpec("f32", (8, 96, 48))
    spec = OpSpec("expert_linear", (x, chosen, experts), (TensorSpec("f32", ("T", 2, 96)),))
    assert tolerances.reduction(row("expert_linear"), spec, sizes, 1) == 48, "of one expert's, not of all"
    elementwise = OpSpec("add", (q, q), (q,))
    assert tolerances.reduction(row("add"), elementwise, sizes, 1) == 1


@pytest.mark.parametrize("options", [{}, {"max_requests": 1}, {"max_requests": 3, "max_step_tokens": 512, "page_size": 5}],
                         ids=str)
def test_steps_may_be_longer_than_contexts(tmp_path, options):
    """More tokens a step than one request, or all of them, can hold."""
    model = tiny_models.write(tmp_path / "m", num_hidden_layers=1, max_position_embeddings=64)
    adaptc.compile(model, "cpu", output=tmp_path / "a.adapt", **options)
    report = verify(tmp_path / "a.adapt", levels=("operator",))
    assert report.passed, [finding for level in report.levels for finding in level.findings]


@pytest.mark.parametrize("options", [{"kv": "int8"}, {"weights": "int4"}, {"kv": "bf16"}, {"activations": "int8"}], ids=str)
def test_goldens_are_judged_by_what_values_are_stored_in(tmp_path, options):
    """float32's tolerance for logits is no other format's; a mean divergence is, and it finds a model gone wrong."""
    model = tiny_models.write(tmp_path / "m", num_hidden_layers=1)
    golden.record(str(model), tmp_path / "g.safetensors", prompts=("Hello",), steps=4)
    adaptc.compile(model, "cpu", output=tmp_path / "a.adapt", goldens=tmp_path / "g.safetensors", max_step_tokens=64,
                   **options)
    assert verify(tmp_path / "a.adapt", levels=("model",)).passed

    def of_other_tokens(recorded: bytes) -> bytes:
        tensors = load(recorded)
        return save(tensors | {"top_ids": (tensors["top_ids"] + 1) % tiny_models.VOCABULARY})

    planted.copy(tmp_path / "a.adapt", tmp_path / "b.adapt", "goldens.safetensors", of_other_tokens)
    report = verify(tmp_path / "b.adapt", levels=("model",))
    assert not report.passed and "divergence" in str([f.what for level in report.levels for f in level.findings])


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_rounding_is_allowed_and_a_missing_term_is_not(scale):
    """A float32 sum of 512 terms in order stays within the bound; one that lacks one term doesn't."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((n, 512)).astype(np.float32) * np.float32(scale) for n in (3, 4))
    wanted = row("linear").meaning({}, x, w)[0]
    total = np.zeros((3, 4), np.float32)
    for i in range(512):
        total += x[:, i, None] * w[None, :, i]
    check = lambda got: tolerances.excess(row("linear"), {}, (x, w), got, 0, wanted, 512)  # noqa: E731
    assert (lambda error, bound: error <= bound)(*check(total))
    assert (lambda error, bound: error > bound)(*check(total - x[:, 9, None] * w[None, :, 9]))


def test_what_cancels_within_a_group_is_nobodys_fault():
    """GELU as x·(1 + tanh u)/2: where tanh is almost -1 its last bit decides; another constant is still found."""
    def group(cubic: float) -> dict:
        ops = (("constant", (), {"value": number, "shape": (), "dtype": "f32"}) for number in (cubic, 0.79788456, 1.0, 0.5))
        body = (*ops, ("mul", (0, 0), {}), ("mul", (5, 0), {}), ("mul", (6, 1), {}), ("add", (0, 7), {}),
                ("mul", (8, 2), {}), ("tanh", (9,), {}), ("add", (10, 3), {}), ("mul", (0, 11), {}), ("mul", (12, 4), {}))
        return {"body": body, "yields": (13,)}

    x = np.linspace(-5, 3, 4001, dtype=np.float32)
    wanted = row("group").meaning(group(0.044715), x)[0]
    inner = np.float32(0.79788456) * (x + np.float32(0.044715) * x * x * x)
    other = np.float32(0.5) * x * (1 + np.nextafter(np.tanh(inner.astype(np.float64)).astype(np.float32), np.float32(0)))
    assert not np.array_equal(other, wanted)
    assert tolerances.excess(row("group"), group(0.044715), (x,), other, 0, wanted, 1).ratio <= 1
    wrong = row("group").meaning(group(0.0447), x)[0]
    assert tolerances.excess(row("group"), group(0.044715), (x,), wrong, 0, wanted, 1).ratio > 1


def test_a_choice_is_exact_and_a_code_may_lie_between_two():
    """Of 1000, one 8-bit code may be off by one; a router's choice may not."""
    for dtype, allowed in ((np.int8, True), (np.int32, False)):
        wanted = np.zeros(1000, dtype)
        got = wanted.copy()
        got[17] = 1
        excess = lambda: tolerances.excess(row("top_k"), {}, (), got, 1, wanted, 1)  # noqa: E731
        assert (excess().ratio <= 1) == allowed
        got[17] = 2
        assert excess().ratio > 1


def test_not_a_number_must_meet_its_like():
    same = np.array([np.nan, np.inf, 1.0], np.float32)
    error, bound = tolerances.excess(row("add"), {}, (same, same), same, 0, same, 1)
    assert error <= bound
    for other in (np.array([0, np.inf, 1], np.float32), np.array([np.nan, -np.inf, 1], np.float32)):
        error, bound = tolerances.excess(row("add"), {}, (same, same), other, 0, same, 1)
        assert error > bound
    assert tolerances.relative(np.array([np.nan]), np.array([1.0])) == np.inf


def test_owners_are_found_by_what_tokens_must_be():
    owners = Owners()
    owners.promise([5, 6, 7])
    owners.promise([5, 9], more=True)
    requests, positions = owners.of(np.array([5, 6, 5, 9]), np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1]))
    assert requests.tolist() == [0, 0, 1, 1] and positions.tolist() == [0, 1, 0, 1]
    requests, positions = owners.of(np.array([3, 7]), np.array([2, 9]), np.array([0, 1]))  # a wrong position is told
    assert requests.tolist() == [1, 0] and positions.tolist() == [2, 2]
    closed = Owners()
    closed.promise([5, 6])
    with pytest.raises(Disagrees, match="continue none"):
        closed.of(np.array([6]), np.array([1]), np.array([0]))


def test_a_crash_is_reported_and_an_error_keeps_its_sentence():
    import ctypes

    note = Note()

    def crash():
        note.put(17)
        ctypes.string_at(0)

    with pytest.raises(Crashed) as caught:
        guarded(crash, note)
    assert (caught.value.cause, caught.value.operator) == ("SIGSEGV", 17)
    assert guarded(lambda: [1, "two"], note) == [1, "two"] and note.get() is None

    def refuse():
        raise OptionError("no.", hint="Try yes.")

    with pytest.raises(OptionError, match="no. Try yes."):
        guarded(refuse, note)
    with pytest.raises(Failed, match="ZeroDivisionError"):
        guarded(lambda: 1 // 0, note)


def test_places_are_the_plans_operators(artifact):
    subject = Subject(artifact)
    assert [(p.spec.op, p.source) for p in subject.places] == [(o.op, o.source) for o in subject.plan.operators()]
    assert all(subject.users(name) for name in subject.stored), "every weight is read by some operator"
