"""The plan: as JSON, damaged in every way, and emitted from a lowered program."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from math import prod

import pytest

from adaptc.errors import ArtifactError
from adaptc.ir import dialect, legality
from adaptc.ir.functions import retype
from adaptc.plan import (PLAN_VERSION, Buffer, CacheGroup, Call, Kernel, Operator, Plan, Segment, State, StatePart,
                         Symbol, kind_of)
from adaptc.planner.emit import emit_plan
from adaptc.planner.profile import places, profile
from adaptc.protocol import KernelSpec
from adaptc.targets import target
from test_ir import D, V, lowered

PLAN = Plan(
    target="cpu", levels=("x86-64-v3",), backend="cpu", vocabulary=7, max_context=64, max_step_tokens=8, max_requests=2,
    page_size=16, key_block=32, arena_bytes=4096,
    symbols=(Symbol("T", 8), Symbol("R", 2), Symbol("S", 2)),
    buffers=(Buffer("input:tokens", "input", "i32", ("T",), 32), Buffer("arena:0", "arena", "f32", ("T", 8), 256, 0)),
    kernels=(Kernel("copy", "copy.o", ("in:i32[T]", "out:f32[T,8]")),),
    states=(State("kv", "rows", "full", "f16", 0, (StatePart("k", 1, 8), StatePart("v", 1, 6))),),
    groups=(CacheGroup("full", 0, ("kv",), 4),),
    segments=(Segment("native", (Operator(0, "embedding", "embed", "cpu", (Call("copy", ("input:tokens", "arena:0")),),
                                          ("arena:0",), {"T": 8}, {"": 4, "T": 32}),)),),
    inputs={"tokens": "input:tokens"}, outputs={"logits": "arena:0"},
)


def test_json_round_trips():
    text = PLAN.to_json()
    assert Plan.from_json(text) == PLAN and Plan.from_json(text).to_json() == text
    assert hash(PLAN.states[0]) == hash(Plan.from_json(text).states[0])


def test_derived_facts():
    assert PLAN.states[0].token_bytes() == 2 * (8 + 6)
    coded = replace(PLAN.states[0], dtype="i8", scale="f32")
    assert coded.token_bytes() == sum(p.heads * (p.width + 4) for p in coded.parts)
    assert [op.op for op in PLAN.operators()] == ["embedding"]


def damaged(*path, value=None, drop=False) -> str:
    data = json.loads(PLAN.to_json())
    at = data
    for step in path[:-1]:
        at = at[step]
    if drop:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize("text,message", [
    (damaged("arena_bytes", drop=True), "plan: missing field 'arena_bytes'"),
    (damaged("colour", value=1), "plan: unknown field 'colour'"),
    (damaged("arena_bytes", value="4096"), "plan.arena_bytes: expected int, got '4096'"),
    (damaged("arena_bytes", value=4096.0), "plan.arena_bytes: expected int, got 4096.0"),
    (damaged("arena_bytes", value=True), "plan.arena_bytes: expected int, got True"),
    (damaged("arena_bytes", value=None), "plan.arena_bytes: expected int, got None"),
    (damaged("target", value=3), "plan.target: expected str, got 3"),
    (damaged("symbols", value={"T": 8}), "plan.symbols: expected a list, got dict"),
    (damaged("inputs", value=[]), "plan.inputs: expected an object, got list"),
    (damaged("symbols", 1, value="R"), r"plan.symbols\[1\]: expected an object, got str"),
    (damaged("symbols", 1, "max", value=False), r"plan.symbols\[1\].max: expected int, got False"),
    (damaged("buffers", 0, "shape", 0, value=2.5), r"plan.buffers\[0\].shape\[0\]: expected int or str, got 2.5"),
    (damaged("buffers", 1, "handle", drop=True), r"plan.buffers\[1\]: missing field 'handle'"),
    (damaged("states", 0, "parts", 1, "heads", value=[]), r"plan.states\[0\].parts\[1\].heads: expected int"),
    (damaged("segments", 0, "operators", 0, "calls", 0, "kernel", value=1),
     r"plan.segments\[0\].operators\[0\].calls\[0\].kernel: expected str, got 1"),
    (damaged("segments", 0, "operators", 0, "flops", "T", value="8"),
     r"plan.segments\[0\].operators\[0\].flops.T: expected int, got '8'"),
    (damaged("version", value=PLAN_VERSION + 1), f"version {PLAN_VERSION + 1}; this adaptc reads up to {PLAN_VERSION}"),
    (damaged("version", value=0), "plan.version: expected a number from 1"),
    (damaged("version", drop=True), "plan.version: expected a number from 1"),
    (damaged("version", value="2"), "plan.version: expected int, got '2'"),
    (damaged("version", value=True), "plan.version: expected int, got True"),
    ("[]", "plan: expected an object, got list"),
    ("null", "plan: expected an object, got NoneType"),
    ("", "not JSON"),
    ('{"target": "cpu"', "not JSON"),
    ("[" * 100_000, "not JSON"),
])
def test_every_damage_is_named(text, message):
    with pytest.raises(ArtifactError, match=message):
        Plan.from_json(text)


def test_a_newer_plan_may_have_any_fields():
    data = json.loads(damaged("version", value=9)) | {"future": {}}
    with pytest.raises(ArtifactError, match="Install a newer adaptc or compile the model again"):
        Plan.from_json(json.dumps(data))


# ---- emission


class Codegen:
    """A backend on paper: every operator is one kernel of its name."""

    name = "paper"
    symbols = ("T", "R", "S")

    def symbol(self, kernel: KernelSpec) -> str:
        return f"{kernel.family}_{len(kernel.param('buffers'))}"

    def object_of(self, kernel: KernelSpec) -> str:
        return f"{kernel.family}.o"

    def signature(self, kernel: KernelSpec) -> tuple[str, ...]:
        return kernel.param("buffers")

    def packed_bytes(self, format, shape) -> int:
        return 4 * shape[0] * shape[1] + 64


NOTES = {
    # function → operator → (places, args, scratch)
    "step": {
        "adaptc.embedding": (("arg0", "symbol:table", "arena+0"), ("operand:0", "operand:1", "result:0"), ()),
        "adaptc.gather_rows": (("arena+256", "arg3", "arena+512"), ("operand:0", "operand:1", "result:0"), ()),
        "adaptc.linear": (("arena+512", "symbol:table", "result0", "arena+1024"),
                          ("operand:0", "operand:1", "result:0", "scratch:0"), (("f32", ("T", 4)),)),
    },
    "layer": {
        "adaptc.linear": (("arg0", "arg3", "frame+0"), ("operand:0", "operand:1", "result:0"), ()),
        "adaptc.reshape": (("frame+0", "frame+0"), None, ()),
        "adaptc.attention": (("frame+0", "frame+0", "frame+0", "arg1", "arg2", "arg4", "frame+256"),
                             ("operand:0", "state:5", "pages:5", "result:0"), ()),
        "adaptc.add": (("arg0", "frame+256", "result0"), ("operand:0", "operand:1", "result:0"), ()),
    },
}


def placed():
    """The decoder, lowered by hand: layer 0's frame at 2048 with its result at 128, layer 1's at 4096 and 256."""
    program = lowered()
    with program.editing():
        paged = {name: dialect.to_type(replace(slot.spec, page_size=16, key_block=32, max_pages=7))
                 for name, slot in program.states().items()}
    retype(program, paged)
    frames = iter(((2048, "arena+0", "arena+128"), (4096, "arena+128", "arena+256")))
    views = iter((("frame+0", "frame+0"), ("frame+256", "frame+256")))
    with program.editing():
        for name, function in program.functions().items():
            for op in (o.operation for o in function.entry_block.operations):
                if op.name == "func.call":
                    frame, source, result = next(frames)
                    weight, state = (v.owner.attributes["symbol"].value for v in list(op.operands)[3:])
                    notes = {"frame": frame, "buffers": (source, "arg1", "arg2", f"symbol:{weight}", f"symbol:{state}",
                                                         result)}
                elif op.name in NOTES[name]:
                    where, args, scratch = NOTES[name][op.name]
                    params = json.dumps({"buffers": args})
                    kernel = {"symbol": "", "family": op.name[7:], "params": params, "args": args}
                    notes = {"buffers": where if args else next(views), "scratch": scratch,
                             "kernels": [kernel] if args else []}
                else:
                    continue
                for note, value in notes.items():
                    op.attributes[note] = dialect.to_attr(value)
    program.set_fact("arena_bytes", 8192)
    program.set_fact("max_symbols", {"T": 8, "R": 2, "S": 2})
    legality.check(program)
    return program


def emitted():
    return emit_plan(placed(), Codegen(), target="cpu", backend="paper", levels=("v1",), max_context=100)


def test_emitted_operators_are_the_expanded_program():
    plan, _ = emitted()
    got = [(op.id, op.op, op.source, op.outputs) for op in plan.operators()]
    layer = lambda i, frame, out: [  # noqa: E731
        (3 * i + 1, "linear", f"layers.{i}.attn", (f"arena:{frame}:f32:Tx{D}",)),
        (3 * i + 2, "attention", f"layers.{i}.attn", (f"arena:{frame + 256}:f32:Tx1x{D}",)),
        (3 * i + 3, "add", f"layers.{i}.attn", (f"arena:{out}:f32:Tx{D}",)),
    ]
    assert got == [
        (0, "embedding", "", (f"arena:0:f32:Tx{D}",)), *layer(0, 2048, 128), *layer(1, 4096, 256),
        (7, "gather_rows", "head", (f"arena:512:f32:Sx{D}",)), (8, "linear", "head", ("output:logits",)),
    ]
    attention = plan.operators()[5]
    assert attention.calls == (Call("attention_4", (f"arena:4096:f32:Tx1x{D}", "state:layers.1.kv", "pages:full",
                                                    f"arena:4352:f32:Tx1x{D}")),)
    head = plan.operators()[-1]
    assert head.calls[0].buffers == (f"arena:512:f32:Sx{D}", "weight:table", "output:logits", "arena:1024:f32:Tx4")
    assert head.flops == {"S": 2 * V * D} and head.provider == "paper"


def test_every_handle_of_an_emitted_plan_exists():
    plan, kernels = emitted()
    handles = {b.handle: b for b in plan.buffers}
    used = {h for op in plan.operators() for call in op.calls for h in call.buffers}
    assert used | set(plan.inputs.values()) | set(plan.outputs.values()) <= set(handles)
    assert {c.kernel for op in plan.operators() for c in op.calls} == {k.symbol for k in plan.kernels}
    assert len(kernels) == len(plan.kernels)
    by_symbol = {k.symbol: k for k in plan.kernels}
    for op in plan.operators():
        for call in op.calls:
            assert len(call.buffers) == len(by_symbol[call.kernel].signature)
    assert all(b.offset + b.bytes <= plan.arena_bytes for b in plan.buffers if b.kind == "arena")
    assert handles["input:sampled"].shape == ("S",) and handles["input:tokens"].bytes == 4 * 8
    assert handles["pages:full"].shape == ("R", 7) and handles["pages:full"].bytes == 4 * 2 * 7
    assert handles["weight:w0"].bytes == 4 * D * D + 64 and handles["weight:w0"].dtype == "u8"
    assert handles["state:layers.0.kv"].source == "layers.0.kv"
    assert plan.groups == (CacheGroup("full", 0, ("layers.0.kv", "layers.1.kv"), 7),)
    assert Plan.from_json(plan.to_json()) == plan


def test_the_profile_prices_what_is_emitted():
    plan, program = emitted()[0], placed()
    symbols = {"T": 4, "R": 1, "S": 1, "C": 50}
    cpu = target("cpu")
    rows = profile(program, cpu, Codegen().packed_bytes, tokens=4, context=50)
    assert sum(r.count for r in rows) == len(plan.operators()) == len(list(places(program)))
    value = lambda form: sum(n * prod(symbols[s] for s in key.split("*") if s) for key, n in form.items())  # noqa: E731
    assert sum(r.flops for r in rows) == sum(value(op.flops) for op in plan.operators())
    assert sum(r.bytes for r in rows) == sum(value(op.traffic) for op in plan.operators())
    attention = next(r for r in rows if r.op == "attention")
    assert (attention.module, attention.count, attention.flops) == ("layers.*.attn", 2, 2 * 4 * 50 * 2 * (D + D))
    head = next(r for r in rows if r.module == "head" and r.op == "linear")
    assert head.bound == "bandwidth"
    assert head.seconds == pytest.approx(head.bytes / cpu.memory[-1].bandwidth + cpu.launch_s)


def test_module_kinds_have_no_instance_numbers():
    assert kind_of("model.layers.12.mlp.0") == "model.layers.*.mlp.*"
    assert kind_of("blocks.3.conv1d") == "blocks.*.conv1d" and kind_of("") == "(model)"


def test_plans_are_values():
    assert copy.deepcopy(PLAN) == PLAN and replace(PLAN, page_size=1) != PLAN
