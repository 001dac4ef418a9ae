"""Durations as people read them."""

from __future__ import annotations


def span(seconds: float) -> str:
    """Return a duration as `42 s`, `12 min`, `3:05 h` or `2.5 d`."""
    seconds = max(0.0, seconds)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    if seconds < 100 * 3600:
        return f"{seconds // 3600:.0f}:{seconds % 3600 // 60:02.0f} h"
    return f"{seconds / 86400:.1f} d"
