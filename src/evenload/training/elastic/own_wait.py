"""`OwnWait`: how long this rank has waited for other ranks while nothing moved, by which a deadlock is found.

A collective that begins is a move, and so are bytes over this process's TCP connections: a long transfer over a slow link is no
deadlock. A rank that runs the script's own code, computes, reads or writes does not wait.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from evenload.training.comm.user_collectives import user_collectives
from evenload.training.launch.failure import is_users_file
from evenload.training.step.context import TrainingContext

STUCK_S = 120.0
"""Time of a wait in which nothing moves, after which it is a deadlock if all other ranks wait, too."""
_COUNTED_AFTER_S = 5.0
_LEAST_BYTES, _WITHIN_S = 1 << 16, 10.0
"""Fewer in that time are no transfer: a store that is polled, a logger."""
_COMM, _CLOCK, _PACKAGE = "evenload/training/comm/", "evenload/training/comm/clock.py", "evenload/training/"
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_TCP, _TCP_INFO, _INFO_BYTES, _COUNTS_AT = 6, 11, 136, 120
_libc = ctypes.CDLL(None, use_errno=True)


class OwnWait:
    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._moves: tuple[float, ...] = ()
        self._since_s = self._counted_s = 0.0
        self._num_bytes = -1

    def seconds(self, frame: FrameType | None) -> float:
        """Return for how long the main thread, whose innermost `frame` this is, has waited while nothing moved."""
        if not waits_for_ranks(frame):
            self._moves = ()
            return 0.0
        context, now_s = self._context, time.monotonic()
        moves: tuple[float, ...] = (context.control.waits_since_s, context.clock.since_s, user_collectives(()))
        if moves != self._moves:
            self._moves, self._since_s, self._num_bytes = moves, now_s, -1
        elif now_s - self._since_s >= _COUNTED_AFTER_S:
            num_bytes = num_tcp_bytes()
            if self._num_bytes >= 0 and abs(num_bytes - self._num_bytes) >= _LEAST_BYTES:
                self._since_s, self._num_bytes = now_s, -1
            elif self._num_bytes < 0 or now_s - self._counted_s >= _WITHIN_S:
                self._num_bytes, self._counted_s = num_bytes, now_s
        return now_s - self._since_s


def waits_for_ranks(frame: FrameType | None) -> bool:
    """Return whether a thread waits in a collective, of Evenload's or of the script's own."""
    while frame is not None:
        name = frame.f_code.co_filename.replace(os.sep, "/")
        if _PACKAGE in name:
            return _COMM in name and _CLOCK not in name
        if name.endswith(_COLLECTIVES):
            return True
        if is_users_file(name):
            return False
        frame = frame.f_back
    return False


def num_tcp_bytes() -> int:
    """Return how many bytes this process's open TCP connections have carried; 0 where the system doesn't count them."""
    total, info = 0, ctypes.create_string_buffer(_INFO_BYTES)
    with suppress(OSError):
        for path in Path("/proc/self/fd").iterdir():
            size = ctypes.c_uint32(_INFO_BYTES)
            code = _libc.getsockopt(int(path.name), _TCP, _TCP_INFO, info, ctypes.byref(size))
            if code == 0 and size.value == _INFO_BYTES:
                total += sum(struct.unpack_from("QQ", info.raw, _COUNTS_AT))
    return total
