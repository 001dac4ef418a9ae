"""``python -m evenload.scheduler.daemon``: the daemon of a queue. Clients start it by themselves; a service may too."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from evenload.errors import EvenloadError
from evenload.scheduler import paths
from evenload.scheduler.daemon.daemon import run_daemon
from evenload.scheduler.daemon.log import DaemonLog


def main(arguments: list[str] | None = None) -> int:
    """Runs the daemon here, or leaves it behind as a process of its own once it answers."""
    parser = argparse.ArgumentParser(prog="python -m evenload.scheduler.daemon", description=__doc__)
    parser.add_argument("--queue", type=Path, default=None, help="the queue's folder")
    parser.add_argument("--foreground", action="store_true", help="stay here, and write the log to standard error")
    options = parser.parse_args(arguments)
    folder = (options.queue or paths.default_folder()).absolute()
    if options.foreground:
        try:
            run_daemon(folder, DaemonLog(), lambda: None)
        except EvenloadError as error:
            print(f"evenload: error: {error}", file=sys.stderr)
            return 2
        return 0
    return _detach(folder)


def _detach(folder: Path) -> int:
    """Starts a child in a session of its own and waits until it answers; 2, and why on standard error, if it doesn't."""
    told, tell = os.pipe()
    if os.fork() == 0:
        os.close(told)
        os._exit(_be_child(folder, tell))
    os.close(tell)
    said = b""
    while part := os.read(told, 4096):
        said += part
    if said == b"ready":
        return 0
    text = said.decode(errors="replace") or f"it ended at once; see {folder / paths.DAEMON_LOG}"
    print(text, file=sys.stderr)
    return 2


def _be_child(folder: Path, tell: int) -> int:
    os.setsid()
    os.chdir("/")
    os.umask(0o077)
    try:
        paths.make_private(folder)
        log = DaemonLog(folder / paths.DAEMON_LOG)
        run_daemon(folder, log, _once(tell))
    except EvenloadError as error:
        _say(tell, str(error))
        return 2
    except BaseException:
        _say(tell, f"the daemon failed; see {folder / paths.DAEMON_LOG}")
        traceback.print_exc()
        return 1
    return 0


def _once(tell: int) -> Callable[[], None]:
    def ready() -> None:
        _say(tell, "ready")

    return ready


def _say(tell: int, text: str) -> None:
    try:
        os.write(tell, text.encode())
        os.close(tell)
    except OSError:
        return  # told before


if __name__ == "__main__":
    sys.exit(main())
