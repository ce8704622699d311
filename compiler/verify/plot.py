"""Error by depth as an SVG drawing: one line for each thing compared, the relative error on a logarithmic scale."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, floor, isfinite, log10
from pathlib import Path

from adaptc.errors import OutputError
from adaptc.verify.report import Depth, Report

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 380, 76, 20, 56, 50
LINES = {"captured": ("#1f5fa8", "artifact against the captured program"),
         "authors": ("#b4541a", "captured program against the authors' module")}
LEAST = 1e-9
"""Errors below this, and exact agreement, are drawn here."""


def write(report: Report, path: Path) -> None:
    try:
        path.write_text(svg(report.depths, f"Relative error by depth: {report.model}"), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path} can't be written: {error.strerror}.") from error


def svg(depths: Sequence[Depth], title: str) -> str:
    """The drawing. Infinite errors stand at the top, one decade above the largest finite one."""
    finite = [max(d.error, LEAST) for d in depths if isfinite(d.error)] or [LEAST]
    low, high = floor(log10(min(finite))), ceil(log10(max(finite)))
    high += 1 if high == low or len(finite) < len(depths) else 0
    last = max((d.depth for d in depths), default=1) or 1
    x = lambda depth: LEFT + depth / last * (WIDTH - LEFT - RIGHT)  # noqa: E731
    level = lambda error: min(max(log10(max(error, LEAST)), low), high) if isfinite(error) else high  # noqa: E731
    y = lambda error: TOP + (high - level(error)) / (high - low) * (HEIGHT - TOP - BOTTOM)  # noqa: E731
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
             'font-size="12" fill="#222">',
             f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
             f'<text x="{LEFT}" y="20" font-size="15">{escape(title)}</text>']
    for power in range(low, high + 1, max(1, (high - low) // 8)):
        at = y(10.0**power)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>'
                     f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">1e{power}</text>')
    for depth in range(0, last + 1, max(1, last // 12)):
        parts.append(f'<text x="{x(depth):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{depth}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">layer (the last: '
                 'logits)</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">largest '
                 'difference / largest value</text>')
    for number, (kind, (colour, label)) in enumerate(LINES.items()):
        line = [d for d in depths if d.against == kind]
        if not line:
            continue
        points = " ".join(f"{x(d.depth):.1f},{y(d.error):.1f}" for d in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for d in line:
            name = f"{escape(d.module or 'logits')}: {d.error:.2e}, cosine {d.cosine:.9f}"
            parts.append(f'<circle cx="{x(d.depth):.1f}" cy="{y(d.error):.1f}" r="3" fill="{colour}">'
                         f'<title>{name}</title></circle>')
        at = LEFT + number * 300
        parts.append(f'<circle cx="{at + 4}" cy="36" r="4" fill="{colour}"/><text x="{at + 14}" y="40">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])
