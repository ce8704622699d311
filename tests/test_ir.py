"""The dialect's text form, the builder, and every legality rule, broken once."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_mlir import ir
from torch_mlir.dialects import func

import test_ops
from adaptc.errors import InputError, LegalityError
from adaptc.formats import FORMATS
from adaptc.ir import dialect, legality
from adaptc.ir.build import Builder, attrs_of
from adaptc.ir.module import Program, StateSlot, Weight, spec_of
from adaptc.ops import table as op_table
from adaptc.ops.table import row
from adaptc.protocol import StateSpec, TensorSpec

V, D = 7, 8
STATE = StateSpec((("k", 1, D), ("v", 1, D)), "f16", 0, 0, 0, 0)


def tensor(dtype: str, *shape, fmt: str = "") -> TensorSpec:
    return TensorSpec(dtype, shape, FORMATS[fmt] if fmt else None)


def decoder(layers: int = 2) -> Program:
    """Embedding, one attention body called ``layers`` times, and a head that only sampled rows reach."""
    program = Program.empty("fused", vocabulary=V)
    program.declare(Weight("table", tensor("f32", V, D, fmt="f32"), "embed"))
    for i in range(layers):
        program.declare(Weight(f"w{i}", tensor("f32", D, D, fmt="f32"), f"blk.{i}"))
        program.declare(StateSlot(f"layers.{i}.kv", STATE, f"layers.{i}"))
    types = lambda *specs: [dialect.to_type(s) for s in specs]  # noqa: E731
    x, ids = tensor("f32", "T", D), tensor("i32", "T")
    weight = tensor("f32", D, D, fmt="f32")
    with program.editing():
        end = ir.InsertionPoint(program.module.body)
        body = func.FuncOp("layer", (types(x, ids, ids, weight, STATE), types(x)), visibility="private", ip=end)
        block = body.add_entry_block()
        b = Builder(ir.InsertionPoint(block), "attn")
        h, positions, requests, w, state = block.arguments
        y = b.linear(h, w)
        heads = b.reshape(y, shape=("T", 1, D))
        mixed = b.attention(heads, heads, heads, positions, requests, state, scaling=0.5)
        func.ReturnOp([b.add(h, b.reshape(mixed, shape=("T", D)))], ip=ir.InsertionPoint(block))

        step = func.FuncOp("step", (types(ids, ids, ids, tensor("i32", "S")), types(tensor("f32", "S", V))), ip=end)
        block = step.add_entry_block()
        tokens, positions, requests, sampled = block.arguments
        b = Builder(ir.InsertionPoint(block))
        table = b.raw("adaptc.get", [], types(tensor("f32", V, D, fmt="f32")), {"symbol": "table"}).results[0]
        x_ = b.embedding(tokens, table)
        for i in range(layers):
            b.source = f"layers.{i}"
            w = b.raw("adaptc.get", [], types(weight), {"symbol": f"w{i}"}).results[0]
            s = b.raw("adaptc.get", [], types(STATE), {"symbol": f"layers.{i}.kv"}).results[0]
            callee = {"callee": ir.FlatSymbolRefAttr.get("layer")}
            x_ = b.raw("func.call", [x_, positions, requests, w, s], types(x), callee).results[0]
        b.source = "head"
        func.ReturnOp([b.linear(b.gather_rows(x_, sampled), table)], ip=ir.InsertionPoint(block))
    return program


# ---- attributes and types

PLAIN = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1, max_size=5), inner,
                      max_size=3),
    max_leaves=6,
)


def exact(value):
    """``value`` with its kinds and, for floats, bits."""
    if isinstance(value, float):
        return "float", struct.pack("<d", value)
    if isinstance(value, tuple):
        return tuple(map(exact, value))
    if isinstance(value, dict):
        return {k: exact(v) for k, v in value.items()}
    return type(value).__name__, value


@settings(deadline=None, derandomize=True, max_examples=60)
@given(PLAIN)
def test_attributes_round_trip_through_text(value):
    with dialect.context():
        assert exact(dialect.from_attr(ir.Attribute.parse(str(dialect.to_attr(value))))) == exact(value)


@pytest.mark.parametrize("value", (5e-324, -5e-324, 2.2250738585072014e-308, -0.0, 0.0, 0.1, 1e-5, 1e300, math.inf,
                                   -math.inf, float(np.float32(1e-6)), 1 / 3))
def test_floats_round_trip_bit_for_bit(value):
    with dialect.context():
        assert exact(dialect.from_attr(ir.Attribute.parse(str(dialect.to_attr(value))))) == exact(value)


def test_not_a_number_stays_one():
    with dialect.context():
        assert math.isnan(dialect.from_attr(ir.Attribute.parse(str(dialect.to_attr(math.nan)))))


def test_numpy_values_become_plain_ones():
    with dialect.context():
        got = dialect.from_attr(dialect.to_attr([np.int32(3), np.float32(0.5), np.bool_(True), np.arange(2)]))
        assert got == (3, 0.5, True, (0, 1)) and [type(v) for v in got[:3]] == [int, float, bool]
        with pytest.raises(TypeError, match="no attribute for None"):
            dialect.to_attr(None)


SPECS = [
    *(TensorSpec(d, (2, 3)) for d in ("f64", "f32", "f16", "bf16", "i64", "i32", "i8", "u8", "i1")),
    TensorSpec("f32", ()), TensorSpec("f32", ("T",)), TensorSpec("f32", (1, "T", 4)), TensorSpec("f32", ("T", "S")),
    *(TensorSpec("f32", (64, 256), fmt) for fmt in FORMATS.values()),
    STATE, replace(STATE, dtype="bf16", window=512), replace(STATE, page_size=16, key_block=32, max_pages=9),
    replace(STATE, dtype="i8", scale="f32"), StateSpec.fixed("state", 4, 64),
    replace(StateSpec.fixed("window", 3, 8), page_size=16, key_block=32, max_pages=2),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_types_round_trip(spec):
    with dialect.context():
        kind = dialect.to_type(spec)
        assert dialect.to_spec(kind) == spec
        assert ir.Type.parse(str(kind)) == kind


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_a_packing_order_is_part_of_a_weights_type(fmt):
    spec = TensorSpec("f32", (64, 256), fmt)
    with dialect.context():
        kind = dialect.to_type(spec, tile="r8k4")
        assert dialect.to_spec(kind) == spec and dialect.tile_of(kind) == "r8k4"
        assert dialect.tile_of(dialect.to_type(spec)) == "" and kind != dialect.to_type(spec)
        assert dialect.tile_of(dialect.to_type(TensorSpec("f32", ("T", 2)))) == ""


@pytest.mark.parametrize("text,message", [
    ("tensor<?x4xf32>", "every dynamic dimension needs a name"),
    ('tensor<?x4xf32, #adaptc.dims<["T", "K"]>>', "'_' for each static one"),
    ('tensor<?x4xf32, #adaptc.dims<["T"]>>', "a name for each dynamic dimension"),
    ("tensor<4xi16>", "elements are"),
    ("tensor<4xf32, 7 : i64>", "encoding is #adaptc.dims or #adaptc.packed"),
    ("memref<4xf32>", "neither a ranked tensor nor a state"),
    ("tensor<*xf32>", "neither a ranked tensor nor a state"),
    ('tensor<4x64xf32, #adaptc.packed<{codes = "u3", group = [1, 32]}>>', "matches none of the formats"),
])
def test_types_that_say_too_little_are_refused(text, message):
    with dialect.context(), pytest.raises(LegalityError, match=message):
        dialect.to_spec(ir.Type.parse(text))


# ---- programs as text


def test_text_round_trips():
    text = decoder().text()
    assert Program.parse(text).text() == text
    assert decoder().text() == text


def test_declarations_and_facts_round_trip():
    program = Program.parse(decoder().text())
    assert program.stage == "fused" and program.fact("vocabulary") == V and program.fact("absent", 3) == 3
    assert program.weights()["w1"] == Weight("w1", tensor("f32", D, D, fmt="f32"), "blk.1")
    assert program.states() == {f"layers.{i}.kv": StateSlot(f"layers.{i}.kv", STATE, f"layers.{i}") for i in (0, 1)}
    permuted = Weight("w0", tensor("f32", D, D, fmt="f32"), "blk.0", ("rope_halves", 2), "q4_1", "r8")
    program.declare(permuted)
    assert Program.parse(program.text()).weights()["w0"] == permuted
    assert list(program.weights()) == ["table", "w0", "w1"]
    program.declare(replace(permuted, tile=""))
    assert program.weights()["w0"] == replace(permuted, tile="")


def test_text_that_is_no_module_is_an_input_error():
    with pytest.raises(InputError, match="fused.mlir doesn't parse"):
        Program.parse("module { func.func }", "fused.mlir")


@pytest.mark.parametrize("name,sample", [c for c in test_ops.CASES])
def test_samples_build_print_and_decompose_as_their_rows_infer(name, sample):
    """Every operator with names for sizes: what the builder makes is legal, its text says all of it, and its
    decomposition has the same type."""
    program = Program.empty("fused")
    with program.editing():
        kinds = [dialect.to_type(s) for s in sample.operands]
        function = func.FuncOp("f", (kinds, []), ip=ir.InsertionPoint(program.module.body))
        block = function.add_entry_block()
        b = Builder(ir.InsertionPoint(block))
        made = b.op(name, *block.arguments, **sample.attrs)
        wanted = row(name).results(sample.attrs, sample.operands)
        assert tuple(b.spec(v) for v in (made if isinstance(made, tuple) else (made,))) == wanted
        if row(name).decompose:
            lower = row(name).decompose(b, row(name).complete(sample.attrs), *block.arguments)
            assert tuple(b.spec(v) for v in lower) == wanted
        func.ReturnOp([], ip=ir.InsertionPoint(block))
    again = Program.parse(program.text())
    assert again.text() == program.text()
    for (_, op), (_, other) in zip(program.operators(), again.operators(), strict=True):
        assert spec_of(op) == spec_of(other)
        legality._inferred(other)
    first = next(op for _, op in again.operators())
    assert row(name).complete(attrs_of(first)) == row(name).complete(sample.attrs)


def test_defaults_are_filled_in_for_backends():
    text = decoder().text().replace("softcap = 0.000000e+00 : f64, ", "")
    assert text != decoder().text()
    program = Program.parse(text)
    attention = next(op for _, op in program.operators() if op.operation.name == "adaptc.attention")
    assert "softcap" not in attrs_of(attention) and spec_of(attention).attrs["softcap"] == 0.0


def test_builder_errors_name_the_module():
    program = decoder()
    with program.editing():
        b = Builder(ir.InsertionPoint.at_block_begin(program.step.entry_block), "layers.0.mlp")
        tokens, _, _, sampled = program.step.entry_block.arguments
        with pytest.raises(LegalityError, match=r"T and S.*\(in module layers.0.mlp\)"):
            b.add(tokens, sampled)


# ---- legality: each rule broken once


def test_a_good_program_is_legal_in_every_stage_but_lowered():
    program = decoder()
    for stage in ("captured", "fused", "sharded", "laid_out"):
        program.set_fact("stage", stage)
        legality.check(program)


def broken(*changes: tuple[str, str]) -> str:
    """The good program's text with each first occurrence of ``old`` replaced."""
    text = decoder().text()
    for old, new in changes:
        assert old in text, f"{old!r} is not in\n{text}"
        text = text.replace(old, new, 1)
    return text


