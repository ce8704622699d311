"""The order of passes, and why each stands where it does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from adaptc.errors import one_of
from adaptc.ir import legality
from adaptc.ir.module import STAGES, Program
from adaptc.options import CompileOptions
from adaptc.passes.absorb_latent import AbsorbLatent
from adaptc.passes.base import Pass, run_pass
from adaptc.passes.bind_transposes import BindTransposes
from adaptc.passes.clean_up import CleanUp
from adaptc.passes.decompose import Decompose
from adaptc.passes.drop_unit_dims import DropUnitDims
from adaptc.passes.fuse_add_norm import FuseAddNorm
from adaptc.passes.fuse_gated_linear import FuseGatedLinear
from adaptc.passes.group_elementwise import GroupElementwise
from adaptc.passes.hoist_weight_math import HoistWeightMath
from adaptc.passes.lay_out_weights import LayOutWeights
from adaptc.passes.merge_linears import MergeLinears
from adaptc.passes.plan_memory import PlanMemory
from adaptc.passes.push_views import PushViews
from adaptc.passes.quantize_activations import QuantizeActivations
from adaptc.passes.raise_layer_norm import RaiseLayerNorm
from adaptc.passes.raise_rms_norm import RaiseRmsNorm
from adaptc.passes.raise_rope import RaiseRope
from adaptc.passes.select_kernels import SelectKernels
from adaptc.passes.sink_sampled_rows import SinkSampledRows
from adaptc.passes.store_states import StoreStates
from adaptc.passes.store_weights import StoreWeights
from adaptc.passes.trim_signatures import TrimSignatures
from adaptc.protocol import Codegen, OpSpec


Stages = tuple[tuple[str, tuple[Pass, ...]], ...]


def fusion() -> tuple[Pass, ...]:
    """captured → fused: independent of target and options, so one fused program serves every artifact of a model."""
    return (
        # identities and constants first: what follows matches patterns, and has one spelling of each to match
        CleanUp(),
        # needs bodies as captured; before norms are raised, as (w - 1) + 1 must be w when the norm reads it
        HoistWeightMath(),
        # transposes of weights stand in @step then, beside the weights
        BindTransposes(),
        CleanUp(),
        # bigger patterns are made of smaller ones: norms from arithmetic before views move, as a view that splits the
        # normalised axis would pass the arithmetic and tear it apart, but doesn't pass a norm
        RaiseRmsNorm(),
        # a layer norm is the norm of what is left when the mean is taken off
        RaiseLayerNorm(),
        # hoisting left arguments unused; results that are arguments go before shapes at boundaries are changed
        TrimSignatures(),
        # boundaries first, then the insides: views can cancel only against those that stand at the boundaries
        DropUnitDims(),
        PushViews(),
        # needs heads and widths on axes of their own, which moving views has brought about
        RaiseRope(),
        # rope reads cos and sin as [T, D]: the views that gave them a head dimension move to where they cancel
        PushViews(),
        # shared columns of keys are whole results of a rope then; before merging, as matrices are found by their linears
        AbsorbLatent(),
        # takes gate and up out of the linears of one input, before the rest of these are merged
        FuseGatedLinear(),
        FuseAddNorm(),
        # before merging: which maps share an input can change when some of them need only the sampled rows
        SinkSampledRows(),
        MergeLinears(),
        # last: whatever elementwise arithmetic no pattern has claimed
        GroupElementwise(),
    )


def layout(options: CompileOptions, codegen: Codegen, key_block: int) -> tuple[Pass, ...]:
    """sharded → laid_out: formats, caches (``key_block``: keys that attention takes at once), and only operators that
    the backend has."""

    def supports(spec: OpSpec) -> bool:
        return codegen.select(spec) is not None

    return (
        # formats first: which bodies are clones, and which inputs can be quantised, follows from them
        StoreWeights(options.weights),
        StoreStates(options.kv_dtype, options.page_size, key_block, options.max_context),
        QuantizeActivations(options.activations),
        # when types and operands are final: what a backend supports depends on them
        Decompose(supports, getattr(codegen, "needs", lambda operator: "")),
        # decompositions make elementwise arithmetic; grouping it again costs fewer passes over memory
        GroupElementwise(supports),
        # last: no operator's meaning depends on the packing order
        LayOutWeights(codegen.tile),
    )


def lowering(options: CompileOptions, codegen: Codegen) -> tuple[Pass, ...]:
    """laid_out → lowered: kernels, then memory, which needs the kernels' scratch sizes."""
    return (
        SelectKernels(codegen),
        PlanMemory(options.max_step_tokens, options.max_requests, options.max_requests),
    )


