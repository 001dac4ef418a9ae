"""A queue's tables rendered for a terminal: in colour, and cut to its width."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from evenload.views.queue.text import TextTable, head, notes, tables
from evenload.views.queue.view import QueueView

_COLOURS = {
    "running": "green",
    "starting": "green",
    "succeeded": "green",
    "resizing": "yellow",
    "stopping": "yellow",
    "failed": "red",
    "cancelled": "magenta",
}
_RIGHT = frozenset(("job", "memory", "speed", "left", "position", "priority", "took"))
_LONG = frozenset(("why", "held by"))


def panel(view: QueueView) -> RenderableType:
    parts: list[RenderableType] = [Text(head(view), style="bold")]
    parts += [Text(note, style="yellow") for note in notes(view)]
    parts += [_rich(table) for table in tables(view)]
    return Group(*parts)


def _rich(table: TextTable) -> RenderableType:
    kept = [index for index in range(len(table.columns)) if any(row[index] for row in table.rows)]
    drawn = RichTable(
        box=SIMPLE_HEAD, title=table.title or None, title_justify="left", title_style="bold", pad_edge=False
    )
    for index in kept:
        name = table.columns[index]
        drawn.add_column(
            name,
            justify="right" if name in _RIGHT else "left",
            no_wrap=name not in _LONG,
            overflow="fold" if name in _LONG else "ellipsis",
            ratio=None,
        )
    for row in table.rows:
        drawn.add_row(*(Text(row[index], style=_style(table.columns[index], row[index])) for index in kept))
    return Group(drawn, Text(table.note, style="dim")) if table.note else drawn


def _style(column: str, cell: str) -> str:
    if column == "state":
        return _COLOURS.get(cell, "")
    if column == "held by":
        is_foreign = "outside the queue" in cell or "no process" in cell
        return "dim" if cell.endswith("free") else "yellow" if is_foreign else ""
    return "bold" if column == "job" else ""