WINDOW = 'source = "attn", window = 0 : i64'

RULES = {
    "stage": ([('adaptc.stage = "fused"', 'adaptc.stage = "melted"')], "says stage 'melted'; stages are captured"),
    "no step": ([("@step(", "@stop(")], "no function @step"),
    "vocabulary": ([(f"adaptc.vocabulary = {V}", "adaptc.vocabulary = 9")], r"expected logits f32\['S', 9\]"),
    "undeclared symbol": ([('symbol = "w1"', 'symbol = "w9"')], "reads 'w9', which isn't declared"),
    "type of get": ([('"adaptc.weight"() {stored = "f32", sym_name = "w0", tensor = "blk.0", type = tensor<8x8',
                      '"adaptc.weight"() {stored = "f32", sym_name = "w0", tensor = "blk.0", type = tensor<8x9')],
                    "has type tensor<8x8.*declared tensor<8x9"),
    "attribute of get": ([('symbol = "w1"', 'offset = 1 : i64, symbol = "w1"')], "'symbol', a string, and no other"),
    "declaration without tensor": ([(', tensor = "blk.0"', "")], "adaptc.weight needs 'tensor'"),
    "state as weight": ([('"adaptc.state_slot"() {', '"adaptc.weight"() {stored = "f32", tensor = "x", ')],
                        "declared by adaptc.weight with type !adaptc.state"),
    "foreign module operation": ([('"adaptc.weight"()', '"other.weight"()')], "other.weight stands in the module"),
    "foreign operator": ([('"adaptc.add"', '"other.add"')], "other.add is of a foreign dialect"),
    "unknown operator": ([('"adaptc.add"', '"adaptc.plus"')], "unknown operator 'plus'"),
    "unknown attribute": ([("scaling = ", 'flavour = "x", scaling = ')], "unknown attribute 'flavour'"),
    "missing attribute": ([("scaling = 5.000000e-01 : f64, ", "")], "attribute 'scaling' is missing"),
    "attribute's kind": ([(WINDOW, WINDOW.replace("0 : i64", "0.5 : f64"))], "'window' must be of kind int"),
    "attribute's form": ([(WINDOW, WINDOW.replace("0 : i64", "dense<0> : tensor<1xi64>"))],
                         "a kind that adaptc operators"),
    "wrong result type": ([(f'"adaptc.reshape"(%0) {{shape = ["T", 1, {D}]',
                            f'"adaptc.reshape"(%0) {{shape = ["T", {D}, 1]')], "its row infers"),
    "window of the state": ([(WINDOW, WINDOW.replace("0", "3"))], "window 3, the state's is 0"),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule):
    changes, message = RULES[rule]
    with pytest.raises(LegalityError, match=message):
        legality.check(Program.parse(broken(*changes)))


