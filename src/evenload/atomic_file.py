"""Atomic replacement of small files."""

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
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
