"""Bit for bit on real kernels, under hostile traffic: requests of all kinds come, go and are preempted at random, steps
fail before, within and after their run, every free page holds NaN before every step, pages lie in random order, and
what earlier requests left is found again. Whatever happens around it, a request gives what it gives alone, in one
piece, on one thread, with pages of another size, when everything is computed."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

import adaptc
import tiny_gguf
from adaptc.runtime.sampler import Sampling
from adaptc.runtime.session import load

pytestmark = pytest.mark.usefixtures("kept_captures")

PAGE_SIZES = (16, 1, 3)
LENGTHS = (1, 2, 17, 60)  # the window is 16
SAMPLINGS = (Sampling(), Sampling(1.0, seed=1), Sampling(0.7, top_k=9, seed=2), Sampling(1.3, top_p=0.8, seed=3))
NEW = 6


class Planted(Exception):
    pass


@pytest.fixture(scope="module", params=[{"activations": "f32"}, {"activations": "int8"}, {"activations": "int8", "kv": "int8"}],
                ids=["f32", "int8", "int8-kv"])
def artifacts(request, tmp_path_factory) -> dict[int, Path]:
    """One model by page size. Layers alternate between a window of 16 and none."""
    folder = tmp_path_factory.mktemp("laws")
    model = tiny_gguf.write(folder / "tiny.gguf", "gemma3")
    for size in PAGE_SIZES:
        adaptc.compile(model, "cpu", output=folder / f"{size}.adapt", page_size=size, max_step_tokens=24,
                       max_requests=4, **request.param)
    return {size: folder / f"{size}.adapt" for size in PAGE_SIZES}


def prompt(length: int) -> list[int]:
    """Each is the beginning of all longer ones."""
    return np.random.default_rng(0).integers(3, tiny_gguf.VOCABULARY, LENGTHS[-1])[:length].tolist()


@pytest.fixture(scope="module")
def alone(artifacts) -> tuple[dict, dict]:
    """What each prompt gives by itself: logits by length, tokens by (length, sampling)."""
    with load(artifacts[PAGE_SIZES[0]], threads=1, prefix_cache=False) as session:
        scores = {n: session.score(prompt(n)) for n in LENGTHS}
        tokens = {}
        for n, sampling in itertools.product(LENGTHS, SAMPLINGS):
            options = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "seed")}
            tokens[n, sampling] = list(session.generate(prompt(n), NEW, ignore_eos=True, **options).token_ids)
        return scores, tokens


def books(engine) -> list:
    """Of every pool the pages that nobody holds, and those that are promised."""
    return [(sorted(pool.free_pages + pool.idle_pages), pool.reserved) for pool in engine.pools.values()]


@pytest.mark.parametrize("size, threads", list(zip(PAGE_SIZES, (2, 3, 1))))
def test_whatever_happens_around_it(artifacts, alone, size, threads):
    scores, tokens = alone
    rng = random.Random(size)
    jobs = [("score", n, chunk) for n in LENGTHS for chunk in (None, rng.choice((1, 2)), rng.choice((5, 23)))]
    jobs += [(sampling, n, rng.choice((None, 3, 7))) for n in LENGTHS for sampling in SAMPLINGS]
    rng.shuffle(jobs)
    with load(artifacts[size], threads=threads, page_order_seed=size) as session:
        engine, run = session.engine, session.executable.run
        live: dict[int, tuple] = {}
        failures, preemptions = 0, 40  # without an end, one that goes token by token would never come to its own

        def failing(symbols):
            where = rng.randrange(12)
            if where == 1:
                run(symbols, stop_after=rng.randrange(len(session.plan.operators())))
            elif where > 0:
                run(symbols)
            if where < 3:
                raise Planted

        session.executable.run = failing
        while jobs or live:
            while jobs and len(live) < 6 and rng.random() < 0.6:
                kind, n, chunk = job = jobs.pop()
                if kind == "score":
                    out = np.full_like(scores[n], np.nan)
                    live[engine.score(prompt(n), out, chunk=chunk)] = (*job, out)
                else:
                    live[engine.add(prompt(n), max_tokens=NEW, sampling=kind, chunk=chunk)] = (*job, [])
            if live and rng.random() < 0.1:  # starts over later
                leaving = rng.choice(list(live))
                assert engine.abort(leaving)
                jobs.append(live.pop(leaving)[:3])
            if live and preemptions and rng.random() < 0.1:
                preemptions -= engine.preempt(rng.choice(list(live)))
            engine.poison_free_pages()
            before, running = books(engine), {i for i, r in engine._running.items() if r.length}
            try:
                events = engine.step()
            except Planted:
                failures += 1
                started = {i for i, r in engine._running.items() if r.length}
                assert books(engine) == before or started != running or any(
                    pool.reserved != promised for pool, (_, promised) in zip(engine.pools.values(), before))  # new ones
                continue
            for event in events:
                kind, n, _, out = live[event.request]
                if event.token is not None:
                    out.append(event.token)
                if event.finish is not None:
                    del live[event.request]
                    wanted = scores[n] if kind == "score" else tokens[n, kind]
                    assert np.array_equal(out, wanted), (kind, n)
        assert failures and not engine.active and session.statistics.hit_tokens
        assert books(engine) == [(list(range(pool.pages)), 0) for pool in engine.pools.values()]
