"""The command's tools, in this process: opt, coverage, bench, profile table, completion, and ids of errors."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner
from fake_codegen import FakeCodegen

import tiny_models
from adaptc import backends
from adaptc.cli import main
from adaptc.errors import LegalityError, OptionError, TooLongError
from adaptc.plan import evaluate
from adaptc.runtime import bench as benching
from adaptc.runtime.session import load


def adaptc_(*args, code: int = 0):
    done = CliRunner().invoke(main, [str(a) for a in args])
    assert done.exit_code == code, (done.output, done.exception)
    return done


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_models.write(tmp_path_factory.mktemp("tools") / "model")


@pytest.fixture(scope="module")
def artifact(model) -> Path:
    adaptc_("compile", model, "-o", model.parent / "a.adapt", "--max-step-tokens", 16)
    return model.parent / "a.adapt"


@pytest.fixture(scope="module")
def captured(model) -> Path:
    path = model.parent / "captured.mlir"
    path.write_text(adaptc_("inspect", model, "--ir", "captured").stdout)
    return path


# ---- opt


def test_passes_run_by_name_and_in_order(captured, tmp_path):
    shown = ("--print-after", "clean_up", "--time-passes")
    done = adaptc_("opt", captured, "--passes", "clean_up, raise_rms_norm", *shown)
    assert done.stdout.count("adaptc.rms_norm") == 3 and "adaptc.rsqrt" not in done.stdout
    assert done.stderr.count("// after ") == 1 and done.stderr.startswith("// after clean_up\nmodule")
    assert "adaptc.rsqrt" in done.stderr and "raise_rms_norm" in done.stderr.splitlines()[-1]
    every = adaptc_("opt", captured, "--to", "fused", "--print-after", "all")
    names = [line[9:] for line in every.stderr.splitlines() if line.startswith("// after ")]
    assert names[:4] == ["clean_up", "hoist_weight_math", "bind_transposes", "clean_up"] and names[-1] == "group_elementwise"
    adaptc_("opt", captured, "--to", "fused", "-o", tmp_path / "fused.mlir")
    assert (tmp_path / "fused.mlir").read_text() == every.stdout


def test_compile_shows_its_passes_once_whatever_the_levels(model, artifact, tmp_path):
    """The program is the same for all levels; printing it changes no byte of the artifact."""
    flags = ("--max-step-tokens", 16, "--print-after", "raise_rope, plan_memory", "--time-passes")
    one = adaptc_("compile", model, "-o", tmp_path / "one.adapt", *flags)
    assert [line for line in one.stderr.splitlines() if line.startswith("// after ")] == [
        "// after raise_rope", "// after plan_memory"]
    assert '"adaptc.rope"' in one.stderr and "adaptc.arena_bytes" in one.stderr
    times = [line.split() for line in one.stderr.splitlines() if line.startswith(("fused ", "lowered "))]
    assert [(stage, name) for stage, name, _ in times if name in ("raise_rope", "plan_memory")] == [
        ("fused", "raise_rope"), ("lowered", "plan_memory")]
    files = sorted(path.relative_to(artifact) for path in artifact.rglob("*") if path.is_file())
    assert all((tmp_path / "one.adapt" / name).read_bytes() == (artifact / name).read_bytes() for name in files)
    two = adaptc_("compile", model, "-o", tmp_path / "two.adapt", "--level", "x86-64-v2,x86-64-v3", *flags)
    assert two.stderr.count("// after ") == 2
    done = adaptc_("compile", model, "-o", tmp_path / "x.adapt", "--print-after", "fuse", code=2)
    assert "unknown pass 'fuse'; valid values are: all, " in done.stderr and not (tmp_path / "x.adapt").exists()


def test_opt_takes_a_stage_where_inspect_does(captured, model):
    for stage, flags in (("fused", ()), ("lowered", ("--weights", "int8", "--page-size", "8"))):
        wanted = adaptc_("inspect", model, "--ir", stage, *flags).stdout
        assert adaptc_("opt", captured, "--to", stage, *flags).stdout == wanted


def test_opt_refuses(captured, tmp_path):
    for args, code, words in (
        ((captured, "--passes", "fuse"), "E0301", "unknown pass 'fuse'; valid values are: clean_up"),
        ((captured,), "E0300", "give either passes or the stage"),
        ((captured, "--passes", "clean_up", "--print-after", "all, typo"), "E0301", "unknown pass 'typo'; valid"),
        ((captured, "--passes", "clean_up", "--to", "fused"), "E0300", "give either"),
        ((captured, "--passes", "plan_memory"), "E0500", "plan_memory requires 'selected'"),
        ((tmp_path / "absent.mlir", "--passes", "clean_up"), "E0100", "absent.mlir"),
        ((captured, "--to", "fused", "-o", tmp_path / "no" / "x"), "E0800", "can't be written"),
    ):
        done = adaptc_("opt", *args, code=2)
        assert done.stderr.startswith(f"adaptc: [{code}] ") and words in done.stderr, done.stderr


def test_a_bad_operator_is_shown_where_it_stands(captured, tmp_path):
    text = captured.read_text()
    (tmp_path / "bad.mlir").write_text(text.replace('kind = "mean"', 'kind = "median"', 1))
    lines = adaptc_("opt", tmp_path / "bad.mlir", "--passes", "clean_up", code=2).stderr.splitlines()
    marked = [line for line in lines if line.startswith(">")]
    assert len(marked) == 1 and '"adaptc.reduce"' in marked[0] and 'kind = "median"' in marked[0]
    assert 5 <= len(lines) <= 9 and "unknown kind 'median'" in lines[0] and "adaptc.here" not in "\n".join(lines)
    assert all(len(line) < 210 for line in lines[1:])
    assert any('"adaptc.rsqrt"' in line for line in lines[1:])  # what follows it, with the function's own names
    (tmp_path / "cut.mlir").write_text(text.replace('"adaptc.rsqrt"(', '"adaptc.rsqrt"(%', 1))
    lines = adaptc_("opt", tmp_path / "cut.mlir", "--passes", "clean_up", code=2).stderr.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(">"))
    assert lines[0].startswith("adaptc: [E0103]") and "rsqrt" in lines[at] and lines[at + 1].strip() == "^"


def test_a_pass_that_breaks_a_rule_is_named_with_a_window(captured):
    from torch_mlir import ir

    from adaptc.ir.module import Program
    from adaptc.passes.base import run_pass
    from adaptc.passes.clean_up import CleanUp

    class Breaks:
        name, requires, ensures = "breaks", (), ()

        def run(self, program):
            CleanUp().run(program)
            op = next(op for _, op in program.operators() if op.operation.name == "adaptc.linear")
            with program.editing():
                op.operation.attributes["nonsense"] = ir.BoolAttr.get(True)

    with pytest.raises(LegalityError, match="after pass breaks: .*unknown attribute 'nonsense'") as caught:
        run_pass(Program.parse(captured.read_text()), Breaks())
    assert str(caught.value).count("\n>") == 1


def test_compile_names_the_pass_that_broke_a_rule(model, tmp_path, monkeypatch):
    """With the pass, the operator, its module and the lines around it; and leaves no artifact."""
    from adaptc.passes.merge_linears import MergeLinears

    def spoiled(self, program):
        from torch_mlir import ir

        op = next(op for _, op in program.operators() if op.operation.name == "adaptc.attention")
        with program.editing():
            op.operation.attributes["window"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 5)

    monkeypatch.setattr(MergeLinears, "run", spoiled)
    done = adaptc_("compile", model, "-o", tmp_path / "x.adapt", code=2)
    first, *lines = done.stderr.splitlines()
    assert first.startswith("adaptc: [E0500] after pass merge_linears: stage captured, @body0, module self_attn: ")
    assert "adaptc.attention is illegal: attention: window 5, the state's is 0" in first
    (marked,) = (line for line in lines if line.startswith(">"))
    assert '"adaptc.attention"' in marked and "window = 5" in marked and 5 <= len(lines) <= 8
    assert not (tmp_path / "x.adapt").exists()


# ---- coverage


def test_coverage_counts_every_operator_and_names_its_lines(model):
    rows = json.loads(adaptc_("coverage", model, "--json").stdout)
    by_name = {row["op"]: row for row in rows}
    assert by_name["attention"]["count"] == 3 and by_name["attention"]["modules"] == ["model.layers.*.self_attn"]
    assert all(row["status"] == "mapped" for row in rows)
    file = "transformers/models/llama/modeling_llama.py"
    assert all(line.startswith(file + ":") for row in rows for line in row["lines"])
    import transformers

    source = Path(transformers.__file__).parents[1] / file
    number = int(by_name["gated_linear"]["lines"][0].rpartition(":")[2])
    assert "gate_proj" in source.read_text().splitlines()[number - 1]
    # 3 layers of q, k, v, o and the MLP, and the head: 2 FLOPs a weight
    weights = 3 * (64 * 64 * 2 + 64 * 32 * 2) + 64 * 320
    maps = sum(by_name[op]["flops"] for op in ("linear", "linears"))
    assert maps == 2 * (weights + 3 * 96 * 64)
    text = adaptc_("coverage", model).stdout
    assert text.startswith("shares of a step of 1 token(s) with 128 in the cache")  # the model's own context
    assert "nothing is missing" in text and "100" not in text.splitlines()[3]


def test_coverage_of_an_artifact_is_the_models_without_lines(model, artifact):
    of_model, of_artifact = (json.loads(adaptc_("coverage", what, "--json").stdout) for what in (model, artifact))
    assert not any(row.pop("lines") for row in of_artifact) and all(row.pop("lines") for row in of_model)
    assert of_artifact == of_model


class Gaps(FakeCodegen):
    def packed_bytes(self, format, shape):
        return 4 * shape[0] * shape[1]


def test_coverage_lists_everything_that_is_missing(model, monkeypatch):
    lacks = ("attention", "embedding", "gated_linear", "silu", "tanh", "linears", "linear", "group", "sigmoid", "exp",
             "gather_rows", "dot_general")
    monkeypatch.setattr(backends, "codegen", lambda name: Gaps(*lacks))
    done = adaptc_("coverage", model, code=1)
    lines = done.stdout.splitlines()
    status = {line.split()[0]: line for line in lines[3:-1]}
    for name in ("attention", "gather_rows", "dot_general"):
        assert "missing" in status[name], status[name]
    assert "decomposed into" in status["gated_linear"] and "linear" in status["gated_linear"]
    assert "modeling_llama.py" in status["attention"] and lines[-1].startswith("missing: ")
    assert {"attention", "gather_rows", "dot_general", "exp"} <= set(lines[-1].removeprefix("missing: ").split(", "))
    assert status["exp"].split()[1] == status["dot_general"].split()[1] == "0"  # only parts of what was decomposed


# ---- bench


def test_prompts_are_reproducible():
    one = benching.prompt(3, 40, 2, 1000)
    assert one.tolist() == benching.prompt(3, 40, 2, 1000).tolist() and one.min() >= 0 and one.max() < 1000
    assert benching.prompt(0, 4, 0, 49152).tolist() == [15728, 45622, 45022, 8654]
    others = [benching.prompt(*key, 1000).tolist() for key in ((4, 40, 2), (3, 40, 3), (3, 41, 2))]
    assert one.tolist() not in others


def test_bench_measures_every_point_and_leaves_the_session_usable(artifact):
    with load(artifact, threads=2) as session:
        before = session.generate("Hello", max_tokens=6, ignore_eos=True)
        found = benching.bench(session, prompt_lengths=[3, 40], concurrency=[1, 5], new_tokens=4, operators=True)
        assert session.generate("Hello", max_tokens=6, ignore_eos=True).token_ids == before.token_ids
    assert [(p.prompt_tokens, p.concurrency) for p in found.points] == [(3, 1), (3, 5), (40, 1), (40, 5)]
    for p in found.points:
        assert 0 < p.ttft_median <= p.ttft_worst and 0 < p.tpot_median <= p.tpot_worst
        assert p.generated_per_second > 0 and p.prefill_per_second > 0
    assert found.memory["weights"] > 300_000 and all(size > 0 for size in found.memory.values())
    phases = {(o.phase, o.op): o for o in found.operators}
    assert {("decode", "attention"), ("prefill", "linear"), ("decode", "gated_linear")} <= set(phases)
    assert not {"rms_norm", "embedding", "rope", "add"} & {o.op for o in found.operators}
    gated = [o for o in found.operators if o.op == "gated_linear"]
    assert {o.tokens for o in gated if o.phase == "decode"} == {1, 5}
    assert {o.tokens for o in gated if o.phase == "prefill"} == {3, 15, 16}
    assert {(o.tokens, o.context) for o in gated if o.phase == "decode"} == {(1, 4), (5, 4), (1, 41), (5, 41)}
    assert all(o.flops > 0 for o in found.operators), "no logits are asked for in the middle of a prompt"
    for o in gated:
        assert o.places == 3 and o.seconds > 0 and 2 * 2 * 64 * 96 * o.tokens <= o.flops < 2.2 * 2 * 64 * 96 * o.tokens


def test_bench_as_a_command(artifact):
    done = adaptc_("bench", artifact, "--prompt-lengths", "4", "--concurrency", "2", "--new-tokens", "3", "--ops")
    assert "TTFT ms" in done.stdout and "Kernels alone" in done.stdout and "weights" in done.stdout
    data = json.loads(adaptc_("bench", artifact, "--prompt-lengths", 4, "--concurrency", 1, "--json").stdout)
    assert data["points"][0]["new_tokens"] == 32 and data["operators"] == [] and data["seed"] == 0
    alone = adaptc_("bench", artifact, "--prompt-lengths", 4, "--concurrency", 1, "--new-tokens", 1).stdout
    assert alone.splitlines()[4].split()[5:7] == ["-", "-"]  # no time between one token and itself
    adaptc_("bench", artifact, "--prompt-lengths", 4, "--concurrency", 1, "--new-tokens", 2, "--seed", 2**64 - 1)
    for seed in (-1, 2**64):
        for command in ("bench", "profile", "verify"):
            assert "[E0300] seed must be" in adaptc_(command, artifact, "--seed", seed, code=2).stderr
    assert "[E0300] --concurrency" in adaptc_("bench", artifact, "--concurrency", "two", code=2).stderr
    assert "[E0702]" in adaptc_("bench", artifact, "--prompt-lengths", "120", code=2).stderr
    assert "[E0300] prompt_lengths must be" in adaptc_("bench", artifact, "--prompt-lengths", "0", code=2).stderr
    with load(artifact, threads=1) as session, pytest.raises(TooLongError, match="128 prompt tokens and 1 new"):
        benching.bench(session, prompt_lengths=[128], concurrency=[1], new_tokens=1)


def test_operators_run_alone_in_any_order(artifact):
    """The same operator on the same buffers gives the same, and times are of what ran."""
    with load(artifact, threads=2) as session:
        session.score([5, 6, 7])
        symbols = {"T": 3, "R": 1, "S": 3}
        linear = next(op for op in session.plan.operators() if op.op == "gated_linear")
        wanted = session.executable.read(linear.outputs[0], symbols)
        session.executable.run(symbols, stop_after=linear.id)
        wanted = session.executable.read(linear.outputs[0], symbols)
        times = session.executable.run(symbols, only=[linear.id] * 3, times=True)
        assert list(times) == [linear.id] and times[linear.id] > 0
        np.testing.assert_array_equal(session.executable.read(linear.outputs[0], symbols), wanted)
        assert session.executable.run(symbols, only=[]) is None
        with pytest.raises(OptionError, match="unknown operator 999"):
            session.executable.run(symbols, only=[linear.id, 999])
        whole = session.executable.run(symbols, times=True)
        assert set(whole) == {op.id for op in session.plan.operators()}


def test_forms_are_sums_of_products():
    assert evaluate({"": 5, "T": 2, "T*C<8": 3}, {"T": 4, "C": 100}) == 5 + 8 + 96
    assert evaluate({}, {}) == 0


# ---- the rest


def test_inspect_prints_one_thing():
    for flags in (("--plan", "--memory"), ("--plan", "--profile-table"), ("--ir", "fused", "--profile-table")):
        assert "[E0300] --ir, --plan, --memory and --profile-table each" in adaptc_("inspect", "x", *flags, code=2).stderr


def test_profile_table(model, artifact):
    text = adaptc_("inspect", model, "--profile-table", "--max-step-tokens", 16).stdout
    assert "decode (1 token)" in text and "prefill (16 tokens)" in text and "bandwidth" in text
    assert adaptc_("inspect", artifact, "--profile-table").stdout == text
    rows = json.loads(adaptc_("inspect", artifact, "--profile-table", "--json").stdout)
    assert {row["tokens"] for row in rows} == {1, 16} and all(row["bytes"] >= 0 for row in rows)


@pytest.mark.parametrize("shell, words", [("bash", "complete -o nosort"), ("zsh", "#compdef"), ("fish", "complete")])
def test_completion(shell, words, monkeypatch):
    monkeypatch.setattr("click.shell_completion.BashComplete._check_version", staticmethod(lambda: None))
    assert words in adaptc_("completion", shell).stdout


def test_completion_knows_commands_and_choices():
    from click.shell_completion import ShellComplete

    complete = ShellComplete(main, {}, "adaptc", "_ADAPTC_COMPLETE")
    words = lambda args, text: {item.value for item in complete.get_completions(args, text)}  # noqa: E731
    assert {"bench", "coverage", "compile", "completion"} <= words([], "")
    assert words(["compile", "--weights"], "i") == {"int8", "int4"}
    assert "--profile-table" in words(["inspect"], "--pro")


def test_run_samples_penalties_and_tools(artifact, tmp_path):
    flags = ("--max-tokens", 4, "--ignore-eos", "--temperature", 1.0, "--seed", 5)
    data = json.loads(adaptc_("run", artifact, "Hi", *flags, "-n", 3, "--logprobs", 1, "--json").stdout)
    assert len(data) == 3 and all(len(d["logprobs"]) == 4 for d in data)
    assert json.loads(adaptc_("run", artifact, "Hi", *flags, "--json").stdout)["token_ids"] == data[0]["token_ids"]
    text = adaptc_("run", artifact, "Hi", *flags, "-n", 2).stdout
    assert text.startswith("[0] ") and "\n[1] " in text
    done = json.loads(adaptc_("run", artifact, "Hi", *flags, "--logit-bias", "40=1e9", "--json").stdout)
    assert done["token_ids"] == [40] * 4
    spread = adaptc_("run", artifact, "Hi", *flags[2:], "--max-tokens", 9, "--presence-penalty", 1e6, "--json").stdout
    assert len(set(json.loads(spread)["token_ids"])) == 9
    (tmp_path / "tools.json").write_text('[{"name": "f"}]')
    adaptc_("run", artifact, "--chat", "Hi", "--tools", tmp_path / "tools.json", *flags)
    for args, code in (((artifact, "Hi", "--logit-bias", "x"), "E0300"),
                       ((artifact, "Hi", "--tools", "x.json"), "E0300"),
                       ((artifact, "--chat", "a", "--tools", tmp_path / "no.json"), "E0102"),
                       ((artifact, "Hi", "--min-p", 2), "E0300"), ((artifact, ""), "E0701"),
                       ((artifact, "Hi", "--logprobs", 2), "E0300"), ((artifact, "Hi", "-n", 99), "E0300"), ((artifact, "x" * 200), "E0702")):
        assert f"adaptc: [{code}] " in adaptc_("run", *args, code=2).stderr


def test_ids_of_errors(model, artifact, tmp_path):
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "manifest.json").write_text("{}")
    for args, code in (
        (("compile", tmp_path / "absent", "-o", tmp_path / "x"), "E0101"),
        (("inspect", artifact, "--ir", "molten"), "E0301"),
        (("compile", model, "-o", artifact), "E0801"), (("run", tmp_path / "damaged", "x"), "E0601"),
        (("run", tmp_path / "absent", "x"), "E0600"), (("compile", model, "-o", tmp_path / "no" / "x"), "E0800"),
    ):
        assert adaptc_(*args, code=2).stderr.startswith(f"adaptc: [{code}] "), args


# ---- profile


@pytest.fixture(scope="module")
def profiled(artifact, tmp_path_factory):
    """What `adaptc profile` says, its trace and its drawing."""
    folder = tmp_path_factory.mktemp("profile")
    flags = ("--prompt", 24, "--concurrency", 2, "--steps", 3, "--threads", 1, "--trace", folder / "trace.json",
             "--roofline", folder / "roof.svg")
    data = json.loads(adaptc_("profile", artifact, *flags, "--json").stdout)
    return data, json.loads((folder / "trace.json").read_text()), (folder / "roof.svg").read_text()


def test_profile_accounts_for_every_operator(profiled, artifact):
    data, _, _ = profiled
    with load(artifact) as session:
        plan = session.plan
    for phase in ("prefill", "decode"):
        rows = [row for row in data["rows"] if row["phase"] == phase]
        assert sum(row["places"] for row in rows) == len(plan.operators())
        assert sum(row["share"] for row in rows) == pytest.approx(1)
        assert all(row["seconds"] >= 0 and row["bound"] in ("compute", "bandwidth") for row in rows)
        assert any("model.layers.*." in row["module"] for row in rows)
    by_name = {phase["name"]: phase for phase in data["phases"]}
    assert by_name["prefill"]["tokens"] == 48 and 24 <= by_name["prefill"]["context"] <= 25  # one request may already decode
    assert by_name["decode"]["tokens"] == 2 and by_name["decode"]["context"] == 27
    assert by_name["decode"]["steps"] in (3, 4)
    assert all(0 < phase["operators"] <= phase["wall"] for phase in data["phases"])


def test_profile_counts_what_the_plan_counts(profiled, artifact):
    """A row of a matrix product: one prompt's tokens times the plan's FLOPs a token, its weight read once a chunk."""
    data, _, _ = profiled
    with load(artifact) as session:
        operators = {o.source: o for o in session.plan.operators() if o.source.endswith("mlp.down_proj")}
    row = next(r for r in data["rows"] if r["module"] == "model.layers.*.mlp.down_proj" and r["phase"] == "prefill"
               and r["op"] == "linear")
    chunks = 3  # 48 tokens, 16 a step
    values = [{"T": 16, "R": 2, "S": 2, "C": 24}] * chunks
    assert row["flops"] == sum(evaluate(o.flops, v) for o in operators.values() for v in values)
    assert row["bytes"] == sum(evaluate(o.traffic, v) for o in operators.values() for v in values)


def test_profile_measures_the_machine(profiled):
    peaks = profiled[0]["peaks"]
    assert peaks["threads"] == 1 and set(peaks["operations"]) == {"f32", "i8"}
    assert 1e8 < peaks["bandwidth"] < 1e12 and all(1e9 < rate < 1e13 for rate in peaks["operations"].values())


def test_a_trace_holds_every_step_and_operator_in_order(profiled, artifact):
    _, trace, _ = profiled
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    steps, operators = ([e for e in events if e["tid"] == tid] for tid in (1, 2))
    with load(artifact) as session:
        ids = [o.id for o in session.plan.operators()]
    assert [e["args"]["id"] for e in operators] == ids * len(steps)
    assert {e["name"] for e in steps} == {"prefill", "decode"}
    for row in (steps, operators):
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.5 for a, b in zip(row, row[1:]))


def test_a_roofline_is_a_drawing_with_its_roofs(profiled):
    drawing = profiled[2]
    xml = ElementTree.fromstring(drawing)
    words = [e.text or "" for e in xml.iter() if e.tag.endswith("text")]
    assert any("GB/s" in w for w in words) and any(w.startswith("f32 ") for w in words)
    assert any("% of the roof" in (e.text or "") for e in xml.iter() if e.tag.endswith("title"))


def test_a_profiles_prompt_fits_the_context(artifact):
    found = json.loads(adaptc_("profile", artifact, "--steps", 2, "--json").stdout)
    assert {p["context"] for p in found["phases"]} == {128 - 3, 128 - 1}


def test_profile_refuses(artifact, tmp_path):
    done = adaptc_("profile", artifact, "--prompt", 10**6, code=2)
    assert "more than the artifact's context" in done.stderr
    assert "prompt_tokens must be a positive integer" in adaptc_("profile", artifact, "--prompt", 0, code=2).stderr
    done = adaptc_("profile", artifact, "--prompt", 4, "--steps", 1, "--roofline", tmp_path / "no" / "x.svg", code=2)
    assert "can't be written" in done.stderr


# ---- bench --suite


def test_a_suite_records_a_baseline(artifact, tmp_path, monkeypatch):
    monkeypatch.setattr(benching, "SUITE", {"prompt_lengths": (8, 10**6), "concurrency": (1, 2), "new_tokens": 2,
                                            "rounds": 3})
    adaptc_("bench", artifact, "--suite", tmp_path / "base", "--threads", 1)
    data = json.loads((tmp_path / "base" / "baseline.json").read_text())
    assert [(p["prompt_tokens"], p["concurrency"]) for p in data["points"]] == [(8, 1), (8, 2)]
    assert data["digest"] == json.loads((artifact / "manifest.json").read_text())["digest"] and data["machine"]
    assert data["threads"] == 1 and data["memory"]["resident, most"] > 0
    words = (tmp_path / "base" / "baseline.svg").read_text()
    assert "prompts of 8" in words and ElementTree.fromstring(words) is not None
    for own in (("--ops",), ("--rounds", 1), ("--prompt-lengths", 8)):
        assert own[0] in adaptc_("bench", artifact, "--suite", tmp_path / "none", *own, code=2).stderr
    assert not (tmp_path / "none").exists()


def test_bench_takes_medians_over_rounds(artifact, monkeypatch):
    made = iter(float(i) for i in range(100))
    monkeypatch.setattr(benching, "_point", lambda session, length, many, new, seed: benching.Point(
        length, many, new, *[next(made)] * 6))
    with load(artifact) as session:
        found = benching.bench(session, prompt_lengths=[4], concurrency=[1, 2], rounds=3)
    # the first call warms up; rounds are outside, points inside
    assert [p.tpot_median for p in found.points] == [3.0, 4.0]