def edited(change) -> Program:
    """The good program after ``change(program, step block, body block)``."""
    program = decoder()
    with program.editing():
        change(program, program.step.entry_block, program.functions()["layer"].entry_block)
    return program


def refused(program: Program, message: str) -> None:
    """Refused as built, and from its text."""
    with pytest.raises(LegalityError, match=message):
        legality.check(program)
    with pytest.raises((LegalityError, InputError), match=message):
        legality.check(Program.parse(program.text()))


def operation(block, name: str, number: int = 0):
    return [op.operation for op in block.operations if op.operation.name == name][number]


def before_end(block, source: str = "") -> Builder:
    return Builder(ir.InsertionPoint.at_block_terminator(block), source)


def test_rule_unnamed_dynamic_dimension():
    def change(program, step, body):
        before_end(step, "head").raw("adaptc.neg", [operation(step, "adaptc.embedding").results[0]],
                                     [ir.Type.parse(f"tensor<?x{D}xf32>")], {})

    refused(edited(change), "module head: adaptc.neg is illegal: .*every dynamic dimension needs a name")


def test_rule_broadcast_between_symbols():
    def change(program, step, body):
        tokens, _, _, sampled = step.arguments
        before_end(step, "head").raw("adaptc.add", [tokens, sampled], [tokens.type], {})

    refused(edited(change), "stage fused, @step, module head: adaptc.add is illegal: .*T and S")


