"""Every causal language model class of transformers as a tiny random model: compiled, and compared with its own forward.

    python tests/every_class.py [CLASS ...] [--seeds 3] [--jobs 2] [--results FILE] [--page docs/coverage.md]

A class runs in a process of its own, forked when everything is imported, as some need more memory or time than a test
may have. Its reference is the class's own forward without a cache, recomputed for every step, without being told
positions; where what it computes with its own cache agrees with that, that too. Two requests in a batch, chunks and
single tokens must give the bits of one shot, and the rows of the reference: a prompt, then steps whose tokens are given.
Steps whose best two logits, or whose router's last choice and the next, nearly tie aren't counted. Where a row isn't the
class's, and the class's own float32 is further from its float64 than a row may be from the reference, float64 decides.

What is found is a line of ``--results`` as soon as it is found. Classes that are named run, else those of which the file
has no line with as many seeds; the page is made of the whole file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from unittest import mock

import numpy as np

RESULTS = Path(__file__).parent.parent / "build" / "every_class.jsonl"

PROMPT, STEPS = 17, 24
FEW = 3
"""Tokens of the longest sequence that isn't traced: a trace is of more, and code may do something else for so few."""

PAGE = 4
"""Tokens a page: fewer than a window."""

CONTEXT = 64
"""Tokens of a request at most: some configurations don't say."""

TOLERANCE = 1e-4
"""Largest difference of a row's logits, as a share of the row's largest one."""

NEAR_TIE = 1e-3
"""Steps whose best two logits are closer aren't counted."""

COUNTED = 0.5
"""Least share of rows that must count: others are drawn in place of a seed with an early near tie, which leaves no later
row to compare."""

DRAWN = 3
"""Times as many seeds as are asked for are drawn at most. Those in place of others have no token twice: where choices among
tokens depend on the token alone, two of one id tie."""

SECONDS, GIGABYTES = 300, 8
"""What a class may take."""


@dataclass
class Outcome:
    """What became of a class. ``status``: "matched", "wrong", "refused" (by adaptc, with its sentence), "doesn't run"
    (in transformers itself, given tokens alone), or "failed" (neither: a defect). ``worst``: largest difference of a counted row;
    ``counted``: smallest share of rows of a seed; ``states``: what requests keep, in words; ``cached``: whether what the class computes with
    its own cache "agrees" with its recomputation (and then with ours), "differs", or "fails"."""

    name: str
    status: str = "failed"
    said: str = ""
    worst: float | None = None
    counted: float | None = None
    states: tuple[str, ...] = ()
    cached: str = ""
    seeds: int = 0
    seconds: float = 0.0


def classes() -> list[str]:
    """Every ``*ForCausalLM`` that transformers maps a configuration to."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    found = (one for name in names.values() for one in (name if isinstance(name, tuple) else (name,)))
    return sorted({one for one in found if one.endswith("ForCausalLM")})


def build(name: str, seed: int):
    """The class with random weights that don't give flat logits."""
    import torch
    import transformers
    from families import randomise
    from tiny_configs import tiny

    torch.manual_seed(seed)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**tiny(kind.config_class))).float().eval()
    randomise(model)
    return model


