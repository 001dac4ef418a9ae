"""``python -m evenload.scheduler.runner FOLDER``: the runner of one attempt. The daemon starts it; people don't."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from evenload.errors import EvenloadError, QueueError, StaleError
from evenload.scheduler import client
from evenload.scheduler.runner import files
from evenload.scheduler.runner.files import Order, Result
from evenload.scheduler.runner.start import become_reaper, open_log, start
from evenload.scheduler.runner.watch import Watching

_WAIT_FOR_DAEMON_S = 120.0


def main(arguments: list[str]) -> int:
    """Runs the order that lies in a folder, if the daemon lets it."""
    folder = Path(arguments[0])
    os.umask(0o022)
    wakeup, wakeup_end = os.pipe()
    os.set_blocking(wakeup, False)
    os.set_blocking(wakeup_end, False)
    signal.set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGUSR1):
        signal.signal(number, _wake)
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    become_reaper()
    order = files.read_order(folder)
    try:
        if not _may_begin(order):
            return 0
    except QueueError as error:
        files.write_result(folder, Result(order.fence, None, asked="stop", problem=str(error), time_s=time.time()))
        return 0
    files.write_result(folder, _run(folder, order, wakeup))
    return 0


def _may_begin(order: Order) -> bool:
    """Tells the daemon that this runner is there, and waits until that is on disk. A daemon that is away is waited for.

    Raises:
        QueueError: it stayed away.
    """
    deadline_s = time.monotonic() + _WAIT_FOR_DAEMON_S
    while True:
        try:
            with client.connect(Path(order.queue), start=False) as line:
                answer = line.call("runner", job=order.job, attempt=order.attempt, fence=order.fence)
                return bool(answer.get("go"))
        except StaleError:
            return False
        except EvenloadError as error:
            if time.monotonic() > deadline_s:
                raise QueueError(f"the daemon was away for {_WAIT_FOR_DAEMON_S:g} s: {error}") from error
            time.sleep(0.1)


def _run(folder: Path, order: Order, wakeup: int) -> Result:
    log = -1
    try:
        log = open_log(order)
        if order.note:
            os.write(log, f"evenload: {order.note}\n".encode())
        started = start(folder, order, log)
    except (EvenloadError, OSError) as error:
        if log >= 0:
            os.write(log, f"evenload: {error}\n".encode())
        return Result(order.fence, None, problem=str(error), time_s=time.time())
    watching = Watching(folder, order, started, log, wakeup)
    signal.signal(signal.SIGTERM, watching.on_terminate)
    return watching.run()


def _wake(number: int, frame: FrameType | None) -> None:
    """The signal's byte in the pipe is what counts."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
