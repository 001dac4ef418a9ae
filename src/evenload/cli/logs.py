"""`evenload logs`: print a job's output, of all its attempts; follow it with `-f`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from evenload.cli.jobs import Queue, folder_of, ids_of
from evenload.errors import ConfigError, QueueError

_POLL_S = 0.2
_STATE_POLL_S = 1.0
_BLOCK_BYTES = 1 << 16


def logs(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Job number or name.")],
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow until the job has ended, or Ctrl-C.")] = False,
    lines: Annotated[int | None, typer.Option("-n", "--lines", min=0, help="Print only the last lines.")] = None,
    backend: Annotated[str | None, typer.Option(help="For a job of slurm or ray; slurm takes its id.")] = None,
    queue: Queue = None,
) -> None:
    """Print a job's output."""
    from evenload.scheduler import backends

    folder = folder_of(queue)
    name = backend or "local"
    if name == "local":
        ids = ids_of([job], folder)
        if len(ids) > 1:
            raise ConfigError(f"{job} is an array of {len(ids)} jobs: name one of them, {ids[0]} to {ids[-1]}")
        job = ids[0]
    out = sys.stdout.buffer
    try:
        if name == "ray":
            _print_of_ray(job, follow, lines, out)
            return
        path = backends.get(name, folder).logs(job)
        if follow and name != "local":
            raise ConfigError(f"-f is for jobs of the local queue and of ray; use tail -f {path}")
        if follow:
            _follow(path, folder, job, lines, out)
        elif not _print(path, out, lines=lines):
            reason = f": {_state_text(folder, job)}" if name == "local" else ""
            print(f"evenload: job {job} has no output yet{reason}", file=sys.stderr)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader is gone; avoid a second error at exit


def _print_of_ray(job: str, follow: bool, lines: int | None, out: Any) -> None:
    """Print the output that lies on the nodes of Ray, and follow it until the job has ended."""
    from evenload.scheduler.backends.ray.backend import BACKEND

    output = BACKEND.output(job)
    text = output.read()
    if lines is not None:
        text = b"".join(text.splitlines(keepends=True)[-lines:] if lines else [])
    if not text:
        (status,) = BACKEND.describe(BACKEND.ids_of(job))
        reason = f", {status.reason}" if status.reason else ""
        print(f"evenload: job {job} has no output yet: it is {status.state}{reason}", file=sys.stderr, flush=True)
    while True:
        out.write(text)
        out.flush()
        if not follow:
            return
        time.sleep(_STATE_POLL_S)
        follow = not BACKEND.describe(BACKEND.ids_of(job))[0].has_ended
        text = output.read()


def _state_text(folder: Path, job: str) -> str:
    from evenload.scheduler.job_lookup import job_state

    state, reason = job_state(folder, job)
    return f"it is {state}{f', {reason}' if reason else ''}"


def _open(path: Path) -> Any:
    """Open the log; None while it does not exist."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None
    except PermissionError:
        raise QueueError(f"only the job's owner may read the output in {path}") from None
    except OSError as error:
        raise QueueError(f"the output in {path} can't be read: {error.strerror}") from error


def _print(path: Path, out: Any, *, start: int = 0, lines: int | None = None) -> int:
    """Print the file from position `start`, or its last lines; return the position reached."""
    file = _open(path)
    if file is None:
        return start
    with file:
        if lines is not None:
            start = _start_of_last(file, lines)
        elif file.seek(0, os.SEEK_END) < start:  # the file was truncated
            start = 0
        file.seek(start)
        for block in iter(lambda: file.read(_BLOCK_BYTES), b""):
            out.write(block)
        out.flush()
        return int(file.tell())


def _start_of_last(file: Any, lines: int) -> int:
    """The position of the last lines, found from the end because logs are long."""
    end = file.seek(0, os.SEEK_END)
    if lines == 0:
        return int(end)
    tail, position = b"", end
    while position > 0 and tail.rstrip(b"\n").count(b"\n") < lines:
        step = min(_BLOCK_BYTES, position)
        position -= step
        file.seek(position)
        tail = file.read(step) + tail
    kept = tail.splitlines(keepends=True)[-lines:]
    return int(end - sum(map(len, kept)))


def _follow(path: Path, folder: Path, job: str, lines: int | None, out: Any) -> None:
    """Print the log, then new output until the job has ended."""
    seen = _print(path, out, lines=lines)
    if not seen:
        print(f"evenload: job {job} has no output yet: {_state_text(folder, job)}", file=sys.stderr, flush=True)
    for has_ended in _has_ended_polls(folder, job):
        seen = _print(path, out, start=seen)
        if has_ended:
            return


def _has_ended_polls(folder: Path, job: str) -> Iterator[bool]:
    """Yield regularly; True once, when the job has ended."""
    from evenload.scheduler.core.states import ENDED
    from evenload.scheduler.job_lookup import job_state

    polled_s = -_STATE_POLL_S
    while True:
        if time.monotonic() - polled_s >= _STATE_POLL_S:
            polled_s = time.monotonic()
            if job_state(folder, job)[0] in ENDED:
                yield True
                return
        yield False
        time.sleep(_POLL_S)
