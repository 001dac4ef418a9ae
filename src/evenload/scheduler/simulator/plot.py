"""Pictures of simulations, written as SVG by hand: devices in use over time, and how completion times are spread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from evenload.scheduler.core.states import JobState
from evenload.scheduler.simulator.outcome import SimulationOutcome

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 900, 240, 70, 40, 80
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito: told apart by everybody."""
_MOST_POINTS = 1200


def svg(outcomes: Sequence[tuple[str, SimulationOutcome]]) -> str:
    """Two panels, a line each simulation: devices held over time, and the part of jobs done within a time."""
    height = 2 * (_HEIGHT + _GAP) + _TOP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for index, (name, _) in enumerate(outcomes):
        x = _LEFT + index * 150
        parts.append(f'<rect x="{x}" y="12" width="14" height="4" fill="{_COLOURS[index % len(_COLOURS)]}"/>')
        parts.append(f'<text x="{x + 20}" y="19">{escape(name)}</text>')
    parts += _panel(_TOP, "devices held", "hours", [_use(outcome) for _, outcome in outcomes], is_log=False)
    done = [_spread(outcome) for _, outcome in outcomes]
    parts += _panel(_TOP + _HEIGHT + _GAP, "part of jobs done", "completion time, seconds", done, is_log=True)
    return "\n".join([*parts, "</svg>", ""])


def _use(outcome: SimulationOutcome) -> list[tuple[float, float]]:
    """Devices held over time, as steps; thinned by means over equal times where there are too many."""
    moments = outcome.moments
    if not moments:
        return []
    first_s, last_s = moments[0].time_s, moments[-1].time_s
    if len(moments) <= _MOST_POINTS // 2:
        steps = []
        for moment, after in zip(moments, (*moments[1:], moments[-1]), strict=True):
            steps += [(moment.time_s / 3600, float(moment.num_held)), (after.time_s / 3600, float(moment.num_held))]
        return steps
    width_s = (last_s - first_s) / (_MOST_POINTS // 2)
    areas = [0.0] * (_MOST_POINTS // 2 + 1)
    for moment, after in pairwise(moments):
        time_s = moment.time_s
        while time_s < after.time_s:
            bin_index = int((time_s - first_s) / width_s)
            until_s = min(after.time_s, max(first_s + (bin_index + 1) * width_s, math.nextafter(time_s, math.inf)))
            areas[min(bin_index, len(areas) - 1)] += moment.num_held * (until_s - time_s)
            time_s = until_s
    return [((first_s + (i + 0.5) * width_s) / 3600, area / width_s) for i, area in enumerate(areas[:-1])]


def _spread(outcome: SimulationOutcome) -> list[tuple[float, float]]:
    jcts = sorted(max(job.jct_s, 1.0) for job in outcome.jobs if job.state is JobState.SUCCEEDED)
    return [(jct_s, (index + 1) / len(jcts)) for index, jct_s in enumerate(jcts)]


def _panel(top: int, title: str, below: str, lines: Sequence[Sequence[tuple[float, float]]], is_log: bool) -> list[str]:
    points = [point for line in lines for point in line]
    if not points:
        return []
    low = min(x for x, _ in points) if is_log else 0.0
    high = max(x for x, _ in points)
    most = max(y for _, y in points) or 1.0
    width = _WIDTH - _LEFT - 30

    def place(x: float, y: float) -> tuple[float, float]:
        if is_log:
            part = math.log(x / low) / math.log(high / low) if high > low else 0.5
        else:
            part = (x - low) / (high - low) if high > low else 0.5
        return _LEFT + part * width, top + _HEIGHT - y / most * _HEIGHT

    parts = [
        f'<rect x="{_LEFT}" y="{top}" width="{width}" height="{_HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{_LEFT}" y="{top - 6}">{escape(title)}</text>',
        f'<text x="{_LEFT + width}" y="{top + _HEIGHT + 34}" text-anchor="end">{escape(below)}</text>',
    ]
    for tick in _ticks(low, high, is_log):
        x, _ = place(tick, 0)
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + _HEIGHT}" stroke="#eee"/>')
        parts.append(f'<text x="{x:.1f}" y="{top + _HEIGHT + 16}" text-anchor="middle">{tick:g}</text>')
    for tick in _ticks(0.0, most, False):
        _, y = place(low if is_log else 0.0, tick)
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for index, line in enumerate(lines):
        drawn = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in line)
        colour = _COLOURS[index % len(_COLOURS)]
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    return parts


def _ticks(low: float, high: float, is_log: bool) -> list[float]:
    if is_log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        return [10.0**power for power in range(first, last + 1) if low <= 10.0**power <= high]
    step = 10.0 ** math.floor(math.log10((high - low) or 1.0))
    while (high - low) / step < 4:
        step /= 2
    return [low + index * step for index in range(int((high - low) / step + 1e-9) + 1)]
