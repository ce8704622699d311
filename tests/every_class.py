"""Every causal language model class of transformers as a tiny random model: compiled, and compared with its own forward.

    python tests/every_class.py [CLASS ...] [--seeds 3] [--jobs 2] [--page docs/coverage.md]

A class runs in a process of its own, as some need more memory or time than a test may have. Its reference is the
class's own forward without a cache, recomputed for every step, without being told positions. Two requests in a batch,
chunks and single tokens must give the bits of one shot, and the rows of the reference: a prompt, then steps whose
tokens are given. Steps whose best two logits, or whose router's last choice and the next, nearly tie aren't counted.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

PROMPT, STEPS = 17, 24
PAGE = 4
"""Tokens a page: fewer than a window."""

TOLERANCE = 1e-4
"""Largest difference of a row's logits, as a share of the row's largest one."""

NEAR_TIE = 1e-3
"""Steps whose best two logits are closer aren't counted."""

SECONDS, GIGABYTES = 300, 8
"""What a class may take."""


@dataclass
class Outcome:
    """What became of a class. ``status``: "matched", "wrong", "refused" (by adaptc, with its sentence), "doesn't run"
    (in transformers itself), or "failed" (neither: a defect). ``worst``: largest difference of a counted row;
    ``counted``: share of rows; ``states``: what requests keep, in words."""

    name: str
    model_type: str = ""
    status: str = "failed"
    said: str = ""
    worst: float | None = None
    counted: float | None = None
    states: tuple[str, ...] = ()
    seconds: float = 0.0


def classes() -> dict[str, str]:
    """Class → model_type of every ``*ForCausalLM`` that transformers maps a configuration to."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    found: dict[str, str] = {}
    for model_type, name in names.items():
        for one in name if isinstance(name, tuple) else (name,):
            if one.endswith("ForCausalLM"):
                found.setdefault(one, model_type)
    return dict(sorted(found.items()))


def build(name: str, model_type: str, seed: int):
    """The class with random weights that don't give flat logits."""
    import torch
    import transformers
    from families import randomise
    from tiny_configs import tiny
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(seed)
    kind = CONFIG_MAPPING[model_type]
    model = getattr(transformers, name)(kind(**tiny(kind))).float().eval()
    randomise(model)
    return model


