"""Output of the workers, forwarded to the user: rank 0's unchanged, the others' line by line."""

from __future__ import annotations

import codecs
import os
import selectors
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TextIO

_CHUNK_BYTES = 65536


class ProgressView(Protocol):
    """Draws a run's progress from its records while the workers run."""

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
    rank: int
    name: str
    """``stdout`` or ``stderr``."""
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    pending: str = ""
    """Start of an incomplete line."""


class WorkerOutputs:
    """Reads the workers' pipes and forwards their output without blocking."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self.view: ProgressView | None = None
        self._closed = False

    def add(self, rank: int, name: str, descriptor: int) -> None:
        """Own the read end of a worker's ``stdout`` or ``stderr``."""
        os.set_blocking(descriptor, False)
        self._selector.register(descriptor, selectors.EVENT_READ, _OutputStream(rank, name))

    def pump(self, timeout_s: float) -> bool:
        """Forward available output, waiting at most ``timeout_s`` for some; return True if there was any."""
        if not self._selector.get_map():
            if timeout_s:
                self._selector.select(timeout_s)
            return False
        ready = self._selector.select(timeout_s)
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
        target: TextIO = sys.stdout if stream.name == "stdout" else sys.stderr
        drawn = self.view is not None and target.isatty()
        if stream.rank == 0 and not drawn:
            text = stream.pending + text
            stream.pending = ""
        else:
            text = self._whole_lines(stream, text, ended)
        if not text:
            return
        if stream.rank != 0 and target.isatty():
            text = "".join(f"\x1b[2m[rank {stream.rank}]\x1b[0m {line}" for line in text.splitlines(keepends=True))
        if drawn and self.view is not None:
            self.view.print(text)
            return
        target.write(text)
        target.flush()

    @staticmethod
    def _whole_lines(stream: _OutputStream, text: str, ended: bool) -> str:
        whole, newline, rest = (stream.pending + text).rpartition("\n")
        if ended and rest:
            stream.pending = ""
            return f"{whole}{newline}{rest}\n"
        stream.pending = rest
        return whole + newline
