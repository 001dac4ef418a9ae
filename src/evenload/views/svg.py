"""Charts as SVG text: figures of panels below a legend, and plots that a page stretches to its width.

A figure stands alone and holds its texts. A plot fills its box in both directions, from the top left corner (0, 0) to
(width, `PLOT_HEIGHT`); the page writes titles and scales beside it, so they keep their size on a narrow screen.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito: distinguishable with any colour vision."""
PLOT_HEIGHT = 100
LEFT, TOP = 70, 40
_RIGHT, _GAP = 30, 80
_LINE, _CHARACTER = 15, 7.3
"""Height of a line and width of a character in pixels, at 12 pixels and in a wide font: each viewer has its own."""

Points = Sequence[tuple[float, float]]


def chart(names: Sequence[str], panels: Sequence[Callable[[int], list[str]]], width: int, height: int) -> str:
    """Draw panels (`line_panel`, `bar_panel` at a given top) below each other, each ``height`` pixels, below a legend."""
    total = TOP + len(panels) * (height + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{total}" fill="white"/>',
    ]
    for index, name in enumerate(names):
        x = LEFT + index * 150
        parts.append(f'<rect x="{x}" y="12" width="14" height="4" fill="{COLOURS[index % len(COLOURS)]}"/>')
        parts.append(_text(x + 20, 19, name, "start"))
    for index, panel in enumerate(panels):
        parts += panel(TOP + index * (height + _GAP))
    return "\n".join([*parts, "</svg>", ""])


def line_panel(
    top: int, title: str, below: str, lines: Sequence[Points], width: int, height: int, *, is_log: bool = False
) -> list[str]:
    points = [point for line in lines for point in line]
    if not points:
        return []
    low = min(x for x, _ in points) if is_log else 0.0
    high, most = max(x for x, _ in points), max(y for _, y in points) or 1.0
    plotted = width - LEFT - _RIGHT

    def position(x: float, y: float) -> tuple[float, float]:
        part = 0.5
        if high > low:
            part = math.log(x / low) / math.log(high / low) if is_log else (x - low) / (high - low)
        return LEFT + part * plotted, top + height - y / most * height

    parts = _frame(top, title, below, width, height, {tick: f"{tick:g}" for tick in ticks(0.0, most)}, most)
    for tick in decades(low, high) if is_log else ticks(low, high):
        x, _ = position(tick, 0)
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + height}" stroke="#eee"/>')
        parts.append(_text(x, top + height + 16, f"{tick:g}", "middle"))
    for index, line in enumerate(lines):
        parts.append(polyline([position(x, y) for x, y in line], COLOURS[index % len(COLOURS)]))
    return parts


def bar_panel(
    top: int, title: str, below: str, groups: Sequence[tuple[str, Sequence[float]]], width: int, height: int
) -> list[str]:
    """Draw groups of bars, named below; values are parts of 1, shown in percent."""
    most = max(1.0, *(value for _, values in groups for value in values)) * 1.08
    parts = _frame(top, title, below, width, height, {n / 4: f"{n / 4:.0%}" for n in range(5)}, most)
    step = (width - LEFT - _RIGHT) / len(groups)
    for number, (name, values) in enumerate(groups):
        bar = step * 0.6 / len(values)
        for index, value in enumerate(values):
            x, y = LEFT + step * (number + 0.2) + index * bar, top + height * (1 - value / most)
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{bar * 0.94:.1f}" height="{top + height - y:.1f}" '
                f'fill="{COLOURS[index % len(COLOURS)]}"/>'
            )
            parts.append(_text(x + bar / 2, y - 5, f"{value:.0%}", "middle"))
        parts.append(_text(LEFT + step * (number + 0.5), top + height + 16, name, "middle"))
    return parts


def plot(shapes: Sequence[str], width: float, label: str) -> str:
    """Draw shapes in a plot of a width in units of x; ``label`` describes it to a screen reader."""
    return (
        f'<svg viewBox="0 0 {width:g} {PLOT_HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f"{''.join(shapes)}</svg>"
    )


def polyline(points: Points, colour: str) -> str:
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def value_line(values: Sequence[float | None], colour: str) -> str:
    """Draw heights (0 to 1) at the middles of the units of x, those that are there."""
    points = [(x + 0.5, PLOT_HEIGHT * (1 - value)) for x, value in enumerate(values) if value is not None]
    return polyline(points, colour)


def range_area(ranges: Sequence[tuple[float, float] | None], colour: str) -> str:
    """Fill from the low to the high height (0 to 1) of each unit of x."""
    path = ""
    for index, found in enumerate(ranges):
        if found is not None and found[1] > found[0]:
            low, high = (round(PLOT_HEIGHT * (1 - part), 1) for part in found)
            path += f"M{index} {low:g}V{high:g}h1V{low:g}z"
    return f'<path d="{path}" fill="{colour}" fill-opacity="0.22"/>' if path else ""


def stacked_areas(layers: Sequence[tuple[str, Sequence[float]]], outline: str = "none") -> list[str]:
    """Stack layers (colour, height in each unit of x) from the bottom up; heights are parts of 1."""
    tops = [0.0] * max((len(heights) for _, heights in layers), default=0)
    paths = []
    for colour, heights in layers:
        tops = [top + height for top, height in zip(tops, heights, strict=True)]
        path, run, before = f"M0 {PLOT_HEIGHT}", 0, -1
        for top in [*tops, 0.0]:
            y = round(PLOT_HEIGHT * (1 - min(1.0, top)))
            if y != before:
                path += (f"h{run}" if run else "") + f"V{y}"
                run, before = 0, y
            run += 1
        if any(heights):
            paths.append(f'<path d="{path}z" fill="{colour}" stroke="{outline}"/>')
    return paths[::-1]  # the lower ones cover the higher


def _frame(
    top: int, title: str, below: str, width: int, height: int, ticks: dict[float, str], most: float
) -> list[str]:
    right = width - _RIGHT
    parts = [f'<rect x="{LEFT}" y="{top}" width="{right - LEFT}" height="{height}" fill="none" stroke="#999"/>']
    for tick, label in ticks.items():
        y = top + height * (1 - tick / most)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#eee"/>')
        parts.append(_text(LEFT - 8, y + 4, label, "end"))
    lines = textwrap.wrap(below, int((right - LEFT) / _CHARACTER))
    captions = [_text(right, top + height + 34 + index * _LINE, line, "end") for index, line in enumerate(lines)]
    return [*parts, _text(LEFT, top - 6, title, "start"), *captions]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def ticks(low: float, high: float) -> list[float]:
    """Return at least four round values of a scale."""
    step = 10.0 ** math.floor(math.log10((high - low) or 1.0))
    while (high - low) / step < 4:
        step /= 2
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**power for power in range(first, last + 1) if low <= 10.0**power <= high]
