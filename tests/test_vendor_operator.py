"""An operator from another package (``tests/cosine``): its row, its capture rule and its kernel come by entry points.

The model's own code calls an operator that neither torch nor adaptc has.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_MODULES_CACHE", tempfile.mkdtemp(prefix="adaptc-tests-modules-"))

import numpy as np
import planted
import pytest
import test_ops
import tiny_models

import adaptc
from adaptc import driver, packages
from adaptc.backends.cpu import codegen
from adaptc.backends.cpu.levels import level_of
from adaptc.backends.cpu.toolchain import PIPELINE
from adaptc.capture import rules
from adaptc.errors import AdaptcError, CaptureError, MissingPackageError, PackageError
from adaptc.ops import table
from adaptc.protocol import OpSpec
from adaptc.verify import verify

SOURCE = Path(__file__).parent / "cosine"
POINTS = {"adaptc.operators": "rows", "adaptc.capture": "rules", "adaptc.cpu.kernels": "kernels"}
SIZES = dict(page_size=4, max_step_tokens=16, max_requests=4, trust_remote_code=True)
TOKENS = list(range(10, 34))
QUERY_NORM = "model.layers.0.self_attn.q_norm"


def install(site: Path, groups=POINTS, name: str = "cosine-adaptc", module: str = "cosine_adaptc") -> Path:
    """What installing the package leaves in ``site``: its modules, and metadata with the entry points of ``groups``."""
    if not (site / module).exists():
        shutil.copytree(SOURCE / "cosine_adaptc", site / module, ignore=shutil.ignore_patterns("__pycache__"))
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    points = (f"[{group}]\ncosine = {module}.{file}\n" for group, file in POINTS.items() if group in groups)
    (info / "entry_points.txt").write_text("".join(points))
    return site


@contextlib.contextmanager
def installed(site: Path | None):
    """A process that starts with the packages of ``site``: what was read of others before is forgotten, and after."""
    tables = (table._tables, rules._tables, codegen._tables, codegen._symbol)
    forget = lambda: [cached.cache_clear() for cached in tables]  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in sys.modules if n.partition(".")[0] in ("cosine_adaptc", "other_adaptc")]:
            patch.delitem(sys.modules, name)
        if site is not None:
            patch.syspath_prepend(str(site))
        forget()
        try:
            yield
        finally:
            forget()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("operator")


@pytest.fixture(scope="module")
def model(folder) -> Path:
    """The authors' directory, with random weights; ``logits.npy`` is what their module gives for TOKENS."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    path = Path(shutil.copytree(SOURCE / "model", folder / "model"))
    stated = tiny_models.LLAMA | {
        "head_dim": 24, "model_type": "cosine", "norm_eps": 1e-6, "num_hidden_layers": 2,
        "auto_map": {"AutoConfig": "modeling_cosine.CosineConfig",
                     "AutoModelForCausalLM": "modeling_cosine.CosineForCausalLM"}}
    (path / "config.json").write_text(json.dumps(stated))
    config = AutoConfig.from_pretrained(path, trust_remote_code=True)
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, trust_remote_code=True).float().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():  # logits that aren't flat
            drawn = torch.randn_like(parameter) * 1.5 * parameter.shape[-1] ** -0.5
            parameter.copy_(torch.rand_like(parameter) * 3 + 0.5 if parameter.ndim == 1 else drawn)
    module.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(stated))
    with torch.inference_mode():
        np.save(path / "logits.npy", module(torch.tensor([TOKENS]), use_cache=False).logits[0].numpy())
    return path


@pytest.fixture(scope="module")
def site(folder) -> Path:
    return install(folder / "site")


@pytest.fixture(scope="module")
def compiled(model, site):
    """(the artifact, what compiling it reported)."""
    with installed(site):
        report = adaptc.compile(model, "cpu", output=model.parent / "with.adapt", **SIZES)
    return model.parent / "with.adapt", report


def matches_the_authors(model: Path, artifact: Path) -> None:
    wanted = np.load(model / "logits.npy")
    with adaptc.load(artifact, threads=1) as session:
        got = session.score(TOKENS, chunk=7)
    assert np.abs(got - wanted).max() < 1e-4 * np.abs(wanted).max()


def manifest(artifact: Path) -> dict:
    return json.loads((artifact / "manifest.json").read_text())


# ---- with it, and without


