"""Plots of a run over its time axis: events, use of each device, shares, throughput, loss and metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from html import escape

from evenload.records.console import format_number, format_percent
from evenload.views.bins import MAX_BINS, TimeBins
from evenload.views.page import Series, TimeAxis, figure, legend
from evenload.views.run.accounts import COMPUTING, OUTSIDE, PARTS, STARTING
from evenload.views.run.history import DeviceHistory, RunHistory
from evenload.views.run.incidents import GROUPS, QUIET
from evenload.views.svg import decades, range_area, stacked_areas, ticks, value_line

COLOURS_OF = {
    COMPUTING: "var(--compute)",
    "compiling": "var(--compile)",
    "data": "var(--data)",
    "waiting": "var(--wait)",
    "communication": "var(--comm)",
    "other": "var(--other)",
    STARTING: "var(--startup)",
    OUTSIDE: "var(--grid)",
}
_PALETTE = tuple(f"var(--c{index})" for index in range(8))
_MAX_CELLS = 9_600
"""Devices × bins: with many devices the bins are coarser, so that the page stays small."""
_MAX_DEVICES = 96
_MANY_DEVICES = 12
_MAX_MARKS = 400
_LOG_RATIO = 50.0


def draw_plots(history: RunHistory) -> str:
    if not history.num_steps:
        return ""
    shown = list(history.devices.items())[:_MAX_DEVICES]
    bins = history.bins.coarser(max(60, min(MAX_BINS, _MAX_CELLS // len(shown))))
    ends = [min(history.bins.end_s, (index + 1) * bins.width_s) for index in range(bins.count)]
    axis = TimeAxis(bins.end_s, bins.width_s, tuple(history.step_at(end_s) for end_s in ends))
    lengths_s = [end_s - index * bins.width_s or bins.width_s for index, end_s in enumerate(ends)]
    rows = [
        _device(device, bins, key, lengths_s, axis, index == len(shown) - 1, len(shown) > _MANY_DEVICES)
        for index, (key, device) in enumerate(shown)
    ]
    left = len(history.devices) - len(shown)
    more = f'<p class="note">{left} more devices are left out here.</p>' if left else ""
    spent = {segment for _, device in shown for segment, seconds in device.segments_s.items() if seconds > 0}
    names = {name: COLOURS_OF[name] for name, segments in PARTS.items() if spent & set(segments)}
    data = escape(json.dumps({"end": bins.end_s, "width": bins.width_s, "steps": axis.steps}, separators=(",", ":")))
    curves = [_shares(shown, bins, axis), _throughput(bins, lengths_s, axis), _curve("loss", "loss", bins, axis)]
    curves += [_curve(escape(name), ("metric", name), bins, axis) for name in history.metrics]
    return (
        f'<div data-axis="{data}"><h2>Over time</h2>'
        '<p class="note">Time in sessions, pauses between them left out. Empty parts of a row: the device was not there, or in '
        'no step. Drag over a plot to zoom, double-click to see everything.</p><button id="unzoom">whole run</button>'
        f'<div class="panel">{legend(names)}{_marks(history, axis)}{"".join(rows)}{more}</div>'
        f'<div class="panel plots" style="margin-top:12px">{"".join(curve for curve in curves if curve)}</div></div>'
    )


def _marks(history: RunHistory, axis: TimeAxis) -> str:
    """Draw a mark for each incident; the grave ones are higher, and stay if there are too many."""
    found = sorted(history.incidents, key=lambda one: (one.group not in QUIET, one.seconds or 0.0))[-_MAX_MARKS:]
    if not found:
        return ""
    shapes = []
    for one in found:
        x = one.at_s / axis.width_s
        top, colour = (50, "var(--soft)") if one.group in QUIET else (0, "var(--bad)")
        text = escape(f"{GROUPS[one.group]}: {one.message[:150]}")
        shapes.append(
            f'<path d="M{x:.2f} 100V{top}" fill="none" stroke="{colour}" stroke-width="2"><title>{text}</title></path>'
        )
    return figure("events<small>losses red, others grey</small>", shapes, axis, kind="marks", has_ticks=False)


def _device(
    device: DeviceHistory,
    bins: TimeBins,
    key: object,
    lengths_s: Sequence[float],
    axis: TimeAxis,
    is_last: bool,
    is_small: bool,
) -> str:
    sums = {name: [bins.sums((key, segment)) for segment in segments] for name, segments in PARTS.items()}
    heights = {
        name: [
            min(1.0, sum(values) / length_s)
            for values, length_s in zip(zip(*tables, strict=True), lengths_s, strict=True)
        ]
        for name, tables in sums.items()
    }
    heights = {name: values for name, values in heights.items() if max(values, default=0.0) >= 0.005}
    layers = [(COLOURS_OF[name], values) for name, values in heights.items()]
    series = [Series(name, values, "%") for name, values in heights.items()]
    busy = device.busy_s / device.in_steps_s if device.in_steps_s else 0.0
    name = f", {escape(device.name)}" if device.name and device.name != f"rank {device.rank}" else ""
    title = f"rank {device.rank}{name}<small>busy {format_percent(min(1.0, busy))}, share {device.share}</small>"
    kind = "rank small" if is_small else "rank"
    return figure(title, stacked_areas(layers), axis, series, kind=kind, has_ticks=is_last)


def _shares(shown: Sequence[tuple[object, DeviceHistory]], bins: TimeBins, axis: TimeAxis) -> str:
    if len(shown) < 2:
        return ""
    samples = bins.sums("samples")
    layers, series = [], []
    for index, (key, device) in enumerate(shown):
        shares = [
            part / whole if whole else 0.0 for part, whole in zip(bins.sums((key, "share")), samples, strict=True)
        ]
        layers.append((_PALETTE[index % len(_PALETTE)], shares))
        series.append(Series(f"rank {device.rank} {device.name}".rstrip(), shares, "%"))
    title = "shares and membership<small>of the global batch, rank 0 below</small>"
    outline = "var(--panel)" if len(shown) <= _MANY_DEVICES else "none"
    scale = {"0": 0.0, "50 %": 0.5, "100 %": 0.97}
    return figure(title, stacked_areas(layers, outline), axis, series, scale)


def _throughput(bins: TimeBins, lengths_s: Sequence[float], axis: TimeAxis) -> str:
    rates = [samples / length_s for samples, length_s in zip(bins.sums("samples"), lengths_s, strict=True)]
    most = max(rates, default=0.0) * 1.05 or 1.0
    scale = {format_number_short(tick): tick / most for tick in ticks(0.0, most) if tick <= most * 0.97}
    shapes = [*stacked_areas([("var(--accent)", [rate / most for rate in rates])])]
    shapes = [shape.replace('fill="var(--accent)"', 'fill="var(--accent)" fill-opacity="0.25"') for shape in shapes]
    shapes.append(value_line([rate / most for rate in rates], "var(--accent)"))
    series = [Series("samples/s", rates)]
    return figure("throughput<small>committed samples/s</small>", shapes, axis, series, scale)


def _curve(title: str, name: Hashable, bins: TimeBins, axis: TimeAxis) -> str:
    """Draw means over bins as a line, on the range of the values in each bin."""
    means, ranges = bins.means(name), bins.extremes(name)
    values = [value for value in means if value is not None]
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    is_log = low > 0 and high / low > _LOG_RATIO
    low, high = (low / 1.1, high * 1.1) if is_log else (low - 0.05 * (high - low), high + 0.05 * (high - low))
    if high <= low:
        low, high = low - 0.5, high + 0.5

    def height(value: float) -> float:
        value = min(high, max(low, value))
        return math.log(value / low) / math.log(high / low) if is_log else (value - low) / (high - low)

    shapes = [range_area([found and (height(found[0]), height(found[1])) for found in ranges], "var(--accent)")]
    shapes.append(value_line([None if value is None else height(value) for value in means], "var(--accent)"))
    marks = decades(low, high) if is_log else ticks(low, high)
    scale: Mapping[str, float] = {
        format_number_short(tick): height(tick) for tick in marks if 0.02 < height(tick) < 0.98
    }
    note = "mean and range, logarithmic" if is_log else "mean and range"
    return figure(f"{title}<small>{note}</small>", shapes, axis, [Series("mean", means)], scale)


def format_number_short(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 100_000 else format_number(value)
