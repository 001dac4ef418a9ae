"""`CheckpointWriter`: writes one checkpoint at a time, in a thread beside the training.

    run.checkpoint -> the state is packed and copied to host memory -> the loop goes on
                                 thread: files.write -> retention -> `WrittenCheckpoint`, at a later boundary

The copy is consistent, because the training waits for it; it stays valid until the next one, which waits for the write.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenload.errors import CheckpointError
from evenload.training.checkpoint import files
from evenload.training.checkpoint.files import PackedState
from evenload.training.checkpoint.host_copy import HostBuffers
from evenload.training.checkpoint.retention import Retention


@dataclass(frozen=True)
class WrittenCheckpoint:
    """The outcome of one write."""

    step: int
    held_s: float
    """Seconds in which the training waited for it."""
    seconds: float
    """From the call to the complete files."""
    num_bytes: int = 0
    error: CheckpointError | None = None
    """Nothing of it is on the disk then."""


class CheckpointWriter:
    """Writes checkpoints into a run folder; at most one is being written."""

    def __init__(self, run: Path, retention: Retention) -> None:
        self._run = run
        self._retention = retention
        self._buffers = HostBuffers()
        self._thread: threading.Thread | None = None
        self._written: WrittenCheckpoint | None = None
        self._has_begun = False

    @property
    def is_writing(self) -> bool:
        """True from `start` until `take` returns how it ended."""
        return self._thread is not None or self._written is not None

    def start(self, step: int, state: Mapping[str, Any], info: Mapping[str, Any], *, waits: bool) -> None:
        """Write a state of live tensors: beside the training, which may change them as soon as this returns, or now (`waits`).

        Raises:
            CheckpointError: the state can't be saved; nothing was written.
            UnwritableError: there is no room or permission; nothing was written.
        """
        if self.is_writing:
            raise CheckpointError(f"the checkpoint of step {step} can't begin while another is being written")
        began_s = time.monotonic()
        files.open_folder(self._run)
        if not self._has_begun:  # of a rank 0 that was killed while it wrote, in whose place this one is
            files.clean_up(self._run)
            self._has_begun = True
        packed = files.pack(step, state)
        files.check_room(self._run, packed.num_bytes)
        info = {**info, **self._retention.begin(step)}
        if waits:
            self._write(step, packed, info, began_s, None)
            return
        packed = PackedState(packed.skeleton, self._buffers.copy(packed.tensors))
        arguments = (step, packed, info, began_s, time.monotonic())
        # A daemon: the end of the session waits for it, the hard end of a process must not.
        self._thread = threading.Thread(target=self._write, args=arguments, name="evenload-checkpoint", daemon=True)
        self._thread.start()

    def take(self, *, waits: bool) -> WrittenCheckpoint | None:
        """Return, once, how the write ended; None if there is none, or it goes on and `waits` is False."""
        if self._thread is not None:
            if self._thread.is_alive() and not waits:
                return None
            self._thread.join()
        written, self._written, self._thread = self._written, None, None
        if written is not None:
            self._retention.end(complete=written.error is None)
        return written

    def _write(
        self, step: int, packed: PackedState, info: Mapping[str, Any], began_s: float, copied_s: float | None
    ) -> None:
        """Write the files; the training waited until `copied_s`, or waits until the end."""
        error: CheckpointError | None = None
        num_bytes = 0
        try:
            num_bytes = files.write(self._run, step, packed, info)
            self._retention.settle(step)
        except CheckpointError as raised:
            error = raised
        except Exception as raised:  # an error of a thread that nobody waits for would be lost
            error = CheckpointError(f"the checkpoint of step {step} failed: {type(raised).__name__}: {raised}")
            error.__cause__ = raised
        ended_s = time.monotonic()
        self._written = WrittenCheckpoint(step, (copied_s or ended_s) - began_s, ended_s - began_s, num_bytes, error)
