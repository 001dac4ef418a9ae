"""Small files of the system, such as those of /proc and /sys: one value, one line, a list of cores."""

from __future__ import annotations

from pathlib import Path


def text(path: Path) -> str:
    """What a file holds, without the white space around; an empty text where it can't be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def number(path: Path) -> int | None:
    """The integer that a file holds; None where it holds none, such as ``max``."""
    try:
        return int(text(path))
    except ValueError:
        return None


def table(path: Path) -> dict[str, int]:
    """A file of lines ``name value`` or ``name: value kB``; lines of another form are left out."""
    found = {}
    for line in text(path).splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            found[words[0]] = int(words[1])
    return found


def numbers(spelled: str) -> tuple[int, ...]:
    """The kernel's lists: ``0-3,8`` gives (0, 1, 2, 3, 8)."""
    found: list[int] = []
    for part in spelled.split(","):
        low, _, high = part.strip().partition("-")
        if low.isdigit() and (not high or high.isdigit()):
            found += range(int(low), int(high or low) + 1)
    return tuple(found)
