"""`Groups`, the only holder of process groups: those of the current generation (generation.py), and of the user's subsets."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from operator import attrgetter

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.distributed_c10d import PrefixStore, _world

from evenload.errors import LaunchError, PeerLostError
from evenload.training.comm import statistics
from evenload.training.comm.backend import InnerRanks, end_queued, find_inner
from evenload.training.comm.collective_errors import check_setup
from evenload.training.comm.generation import ComputingGroups, Generation, Membership
from evenload.training.comm.grid_gather import LEAST_MEMBERS, GridGather
from evenload.training.comm.hierarchical_sum import PendingBroadcast, make_hierarchy, split_ranks
from evenload.training.comm.host_exchange import Gather, HostExchange, HostMap, find_hosts, share_rows, share_statistics
from evenload.training.comm.pending import Pending, PendingCollectives, limited
from evenload.training.comm.prepared import NextGeneration, Share, Shared
from evenload.training.comm.shared_memory import SharedChannel
from evenload.training.comm.shared_sums import SharedSum, SharedSums, share_sums
from evenload.training.comm.store import WaitLimits, connect, join, late_connections, new_group
from evenload.training.comm.subset import Subset, begin_gather
from evenload.training.comm.wire_groups import make_wire_groups

# A store outlives the groups built with it, so each `init` of a process uses its own keys.
_sessions = itertools.count()
_ended: list[Store | dist.ProcessGroup | None] = []
"""Of generations that ended early, kept until the process ends: a thread of gloo may wait in one for a dead peer."""


class Groups:
    """The process groups of the current generation; nothing else in Evenload makes or ends one."""

    _may_come_late = True  # in a process group of the script's, some may not have called evenload.init yet

    def __init__(
        self,
        membership: Membership,
        rank: int,
        *,
        backend: str,
        timeout_s: float,
        gpu: str = "",
        inner_backend: str = "",
        has_wire: bool = False,
        is_watched: bool = False,
    ) -> None:
        """Join all workers of `membership`; return when all have joined.

        `backend` and `inner_backend` are those of `WorkerSpec`; `gpu` identifies this rank's among all machines, and is empty
        for a CPU; `has_wire`: make `Generation.wire`; `is_watched`: a supervisor finds ranks that are lost, so only the script's
        own collectives and those of NCCL end after `timeout_s`. LaunchError if the store or the peers can't be reached.
        """
        self.limits = WaitLimits(timeout_s, is_watched)
        self.timeout_s = self.limits.wait_s
        self.closed = False
        self._wanted_backend = backend
        self._inner_backend = inner_backend or ("nccl" if backend == "nccl" else "")
        self._inner = InnerRanks()
        self._gpu, self._has_wire = gpu, has_wire
        self.adopted, self._made = dist.is_initialized(), False
        self._subsets: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._session = next(_sessions)
        self._store: Store | None = None
        self._lock = threading.Lock()
        self._newest_number = membership.number
        held = self._collectives = PendingCollectives()
        self.begin, self.begin_transfer, self.check = held.begin, held.begin_transfer, held.check
        self._all: dist.ProcessGroup | None = None
        self._groups_of: dict[tuple[int, ...], ComputingGroups] = {}  # by the ranks that compute
        self._row_groups: list[dist.ProcessGroup] = []
        self._gather_rows: Gather | None = None  # where no ranks share memory
        self._hosts: HostMap | None = None
        self._next = NextGeneration()
        self.generation = self._build(membership, rank)

    # -- the current generation -----------------------------------------------------------------------------------------

    # By `attrgetter`, without a call of Python for each: a step asks twenty times.
    rank: int = property(attrgetter("generation.rank"))  # type: ignore[assignment]
    world_size: int = property(attrgetter("generation.world_size"))  # type: ignore[assignment]
    membership: Membership = property(attrgetter("generation.membership"))  # type: ignore[assignment]
    ranks: Sequence[int] = property(attrgetter("generation.ranks"))  # type: ignore[assignment]
    """The ranks of this generation, in the order of an exchange's rows."""
    control: dist.ProcessGroup | None = property(attrgetter("generation.control"))  # type: ignore[assignment]
    gradients: dist.ProcessGroup | None = property(attrgetter("generation.gradients"))  # type: ignore[assignment]

    @property
    def own_groups(self) -> list[dist.ProcessGroup]:
        """The groups that carry Evenload's own collectives."""
        computing = [group for made in list(self._groups_of.values()) for group in made.groups]
        every = [self.generation.control, *self._row_groups, *computing]
        return list({id(group): group for group in every if group is not None}.values())

    @contextlib.contextmanager
    def alone(self, number: int | None = None) -> Iterator[None]:
        """Make this rank a world of one while the body runs: every collective returns immediately.

        It keeps its rank, so only one rank prints and writes. All ranks enter and leave it at their own pace; `arrive`
        synchronises them. With a `number` of its own, strategies build anew what they hold for a generation.
        """
        before = self.generation
        self.generation = Generation(
            number or before.number, before.membership, before.rank, ranks=(before.rank,), computing=(before.rank,)
        )
        self._all = before.control
        try:
            yield
        finally:
            self._all = None
            self.generation = before

    def rebuild(self, membership: Membership, rank: int, check: Callable[[], None] = lambda: None) -> None:
        """Begin a generation with other members; all of them call it, in whatever collective they were.

        Everything of the generation before ends: collectives in progress raise PeerLostError, and so do its groups. `check` is
        called while members are awaited; it raises to give up. PeerLostError or LaunchError: a member was lost meanwhile.
        """
        self._collectives.fail("the generation ended")
        number = self.generation.number + 1
        if dist.is_initialized() and not self.adopted:
            _ended.extend(_world.pg_map)
        self._end_groups()
        with self._lock:  # an abort on behalf of this membership comes too late from here on
            self._newest_number = membership.number
            self._collectives.reopen()
        _ended.append(self._store)
        # Joiners have had other sessions; the number of a membership is given once.
        self._store, self._session = None, -1
        with late_connections(), self._next.begun(membership.number):
            self.generation = replace(self._build(membership, rank, check), number=number)
        check()  # an abort that came before has not reached the shared memory of this generation

    def prepare(self, membership: Membership, rank: int, give_up: Callable[[], bool]) -> None:
        """Prepare the generation that `rebuild` begins next, in a thread; all its members call it."""
        if not self.adopted:
            self._next.prepare(membership, rank, (self._inner_backend, self._gpu), self.limits, give_up)

    def set_computing(self, ranks: Sequence[int]) -> None:
        """Begin a generation in which only these ranks share gradients and statistics. All ranks call it."""
        computing, now = tuple(sorted(ranks)), self.generation
        if computing == now.computing or now.control is None:
            return
        if computing not in self._groups_of:
            self._groups_of[computing] = self._make_groups(now, computing)
        self.generation = replace(now, number=now.number + 1, computing=computing, **self._groups_of[computing].fields)

    def abort_statistics(self) -> None:
        """Leave the collectives inside forward and backward: ranks that wait in one get `CollectiveAbortedError`."""
        if (group := (now := self.generation).statistics) is None:
            return
        self._groups_of[now.computing] = replace(self._groups_of[now.computing], statistics=None)
        self.generation = replace(now, statistics=None)
        if isinstance(group, SharedChannel):
            group.abort(f"rank {now.rank} has left the step")
            return
        end_queued([group])
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group(group)

    def rebuild_statistics(self) -> None:
        """Make the group of statistics anew, after a rank has left it. All ranks call it."""
        now = self.generation
        if now.control is None:
            return
        self.abort_statistics()
        statistics = self._new_statistics(now, now.computing)
        self._groups_of[now.computing] = replace(self._groups_of[now.computing], statistics=statistics)
        self.generation = replace(now, number=now.number + 1, statistics=statistics)

    def arrive(self) -> Pending:
        """Begin a barrier inside `alone` without waiting; it is done when all ranks have arrived."""
        if self._all is None:
            return Pending(None, blocking=False)
        return Pending(dist.all_reduce(torch.zeros(1), group=self._all, async_op=True), blocking=False)

    def abort(self, reason: str, number: int | None = None) -> None:
        """Fail every collective in progress with `PeerLostError(reason)`; the groups can't be used afterwards.

        Those through shared memory fail on this host's other ranks, too. Once membership `number` is being built, nothing fails.
        """
        with self._lock:
            if number is not None and number <= self._newest_number:
                return
            queued = [*self.own_groups, *self._subsets.values()]  # now: the next generation is not to end
            self._collectives.fail(reason)
        end_queued(queued)
        for shared in (self.generation.rows, self.generation.statistics, self.generation.sums):
            if isinstance(shared, HostExchange | SharedChannel | SharedSums):
                shared.abort(reason)

    def sum_async(self, tensor: torch.Tensor, *, on_host: bool = False) -> Pending | PendingBroadcast | SharedSum:
        """Begin a sum of gradients over all ranks, in place. They begin sums, and wait for them, in the same order.

        `on_host`: of the host's numbers, over ranks that all compute, so that nobody waits for a device.
        """
        now = self.generation
        if now.gradients is None:
            return Pending(None, blocking=False)
        if now.sums is not None and (shared := now.sums.begin(tensor)) is not None:
            return shared
        try:
            if now.hierarchy is not None and not on_host:
                return now.hierarchy.sum_async(tensor)
            group = now.control if on_host else now.gradients
            work = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group, async_op=True)
        except RuntimeError as error:
            self.check()  # it was aborted
            check_setup(error, "the gradients could not be summed")
            raise
        # On NCCL wait() only orders streams; on gloo it blocks the thread and must be wakeable.
        return self._collectives.begin(work, blocking=tensor.device.type == "cpu")

    def exchange_row(self, row: Sequence[float]) -> NDArray[np.float64]:
        """Exchange `ROW_VALUES` numbers; return those of all ranks as rows of a table. Errors as in `SharedChannel`."""
        now = self.generation
        if now.rows is not None:
            return now.rows.exchange_row(row)
        if now.control is None:
            return np.array([row], dtype=np.float64)
        gather = self._gather_rows or self._gather_in(now.control)
        return np.asarray(gather(torch.tensor(row, dtype=torch.float64)).numpy())

    def wait(self, work: dist.Work | None, device: torch.device | None = None) -> None:
        """Wait for a collective in a group; an abort ends the wait with PeerLostError. `device`: its tensor's, if not the CPU."""
        self._collectives.begin(work, blocking=device is None or device.type == "cpu").wait()

    def sum_statistics(self, tensor: torch.Tensor) -> None:
        """Sum a vector of statistics over all ranks, in place."""
        if (group := self.generation.statistics) is not None:
            statistics.sum_in(group, tensor, self._collectives.begin)

    def gather_statistics(self, own: torch.Tensor) -> torch.Tensor:
        """Gather all ranks' vectors of statistics, shape ``(world_size, len(own))``."""
        group = self.generation.statistics
        return own.unsqueeze(0) if group is None else statistics.gather_in(group, own, self._gather_in)

    @property
    def nccl_ranks(self) -> tuple[int, ...]:
        """The computing ranks whose gradients travel over NCCL, with or without a sum over other ranks after it."""
        ranks = tuple(rank for rank in self.generation.computing if rank in self._inner.ranks)
        return ranks if self._inner.backend == "nccl" and len(ranks) > 1 else ()

    @property
    def why_not_shared(self) -> str:
        """The reason why ranks of one host exchange through gloo; empty if they don't, or each has a host of its own."""
        return "" if self._hosts is None or self.generation.rows is not None else self._hosts.why_not()

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
            backend = "cpu:gloo,cuda:nccl" if self._inner.backend_of(key) == "nccl" else "gloo"
            with late_connections():
                self._subsets[key] = dist.new_group(list(key), timedelta(seconds=self.limits.timeout_s), backend)
        return self._subsets[key]

    def close(self) -> None:
        """End the groups that this object made; the user's process group stays."""
        self.closed = True
        self._collectives.fail("the process groups were closed")
        self._next.close()
        self._end_groups()

    def _end_groups(self) -> None:
        now, groups = self.generation, [*self.own_groups, *self._subsets.values()]
        for shared in (now.rows, *self._groups_of.values()):
            if shared is not None:
                shared.close()
        self.generation = replace(
            now, control=None, gradients=None, hierarchy=None, statistics=None, sums=None, rows=None
        )
        self._gather_rows = None
        for held in (self._row_groups, self._subsets, self._groups_of):
            held.clear()
        if not dist.is_initialized():
            return
        with contextlib.suppress(RuntimeError, ValueError):  # a lost peer may make the end itself fail
            if self.adopted:
                for group in groups:
                    dist.destroy_process_group(group)
            elif self._made:
                self._made = False
                dist.destroy_process_group()

    def _build(self, membership: Membership, rank: int, check: Callable[[], None] | None = None) -> Generation:
        everyone = tuple(range(world_size := len(membership.workers)))
        if world_size == 1 and not self.adopted:
            return Generation(membership.number, membership, rank, ranks=(rank,), computing=(rank,))
        if not self.adopted:
            try:
                if self._store is None:
                    self._store = self._next.store or connect(membership, rank, self.limits, check)
                keys = PrefixStore(f"evenload/{self._session}/{membership.number}", self._store)
                backend = "cpu:gloo,cuda:nccl" if self._wanted_backend == "nccl" else "gloo"
                join(keys, rank, world_size, backend, self.limits, check)
                self._made = True
            except (RuntimeError, ValueError) as error:
                why = "every rank must call evenload.init, within timeout_s"
                if "EADDRINUSE" in str(error):
                    why = "another program listens there: set MASTER_PORT to a free port on all ranks"
                where = f"the other {world_size - 1} ranks at {membership.store}"
                raise LaunchError(f"rank {rank} could not join {where}: {error}; {why}") from error
        try:
            limit_s = self.timeout_s if self.adopted and self._may_come_late else self.limits.setup_s
            with limited(limit_s, self._collectives.fail, f"they did not answer within {limit_s:g} s"):
                control = self._make_group(everyone, "gloo")
                assert control is not None  # every rank is in it
                gather = self._gather_in(control)
                now = Generation(membership.number, membership, rank, everyone, everyone, control)
                self._next.agree(world_size)
                self._inner = self._next.get(find_inner, self._inner_backend, self._gpu, gather)
                self._hosts = self._next.get(find_hosts, gather)
                rows = self._next.get(share_rows, self._hosts, rank, gather, self._gather_among, self.timeout_s)
                if rows is None and world_size >= LEAST_MEMBERS:
                    self._gather_rows = self._gather_among(everyone)
                made = self._groups_of[everyone] = self._make_groups(now, everyone)
        except (RuntimeError, PeerLostError) as error:
            raise LaunchError(f"rank {rank} could not agree with the others on how to exchange: {error}") from error
        return replace(now, rows=rows, hosts=self._hosts.hosts, **made.fields)

    def _gather_in(self, group: dist.ProcessGroup) -> Gather:
        def gather(own: torch.Tensor) -> torch.Tensor:
            everyone, pending = self._begin_gather(own, group)
            pending.wait()
            return everyone

        return gather

    def _begin_gather(self, own: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Pending]:
        everyone, work = begin_gather(own, group)
        return everyone, self._collectives.begin(work, blocking=own.device.type == "cpu")

    def _gather_among(self, ranks: Sequence[int]) -> Gather:
        """Make the all-gather of rows over some ranks, such as the first of each host. All ranks call it."""
        gather: Gather = torch.Tensor.clone
        if len(ranks) >= LEAST_MEMBERS:
            gather = GridGather(ranks, self._new_row_group, self._begin_gather)
        elif (group := self._new_row_group(ranks)) is not None:
            gather = self._gather_in(group)
        gather(torch.zeros(1))  # the first one connects: here a time limit ends it
        return gather

    def _new_row_group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        if (group := self._make_group(ranks, "gloo")) is not None:
            self._row_groups.append(group)
        return group

    def _make_groups(self, now: Generation, ranks: tuple[int, ...]) -> ComputingGroups:
        """Make what travels among the ranks that compute, on all ranks."""
        gradients = self._new_group(ranks)
        parts = split_ranks(ranks, self._inner.ranks)
        hierarchy = make_hierarchy(parts, now.rank, ranks, gradients, self._new_group, self._collectives.begin)
        hosts = self._hosts.hosts if self._has_wire and self._hosts is not None else None
        wire = hosts and make_wire_groups(hosts, now.rank, ranks, self._inner.backend_of(ranks), self._make_group)
        sums = None if self._inner.ranks else self._share(now, ranks, share_sums)[1]
        return ComputingGroups(gradients, hierarchy, self._new_statistics(now, ranks), wire or None, sums)

    def _new_statistics(self, now: Generation, ranks: tuple[int, ...]) -> dist.ProcessGroup | SharedChannel | None:
        """Make what statistics travel in, on all ranks; None for a rank outside, and for a single rank."""
        on_cpu = self._inner.backend_of(ranks) != "nccl"
        agreed, channel = self._share(now, ranks, share_statistics) if on_cpu else (False, None)
        return channel if agreed else self._new_group(ranks)

    def _share(self, now: Generation, ranks: tuple[int, ...], share: Share[Shared]) -> tuple[bool, Shared | None]:
        """Let some ranks share memory, on all ranks; the first value is False on all of them if it is impossible."""
        if len(ranks) < 2 or self._hosts is None or now.control is None:
            return False, None
        return self._next.get(share, self._hosts, now.rank, ranks, self._gather_in(now.control), self.timeout_s)

    def _new_group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Make a group for gradients or statistics, on all ranks; None outside, and for a single rank."""
        return self._make_group(ranks, self._inner.backend_of(ranks)) if len(ranks) > 1 else None

    def _make_group(self, ranks: Sequence[int], backend: str) -> dist.ProcessGroup | None:
        return new_group(ranks, backend, self.limits)


RankGroup = Groups | Subset
"""Members of an exchange."""
