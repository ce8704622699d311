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
    from adaptc.verify.report import Report

LEVELS = ("operator", "layer", "model", "equivalences")
SEED = 20260


def verify(artifact: str | os.PathLike, *, levels: Sequence[str] = LEVELS, against: str | None = None,
           text: str | os.PathLike | None = None, trust_remote_code: bool = False,
           progress: Callable[[str, int, int], None] = lambda *a: None) -> Report:
    """Checks ``artifact`` at ``levels`` (and always its weights, which every level's oracle computes with).

    against   the model it was made from: adds the authors' own module, layer by layer (needs torch)
    trust_remote_code  runs modelling code that lies in the folder of ``against``
    text      a file whose perplexity is compared (model level), and whose tokens the layer level runs on

    Raises AdaptcError for what can't be verified at all: a damaged artifact, one for another machine, bad options.
    """
    for level in levels:
        if level not in LEVELS:
            raise one_of("level", level, LEVELS)
    if text is not None and "model" not in levels and "layer" not in levels:
        raise OptionError("a text is given, but neither the model nor the layer level, which read it, is checked.")
    from adaptc.verify import weights
    from adaptc.verify.guard import Crashed, Failed, guarded
    from adaptc.verify.report import Finding, Level, Report
    from adaptc.verify.subject import Subject

    subject = Subject(artifact)
    report = Report(os.fspath(artifact), subject.artifact.manifest["model"])
    words = _encode(subject, text) if text is not None else None
    tokens = words or _tokens(subject)

    def timed(name: str, check, guard: bool = True) -> None:
        start = time.perf_counter()
        try:
            made = guarded(check, subject.trying) if guard else check()
        except Crashed as crash:
            where, module = subject.describe(crash.operator) if crash.operator is not None else ("run time", "")
            made = Level(name, findings=[Finding(f"native code crashed ({crash.cause})", where, module)])
        except Failed as error:
            made = Level(name, findings=[Finding(f"the check ended in an error: {error}", "run time")])
        level, depths = made if isinstance(made, tuple) else (made, [])
        level.seconds = time.perf_counter() - start
        level.left_out += subject.not_run() if name == "operator" else []
        report.levels.append(level)
        report.depths.extend(depths)

    timed("weights", lambda: weights.check(subject, progress), guard=False)
    if "operator" in levels:
        from adaptc.verify import operators

        timed("operator", lambda: operators.check(subject, progress))
    if "layer" in levels:
        from adaptc.verify import layers

        timed("layer", lambda: layers.check(subject, tokens, progress))
    if "model" in levels:
        from adaptc.verify import model

        timed("model", lambda: model.check(subject, words, progress))
    if "equivalences" in levels:
        from adaptc.verify import equivalences

        timed("equivalences", lambda: equivalences.check(subject, tokens, progress), guard=False)
    if against is not None:
        from adaptc.verify import against as authors

        some = tokens[: min(len(tokens), 24, subject.plan.max_context)]
        timed("authors", lambda: authors.check(subject, against, [int(t) for t in some], trust_remote_code, progress),
              guard=False)
    return report


def _encode(subject, path: str | os.PathLike) -> list[int]:
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


def _tokens(subject) -> list[int]:
    """The first golden prompt with its answer; without goldens, seeded random ids."""
    import numpy as np

    from adaptc.verify.model import goldens

    golden = goldens(subject)
    if golden is not None:
        first = golden["tokens"][0]
        return [int(t) for t in first[first >= 0]]
    return np.random.default_rng(SEED).integers(0, subject.plan.vocabulary, 64).tolist()
