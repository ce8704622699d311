"""What a verification found, as data; text for people, JSON for machines."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from adaptc.report import table

SHOWN = 12
"""Findings of one level that the text shows; JSON has all of them."""


@dataclass(frozen=True)
class Finding:
    """One disagreement.

    what      in a sentence
    where     what disagrees: an operator ("14 linears"), a tensor, a part of the run time
    module    module path in the authors' model, "" when it belongs to none
    error     largest relative error seen, of which ``bound`` is allowed; None when there is no number
    """

    what: str
    where: str
    module: str = ""
    error: float | None = None
    bound: float | None = None


@dataclass
class Level:
    """One level's outcome. ``covered`` and ``left_out`` are sentences: nothing is silently not checked."""

    name: str
    covered: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.findings


@dataclass(frozen=True)
class Depth:
    """A layer's output against the oracle's, running freely from the same tokens. ``error``: largest difference over
    the largest value; ``against`` "captured" (the artifact against the reference) or "authors" (the reference
    against the authors' module)."""

    depth: int
    module: str
    error: float
    cosine: float
    against: str = "captured"


@dataclass
class Report:
    """A whole verification."""

    artifact: str
    model: str
    levels: list[Level] = field(default_factory=list)
    depths: list[Depth] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(level.passed for level in self.levels)

    @property
    def first(self) -> Finding | None:
        """The first finding, levels in the order in which they are checked."""
        return next((f for level in self.levels for f in level.findings), None)

    def to_dict(self) -> dict:
        levels = [{**asdict(level), "passed": level.passed} for level in self.levels]
        return {"artifact": self.artifact, "model": self.model, "passed": self.passed, "levels": levels,
                "depths": [asdict(depth) for depth in self.depths]}


def text(report: Report) -> str:
    """The report for people: a line a level, its findings, what was covered, and error by depth."""
    rows = ((level.name, "pass" if level.passed else f"FAIL ({len(level.findings)})", f"{level.seconds:.1f}")
            for level in report.levels)
    parts = [f"{report.artifact} ({report.model}): {'pass' if report.passed else 'FAIL'}",
             table(("level", "outcome", "seconds"), rows, right="2")]
    parts += [_level(level) for level in report.levels]
    if report.depths:
        parts.append("Error by depth\n" + table(
            ("depth", "module", "compared with", "relative error", "cosine"),
            ((d.depth, d.module or "logits", d.against, f"{d.error:.1e}", f"{d.cosine:.9f}") for d in report.depths),
            right="034"))
    return "\n\n".join(parts)


def _level(level: Level) -> str:
    lines = [f"{level.name}: {'pass' if level.passed else 'FAIL'}"]
    lines += [f"  {_finding(finding)}" for finding in level.findings[:SHOWN]]
    if len(level.findings) > SHOWN:
        lines.append(f"  … and {len(level.findings) - SHOWN} more; --json lists them")
    lines += [f"  checked: {sentence}" for sentence in level.covered]
    lines += [f"  not checked: {sentence}" for sentence in level.left_out]
    lines += [f"  {name}: {value:.4g}" for name, value in level.figures.items()]
    return "\n".join(lines)


def _finding(f: Finding) -> str:
    place = f"{f.where} in {f.module}" if f.module else f.where
    number = f" (error {f.error:.2e}, allowed {f.bound:.1e})" if f.error is not None and f.bound is not None else ""
    return f"✗ {place}: {f.what}{number}"
