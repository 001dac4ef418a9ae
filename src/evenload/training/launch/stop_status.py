"""The effect of a stop request on each rank, in small files that the supervisor reads.

A rank that can save at the end of a step is requested to; another one is ended at once. A rank without a file has not begun to
train, so nothing is lost when it ends. Another file marks that the supervisor is ending its ranks: from then on SIGTERM is no
request any more. Without it a rank that saves ignores further SIGTERMs, because they may come from elsewhere too (Slurm sends
one to every process of a job).
"""

from __future__ import annotations

import enum
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from evenload.atomic_file import read_reserved, reserve, write_reserved
from evenload.job import EXIT_CODE, grace_left_s

_ABORT_FILE = "stop-end"
_TERM_WAIT_S = 3.0
"""Time for a worker's clean-up before it is killed."""
_SAVE_WAIT_S = 15.0
"""Time for rank 0 to notice the signal, after which it writes the last checkpoint."""
_NOT_SAVED = (
    "nothing was saved: the script doesn't call run.resume(model=..., optimizer=...), which lets it save and stop, or it handles "
    "SIGTERM itself"
)
_SAVING_S = 1200.0
"""Time for the last checkpoint; a device that hangs behind a lost peer would never let it end."""


class StopStatus(enum.Enum):
    NOT_STARTED = "not started"
    """It has not begun its first step: it is ended at once, and nothing is lost."""
    CAN_SAVE = "can save"
    """It finishes its step, saves and ends by itself (session/stop.py)."""
    CANNOT_SAVE = "cannot save"
    """It trains, but the script did not register what to save, or handles SIGTERM itself: it is ended at once."""
    SAVING = "saving"
    """It ends by an error or a signal, and writes the last checkpoint before it exits."""
    CLOSED = "closed"
    """It has closed its run, and its script continues: Evenload has nothing left to save."""
    EXITING = "exiting"
    """Its script has ended: it exits by itself in a moment."""


def is_interactive() -> bool:
    """Return True in a notebook or an interactive Python, where an interrupt concerns only the running cell."""
    return hasattr(sys, "ps1")


_CODES = {status: b"%d" % index for index, status in enumerate(StopStatus)}
"""One byte, which readers see whole."""


def prepare(launch_dir: Path, worker: str) -> None:
    """Take the room for a worker's status: a disk that fills up later must not make its good end a loss. OSError: no room."""
    reserve(_path(launch_dir, worker), 1)


def write(launch_dir: str, worker: str, status: StopStatus) -> None:
    """Write the status for the supervisor; without one (an empty ``launch_dir``) do nothing."""
    if not launch_dir:
        return
    with suppress(OSError):  # the launch may be over already, its folder gone
        write_reserved(_path(Path(launch_dir), worker), _CODES[status])


def read(launch_dir: Path, workers: Iterable[str]) -> StopStatus:
    """Return the status of these workers together: they can save only if each of them can, or has closed its run."""
    found = {_read(launch_dir, worker) for worker in workers} or {StopStatus.NOT_STARTED}
    if StopStatus.CAN_SAVE in found and found <= {StopStatus.CAN_SAVE, StopStatus.CLOSED, StopStatus.EXITING}:
        return StopStatus.CAN_SAVE
    if found == {StopStatus.EXITING}:
        return StopStatus.EXITING
    for status in (StopStatus.CANNOT_SAVE, StopStatus.NOT_STARTED):
        if status in found:
            return status
    return StopStatus.CLOSED


def ended_early(launch_dir: Path, worker: str) -> bool:
    """Return whether a worker that is gone, with exit code 0, had not come to the end of its script or closed its run.

    A folder that was removed while it ran (a cleaner of old files in ``/tmp``) shows nothing.
    """
    return launch_dir.is_dir() and _read(launch_dir, worker) not in (StopStatus.CLOSED, StopStatus.EXITING)


def has_time(launch_dir: Path, worker: str, is_main: bool, asked_s: float) -> bool:
    """Return whether a worker that got SIGTERM at `asked_s` (monotonic) still may exit by itself: rank 0 may be saving."""
    status = _read(launch_dir, worker) if is_main else StopStatus.CLOSED
    limits_s = {StopStatus.CAN_SAVE: _SAVE_WAIT_S, StopStatus.SAVING: _SAVING_S}
    return time.monotonic() - asked_s < limits_s.get(status, _TERM_WAIT_S)


def end_by_signal(status: StopStatus, number: int, trains: bool) -> tuple[int, str]:
    """Return the exit code of a launch whose ranks a signal ends at once, and what to add to its message."""
    if status is StopStatus.CANNOT_SAVE:
        return 128 + number, f"; {_NOT_SAVED}"
    if status is StopStatus.NOT_STARTED and trains and grace_left_s() is not None:
        return EXIT_CODE, " before the first step: nothing is lost"
    at_once = " at once, by the second signal; the next start goes on from the newest checkpoint"
    return 128 + number, at_once if status is StopStatus.CAN_SAVE else ""


def write_abort(launch_dir: Path) -> None:
    with suppress(OSError):
        (launch_dir / _ABORT_FILE).touch()


def is_aborted(launch_dir: str) -> bool:
    return (Path(launch_dir) / _ABORT_FILE).exists()


def _read(launch_dir: Path, worker: str) -> StopStatus:
    with suppress(OSError):
        found = read_reserved(_path(launch_dir, worker))
        return next((status for status, code in _CODES.items() if code == found), StopStatus.NOT_STARTED)
    return StopStatus.NOT_STARTED


def _path(launch_dir: Path, worker: str) -> Path:
    return launch_dir / f"stop-{worker}"
