"""A program that keeps rows and values of fixed size: from its text to steps of the cpu backend, against the oracle."""

from __future__ import annotations

import random

import numpy as np
import pytest

from adaptc import blocks
from adaptc.backends.cpu.codegen import CODEGEN
from adaptc.backends.cpu.launch import LAUNCHER
from adaptc.backends.reference.interpreter import Reference
from adaptc.errors import LegalityError
from adaptc.formats import FORMATS
from adaptc.ir.module import Program
from adaptc.options import CompileOptions
from adaptc.passes.pipeline import lower_to
from adaptc.plan import CacheGroup, Plan
from adaptc.planner.emit import emit_plan
from adaptc.planner.sizes import cache_bytes, fixed_bytes
from adaptc.runtime.engine import Engine, group_pages
from adaptc.runtime.sampler import Sampling
from cpu_kernel import LEVEL, aligned

VOCABULARY, WIDTH, CONTEXT = 24, 32, 16
TEXT = """
!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!x = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!h = tensor<?x4x8xf32, #adaptc.dims<["T", "_", "_"]>>
!one = tensor<?x4x1xf32, #adaptc.dims<["T", "_", "_"]>>
!beta = tensor<?x4xf32, #adaptc.dims<["T", "_"]>>
!kv = !adaptc.state<{kind = "rows", parts = [["k", 4, 8], ["v", 4, 8]], dtype = "f32", window = 0}>
!window = !adaptc.state<{kind = "fixed", parts = [["window", 2, 32]], dtype = "f32", window = 0}>
!state = !adaptc.state<{kind = "fixed", parts = [["state", 4, 64]], dtype = "f32", window = 0}>
!max = !adaptc.state<{kind = "fixed", parts = [["max", 1, 32]], dtype = "f32", window = 0}>
module attributes {adaptc.stage = "captured", adaptc.vocabulary = 24, adaptc.context = 16, adaptc.hidden = 32} {
  "adaptc.weight"() {stored = "f32", sym_name = "embed", tensor = "embed", type = tensor<24x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "taps", tensor = "taps", type = tensor<32x3xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "shares", tensor = "shares", type = tensor<4x32xf32>} : () -> ()
  "adaptc.state_slot"() {sym_name = "a.kv", type = !kv, source = "a"} : () -> ()
  "adaptc.state_slot"() {sym_name = "c.window", type = !window, source = "c"} : () -> ()
  "adaptc.state_slot"() {sym_name = "r.state", type = !state, source = "r"} : () -> ()
  "adaptc.state_slot"() {sym_name = "m.max", type = !max, source = "m"} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: tensor<?xi32, #adaptc.dims<["S"]>>) -> tensor<?x24xf32, #adaptc.dims<["S", "_"]>> {
    %embed = "adaptc.get"() {symbol = "embed"} : () -> tensor<24x32xf32>
    %taps = "adaptc.get"() {symbol = "taps"} : () -> tensor<32x3xf32>
    %shares = "adaptc.get"() {symbol = "shares"} : () -> tensor<4x32xf32>
    %kv = "adaptc.get"() {symbol = "a.kv"} : () -> !kv
    %window = "adaptc.get"() {symbol = "c.window"} : () -> !window
    %state = "adaptc.get"() {symbol = "r.state"} : () -> !state
    %max = "adaptc.get"() {symbol = "m.max"} : () -> !max
    %x = "adaptc.embedding"(%tokens, %embed) : (!ids, tensor<24x32xf32>) -> !x
    %c = "adaptc.convolve"(%x, %taps, %positions, %requests, %window) {source = "c"} : (!x, tensor<32x3xf32>, !ids, !ids, !window) -> !x
    %h = "adaptc.reshape"(%c) {shape = ["T", 4, 8]} : (!x) -> !h
    %size = "adaptc.mul"(%h, %h) : (!h, !h) -> !h
    %sum = "adaptc.reduce"(%size) {kind = "sum", axes = [2], keepdims = true} : (!h) -> !one
    %decay = "adaptc.neg"(%sum) : (!one) -> !one
    %scores = "adaptc.linear"(%x, %shares) : (!x, tensor<4x32xf32>) -> !beta
    %beta = "adaptc.sigmoid"(%scores) : (!beta) -> !beta
    %r = "adaptc.recur"(%h, %h, %h, %decay, %positions, %requests, %state, %beta) {source = "r"} : (!h, !h, !h, !one, !ids, !ids, !state, !beta) -> !h
    %a = "adaptc.attention"(%r, %r, %h, %positions, %requests, %kv) {scaling = 0.3 : f64, source = "a"} : (!h, !h, !h, !ids, !ids, !kv) -> !h
    %y = "adaptc.reshape"(%a) {shape = ["T", 32]} : (!h) -> !x
    %squares = "adaptc.mul"(%x, %x) : (!x, !x) -> !x
    %down = "adaptc.neg"(%squares) : (!x) -> !x
    %m = "adaptc.running_max"(%y, %down, %positions, %requests, %max) {source = "m"} : (!x, !x, !ids, !ids, !max) -> !x
    %end = "adaptc.gather_rows"(%m, %sampled) : (!x, tensor<?xi32, #adaptc.dims<["S"]>>) -> tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
    %logits = "adaptc.linear"(%end, %embed) : (tensor<?x32xf32, #adaptc.dims<["S", "_"]>>, tensor<24x32xf32>) -> tensor<?x24xf32, #adaptc.dims<["S", "_"]>>
    return %logits : tensor<?x24xf32, #adaptc.dims<["S", "_"]>>
  }
}
"""
OPTIONS = CompileOptions(page_size=4, max_step_tokens=8, max_requests=8, max_context=CONTEXT)


