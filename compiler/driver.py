"""The roof: a model, a target and options in; an artifact and a report out. Everything else is called from here."""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator

from adaptc.errors import InputError, OptionError, one_of
from adaptc.options import CompileOptions

if TYPE_CHECKING:
    from adaptc.ir.module import Program
    from adaptc.plan import Plan
    from adaptc.planner.coverage import CoverageRow
    from adaptc.planner.profile import ProfileRow

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, total)."""

TOLERANCES = {"logits_absolute": 5e-4, "greedy_margin": 1e-3}
"""Agreement of f32 activations with the authors' model in float32: largest difference of a logit, and the margin
between the best two below which a greedy token may differ."""

PROFILE_CONTEXT = 1024
"""Cache rows that the profile table assumes a request has."""


@dataclass
class CompileReport:
    """What a compile did. ``seconds`` by stage; ``conversion_errors`` relative RMS error by tensor whose format was
    changed; ``clones`` why a body stands more than once."""

    output: str
    model: str
    target: str
    level: str
    options: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)
    profile: "list[ProfileRow]" = field(default_factory=list)
    coverage: "list[CoverageRow]" = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    bodies: dict[str, int] = field(default_factory=dict)
    clones: tuple[str, ...] = ()
    conversion_errors: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


def _silent(what: str, done: int, total: int) -> None:
    pass


def compile_model(model: Any, target: str = "cpu", *, output: str | os.PathLike,
                  from_ir: str | os.PathLike | None = None, goldens: str | os.PathLike | None = None,
                  force: bool = False, workers: int | None = None, progress: Progress = _silent,
                  **options: Any) -> CompileReport:
    """Compiles ``model`` (a GGUF file, a Hugging Face directory, a hub id, or a transformers module in memory) for
    ``target`` into ``output``.

    from_ir   a printed stage to start from instead of the captured graph; weights and tokenizer come from ``model``
    goldens   a file made by ``adaptc golden``, stored in the artifact
    workers   processes that compile kernels; they change no byte of the result
    options   fields of ``adaptc.options.CompileOptions``

    Returns a CompileReport. Raises AdaptcError; then there is no output, and an old one with ``force`` is untouched.
    """
    from adaptc.artifact import check_output, write_artifact
    from adaptc.golden import read as read_goldens
    from adaptc.sources import open_source

    chosen = CompileOptions.of(options)
    setup = _Setup.of(target, chosen)
    output = Path(output)
    check_output(output, force=force)
    golden_bytes = read_goldens(goldens) if goldens else None
    given = _parse_stage(from_ir) if from_ir else None
    report = CompileReport(str(output), "", target, setup.level, chosen.to_dict())
    with report.timed("open"):
        source = open_source(model, trust_remote_code=chosen.trust_remote_code)
        report.model = source.name
    with report.timed("capture"):
        progress("capture", 0, 1)
        captured = given if given is not None and given.stage == "captured" else _capture(source)
        progress("capture", 1, 1)
    with report.timed("passes"):
        programs = setup.lower(given or captured, "lowered")
    with report.timed("plan"):
        plan, kernels = setup.plan(programs["lowered"])
    with report.timed("kernels"):
        objects = setup.codegen.compile(kernels, setup.level, workers=workers or len(os.sched_getaffinity(0)),
                                        progress=partial(progress, "kernels"))
    _describe(report, setup, programs["lowered"], plan)
    with report.timed("weights"):
        contents = _contents(source, setup, plan, captured, programs, objects, golden_bytes, report, progress)
        write_artifact(output, contents, force=force)
    return report


def stage_text(what: str | os.PathLike, stage: str, target: str = "cpu", **options: Any) -> str:
    """The printed IR of ``stage``: of a model, lowered with ``options``; of an artifact, as it was compiled."""
    program, setup = _open(what, target, options)
    return setup.lower(program, stage)[stage].text()


@dataclass(frozen=True)
class Inspection:
    """What is known of a model or an artifact without running it."""

    summary: dict[str, Any]
    memory: dict[str, int]
    plan: "Plan"

    def to_dict(self) -> dict[str, Any]:
        return {"summary": self.summary, "memory": self.memory}


def inspect(what: str | os.PathLike, target: str = "cpu", **options: Any) -> Inspection:
    """Summary, memory plan and plan of a model or an artifact."""
    program, setup = _open(what, target, options)
    lowered = setup.lower(program, "lowered")["lowered"]
    plan, _ = setup.plan(lowered)
    summary = {
        "model": os.fspath(what), "target": setup.target.name, "level": setup.level, "vocabulary": plan.vocabulary,
        "max_context": plan.max_context, "operators a step": len(plan.operators()), "kernels": len(plan.kernels),
        "weights": sum(b.kind == "weight" for b in plan.buffers), "states": len(plan.states),
        "cache bytes a token": sum(s.token_bytes() for s in plan.states),
        "bodies": {name: len(lowered.calls(name)) for name in lowered.functions() if name != "step"},
        "options": setup.options.to_dict(),
    }
    return Inspection(summary, _memory(plan), plan)


@dataclass(frozen=True)
class _Setup:
    """Everything about a compile but the model."""

    target: Any
    options: CompileOptions
    level: str
    codegen: Any

    @staticmethod
    def of(target: str, options: CompileOptions) -> "_Setup":
        from adaptc import backends, targets

        found = targets.target(target)
        return _Setup(found, options, found.level(options.level), backends.codegen(found.backend))

    def context(self, program: "Program") -> int:
        """Tokens a request may have: what was asked for, or what the model's config says."""
        most = program.fact("context")
        if most and self.options.max_context > most:
            raise OptionError(f"max_context is {self.options.max_context}, but the model's positions end at {most}.")
        return self.options.max_context or most

    def lower(self, program: "Program", stage: str) -> "dict[str, Program]":
        """The program in every stage from its own to ``stage``; from a later one than ``laid_out``, that too."""
        from adaptc.ir.lowered import laid_out
        from adaptc.passes.pipeline import PassOptions, lower_to

        o = self.options
        options = PassOptions(weights=o.weights, activations=o.activations, cache=o.kv_dtype, page_size=o.page_size,
                              key_block=self.target.key_block, max_context=self.context(program),
                              max_step_tokens=o.max_step_tokens, max_sampled=o.max_requests,
                              max_requests=o.max_requests)
        programs = lower_to(program, stage, options, self.codegen).programs
        if stage == "lowered" and "laid_out" not in programs:
            programs["laid_out"] = laid_out(programs["lowered"])
        return programs

    def plan(self, lowered: "Program") -> "tuple[Plan, tuple]":
        from adaptc.planner.emit import emit_plan

        return emit_plan(lowered, self.codegen, target=self.target.name, backend=self.target.backend,
                         level=self.level, options=self.options, max_context=self.context(lowered),
                         key_block=self.target.key_block)


