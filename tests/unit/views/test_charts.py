"""Charts: the figure of README is drawn from the stored result, and no text of a chart leaves it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from functools import partial

from benchmarks.chart import CHART, CURVES, CURVES_CHART, draw_curves, stored

from evenload.views.svg import bar_panel, chart, line_panel

_CHARACTER = 7.3
"""Pixels of a character at 12 pixels in a wide sans-serif font."""


def outside(svg: str) -> list[str]:
    """The texts of a chart that may reach over its edge."""
    root = ET.fromstring(svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    found = []
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        length, x = len(text.text or "") * _CHARACTER, float(text.attrib["x"])
        left = x - {"start": 0.0, "middle": length / 2, "end": length}[text.attrib["text-anchor"]]
        if left < 0 or left + length > width or not 0 <= float(text.attrib["y"]) <= height:
            found.append(text.text or "")
    return found


def test_the_figure_is_drawn_from_the_stored_result() -> None:
    assert CHART.read_text() == stored(), "run `python -m benchmarks.chart`"


def test_no_text_leaves_the_figure() -> None:
    assert outside(CHART.read_text()) == []


def test_curves_of_the_arms_that_use_both_devices() -> None:
    arms = {
        name: {"curve": [[0.0, 2.3], [5.0, 1.1]]}
        for name in ("fast alone", "async", "ddp", "ddp, equal shares", "local")
    }
    found = {"result": {"arms": arms}, "hardware": {"cpu": "x"}, "date": "2026-11-20T14", "commit": "2172f47fb562"}
    drawn = draw_curves(found)
    assert drawn.count("<polyline") == 4 and "alone" not in drawn and outside(drawn) == []
    if CURVES.exists():
        assert CURVES_CHART.read_text() == draw_curves(json.loads(CURVES.read_text())), (
            "run `python -m benchmarks.chart`"
        )


def test_a_long_caption_is_wrapped() -> None:
    caption = "a caption of several words " * 7
    bars = partial(bar_panel, title="t", below=caption, groups=[("one", [0.5])], width=720, height=190)
    lines = partial(line_panel, title="t", below=caption, lines=[[(0, 1), (1, 2)]], width=720, height=190)
    assert outside(chart(["one"], [bars, lines], 720, 190)) == []
