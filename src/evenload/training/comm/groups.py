"""`Groups`, the only holder of process groups: control, gradients, statistics.

Three groups, because their collectives interleave differently on each rank: gradients leave in the middle of a backward,
statistics (BatchNorm) inside forward and backward, control at the boundaries. A generation of groups lives as long as the
membership; `abort` fails whatever is outstanding, so that no rank waits for a lost peer.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from evenload.errors import LaunchError, PeerLostError

# A store outlives the groups built with it, so each `init` of a process uses its own keys.
_sessions = itertools.count()


@dataclass(frozen=True)
class Membership:
    """Members of one generation; the index of a worker is its rank."""

    generation: int
    workers: tuple[str, ...]
    store: str
    """`WorkerSpec.store`; empty for a single rank, or if the script made the process group."""


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
            raise PeerLostError(f"a collective failed: {error}") from error

    @property
    def done(self) -> bool:
        return self._work is None or self._work.is_completed()

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


class Groups:
    """The process groups of the current generation; nothing else in Evenload makes or ends one."""

    def __init__(self, membership: Membership, rank: int, *, backend: str, timeout_s: float, gpu: str = "") -> None:
        """Join all workers of `membership`; return when all have joined.

        `backend` is that of the gradients, of which NCCL needs a GPU for every rank; `gpu` identifies this rank's among all
        machines, and is empty for a CPU. LaunchError if the store or the peers can't be reached within `timeout_s`.
        """
        self.rank = rank
        self.timeout_s = timeout_s
        self.closed = False
        self._timeout = timedelta(seconds=timeout_s)
        self._backend = backend
        self._gpu = gpu
        self._adopted = dist.is_initialized()
        self._made = False
        self._subsets: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._session = next(_sessions)
        self._store: Store | None = None
        self._pending: list[Pending] = []
        self._all: dist.ProcessGroup | None = None
        self.control: dist.ProcessGroup | None = None
        self.gradients: dist.ProcessGroup | None = None
        self.statistics: dist.ProcessGroup | None = None
        self.membership = membership
        self._alone = False
        self._build()

    @property
    def world_size(self) -> int:
        return 1 if self._alone else len(self.membership.workers)

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks of this generation, in the order of an exchange's rows."""
        return range(self.world_size)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Make this rank a world of one while the body runs: every collective returns immediately.

        It keeps its rank, so only one rank prints and writes. All ranks enter and leave it at their own pace; `arrive`
        synchronises them.
        """
        held = self.control, self.gradients, self.statistics
        self.control = self.gradients = self.statistics = None
        self._alone, self._all = True, held[0]
        try:
            yield
        finally:
            self._alone, self._all = False, None
            self.control, self.gradients, self.statistics = held

    def arrive(self) -> Pending:
        """Begin a barrier inside `alone` without waiting; it is done when all ranks have arrived."""
        if self._all is None:
            return Pending(None, blocking=False)
        return Pending(dist.all_reduce(torch.zeros(1), group=self._all, async_op=True), blocking=False)

    def abort(self, reason: str) -> None:
        """Fail every collective in progress with `PeerLostError(reason)`; the groups can't be used afterwards."""
        error = PeerLostError(reason)
        for pending in self._pending:
            pending.fail(error)
        self._pending.clear()

    def sum_async(self, tensor: torch.Tensor) -> Pending:
        """Begin a sum of gradients over all ranks, in place."""
        if self.gradients is None:
            return Pending(None, blocking=False)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self.gradients, async_op=True)
        # On NCCL wait() only orders streams; on gloo it blocks the thread and must be wakeable.
        pending = Pending(work, blocking=tensor.device.type == "cpu")
        self._pending = [p for p in self._pending if p._future is not None and not p._future.done()]
        self._pending.append(pending)
        return pending

    def sum_statistics(self, tensor: torch.Tensor) -> None:
        """Sum a tensor of statistics over all ranks, in place."""
        if self.statistics is None:
            return
        try:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self.statistics)
        except RuntimeError as error:
            raise PeerLostError(f"BatchNorm's statistics could not be summed: {error}") from error

    def gather_statistics(self, own: torch.Tensor) -> torch.Tensor:
        """Gather all ranks' vectors of statistics, shape ``(world_size, len(own))``."""
        if self.statistics is None:
            return own.unsqueeze(0)
        everyone = own.new_empty(self.world_size, own.numel())
        try:
            dist.all_gather(list(everyone.unbind()), own, group=self.statistics)
        except RuntimeError as error:
            raise PeerLostError(f"BatchNorm's statistics could not be gathered: {error}") from error
        return everyone

    @property
    def gone(self) -> bool:
        """True if the script destroyed the process groups (`dist.destroy_process_group`)."""
        return self.control is not None and not dist.is_initialized()

    def subset(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Return the group of some ranks for the user's own collectives; it ends with this generation.

        The same ranks return the same group. A rank outside receives torch's `GroupMember.NON_GROUP_MEMBER`, with which a
        collective does nothing. All ranks call it with the same ranks (subgroups.py).
        """
        key = tuple(sorted(ranks))
        if key not in self._subsets:
            if not dist.is_initialized():
                # A single rank has no groups of ours, but the user's collectives need one.
                dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
                self._made = True
            # The user's tensors may be on the CPU, too, which NCCL doesn't take.
            backend = "cpu:gloo,cuda:nccl" if self._backend == "nccl" else "gloo"
            self._subsets[key] = dist.new_group(ranks=list(key), backend=backend, timeout=self._timeout)
        return self._subsets[key]

    def close(self) -> None:
        """End the groups that this object made; the user's process group stays."""
        self.closed = True
        self.abort("the process groups were closed")
        groups = (self.control, self.gradients, self.statistics, *self._subsets.values())
        self.control = self.gradients = self.statistics = None
        self._subsets.clear()
        if not dist.is_initialized():
            return
        with contextlib.suppress(RuntimeError, ValueError):  # a lost peer may make the end itself fail
            if self._adopted:
                for group in groups:
                    if group is not None:
                        dist.destroy_process_group(group)
            elif self._made:
                self._made = False
                dist.destroy_process_group()

    def _build(self) -> None:
        world_size = self.world_size
        if world_size == 1 and not self._adopted:
            return
        if not self._adopted:
            try:
                if self._store is None:
                    self._store = self._connect()
                dist.init_process_group(
                    backend="cpu:gloo,cuda:nccl" if self._backend == "nccl" else "gloo",
                    store=PrefixStore(f"evenload/{self._session}/{self.membership.generation}", self._store),
                    rank=self.rank,
                    world_size=world_size,
                    timeout=self._timeout,
                )
                self._made = True
            except (RuntimeError, ValueError) as error:
                taken = "; another program listens there: set MASTER_PORT to a free port on all ranks"
                raise LaunchError(
                    f"rank {self.rank} could not join the other {world_size - 1} ranks at {self.membership.store}: {error}"
                    + (taken if "EADDRINUSE" in str(error) else "")
                ) from error
        self.control = dist.new_group(backend="gloo", timeout=self._timeout)
        backend = self._backend = self._common_backend(self.control)
        self.gradients = dist.new_group(backend=backend, timeout=self._timeout)
        self.statistics = dist.new_group(backend=backend, timeout=self._timeout)

    def _common_backend(self, control: dist.ProcessGroup) -> str:
        # Whether every rank has a GPU of its own is known only by comparison: machines may differ.
        gpu = int.from_bytes(hashlib.sha256(self._gpu.encode()).digest()[:7])
        own = torch.tensor([int(self._backend == "nccl"), gpu])
        rows = [torch.empty_like(own) for _ in range(self.world_size)]
        try:
            dist.all_gather(rows, own, group=control)
        except RuntimeError as error:
            raise LaunchError(f"rank {self.rank} could not agree with the others on a backend: {error}") from error
        return common_backend([(bool(wants), gpu) for wants, gpu in torch.stack(rows).tolist()])

    def _connect(self) -> Store:
        url = self.membership.store
        if "://" in url:
            store: Store = next(rendezvous(url, self.rank, self.world_size, timeout=self._timeout))[0]
            return store
        host, _, port = self.membership.store.rpartition(":")
        return TCPStore(host.strip("[]"), int(port), None, is_master=False, timeout=self._timeout)


@dataclass(frozen=True)
class Subset:
    """Members of one of the user's process groups, which take part in an exchange instead of all ranks."""

    control: dist.ProcessGroup
    rank: int
    """Rank of this process among all ranks."""
    ranks: tuple[int, ...]
    timeout_s: float
    closed: bool
    gone: bool

    @property
    def world_size(self) -> int:
        return len(self.ranks)


RankGroup = Groups | Subset
"""Members of an exchange."""


def common_backend(rows: Sequence[tuple[bool, int]]) -> str:
    """Return the backend of the gradients from each rank's (wants NCCL, GPU): NCCL refuses two ranks on one GPU."""
    distinct = len({gpu for _, gpu in rows}) == len(rows)
    return "nccl" if distinct and all(wants for wants, _ in rows) else "gloo"
