"""Progress display of a launcher, read from the run folder by another process: the caller calls `poll` in its loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from evenload.records.console import ProgressLines, RunInfo
from evenload.records.reader import RecordTail
from evenload.records.values import LateMetrics, Record, RunEvent, StepRecord

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

WINDOW_S = 10.0
"""The live area shows the steps of this many last seconds."""
MIN_STEPS = 3
MAX_STEPS = 500
REFRESH_S = 0.1
"""Minimum time between two updates of the live area."""
_MEMBERSHIP = ("lost", "joined", "left", "rebuilt", "restarted")
"""Kinds of events about the members, which the launcher prints itself, with what it does about them."""


class RunProgress:
    """Show one run folder on a stream: a live area on a terminal or ``console``, else a line every ``log_every_s``.

    ``folder`` need not exist yet; None until `follow` sets it. Records older than ``since_s`` (since 1970; now by default)
    are skipped, so that earlier sessions in the same folder are not shown again.
    """

    def __init__(
        self,
        folder: Path | None,
        stream: TextIO,
        *,
        log_every_s: float = 10.0,
        devices: Sequence[str] = (),
        since_s: float | None = None,
        console: Console | None = None,
    ) -> None:
        self._since_s = time.time() if since_s is None else since_s
        self.before_print: Callable[[], None] = lambda: None
        self._records: RecordTail | None = None
        self._display: _PlainDisplay | _LiveDisplay
        if console is None and stream.isatty():
            from rich.console import Console as RichConsole

            console = RichConsole(file=stream, highlight=False, markup=False, emoji=False)
        if console is not None and console.is_terminal and not console.is_dumb_terminal:
            self._display = _LiveDisplay(console)
        else:
            self._display = _PlainDisplay(stream, log_every_s, lambda: self.before_print())
        self._display.info.devices = tuple(devices)
        self._ended = False
        self.newest_s = time.time()
        """Time of the newest record, if none is newer than this object: its own."""
        self._closed = False
        self._is_launcher = folder is None
        if folder is not None:
            self.follow(folder)

    @property
    def ended(self) -> bool:
        return self._ended

    def follow(self, folder: Path) -> None:
        """Set the run folder; setting the same one again changes nothing."""
        if self._records is None or self._records.folder != folder:
            self._records = RecordTail(folder, since_s=self._since_s)

    def poll(self) -> None:
        """Show new records; takes well under a millisecond if there are none."""
        if self._closed:
            return
        for record in self._records.poll() if self._records is not None else ():
            if isinstance(record, RunEvent) and record.kind in ("open", "close"):
                self._ended = record.kind == "close"
            self.newest_s = max(self.newest_s, record.time)
            self._display.add(self._without_repetition(record))
        self._display.refresh()

    def _without_repetition(self, record: Record) -> Record:
        """Return an event about the members without its message, if the launcher prints a line of its own."""
        if not isinstance(record, RunEvent) or not self._is_launcher or record.kind not in _MEMBERSHIP:
            return record
        # Those without a worker are about ranks without samples.
        is_repeated = record.kind == "restarted" or not record.fields.keys().isdisjoint(("worker", "workers"))
        return replace(record, message="") if is_repeated else record

    def print(self, text: str) -> None:
        """Print whole lines, such as the output of a worker, above the live area; add a missing newline."""
        self._display.print(text)

    def close(self) -> None:
        """Show the last state and restore the terminal; a second call does nothing."""
        if self._closed:
            return
        try:
            self.poll()
        finally:
            self._closed = True
            self._display.close()

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _PlainDisplay:
    def __init__(self, stream: TextIO, log_every_s: float, before_print: Callable[[], None]) -> None:
        self._stream = stream
        self._before_print = before_print
        self._lines = ProgressLines(log_every_s)

    @property
    def info(self) -> RunInfo:
        return self._lines.info

    def add(self, record: Record) -> None:
        for line in self._lines.add(record):
            self.print(line)

    def refresh(self) -> None:
        """Do nothing: plain lines are never redrawn."""

    def print(self, text: str) -> None:
        self._before_print()
        self._stream.write(text if text.endswith("\n") else text + "\n")
        self._stream.flush()

    def close(self) -> None:
        for line in self._lines.finish():
            self.print(line)


class _LiveDisplay:
    def __init__(self, console: Console) -> None:
        self.info = RunInfo()
        self._console = console
        self._live: Live | None = None
        self._window: list[StepRecord] = []
        self._changed = False
        self._drawn_s = -REFRESH_S

    def add(self, record: Record) -> None:
        self.info.add(record)
        if isinstance(record, RunEvent):
            if record.message:
                self.print(f"evenload: {record.message}")
        elif not isinstance(record, LateMetrics):
            self._window = _last_steps([*self._window, record])
            self._changed = True

    def refresh(self, at_once: bool = False) -> None:
        now_s = time.monotonic()
        if not self._changed or (now_s - self._drawn_s < REFRESH_S and not at_once):
            return
        from rich.live import Live

        from evenload.views.run.panel import render_panel

        self._changed = False
        self._drawn_s = now_s
        area = render_panel(self._window, self.info, self._console.width)
        if self._live is None:
            # Without rich's thread and redirection of stdout: the caller polls, and prints through `print`.
            self._live = Live(
                area, console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start(refresh=True)
        else:
            self._live.update(area, refresh=True)

    def print(self, text: str) -> None:
        from rich.text import Text

        # Keep colors, but resolve carriage returns, which would overwrite the live area.
        self._console.print(Text.from_ansi(text.removesuffix("\n")), soft_wrap=True)

    def close(self) -> None:
        self.refresh(at_once=True)
        if self._live is not None:
            self._live.stop()
            self._live = None


def _last_steps(window: list[StepRecord]) -> list[StepRecord]:
    """Return the steps of the last `WINDOW_S` seconds, at least `MIN_STEPS`, of one arm only."""
    last = window[-1]
    first = max(0, len(window) - MAX_STEPS)
    while first < len(window) - MIN_STEPS and window[first].time < last.time - WINDOW_S:
        first += 1
    while window[first].arm != last.arm:
        first += 1
    return window[first:]
