"""The user's side of an interactive job: waits for its start, then shows its terminal in this one."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import termios
import time
import tty
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

from evenload.errors import ConfigError, QueueError
from evenload.scheduler import paths
from evenload.scheduler.client import Client, connect, with_daemon
from evenload.scheduler.core.states import ENDED, JobState
from evenload.scheduler.job_file import JobFile
from evenload.scheduler.job_lookup import job_state
from evenload.scheduler.runner.terminal import SOCKET, WINDOW, Frames, frame

_INPUT, _OUTPUT = 0, 1
_RETRY_S = 0.05
_WAIT_S = 30.0
_BYTES = 1 << 15


def interactive_job(job: JobFile, variables: dict[str, str]) -> JobFile:
    """Return the job with a terminal; a `ConfigError` for what such a job can't have."""
    for name, is_set in (
        ("array", bool(job.array)), ("requeue", job.requeue), ("retries", job.retries > 0), ("saves", bool(job.saves)),
    ):  # fmt: skip
        if is_set:
            raise ConfigError(f"--pty with {name}: an interactive job has one terminal and runs once; remove {name}")
    if job.backend != "local":
        raise ConfigError(f"--pty with backend {job.backend}: only the local queue runs interactive jobs")
    if not (os.isatty(_INPUT) and os.isatty(_OUTPUT)):
        raise ConfigError("--pty needs a terminal as its input and output; without one, submit with --wait")
    inherit = job.inherit if "TERM" not in variables or "TERM" in job.environment else (*job.inherit, "TERM")
    return replace(job, pty=True, saves=False, snapshot=bool(job.snapshot), inherit=tuple(dict.fromkeys(inherit)))


def run_interactively(queue: Path, job: str) -> bool:
    """Wait for the job's start and be its terminal until it ends; return False where the user gave up before the start."""
    try:
        attempt = _started(queue, job)
        connection = None if attempt is None else _connected(queue, job, attempt)
    except KeyboardInterrupt:
        with connect(queue, start=False) as client:  # the other connection may still have a reply to come
            client.call("cancel", jobs=[job], now=True)
        return False
    if connection is not None:
        with connection, _raw_terminal() as resized:
            _relay(connection, resized)
    return True


def _started(queue: Path, job: str) -> int | None:
    """Return the attempt that runs; None where the job has ended. A daemon that dies meanwhile is waited for."""
    last, is_first = 0, True

    def attempt_of(client: Client) -> int | None:
        nonlocal last, is_first
        while (row := client.call("job", job=job)["job"])["state"] not in (*ENDED, JobState.RUNNING):
            if is_first:
                print(f"waiting for devices; Ctrl-C cancels job {job}", file=sys.stderr, flush=True)
                is_first = False
            last = client.call("wait", after=last, timeout_s=_WAIT_S)["last"]
        return int(row["attempt"]) if row["state"] == JobState.RUNNING else None

    return with_daemon(queue, attempt_of)


def _connected(queue: Path, job: str, attempt: int) -> socket.socket | None:
    """Return a connection to the job's terminal; None where the job ended before there was one."""
    folder = paths.attempt_folder(queue, job, attempt)
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with paths.socket_address(folder, SOCKET) as address:
                connection.connect(address)
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
        except OSError as error:
            connection.close()
            raise QueueError(f"the terminal of job {job} can't be reached: {error}") from error
        if job_state(queue, job)[0] in ENDED:
            return None
        time.sleep(_RETRY_S)


@contextlib.contextmanager
def _raw_terminal() -> Iterator[int]:
    """Pass all keys on, Ctrl-C too; yield a descriptor that is readable after a resize. Restores the terminal in any case."""
    before = termios.tcgetattr(_INPUT)
    resized, resized_end = os.pipe()
    for end in (resized, resized_end):
        os.set_blocking(end, False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP)}
    wakeup = signal.set_wakeup_fd(resized_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGWINCH, lambda number, frame: None)  # its byte in the pipe wakes the loop
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        tty.setraw(_INPUT, termios.TCSADRAIN)  # what was typed while the job waited stays
        yield resized
    finally:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(_INPUT, termios.TCSADRAIN, before)
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(resized)
        os.close(resized_end)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _relay(connection: socket.socket, resized: int) -> None:
    """Pass bytes on in both directions until the job closes its side, or this terminal is gone.

    Output is read while keys wait to be sent: a program that waits for its output to be read takes no input. It is also read
    where none can be sent any more, because the program has ended.
    """
    frames, to_job, is_open = Frames(), _window(), True
    connection.setblocking(False)
    while True:
        wanted: list[int | socket.socket] = [connection, resized]
        if len(to_job) < _BYTES:
            wanted.append(_INPUT)
        readable, writable, _ = select.select(wanted, [connection] if to_job else [], [])
        try:
            if resized in readable:
                os.read(resized, 4096)
                to_job += _window() if is_open else b""
            if _INPUT in readable:
                data = os.read(_INPUT, _BYTES)
                if not data:
                    return
                to_job += frame(b"d", data) if is_open else b""
            if connection in writable:
                to_job, is_open = _sent(connection, to_job)
            if connection in readable:
                data = connection.recv(_BYTES)
                if not data:
                    return
                for _, part in frames.feed(data):
                    _write(part)
        except BlockingIOError:
            continue
        except (OSError, ValueError):  # the job ended meanwhile, or this terminal was closed
            return


def _sent(connection: socket.socket, data: bytes) -> tuple[bytes, bool]:
    """Send what the connection takes; return the rest, and whether the job's side is still open."""
    try:
        return data[connection.send(data) :], True
    except BlockingIOError:
        return data, True
    except OSError:
        return b"", False


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(_OUTPUT, data) :]


def _window() -> bytes:
    size = os.get_terminal_size(_OUTPUT)
    return frame(b"w", WINDOW.pack(size.lines, size.columns))