def _capture(source) -> "Program":
    from adaptc.capture import capture

    return capture(source)


def _parse_stage(path: str | os.PathLike) -> "Program":
    from adaptc.ir import legality
    from adaptc.ir.module import STAGES, Program

    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} can't be read: {error}.") from error
    program = Program.parse(text, str(path))
    if program.stage not in STAGES:
        raise one_of(f"stage in {path}", program.stage, STAGES)
    legality.check(program)
    return program


def _open(what: str | os.PathLike, target: str, options: dict[str, Any]) -> "tuple[Program, _Setup]":
    """The captured program of a model or an artifact, and the setup it is (or was) compiled with."""
    from adaptc.artifact_format import CAPTURED, MANIFEST
    from adaptc.sources import open_source

    if not hasattr(what, "named_parameters") and (Path(what) / MANIFEST).is_file():
        from adaptc.runtime.loader import load_artifact

        artifact = load_artifact(what)
        setup = _Setup.of(artifact.manifest["target"], CompileOptions.of(dict(artifact.manifest["options"])))
        return _parse_stage(Path(what) / CAPTURED), setup
    setup = _Setup.of(target, CompileOptions.of(options))
    return _capture(open_source(what, trust_remote_code=setup.options.trust_remote_code)), setup


def _memory(plan: "Plan") -> dict[str, int]:
    """Bytes by purpose; caches by what a token costs, since the runtime decides how many pages there are."""
    kinds = ("weight", "input", "output", "pages")
    sizes = {f"{kind} buffers": sum(b.bytes for b in plan.buffers if b.kind == kind) for kind in kinds}
    cache = sum(s.token_bytes() for s in plan.states)
    full = sum(
        s.token_bytes() * min(plan.max_context, (s.window + plan.page_size) if s.window else plan.max_context)
        for s in plan.states
    )
    return {"arena (activations)": plan.arena_bytes, **sizes, "cache, a token": cache,
            f"cache, a request of {plan.max_context} tokens": full}


