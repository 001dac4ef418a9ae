"""What a request to stop means for a rank: told to its supervisor in a small file, read when a request comes.

A rank that can save at the end of a step is asked to; one that can't is ended at once. A rank that has told nothing has not
begun to train: nothing is lost when it ends. The supervisor, too, tells by a file that a signal is now the end and no request:
to a rank that saves SIGTERM may come from elsewhere too (Slurm sends it to every process of a job), and more than once.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_END = "stop-end"


class Stop(enum.Enum):
    """How a rank would take a request to stop."""

    STARTS = "starts"
    """It has not begun its first step: ended at once, and nothing is lost."""
    SAVES = "saves"
    """It finishes its step, saves and ends by itself (stop.py)."""
    LOSES = "loses"
    """It trains, and the script never said what to save, or handles SIGTERM itself: ended at once."""
    OVER = "over"
    """It has closed its run, and its script goes on: nothing of Evenload's is left to save."""
    ENDS = "ends"
    """Its script has come to its end: it leaves by itself, in a moment."""


def is_interactive() -> bool:
    """Whether this process is a notebook's, or a Python that somebody types into: an interrupt belongs to what runs there."""
    return hasattr(sys, "ps1")


def tell(launch_dir: str, rank: int, stop: Stop) -> None:
    """Tells the supervisor; without one nothing is written."""
    if not launch_dir:
        return
    path = _path(Path(launch_dir), rank)
    partial = path.with_suffix(".partial")
    with suppress(OSError):  # the launch may be over already, its folder gone
        partial.write_text(stop.value)
        partial.replace(path)


def read(launch_dir: Path, ranks: Iterable[int]) -> Stop:
    """What a request means for these ranks together: they save only where each does, or has ended its run already."""
    told = {_read(launch_dir, rank) for rank in ranks} or {Stop.STARTS}
    if Stop.SAVES in told and told <= {Stop.SAVES, Stop.OVER, Stop.ENDS}:
        return Stop.SAVES
    if told == {Stop.ENDS}:
        return Stop.ENDS
    for stop in (Stop.LOSES, Stop.STARTS):
        if stop in told:
            return stop
    return Stop.OVER


def tell_end(launch_dir: Path) -> None:
    """From now on a signal to a rank is the end."""
    with suppress(OSError):
        (launch_dir / _END).touch()


def is_end(launch_dir: str) -> bool:
    """Whether the supervisor ends its ranks now."""
    return (Path(launch_dir) / _END).exists()


def _read(launch_dir: Path, rank: int) -> Stop:
    try:
        return Stop(_path(launch_dir, rank).read_text())
    except (OSError, ValueError):
        return Stop.STARTS


def _path(launch_dir: Path, rank: int) -> Path:
    return launch_dir / f"stop-{rank}"
