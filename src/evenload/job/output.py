"""Output of a program whose log lies on a full disk: what finds no room is dropped, and the program goes on."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Any

FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT)
"""A disk, or a user's quota, has no room left."""


class _DroppingFile(io.FileIO):
    """A file that drops what finds no room."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in FULL_DISK_ERRORS:
                raise
            return memoryview(data).nbytes


def dropping(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """Return a stream to the same file that a full disk doesn't fail, neither now nor when Python flushes it at the end."""
    stream.flush()
    file = io.BufferedWriter(_DroppingFile(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(
        file, stream.encoding, stream.errors, line_buffering=stream.line_buffering, write_through=stream.write_through
    )


def drop_on_full_disk() -> None:
    """Let this process's own output be `dropping`, unless it goes to a terminal or was replaced."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper and not stream.isatty():
            setattr(sys, name, dropping(stream))


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
