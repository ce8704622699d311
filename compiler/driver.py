"""The roof: a model, a target and options in; an artifact and a report out. Everything else is called from here."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator, Sequence

from adaptc.errors import ExistsError, InputError, LegalityError, OptionError, OutputError, one_of
from adaptc.options import KEPT, CompileOptions

if TYPE_CHECKING:
    from adaptc.ir.module import Program
    from adaptc.passes.pipeline import After
    from adaptc.plan import Plan
    from adaptc.planner.coverage import CoverageRow
    from adaptc.planner.profile import ProfileRow
    from adaptc.runtime.peaks import Peaks
    from adaptc.tuning import Tuning

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, total)."""

DEFAULTS = CompileOptions()

TOLERANCES = {"logits_absolute": 5e-4, "greedy_margin": 1e-3}
"""Agreement with the authors' model in float32 where nothing is stored coarser: largest difference of a logit, and
the margin between the best two below which a greedy token may differ."""

DIVERGENCE = {"f16": 1e-2, "bf16": 5e-2, "int8": 5e-2, "int4": 5e-1}
"""Where weights, caches or activations are: mean KL divergence from the authors' model (nats), by the coarsest."""

PROFILE_CONTEXT = 1024
"""Cache rows that the profile table assumes a request has."""

NO_END = 32768
"""Tokens of a request of a model that sets no end to them, such as most recurrent ones, where no option says more."""

COVERAGE_TOKENS = 1
"""Tokens of the step whose FLOPs and bytes coverage gives shares of."""


@dataclass
class CompileReport:
    """What a compile did. ``seconds`` by stage; ``conversion_errors`` relative RMS error by tensor whose format was
    changed; ``format_notes`` why a weight hasn't the chosen format, or merged maps were parted over theirs; ``left_out``
    which tensors of the files nothing reads, and why; ``clones`` why a body stands more than once."""

    output: str
    model: str
    target: str
    levels: tuple[str, ...]
    options: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)
    profile: "list[ProfileRow]" = field(default_factory=list)
    coverage: "list[CoverageRow]" = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    bodies: dict[str, int] = field(default_factory=dict)
    clones: tuple[str, ...] = ()
    format_notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    conversion_errors: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def timed(self, stage: str):
        return _timed(self.seconds, stage)


def _silent(what: str, done: int, total: int) -> None:
    pass


def compile_model(model: Any, target: str = "cpu", *, output: str | os.PathLike,
                  from_ir: str | os.PathLike | None = None, goldens: str | os.PathLike | None = None,
                  tuning: str | os.PathLike | None = None, tune: str | os.PathLike | None = None,
                  force: bool = False, workers: int | None = None, progress: Progress = _silent,
                  after: "After | None" = None, **options: Any) -> CompileReport:
    """Compiles ``model`` (a GGUF file, a Hugging Face directory, a hub id, or a transformers module in memory) for
    ``target`` into ``output``.

    from_ir   a printed stage to start from instead of the captured graph; weights and tokenizer come from ``model``
    goldens   a file made by ``adaptc golden``, stored in the artifact
    tuning    a file that ``tune`` made: tile sizes and the like of kernels; it changes speed, and no bit of a result
    tune      measures on this machine what is fastest, writes it to this file, and goes on as if given it
    workers   processes that compile kernels; they change no byte of the result
    after     called with the program after each pass; passes run once, whatever the levels
    options   fields of ``adaptc.options.CompileOptions``

    Returns a CompileReport. Raises AdaptcError; then there is no output, and an old one with ``force`` is untouched.
    """
    from adaptc.artifact import check_output, write_artifact
    from adaptc.golden import read as read_goldens
    from adaptc.sources import open_source
    from adaptc.tuning import read as read_tuning

    chosen = CompileOptions.of(options)
    if workers is not None and workers < 1:
        raise OptionError(f"workers must be an integer of at least 1, got {workers}.")
    setup = _Setup.of(target, chosen)
    for level in setup.levels:
        setup.codegen.check_level(level)
    if tuning is not None:
        setup = setup.tuned(read_tuning(tuning, setup.codegen), os.fspath(tuning))
    if tune is not None:
        _check_tune(setup, Path(tune), tuning, force)
    output = Path(output)
    check_output(output, force=force)
    given = _parse_stage(from_ir) if from_ir else None
    report = CompileReport(str(output), "", target, setup.levels, setup.options.to_dict())
    with report.timed("open"):
        source = open_source(model, trust_remote_code=chosen.trust_remote_code, waive=chosen.waive)
        report.model = source.name
        golden_bytes = read_goldens(goldens, source) if goldens else None
    with report.timed("capture"):
        progress("capture", 0, 1)
        captured, setup = _capture(source, setup)
        report.options = setup.options.to_dict()
        if given is not None:
            _check_given(given, captured, from_ir)
            captured = given if given.stage == "captured" else captured
        progress("capture", 1, 1)
    with report.timed("passes"):
        programs = setup.lower(given or captured, "lowered", after)
    with report.timed("plan"):
        plan, kernels = setup.plan(programs["lowered"])
    workers = workers or len(os.sched_getaffinity(0))
    if tune is not None:
        with report.timed("tune"):
            found = _tune(setup, plan, kernels, workers, partial(progress, "tune"))
            write_text(Path(tune), found.to_json().decode())
            setup = setup.tuned(found, os.fspath(tune))
            programs |= setup.lower(programs["laid_out"], "lowered")
            plan, kernels = setup.plan(programs["lowered"])
    with report.timed("kernels"):
        objects = setup.compile(kernels, workers, partial(progress, "kernels"))
    _describe(report, source, setup, programs["lowered"], plan)
    with report.timed("weights"):
        provenance = _versions() | _packages(setup, captured, programs["laid_out"], kernels)
        contents = _contents(source, setup, plan, captured, programs, objects, golden_bytes, setup.choices(kernels),
                             provenance, report, progress)
        write_artifact(output, contents, force=force)
    return report


