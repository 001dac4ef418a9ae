"""The store through which the members of a generation find each other, their groups, and the limits of their waits."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from evenload.training.comm.generation import Membership
from evenload.training.launch.print_once import is_printed_elsewhere

_POLL_S = 0.005
_ATTEMPT = timedelta(seconds=1)
_LATE = "TORCH_GLOO_LAZY_INIT"
_UNLIMITED_S = 2e6
"""Three weeks, the longest that the milliseconds of `poll` hold: it stands for no limit."""
_SETUP_S = 120.0
"""For what needs no code of the script: to reach the store, and to make groups once all members are there."""
_LATE_S = 30.0


@dataclass(frozen=True)
class WaitLimits:
    """Limits of the times for which ranks wait for one another."""

    timeout_s: float
    """The setting. It holds for the script's own collectives, and for those of NCCL, whose watchdog needs a limit."""
    is_watched: bool = False
    """A supervisor finds the ranks that are lost or stall; one that works may take as long as it wants."""

    @property
    def wait_s(self) -> float:
        return _UNLIMITED_S if self.is_watched else self.timeout_s

    @property
    def setup_s(self) -> float:
        return _SETUP_S if self.is_watched else self.timeout_s

    def of(self, backend: str) -> timedelta:
        """Return the limit of a group of Evenload's. Gloo's sends and receives keep the one that the group is made with."""
        return timedelta(seconds=self.timeout_s if "nccl" in backend else self.wait_s)


def connect(membership: Membership, rank: int, limits: WaitLimits, check: Callable[[], None] | None = None) -> Store:
    """Return the store of `Membership.store`; RuntimeError if it can't be reached.

    `check` is called every few seconds meanwhile, and raises to give up: the machine that serves the store may be gone.
    """
    url, timeout = membership.store, timedelta(seconds=limits.setup_s)
    if "://" in url:
        store: Store = next(rendezvous(url, rank, len(membership.workers), timeout=timeout))[0]
        return store
    host, _, port = url.rpartition(":")
    deadline_s = time.monotonic() + timeout.total_seconds()
    while True:
        attempt = timeout if check is None else min(timeout, _ATTEMPT)
        try:
            found = TCPStore(host.strip("[]"), int(port), None, is_master=False, timeout=attempt)
            found.set_timeout(timeout)
            return found
        except RuntimeError:
            if check is None or time.monotonic() >= deadline_s:
                raise
            check()


def join(keys: Store, rank: int, size: int, backend: str, limits: WaitLimits, check: Callable[[], None] | None) -> None:
    """Make the default group among all members. `check` is called meanwhile, and raises to give up."""
    if check is not None or limits.is_watched:
        wait_for_members(keys, rank, size, limits.wait_s, check)
    with late_connections() if limits.is_watched else nullcontext():
        timeout = timedelta(seconds=limits.timeout_s)
        dist.init_process_group(backend, store=keys, rank=rank, world_size=size, timeout=timeout)


def wait_for_members(keys: Store, rank: int, world_size: int, limit_s: float, check: Callable[[], None] | None) -> None:
    """Wait until all members are here: gloo would wait for one that dies on its way until its own limit, and nothing wakes it."""
    keys.set(f"here/{rank}", "1")
    names = [f"here/{other}" for other in range(world_size)]
    began_s, is_reported = time.monotonic(), check is not None  # after a loss the supervisor names who is awaited
    while not keys.check(names):
        if check is not None:
            check()
        waited_s = time.monotonic() - began_s
        if waited_s > limit_s or (waited_s > _LATE_S and not is_reported):
            missing = ", ".join(str(other) for other in range(world_size) if not keys.check([names[other]]))
            if waited_s > limit_s:
                raise RuntimeError(f"rank {missing} did not come within {limit_s:g} s")
            is_reported = True
            text = f"evenload: rank {missing} has not called evenload.init for {_LATE_S:.0f} s; the other ranks wait"
            if not is_printed_elsewhere(text):
                print(text, file=sys.stderr, flush=True)
        time.sleep(min(max(_POLL_S, waited_s / 100), 1.0))  # few bytes: a deadlock is known by them


def new_group(
    ranks: Sequence[int], backend: str, limits: WaitLimits, *, members_alone: bool = False
) -> dist.ProcessGroup | None:
    """Make a group of Evenload's, on all ranks or on its `members_alone`; None for a rank outside."""
    with late_connections():
        group: object = dist.new_group(
            list(ranks), limits.of(backend), backend, use_local_synchronization=members_alone
        )
    return group if isinstance(group, dist.ProcessGroup) else None  # another value for a rank outside


@contextmanager
def late_connections() -> Iterator[None]:
    """Let groups of gloo that are made in the body connect in their first collective, whose wait an abort can end.

    Otherwise they connect while they are made, and wait for a member that dies then until their own time limit.
    """
    before = os.environ.get(_LATE)
    os.environ[_LATE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LATE]
        else:
            os.environ[_LATE] = before
