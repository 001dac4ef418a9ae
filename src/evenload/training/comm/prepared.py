"""`NextGeneration`: what the members of the next generation share, made while they still train in the one before.

Where ranks join or leave on request, a thread of each member compares hosts and maps shared memory (elastic/changes.py). Its rows
travel through the store, because the groups of the next generation can't be made before those of this one have ended. Between the
two steps all that is left is to make them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

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

Shared = TypeVar("Shared")
Share = Callable[[HostMap, int, Sequence[int], Gather, float], tuple[bool, Shared | None]]
"""How some ranks of one host share memory: `share_sums` or `share_statistics`."""
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

    def is_whole(self) -> bool:
        """Return whether all members have prepared all of it; the same on all, once all have ended `prepare`."""
        return self.keys.check(self.names) and all(value == b"1" for value in self.keys.multi_get(self.names))

    def close(self) -> None:
        """Leave the memory; members that wait for this one learn it."""
        for part in (self.rows, *(part for _, part in self.shares.values())):
            if part is not None:
                part.close()


class NextGeneration:
    """What its members share: what is prepared of it on this rank, and the way to make the rest."""

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
        if num_ranks == 1:
            return
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

    @contextmanager
    def begun(self, number: int) -> Iterator[None]:
        """Let the methods below use what was prepared for this membership, while the body builds its generation."""
        made, self._made = self._made, None
        self._begun = made
        try:
            if made is not None and made.number != number:
                self._leave()
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        """Leave what was not taken."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.close()

    def store(self) -> Store | None:
        """Return the connection to the store, if there is one."""
        return None if self._begun is None else self._begun.store

    def find_ranks(self, gather: Gather) -> tuple[InnerRanks, HostMap]:
        """Return which ranks sum first, and the hosts; all ranks call it, and this first, when all have come."""
        begun = self._begun
        if begun is not None and begun.hosts is not None and begun.is_whole():
            return begun.inner, begun.hosts
        self._leave()
        return find_inner(self._backend, self._gpu, gather), find_hosts(gather)

    def share_rows(
        self, hosts: HostMap, rank: int, gather: Gather, gather_among: Callable[[Sequence[int]], Gather]
    ) -> HostExchange | None:
        """See `share_rows`."""
        begun = self._begun
        if begun is not None and begun.rows is not None:
            rows, begun.rows = begun.rows, None
            return rows
        return share_rows(hosts, rank, gather, gather_among, self._timeout_s)

    def share(
        self, way: Share[Shared], hosts: HostMap, rank: int, ranks: tuple[int, ...], gather: Gather
    ) -> tuple[bool, Shared | None]:
        """Share memory in one of the ways, among some ranks; all ranks call it."""
        made = None if self._begun is None else self._begun.shares.pop((ranks, way), None)
        return way(hosts, rank, ranks, gather, self._timeout_s) if made is None else made


def _share(
    made: _Prepared, rank: int, num_ranks: int, inner_backend: str, gpu: str, gather: Gather, timeout_s: float
) -> None:
    everyone = tuple(range(num_ranks))
    made.inner = find_inner(inner_backend, gpu, gather)
    made.hosts = hosts = find_hosts(gather)
    if len(hosts.hosts) == 1:
        made.rows = share_rows(hosts, rank, gather, lambda ranks: gather, timeout_s)
    if not made.inner.ranks:
        made.shares[everyone, share_sums] = share_sums(hosts, rank, everyone, gather, timeout_s)
    if made.inner.backend_of(everyone) != "nccl":
        made.shares[everyone, share_statistics] = share_statistics(hosts, rank, everyone, gather, timeout_s)


def _gather_in(keys: Store, rank: int, num_ranks: int, check: Callable[[], None]) -> Gather:
    """Return an all-gather through the store; RuntimeError if a rank does not come."""
    num_done = 0

    def gather(own: torch.Tensor) -> torch.Tensor:
        nonlocal num_done
        names = [f"{num_done}/{other}" for other in range(num_ranks)]
        num_done += 1
        keys.set(names[rank], own.numpy().tobytes())  # type: ignore[arg-type]
        until_s = time.monotonic() + _PATIENCE_S
        while not keys.check(names):
            check()
            if time.monotonic() > until_s:
                raise RuntimeError("a member of the next generation did not answer")
            time.sleep(_POLL_S)
        rows = [np.frombuffer(row, own.numpy().dtype) for row in keys.multi_get(names)]
        return torch.from_numpy(np.stack(rows))

    return gather