@dataclass(frozen=True)
class Survey:
    """How a target carries out every operator of a model. FLOPs and bytes are of a step of ``tokens`` tokens of one
    request with ``context`` tokens in the cache."""

    rows: "tuple[CoverageRow, ...]"
    tokens: int
    context: int

    @property
    def missing(self) -> "tuple[CoverageRow, ...]":
        return tuple(row for row in self.rows if row.missing)


def coverage(model: str | os.PathLike, target: str = "cpu", **options: Any) -> Survey:
    """How ``target`` carries out every operator of ``model``, whether or not it can be compiled for it."""
    from adaptc.passes.pipeline import lower_to

    captured, setup = _open(model, target, options)
    return _survey(captured, lower_to(captured, "sharded").last, setup)


def _survey(captured: "Program", sharded: "Program", setup: "_Setup") -> Survey:
    """``captured`` and ``sharded`` are a program at two stages."""
    from adaptc.passes.pipeline import layout, run_passes
    from adaptc.planner.coverage import Lenient, survey

    lenient = Lenient(setup.codegen)
    passes = layout(setup.pass_options(captured), lenient, setup.target.key_block)
    decompose = next(i for i, one in enumerate(passes) if one.name == "decompose")
    whole = sharded.copy()
    run_passes(whole, passes[:decompose])
    decomposed = whole.copy()
    run_passes(decomposed, passes[decompose : decompose + 1])
    context = min(PROFILE_CONTEXT, setup.context(captured))
    symbols = {"T": COVERAGE_TOKENS, "R": 1, "S": 1, "C": context}
    return Survey(tuple(survey(captured, whole, decomposed, setup.codegen, setup.codegen.packed_bytes, symbols)),
                  COVERAGE_TOKENS, context)


def optimise(path: str | os.PathLike, passes: Sequence[str] = (), to: str = "", target: str = "cpu",
             after: "After | None" = None, **options: Any) -> "Program":
    """The program of a printed stage after ``passes`` (names), or taken to the stage ``to`` by the pipeline. ``after``
    is called with the program after each pass, and what it took."""
    from adaptc.passes.pipeline import lower_to, passes_named, run_passes

    if bool(passes) == bool(to):
        raise OptionError("give either passes or the stage to reach.", hint="For example --passes clean_up.")
    chosen = CompileOptions.of(options)
    if chosen.waive:
        raise OptionError("waive has no meaning here: no model is opened, only a printed stage.")
    program = _parse_stage(path)
    setup = _Setup.of(target, chosen)
    rest = (setup.pass_options(program), setup.codegen, setup.target.key_block)
    if to:
        return lower_to(program, to, *rest, after).last
    run_passes(program, passes_named(passes, *rest), after)
    return program


