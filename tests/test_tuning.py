"""A tuning: which choices are made from which times, its file, and that it changes kernels and not one bit of a result."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from click.testing import CliRunner
from test_cpu_linear import FAMILIES, activations, operands_of, run, spec, weight

import adaptc
from adaptc import backends, driver, tuning
from adaptc.artifact_format import TUNING
from adaptc.cli import main
from adaptc.errors import DamagedFileError, ExistsError, OptionError, OutputError
from adaptc.plan import Buffer, Call, Kernel, Operator, Plan, Segment, Symbol
from adaptc.protocol import KernelSpec
from adaptc.runtime import tune
from adaptc.runtime.loader import load_artifact
from adaptc.tuning import Tuning, key_of

pytestmark = pytest.mark.usefixtures("kept_captures")

CODEGEN = backends.codegen("cpu")

# ---- the law: no choice changes a bit


def combinations(choices) -> list[dict[str, int]]:
    """Every value of every choice, in changing company."""
    longest = max(map(len, choices.values()))
    return [{name: values[(i + (i // longest) * place) % len(values)] for place, (name, values) in enumerate(choices.items())}
            for i in range(2 * longest)]


@pytest.mark.parametrize("op, x, weights, attrs", [
    ("linears", "i8", [("q4_1", 13), ("q6_k", 8)], {}),
    ("gated_linear", "f32", [("q5_0", 11), ("bf16", 11)], {"act": "silu"}),
])
def test_every_choice_gives_the_same_bits(op, x, weights, attrs):
    """Also of rows beyond a chunk, of fewer than a tile, and of no multiple of a tile."""
    k = {"i8": 8192, "f32": 2048}[x]  # 8 rows fill the smallest chunk
    packs = [weight(name, n, k, seed)[1] for seed, (name, n) in enumerate(weights)]
    one = spec(op, x, k, weights, **attrs)
    for rows in (1, 3, 21):
        operands = [*operands_of(x, activations(rows, k) / 8), *packs]
        plain = [result.tobytes() for result in run(one, operands, rows)]
        for choices in combinations(FAMILIES[op].choices):
            assert [r.tobytes() for r in run(one, operands, rows, 2, choices)] == plain, choices


def test_choices_that_are_the_defaults_are_the_same_kernel():
    (use,) = CODEGEN.select(spec("linear", "i8", 64, [("q4_1", 16)])).uses
    legal = CODEGEN.choices("linears")
    defaults = tuning.chosen(use.kernel, {name: values[0] for name, values in legal.items()})
    assert CODEGEN.symbol(defaults) == CODEGEN.symbol(use.kernel)
    others = {CODEGEN.symbol(tuning.chosen(use.kernel, {name: values[1]})) for name, values in legal.items()}
    assert len(others | {CODEGEN.symbol(use.kernel)}) == 1 + len(legal)
    assert CODEGEN.signature(defaults) == CODEGEN.signature(use.kernel)


# ---- what is chosen from which times

CHOICES = {"tile": (4, 2, 8), "ahead": (0, 64)}


def clock(cost):
    """Times of every variant by ``cost(kernel, choices, step)``."""
    return lambda variants: [{kernel: {step: cost(kernel, {"tile": 4, "ahead": 0} | choices, step)
                                       for step in ("decode", "prefill")} for kernel, choices in one.items()}
                             for one in variants]


def test_the_fastest_is_chosen_by_kernel():
    def cost(kernel, c, step):
        return {"a": {4: 2.0, 2: 1.0, 8: 3.0}, "b": {4: 2.0, 2: 2.5, 8: 1.5}}[kernel][c["tile"]]

    found = tune.choose({"a": CHOICES, "b": CHOICES}, clock(cost))
    assert found == {"a": ({"tile": 2}, 0.5), "b": ({"tile": 8}, 0.75)}


def test_all_kinds_of_steps_count_the_same():
    """A choice that saves a quarter here and doubles the time there isn't made."""
    worse = {"decode": 0.75, "prefill": 2.0}
    better = {"decode": 0.5, "prefill": 1.5}
    assert tune.choose({"a": CHOICES}, clock(lambda k, c, s: worse[s] if c["tile"] == 8 else 1.0)) == {}
    ((choices, time),) = tune.choose({"a": CHOICES}, clock(lambda k, c, s: better[s] if c["tile"] == 8 else 1.0)).values()
    assert choices == {"tile": 8} and time == pytest.approx(0.75**0.5)