def test_without_the_package_the_model_is_refused(model, folder):
    with pytest.raises(CaptureError, match=rf"no rule for .*cosine\.l2_norm.*{QUERY_NORM} \(modeling_cosine.py:\d+: .*\)"
                                           ".*install the one that brings"):
        adaptc.compile(model, "cpu", output=folder / "none.adapt", **SIZES)
    assert not (folder / "none.adapt").exists()


def test_without_a_kernel_the_decomposition_runs(model, folder):
    """A package of a row and a rule alone: "register" before "implement"."""
    with installed(install(folder / "plain", ("adaptc.operators", "adaptc.capture"))):
        report = adaptc.compile(model, "cpu", output=folder / "decomposed.adapt", **SIZES)
        status = {row.op: row.status for row in report.coverage}
        assert status["head_l2_norm"].startswith("decomposed into") and "sqrt" in status["head_l2_norm"]
        assert verify(folder / "decomposed.adapt", levels=("layer",)).passed
    matches_the_authors(model, folder / "decomposed.adapt")
    (said,) = manifest(folder / "decomposed.adapt")["provenance"]["packages"].values()
    assert said["for"] == ["adaptc.capture", "adaptc.operators"]


def test_with_it_the_plan_names_the_kernel(model, site, compiled):
    artifact, report = compiled
    assert {row.op: row.status for row in report.coverage}["head_l2_norm"] == "mapped"
    plan = json.loads((artifact / "plan.json").read_text())
    own = [op for segment in plan["segments"] for op in segment["operators"] if op["op"] == "head_l2_norm"]
    assert [op["source"] for op in own][:2] == [QUERY_NORM, QUERY_NORM.replace("q_norm", "k_norm")] and len(own) == 4
    assert all(call["kernel"].startswith("head_l2_norm_") for op in own for call in op["calls"])
    matches_the_authors(model, artifact)


def test_verify_covers_it(site, compiled):
    with installed(site):
        report = verify(compiled[0])
    assert report.passed, report.first
    operators = next(level for level in report.levels if level.name == "operator")
    assert not any("head_l2_norm" in line for line in operators.left_out)
    assert any("head_l2_norm" in line and "around eps" in line for line in operators.covered)


@pytest.mark.parametrize("levels, change", [
    (("operator",), {"eps": 2e-6}),  # changes nothing at this model's values
    (("layer",), {"eps": 1e3}),
    (("operator",), {"shape": ("T", 4, 16)}),  # a tail dropped
])  # fmt: skip
def test_a_fault_in_its_kernel_is_named(site, compiled, tmp_path, levels, change):
    with installed(site):
        index = planted.find(compiled[0], "head_l2_norm", QUERY_NORM)
        report = verify(planted.kernel(compiled[0], tmp_path / "bad.adapt", index, 0, **change), levels=levels)
    assert not report.passed
    assert report.first.where == f"{index} head_l2_norm" and report.first.module == QUERY_NORM


# ---- the artifact: what it says of the package, and where it needs it


def test_the_manifest_names_version_and_content(compiled, folder):
    (name, said), = manifest(compiled[0])["provenance"]["packages"].items()
    assert name == "cosine-adaptc" and said["version"] == "1.0" and said["for"] == sorted(POINTS)
    again = install(folder / "again")
    with installed(again):
        assert packages.described({name: POINTS})[name] == said, "wherever the package lies"
        with (again / "cosine_adaptc" / "kernels.py").open("a") as file:
            file.write("# edited\n")
        assert packages.described({name: POINTS})[name]["sha256"] != said["sha256"]


def test_a_package_that_no_operator_uses_leaves_no_trace(site, tmp_path):
    model, texts = tiny_models.write(tmp_path / "model", num_hidden_layers=1), []
    for number, where in enumerate((None, site)):
        with installed(where):
            adaptc.compile(model, "cpu", output=tmp_path / f"{number}.adapt", **SIZES)
        texts.append((tmp_path / f"{number}.adapt" / "manifest.json").read_text())
    assert texts[0] == texts[1] and "cosine" not in texts[0]