def test_rule_step_takes_four_roles():
    def change(program, step, body):
        tokens = step.arguments[0]
        step.arguments[1].replace_all_uses_with(tokens)
        step.arguments[1].set_type(dialect.to_type(tensor("i64", "T")))
        kinds = [a.type for a in step.arguments], [dialect.to_type(tensor("f32", "S", V))]
        program.step.operation.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(*kinds))

    refused(edited(change), r"@step takes .*i64\['T'\].*expected \(tokens i32\['T'\], positions i32\['T'\]")


def test_rule_names_are_declared_once():
    def change(program, step, body):
        program.declared("weight")[1].operation.attributes["sym_name"] = ir.StringAttr.get("table")

    refused(edited(change), "redefinition of symbol named 'table'")


def test_rule_calls_stand_in_step():
    def change(program, step, body):
        call = operation(step, "func.call")
        before_end(body).raw("func.call", list(body.arguments), [r.type for r in call.results],
                             {"callee": call.attributes["callee"]})

    refused(edited(change), "call inside a body; only @step calls bodies")


def test_rule_calls_fit_the_callee():
    def change(program, step, body):
        call = operation(step, "func.call")
        operands = list(call.operands)
        operands[3] = operands[0]
        before_end(step).raw("func.call", operands, [r.type for r in call.results],
                             {"callee": call.attributes["callee"]})

    refused(edited(change), "operand type mismatch")


