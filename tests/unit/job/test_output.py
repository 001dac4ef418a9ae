"""Output below which the disk is full."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from evenload.job.output import dropping


def test_what_finds_no_room_is_dropped(tmp_path: Path) -> None:
    """More than a buffer, a line, and the flush at the end, also without a reader; other errors are errors."""
    with Path("/dev/full").open("w") as full:
        stream = dropping(full)
        for text in ("a line\n", "x" * 100_000):
            stream.write(text)
            stream.flush()
        stream.close()
    with (tmp_path / "log").open("w") as log:
        log.write("before ")
        stream = dropping(log)
        stream.write("after")
        stream.close()
    assert (tmp_path / "log").read_text() == "before after"
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        stream = dropping(pipe)
        stream.write("nobody reads")
        stream.close()
    with (tmp_path / "log").open() as read_only:
        stream = dropping(read_only)
        stream.write("wrong")
        with pytest.raises(OSError, match=r"not open for writing|Bad file descriptor"):
            stream.flush()
        with pytest.raises(OSError, match=r"not open for writing|Bad file descriptor"):
            stream.close()
    assert isinstance(stream, io.TextIOWrapper)
