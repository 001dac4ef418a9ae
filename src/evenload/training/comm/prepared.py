"""`NextGeneration`: what the members of the next generation share, made while they still train in the one before.

Where ranks join or leave on request, a thread of each member compares hosts and maps shared memory (elastic/changes.py). Its rows
travel through the store, because the groups of the next generation can't be made before those of this one have ended. Between the
two steps all that is left is to make them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import PrefixStore

from evenload.errors import LaunchError, PeerLostError
from evenload.training.comm.backend import InnerRanks, find_inner
from evenload.training.comm.generation import Membership
from evenload.training.comm.host_exchange import Gather, HostExchange, HostMap, find_hosts, share_rows, share_statistics
from evenload.training.comm.shared_sums import share_sums
from evenload.training.comm.store import connect

_POLL_S = 0.01
_PATIENCE_S = 30.0
"""After it a member that has not answered is not waited for; then all make what they share at the change itself."""


@dataclass(eq=False)
class _Prepared:
    number: int
    """Of the membership."""
    store: Store
    keys: Store
    names: list[str]
    inner: InnerRanks = field(default_factory=InnerRanks)
    hosts: HostMap | None = None
    rows: HostExchange | None = None
    """Only where all ranks are on one host."""
    shares: dict[Any, tuple[bool, Any]] = field(default_factory=dict)
    """By (ranks, way of sharing): what it returned."""

    def close(self) -> None:
        """Leave the memory; members that wait for this one learn it."""
        for part in (self.rows, *(part for _, part in self.shares.values())):
            if part is not None:
                part.close()


class NextGeneration:
    """What is prepared of it on this rank."""

    def __init__(self, inner_backend: str, gpu: str, timeout_s: float) -> None:
        self._backend, self._gpu, self._timeout_s = inner_backend, gpu, timeout_s
        self._made: _Prepared | None = None
        """By the newest `prepare`."""
        self._begun: _Prepared | None = None
        """What is left to take of the generation that is being built."""

    def prepare(self, membership: Membership, rank: int, give_up: Callable[[], bool]) -> None:
        """Prepare a generation, in a thread of each of its members; what fails is made when the generation begins."""

        def check() -> None:
            if give_up():
                raise PeerLostError("the members change again")

        num_ranks, made = len(membership.workers), None
        try:
            store = connect(membership, rank, timedelta(seconds=self._timeout_s), check)
            keys = PrefixStore(f"evenload/prepared/{membership.number}", store)
            made = _Prepared(membership.number, store, keys, [f"done/{other}" for other in range(num_ranks)])
            has_all = False
            try:
                gather = _gather_in(keys, rank, num_ranks, check)
                _share(made, rank, num_ranks, self._backend, self._gpu, gather, self._timeout_s)
                has_all = True
            finally:
                keys.set(made.names[rank], str(int(has_all)))
            self._made = made
        except (RuntimeError, OSError, ValueError, PeerLostError, LaunchError):
            if made is not None:
                made.close()

    def begin(self, number: int) -> None:
        """Begin to take what was prepared for this membership; leave everything else."""
        self.end()
        made, self._made = self._made, None
        if made is not None and made.number == number:
            self._begun = made
        elif made is not None:
            made.close()

    def end(self) -> None:
        """Leave what was not taken."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.close()

    def store(self) -> Store | None:
        """Return the connection to the store."""
        return None if self._begun is None else self._begun.store

    def take_hosts(self) -> tuple[InnerRanks, HostMap] | None:
        """Return what was compared; None, on all members, if some have not prepared all. All are here by now."""
        if (begun := self._begun) is None:
            return None
        if begun.keys.check(begun.names) and all(value == b"1" for value in begun.keys.multi_get(begun.names)):
            return None if begun.hosts is None else (begun.inner, begun.hosts)
        self.end()
        return None

    def take_rows(self) -> HostExchange | None:
        if (begun := self._begun) is None:
            return None
        rows, begun.rows = begun.rows, None
        return rows

    def take(self, ranks: tuple[int, ...], way: object) -> tuple[bool, Any] | None:
        return None if self._begun is None else self._begun.shares.pop((ranks, way), None)


def _share(
    made: _Prepared, rank: int, num_ranks: int, inner_backend: str, gpu: str, gather: Gather, timeout_s: float
) -> None:
    everyone = tuple(range(num_ranks))
    made.inner = find_inner(inner_backend, gpu, gather)
    made.hosts = hosts = find_hosts(gather)
    if len(hosts.hosts) == 1:
        made.rows = share_rows(hosts, rank, gather, lambda ranks: gather, timeout_s)
    ways: list[Callable[..., tuple[bool, Any]]] = []
    if not made.inner.ranks:
        ways.append(share_sums)
    if made.inner.backend_of(everyone) != "nccl":
        ways.append(share_statistics)
    for way in ways:
        made.shares[everyone, way] = way(hosts, rank, everyone, gather, timeout_s)


def _gather_in(keys: Store, rank: int, num_ranks: int, check: Callable[[], None]) -> Gather:
    """Return an all-gather through the store; RuntimeError if a rank does not come."""
    num_done = 0

    def gather(own: torch.Tensor) -> torch.Tensor:
        nonlocal num_done
        names = [f"{num_done}/{other}" for other in range(num_ranks)]
        num_done += 1
        keys.set(names[rank], own.numpy().tobytes())
        until_s = time.monotonic() + _PATIENCE_S
        while not keys.check(names):
            check()
            if time.monotonic() > until_s:
                raise RuntimeError("a member of the next generation did not answer")
            time.sleep(_POLL_S)
        rows = [np.frombuffer(row, own.numpy().dtype) for row in keys.multi_get(names)]
        return torch.from_numpy(np.stack(rows))

    return gather