def pipeline(options: CompileOptions, codegen: Codegen | None = None, key_block: int = 16) -> Stages:
    """(stage reached, passes that reach it) in order. Without a backend's codegen it ends at the sharded stage."""
    stages: Stages = (
        ("fused", fusion()),
        # one device: nothing to propagate, no collectives
        ("sharded", ()),
    )
    if codegen is not None:
        stages += (("laid_out", layout(options, codegen, key_block)), ("lowered", lowering(options, codegen)))
    return stages


@dataclass(frozen=True)
class PassTime:
    """Seconds a pass took, its checks included."""

    stage: str
    name: str
    seconds: float


After = Callable[[Program, PassTime], None]
"""Called after each pass with what it has made of the program."""


@dataclass(frozen=True)
class Lowered:
    """A program at every stage that was reached (the given one included), and what the passes took."""

    programs: dict[str, Program]
    times: tuple[PassTime, ...] = field(compare=False)

    @property
    def last(self) -> Program:
        return list(self.programs.values())[-1]


def passes_named(names: Sequence[str], options: CompileOptions = CompileOptions(), codegen: Codegen | None = None,
                 key_block: int = 16) -> tuple[Pass, ...]:
    """Passes by name, with the options they have in the pipeline. OptionError names one that is none of them."""
    known = {one.name: one for _, passes in pipeline(options, codegen, key_block) for one in passes}
    for name in names:
        if name not in known:
            raise one_of("pass", name, known)
    return tuple(known[name] for name in names)


def run_passes(program: Program, passes: Sequence[Pass], after: After | None = None, stage: str = "",
               ) -> tuple[PassTime, ...]:
    """Runs passes on a program in place. LegalityError when one broke a rule."""
    times = []
    for one in passes:
        start = time.perf_counter()
        run_pass(program, one)
        times.append(PassTime(stage or program.stage, one.name, time.perf_counter() - start))
        if after:
            after(program, times[-1])
    return tuple(times)


def lower_to(program: Program, stage: str, options: CompileOptions = CompileOptions(), codegen: Codegen | None = None,
             key_block: int = 16, after: After | None = None) -> Lowered:
    """Takes a program from whatever stage it is in to ``stage``. The given program isn't changed; those of different
    stages share nothing, and each is made from the printed text of the one before. From the laid-out stage on,
    ``options.max_context`` must be a number of tokens.

    OptionError for an unknown stage, one that lies behind, or one that needs a codegen; LegalityError when a pass
    broke a rule.
    """
    if stage not in STAGES:
        raise one_of("stage", stage, STAGES)
    legality.check(program)
    ahead = STAGES[STAGES.index(program.stage) :]
    stages = pipeline(options, codegen, key_block)
    reachable = [program.stage, *(s for s, _ in stages if s in ahead[1:])]
    if stage not in reachable:
        raise one_of(f"stage to reach (from {program.stage!r}, {'with' if codegen else 'without'} a backend):", stage,
                     reachable)
    programs, times = {program.stage: program}, ()
    current = program
    for name, passes in stages:
        if name not in ahead[1:] or current.stage == stage:
            continue
        current = current.copy()
        times += run_passes(current, passes, after, name)
        current.set_fact("stage", name)
        legality.check(current)
        programs[name] = current
    return Lowered(programs, times)
