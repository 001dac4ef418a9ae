"""The live area on a terminal, drawn from a window of steps; keeps nothing."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from evenload.records.console import Facts, format_percent, head_parts
from evenload.records.summary import RankSummary, summarise
from evenload.records.values import StepRecord

MAX_ROWS = 12
"""More ranks than this are summed up in a last row, so that the area fits a terminal."""
_NARROW = 72
"""Below this width the names of the devices are left out."""
_GAP, _MAX_NAME, _MIN_BAR, _MAX_BAR = 2, 28, 6, 30
"""Columns of the terminal: between two cells, for a name, for a bar."""


class BusyBar:
    """A bar of one line: busy, waiting, and the rest; told apart without colours too."""

    def __init__(self, busy: float, wait: float) -> None:
        self.busy = min(1.0, max(0.0, busy))
        self.wait = min(1.0 - self.busy, max(0.0, wait))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws the bar over all the width there is."""
        width = options.max_width
        num_busy = round(width * self.busy)
        num_wait = round(width * (self.busy + self.wait)) - num_busy
        full, light = ("#", ".") if options.ascii_only else ("█", "░")
        yield Segment(full * num_busy, Style(color="green"))
        yield Segment(light * num_wait, Style(color="yellow"))
        yield Segment(" " * (width - num_busy - num_wait))


def render_panel(window: Sequence[StepRecord], facts: Facts, width: int) -> RenderableType:
    """The live area for a window of at least one step, on a terminal of ``width`` columns."""
    last = window[-1]
    summary = summarise(window, facts.solo_per_s)
    parts = [*head_parts(last, summary, facts), facts.left(last)]
    head = Text("  ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts if part), style="bold")
    shown = summary.ranks if len(summary.ranks) <= MAX_ROWS else summary.ranks[: MAX_ROWS - 1]
    names = [facts.name(index) if facts.devices and width >= _NARROW else "" for index in range(len(shown))]
    rows: list[RenderableType] = [head, _rank_table(shown, names, width)]
    if len(shown) < len(summary.ranks):
        rows.append(Text(_rest_line(summary.ranks[len(shown) :], len(shown)), style="dim"))
    return Group(*rows)


def _rank_table(ranks: Sequence[RankSummary], names: Sequence[str], width: int) -> Table:
    """A row a rank. What the figures leave of the width goes to the names, then to the bars."""
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


def _rest_line(ranks: Sequence[RankSummary], first: int) -> str:
    least = min(range(len(ranks)), key=lambda index: ranks[index].wait)
    return (
        f"{len(ranks)} more ranks: shares {min(r.share for r in ranks)} to {max(r.share for r in ranks)}, busy "
        f"{format_percent(min(r.busy for r in ranks))} to {format_percent(max(r.busy for r in ranks))}, rank "
        f"{first + least} waits least"
    )
