"""Command ``python -m evenload.scheduler.daemon``: the daemon of a queue, started by its clients or by a service."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import sys
import time
import traceback
from pathlib import Path

from evenload.errors import EvenloadError
from evenload.scheduler import paths, presence
from evenload.scheduler.daemon.daemon import run_daemon
from evenload.scheduler.daemon.log import DaemonLog

_LOOK_EVERY_S = 0.25


def main(arguments: list[str] | None = None) -> int:
    """Run the daemon here, or start it in the background and return once it accepts requests."""
    parser = argparse.ArgumentParser(prog="python -m evenload.scheduler.daemon", description=__doc__)
    parser.add_argument("--queue", type=Path, default=None, help="the queue's folder")
    parser.add_argument("--foreground", action="store_true", help="stay in the foreground and log to standard error")
    parser.add_argument("--if-gone", type=float, metavar="SECONDS", help="start only if there is none after so long")
    options = parser.parse_args(arguments)
    folder = (options.queue or paths.default_folder()).absolute()
    if options.if_gone is not None and not _is_still_gone(folder, options.if_gone):
        return 0
    if options.foreground:
        try:
            run_daemon(folder, DaemonLog(), lambda: None)
        except EvenloadError as error:
            print(f"evenload: error: {error}", file=sys.stderr)
            return 2
        return 0
    return _detach(folder)


def _is_still_gone(folder: Path, wait_s: float) -> bool:
    """Return True if the daemon is missing all that time and no other process is starting it."""
    until_s = time.monotonic() + wait_s
    while time.monotonic() < until_s:
        if not presence.is_missing(folder):
            return False
        time.sleep(_LOOK_EVERY_S)
    with contextlib.suppress(OSError), (folder / paths.START_LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return presence.is_missing(folder)
    return False


def _detach(folder: Path) -> int:
    """Start a child in its own session and wait until it is ready; else print why and return 2."""
    receive, send = os.pipe()
    if os.fork() == 0:
        os.close(receive)
        os._exit(_run_child(folder, send))
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        status = pipe.read()
    if status == b"ready":
        return 0
    text = status.decode(errors="replace") or f"it ended at once; see {folder / paths.DAEMON_LOG}"
    print(text, file=sys.stderr)
    return 2


def _run_child(folder: Path, send: int) -> int:
    os.setsid()
    os.chdir("/")
    os.umask(0o077)
    try:
        paths.make_private(folder)
        log = DaemonLog(folder / paths.DAEMON_LOG)
        run_daemon(folder, log, lambda: _send_status(send, "ready"))
    except EvenloadError as error:
        _send_status(send, str(error))
        return 2
    except BaseException:
        _send_status(send, f"the daemon failed; see {folder / paths.DAEMON_LOG}")
        traceback.print_exc()
        return 1
    return 0


def _send_status(send: int, text: str) -> None:
    with contextlib.suppress(OSError):  # closed: it was sent before
        os.write(send, text.encode())
        os.close(send)


if __name__ == "__main__":
    sys.exit(main())
