"""Error by depth as a drawing: one line for each thing compared, the relative error on a logarithmic scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path

from adaptc.chart import COLOURS, Axis, Chart
from adaptc.verify.report import Depth, Report

LINES = {"captured": "artifact against the captured program",
         "authors": "captured program against the authors' module"}
LEAST = 1e-9
"""Errors below this, and exact agreement, are drawn here."""


def write(report: Report, path: Path) -> None:
    """OutputError says why the file can't be written."""
    drawing(report.depths, f"Relative error by depth: {report.model}").write(path)


def drawing(depths: Sequence[Depth], title: str) -> Chart:
    """Infinite errors stand at the top, one decade above the largest finite one."""
    finite = [max(d.error, LEAST) for d in depths if isfinite(d.error)] or [LEAST]
    y = Axis.over("relative error", finite, log=True)
    if len(finite) < len(depths):
        y = replace(y, high=10 * y.high)
    chart = Chart(title, Axis.over("layer (the last: logits)", [d.depth for d in depths], whole=True), y)
    for (kind, label), colour in zip(LINES.items(), COLOURS):
        line = [(d, (d.depth, max(d.error, LEAST) if isfinite(d.error) else y.high))
                for d in depths if d.against == kind]
        if line:
            chart.line([point for _, point in line], colour, label)
        for d, point in line:
            chart.dot(point, colour, title=f"{d.module or 'logits'}: {d.error:.2e}, cosine {d.cosine:.9f}")
    return chart
