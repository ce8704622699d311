"""Prefix reuse and preemption change no bit: what is found again is what would be computed again, whatever comes between."""

from __future__ import annotations

import random
from functools import cache, partial

import numpy as np
import pytest
import runtime_fake
from runtime_fake import (LONG, VOCABULARY, FakeLauncher, consistent, contents, drain, empty, engine,
                          go_on_through_interrupts, greedy, owner_of, plain, score)

from adaptc.artifact import write_artifact
from adaptc.errors import OptionError
from adaptc.runtime import session
from adaptc.runtime.engine import group_pages
from adaptc.runtime.pages import PagePool
from adaptc.runtime.sampler import Sampling
from adaptc.runtime.watch import side_engine

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]
HOT = Sampling(temperature=30.0, seed=9)
plan = partial(runtime_fake.plan, layers=1)


def keeping(plan_=None, pages=None, **options):
    return engine(plan_ or plan(), pages, prefix_cache=True, **options)


@cache
def alone(prompt: tuple[int, ...], max_tokens: int, sampling: Sampling = HOT, windows=(0, 5), fixed=1) -> list[int]:
    """What a request gives in an engine that has served nobody else and keeps nothing."""
    eng = engine(plan(windows=windows, fixed=fixed, max_context=64))
    eng.add(list(prompt), max_tokens=max_tokens, sampling=sampling)
    return next(iter(drain(eng).values()))


def run(eng, prompt, max_tokens: int = 5, sampling: Sampling = HOT) -> int:
    """Serves a prompt, free pages poisoned before every step; how many of its tokens were reused."""
    before = eng.statistics.hit_tokens
    request, tokens = eng.add(prompt, max_tokens=max_tokens, sampling=sampling), []
    while eng.active:
        eng.poison_free_pages()
        tokens += [event.token for event in eng.step() if event.request == request]
        consistent(eng)
    windows = tuple(group.window for group in eng.plan.groups if group.kind == "rows")
    assert tokens == alone(tuple(prompt), max_tokens, sampling, windows, int(len(windows) < len(eng.plan.groups)))
    return eng.statistics.hit_tokens - before


@pytest.mark.parametrize("size", [1, 3, 4, 16])
@pytest.mark.parametrize("fixed", [0, 1])
def test_a_hit_is_every_full_page_but_what_gives_the_logits(size, fixed):
    eng = keeping(plan(page_size=size, windows=(0,), fixed=fixed), page_order_seed=size)
    assert run(eng, PROMPT) == 0
    assert run(eng, PROMPT) == (len(PROMPT) - 1) // size * size
    assert run(eng, PROMPT, sampling=Sampling()) == (len(PROMPT) - 1) // size * size
    assert run(eng, PROMPT[1:]) == 0  # the same pages behind another token aren't the same
    whole = PROMPT + alone(tuple(PROMPT), 5, HOT, (0,), fixed) + [7, 7, 7]  # the next turn of a conversation
    reused = (len(PROMPT) + 4) // size * size
    assert run(eng, whole) == reused
    empty(eng)


def test_scored_positions_are_computed():
    for start, reused in ((0, 0), (3, 0), (4, 4), (13, 12), (20, 20)):
        eng = keeping(snapshot_tokens=1)
        expected = plain(PROMPT, plan())
        for _ in range(2):
            eng.poison_free_pages()
            assert (score(eng, PROMPT, start=start) == expected[start:]).all()
        assert (eng.statistics.started_tokens, eng.statistics.hit_tokens) == (2 * len(PROMPT), reused)


def test_a_window_needs_no_more_than_it_reads():
    """Of the first 16 rows positions from 16 on read those from 12 on: one page of four."""
    plan_ = plan(windows=(0, 5), fixed=0)
    eng = keeping(plan_)
    run(eng, PROMPT)
    full, window = (eng.pools[group.name] for group in plan_.groups)
    held = eng.add(PROMPT[:17], max_tokens=2)
    eng.step()
    assert eng.statistics.hit_tokens == 16
    assert [len(set(t.entries[t.entries >= 0].tolist())) for t in eng._running[held].tables] == [5, 2]
    drain(eng)
    keys = list(full._pages)
    window.forget(keys[3])
    assert run(eng, PROMPT[:17]) == 12
    full.forget(keys[1])
    assert run(eng, PROMPT[:17]) == 4


