"""The engine over a tiny numpy model: paging, batching, chunking and transactions change no bit of the result."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_fake import (VOCABULARY, consistent, drain, empty, engine, go_on_through_interrupts, greedy, owner_of, plain,
                          plan, score)

from adaptc.errors import AdaptcError, OptionError, RequestError
from adaptc.runtime.engine import Engine, Event, group_pages
from adaptc.runtime.pages import BlockTable, PagePool, pages_needed
from adaptc.runtime.sampler import Sampling

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]


def test_paged_equals_plain():
    for size in (1, 3, 4, 7, 48):
        assert (score(engine(plan(page_size=size)), PROMPT) == plain(PROMPT, plan())).all()


@pytest.mark.parametrize("chunk", [None, 1, 2, 3, 5, 8, 100])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_chunks_and_page_order_change_no_bit(chunk, seed):
    eng = engine(page_order_seed=seed)
    eng.poison_free_pages()
    assert (score(eng, PROMPT, chunk=chunk) == plain(PROMPT, plan())).all()
    eng.poison_free_pages()  # recycled pages hold NaN now
    assert (score(eng, PROMPT, start=4, chunk=chunk) == plain(PROMPT, plan())[4:]).all()
    empty(eng)


def test_no_more_rows_than_the_logits_buffer_takes():
    eng = engine(plan(max_rows=3, max_step_tokens=8))
    assert (score(eng, PROMPT, start=10) == plain(PROMPT, plan())[10:]).all()
    assert max(s for _, _, s in eng.executable.steps) == 3
    assert [t for t, _, _ in eng.executable.steps] == [8, 5, 3, 3, 2]


def test_only_wanted_rows_are_asked_for():
    eng = engine()
    eng.add(PROMPT, max_tokens=3)
    drain(eng)
    assert eng.executable.steps == [(8, 1, 0), (8, 1, 0), (5, 1, 1), (1, 1, 1), (1, 1, 1)]


def test_batched_equals_alone():
    prompts = [PROMPT[i : i + n] for i, n in ((0, 1), (3, 13), (1, 8), (7, 2), (2, 17), (0, 9))]
    expected = [greedy(p, 9, plan()) for p in prompts]
    for seed in (None, 5):
        eng = engine(page_order_seed=seed)
        ids = [eng.add(p, max_tokens=9) for p in prompts]
        tokens = drain(eng)
        assert [tokens[i] for i in ids] == expected
        assert max(r for _, r, _ in eng.executable.steps) > 1
        empty(eng)


def test_decodes_go_first_and_prefills_fill_the_step():
    eng = engine(plan(max_step_tokens=4, max_context=48))
    eng.add([1], max_tokens=30)
    eng.step()
    eng.add(PROMPT, max_tokens=2)
    before = len(eng.executable.steps)
    first = eng.step()
    assert [e.request for e in first] == [0]  # the long prompt stalls nobody
    assert eng.executable.steps[before] == (4, 2, 1)
    drain(eng)


@pytest.mark.parametrize("limits", [dict(max_step_tokens=2), dict(max_rows=2), dict(max_requests=2)])
def test_running_requests_get_a_token_every_step(limits):
    """Also where a step takes fewer tokens or rows than requests: the others wait, nobody starves."""
    eng = engine(plan(**limits))
    ids = [eng.add([i + 1, 7], max_tokens=5) for i in range(4)]
    assert eng.add(PROMPT, max_tokens=1) == 4
    tokens, ends = {i: [] for i in range(5)}, {}
    for step in range(60):
        for event in eng.step():
            tokens[event.request].append(step)
            ends[event.request] = step
    for i in ids:
        assert len(tokens[i]) == 5 and tokens[i][-1] - tokens[i][0] == 4
    assert sorted(ends, key=ends.get) == [0, 1, 2, 3, 4]
    empty(eng)


def test_events_and_ends():
    expected = greedy(PROMPT, 6, plan())
    eng = engine()
    eng.add(PROMPT, max_tokens=6, stop_ids=[expected[2]])
    assert eng.step() == [] and eng.step() == []
    stop = expected.index(expected[2])
    events = [event for _ in range(stop + 1) for event in eng.step()]
    assert events == [Event(0, t, None) for t in expected[:stop]] + [Event(0, expected[2], "stop")]
    eng.add(PROMPT, max_tokens=2)
    eng.step(), eng.step()
    assert [*eng.step(), *eng.step()] == [Event(1, expected[0], None), Event(1, expected[1], "length")]
    assert eng.step() == []
    empty(eng)


def test_the_context_is_a_limit():
    plan_ = plan(max_context=12)
    eng = engine(plan_)
    eng.add(PROMPT[:12], max_tokens=5)
    eng.add(PROMPT[:10], max_tokens=100)
    tokens = drain(eng)
    assert tokens[0] == greedy(PROMPT[:12], 1, plan_) and tokens[1] == greedy(PROMPT[:10], 3, plan_)
    with pytest.raises(RequestError, match="has 13 tokens; the artifact's context is 12"):
        eng.add(PROMPT[:13], max_tokens=1)


@pytest.mark.parametrize("prompt, words", [
    ([], "empty"), ([1, 40], "Token id 40 at position 1"), ([-1], "Token id -1"), ([2**70], "flat list"),
    ([1.5], "flat list"), ([[1], [2, 3]], "flat list"), ([[1, 2]], "flat list"), ([True], "flat list"), (["a"], "flat"),
    (np.array([2**40]), "outside the vocabulary"),
])  # fmt: skip
def test_prompts_that_are_refused(prompt, words):
    eng = engine()
    with pytest.raises(RequestError, match=words):
        eng.add(prompt, max_tokens=1)
    empty(eng)


def test_options_that_are_refused():
    eng = engine()
    for bad in (0, -1, 1.5, True, "3", None):
        with pytest.raises(OptionError, match=f"max_tokens must be an integer ≥ 1, got {bad!r}"):
            eng.add([1], max_tokens=bad)
    with pytest.raises(OptionError, match="chunk"):
        eng.add([1], max_tokens=1, chunk=0)
    for bad in (-1, 2, 1.0):
        with pytest.raises(OptionError, match="start must be an integer from 0 to 1"):
            eng.score([1, 2], np.empty((2, VOCABULARY), np.float32), start=bad)
    empty(eng)


def test_a_request_larger_than_the_pool_is_refused_others_wait():
    plan_ = plan(windows=(0,), fixed=0)
    eng = engine(plan_, {"group0": 5})
    with pytest.raises(RequestError, match="grow to 22 tokens and then needs 6 pages.*whole pool has 5.*cache_bytes"):
        eng.add(PROMPT, max_tokens=2)
    ids = [eng.add(PROMPT[:9], max_tokens=8) for _ in range(3)]  # 4 pages each: one at a time
    alone = greedy(PROMPT[:9], 8, plan_)
    tokens = drain(eng)
    assert [tokens[i] for i in ids] == [alone] * 3
    assert {r for _, r, _ in eng.executable.steps} == {1}
    empty(eng)


def test_windows_hold_no_more_pages_than_promised():
    plan_ = plan(windows=(5,), page_size=2, max_step_tokens=3, fixed=0)
    eng = engine(plan_, {"group0": pages_needed(48, 2, 5, 3)})
    assert eng.pools["group0"].pages == 4  # 4 earlier rows and 3 new ones, wherever they start
    eng.poison_free_pages()
    eng.add(PROMPT, max_tokens=20)
    tokens = []
    while eng.active:
        tokens += [e.token for e in eng.step()]
        consistent(eng)
        eng.poison_free_pages()
    assert tokens == greedy(PROMPT, 20, plan_)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 20), st.integers(1, 12), st.data())
@settings(max_examples=200, deadline=None)
def test_pages_needed_is_enough(tokens, page_size, window, step, data):
    need = pages_needed(tokens, page_size, window, step)
    pool = PagePool(need)
    table = BlockTable(pool, page_size, window, -(-tokens // page_size))
    length = 0
    while length < tokens:
        length += data.draw(st.integers(1, min(step, tokens - length)))
        table.grow(length)  # raises IndexError when the pool is empty
        table.slide(length)
    table.release()
    assert len(pool.free_pages) == need


def test_shared_pages_are_freed_by_their_last_holder():
    pool = PagePool(2)
    page = pool.alloc()
    pool.share(page)
    pool.free(page)
    assert page not in pool.free_pages
    pool.free(page)
    assert page in pool.free_pages
    for wrong in (pool.free, pool.share):
        with pytest.raises(AssertionError):
            wrong(page)
    assert pool.reserve(2) and not pool.reserve(1)


# ---- transactions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("device lost"), KeyboardInterrupt()])
def test_a_failed_step_changes_nothing(error):
    prompts = [PROMPT[:3], PROMPT, PROMPT[5:14]]
    expected = [greedy(p, 7, plan()) for p in prompts]
    failing = set(range(1, 40, 2))  # every second run fails after the first layer has written its rows
    eng = engine(page_order_seed=3)

    def fail(step):
        if step in failing:
            raise error

    eng.executable.fail = fail
    ids = [eng.add(p, max_tokens=7) for p in prompts]
    tokens, failures = {i: [] for i in ids}, 0
    while eng.active:
        before = [(r.id, r.length, r.count) for r in eng._running.values()]
        try:
            for event in eng.step():
                tokens[event.request].append(event.token)
        except (RuntimeError, KeyboardInterrupt):
            failures += 1
            after = [(r.id, r.length, r.count) for r in eng._running.values()]
            assert after[: len(before)] == before and all(length == 0 for _, length, _ in after[len(before) :])
        consistent(eng)
        eng.poison_free_pages()
    assert [tokens[i] for i in ids] == expected and failures > 5
    empty(eng)


@pytest.mark.parametrize(
    "place", ["alloc", "free", "slide", "release", "_end", "_fill", "_sample", "_admit", "reserve", "SlotTable.slide",
              "SlotTable.grow", "SlotTable.release"]
)
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_anywhere_loses_nothing(place, after, monkeypatch):
    """Ctrl-C just before or after any call that moves pages or requests: go on, and all is as without it."""
    prompts = [PROMPT[:3], PROMPT[:9], PROMPT[5:14]]
    expected = [greedy(p, 6, plan()) for p in prompts]
    eng = engine()
    ids = [eng.add(p, max_tokens=6) for p in prompts]
    go_on_through_interrupts(monkeypatch, place, after, random.Random(place), 0.5, eng, ids, expected)


def test_an_interrupted_abort_frees_the_pages(monkeypatch):
    eng = engine()
    ids = [eng.add(PROMPT, max_tokens=6) for _ in range(2)]
    eng.step()
    real = PagePool.free

    def free(self, page):
        monkeypatch.setattr(PagePool, "free", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(PagePool, "free", free)
    with pytest.raises(KeyboardInterrupt):
        eng.abort(ids[0])
    consistent(eng)
    assert drain(eng) == {ids[1]: greedy(PROMPT, 6, plan())}


def test_nan_logits_are_an_error_and_no_token():
    """They end the request that has them; those beside it go on as if alone."""
    eng = engine()
    run = eng.executable.run

    def tainting(symbols):
        run(symbols)
        eng.executable.outputs("logits")[0, 5] = np.nan

    eng.executable.run = tainting
    tainted, sound = eng.add([7], max_tokens=2), eng.add(PROMPT[:3], max_tokens=1)
    failed, other = eng.step()
    assert (failed.request, failed.token, failed.finish) == (tainted, None, "error")
    assert isinstance(failed.error, AdaptcError) and "token 5" in str(failed.error)
    assert other == Event(sound, greedy(PROMPT[:3], 1, plan())[0], "length")
    empty(eng)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 20), st.integers(1, 12)),
            st.tuples(st.just("score"), st.integers(1, 20), st.integers(1, 9)),
            st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
            st.tuples(st.just("fail"), st.just(0), st.just(0)),
            st.tuples(st.just("abort"), st.integers(0, 30), st.just(0)),
        ),
        max_size=25,
    ),
    st.integers(1, 6),
    st.integers(0, 9),
)
@settings(max_examples=40, deadline=None)
def test_any_interleaving_is_right_and_leaks_nothing(actions, page_size, seed):
    plan_ = plan(page_size=page_size, max_step_tokens=7, max_requests=3, max_rows=3, layers=1)
    pages = {g.name: group_pages(plan_, g, 34) + 2 for g in plan_.groups}
    eng = engine(plan_, pages, page_order_seed=seed)
    prompts, tokens, scores, aborted = {}, {}, {}, set()

    def step():
        for event in eng.step():
            if event.token is not None:
                tokens[event.request].append(event.token)

    for kind, a, b in actions:
        prompt = PROMPT[:a][::-1]
        if kind == "add":
            request = eng.add(prompt, max_tokens=b)
            prompts[request], tokens[request] = (prompt, b), []
        elif kind == "score":
            out = np.full((a, VOCABULARY), np.nan, np.float32)
            scores[eng.score(prompt, out, chunk=b)] = prompt, out
        elif kind == "step":
            for _ in range(a):
                step()
        elif kind == "fail" and eng.active:
            eng.executable.fail = lambda step: 1 / 0
            with pytest.raises(ZeroDivisionError):
                step()
            eng.executable.fail = lambda step: None
        elif kind == "abort":
            eng.abort(a)
            aborted.add(a)
        consistent(eng)
        eng.poison_free_pages()
    while eng.active:
        step()
    empty(eng)
    for request, (prompt, count) in prompts.items():
        expected = greedy(prompt, len(tokens[request]), plan_)
        assert tokens[request] == expected
        assert len(expected) == count or request in aborted
    for request, (prompt, out) in scores.items():
        assert request in aborted or (out == plain(prompt, plan_)).all()


def test_the_schedulers_own_cost_is_small():
    """Python's share of a decode step at batch 1, with a real vocabulary's width of logits."""
    plan_ = plan(max_context=2048, page_size=16, max_requests=16, max_step_tokens=128, max_rows=16)
    eng = engine(plan_)
    eng.executable.run = lambda symbols: None
    eng._logits = np.random.default_rng(0).standard_normal((16, 49_152)).astype(np.float32)
    eng.add([1, 2, 3], max_tokens=500, sampling=Sampling())
    times = []
    for _ in range(400):
        start = time.perf_counter()
        eng.step()
        times.append(time.perf_counter() - start)
    assert sorted(times)[len(times) // 2] < 300e-6


# ---- samples of one prompt -------------------------------------------------------------------------------------

HOT = dict(temperature=30.0, seed=9)


def samples(eng: Engine, prompt, n: int, max_tokens: int = 7, chunk=None) -> list[list[int]]:
    ids = eng.add_samples(prompt, n, max_tokens=max_tokens, sampling=Sampling(**HOT), chunk=chunk)
    tokens = drain(eng)
    return [tokens[i] for i in ids]


def alone(prompt, sample: int, max_tokens: int = 7, page_size: int = 4) -> list[int]:
    eng = engine(plan(page_size=page_size))
    eng.add(prompt, max_tokens=max_tokens, sampling=Sampling(**HOT, sample=sample))
    return next(iter(drain(eng).values()))


@pytest.mark.parametrize("page_size", [1, 3, 4, 7])
@pytest.mark.parametrize("length", [1, 4, 8, 13, 21])
def test_samples_share_a_prefill_and_are_what_each_is_alone(page_size, length):
    eng = engine(plan(page_size=page_size), {g.name: 100 for g in plan().groups}, page_order_seed=3)
    eng.poison_free_pages()
    got = samples(eng, PROMPT[:length], 3)
    assert got == [alone(PROMPT[:length], i, page_size=page_size) for i in range(3)] and len(set(map(tuple, got))) == 3
    assert sum(t for t, _, _ in eng.executable.steps) == length + 3 * 6  # prefilled once
    empty(eng)


def test_full_pages_are_shared_and_counted_once():
    """Twelve rows of page size 4 are three shared pages; each sample adds two of its own: nine pages, not fifteen."""
    one = plan(windows=(0,), fixed=0)
    eng = engine(one, {"group0": 9})
    assert samples(eng, PROMPT[:12], 3) == [alone_full(i, one) for i in range(3)]
    empty(eng)
    with pytest.raises(RequestError, match="18 tokens in 3 samples and then needs 9 pages .* has 8"):
        engine(one, {"group0": 8}).add_samples(PROMPT[:12], 3, max_tokens=7)
    with pytest.raises(OptionError, match="n must be an integer from 1 to 4"):
        engine(one).add_samples(PROMPT, 5, max_tokens=1)


def alone_full(sample: int, plan_) -> list[int]:
    eng = engine(plan_)
    eng.add(PROMPT[:12], max_tokens=7, sampling=Sampling(**HOT, sample=sample))
    return next(iter(drain(eng).values()))


@pytest.mark.parametrize("seed", range(12))
def test_samples_under_failures_aborts_and_company(seed):
    """Any of them is aborted at any time, also before the prompt is read; steps fail; others come and go."""
    rng = random.Random(seed)
    eng = engine(pages={g.name: 40 for g in plan().groups}, page_order_seed=seed)
    expected, tokens, gone = {}, {}, set()
    for prompt, n in ((PROMPT[:9], 3), (PROMPT[:2], 1), (PROMPT[3:19], 2), (PROMPT[1:8], 4)):
        ids = eng.add_samples(prompt, n, max_tokens=6, sampling=Sampling(**HOT), chunk=rng.choice([2, 5, None]))
        for i, request in enumerate(ids):
            expected[request], tokens[request] = alone(prompt, i, 6), []
    eng.executable.fail = lambda step: (_ for _ in ()).throw(RuntimeError("planned")) if rng.random() < 0.3 else None
    while eng.active:
        if rng.random() < 0.15:
            victim = rng.choice(list(tokens))
            eng.abort(victim)
            gone.add(victim)
        try:
            for event in eng.step():
                tokens[event.request].append(event.token)
        except RuntimeError:
            pass
        consistent(eng)
        eng.poison_free_pages()
    for request, wanted in expected.items():
        assert tokens[request] == (wanted[: len(tokens[request])] if request in gone else wanted)
    empty(eng)


@pytest.mark.parametrize("place", ["fork", "SlotTable.fork", "own", "share", "alloc", "free", "_end", "_elect", "_draw", "_copy_page"])
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_anywhere_loses_no_sample(place, after, monkeypatch):
    expected = [alone(PROMPT[:9], i, 6) for i in range(3)]
    eng = engine(pages={g.name: 40 for g in plan().groups})
    ids = eng.add_samples(PROMPT[:9], 3, max_tokens=6, sampling=Sampling(**HOT))
    go_on_through_interrupts(monkeypatch, place, after, random.Random(place), 0.7, eng, ids, expected)


@pytest.mark.parametrize("interrupt", [None, "_elect", "release", "unreserve"])
def test_the_next_sample_goes_on_with_an_aborted_ones_prefill(interrupt, monkeypatch):
    eng = engine(pages={g.name: 40 for g in plan().groups})
    ids = eng.add_samples(PROMPT, 3, max_tokens=4, sampling=Sampling(**HOT), chunk=5)
    eng.step()
    if interrupt is None:
        assert eng.abort(ids[0])
        assert eng._running[ids[1]].length == 5
    else:
        owner, _ = owner_of(interrupt)
        real = getattr(owner, interrupt)

        def once(self, *args):
            monkeypatch.setattr(owner, interrupt, real)
            raise KeyboardInterrupt

        monkeypatch.setattr(owner, interrupt, once)
        with pytest.raises(KeyboardInterrupt):
            eng.abort(ids[0])
    consistent(eng)
    tokens = drain(eng)
    assert [tokens[i] for i in ids[1:]] == [alone(PROMPT, i, 4) for i in (1, 2)]
    empty(eng)


def test_penalties_and_bias_act_on_the_requests_own_tokens():
    """Two requests of one step with opposite options; forbidden tokens never come; logprobs are the model's."""
    eng = engine()
    bias = {token: -np.inf for token in range(VOCABULARY) if token != 7}
    first = eng.add(PROMPT, max_tokens=4, sampling=Sampling(logit_bias=bias, logprobs=2))
    second = eng.add(PROMPT, max_tokens=8, sampling=Sampling(frequency_penalty=1e6))
    events = [event for _ in range(40) for event in eng.step()]
    assert [e.token for e in events if e.request == first] == [7] * 4
    chosen = [e.token for e in events if e.request == second]
    assert len(set(chosen)) == 8 and chosen[0] == greedy(PROMPT, 1, plan())[0]
    row = plain(PROMPT, plan())[-1].astype(np.float64)
    found = next(e for e in events if e.request == first).logprob
    total = np.log(np.exp(row - row.max()).sum()) + row.max()
    assert found.token == 7 and abs(found.logprob - (row[7] - total)) < 1e-9
    assert [t for t, _ in found.top] == np.argsort(-row, kind="stable")[:2].tolist()
    for bad in ({40: 1.0}, dict.fromkeys(range(VOCABULARY), -np.inf)):
        with pytest.raises(RequestError, match="logit_bias"):
            eng.add(PROMPT, max_tokens=1, sampling=Sampling(logit_bias=bad))
