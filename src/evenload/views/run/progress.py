"""What a launcher shows while its ranks train: a live area on a terminal, plain lines in a pipe.

It reads the run folder that rank 0 writes, from its own process, and starts no thread: the owner calls `poll` from
its loop.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from evenload.records.console import Facts, PlainLines
from evenload.records.reader import Follower
from evenload.records.values import Event, Logged, Record, StepRecord

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

WINDOW_S = 10.0
"""The live area shows the steps of the last so many seconds."""
MIN_STEPS = 3
MAX_STEPS = 500
REFRESH_S = 0.1
"""The live area is drawn at most this often."""


class Progress:
    """Follows one run folder and shows it on a stream.

    Args:
        folder: the run folder, which need not be there yet; None until `follow` tells it.
        stream: where to show it; a live area if it is a terminal, else plain lines.
        log_every_s: seconds between two plain lines.
        devices: what a person calls the device of each rank; an event of the run may tell, too.
        since_s: show what is newer than this time (seconds since 1970); now, if not given, so that an earlier sitting
            in the same folder isn't shown again.
        console: a rich console to draw the live area with instead of the stream, for a given width.
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
        self._follower: Follower | None = None
        self._show: _PlainShow | _LiveShow
        if console is None and stream.isatty():
            from rich.console import Console as RichConsole

            console = RichConsole(file=stream, highlight=False, markup=False, emoji=False)
        if console is not None and console.is_terminal and not console.is_dumb_terminal:
            self._show = _LiveShow(console)
        else:
            self._show = _PlainShow(stream, log_every_s)
        self._show.facts.devices = tuple(devices)
        self._ended = False
        self._closed = False
        if folder is not None:
            self.follow(folder)

    @property
    def ended(self) -> bool:
        """Whether the run itself has said that it closed its records."""
        return self._ended

    def follow(self, folder: Path) -> None:
        """Tells the run folder, where it became known later; the same one again changes nothing."""
        if self._follower is None or self._follower.folder != folder:
            self._follower = Follower(folder, since_s=self._since_s)

    def poll(self) -> None:
        """Reads what is new and shows it; takes well under a millisecond when there is nothing.

        Raises:
            ConfigError: the folder is written by another version of Evenload.
        """
        if self._closed:
            return
        for record in self._follower.poll() if self._follower is not None else ():
            if isinstance(record, Event) and record.kind in ("open", "close"):
                self._ended = record.kind == "close"
            self._show.take(record)
        self._show.refresh()

    def print(self, text: str) -> None:
        """Prints whole lines of somebody else's (a worker's output) above the live area; adds a missing newline."""
        self._show.print(text)

    def close(self) -> None:
        """Shows the last state, and leaves the terminal as it was; a second call does nothing."""
        if self._closed:
            return
        try:
            self.poll()
        finally:
            self._closed = True
            self._show.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _PlainShow:
    """Plain lines on any stream."""

    def __init__(self, stream: TextIO, log_every_s: float) -> None:
        self._stream = stream
        self._lines = PlainLines(log_every_s)

    @property
    def facts(self) -> Facts:
        return self._lines.facts

    def take(self, record: Record) -> None:
        for line in self._lines.take(record):
            self.print(line)

    def refresh(self) -> None:
        """A plain line is never drawn again."""

    def print(self, text: str) -> None:
        self._stream.write(text if text.endswith("\n") else text + "\n")
        self._stream.flush()

    def close(self) -> None:
        for line in self._lines.finish():
            self.print(line)


class _LiveShow:
    """An area at the bottom of a terminal that is drawn anew; begins with the first step."""

    def __init__(self, console: Console) -> None:
        self.facts = Facts()
        self._console = console
        self._live: Live | None = None
        self._window: list[StepRecord] = []
        self._changed = False
        self._drawn_s = -REFRESH_S

    def take(self, record: Record) -> None:
        self.facts.take(record)
        if isinstance(record, Event):
            if record.message:
                self.print(f"evenload: {record.message}")
        elif not isinstance(record, Logged):
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
        area = render_panel(self._window, self.facts, self._console.width)
        if self._live is None:
            # Its own thread and its capture of sys.stdout stay off: the owner polls, and prints through `print`.
            self._live = Live(
                area, console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start(refresh=True)
        else:
            self._live.update(area, refresh=True)

    def print(self, text: str) -> None:
        from rich.text import Text

        # Colours of a worker are kept; its carriage returns are resolved, so that they can't touch the live area.
        self._console.print(Text.from_ansi(text.removesuffix("\n")), soft_wrap=True)

    def close(self) -> None:
        self.refresh(at_once=True)
        if self._live is not None:
            self._live.stop()
            self._live = None


def _last_steps(window: list[StepRecord]) -> list[StepRecord]:
    """The last steps of one arm: those of the last seconds, a few at least."""
    last = window[-1]
    first = max(0, len(window) - MAX_STEPS)
    while first < len(window) - MIN_STEPS and window[first].time < last.time - WINDOW_S:
        first += 1
    while window[first].arm != last.arm:
        first += 1
    return window[first:]
