"""`small_disk`: a file system of few bytes, for what happens when it is full."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    """Mount a disk of this size on a new folder; skip the test where that is not allowed."""
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, f"size={num_bytes}".encode()) != 0:
        pytest.skip("this process may not mount a file system")
    try:
        yield
    finally:
        libc.umount2(os.fsencode(folder), 2)