def test_requests_in_flight_share_pages():
    eng = keeping(plan(max_step_tokens=48), page_order_seed=1)
    first = eng.add(PROMPT, max_tokens=9, sampling=HOT)
    eng.step()  # up to the last snapshot
    second, third = eng.add(PROMPT, max_tokens=9, sampling=HOT), eng.add([*PROMPT[:14], 9, 9], max_tokens=9, sampling=HOT)
    tokens = {first: [], second: [], third: []}
    while eng.active:
        eng.poison_free_pages()
        for event in eng.step():
            tokens[event.request].append(event.token)
        consistent(eng)
        if {first, second} <= eng._running.keys():
            assert (eng._running[first].tables[0].entries[:5] == eng._running[second].tables[0].entries[:5]).all()
    assert tokens[first] == tokens[second] == alone(tuple(PROMPT), 9) and eng.statistics.hit_tokens == 20
    assert tokens[third] == alone((*PROMPT[:14], 9, 9), 9)


def test_what_a_page_holds_may_depend_on_the_declared_maximum():
    plan_ = plan(lengths=True, windows=(0,), fixed=0)
    eng = keeping(plan_)
    for most, reused in ((5, 0), (5, 12), (12, 0), (12, 12), (5, 12)):
        before = eng.statistics.hit_tokens
        eng.add(PROMPT[:14], max_tokens=most, sampling=HOT)
        fresh = engine(plan_)
        fresh.add(PROMPT[:14], max_tokens=most, sampling=HOT)
        assert [*drain(eng).values()] == [*drain(fresh).values()]
        assert eng.statistics.hit_tokens - before == reused and (14 + most - 1 > LONG) == (most == 12)


def test_kept_pages_are_nobodys_loss():
    """A request that needs the whole pool gets it, whatever was kept; of prompts, those used last stay."""
    plan_ = plan(windows=(0,), fixed=0)
    eng = keeping(plan_, {"group0": 12})
    ones = [[i] * 9 for i in range(1, 5)]
    for prompt in ones:
        run(eng, prompt, 4)
    assert len(eng.pools["group0"].idle_pages) == 12 and not eng.pools["group0"].free_pages
    assert run(eng, ones[0], 4) == 8
    assert run(eng, PROMPT[:9], 4) == 0  # in the place of the second
    assert [run(eng, ones[i], 4) for i in (0, 2, 3, 1)] == [8, 8, 8, 0]
    assert run(eng, PROMPT[::-1], 28) == 0
    assert run(eng, ones[0], 4) == 0
    empty(eng)


def test_snapshots_are_taken_by_rhythm_and_where_prompts_and_answers_end():
    plan_ = plan(windows=(0,), max_step_tokens=48, max_context=64)
    eng = keeping(plan_, {"group0": 64, "fixed": 9}, snapshot_tokens=7)
    run(eng, PROMPT, 14)  # 21 tokens and 13 after them
    assert [t for t, _, _ in eng.executable.steps][:3] == [8, 8, 4]  # every 8 tokens, and the 20 full pages have
    kept = {plan_.page_size * (i + 1) for i, key in enumerate(eng.pools["group0"]._pages) if eng.pools["fixed"].find(key) is not None}
    assert kept == {8, 16, 20, 24, 32}  # 28 was let go of when 32 was there
    assert run(eng, [*PROMPT[:17], 7, 7, 7, 7]) == 16
    eng.forget_prefixes()
    assert run(eng, PROMPT) == 0
    few = keeping(plan_, {"group0": 64, "fixed": 2})  # as many as one request holds: none is kept for long
    assert [run(few, PROMPT) for _ in range(2)][0] == 0
    empty(few)


def test_samples_take_over_what_their_prompt_has():
    eng = keeping(pages={g.name: 100 for g in plan().groups}, page_order_seed=2)
    for reused in (0, 20):
        before = eng.statistics.hit_tokens
        ids = eng.add_samples(PROMPT, 3, max_tokens=6, sampling=HOT)
        tokens = {i: [] for i in ids}
        while eng.active:
            eng.poison_free_pages()
            for event in eng.step():
                tokens[event.request].append(event.token)
            consistent(eng)
        assert [*tokens.values()] == [sampled(PROMPT, 6, i) for i in range(3)]
        assert eng.statistics.hit_tokens - before == reused
    empty(eng)


def sampled(prompt, max_tokens: int, sample: int) -> list[int]:
    return alone(tuple(prompt), max_tokens, Sampling(temperature=30.0, seed=9, sample=sample))