def test_it_runs_without_the_package(compiled):
    """Kernels are in the artifact: a process without the package, torch and MLIR runs it to the same bits."""
    with adaptc.load(compiled[0], threads=1) as session:
        here = session.score(TOKENS)
    code = ("import sys, hashlib, adaptc\nwith adaptc.load(sys.argv[1], threads=1) as session:\n"
            f"    print(hashlib.sha256(session.score({TOKENS}).tobytes()).hexdigest())\n"
            "print({'torch', 'torch_mlir', 'cosine_adaptc'} & set(sys.modules))")
    done = subprocess.run([sys.executable, "-c", code, compiled[0]], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == [hashlib.sha256(here.tobytes()).hexdigest(), "set()"]


@pytest.mark.parametrize("tool", [verify, driver.inspect, lambda path: driver.stage_text(path, "laid_out")])
def test_tools_that_read_its_operators_ask_for_it(compiled, tool):
    with pytest.raises(MissingPackageError, match=r"with.adapt was compiled with the package cosine-adaptc 1\.0 .*isn't "
                                                  "installed"):
        tool(compiled[0])


# ---- packages that can't be used


BROKEN = {
    "an import error": ("rows", "import nothing_of_that_name\n", "can't be imported: ModuleNotFoundError: No module named "
                        "'nothing_of_that_name'"),
    "a syntax error": ("kernels", "def (\n", "can't be imported: SyntaxError"),
    "another protocol": ("rows", "PROTOCOL = 99\n", f"written for protocol 99 .*this adaptc has protocol "
                         f"{packages.PROTOCOL}"),
    "no protocol": ("rules", "del PROTOCOL\n", "doesn't say its PROTOCOL"),
    "no table": ("rules", "del RULES\n", "no table RULES"),
    "a row that is none": ("rows", "ROWS = ['head_l2_norm']\n", "'head_l2_norm' is a str, expected an .*OpRow"),
    "a row with too few factors": ("rows", "import dataclasses\nROWS = [dataclasses.replace(ROWS[0], factors='hd->he')]\n",
                                   "operator 'head_l2_norm': factors 'hd->he' have 1 terms for the operands x, temp"),
    "a row called as a declaration": ("rows", "import dataclasses\nROWS = [dataclasses.replace(ROWS[0], name='get')]\n",
                                      "operator 'get': a name"),
    "a row that isn't filled in": ("rows", "import dataclasses\nROWS = [dataclasses.replace(ROWS[0], operands=None)]\n",
                                   "reading ROWS of cosine_adaptc.rows failed: TypeError"),
    "a row without meaning": ("rows", "import dataclasses\nROWS = [dataclasses.replace(ROWS[0], meaning=None)]\n",
                              "meaning is None, expected a function"),
    "our operator's name": ("rows", "import dataclasses\nROWS = [dataclasses.replace(ROWS[0], name='linear')]\n",
                            "'linear' of its ROWS is adaptc's own"),
    "a rule of ours": ("rules", "RULES = {'aten.add': print}\n", "'aten.add' of its RULES is adaptc's own"),
    "a rule that is none": ("rules", "RULES = {'cosine.l2_norm': 'head_l2_norm'}\n", "'head_l2_norm' is no rule"),
    "our kernels' family": ("kernels", "FAMILIES = {'linears': FAMILIES['head_l2_norm']}\n",
                            "'linears' of its FAMILIES is adaptc's own"),
    "our operator's choice of kernels": ("kernels", "SELECT = {'linear': _select}\n", "'linear' of its SELECT is adaptc's"),
    "a family that is none": ("kernels", "FAMILIES = {'head_l2_norm': _emit}\n", "is no .*Family"),
    "a row that is declared twice": ("rows", "ROWS = ROWS * 2\n", "'head_l2_norm' of its ROWS is declared twice"),
}  # fmt: skip
READ = {"rows": table.table, "rules": rules.rules, "kernels": lambda: [codegen._rows(t) for t in ("SELECT", "FAMILIES")]}


def broken(folder: Path, module: str, addition: str) -> Path:
    site = install(folder / "site")
    with (site / "cosine_adaptc" / f"{module}.py").open("a") as file:
        file.write(addition)
    return site


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_package_is_a_sentence_that_names_it(tmp_path, fault):
    module, addition, words = BROKEN[fault]
    with installed(broken(tmp_path, module, addition)):
        with pytest.raises(PackageError, match=f"package cosine-adaptc 1.0 .*{words}.* uninstall cosine-adaptc"):
            READ[module]()


def test_two_packages_of_one_operator(tmp_path):
    site = install(tmp_path / "site")
    with installed(install(site, ("adaptc.operators",), "other-adaptc", "other_adaptc")):
        with pytest.raises(PackageError, match="package other-adaptc 1.0 .*'head_l2_norm' .*twice, first by the package "
                                               "cosine-adaptc 1.0"):
            table.table()


CRASHES = {
    "rows": ("def _fails(*a, **k): return 1 / 0\nimport dataclasses\nROWS = [dataclasses.replace(ROWS[0], infer=_fails)]\n",
             "infer of operator 'head_l2_norm' failed: ZeroDivisionError"),
    "rules": ("RULES = {'cosine.l2_norm': lambda w, x, t, eps: 1 / 0}\n", "the rule of 'cosine.l2_norm' failed: ZeroDiv"),
    "kernels": ("SELECT = {'head_l2_norm': lambda spec: spec.nothing}\n", "SELECT of 'head_l2_norm' failed: Attribute"),
}


@pytest.mark.parametrize("module", CRASHES)
def test_a_package_that_fails_when_called_is_named(model, tmp_path, module):
    addition, words = CRASHES[module]
    with installed(broken(tmp_path, module, addition)):
        with pytest.raises(AdaptcError, match=f"package cosine-adaptc 1.0 .*{words}"):
            adaptc.compile(model, "cpu", output=tmp_path / "out.adapt", **SIZES)


def test_a_broken_package_keeps_no_artifact_from_running(compiled, tmp_path):
    with installed(broken(tmp_path, "rows", "import nothing_of_that_name\n")):
        with adaptc.load(compiled[0], threads=1) as session:
            assert np.isfinite(session.score(TOKENS)).all()


# ---- align: the package's own tests


HEADS = (test_ops.Sample((test_ops.f("T", 3, 8), test_ops.f(3)), {"eps": 1e-6}),
         test_ops.Sample((test_ops.f(1, "T", 2, 5), test_ops.f(2)), {"eps": 0.5}))


@pytest.mark.parametrize("sample", HEADS)
def test_the_row_agrees_with_itself(site, sample):
    with installed(site):
        for sizes in test_ops.SIZES:
            test_ops.test_inference_says_what_the_meaning_gives("head_l2_norm", sample, sizes)
            test_ops.test_decomposition_means_the_same("head_l2_norm", sample, sizes)
        test_ops.test_axes_are_independent_slices("head_l2_norm", sample)


@pytest.mark.parametrize("width", [8, 20, 64, 67])
@pytest.mark.parametrize("shape, tokens", [(("T", 3), 5), ((1, "T", 2), 1), ((4,), 1)])
def test_the_kernel_against_its_formula(site, shape, tokens, width):
    import cpu_kernel
    import torch

    rng = np.random.default_rng(0)
    real = tuple(tokens if d == "T" else d for d in shape)
    x = (rng.standard_normal((*real, width)) * rng.choice([1e-7, 1.0, 1e4], (*real, 1))).astype(np.float32)
    temperature = rng.standard_normal(real[-1]).astype(np.float32)
    normalized = torch.nn.functional.normalize(torch.tensor(x).double(), dim=-1, eps=1e-6).numpy()
    operands = (test_ops.f(*shape, width), test_ops.f(shape[-1]))
    with installed(site):
        from cosine_adaptc import kernels

        spec = OpSpec("head_l2_norm", operands, operands[:1], {"eps": 1e-6})
        (got,) = cpu_kernel.run(kernels, spec, (x, temperature), (tokens, 1, 1))
        (thrice,) = cpu_kernel.run(kernels, spec, (x, temperature), (tokens, 1, 1), threads=3)
    wanted = temperature[:, None] * normalized
    assert np.array_equal(got, thrice) and np.abs(got - wanted).max() <= 4e-7 * np.abs(wanted).max()


def test_the_kernel_is_generated_for_every_level(site):
    """Also for those that this machine can't run, and for other machines without their instructions."""
    from torch_mlir import ir
    from torch_mlir.passmanager import PassManager

    with installed(site):
        emit = codegen._rows("FAMILIES")["head_l2_norm"].emit
        for level in ("x86-64-v2", "x86-64-v4", "armv8-a"):
            text = emit({"shape": ("T", 3, 20), "eps": 1e-6}, "kernel", level_of(level))
            with ir.Context(), ir.Location.unknown():
                lowered = ir.Module.parse(text)
                PassManager.parse(f"builtin.module({','.join(PIPELINE)})").run(lowered.operation)
            assert "llvm.x86" not in text
