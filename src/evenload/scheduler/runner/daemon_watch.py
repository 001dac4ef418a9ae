"""A runner's watch for the daemon: one that died is started again, so that ends are recorded and waiting jobs start."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from evenload.job.processes import become_reaper
from evenload.scheduler import paths, presence
from evenload.scheduler.client import daemon_environment

_LOOK_EVERY_S = 2.0
GONE_S = 8.0
"""A daemon that is missing for so long is started: a service, or a person, may do that first."""
_AGAIN_S, _LONGEST_S = 30.0, 600.0
"""Time until a daemon that is still missing is started once more; twice as long each time."""


class DaemonWatch:
    def __init__(self, queue: Path) -> None:
        self._queue = queue
        self._look_at_s = 0.0
        self._again_s = _AGAIN_S

    def look(self, *, is_last: bool = False) -> None:
        """Look for the daemon, at most every two seconds unless this is the last look; start it if it is missing."""
        now_s = time.monotonic()
        if now_s < self._look_at_s and not is_last:
            return
        self._look_at_s = now_s + _LOOK_EVERY_S
        if self._queue == paths.SYSTEM_FOLDER or not presence.is_missing(self._queue):  # that one is systemd's
            return
        self._look_at_s = now_s + self._again_s
        self._again_s = min(_LONGEST_S, 2 * self._again_s)
        _start_apart(self._queue)


def _start_apart(queue: Path) -> None:
    """Start a daemon that is no descendant of this runner: all of those end with the program.

    For the moment in which the process between them ends, this runner adopts no orphans, so the daemon gets another parent.
    """
    become_reaper(False)
    try:
        middle = os.fork()
        if middle == 0:
            try:
                if os.fork() == 0:
                    _become_daemon(queue)
            finally:
                os._exit(0)
        os.waitpid(middle, 0)
    finally:
        become_reaper()


def _become_daemon(queue: Path) -> None:
    os.setsid()
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(nothing, target)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    command = [sys.executable, "-P", "-m", "evenload.scheduler.daemon", "--queue", str(queue), "--if-gone", str(GONE_S)]
    os.execve(command[0], command, daemon_environment())