# ---- preemption ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [True, False])
def test_a_preempted_request_goes_on_as_if_nothing_had_been(kept):
    """At every moment of its life."""
    for moment in range(11):
        eng = engine(plan(), prefix_cache=kept, page_order_seed=moment)
        request = eng.add(PROMPT, max_tokens=6, sampling=HOT, chunk=6)
        tokens = [event.token for _ in range(moment) for event in eng.step()]
        running = request in eng._running
        assert eng.preempt(request) == running == (0 < moment < 9 + kept)  # a chunk more ends where a snapshot is taken
        assert not eng.preempt(request)  # it waits, or has ended
        if moment:
            empty_pools(eng)
        while eng.active:
            eng.poison_free_pages()
            tokens += [event.token for event in eng.step()]
            consistent(eng)
        assert tokens == alone(tuple(PROMPT), 6)
        empty(eng)


def empty_pools(eng) -> None:
    assert all(len(p.free_pages) + len(p.idle_pages) == p.pages and p.reserved == 0 for p in eng.pools.values())


def test_a_preempted_request_lets_those_that_wait_go_first():
    plan_ = plan(windows=(0,), fixed=0)
    eng = keeping(plan_, {"group0": 6})
    first, second = (eng.add(PROMPT[:9], max_tokens=8) for _ in range(2))  # one at a time
    for _ in range(4):
        eng.step()
    assert eng.preempt(first)
    ends = [event.request for _ in range(40) for event in eng.step() if event.finish]
    assert ends == [second, first] and eng.statistics.hit_tokens > 8
    empty(eng)


def test_preempted_scores_are_whole():
    eng = keeping()
    logits = np.full((17, VOCABULARY), np.nan, np.float32)
    request = eng.score(PROMPT, logits, start=4, chunk=3)
    for _ in range(4):
        eng.step()
    assert eng.preempt(request)
    drain(eng)
    assert (logits == plain(PROMPT, plan())[4:]).all()


@pytest.mark.parametrize("moment", range(7))
@pytest.mark.parametrize("which", [0, 1])
def test_samples_can_be_preempted(moment, which):
    """Also the one whose prefill others wait for."""
    eng = keeping(pages={g.name: 40 for g in plan().groups})
    ids = eng.add_samples(PROMPT, 3, max_tokens=4, sampling=HOT, chunk=5)
    tokens = {i: [] for i in ids}
    for step in range(40):
        if step == moment:
            assert eng.preempt(ids[which]) == (step > 0)
        for event in eng.step():
            tokens[event.request].append(event.token)
        consistent(eng)
        eng.poison_free_pages()
    assert [*tokens.values()] == [sampled(PROMPT, 4, i) for i in range(3)]
    empty(eng)


@pytest.mark.parametrize("place, moment", [("_end", 1), ("release", 1), ("unreserve", 1), ("_elect", 1), ("free", 7),
                                           ("_end", 7), ("release", 7), ("SlotTable.release", 7)])  # fmt: skip
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupted_preemption_has_happened(place, moment, after, monkeypatch):
    eng = keeping(pages={g.name: 40 for g in plan().groups})
    ids = eng.add_samples(PROMPT, 2, max_tokens=4, sampling=HOT, chunk=5)
    tokens = {i: [] for i in ids}
    for event in (event for _ in range(moment) for event in eng.step()):
        tokens[event.request].append(event.token)
    owner, method = owner_of(place)
    real = getattr(owner, method)

    def once(self, *args):
        monkeypatch.setattr(owner, method, real)
        if after:
            real(self, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, method, once)
    with pytest.raises(KeyboardInterrupt):
        eng.preempt(ids[0])
    consistent(eng)
    assert [r.id for r in eng._waiting] == [ids[0]] and [*eng._running] == [ids[1]]
    for request, rest in drain(eng).items():
        tokens[request] += rest
    assert [tokens[i] for i in ids] == [sampled(PROMPT, 4, i) for i in range(2)]
    empty(eng)


