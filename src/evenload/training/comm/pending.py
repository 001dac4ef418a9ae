"""`Pending`: a collective in progress, whose wait an abort can end, and all those of a generation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from evenload.errors import PeerLostError
from evenload.training.comm.collective_errors import collective_error


class Pending:
    """A collective in progress. `wait` returns when it is done, or raises if it failed or its generation was aborted."""

    def __init__(self, work: dist.Work | None, blocking: bool) -> None:
        self._work = work
        self._future: torch.futures.Future[None] | None = None
        self._lock = threading.Lock()
        if blocking:
            # Our own future, not the work's: a lost peer does not wake every waiter, so abort() must be able to.
            self._future = torch.futures.Future()
            if work is not None:
                self.follow(work)

    def follow(self, work: dist.Work) -> None:
        """End with a collective that began later than this object was made."""
        work.get_future().add_done_callback(self._done)

    def wait(self) -> None:
        """Wait for the end; raise PeerLostError if a peer went away, or the generation was aborted."""
        try:
            if self._future is not None:
                self._future.wait()
            elif self._work is not None:
                self._work.wait()
        except PeerLostError:
            raise
        except RuntimeError as error:
            raise collective_error(error, "a collective failed") from error

    @property
    def done(self) -> bool:
        if self._future is not None:
            return self._future.done()
        return self._work is None or self._work.is_completed()

    @property
    def can_fail(self) -> bool:
        """True while `fail` would end a wait."""
        return self._future is not None and not self._future.done()

    def fail(self, error: Exception) -> None:
        """End the wait with an error, if it has not ended."""
        with self._lock:
            if self._future is not None and not self._future.done():
                self._future.set_exception(error)  # type: ignore[arg-type]

    def complete(self) -> None:
        """End the wait well, if nothing that `follow` names will."""
        with self._lock:
            if self._future is not None and not self._future.done():
                self._future.set_result(None)

    def _done(self, finished: torch.futures.Future[object]) -> None:
        failure: Exception | None = None
        try:
            finished.value()
        except Exception as error:  # the work's own error, whatever its type, belongs to the waiter
            failure = error
        with self._lock:
            if self._future is None or self._future.done():
                return
            if failure is None:
                self._future.set_result(None)
            else:
                self._future.set_exception(failure)  # type: ignore[arg-type]


class PendingCollectives:
    """The collectives in progress in a generation, from whatever threads they began."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[Pending] = []
        self._failure: PeerLostError | None = None

    def begin(self, work: dist.Work | None, blocking: bool) -> Pending:
        """Return a collective that `fail` ends; None for `work` if it follows. `blocking`: a wait would block the thread."""
        pending = Pending(work, blocking)
        with self._lock:
            failure = self._failure
            self._pending = [*(other for other in self._pending if other.can_fail), pending]
        if failure is not None:
            pending.fail(failure)
        return pending

    def begin_transfer(self, work: dist.Work) -> Pending:
        """Return a transfer between two ranks (`isend`, `irecv`) that `fail` ends."""
        pending = self.begin(None, blocking=True)

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                pending.fail(error)
            else:
                pending.complete()

        # Its work has no future. If its peer never connects, the thread and what it sends stay until gloo's limit.
        threading.Thread(target=wait, name="evenload-transfer", daemon=True).start()
        return pending

    def fail(self, reason: str) -> None:
        """End all of them, and those that begin until `reopen`, with `PeerLostError(reason)`."""
        with self._lock:
            failure = self._failure = PeerLostError(reason)
            outstanding, self._pending = self._pending, []
        for pending in outstanding:
            pending.fail(failure)

    def check(self) -> None:
        """Raise PeerLostError after `fail`: what a GPU had queued may have ended early, without an error of its own."""
        if self._failure is not None:
            raise self._failure

    def reopen(self) -> None:
        """Begin a generation."""
        self._failure = None


@contextmanager
def limited(limit_s: float, end: Callable[[str], None], reason: str) -> Iterator[None]:
    """Call `end` with the reason, in a thread, if the body takes longer."""
    timer = threading.Timer(limit_s, end, (reason,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