def test_rule_call_results_fit_the_callee():
    def change(program, step, body):
        call = operation(step, "func.call")
        before_end(step).raw("func.call", list(call.operands), [step.arguments[0].type],
                             {"callee": call.attributes["callee"]})

    refused(edited(change), "result type mismatch")


def test_rule_callee_exists():
    def change(program, step, body):
        operation(step, "func.call").attributes["callee"] = ir.FlatSymbolRefAttr.get("nothing")

    refused(edited(change), "nothing")


def test_rule_one_block_a_function():
    def change(program, step, body):
        func.FuncOp("outside", ([], []), visibility="private", ip=ir.InsertionPoint(program.module.body))

    refused(edited(change), "@outside has 0 blocks, expected one")


def test_rule_state_is_declared():
    def change(program, step, body):
        kind = dialect.to_type(STATE)
        end = ir.InsertionPoint(program.module.body)
        function = func.FuncOp("same", ([kind], [kind]), visibility="private", ip=end)
        block = function.add_entry_block()
        func.ReturnOp(list(block.arguments), ip=ir.InsertionPoint(block))
        call = operation(step, "func.call")
        same = Builder(ir.InsertionPoint(call)).raw("func.call", [call.operands[4]], [kind],
                                                    {"callee": ir.FlatSymbolRefAttr.get("same")})
        call.operands[4] = same.results[0]

    refused(edited(change), "adaptc.attention has a state that isn't a declared one's")


def test_rule_one_operator_a_step_appends_to_a_state():
    def change(program, step, body):
        operation(step, "func.call", 1).operands[4] = operation(step, "func.call", 0).operands[4]

    refused(edited(change), "@layer, module attn: adaptc.attention appends to state 'layers.0.kv', to which an "
                            "operator before it has appended")


def test_operators_that_only_read_a_state_come_after_the_one_that_appends(monkeypatch):
    rows = {**op_table.table(), "recall": replace(row("attention"), name="recall", appends=False)}
    monkeypatch.setattr(op_table, "table", lambda: rows)
    program = decoder()
    with program.editing():
        body = program.functions()["layer"].entry_block
        attention = operation(body, "adaptc.attention")
        scaling = {"scaling": 0.5, "window": 0, "softcap": 0.0}
        kinds = [r.type for r in attention.results]
        before_end(body).raw("adaptc.recall", list(attention.operands), kinds, scaling)
        legality.check(program)
        Builder(ir.InsertionPoint(attention)).raw("adaptc.recall", list(attention.operands), kinds, scaling)
    refused(program, "adaptc.recall reads state 'layers.0.kv' before the step's rows are appended")


# ---- regions

ROWS = (("add", (0, 1), ()), ("silu", (2,), ()))


