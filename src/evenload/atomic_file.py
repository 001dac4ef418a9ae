"""Small files: atomic replacement, and files whose room is taken in advance."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file: readers see the old content or the new one, never a part.

    Each call creates a new file (another inode). It is not forced to disk: after a crash of the machine it may be the old one.

    Raises:
        OSError: the file can't be written; the old one is unchanged.
    """
    temporary = path.parent / f".{path.name}.{os.getpid()}.{threading.get_ident()}"
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def reserve(path: Path, num_bytes: int) -> None:
    """Create a file with room for `write_reserved`, which a disk that fills up later can't take away. OSError: no room now."""
    path.write_bytes(bytes(num_bytes))


def write_reserved(path: Path, content: bytes) -> None:
    """Write a file in place, shorter than its room, without zero bytes; its first byte comes last and says that it is complete.

    A single byte is replaced at once. OSError: the folder is gone, or the room was not taken and the disk is full.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if len(content) > 1:
            os.pwrite(descriptor, b"\0", 0)
            os.pwrite(descriptor, content[1:] + b"\0", 1)
        os.pwrite(descriptor, content[:1], 0)
    finally:
        os.close(descriptor)


def read_reserved(path: Path) -> bytes:
    """Return what `write_reserved` has written; empty while nothing is complete. OSError: there is no file."""
    with path.open("rb", buffering=0) as file:
        first = file.read(1)
        return (first + file.readall()).partition(b"\0")[0] if first > b"\0" else b""
