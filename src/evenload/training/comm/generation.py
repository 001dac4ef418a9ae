"""`Generation`: who takes part in a job now, and through which process groups. One value, replaced as a whole.

All parts read it live through `Groups.generation`; nobody keeps a copy, so rank, size and groups never mix two generations.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
import torch.distributed as dist

from evenload.errors import PeerLostError
from evenload.training.comm.collective_errors import collective_error
from evenload.training.comm.host_exchange import HostExchange
from evenload.training.comm.shared_memory import SharedChannel


class CollectiveAbortedError(PeerLostError):
    """A collective inside a forward or backward ended early: another rank has left it, and may still be alive."""


@dataclass(frozen=True)
class Membership:
    """Members of one generation; the index of a worker is its rank."""

    number: int
    """Grows with each change of the members."""
    workers: tuple[str, ...]
    store: str
    """`WorkerSpec.store`; empty for a single rank, or if the script made the process group."""


@dataclass(frozen=True, eq=False)
class Generation:
    """Membership, this rank, and the groups by what travels in them; None stands for a group of one.

    Three groups, because their collectives interleave differently on each rank: gradients leave in the middle of a backward,
    statistics (BatchNorm) inside forward and backward, control at the boundaries.
    """

    number: int
    """Grows with each change of the members or of the ranks that compute."""
    membership: Membership
    rank: int
    ranks: tuple[int, ...]
    """The ranks in the control group: rows of an exchange, in this order."""
    computing: tuple[int, ...]
    """The ranks in the groups of gradients and statistics; a rank outside them computes nothing."""
    control: dist.ProcessGroup | None = None
    gradients: dist.ProcessGroup | None = None
    statistics: dist.ProcessGroup | SharedChannel | None = None
    """Shared memory where all computing ranks are on one host and on CPUs."""
    rows: HostExchange | None = None
    """The exchange of rows where ranks share a host; otherwise rows travel in `control`."""

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def computes(self) -> bool:
        """True if this rank takes part in gradients and statistics."""
        return self.rank in self.computing

    @property
    def num_data(self) -> int:
        """Size of the data axis: the number of columns of a plan."""
        return len(self.membership.workers)

    @property
    def data_index(self) -> int:
        """Coordinate of this rank on the data axis: its column in a plan."""
        return self.rank


class Pending:
    """A collective in progress. `wait` returns when it is done, or raises if it failed or its generation was aborted."""

    def __init__(self, work: dist.Work | None, blocking: bool) -> None:
        self._work = work
        self._future: torch.futures.Future[None] | None = None
        self._lock = threading.Lock()
        if work is not None and blocking:
            # Our own future, not the work's: a lost peer does not wake every waiter, so abort() must be able to.
            self._future = torch.futures.Future()
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
        return self._work is None or self._work.is_completed()

    @property
    def can_fail(self) -> bool:
        """True while `fail` would end a wait."""
        return self._future is not None and not self._future.done()

    def fail(self, error: PeerLostError) -> None:
        """End the wait with an error, if it has not ended."""
        with self._lock:
            if self._future is not None and not self._future.done():
                self._future.set_exception(error)  # type: ignore[arg-type]

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
