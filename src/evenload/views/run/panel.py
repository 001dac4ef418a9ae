"""Rendering of the live area on a terminal from a window of steps."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from evenload.records.console import RunInfo, format_many, format_percent, format_rank_range, header_parts
from evenload.records.summary import RankSummary
from evenload.records.values import StepRecord

MAX_ROWS = 12
"""Further ranks are summarized in the last row, so that the area fits a terminal."""
_NARROW = 72
"""Below this width device names are left out."""
_GAP, _MAX_NAME, _MIN_BAR, _MAX_BAR = 2, 28, 6, 30
"""In terminal columns: between two cells, for a name, for a bar."""


class BusyBar:
    """A bar of one line with the fractions busy, waiting and other; readable without colors."""

    def __init__(self, busy: float, wait: float) -> None:
        self.busy = min(1.0, max(0.0, busy))
        self.wait = min(1.0 - self.busy, max(0.0, wait))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        num_busy = round(width * self.busy)
        num_wait = round(width * (self.busy + self.wait)) - num_busy
        full, light = ("#", ".") if options.ascii_only else ("█", "░")
        yield Segment(full * num_busy, Style(color="green"))
        yield Segment(light * num_wait, Style(color="yellow"))
        yield Segment(" " * (width - num_busy - num_wait))


def render_panel(window: Sequence[StepRecord], info: RunInfo, width: int) -> RenderableType:
    """Render a window of at least one step for a terminal of ``width`` columns."""
    last = window[-1]
    summary = info.summarize(window)
    parts = [*header_parts(last, summary, info), info.left(last) if summary is not None else ""]
    head = Text("  ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts if part), style="bold")
    if summary is None:
        return head
    if summary.many is not None:
        return Group(head, Text(format_many(summary.many)))
    shown = summary.ranks if len(summary.ranks) <= MAX_ROWS else summary.ranks[: MAX_ROWS - 1]
    names = [info.name(index) if info.devices and width >= _NARROW else "" for index in range(len(shown))]
    rows: list[RenderableType] = [head, _rank_table(shown, names, width)]
    if len(shown) < len(summary.ranks):
        rest = summary.ranks[len(shown) :]
        rows.append(Text(f"{len(rest)} more ranks: {format_rank_range(rest, len(shown))}", style="dim"))
    return Group(*rows)


def _rank_table(ranks: Sequence[RankSummary], names: Sequence[str], width: int) -> Table:
    """Lay out one row per rank; names, then bars, share the width that the figures leave."""
    figures = [
        (
            f"rank {index}",
            f"share {rank.share}",
            f"busy {format_percent(rank.busy)}",
            f"wait {format_percent(rank.wait)}",
        )
        for index, rank in enumerate(ranks)
    ]
    left = width - sum(max(map(len, column)) + _GAP for column in zip(*figures, strict=True))
    name_width = min(max(map(len, names)), _MAX_NAME, left - _MIN_BAR - 2 * _GAP)
    bar_width = min(_MAX_BAR, left - _GAP - (name_width + _GAP if name_width > 0 else 0))
    table = Table.grid(padding=(0, _GAP, 0, 0))
    table.add_column(no_wrap=True)
    if name_width > 0:
        table.add_column(no_wrap=True, overflow="ellipsis", width=name_width)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(width=max(_MIN_BAR, bar_width))
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True, justify="right")
    for rank, name, (index, share, busy, wait) in zip(ranks, names, figures, strict=True):
        table.add_row(index, *([name] if name_width > 0 else []), share, BusyBar(rank.busy, rank.wait), busy, wait)
    return table
