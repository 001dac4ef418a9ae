"""Output of the workers, forwarded to the user: rank 0's unchanged, the others' line by line."""

from __future__ import annotations

import codecs
import os
import selectors
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TextIO

_CHUNK_BYTES = 65536
_HOLD_S = 0.05
"""Time for which the start of a line is held: unbuffered output arrives in pieces of a line."""


class ProgressView(Protocol):
    """Draws a run's progress from its records while the workers run."""

    before_print: Callable[[], None]
    """Called before each line that is not drawn over; it ends an incomplete line of a worker."""

    def follow(self, folder: Path) -> None:
        """Start reading the run folder; called once rank 0 has opened it."""

    def poll(self) -> None:
        """Read new records and draw them; called many times per second."""

    def print(self, text: str) -> None:
        """Print lines of a worker, ending with a newline, above the drawing."""

    def close(self) -> None:
        """Draw for the last time; called once."""


@dataclass
class _OutputStream:
    worker: str
    rank: int
    name: str
    """``stdout`` or ``stderr``."""
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    pending: str = ""
    """Start of an incomplete line."""
    pending_since_s: float = 0.0


class WorkerOutputs:
    """Reads the workers' pipes and forwards their output without blocking."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self.view: ProgressView | None = None
        self._closed = False
        self._open_lines: set[str] = set()
        """Targets whose last line is incomplete: rank 0's prompt or progress bar."""

    def add(self, worker: str, rank: int, name: str, descriptor: int) -> None:
        """Own the read end of a worker's ``stdout`` or ``stderr``."""
        os.set_blocking(descriptor, False)
        self._selector.register(descriptor, selectors.EVENT_READ, _OutputStream(worker, rank, name))

    def set_ranks(self, workers: Sequence[str]) -> None:
        """Set the ranks of workers after a change: their indices in `workers`."""
        for key in self._selector.get_map().values():
            if key.data.worker in workers:
                key.data.rank = workers.index(key.data.worker)

    def pump(self, timeout_s: float) -> bool:
        """Forward available output, waiting at most ``timeout_s`` for some; return True if there was any."""
        if not self._selector.get_map():
            if timeout_s:
                self._selector.select(timeout_s)
            return False
        ready = self._selector.select(timeout_s)
        self._release_held()
        for key, _ in ready:
            try:
                data = os.read(key.fd, _CHUNK_BYTES)
            except BlockingIOError:
                continue
            stream: _OutputStream = key.data
            self._forward(stream, stream.decoder.decode(data, final=not data), ended=not data)
            if not data:
                self._selector.unregister(key.fd)
                os.close(key.fd)
        return bool(ready)

    def print_line(self, line: str) -> None:
        """Print a line of the launcher to stderr, above the drawing."""
        with suppress(OSError, ValueError):  # a closed stderr is no reason to fail
            self.end_open_lines()
            if self.view is not None and sys.stderr.isatty():
                self.view.print(f"{line}\n")
            else:
                print(line, file=sys.stderr, flush=True)

    def drain(self) -> None:
        """Forward the rest of the output and close the pipes; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        while self.pump(0.0):
            pass
        for key in list(self._selector.get_map().values()):
            self._forward(key.data, "", ended=True)
            self._selector.unregister(key.fileobj)
            with suppress(OSError):
                os.close(key.fd)
        self._selector.close()

    def _forward(self, stream: _OutputStream, text: str, ended: bool) -> None:
        target = _target(stream.name)
        drawn = self.view is not None and target.isatty()
        text = self._whole_lines(stream, text, ended)
        if not text:
            return
        if stream.rank != 0:
            self.end_open_lines()
        if stream.rank != 0 and target.isatty():
            text = "".join(f"\x1b[2m[rank {stream.rank}]\x1b[0m {line}" for line in text.splitlines(keepends=True))
        if drawn and self.view is not None:
            self.view.print(text)
            return
        target.write(text)
        target.flush()
        self._open_lines.discard(stream.name)

    def end_open_lines(self) -> None:
        """End a line that rank 0 has not ended, before something else is printed."""
        for name in sorted(self._open_lines):
            _target(name).write("\n")
            _target(name).flush()
        self._open_lines.clear()

    def _release_held(self) -> None:
        """Forward the start of a line of rank 0 that stays incomplete: a prompt, a progress bar."""
        for key in self._selector.get_map().values():
            stream: _OutputStream = key.data
            target = _target(stream.name)
            if stream.rank != 0 or not stream.pending or (self.view is not None and target.isatty()):
                continue
            if time.monotonic() - stream.pending_since_s >= _HOLD_S:
                target.write(stream.pending)
                target.flush()
                stream.pending = ""
                self._open_lines.add(stream.name)

    @staticmethod
    def _whole_lines(stream: _OutputStream, text: str, ended: bool) -> str:
        whole, newline, rest = (stream.pending + text).rpartition("\n")
        if ended and rest:
            stream.pending = ""
            return f"{whole}{newline}{rest}\n"
        if rest and not stream.pending:
            stream.pending_since_s = time.monotonic()
        stream.pending = rest
        return whole + newline


def _target(name: str) -> TextIO:
    return sys.stdout if name == "stdout" else sys.stderr