def test_what_is_within_the_noise_stays_as_it_is():
    assert tune.choose({"a": CHOICES}, clock(lambda k, c, s: 0.99 if c["tile"] == 2 else 1.0)) == {}


def test_later_choices_stand_on_earlier_ones():
    """Asking ahead pays only with large tiles here."""
    def cost(kernel, c, step):
        return {4: 2.0, 2: 2.0, 8: 1.0}[c["tile"]] * (0.5 if c["ahead"] and c["tile"] == 8 else 1.0 + c["ahead"])

    assert tune.choose({"a": CHOICES}, clock(cost)) == {"a": ({"tile": 8, "ahead": 64}, 0.25)}


def test_what_gains_only_once_is_not_chosen():
    rounds = itertools.count()

    def measure(variants):
        lucky = next(rounds) == 0
        return [{"a": {"decode": 0.5 if lucky and choices["a"] else 1.0}} for choices in variants]

    assert tune.choose({"a": CHOICES}, measure) == {}


def test_kernels_with_different_choices():
    fewer = {"ahead": (0, 64)}
    found = tune.choose({"a": CHOICES, "b": fewer}, clock(lambda k, c, s: 1.0 if c["ahead"] else 2.0))
    assert found == {"a": ({"ahead": 64}, 0.5), "b": ({"ahead": 64}, 0.5)}
    assert tune.choose({}, clock(lambda k, c, s: 1.0)) == {}


# ---- measuring, with a launcher whose clock is a table


def tiny_plan() -> Plan:
    operators = tuple(Operator(i, "linear", "", "cpu", (Call(kernel, ("x", f"w{i}")),), (), {}, {})
                      for i, kernel in enumerate(("a", "b", "a", "other")))
    buffers = tuple(Buffer(f"w{i}", "weight", "u8", (100,), 100, 0, f"weight {i}") for i in range(4))
    kernels = tuple(Kernel(name, f"{name}.o", ("in:f32[T]", "weight:q4_1[1,1]")) for name in ("a", "b", "other"))
    return Plan("cpu", ("x",), "cpu", 9, 64, 32, 4, 16, 16, 0, tuple(Symbol(n, m) for n, m in (("T", 32), ("R", 4), ("S", 4))),
                buffers, kernels, (), (), (Segment("native", operators),), {}, {})


class Clockwork:
    """A launcher and its executables: ``seconds(kernel, T, turn)`` is what a call takes."""

    def __init__(self, seconds):
        self.seconds, self.weights, self.order, self.closed = seconds, [], [], 0

    def load(self, plan, objects, weights, *, threads, pages):
        self.weights.append(weights)
        kernels = {o.id: o.calls[0].kernel for o in plan.operators()}
        assert set(kernels.values()) == {kernel.symbol for kernel in plan.kernels}, "kernels that nothing calls"
        turns, outer = itertools.count(), self

        class Loaded:
            def run(self, symbols, *, only=None, times=False):
                turn = next(turns)
                outer.order.append((tuple(kernels.values()), symbols["T"]))
                ran = kernels if only is None else only
                return {o: outer.seconds(kernels[o], symbols["T"], turn) for o in ran}

            def close(self):
                outer.closed += 1

        return Loaded()


