"""A rank's own story of how it ended: a small file that the supervisor reads, and tells once."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from evenload.errors import DesyncError, EvenloadError, LaunchError, PeerLostError

_OURS = str(Path(__file__).resolve().parents[2])
_TORCH_DATA = str(Path("torch", "utils", "data"))
_WORKER_ERROR = re.compile(r"Caught (\w+) in DataLoader worker process (\d+)\.\nOriginal (Traceback .*)", re.DOTALL)
_FRAME = re.compile(r'^  File "([^"]*)"[^\n]*\n(?:    [^\n]*\n)*', re.MULTILINE)
_PASSED_THROUGH = {"_wrapped_call_impl", "_call_impl"}
"""Functions of torch that stand between a model and its parts, and say nothing."""


@dataclass(frozen=True)
class Failure:
    """How one rank ended with an error."""

    rank: int
    kind: str
    """The exception's type, or how the process ended, such as ``SIGKILL``."""
    message: str
    traceback: str = ""
    """The user's frames, and the last of ours where the error is not ours."""
    step: int | None = None
    """The global step, where one was known."""
    consequence: bool = False
    """It only tells that another rank is gone; never the cause."""
    exit_code: int = 1
    time_s: float = 0.0
    """Since the epoch."""

    def story(self, device: str = "") -> str:
        """What a person reads: the rank, the step, the error, then the traceback."""
        where = f"rank {self.rank}" + (f" ({device})" if device else "")
        at = f" at step {self.step}" if self.step is not None else ""
        what = f"{self.kind}: {self.message}" if self.message else self.kind
        head = f"{where} failed{at}: {what}"
        return f"{head}\n{self.traceback.rstrip()}" if self.traceback else head


def failure_path(launch_dir: Path, rank: int) -> Path:
    """Where a rank's failure is written."""
    return launch_dir / f"failure-{rank}.json"


def describe_error(error: BaseException, rank: int, step: int | None, exit_code: int = 1) -> Failure:
    """Tells an exception as a failure of this rank."""
    kind, message, story = _in_loader_worker(error) or (type(error).__name__, str(error), user_traceback(error))
    return Failure(
        rank=rank,
        kind=kind,
        message=message,
        traceback=story,
        step=step,
        consequence=is_consequence(error),
        exit_code=exit_code,
        time_s=time.time(),
    )


def write_failure(failure: Failure, launch_dir: Path) -> None:
    """Writes the file; a reader sees all of it or none."""
    path = failure_path(launch_dir, failure.rank)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(dataclasses.asdict(failure)))
    partial.replace(path)


def read_failure(launch_dir: Path, rank: int) -> Failure | None:
    """What the rank wrote, or None."""
    try:
        return Failure(**json.loads(failure_path(launch_dir, rank).read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise LaunchError(f"the failure of rank {rank} in {launch_dir} can't be read: {error}") from error


def is_consequence(error: BaseException) -> bool:
    """Whether the error only tells that another rank is gone, or of what another rank did."""
    if isinstance(error, PeerLostError | DesyncError) or type(error).__name__ == "DistNetworkError":
        return True
    # What gloo says, before anything of ours has translated it.
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("Connection closed by peer", "Connection reset by peer")
    )


def user_traceback(error: BaseException) -> str:
    """The traceback without our own frames; of an error that isn't ours, the last of each run of ours stays.

    A misuse that we found points at the user's line; an error elsewhere shows what called it.
    """
    story = traceback.TracebackException.from_exception(error)
    _cut(story, set())
    return "".join(story.format())


def _in_loader_worker(error: BaseException) -> tuple[str, str, str] | None:
    """Of an error in a DataLoader worker, which torch sends as a text: its kind, message and traceback there."""
    match = _WORKER_ERROR.match(str(error))
    if match is None:
        return None
    kind, worker, story = match.groups()
    last = _FRAME.split(story)[-1].strip()
    message = last.partition(": ")[2]
    where = f"in DataLoader worker {worker} of this rank"
    own = _FRAME.sub(lambda frame: "" if _is_inside(frame[1]) else frame[0], story)
    return kind, f"{message} ({where})" if message else where, own


def _is_inside(filename: str) -> bool:
    """Whether a frame of this file says nothing about an error in the user's dataset."""
    return filename.startswith(_OURS) or _TORCH_DATA in filename


def _cut(story: traceback.TracebackException, seen: set[int]) -> None:
    if id(story) in seen:
        return
    seen.add(id(story))
    ours_raised = _is_type(story, EvenloadError)
    kept: list[traceback.FrameSummary] = []
    frames = [
        frame
        for frame in story.stack
        if frame.name not in _PASSED_THROUGH
        and not frame.filename.startswith("<frozen")
        and _TORCH_DATA not in frame.filename
    ]
    for index, frame in enumerate(frames):
        if not frame.filename.startswith(_OURS):
            kept.append(frame)
        elif not ours_raised and kept:
            # Frames before the user's first are the bootstrap: kept is still empty there.
            last_of_run = index + 1 == len(frames) or not frames[index + 1].filename.startswith(_OURS)
            if last_of_run:
                kept.append(frame)
    if kept or ours_raised or _is_type(story, SyntaxError):
        story.stack = traceback.StackSummary.from_list(kept)
    for other in (story.__cause__, story.__context__):
        if other is not None:
            _cut(other, seen)


def _is_type(story: traceback.TracebackException, kind: type[BaseException]) -> bool:
    return isinstance(story.exc_type, type) and issubclass(story.exc_type, kind)


def describe_end(rank: int, code: int, ended_s: float) -> Failure:
    """The story of a worker that left none: its exit code, or −N for signal N."""
    if code > 0:
        return Failure(rank, f"it ended with exit code {code}", "", exit_code=code, time_s=ended_s)
    name = signal.Signals(-code).name
    message = _SIGNAL_HINTS.get(name, "")
    # gloo aborts healthy processes when a peer goes away: seldom the cause.
    return Failure(
        rank, f"killed by {name}", message, exit_code=128 - code, time_s=ended_s, consequence=name == "SIGABRT"
    )


_SIGNAL_HINTS = {
    "SIGKILL": "from outside; the system does so when memory runs out",
    "SIGSEGV": "a crash in native code; run with `python -X faulthandler` to see where",
    "SIGBUS": "often a full /dev/shm; give it more, or use fewer loader workers",
}
