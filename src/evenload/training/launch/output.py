"""What the workers print, on its way to the user: rank 0 as it is, the others line by line."""

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


class View(Protocol):
    """A reader of the run's records that draws while the workers run."""

    def follow(self, folder: Path) -> None:
        """Tells the run folder, as soon as rank 0 has opened it."""

    def poll(self) -> None:
        """Reads what is new and draws it; called many times a second."""

    def print(self, text: str) -> None:
        """Prints a worker's lines without spoiling what is drawn; ends with a newline."""

    def close(self) -> None:
        """Draws for the last time; called once."""


@dataclass
class _Stream:
    rank: int
    name: str
    """``stdout`` or ``stderr``."""
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    held: str = ""
    """The beginning of a line whose end hasn't come."""


class Outputs:
    """Reads the workers' pipes and passes on what comes; never blocks longer than asked."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self.view: View | None = None
        self._closed = False

    def add(self, rank: int, name: str, descriptor: int) -> None:
        """Takes over the read end of a worker's ``stdout`` or ``stderr``."""
        os.set_blocking(descriptor, False)
        self._selector.register(descriptor, selectors.EVENT_READ, _Stream(rank, name))

    def pump(self, timeout_s: float) -> bool:
        """Passes on what is there, after waiting for something for at most ``timeout_s``; whether anything came."""
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
            stream: _Stream = key.data
            self._pass_on(stream, stream.decoder.decode(data, final=not data), ended=not data)
            if not data:
                self._selector.unregister(key.fd)
                os.close(key.fd)
        return bool(ready)

    def say(self, line: str) -> None:
        """Prints a line of the launcher's own on stderr, without spoiling what is drawn."""
        with suppress(OSError, ValueError):  # nobody reads it any more: no reason to end otherwise
            if self.view is not None and sys.stderr.isatty():
                self.view.print(f"{line}\n")
            else:
                print(line, file=sys.stderr, flush=True)

    def drain(self) -> None:
        """Passes on all that the ended workers left, and closes the pipes; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        while self.pump(0.0):
            pass
        for key in list(self._selector.get_map().values()):
            self._pass_on(key.data, "", ended=True)
            self._selector.unregister(key.fileobj)
            with suppress(OSError):
                os.close(key.fd)
        self._selector.close()

    def _pass_on(self, stream: _Stream, text: str, ended: bool) -> None:
        target: TextIO = sys.stdout if stream.name == "stdout" else sys.stderr
        drawn = self.view is not None and target.isatty()
        if stream.rank == 0 and not drawn:
            text = stream.held + text
            stream.held = ""
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
    def _whole_lines(stream: _Stream, text: str, ended: bool) -> str:
        whole, newline, rest = (stream.held + text).rpartition("\n")
        if ended and rest:
            stream.held = ""
            return f"{whole}{newline}{rest}\n"
        stream.held = rest
        return whole + newline