def weights(name: str) -> np.ndarray:
    shape = {"embed": (VOCABULARY, WIDTH), "taps": (WIDTH, 3), "shares": (4, WIDTH)}[name]
    return (np.random.default_rng(len(name)).standard_normal(shape) * 0.5).astype(np.float32)


def make(text: str, options: CompileOptions):
    lowered = lower_to(Program.parse(text), "lowered", options, CODEGEN, 16).last
    context = options.max_context
    return lowered, *emit_plan(lowered, CODEGEN, target="cpu", backend="cpu", levels=(LEVEL,), max_context=context)


@pytest.fixture(scope="module")
def made():
    return make(TEXT, OPTIONS)


def loaded(made, threads: int, pages):
    lowered, plan, kernels = made
    packed = {b.source: np.frombuffer(_packed(lowered.weights()[b.source]), np.uint8)
              for b in plan.buffers if b.kind == "weight"}
    held = {name: memoryview(aligned(data)) for name, data in packed.items()}
    return LAUNCHER.load(plan, CODEGEN.compile(kernels, LEVEL), held, threads=threads, pages=pages)


def _packed(weight) -> bytes:
    values = weights(weight.name)
    if weight.spec.format is None:
        return values.tobytes()
    return CODEGEN.pack(weight.spec.format, weight.spec.shape, blocks.quantize(FORMATS["f32"], values))


