"""Output that nobody takes (a full disk, a pipe without a reader, a closed stream) is dropped, and the program goes on."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from pathlib import Path
from typing import Any

FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT)
"""A disk, or a user's quota, has no room left."""
_DROPPED = (*FULL_DISK_ERRORS, errno.EPIPE)


class _DroppingFile(io.FileIO):
    """A file that drops what finds no room, or no reader."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _DROPPED:
                raise
            return memoryview(data).nbytes


def dropping(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """Return a stream to the same file that drops what is not taken, now and when Python flushes it at the end."""
    stream.flush()
    file = io.BufferedWriter(_DroppingFile(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(
        file, stream.encoding, stream.errors, line_buffering=stream.line_buffering, write_through=stream.write_through
    )


def drop_what_is_not_taken() -> None:
    """Let this process's own output be `dropping`, unless it goes to a terminal or was replaced."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper and not stream.isatty():
            setattr(sys, name, dropping(stream))


def open_standard_streams() -> None:
    """Put the null device in the place of standard streams that are closed: the next file would get their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open("r" if number == 0 else "w")  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)  # it stays open where another takes its place


def print_error(text: str) -> None:
    """Write a line to stderr, if it takes one: a full disk or a closed stderr is no reason to end with another code.

    To a plain file past its buffer: Python ends with code 120 where a buffer can't be written at the end.
    """
    line = f"evenload: {text}\n"
    with contextlib.suppress(OSError, ValueError):
        if isinstance(sys.stderr, io.TextIOWrapper):
            sys.stderr.flush()
            os.write(sys.stderr.fileno(), line.encode(errors="replace"))
        else:
            sys.stderr.write(line)
            sys.stderr.flush()
