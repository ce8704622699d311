"""Verification: an artifact against its own captured program, from the artifact alone.

The oracle is the captured program on the reference backend, with the weights unpacked from the artifact and each
checked against the digest of the model's own tensor. ``docs/verify.md`` says what each level checks and why its
tolerances are what they are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from adaptc.errors import InputError, OptionError, RequestError, one_of

if TYPE_CHECKING:
    from adaptc.verify.report import Depth, Level, Report
    from adaptc.verify.subject import Subject

LEVELS = ("operator", "layer", "model", "equivalences")
GUARDED = ("operator", "layer", "model")
"""Those that run in a child process; the equivalences guard each of their ways."""


def verify(artifact: str | os.PathLike, *, levels: Sequence[str] = LEVELS, against: str | None = None,
           text: str | os.PathLike | None = None, trust_remote_code: bool = False, seed: int = 0,
           progress: Callable[[str, int, int], None] = lambda *a: None) -> Report:
    """Checks ``artifact`` at ``levels`` (and always its weights, which every level's oracle computes with).

    against   the model it was made from: adds the authors' own module, layer by layer (needs torch)
    trust_remote_code  runs modelling code that lies in the folder of ``against``
    text      a file whose perplexity is compared (model level), and whose tokens the layer level runs on
    seed      of the made-up operands, tokens and orders of pages

    Raises AdaptcError for what can't be verified at all: a damaged artifact, one for another machine, bad options.
    """
    from adaptc.runtime.sampler import check_seed

    for level in levels:
        if level not in LEVELS:
            raise one_of("level", level, LEVELS)
    check_seed(seed)
    if text is not None and "model" not in levels and "layer" not in levels:
        raise OptionError("a text is given, but neither the model nor the layer level, which read it, is checked.")
    from adaptc.verify import equivalences, layers, model, operators, weights
    from adaptc.verify.report import Report
    from adaptc.verify.subject import Subject

    subject = Subject(artifact, seed)
    words = _encode(subject, text) if text is not None else None
    tokens = words or _tokens(subject)
    checks = {
        "weights": lambda: weights.check(subject, progress),
        "operator": lambda: operators.check(subject, progress),
        "layer": lambda: layers.check(subject, tokens, progress),
        "model": lambda: model.check(subject, words, progress),
        "equivalences": lambda: equivalences.check(subject, tokens, progress),
    }
    checks = {name: check for name, check in checks.items() if name == "weights" or name in levels}
    if against is not None:
        from adaptc.verify import against as authors

        some = [int(t) for t in tokens[: min(24, subject.plan.max_context)]]
        checks["authors"] = lambda: authors.check(subject, against, some, trust_remote_code, progress)
    report = Report(os.fspath(artifact), subject.artifact.manifest["model"])
    for name, check in checks.items():
        level, depths = _timed(subject, name, check)
        report.levels.append(level)
        report.depths.extend(depths)
    return report


def _timed(subject: Subject, name: str, check: Callable) -> tuple[Level, list[Depth]]:
    """What ``check`` finds; that it crashed is a finding too, of a check that runs native code."""
    from adaptc.verify.guard import Crashed, Failed, guarded
    from adaptc.verify.report import Finding, Level

    start = time.perf_counter()
    try:
        made = guarded(check, subject.trying) if name in GUARDED else check()
    except Crashed as crash:
        where, module = subject.describe(crash.operator) if crash.operator is not None else ("run time", "")
        made = Level(name, findings=[Finding(f"native code crashed ({crash.cause})", where, module)])
    except Failed as error:
        made = Level(name, findings=[Finding(f"the check ended in an error: {error}", "run time")])
    level, depths = made if isinstance(made, tuple) else (made, [])
    level.seconds = time.perf_counter() - start
    return level, depths


def _encode(subject: Subject, path: str | os.PathLike) -> list[int]:
    """The text's tokens by the artifact's own tokenizer."""
    from adaptc.artifact_format import TOKENIZER
    from adaptc.runtime.text import Tokenizer

    data = subject.artifact.read(TOKENIZER)
    if data is None:
        raise RequestError(f"The artifact {subject.artifact.path} has no tokenizer, so a text can't be read.",
                           hint="Verify it without --text.")
    try:
        words = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} can't be read: {error}.") from error
    tokens = [int(t) for t in Tokenizer(data, subject.artifact.text_info).encode(words)]
    if not tokens:
        raise InputError(f"{path} has no tokens.", hint="Give a text of a few sentences.")
    return tokens


def _tokens(subject: Subject) -> list[int]:
    """The first golden prompt with its answer; without goldens, seeded random ids."""
    from adaptc.verify.model import goldens

    golden = goldens(subject)
    if golden is not None:
        first = golden["tokens"][0]
        return [int(t) for t in first[first >= 0]]
    return subject.random("tokens").integers(0, subject.plan.vocabulary, 64).tolist()