class Steps:
    """Steps of the plan over pools of NaN, and the oracle beside it. Requests have their own pages, and slots in turn."""

    def __init__(self, made, threads: int = 2):
        plan = made[1]
        self.pages = {"full": 12, "fixed": 8}
        self.run = loaded(made, threads, self.pages)
        self.oracle, self.plan = Reference(Program.parse(TEXT), weights), plan
        for state in plan.states:
            self.run.state(state.name)[...] = 0xFF
        self.free, self.slots = list(range(7, -1, -1)), {}

    def step(self, runs, commit: bool = True) -> np.ndarray:
        """Logits of every token of one step: (request, first position, tokens) each."""
        tokens = np.concatenate([t for _, _, t in runs])
        at = np.concatenate([np.arange(p, p + len(t)) for _, p, t in runs])
        rows = np.concatenate([np.full(len(t), i) for i, (_, _, t) in enumerate(runs)])
        sampled = np.arange(len(tokens))
        for role, value in (("tokens", tokens), ("positions", at), ("requests", rows), ("sampled", sampled)):
            self.run.inputs(role)[: len(value)] = value
        full, fixed = self.run.inputs("pages:full"), self.run.inputs("pages:fixed")
        for i, (request, _, _) in enumerate(runs):
            full[i] = np.arange(4) + 4 * request
            fixed[i] = self.slots.get(request, -1), self.free.pop()
        self.run.run({"T": len(tokens), "R": len(runs), "S": len(tokens)})
        for i, (request, _, _) in enumerate(runs):
            old, new = fixed[i].tolist()
            gone = old if commit else new
            if commit:
                self.slots[request] = new
            if gone >= 0:
                self.free.insert(0, gone)
                for state in self.plan.groups[0].states:
                    self.run.state(state)[gone] = 0xFF
        return self.run.outputs("logits")[: len(tokens)].copy()

    def wanted(self, runs) -> np.ndarray:
        at = np.concatenate([np.arange(p, p + len(t)) for _, p, t in runs])
        rows = np.concatenate([np.full(len(t), request) for request, _, t in runs])
        return self.oracle.step(np.concatenate([t for _, _, t in runs]), at, rows, np.arange(len(at)))


TOKENS = np.random.default_rng(5).integers(0, VOCABULARY, (3, CONTEXT))
STEPS = ([(0, 0, 3), (1, 0, 2)], [(1, 2, 3)], [(2, 0, 1), (0, 3, 8)], [(1, 3, 4), (2, 1, 2), (0, 8, 9)])


def runs_of(step):
    return [(request, start, TOKENS[request, start:end]) for request, start, end in step]


def test_the_plan_has_one_group_of_slots(made):
    lowered, plan, _ = made
    names = ("c.window", "m.max", "r.state")
    assert plan.groups == (CacheGroup("fixed", 0, names, 2, "fixed"), CacheGroup("full", 0, ("a.kv",), 4))
    sizes = {s.name: (s.kind, s.token_bytes(), s.request_bytes(), s.page_bytes(plan.page_size)) for s in plan.states}
    assert sizes == {"a.kv": ("rows", 256, 0, 1024), "c.window": ("fixed", 0, 256, 256), "m.max": ("fixed", 0, 128, 128),
                     "r.state": ("fixed", 0, 1024, 1024)}
    tables = {b.handle: b.shape for b in plan.buffers if b.kind == "pages"}
    assert tables == {"pages:fixed": ("R", 2), "pages:full": ("R", 4)}
    assert Plan.from_json(plan.to_json()) == plan
    assert cache_bytes(lowered, 8) == (256, 8 * 256 + 256 + 128 + 1024)
    assert fixed_bytes(lowered) == {"window": 256, "state": 1024, "max": 128}
    (recur,) = (o for o in plan.operators() if o.op == "recur")
    assert recur.traffic["R"] == 2 * 1024 and recur.flops == {"T": 7 * 4 * 8 * 8}


def test_steps_of_the_plan_are_the_oracles(made):
    steps = Steps(made)
    for step in map(runs_of, STEPS):
        got = steps.step(step)
        np.testing.assert_allclose(got, steps.wanted(step), rtol=1e-4, atol=1e-5)
    steps.run.close()


def test_slots_are_what_a_request_has_done_whatever_was_tried_in_between(made):
    """Whole, in pieces, batched, and with every step tried twice: the same bits, by any number of threads."""
    whole = Steps(made, threads=1)
    alone = np.concatenate([whole.step(runs_of([(0, 0, 8)])), whole.step(runs_of([(0, 8, 9)]))])
    steps, found = Steps(made, threads=3), []
    for step in map(runs_of, STEPS):
        tried = steps.step(step, commit=False)
        got = steps.step(step)
        np.testing.assert_array_equal(got, tried)
        rows = np.concatenate([np.full(len(t), request) for request, _, t in step])
        found.append(got[rows == 0])
    np.testing.assert_array_equal(np.concatenate(found), alone)
    for each in (whole, steps):
        each.run.close()