def recomputed(model, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(logits f32[T, V], smallest margin of a router's choice at each token): the rows of a prompt, the first of them each
    by a forward of its own where the class runs on so few tokens, then the last row of a forward of its own for every step."""
    from families import forward

    logits, margins = forward(model, list(tokens[:PROMPT]))
    for end in range(1, FEW + 1):
        with suppress(ZeroDivisionError, IndexError, RuntimeError):  # of what is empty then
            logits[end - 1] = forward(model, list(tokens[:end]))[0][-1]
    for end in range(PROMPT + 1, len(tokens) + 1):
        row, margin = forward(model, list(tokens[:end]))
        logits, margins = np.concatenate([logits, row[-1:]]), np.concatenate([margins, margin[-1:]])
    return logits, margins


CACHES = ("cache", "past_key_values", "cache_params", "state")
"""What forwards call the cache that they return, and take."""


def exact(model, tokens: Sequence[int], expected: np.ndarray) -> tuple[np.ndarray, str]:
    """``expected``, ``recomputed``'s logits, with those of the class in float64 in rows where its float32 is further from
    them than may be; and what to say of it, "" where there are none."""
    precise, _ = recomputed(model.double(), tokens)
    off = np.abs(expected - precise).max(1) / np.abs(precise).max(1)
    rows = off > TOLERANCE
    said = f"{rows.sum()} row(s) compared with the class in float64, from which its float32 is up to {off.max():.1e} off"
    return np.where(rows[:, None], precise, expected), said if rows.any() else ""


def generated(model, tokens: Sequence[int]) -> np.ndarray:
    """As ``recomputed``'s logits, with the class's own cache."""
    import torch

    rows, kept = [], {}
    with torch.inference_mode():
        for piece in (tokens[:PROMPT], *([token] for token in tokens[PROMPT:])):
            out = model(torch.tensor([piece]), use_cache=True, **kept)
            kept = {name: out[name] for name in CACHES if out.get(name) is not None}
            if not kept:
                raise ValueError("it returns no cache")
            rows.append(out.logits[0].float().numpy())
    return np.concatenate(rows)


def served(artifact: Path, tokens: Sequence[int], other: Sequence[int]) -> tuple[np.ndarray, list[str]]:
    """Logits of a prompt and steps, beside another request; and the ways that gave other bits."""
    from adaptc.runtime.session import load

    with load(artifact, threads=1, snapshot_tokens=PAGE) as session:
        whole = session.score(tokens)
        ways = {"single tokens": session.score(tokens, chunk=1), "chunks": session.score(tokens, chunk=5)}
        engine, rows = session.engine, [np.full_like(whole, np.nan), np.full((len(other), whole.shape[1]), np.nan, np.float32)]
        for sequence, out in zip((tokens, other), rows):
            engine.score(sequence, out, chunk=7)
        while engine.active:
            engine.step()
        ways["a batch"] = rows[0]
        found = [*whole[:PROMPT], *session.score(tokens, start=PROMPT)]
        ways["a prefix found again"] = found if session.statistics.hit_tokens else None
    return whole, [way for way, got in ways.items() if not np.array_equal(got, whole)]


def states(artifact: Path) -> tuple[str, ...]:
    """What requests keep, by the artifact's plan."""
    from adaptc.plan import Plan

    plan = Plan.from_json((artifact / "plan.json").read_text())
    words = ((f"rows{f' in a window of {s.window}' if s.window else ''}{f' for every {s.rate} tokens' if s.rate > 1 else ''} "
              "of " if s.kind == "rows" else "one value of ")
             + " and ".join(f"{p.name} {p.heads}×{p.width}" for p in s.parts) for s in plan.states)
    return tuple(dict.fromkeys(words))


def check(name: str, seeds: int) -> Outcome:
    """In this process."""
    from adaptc.errors import AdaptcError
    from families import NEAR_TIE as NEAR_CHOICE
    from families import compile_family, tokens_of

    found, start = Outcome(name, seeds=seeds, worst=0.0, counted=1.0), time.perf_counter()

    def ended(status: str, said: str = "") -> Outcome:
        found.status, found.said, found.seconds = status, said, time.perf_counter() - start
        if status not in ("matched", "wrong"):
            found.worst = found.counted = None
        return found

    taken = 0
    for seed in range(DRAWN * seeds):
        if taken == seeds:
            break
        tokens, other = tokens_of(PROMPT + STEPS, seed, distinct=seed >= seeds), tokens_of(11, seed + 100)
        with tempfile.TemporaryDirectory() as place:
            folder, artifact = Path(place) / "model", Path(place) / "a.adapt"
            try:
                model = build(name, seed)
                expected, margins = recomputed(model, tokens)
                model.save_pretrained(folder)
            except Exception as error:
                return ended("doesn't run", f"{type(error).__name__}: {error}")
            best = np.sort(expected, 1)
            keep = (best[:, -1] - best[:, -2] >= NEAR_TIE) & (margins >= NEAR_CHOICE)
            if keep.mean() < COUNTED:
                continue
            taken += 1
            try:
                cached = generated(model, tokens)
            except Exception:  # whatever a class raises whose cache doesn't work so
                cached = None
            try:
                compile_family(folder, artifact, page_size=PAGE, max_context=CONTEXT)
                got, other_bits = served(artifact, tokens, other)
            except AdaptcError as error:
                return ended("refused", f"[{error.code}] {error}")
            found.states = states(artifact)
        found.counted = min(found.counted, float(keep.mean()))
        if apart_by(got, expected, keep) > TOLERANCE:
            expected, found.said = exact(model, tokens, expected)
        found.worst = max(found.worst, apart_by(got, expected, keep))
        if other_bits:
            return ended("wrong", f"other bits than one shot: {', '.join(other_bits)}")
        found.cached = "fails" if cached is None else "differs"
        if cached is not None and apart_by(cached, expected, keep) <= TOLERANCE:
            found.cached, found.worst = "agrees", max(found.worst, apart_by(got, cached, keep))
        if not found.worst <= TOLERANCE:
            return ended("wrong")
    return ended("matched", found.said) if taken == seeds else ended("wrong", f"of {DRAWN * seeds} seeds, half of the rows count in {taken}")


def apart_by(got: np.ndarray, expected: np.ndarray, keep: np.ndarray) -> float:
    """The largest difference of a row that counts, as a share of the row's largest logit."""
    return float((np.abs(got - expected).max(1) / np.abs(expected).max(1))[keep].max())


def apart(names: Sequence[str], seeds: int, jobs: int) -> Iterator[Outcome]:
    """Outcomes of classes as they come, each of a process of its own, ``jobs`` at once."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(names), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            said = tempfile.TemporaryFile()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_one, args=(name, seeds, theirs, said.fileno()))
            process.start()
            theirs.close()
            running[ours] = process, time.perf_counter() + SECONDS * seeds, said, Outcome(name, seeds=seeds)
        ready = wait(list(running), timeout=1)
        for end in list(running):
            process, limit, said, found = running[end]
            if end in ready:
                try:
                    found = end.recv()
                except EOFError:
                    process.join()
                    said.seek(0)
                    last = said.read().decode(errors="replace").strip().splitlines()[-1:]
                    found.said = f"ended with {process.exitcode}: {''.join(last)[:300]}"
            elif time.perf_counter() > limit:
                os.killpg(process.pid, signal.SIGKILL)
                found.said = f"took more than {SECONDS * seeds} s"
            else:
                continue
            process.join()
            del running[end]
            yield found


def _one(name: str, seeds: int, end, said: int) -> None:
    """The whole of a process that ``apart`` starts: in a group with those that it starts, so that all of them end."""
    os.setpgid(0, 0)
    os.dup2(said, 1)
    os.dup2(said, 2)
    resource.setrlimit(resource.RLIMIT_DATA, (GIGABYTES << 30, GIGABYTES << 30))
    from adaptc.sources import derived

    try:
        # the processes before it have imported transformers, and changed none of its classes
        with mock.patch.object(derived, "classes_may_be_changed", lambda: False):
            found = check(name, seeds)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        found = Outcome(name, seeds=seeds, said=f"{type(error).__name__}: {error} "
                        f"({Path(where.filename).name}:{where.lineno})")
    end.send(found)


def page(outcomes: Sequence[Outcome]) -> str:
    """The page for people."""
    import transformers

    count: dict[str, int] = {}
    for one in outcomes:
        count[one.status] = count.get(one.status, 0) + 1
    lines = [
        "# Coverage: every causal language model class of transformers", "",
        f"Of {len(outcomes)} classes of transformers {transformers.__version__}, "
        + ", ".join(f"{number} {status}" for status, number in sorted(count.items(), key=lambda pair: -pair[1])) + ". "
        "Each was built with random weights, written as a directory, compiled for `cpu` and compared with its own forward "
        "without a cache, recomputed for every step: `python tests/every_class.py --page docs/coverage.md` measures this "
        "page anew.", "",
        "| class | | seeds | largest difference | what requests keep, or why not |", "|---|---|---|---|---|",
    ]
    for one in outcomes:
        worst = "" if one.worst is None else f"{one.worst:.1e}"
        said = "; ".join(filter(None, (*one.states, one.said))) if one.status == "matched" else one.said
        said = " ".join(said.split()).replace("|", "\\|")
        lines.append(f"| {one.name} | {one.status} | {one.seeds} | {worst} | {said[:400]}{'…' if len(said) > 400 else ''} |")
    return "\n".join(lines) + "\n"


def kept(path: Path) -> dict[str, Outcome]:
    """What a file of results says of each class: the last line about it."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [Outcome(**json.loads(line)) for line in lines]
    return {one.name: one for one in found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="CLASS", help="classes; by default those that FILE lacks")
    parser.add_argument("--seeds", type=int, default=1, help="how many sets of weights and tokens")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="where what is found is kept")
    parser.add_argument("--page", type=Path, help="writes what FILE has here, for people")
    given = parser.parse_args()
    known, before = classes(), kept(given.results)
    names = given.names or [name for name in known if name not in before or before[name].seeds < given.seeds]
    given.results.parent.mkdir(parents=True, exist_ok=True)
    import_all()
    with given.results.open("a") as results:
        for found in apart(names, given.seeds, given.jobs):
            print(json.dumps(asdict(found)), file=results, flush=True)
            worst = "" if found.worst is None else f"{found.worst:.1e} ({found.counted:.0%} counted)"
            print(f"{found.status:11} {found.name} {worst} {' '.join(found.said.split())[:200]} {found.seconds:.0f}s",
                  flush=True)
    now = kept(given.results)
    if given.page:
        given.page.write_text(page([now[name] for name in known if name in now]))
    return sum(one.status in ("wrong", "failed") for one in now.values())


def import_all() -> None:
    """What every class needs, once."""
    import torch
    import transformers.conversion_mapping  # noqa: F401
    import transformers.models.auto.modeling_auto  # noqa: F401

    import adaptc.capture.pipeline  # noqa: F401
    import adaptc.passes.pipeline  # noqa: F401
    import adaptc.runtime.session  # noqa: F401

    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