def _describe(report: CompileReport, setup: _Setup, lowered: "Program", plan: "Plan") -> None:
    from adaptc.planner.coverage import coverage
    from adaptc.planner.profile import profile

    packed = setup.codegen.packed_bytes
    context = min(PROFILE_CONTEXT, plan.max_context)
    for tokens in sorted({1, plan.max_step_tokens}):
        report.profile += profile(lowered, setup.target, packed, tokens=tokens, context=context)
    report.coverage = coverage(lowered, setup.codegen)
    report.memory = _memory(plan)
    report.bodies = {name: len(lowered.calls(name)) for name in lowered.functions() if name != "step"}
    report.clones = tuple(lowered.fact("clones", ()))


def _contents(source, setup: _Setup, plan: "Plan", captured: "Program", programs, objects, goldens,
              report: CompileReport, progress: Progress):
    from adaptc import artifact_format
    from adaptc.artifact import ArtifactContents, Weight

    declared = programs["lowered"].weights()
    buffers = sorted((b for b in plan.buffers if b.kind == "weight"), key=lambda b: b.source)
    done = iter(range(1, len(buffers) + 1))

    def produce(weight) -> bytes:
        packed, error = _packed(source, setup.codegen, weight)
        if error:
            report.conversion_errors[weight.tensor] = error
        progress("weights", next(done), len(buffers))
        return packed

    text = source.text()
    names = {k: v for k, v in (("bos_token", text.bos_token), ("eos_token", text.eos_token)) if v is not None}
    return ArtifactContents(
        model=source.name,
        plan=plan,
        captured=captured.text(),
        laid_out=programs["laid_out"].text(),
        objects=objects,
        weights=[Weight(b.source, b.bytes, partial(produce, declared[b.source])) for b in buffers],
        text=artifact_format.TextInfo(text.special_tokens.get(text.bos_token), text.add_bos, text.stop_ids, names),
        tokenizer=text.tokenizer_json or None,
        chat_template=text.chat_template,
        goldens=goldens,
        sources=source.hashes,
        tensors={name: _digest(tensor) for name, tensor in sorted(source.tensors.items())},
        requirements={"architecture": "x86_64", "level": setup.level},
        options=setup.options.to_dict(),
        tolerances=TOLERANCES if setup.options.activations == "f32" else {},
        provenance=_versions(),
    )


def _packed(source, codegen, weight) -> tuple[bytes, float]:
    """A weight as its type stores it, packed by the backend or, when its type has no format, dense; and the error
    that its format adds."""
    from adaptc.weights import stored_codes

    codes, error = stored_codes(source, weight)
    if weight.spec.format is None:
        return codes["codes"].tobytes(), error
    return codegen.pack(weight.spec.format, weight.spec.shape, codes), error


def _digest(tensor) -> str:
    import numpy as np

    return hashlib.sha256(np.ascontiguousarray(tensor.values(), "<f4")).hexdigest()


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("gguf", "torch", "torch-mlir", "transformers")}