@pytest.mark.parametrize("size, threads", [(1, 2), (3, 3), (16, 1)])
def test_whatever_happens_around_it(size, threads):
    """As in test_laws: what a request gives alone is what it gives among others that begin as it does, when its state is
    taken from a snapshot, after preemptions and after steps that failed in the middle."""
    rng = random.Random(size)
    made = make(TEXT.replace("context = 16", "context = 64"),
                CompileOptions(page_size=size, max_step_tokens=24, max_requests=4, max_context=64))
    plan, base = made[1], np.random.default_rng(1).integers(0, VOCABULARY, 50).tolist()
    hot = Sampling(temperature=2.0, seed=4)
    pages = {g.name: 2 * group_pages(plan, g, 64) + 3 for g in plan.groups}
    run = loaded(made, threads, pages)
    plain_run, once = run.run, {}

    def alone(length: int, tail: int) -> tuple[np.ndarray, list[int]]:
        if (length, tail) not in once:
            engine, prompt = Engine(plan, run, pages), [*base[:length], tail]
            engine.poison_free_pages()
            logits = np.empty((len(prompt), VOCABULARY), np.float32)
            engine.score(prompt, logits)
            engine.add(prompt, max_tokens=6, sampling=hot)
            once[length, tail] = logits, [e.token for _ in range(30) for e in engine.step() if e.token is not None]
        return once[length, tail]

    wanted = {(length, tail): alone(length, tail) for length in (2, 17, 33, 49) for tail in (1, 2)}

    def failing(symbols):
        where = rng.randrange(10)
        if where < 2:
            plain_run(symbols, **({"stop_after": rng.randrange(len(plan.operators()))} if where else {}))
            raise RuntimeError("planted")
        plain_run(symbols)

    run.run = failing
    engine = Engine(plan, run, pages, page_order_seed=size, prefix_cache=True, snapshot_tokens=16)
    live, served, preemptions = {}, 0, 40
    while engine.active or served < 40:
        if served < 40 and len(live) < 5:
            key, chunk = rng.choice(list(wanted)), rng.choice((None, 1, 5))
            prompt, served = [*base[: key[0]], key[1]], served + 1
            start = rng.randrange(len(prompt))
            if rng.random() < 0.4:
                out = np.full((len(prompt) - start, VOCABULARY), np.nan, np.float32)
                live[engine.score(prompt, out, start=start, chunk=chunk)] = out, wanted[key][0][start:]
            else:
                live[engine.add(prompt, max_tokens=6, sampling=hot, chunk=chunk)] = [], wanted[key][1]
        if live and preemptions and rng.random() < 0.15:
            preemptions -= engine.preempt(rng.choice(list(live)))
        engine.poison_free_pages()
        try:
            for event in engine.step():
                got, expected = live[event.request]
                if event.token is not None:
                    got.append(event.token)
                if event.finish is not None:
                    del live[event.request]
                    np.testing.assert_array_equal(got, expected)
        except RuntimeError:
            pass
    assert not live and not preemptions and engine.statistics.hit_tokens > 100
    run.close()


def test_a_states_kind_is_part_of_its_type():
    program = TEXT.replace('!window = !adaptc.state<{kind = "fixed"', '!window = !adaptc.state<{kind = "rows"')
    with pytest.raises(LegalityError, match="convolve is illegal: convolve: the state is of kind 'rows', expected 'fixed'"):
        lower_to(Program.parse(program), "fused")
    with pytest.raises(LegalityError, match="a state's kind is 'rows' or 'fixed'"):
        lower_to(Program.parse(TEXT.replace('kind = "rows"', 'kind = "columns"')), "fused")
