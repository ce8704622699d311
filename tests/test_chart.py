"""Drawings: where marks stand, what is readable, and hostile words."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from adaptc.chart import HEIGHT, WIDTH, Axis, Chart
from adaptc.errors import OutputError


def test_axes_hold_their_values_between_round_ends():
    line = Axis.over("x", [3, 17, 42])
    assert (line.low, line.high) == (0, 45) or line.high % 5 == 0 and 42 <= line.high <= 50
    ticks = line.ticks()
    assert ticks[0] == 0 and ticks[-1] == pytest.approx(line.high) and 4 <= len(ticks) - 1 <= 10
    decades = Axis.over("y", [0.02, 700], log=True)
    assert (decades.low, decades.high) == (0.01, 1000) and decades.ticks() == [0.01, 0.1, 1, 10, 100, 1000]
    assert [decades.part(v) for v in (0.01, 1, 1000, 1e9)] == pytest.approx([0, 0.4, 1, 1])


@pytest.mark.parametrize("values", ([], [0.0], [5.0], [1e-9], [1e12]))
def test_axes_of_few_or_odd_values(values):
    for axis in (Axis.over("x", values), Axis.over("x", [v or 1 for v in values], log=True)):
        assert axis.high > axis.low and len(axis.ticks()) >= 2


def test_counts_have_nothing_between_them():
    assert Axis.over("layer", [0, 1, 2], whole=True).ticks() == [0, 1, 2]
    assert Axis.over("layer", [30], whole=True).ticks()[:2] == [0, 5]


def chart() -> Chart:
    return Chart("<title> & more", Axis("x", 0, 10), Axis("y", 1, 100, log=True))


def test_marks_stand_where_their_values_are():
    drawing = chart()
    drawing.dot((0, 1), "#000")
    drawing.dot((10, 100), "#000")
    circles = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="3.0"', drawing.svg())
    (x0, y0), (x1, y1) = ((float(x), float(y)) for x, y in circles)
    assert x0 < x1 <= WIDTH and 0 <= y1 < y0 <= HEIGHT


def test_words_are_escaped_and_never_overlap():
    drawing = chart()
    for _ in range(5):
        drawing.text((5, 10), "<b>words</b>")
    drawing.line([(0, 1), (10, 100)], "#000", label="a & b")
    found = ElementTree.fromstring(drawing.svg())
    texts = [e for e in found.iter() if e.tag.endswith("text")]
    assert {"<title> & more", "a & b", "<b>words</b>"} <= {e.text for e in texts}
    heights = sorted(float(e.get("y")) for e in texts if e.text == "<b>words</b>")
    assert all(b - a >= 12 for a, b in zip(heights, heights[1:]))


def test_a_file_that_cant_be_written(tmp_path):
    with pytest.raises(OutputError, match="can't be written"):
        chart().write(tmp_path / "no" / "x.svg")