def test_variants_take_turns_and_the_least_counts():
    noisy = Clockwork(lambda kernel, rows, turn: {"a": 4.0, "fast": 2.0}.get(kernel, 1.0) * rows + turn % 3)
    plan = tiny_plan()
    fast = replace(plan.kernels[0], symbol="fast")
    plain, tuned = tune.measure(plan, [{"a": plan.kernels[0]}, {"a": fast}], {}, noisy, 1)
    assert plain == {"a": {"decode": 8.0, "batch": 2 * 32.0, "prefill": 2 * 128.0}}
    assert tuned == {"a": {"decode": 4.0, "batch": 2 * 16.0, "prefill": 2 * 64.0}}
    assert [kernels[0] for kernels, _ in noisy.order] == ["a", "fast"] * (len(noisy.order) // 2)
    assert noisy.closed == 2


def test_rounds_end_when_nothing_gets_faster():
    """Soon when all readings are alike; later when they still fall; at last in any case."""
    counts = []
    for seconds in (lambda kernel, rows, turn: 1.0, lambda kernel, rows, turn: 1.0 + max(0, 20 - turn),
                    lambda kernel, rows, turn: 0.9**turn):
        launcher = Clockwork(seconds)
        tune.measure(tiny_plan(), [{"a": tiny_plan().kernels[0]}], {}, launcher, 1)
        counts.append(sum(rows == 1 for _, rows in launcher.order))
    assert counts[0] <= tune.PATIENCE + 2 < 20 < counts[1] < tune.ROUNDS < counts[2] <= tune.ROUNDS + 1


def test_stand_in_weights(monkeypatch):
    """Aligned, whole, each variant's own, and no more of them than a pool holds; or one that is larger."""
    kernel = tiny_plan().kernels[0]
    for pool, different in ((1 << 28, 8), (512, 4), (1, 1)):
        monkeypatch.setattr(tune, "_POOL", pool)
        launcher = Clockwork(lambda kernel, rows, turn: 1.0)
        tune.measure(tiny_plan(), [{"a": kernel}, {"a": kernel}], {}, launcher, 1)
        places = [np.frombuffer(view, np.uint8) for weights in launcher.weights for view in weights.values()]
        assert [len(place) >= 100 for place in places] == [True] * 8
        assert all(place.ctypes.data % 64 == 0 and set(place) == {0x3C} for place in places)
        assert len({place.ctypes.data for place in places}) == different


def test_steps_stay_within_the_plan():
    assert tune.steps(tiny_plan()) == {"decode": {"T": 1, "R": 1, "S": 1}, "batch": {"T": 8, "R": 4, "S": 4},
                                       "prefill": {"T": 32, "R": 1, "S": 1}}


# ---- the file

KERNEL = KernelSpec("linears", (("k", 64), ("rows", "T"), ("weights", (("q4_1", 16),)), ("x", "i8")))
OTHER = replace(KERNEL, params=(("k", 32), *KERNEL.params[1:]))


def test_a_file_is_the_same_whatever_the_order(tmp_path):
    rows = {key_of(KERNEL): {"tile": 2, "ahead": 0}, key_of(OTHER): {"ahead": 1024}}
    times = {key_of(KERNEL): 0.51239999, key_of(OTHER): 0.9}
    one = Tuning("cpu", "x86-64-v3", rows, times)
    turned = Tuning("cpu", "x86-64-v3", dict(reversed(rows.items())), dict(reversed(times.items())))
    assert one.to_json() == turned.to_json() and b"0.512" in one.to_json()
    path = tmp_path / "t.json"
    path.write_bytes(one.to_json())
    back = tuning.read(path, CODEGEN)
    assert back == one and back.to_json() == one.to_json()


def test_times_are_for_people():
    one = Tuning("cpu", "x86-64-v3", {key_of(KERNEL): {"tile": 2}}, {key_of(KERNEL): 0.5})
    assert one.digest == replace(one, times={}).digest == replace(one, times={key_of(KERNEL): 0.6}).digest
    assert one.digest != replace(one, choices={key_of(KERNEL): {"tile": 8}}).digest
    assert one.digest != replace(one, level="x86-64-v4").digest


def test_defaults_are_no_choices():
    text = Tuning("cpu", "x86-64-v3", {key_of(KERNEL): {"tile": 4}, key_of(OTHER): {"tile": 2, "ahead": 2048}}).to_json()
    assert tuning.parse(text, "t", CODEGEN).choices == {key_of(OTHER): {"tile": 2}}


GOOD = {"tuning": 1, "backend": "cpu", "level": "x86-64-v3",
        "kernels": [{"family": "linears", "params": {"k": 64}, "choices": {"tile": 2}, "time": 0.5}]}


def changed(**fields):
    """GOOD with fields of it, or of its kernel, set; None takes one away."""
    data = json.loads(json.dumps(GOOD))
    for name, value in fields.items():
        owner = data if name in ("tuning", "backend", "level", "kernels", "note") else data["kernels"][0]
        if value is None:
            del owner[name]
        else:
            owner[name] = value
    return json.dumps(data)


@pytest.mark.parametrize("text, error, words", [
    ("", DamagedFileError, "JSON"),
    ("{" * 100000, DamagedFileError, "JSON"),
    ("\xff", DamagedFileError, "JSON"),
    ("[]", DamagedFileError, "expected an object, got list"),
    (changed(tuning=2), DamagedFileError, "version 2; this adaptc reads 1"),
    (changed(tuning=True), DamagedFileError, "'tuning' can't be True"),
    (changed(backend="triton"), OptionError, "backend 'triton', but the target's is 'cpu'"),
    (changed(level=None), DamagedFileError, "'level' is missing"),
    (changed(level=3), DamagedFileError, "'level' can't be 3"),
    (changed(note="x"), DamagedFileError, "'note' is unknown"),
    (changed(kernels={}), DamagedFileError, "'kernels' can't be {}"),
    (changed(kernels=[1]), DamagedFileError, "kernel 0 is no tuning: expected an object, got int"),
    (changed(params=None), DamagedFileError, "kernel 0: the field 'params' is missing"),
    (changed(time="fast"), DamagedFileError, "'time' can't be 'fast'"),
    (changed(family="lineaars"), DamagedFileError, "linears"),
    (changed(family="quantize"), DamagedFileError, "tile = 2 can't be chosen for quantize; allowed is none"),
    (changed(choices={"tile": 7}), DamagedFileError, "tile = 7 can't be chosen for linears; allowed is one of 4, 2"),
    (changed(choices={"tile": True}), DamagedFileError, "tile = True can't be chosen"),
    (changed(choices={"tile": [2]}), DamagedFileError, "can't be chosen"),
    (changed(choices={"k": 32}), DamagedFileError, "k = 32 can't be chosen for linears; allowed is none"),
    (changed(kernels=GOOD["kernels"] * 2), DamagedFileError, "kernel 1: this kernel stands there twice"),
])
def test_bad_files(tmp_path, text, error, words):
    path = tmp_path / "bad.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(error) as caught:
        tuning.read(path, CODEGEN)
    assert words in str(caught.value) and "bad.json" in str(caught.value)


def test_no_file(tmp_path):
    with pytest.raises(DamagedFileError, match="No such file"):
        tuning.read(tmp_path / "none.json", CODEGEN)


# ---- compiling with one

OPTIONS = {"page_size": 4, "max_step_tokens": 16, "max_requests": 4, "activations": "int8", "level": "x86-64-v3"}


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_models.write(tmp_path_factory.mktemp("tuning") / "model", "llama")


@pytest.fixture(scope="module")
def plain(model) -> Path:
    adaptc.compile(model, output=model.parent / "plain.adapt", **OPTIONS)
    return model.parent / "plain.adapt"


@pytest.fixture(scope="module")
def tuned(model) -> tuple[Path, Path]:
    """An artifact made with --tune by a clock that likes tiles of 2 rows, and the file."""
    out, path, choose = model.parent / "tuned.adapt", model.parent / "tuning.json", tune.choose

    def chosen(kernels, measure, progress):
        return choose(kernels, clock(lambda kernel, choices, step: 1.0 if choices["tile"] == 2 else 2.0), progress)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "choose", chosen)
        adaptc.compile(model, output=out, tune=path, **OPTIONS)
    return out, path