def grouped() -> Program:
    program = decoder()
    with program.editing():
        step = program.step.entry_block
        b = before_end(step, "head")
        x = operation(step, "adaptc.embedding").results[0]
        b.group(x, x, body=ROWS, yields=(3,))
    return program


def test_regions_round_trip():
    program = grouped()
    legality.check(program)
    again = Program.parse(program.text())
    op = next(op for _, op in again.operators() if op.operation.name == "adaptc.group")
    assert attrs_of(op) == {"body": ROWS, "yields": (3,)}
    assert again.text() == program.text()


@pytest.mark.parametrize("change,message", [
    (lambda group, block, b: block.operations[2].operation.erase(), "ends in adaptc.silu, expected adaptc.yield"),
    (lambda group, block, b: block.add_argument(block.arguments[0].type, ir.Location.unknown()), "its region takes"),
    (lambda group, block, b: block.operations[0].operation.operands.__setitem__(
        0, group.operands[0]), "uses a value from outside"),
    (lambda group, block, b: block.operations[2].operation.operands.__setitem__(
        0, b.compare(*block.arguments, predicate="lt")), "its region yields"),
    (lambda group, block, b: b.raw("other.op", [], [], {}), "holds other.op, of a foreign dialect"),
    (lambda group, block, b: b.raw("adaptc.neg", [block.arguments[0]], [ir.Type.parse("tensor<3xf32>")], {}),
     "its row infers"),
    (lambda group, block, b: b.reduce(block.arguments[0], kind="sum", axes=(1,)), "'reduce' isn't elementwise"),
])
def test_rule_regions_are_well_formed(change, message):
    program = grouped()
    with program.editing():
        group = operation(program.step.entry_block, "adaptc.group")
        block = group.regions[0].blocks[0]
        change(group, block, Builder(ir.InsertionPoint(block.operations[2])))
    with pytest.raises(LegalityError, match=message):
        legality.check(program)


def test_rule_regions_only_where_rows_have_them():
    def change(program, step, body):
        x = operation(step, "adaptc.embedding").results[0]
        made = before_end(step).raw("adaptc.neg", [x], [x.type], {}, regions=1)
        before = Builder(ir.InsertionPoint(ir.Block.create_at_start(made.regions[0], [])))
        before.raw("adaptc.yield", [], [], {})

    refused(edited(change), "it has 1 regions")


# ---- the lowered stage


def lowered() -> Program:
    """The decoder with plausible notes of the lowered stage."""
    program = decoder()
    with program.editing():
        for name, function in program.functions().items():
            for op in (o.operation for o in function.entry_block.operations):
                if op.name in ("func.return", "adaptc.get"):
                    continue
                values = len(op.operands) + len(op.results)
                op.attributes["buffers"] = dialect.to_attr(["arg0" if name == "layer" else "arena+0"] * values)
                notes = {"frame": 0} if op.name == "func.call" else {"kernels": (), "scratch": ()}
                for note, value in notes.items():
                    op.attributes[note] = dialect.to_attr(value)
    program.set_fact("stage", "lowered")
    return program


def test_a_lowered_program_is_legal():
    legality.check(lowered())


@pytest.mark.parametrize("name,note,value,message", [
    ("adaptc.embedding", "kernels", None, "adaptc.embedding has no kernels"),
    ("adaptc.embedding", "buffers", None, "has no buffers"),
    ("func.call", "frame", None, "func.call has no frame"),
    ("adaptc.embedding", "buffers", ["arena+0"], "has 1 buffers for 3 operands, results and scratch"),
    ("adaptc.embedding", "buffers", ["arena+0", "arena+0", "heap+4"], "a buffer at 'heap"),
    ("adaptc.embedding", "buffers", ["arena+0", "arena+0", "frame+4"], "a buffer at 'frame.*no place in @step"),
])
def test_rule_lowered_operators_have_kernels_and_places(name, note, value, message):
    program = lowered()
    with program.editing():
        op = operation(program.step.entry_block, name)
        if value is None:
            del op.attributes[note]
        else:
            op.attributes[note] = dialect.to_attr(value)
    refused(program, message)