def write_text(path: Path, text: str) -> None:
    """Writes a file for people or tools; OutputError says why it can't."""
    try:
        path.write_text(text)
    except OSError as error:
        raise OutputError(f"{path} can't be written: {error.strerror or error}.") from error


def make_folder(path: Path) -> None:
    """Makes a folder for results; OutputError says why it can't."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{path} can't be made a folder: {error.strerror or error}.") from error


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
    profile: "list[ProfileRow]"

    def to_dict(self) -> dict[str, Any]:
        return {"summary": self.summary, "memory": self.memory}


def inspect(what: str | os.PathLike, target: str = "cpu", **options: Any) -> Inspection:
    """Summary, memory plan and plan of a model or an artifact."""
    from adaptc.artifact_format import GOLDENS, MANIFEST

    program, setup = _open(what, target, options)
    lowered = setup.lower(program, "lowered")["lowered"]
    plan, kernels = setup.plan(lowered)
    tuning = setup.choices(kernels)
    summary = {
        "model": os.fspath(what), "target": setup.target.name, "levels": list(setup.levels),
        "vocabulary": plan.vocabulary,
        "max_context": plan.max_context, "operators a step": len(plan.operators()), "kernels": len(plan.kernels),
        "weights": sum(b.kind == "weight" for b in plan.buffers), "states": len(plan.states),
        "cache bytes a token": sum(s.token_bytes() for s in plan.states),
        "bodies": _bodies(lowered), "bodies cloned": list(lowered.fact("clones", ())),
        "options": setup.options.to_dict(),
        "tuning": {"kernels": len(tuning.choices), "sha256": tuning.digest} if tuning else "none",
    }
    if (Path(what) / MANIFEST).is_file():
        summary["goldens"] = "present" if (Path(what) / GOLDENS).is_file() else "none"
    return Inspection(summary, _memory(plan), plan, _profile(setup, lowered, plan))


@dataclass(frozen=True)
class Sizes:
    """What is known of a model from its configuration alone. ``other_parts`` are parameters of a wrapper's parts beside
    its text model, which ``parameters`` and ``active`` are of; ``weights`` are bytes of the files, as it says that they are
    stored; ``cache_token`` and ``cache_request`` bytes with ``kv`` rows and ``context`` tokens; ``cache_fixed`` what of the
    latter is there whatever the length, by what it is; ``bodies`` how many places call each distinct body; ``notes``
    what to know of how this was found."""

    model: str
    architecture: str
    parameters: int
    active: int
    other_parts: int
    weights: int
    kv: str
    context: int
    cache_token: int
    cache_request: int
    cache_fixed: dict[str, int]
    bodies: dict[str, int]
    coverage: Survey
    profile: "list[ProfileRow]"
    seconds: dict[str, float]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def sizes(path: str | os.PathLike, target: str = "cpu", **options: Any) -> Sizes:
    """The full-size model of a configuration (config.json, or a folder with that and no weights), captured, folded and
    fused without weights. InputError where ``path`` is no such thing.

    ``kv="auto"`` is here the configuration's own dtype.
    """
    from adaptc.capture import capture
    from adaptc.passes.pipeline import lower_to, run_passes
    from adaptc.passes.store_states import StoreStates
    from adaptc.planner.profile import profile
    from adaptc.planner.sizes import active, cache_bytes, fixed_bytes
    from adaptc.sources import open_described

    setup = _Setup.of(target, CompileOptions.of(options))
    source = open_described(path, setup.options.waive)
    spent: dict[str, float] = {}
    with _timed(spent, "capture"):
        captured = capture(source)
    with _timed(spent, "fuse"):
        sharded = lower_to(captured, "sharded").last
    whole = sharded.copy()
    kv = source.dtype.name if setup.options.kv == "auto" else setup.options.kv
    context = setup.context(captured)
    run_passes(whole, (StoreStates(kv, setup.options.page_size, setup.target.key_block, context),))
    with _timed(spent, "coverage"):
        coverage = _survey(captured, sharded, setup)
    with _timed(spent, "profile"):
        packed, assumed = type(source.dtype).published_bytes, min(PROFILE_CONTEXT, context)
        formats = {name: source.formats[w.tensor] for name, w in whole.weights().items() if w.tensor in source.formats}
        rows = [row for tokens in sorted({1, setup.options.max_step_tokens})
                for row in profile(whole, setup.target, packed, tokens=tokens, context=assumed, formats=formats)]
    token, request = cache_bytes(whole, context)
    stored = sum(source.formats[name].published_bytes(shape) for name, shape in source.shapes.items())
    return Sizes(source.name, source.architecture, sum(source.elements.values()), active(whole, source.elements),
                 source.other_parts(), stored, kv, context, token, request, fixed_bytes(whole), _bodies(whole),
                 coverage, rows, spent, (*source.notes(), *whole.fact("format_notes", ())))


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start


def peaks(backend: str, level: str, threads: int) -> "Peaks":
    """What this machine can do at most at ``level``, by the backend's probes, compiled here (its compiler must be
    installed)."""
    from adaptc import backends
    from adaptc.runtime.peaks import measure

    codegen = backends.codegen(backend)
    probes = codegen.probes(level)
    library = backends.launcher(backend).library(codegen.compile([p.kernel for p in probes.values()], level))
    return measure(library, probes, {what: codegen.symbol(p.kernel) for what, p in probes.items()}, threads)


def _check_tune(setup: "_Setup", path: Path, tuning: str | os.PathLike | None, force: bool) -> None:
    """That tuning is possible and its file can be written, before anything takes time."""
    if tuning is not None:
        raise OptionError("tune makes a tuning and tuning gives one; which of them is meant?")
    if len(setup.levels) > 1:
        raise OptionError(f"tune measures kernels of one level, but level has {', '.join(setup.levels)}.",
                          hint="Compile each level by itself.")
    if not path.parent.is_dir():
        raise OutputError(f"Can't write {path}: the directory {path.parent} does not exist.")
    if path.exists() and not force:
        raise ExistsError(f"{path} already exists.",
                          hint="Give another name or --force to replace it, or use it with --tuning.")


def _tune(setup: "_Setup", plan: "Plan", kernels, workers: int, progress: Callable[[int, int], None]) -> "Tuning":
    """What this machine's kernels do best with in the steps of ``plan``."""
    from adaptc import backends
    from adaptc.plan import Kernel
    from adaptc.runtime import tune
    from adaptc.runtime.host import physical_cores
    from adaptc.tuning import Tuning, chosen, key_of, tunable

    (level,), codegen = setup.levels, setup.codegen
    launcher = backends.launcher(setup.target.backend)
    launcher.choose_level(plan, level)
    known = tunable(codegen, kernels)

    def measure(variants):
        made = [{symbol: chosen(known[symbol][0], choices) for symbol, choices in one.items()} for one in variants]
        everything = {codegen.symbol(k): k for k in (*kernels, *(k for one in made for k in one.values()))}
        objects = codegen.compile([everything[symbol] for symbol in sorted(everything)], level, workers=workers)
        entries = {k: Kernel(symbol, codegen.object_of(k), codegen.signature(k)) for symbol, k in everything.items()}
        stand_ins = [{symbol: entries[k] for symbol, k in one.items()} for one in made]
        return tune.measure(plan, stand_ins, objects, launcher, physical_cores())

    found = tune.choose({symbol: choices for symbol, (_, choices) in known.items()}, measure, progress)
    keys = {symbol: key_of(kernel) for symbol, (kernel, _) in known.items()}
    return Tuning(codegen.name, level, {keys[s]: choices for s, (choices, _) in found.items()},
                  {keys[s]: time for s, (_, time) in found.items()})