def test_tuning_changes_kernels_and_no_bit_of_a_result(plain, tuned):
    out, path = tuned
    rows = json.loads(path.read_text())["kernels"]
    assert rows and all(row["choices"] == {"tile": 2} and row["time"] == 0.5 for row in rows)
    before, after = load_artifact(plain).plan, load_artifact(out).plan
    assert len({k.symbol for k in after.kernels} - {k.symbol for k in before.kernels}) == len(rows)
    assert [k.signature for o in after.operators() for c in o.calls for k in after.kernels if k.symbol == c.kernel] == [
        k.signature for o in before.operators() for c in o.calls for k in before.kernels if k.symbol == c.kernel]
    tokens = np.random.default_rng(0).integers(10, tiny_models.VOCABULARY, 40).tolist()
    with adaptc.load(plain) as one, adaptc.load(out) as other:
        for chunk in (None, 1, 5):
            assert one.score(tokens, chunk=chunk).tobytes() == other.score(tokens, chunk=chunk).tobytes()


def test_the_same_tuning_gives_the_same_bytes(model, tuned, tmp_path):
    """As it was made or read from its file, whatever its times, and whatever else it has choices for."""
    out, path = tuned
    wanted = files(out)
    data = json.loads(path.read_text())
    for row in data["kernels"]:
        row["time"] = 0.25
    data["kernels"].append({"family": "linears", "params": {"k": 7}, "choices": {"tile": 8}})
    other = tmp_path / "other.json"
    other.write_text(json.dumps(data))
    for number, given in enumerate((path, other)):
        adaptc.compile(model, output=tmp_path / f"{number}.adapt", tuning=given, **OPTIONS)
        assert files(tmp_path / f"{number}.adapt") == wanted
    manifest = load_artifact(out).manifest
    assert TUNING in manifest["files"] and b"time" not in wanted[TUNING] and len(json.loads(wanted[TUNING])["kernels"])


