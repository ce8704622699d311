"""Model level: what the run time answers, against the authors' recorded answers and against the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from adaptc.artifact_format import GOLDENS
from adaptc.backends.reference.interpreter import Reference
from adaptc.runtime.session import Session, load
from adaptc.verify import tolerances
from adaptc.verify.report import Finding, Level
from adaptc.verify.subject import Subject

TEXT_TOKENS = 128
"""Tokens of a text that perplexity is taken over; the reference backend needs seconds for each hundred."""


def goldens(subject: Subject) -> Mapping[str, np.ndarray] | None:
    """The artifact's golden tensors (``adaptc.golden`` describes them); None when it has none."""
    from safetensors.numpy import load as parse

    data = subject.artifact.read(GOLDENS)
    return None if data is None else parse(data)


def check(subject: Subject, text: list[int] | None, progress: Callable) -> Level:
    """``text``: token ids of a text whose perplexity is compared, or None."""
    level = Level("model")
    golden = goldens(subject)
    with load(subject.artifact.path, prefix_cache=False) as session:
        if golden is None:
            level.left_out.append("the model level was not checked: the artifact has no goldens (`adaptc golden MODEL "
                                  "-o FILE`, then `adaptc compile --goldens FILE`)")
        else:
            _logits(session, golden, level, progress)
            _greedy(session, golden, level)
        if text is None:
            level.left_out.append("perplexity: no --text FILE was given")
        else:
            _perplexity(subject, session, text, level)
    return level


def _sequences(golden):
    for tokens, length in zip(golden["tokens"], golden["prompt_lengths"]):
        yield tokens[tokens >= 0].tolist(), int(length)


def log_sum_exp(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    peak = wide.max(1)
    return peak + np.log(np.exp(wide - peak[:, None]).sum(1))


def _logits(session: Session, golden, level: Level, progress: Callable) -> None:
    """Teacher-forced logits (best, probed, and their log-sum-exp), within the manifest's tolerance; where values are
    stored coarser than float32, the mean divergence is."""
    stated = session.manifest["tolerances"]
    allowed, most = stated.get("logits_absolute"), stated.get("divergence")
    worst, divergence, where = 0.0, [], (0, 0)
    count, skipped = len(golden["tokens"]), 0
    for i, (tokens, length) in enumerate(_sequences(golden)):
        if len(tokens) - 1 > session.plan.max_context:
            skipped += 1
            continue
        logits = session.score(tokens[:-1], start=length - 1)
        top = np.take_along_axis(logits, golden["top_ids"][i].astype(np.int64), 1)
        total = log_sum_exp(logits)
        off = np.maximum(np.abs(top - golden["top_logits"][i]).max(1), np.abs(total - golden["log_sum_exp"][i]))
        off = np.maximum(off, np.abs(logits[:, golden["probe_ids"]] - golden["probe_logits"][i]).max(1))
        off = np.where(np.isfinite(off), off, np.inf)
        if off.max() > worst:
            worst, where = float(off.max()), (i, length + int(off.argmax()))
        theirs = golden["top_logits"][i].astype(np.float64) - golden["log_sum_exp"][i][:, None]
        divergence += (np.exp(theirs) * (theirs - (top - total[:, None]))).sum(1).tolist()
        progress("goldens", i + 1, count)
    level.figures["largest difference of a golden logit"] = worst
    mean = float(np.mean(divergence)) if divergence else 0.0
    level.figures["mean divergence from the goldens (nats)"] = mean
    level.covered.append(f"logits of {count - skipped} golden prompts × {golden['log_sum_exp'].shape[1]} steps "
                         "(best, probed, log-sum-exp)")
    if skipped:
        level.left_out.append(f"{skipped} goldens are longer than the artifact's context")
    if most is not None and not mean <= most:
        level.findings.append(Finding("the mean divergence from the goldens (nats) is too large", "logits", "", mean, most))
    if allowed is None and most is None:
        level.left_out.append("golden logits are reported, not judged: the manifest states no tolerance for these "
                              "options")
    elif allowed is not None and not worst <= allowed:
        level.findings.append(Finding(f"a golden logit of prompt {where[0]} at position {where[1]} differs (absolute)",
                                      "logits", "", worst, allowed))


def _greedy(session: Session, golden, level: Level) -> None:
    """Greedy answers, up to the first step whose best two logits are closer than the manifest's margin."""
    allowed = session.manifest["tolerances"].get("greedy_margin")
    if allowed is None:
        return
    margins = golden["top_logits"][:, :, 0] - golden["top_logits"][:, :, 1]
    compared = 0
    for i, ((tokens, length), margin) in enumerate(zip(_sequences(golden), margins)):
        if len(tokens) > session.plan.max_context:
            continue
        close = np.flatnonzero(margin < allowed)
        end = int(close[0]) if len(close) else len(margin)
        if end == 0:
            continue
        made = session.generate(tokens[:length], max_tokens=end, ignore_eos=True).token_ids
        compared += end
        if list(made) != tokens[length : length + end]:
            at = next((k for k, (a, b) in enumerate(zip(made, tokens[length:])) if a != b), len(made))
            ours = made[at] if at < len(made) else "none"
            level.findings.append(Finding(f"greedy decoding of golden prompt {i} gives token {ours} at step {at}, the "
                                          f"authors' model {tokens[length + at]}", "greedy tokens"))
    level.covered.append(f"{compared} greedy tokens (up to a margin below {allowed:g})")


def _perplexity(subject: Subject, session: Session, text: list[int], level: Level) -> None:
    tokens = text[: min(TEXT_TOKENS, subject.plan.max_context)]
    if len(tokens) < 2:
        level.left_out.append("perplexity: the text has fewer than two tokens")
        return
    ours = perplexity(session.score(tokens), tokens)
    theirs = perplexity(Reference(subject.captured, subject.values).score(tokens), tokens)
    bound = tolerances.PERPLEXITY[tolerances.kind_of(subject.artifact.manifest["options"])]
    error = abs(ours - theirs) / theirs
    level.figures |= {"perplexity of the text, artifact": ours, "perplexity of the text, reference": theirs}
    level.covered.append(f"perplexity over {len(tokens)} of the text's {len(text)} tokens")
    if not error <= bound:
        level.findings.append(Finding("perplexity of the text differs from the reference's", "logits", "", error,
                                      bound))


def perplexity(logits: np.ndarray, tokens: list[int]) -> float:
    """exp of the mean negative log-likelihood of ``tokens[1:]``."""
    chosen = np.take_along_axis(logits[:-1], np.array(tokens[1:])[:, None], 1)[:, 0]
    return float(np.exp(np.mean(log_sum_exp(logits[:-1]) - chosen)))