# ---- everything at once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["name", "PrefixCache.name", "reuse", "share", "BlockTable.adopt", "SlotTable.adopt",
                                   "alloc", "_forget", "free", "SlotTable.slide", "_end"])  # fmt: skip
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_anywhere_loses_no_prefix(place, after, monkeypatch):
    eng = keeping(pages={g.name: group_pages(plan(), g, 28) + 3 for g in plan().groups})
    prompts = [PROMPT[:13], PROMPT[:13], PROMPT[:9] + [5, 5], PROMPT[:17], PROMPT[4:17], PROMPT[:17]]
    ids = [eng.add(p, max_tokens=4, sampling=HOT) for p in prompts]
    go_on_through_interrupts(monkeypatch, place, after, random.Random(place), 0.7, eng, ids,
                             [alone(tuple(p), 4) for p in prompts])  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_gives_what_each_gives_alone(seed):
    rng = random.Random(seed)
    plan_ = plan(page_size=rng.choice((1, 3, 16)), max_step_tokens=rng.choice((5, 9, 48)), max_requests=4)
    pages = {g.name: max(group_pages(plan_, g, 40), 2 * group_pages(plan_, g, 18)) + rng.randrange(2, 9) for g in plan_.groups}
    eng = keeping(plan_, pages, page_order_seed=seed, snapshot_tokens=rng.choice((1, 6, 100)))
    eng.executable.fail = lambda step: 1 / 0 if rng.random() < 0.15 else None
    tokens, expected, scores, gone = {}, {}, [], set()

    def add() -> None:
        prompt = (PROMPT, PROMPT[::-1])[rng.random() < 0.2][: rng.choice((1, 4, 9, 12, 17, 21))]
        prompt = prompt + [rng.randrange(3)] * rng.randrange(3)
        kind, chunk = rng.random(), rng.choice((None, 1, 4, 7))
        if kind < 0.2:
            start = rng.randrange(len(prompt))
            out = np.full((len(prompt) - start, VOCABULARY), np.nan, np.float32)
            scores.append((eng.score(prompt, out, start=start, chunk=chunk), prompt, start, out))
        else:
            n, most = (2, rng.randrange(1, 4)) if kind < 0.4 and len(prompt) < 14 else (1, rng.randrange(1, 8))
            for i, request in enumerate(eng.add_samples(prompt, n, max_tokens=most, sampling=HOT, chunk=chunk)):
                tokens[request], expected[request] = [], sampled(prompt, most, i)

    step = 0
    while eng.active or step < 40:
        step += 1
        if step < 40 and rng.random() < 0.4:
            add()
        if step < 100 and rng.random() < 0.15:
            eng.preempt(rng.randrange(40))
        if rng.random() < 0.05:
            gone.add(victim := rng.randrange(40))
            eng.abort(victim)
        eng.poison_free_pages()
        try:
            for event in eng.step():
                if event.token is not None:
                    tokens[event.request].append(event.token)
        except ZeroDivisionError:
            pass
        consistent(eng)
    empty(eng)
    assert eng.statistics.hit_tokens
    for request, wanted in expected.items():
        assert tokens[request] == (wanted[: len(tokens[request])] if request in gone else wanted)
    for request, prompt, start, out in scores:
        assert request in gone or (out == plain(prompt, plan_)[start:]).all()


# ---- sessions --------------------------------------------------------------------------------------------------


def test_sessions_reuse_unless_told_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "launcher", lambda name: FakeLauncher())
    out = write_artifact(tmp_path / "m.adapt", contents(plan()))
    for options, reused in (({}, 20), ({"prefix_cache": False}, 0)):
        with session.load(out, threads=1, **options) as loaded:
            for _ in range(2):
                assert list(loaded.generate(PROMPT, 4, ignore_eos=True).token_ids) == greedy(PROMPT, 4, plan())
                loaded.poison_free_pages()
            assert (loaded.statistics.started_tokens, loaded.statistics.hit_tokens) == (2 * len(PROMPT), reused)
            other = side_engine(loaded)  # writes into the session's pages
            other.add(PROMPT[::-1], max_tokens=9)
            drain(other)
            assert list(loaded.generate(PROMPT, 4, ignore_eos=True).token_ids) == greedy(PROMPT, 4, plan())
            assert loaded.statistics.hit_tokens == reused
    for name, bad in (("prefix_cache", 1), ("prefix_cache", None), ("snapshot_tokens", 0), ("snapshot_tokens", 1.5)):
        with pytest.raises(OptionError, match=f"^{name} must be"):
            session.load(out, **{name: bad})


def test_an_idle_page_is_found_until_it_is_needed():
    pool = PagePool(3)
    pages = [pool.alloc() for _ in range(3)]
    for page, key in zip(pages, (b"a", b"b", b"c")):
        pool.name(page, key)
    for page in pages:
        pool.free(page)
    pool.share(pages[0])
    pool.free(pages[0])
    assert pool.idle_pages == (pages[1], pages[2], pages[0]) and not pool.free_pages
    assert pool.alloc() == pages[1] and pool.find(b"b") is None and pool.find(b"a") == pages[0]
    pool.forget(b"a")
    assert pool.free_pages == (pages[0],)
    pool.forget()
    assert pool.find(b"c") is None and set(pool.free_pages) == {pages[0], pages[2]}
