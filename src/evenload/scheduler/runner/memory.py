"""Memory that several processes use together."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the resident memory of these processes; a shared page counts once in all, so forked workers don't count twice."""
    return sum(map(_resident_bytes, pids))


def _resident_bytes(pid: int) -> int:
    folder = Path("/proc", str(pid))
    try:
        for line in (folder / "smaps_rollup").read_bytes().splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:  # another user's, or a kernel without it
        pass
    try:
        return int((folder / "statm").read_bytes().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0
