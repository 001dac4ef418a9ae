"""The writer's lock: one process at a time writes a queue; the lock file names it."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path

from evenload.errors import QueueError


class WriterLock:
    """Held from its creation until `release` or the end of the process; the kernel releases it then.

    A forked child holds it along with its parent until it closes its files; start programs by exec, which closes them.
    """

    def __init__(self, path: Path, holder: str) -> None:
        """Take the lock; `QueueError`, which names the holder, if another process has it."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _described(os.pread(self._descriptor, 1000, 0))
            os.close(self._descriptor)
            raise QueueError(
                f"the queue {path.parent} already has its writer: {owner}. There is one at a time; talk to that one, or "
                f"end it first (evenload queue stop)"
            ) from None
        who = {"holder": holder, "pid": os.getpid(), "host": socket.gethostname(), "since_s": time.time()}
        text = json.dumps(who).encode()
        os.pwrite(self._descriptor, text, 0)  # first, then cut: a reader in between sees a whole line
        os.ftruncate(self._descriptor, len(text))

    def release(self) -> None:
        """Release the lock. The file stays: removing it would let two processes lock two files of one name."""
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1


def _described(text: bytes) -> str:
    try:
        who, _ = json.JSONDecoder().raw_decode(text.decode())
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(who["since_s"]))
        return f"{who['holder']}, process {who['pid']} on {who['host']}, since {since}"
    except (ValueError, KeyError, TypeError):
        return "a process that hasn't written its name yet"