def recomputed(model, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(logits f32[T, V], smallest margin of a router's choice at each token): the rows of a prompt, then the last row
    of a forward of its own for every step."""
    from families import forward

    logits, margins = forward(model, list(tokens[:PROMPT]))
    for end in range(PROMPT + 1, len(tokens) + 1):
        row, margin = forward(model, list(tokens[:end]))
        logits, margins = np.concatenate([logits, row[-1:]]), np.concatenate([margins, margin[-1:]])
    return logits, margins


def served(artifact: Path, tokens: Sequence[int], other: Sequence[int]) -> tuple[np.ndarray, list[str]]:
    """Logits of a prompt and steps, beside another request; and the ways that gave other bits."""
    import adaptc

    with adaptc.load(artifact, threads=1) as session:
        whole = session.score(tokens)
        ways = {"single tokens": session.score(tokens, chunk=1), "chunks": session.score(tokens, chunk=5)}
        engine, rows = session.engine, [np.full_like(whole, np.nan), np.full((len(other), whole.shape[1]), np.nan, np.float32)]
        for sequence, out in zip((tokens, other), rows):
            engine.score(sequence, out, chunk=7)
        while engine.active:
            engine.step()
        ways["a batch"] = rows[0]
    return whole, [way for way, got in ways.items() if not np.array_equal(got, whole)]


def states(artifact: Path) -> tuple[str, ...]:
    """What requests keep, by the artifact's plan."""
    from adaptc.plan import Plan

    plan = Plan.from_json((artifact / "plan.json").read_text())
    words = (f"{'rows' if not s.window else f'rows in a window of {s.window}'} of "
             + " and ".join(f"{p.heads}×{p.width}" for p in s.parts) for s in plan.states)
    return tuple(dict.fromkeys(words))


def check(name: str, model_type: str, seeds: int) -> Outcome:
    """In this process."""
    from adaptc.errors import AdaptcError
    from families import NEAR_TIE as NEAR_CHOICE
    from families import compile_family, tokens_of

    found, start = Outcome(name, model_type), time.perf_counter()
    worst, counted = 0.0, []
    for seed in range(seeds):
        tokens, other = tokens_of(PROMPT + STEPS, seed), tokens_of(11, seed + 100)
        try:
            model = build(name, model_type, seed)
            expected, margins = recomputed(model, tokens)
        except Exception as error:
            return _ended(found, start, "doesn't run", f"{type(error).__name__}: {error}")
        with tempfile.TemporaryDirectory() as place:
            folder, artifact = Path(place) / "model", Path(place) / "a.adapt"
            try:
                model.save_pretrained(folder)
            except Exception as error:
                return _ended(found, start, "doesn't run", f"saving it: {type(error).__name__}: {error}")
            try:
                compile_family(folder, artifact, page_size=PAGE)
                got, other_bits = served(artifact, tokens, other)
            except AdaptcError as error:
                return _ended(found, start, "refused", f"[{error.code}] {error}")
            found.states = states(artifact)
        best = np.sort(expected, 1)
        keep = (best[:, -1] - best[:, -2] >= NEAR_TIE) & (margins >= NEAR_CHOICE)
        error = np.abs(got - expected).max(1) / np.abs(expected).max(1)
        worst, counted = max(worst, float(error[keep].max())), [*counted, float(keep.mean())]
        if other_bits:
            return _ended(found, start, "wrong", f"other bits than one shot: {', '.join(other_bits)}")
    found.worst, found.counted = worst, float(np.mean(counted))
    return _ended(found, start, "matched" if worst <= TOLERANCE else "wrong", "")


def _ended(found: Outcome, start: float, status: str, said: str) -> Outcome:
    found.status, found.said, found.seconds = status, said, time.perf_counter() - start
    return found


def apart(name: str, model_type: str, seeds: int) -> Outcome:
    """In a process of its own."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as out:
        command = [sys.executable, __file__, "--one", name, model_type, str(seeds), out.name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS * seeds)
        except subprocess.TimeoutExpired:
            return Outcome(name, model_type, said=f"took more than {SECONDS * seeds} s")
        text = out.read()
    if not text:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        return Outcome(name, model_type, said=f"ended with {done.returncode}: {''.join(last)[:300]}")
    return Outcome(**json.loads(text))


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
        "| class | | largest difference | what requests keep, or why not |", "|---|---|---|---|",
    ]
    for one in outcomes:
        worst = "" if one.worst is None else f"{one.worst:.1e}"
        said = "; ".join(one.states) if one.status == "matched" else one.said
        said = " ".join(said.split()).replace("|", "\\|")
        lines.append(f"| {one.name} | {one.status} | {worst} | {said[:400]}{'…' if len(said) > 400 else ''} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="CLASS", help="classes; all of them by default")
    parser.add_argument("--seeds", type=int, default=1, help="how many sets of weights and tokens")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--page", type=Path, help="writes what was found here, for people")
    given = parser.parse_args()
    known = classes()
    wanted = {name: known[name] for name in given.names or known}

    def run(name: str) -> Outcome:
        found = apart(name, wanted[name], given.seeds)
        worst = "" if found.worst is None else f"{found.worst:.1e} ({found.counted:.0%} counted)"
        print(f"{found.status:11} {name} {worst} {' '.join(found.said.split())[:200]} {found.seconds:.0f}s", flush=True)
        return found

    with ThreadPoolExecutor(given.jobs) as pool:
        outcomes = list(pool.map(run, wanted))
    if given.page:
        given.page.write_text(page(outcomes))
    return sum(one.status in ("wrong", "failed") for one in outcomes)


def _one(name: str, model_type: str, seeds: str, out: str) -> None:
    """The whole of a process that ``apart`` starts."""
    resource.setrlimit(resource.RLIMIT_DATA, (GIGABYTES << 30, GIGABYTES << 30))
    Path(out).write_text(json.dumps(asdict(check(name, model_type, int(seeds)))))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        _one(*sys.argv[2:])
    else:
        sys.exit(min(main(), 1))