def test_a_tuning_for_other_kernels_leaves_no_trace(model, plain, tmp_path):
    path = tmp_path / "other.json"
    path.write_bytes(Tuning("cpu", OPTIONS["level"], {key_of(KERNEL): {"tile": 2}}).to_json())
    adaptc.compile(model, output=tmp_path / "a.adapt", tuning=path, **OPTIONS)
    assert files(tmp_path / "a.adapt") == files(plain)


def test_what_a_tuned_artifact_shows(plain, tuned, model, tmp_path):
    """Inspected, it is the plan it runs; and its printed stages lead back to its bytes."""
    out, path = tuned
    facts = driver.inspect(out)
    assert facts.plan == load_artifact(out).plan
    used = tuning.parse((out / TUNING).read_bytes(), TUNING, CODEGEN)
    assert facts.summary["tuning"] == {"kernels": len(used.choices), "sha256": used.digest}
    assert driver.inspect(plain).summary["tuning"] == "none"
    stage = tmp_path / "lowered.mlir"
    stage.write_text(driver.stage_text(out, "lowered"))
    adaptc.compile(model, output=tmp_path / "again.adapt", from_ir=stage, tuning=path, **OPTIONS)
    assert files(tmp_path / "again.adapt") == files(out)


def test_verification_covers_tuned_kernels(tuned):
    """It calls the plan's own kernels, so one that is wrong is found."""
    done = CliRunner().invoke(main, ["verify", str(tuned[0]), "--level", "operator", "--json"])
    assert done.exit_code == 0, done.output


def test_measuring_for_real(model, tmp_path, monkeypatch):
    """Whatever this machine finds, the file says it, and the file gives the same bytes."""
    every = type(CODEGEN).choices
    monkeypatch.setattr(type(CODEGEN), "choices", lambda self, family: {n: v[:2] for n, v in every(self, family).items()})
    monkeypatch.setattr(tune, "ROUNDS", 1)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    path, out, again = tmp_path / "t.json", tmp_path / "a.adapt", tmp_path / "b.adapt"
    done = CliRunner().invoke(main, ["compile", str(model), "-o", str(out), "--tune", str(path), *flags])
    assert done.exit_code == 0, done.output
    found = tuning.read(path, CODEGEN)
    assert found.level == OPTIONS["level"] and all(0 < time < 1 for time in found.times.values())
    done = CliRunner().invoke(main, ["compile", str(model), "-o", str(again), "--tuning", str(path), *flags])
    assert done.exit_code == 0, done.output
    assert files(again) == files(out)


def test_what_cannot_be_tuned(model, tmp_path):
    """Every reason is known before anything takes time."""
    there = tmp_path / "there.json"
    there.write_bytes(Tuning("cpu", "x86-64-v4", {key_of(KERNEL): {"tile": 2}}).to_json())
    for_v3 = tmp_path / "v3.json"
    for_v3.write_bytes(Tuning("cpu", "x86-64-v3").to_json())
    for error, words, given in (
        (OptionError, "kernels of one level, but level has x86-64-v2, x86-64-v3",
         {"tune": tmp_path / "t", "level": "x86-64-v2,x86-64-v3"}),
        (OutputError, "does not exist", {"tune": tmp_path / "no" / "t"}),
        (ExistsError, "already exists", {"tune": there}),
        (OptionError, "which of them is meant", {"tune": tmp_path / "t", "tuning": for_v3}),
        (OptionError, "tuning for level x86-64-v4, but the artifact is for x86-64-v3", {"tuning": there}),
    ):
        with pytest.raises(error, match=words):
            adaptc.compile(model, output=tmp_path / "a.adapt", **OPTIONS | given)
        assert not (tmp_path / "a.adapt").exists()