@dataclass(frozen=True)
class _Setup:
    """Everything about a compile but the model."""

    target: Any
    options: CompileOptions
    levels: tuple[str, ...]
    codegen: Any
    tuning: "Tuning | None" = None

    @staticmethod
    def of(target: str, options: CompileOptions) -> "_Setup":
        from adaptc import backends, targets

        found = targets.target(target)
        codegen = backends.codegen(found.backend)
        found.check_dtype(KEPT[options.kv_dtype][0], f"kv={options.kv}")
        found.check_dtype("i8" if options.activations == "int8" else "f32", f"activations={options.activations}")
        wanted = [codegen.level(found.level(name.strip())) for name in options.level.split(",")]
        levels = tuple(dict.fromkeys(wanted))
        # what is recorded means the same on every machine; "native" doesn't
        return _Setup(found, replace(options, level=",".join(levels)), levels, codegen)

    def tuned(self, tuning: "Tuning", where: str) -> "_Setup":
        """With kernels chosen by ``tuning``, which was read from ``where``."""
        from adaptc.tuning import Tuned

        if self.levels != (tuning.level,):
            raise OptionError(f"{where} is a tuning for level {tuning.level}, but the artifact is for "
                              f"{', '.join(self.levels)}.", hint=f"Give --level {tuning.level}, or tune for another.")
        return replace(self, codegen=Tuned(self.codegen, tuning), tuning=tuning)

    def choices(self, kernels) -> "Tuning | None":
        """What of the tuning these kernels have; None when that is nothing."""
        used = self.tuning and self.tuning.used(kernels)
        return used if used and used.choices else None

    def context(self, program: "Program") -> int:
        """Tokens a request may have: what was asked for, or what the model's config says, or else ``NO_END``."""
        most = program.fact("context")
        if most and self.options.max_context > most:
            raise OptionError(f"max_context is {self.options.max_context}, but the model's positions end at {most}.")
        return self.options.max_context or most or NO_END

    def pass_options(self, program: "Program") -> CompileOptions:
        """What the passes are told: the context as a number of tokens."""
        return replace(self.options, max_context=self.context(program))

    def lower(self, program: "Program", stage: str, after: "After | None" = None) -> "dict[str, Program]":
        """The program in every stage from its own to ``stage``; from a later one than ``laid_out``, that too."""
        from adaptc.ir.lowered import laid_out
        from adaptc.passes.pipeline import lower_to

        options, key_block = self.pass_options(program), self.target.key_block
        programs = lower_to(program, stage, options, self.codegen, key_block, after).programs
        if program.stage == "lowered":
            programs["laid_out"] = laid_out(program)
            again = lower_to(programs["laid_out"], stage, options, self.codegen, key_block).last
            if program.fact("max_symbols") == again.fact("max_symbols"):  # else made with other options: see _check
                _check_same(program, again)
        return programs

    def plan(self, lowered: "Program") -> "tuple[Plan, tuple]":
        from adaptc.planner.emit import emit_plan

        plan, kernels = emit_plan(lowered, self.codegen, target=self.target.name, backend=self.target.backend,
                                  levels=self.levels, max_context=self.context(lowered))
        self._check(plan, lowered)
        return plan, kernels

    def _check(self, plan: "Plan", lowered: "Program") -> None:
        """That a plan made from a late stage's text is what the options say. OptionError names the one that isn't."""
        said = {name: getattr(self.options, name) for name in ("page_size", "max_step_tokens", "max_requests")}
        made = {name: getattr(plan, name) for name in said if plan.states or name != "page_size"}
        rows = [group for group in plan.groups if group.kind == "rows"]
        if rows:
            said |= {"kv": self.options.kv_dtype, "max_context": -(-plan.max_context // plan.page_size)}
            kept = next((s.dtype, s.scale) for s in plan.states if s.kind == "rows")
            made |= {"kv": next(name for name, pair in KEPT.items() if pair == kept), "max_context": rows[0].max_pages}
        for name in ("weights", "activations"):
            said[name], made[name] = getattr(self.options, name), lowered.fact(name)
        for name, value in made.items():
            if value != said[name]:
                got = f"{value} pages a request" if name == "max_context" else value
                raise OptionError(f"the given stage was made with another {name}, {got}.",
                                  hint="Give the options it was made with, or start from an earlier stage.")

    def compile(self, kernels, workers: int, progress: Callable[[int, int], None]) -> dict[str, bytes]:
        """Objects of every level by "<level>/<file name>"."""
        objects: dict[str, bytes] = {}
        for number, level in enumerate(self.levels):

            def shown(done: int, total: int, before: int = number) -> None:
                progress(before * total + done, len(self.levels) * total)

            made = self.codegen.compile(kernels, level, workers=workers, progress=shown)
            objects |= {f"{level}/{name}": code for name, code in made.items()}
        return objects


def _capture(source, setup: _Setup) -> "tuple[Program, _Setup]":
    """The source's program; and the setup with the names that were really waived in place of patterns of them."""
    from adaptc.capture import capture

    program = capture(source)
    return program, replace(setup, options=replace(setup.options, waive=source.waiver.names))


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


def _check_given(given: "Program", captured: "Program", path: str | os.PathLike) -> None:
    """That a given stage is of the model whose own program is ``captured``: of its sizes, reading each of its tensors
    and no others, in its shapes and rows. InputError names what isn't so."""
    for fact in ("vocabulary", "context"):
        if given.fact(fact) != captured.fact(fact):
            raise InputError(f"{path} says {fact} = {given.fact(fact)}, and the model has {captured.fact(fact)}.")
    read, own = ({_tensor_read(w): w.tensor for w in program.weights().values()} for program in (given, captured))
    hint = "The text and the model don't belong together."
    if unknown := sorted({read[key] for key in read.keys() - own.keys()}):
        raise InputError(f"{path} reads the tensor {unknown[0]!r} in a form that the model doesn't have.", hint=hint)
    if missing := sorted({own[key] for key in own.keys() - read.keys()}):
        raise InputError(f"{path} doesn't read the model's tensor {missing[0]!r}.", hint=hint)


def _tensor_read(weight) -> tuple:
    """The form in which a weight reads its tensor, but for an exchange of the last two axes, which a pass chooses."""
    shape = weight.spec.shape
    if weight.transposed:
        return weight.tensor, (), weight.stored, (*shape[:-2], shape[-1], shape[-2])
    return weight.tensor, weight.rows, weight.stored, shape


def _check_same(lowered: "Program", again: "Program") -> None:
    """That a given lowered program has the kernels and places that lowering it gives: nothing else says that a place
    is large enough and free, or that a kernel means what its operator does."""
    for number, (got, expected) in enumerate(zip(lowered.text().splitlines(), again.text().splitlines()), 1):
        if got != expected:
            at = next((i for i, (a, b) in enumerate(zip(got, expected)) if a != b), min(len(got), len(expected)))
            raise LegalityError(f"stage lowered, line {number}: expected …{expected[max(0, at - 60):at + 60]}…, got "
                                f"…{got[max(0, at - 60):at + 60]}….",
                                hint="Kernels and places follow from the laid-out stage: edit that one.")


def _open(what: str | os.PathLike, target: str, options: dict[str, Any]) -> "tuple[Program, _Setup]":
    """The captured program of a model or an artifact, and the setup it is (or was) compiled with."""
    from adaptc import packages
    from adaptc.artifact_format import CAPTURED, MANIFEST, TUNING
    from adaptc.sources import open_source
    from adaptc.tuning import parse

    if not hasattr(what, "named_parameters") and (Path(what) / MANIFEST).is_file():
        from adaptc.runtime.loader import load_artifact

        if asked := sorted(k for k, v in CompileOptions.of(options).to_dict().items() if v != getattr(DEFAULTS, k)):
            raise OptionError(f"{what} is an artifact: it shows the options it was compiled with, so {asked[0]} can't "
                              "be chosen.", hint="Inspect the model instead.")
        artifact = load_artifact(what)
        packages.require(artifact.manifest["provenance"], os.fspath(what))
        setup = _Setup.of(artifact.manifest["target"], CompileOptions.of(dict(artifact.manifest["options"])))
        if (tuning := artifact.read(TUNING)) is not None:
            setup = setup.tuned(parse(tuning, TUNING, setup.codegen), TUNING)
        return _parse_stage(Path(what) / CAPTURED), setup
    setup = _Setup.of(target, CompileOptions.of(options))
    chosen = setup.options
    return _capture(open_source(what, trust_remote_code=chosen.trust_remote_code, waive=chosen.waive), setup)


def _memory(plan: "Plan") -> dict[str, int]:
    """Bytes by purpose; caches by what a token costs, since the runtime decides how many pages there are."""
    kinds = ("weight", "input", "output", "pages")
    sizes = {f"{kind} buffers": sum(b.bytes for b in plan.buffers if b.kind == kind) for kind in kinds}
    cache = sum(s.token_bytes() for s in plan.states)
    kept = lambda s: min(plan.max_context, (s.window + plan.page_size) if s.window else plan.max_context)  # noqa: E731
    full = sum(s.token_bytes() * kept(s) + s.request_bytes() for s in plan.states)
    return {"arena (activations)": plan.arena_bytes, **sizes, "cache, a token": cache,
            f"cache, a request of {plan.max_context} tokens": full}


def _bodies(program: "Program") -> dict[str, int]:
    """How many places call each body."""
    from adaptc.ir.functions import bodies

    return {name: len(calls) for name, _, calls in bodies(program)}


def _profile(setup: _Setup, lowered: "Program", plan: "Plan") -> "list[ProfileRow]":
    """The compute profile of a decode step and of the longest prefill step."""
    from adaptc.planner.profile import profile

    packed, context = setup.codegen.packed_bytes, min(PROFILE_CONTEXT, plan.max_context)
    return [row for tokens in sorted({1, plan.max_step_tokens})
            for row in profile(lowered, setup.target, packed, tokens=tokens, context=context)]


def _describe(report: CompileReport, source, setup: _Setup, lowered: "Program", plan: "Plan") -> None:
    from adaptc.planner.coverage import coverage

    report.profile = _profile(setup, lowered, plan)
    report.coverage = coverage(lowered, setup.codegen)
    report.memory = _memory(plan)
    report.bodies = _bodies(lowered)
    report.clones = lowered.fact("clones", ())
    report.format_notes = (*source.format_notes(), *lowered.fact("format_notes", ()))
    report.left_out = lowered.fact("left_out", ())


def _contents(source, setup: _Setup, plan: "Plan", captured: "Program", programs, objects, goldens,
              tuning: "Tuning | None", provenance: dict[str, Any], report: CompileReport, progress: Progress):
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
    return ArtifactContents(
        model=source.name,
        plan=plan,
        captured=captured.text(),
        laid_out=programs["laid_out"].text(),
        objects=objects,
        weights=[Weight(b.source, b.bytes, partial(produce, declared[b.source])) for b in buffers],
        text=text.info,
        tokenizer=text.tokenizer_json or None,
        chat_template=text.chat_template,
        goldens=goldens,
        tuning=tuning and tuning.to_json(),
        sources=source.hashes,
        tensors=source.digests(),
        requirements={level: setup.codegen.requirements(level) for level in setup.levels},
        options=setup.options.to_dict(),
        tolerances=_tolerances(setup.options),
        provenance=provenance,
    )


def _tolerances(options: CompileOptions) -> dict[str, float]:
    """What verification judges goldens by."""
    coarse = [DIVERGENCE[kept] for kept in (options.weights, options.kv, options.activations) if kept in DIVERGENCE]
    return {"divergence": max(coarse)} if coarse else TOLERANCES


def _packed(source, codegen, weight) -> tuple[bytes, float]:
    """A weight as its type stores it, packed by the backend or, when its type has no format, dense; and the error
    that its format adds."""
    from adaptc.weights import stored_codes

    codes, error = stored_codes(source, weight)
    if weight.spec.format is None:
        return codes["codes"].tobytes(), error
    return codegen.pack(weight.spec.format, weight.spec.shape, codes), error


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("gguf", "torch", "torch-mlir", "transformers")}


def _packages(setup: _Setup, captured: "Program", laid_out: "Program", kernels) -> dict[str, Any]:
    """What installed packages an artifact is made with, beside adaptc's own parts; nothing when there are none."""
    from adaptc import backends, packages, targets
    from adaptc.ops import table

    operators = captured.operator_names() | laid_out.operator_names()
    chosen = getattr(setup.codegen, "packages", lambda operators, kernels: ())
    used = [
        *((table.package_of(name), packages.OPERATORS) for name in operators),
        *((package, packages.CAPTURE) for package in captured.fact("rules_of", ())),
        *((package, packages.CPU_KERNELS) for package in chosen(operators, kernels)),
        (backends.package_of(setup.target.backend), packages.BACKENDS),
        (targets.package_of(setup.target.name), packages.TARGETS),
    ]
    groups: dict[str, set[str]] = {}
    for package, group in used:
        if package is not None:
            groups.setdefault(package, set()).add(group)
    return {"packages": packages.described(groups)} if groups else {}
