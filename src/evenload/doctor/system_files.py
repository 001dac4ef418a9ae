"""Small system files such as those of /proc and /sys, and resource limits."""

from __future__ import annotations

import math
import resource
from pathlib import Path

GIB = 2**30


def text(path: Path) -> str:
    """Return the content of a file, stripped; empty if it is not readable."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def number(path: Path) -> int | None:
    """Return the integer in a file; None if it holds anything else, such as ``max``."""
    try:
        return int(text(path))
    except ValueError:
        return None


def table(path: Path) -> dict[str, int]:
    """Parse a file of lines ``name value`` or ``name: value kB``; other lines are ignored."""
    found = {}
    for line in text(path).splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            found[words[0]] = int(words[1])
    return found


def numbers(spelled: str) -> tuple[int, ...]:
    """Parse a list of the kernel: ``0-3,8`` gives (0, 1, 2, 3, 8)."""
    found: list[int] = []
    for part in spelled.split(","):
        low, _, high = part.strip().partition("-")
        if low.isdigit() and (not high or high.isdigit()):
            found += range(int(low), int(high or low) + 1)
    return tuple(found)


def num_gpu_files(root: Path) -> int:
    """Count the device files of NVIDIA GPUs."""
    return len(list((root / "dev").glob("nvidia[0-9]*")))


def limits(which: int) -> tuple[float, float]:
    """Return the soft and the hard limit of a resource; infinite if unlimited."""
    soft, hard = resource.getrlimit(which)
    infinity = resource.RLIM_INFINITY
    return (math.inf if soft == infinity else soft, math.inf if hard == infinity else hard)
