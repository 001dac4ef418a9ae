"""HTML of a page that needs nothing but itself: its shell, tables, and plots that share one time axis."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from evenload.records.console import format_seconds
from evenload.views.svg import plot

_TICK_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400)
_MAX_TICKS = 8


@dataclass(frozen=True)
class TimeAxis:
    """The axis that the plots of a page share, in equal bins."""

    end_s: float
    width_s: float
    steps: tuple[int | None, ...] = ()
    """The step that was committed last before the end of each bin."""
    began_s: float | None = None
    """Time since 1970 at its beginning: the labels are times of day then."""

    @property
    def width(self) -> float:
        """Its length in bins, as the plots count x."""
        return max(self.end_s / self.width_s, 1e-6)

    def ticks_html(self) -> str:
        step_s: float = next((step for step in _TICK_STEPS_S if self.end_s / step <= _MAX_TICKS), 0)
        while not step_s or self.end_s / step_s > _MAX_TICKS:
            step_s = step_s * 2 or 2 * _TICK_STEPS_S[-1]
        # Times of day stand at full hours and minutes of this machine's zone.
        first_s = 0.0 if self.began_s is None else -(self.began_s + time.localtime(self.began_s).tm_gmtoff) % step_s
        marks = []
        for index in range(int((self.end_s - first_s) / step_s) + 1):
            at_s = first_s + index * step_s
            marks.append(f'<i style="left:{at_s / max(self.end_s, 1e-9) * 100:.2f}%">{self._label(at_s)}</i>')
        return f'<div class="x">{"".join(marks)}</div>'

    def _label(self, at_s: float) -> str:
        if self.began_s is None:
            return format_seconds(at_s)
        return time.strftime("%H:%M" if self.end_s <= 2 * 86_400 else "%m-%d", time.localtime(self.began_s + at_s))


@dataclass(frozen=True)
class Series:
    """Values of a plot by bin, for the text beside the pointer."""

    name: str
    values: Sequence[float | None]
    unit: str = ""

    def as_json(self) -> dict[str, object]:
        if self.unit == "%":  # two digits each
            packed = "".join(f"{min(99, round((value or 0.0) * 100)):02d}" for value in self.values)
            return {"n": self.name, "p": packed}
        return {"n": self.name, "v": [None if v is None else float(f"{v:.4g}") for v in self.values], "u": self.unit}


def document(title: str, sections: Mapping[str, str], *, live: bool = False) -> str:
    """Return a whole page of sections by identifier; a live one follows the event stream ``events`` beside it.

    The page may load nothing: its policy for the browser forbids every address except, if live, its own server's.
    """
    connect = " connect-src 'self';" if live else ""
    body = "\n".join(f'<section id="{name}">{html}</section>' for name, html in sections.items())
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:;{connect}"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="referrer" content="no-referrer">\n'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title>\n<style>{_asset("page.css")}</style></head>\n'
        f"<body{' data-live' if live else ''}><main>\n{body}\n</main>\n"
        f"<script>{_asset('page.js')}</script></body></html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = (), kind: str = "") -> str:
    """Return a table of cells that are HTML already; columns in ``numbers`` are aligned to the right."""
    marks = ["num" if column in numbers else "" for column in range(len(head))]

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f'<{tag} class="{mark}">{cell}</{tag}>' if mark else f"<{tag}>{cell}</{tag}>"
            for cell, mark in zip(cells, marks, strict=True)
        )

    body = "\n".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{line(head, "th")}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def figure(
    title: str,
    shapes: Sequence[str],
    axis: TimeAxis,
    series: Sequence[Series] = (),
    scale: Mapping[str, float] | None = None,
    kind: str = "",
    has_ticks: bool = True,
) -> str:
    """Return a plot over the time axis, beside its title; ``scale`` places labels by their height (0 to 1)."""
    labels = "".join(
        f'<i style="bottom:{height * 100:.1f}%">{escape(label)}</i>' for label, height in (scale or {}).items()
    )
    lines = [
        f'<path class="grid" d="M0 {100 - height * 100:.1f}H{axis.width:g}"/>' for height in (scale or {}).values()
    ]
    data = (
        json.dumps([row.as_json() for row in series], separators=(",", ":")).replace("&", "&amp;").replace("'", "&#39;")
    )
    return (
        f"<figure class=\"plot {kind}\" data-series='{data}'><figcaption>{title}</figcaption>"
        f'<div class="y">{labels}</div><div class="box">{plot([*lines, *shapes], axis.width, _plain(title))}</div>'
        f"{axis.ticks_html() if has_ticks else ''}</figure>"
    )


def legend(colours: Mapping[str, str]) -> str:
    marks = "".join(f'<span><i style="background:{colour}"></i>{name}</span>' for name, colour in colours.items())
    return f'<p class="legend">{marks}</p>'


def card(figure_html: str, title: str, note: str, kind: str = "") -> str:
    return f'<div class="card {kind}"><h3>{title}</h3><b>{figure_html}</b><p>{note}</p></div>'


def details(name: str, title: str, body: str, is_open: bool = False) -> str:
    return f'<details id="{name}"{" open" if is_open else ""}><summary>{title}</summary>{body}</details>'


def _plain(html: str) -> str:
    text, skips = "", False
    for character in html:
        skips = character == "<" or (skips and character != ">")
        if not skips and character != ">":
            text += character
    return text


def _asset(name: str) -> str:
    return files("evenload.views").joinpath(name).read_text(encoding="utf-8")
