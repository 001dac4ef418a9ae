"""``evenload logs``: what a job printed, all its attempts one after the other; or what it prints as it comes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from evenload.cli.jobs import Queue, folder_of, ids_of, row_of
from evenload.errors import ConfigError, QueueError

_POLL_S = 0.2
_ASK_S = 1.0
_BLOCK_BYTES = 1 << 16


def logs(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Its number or name.")],
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job has ended, or Ctrl-C.")] = False,
    lines: Annotated[int | None, typer.Option("-n", "--lines", min=0, help="Only so many last lines.")] = None,
    backend: Annotated[str | None, typer.Option(help="Of a job of slurm or ray, by its number there.")] = None,
    queue: Queue = None,
) -> None:
    """Print what a job printed."""
    if backend is not None and backend != "local":
        from evenload.scheduler import backends

        if follow:
            raise ConfigError(
                f"-f follows jobs of the local queue; tail -f {backends.get(backend).logs(job)} follows this"
            )
        path = backends.get(backend).logs(job)
    else:
        folder = folder_of(queue)
        ids = ids_of([job], folder)
        if len(ids) > 1:
            raise ConfigError(f"{job} is an array of {len(ids)} jobs: name one of them, {ids[0]} to {ids[-1]}")
        from evenload.scheduler import paths

        path, job = paths.log_path(folder, ids[0]), ids[0]
    out = sys.stdout.buffer
    try:
        if follow:
            _follow(path, folder, job, lines, out)
        elif not _print(path, lines, out):
            why = "" if backend else f": {_why_nothing(folder, job)}"
            print(f"evenload: job {job} has printed nothing yet{why}", file=sys.stderr)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever read it is gone: no complaint at the end either


def _why_nothing(folder: Path, job: str) -> str:
    row = row_of(folder, job)
    return f"it is {row['state']}{f', {why}' if (why := row['reason']) else ''}"


def _open(path: Path) -> Any:
    """The log; None while there is none.

    Raises:
        QueueError: it is another's.
    """
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None
    except PermissionError:
        raise QueueError(f"the output in {path} is for its owner alone") from None
    except OSError as error:
        raise QueueError(f"the output in {path} can't be read: {error.strerror}") from error


def _print(path: Path, lines: int | None, out: Any) -> int:
    """Prints what is there; how many bytes of the file were seen."""
    file = _open(path)
    if file is None:
        return 0
    with file:
        if lines is not None:
            file.seek(_start_of_last(file, lines))
        for block in iter(lambda: file.read(_BLOCK_BYTES), b""):
            out.write(block)
        out.flush()
        return int(file.tell())


def _start_of_last(file: Any, lines: int) -> int:
    """Where the last lines begin; read from the end, as logs are long."""
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
    """What is there, then what comes, until the job has ended and all of it was printed."""
    seen = _print(path, lines, out)
    if not seen:
        print(f"evenload: job {job} has printed nothing yet: {_why_nothing(folder, job)}", file=sys.stderr, flush=True)
    for has_ended in _looks(folder, job):
        seen = _print_from(path, seen, out)
        if has_ended:
            return


def _looks(folder: Path, job: str) -> Iterator[bool]:
    """Now and then; True once, when the job has ended."""
    from evenload.scheduler.submit.check import is_over

    asked_s = -_ASK_S
    while True:
        if time.monotonic() - asked_s >= _ASK_S:
            asked_s = time.monotonic()
            if is_over(row_of(folder, job)["state"]):
                yield True
                return
        yield False
        time.sleep(_POLL_S)


def _print_from(path: Path, seen: int, out: Any) -> int:
    file = _open(path)
    if file is None:
        return seen
    with file:
        if file.seek(0, os.SEEK_END) < seen:  # its older part was cut away
            seen = 0
        file.seek(seen)
        for block in iter(lambda: file.read(_BLOCK_BYTES), b""):
            out.write(block)
        out.flush()
        return int(file.tell())
