"""`NextGeneration`: what its members share, made by a thread of each of them while they still train in the one before.

Its groups can't be made before those of this generation have ended, so the rows that the members gather travel through the store.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import PrefixStore

from evenload.errors import PeerLostError
from evenload.training.comm.backend import find_inner
from evenload.training.comm.generation import Membership
from evenload.training.comm.host_exchange import Gather, HostExchange, HostMap, find_hosts, share_rows, share_statistics
from evenload.training.comm.shared_memory import SharedChannel
from evenload.training.comm.shared_sums import SharedSums, share_sums
from evenload.training.comm.store import WaitLimits, connect

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Shared = TypeVar("Shared")
Share = Callable[[HostMap, int, Sequence[int], Gather, float], tuple[bool, Shared | None]]
"""Lets some ranks of one host share memory: `share_sums` or `share_statistics`."""
Parts = dict[object, Any]
"""By function, its result for all ranks."""
_POLL_S = 0.01
_PATIENCE_S = 30.0
"""After it a member is no longer waited for, and all make these parts between the two steps."""


class NextGeneration:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[int, tuple[Store, Parts]] = {}
        """By number of the membership what was prepared for it; threads of several may end in any order."""
        self._number, self._parts = -1, Parts()
        self.store: Store | None = None
        """Of the generation that is being built, as the two before, which hold what has not been taken."""

    def prepare(
        self, membership: Membership, rank: int, own: tuple[str, str], limits: WaitLimits, give_up: Callable[[], bool]
    ) -> None:
        """Prepare a generation, in a thread of each member; `own`: backend, identifier of the GPU."""

        def check() -> None:
            if give_up():
                raise PeerLostError("the members change again")

        parts, num_ranks = Parts(), len(membership.workers)
        if num_ranks == 1:
            return
        try:
            store = connect(membership, rank, limits, check)
            keys = _keys(store, membership.number)
            gather = _gather_in(keys, rank, num_ranks, check)
            try:
                _make(parts, rank, tuple(range(num_ranks)), gather, *own, limits.wait_s)
            except (RuntimeError, OSError, ValueError, PeerLostError):
                _close(parts)
            with self._lock:  # what the others take for done, `begun` finds
                if membership.number > self._number:
                    keys.set(f"done/{rank}", str(int(bool(parts))))
                    self._made[membership.number] = store, parts
                    parts = Parts()
        except (RuntimeError, PeerLostError):
            pass
        finally:
            _close(parts)

    @contextmanager
    def begun(self, number: int) -> Iterator[None]:
        """Let `get` return what was prepared for this membership while the body builds its generation."""
        with self._lock:
            self._number = number
            self.store, self._parts = self._made.pop(number, (None, Parts()))
            for older in [made for made in self._made if made < number]:
                _close(self._made.pop(older)[1])
        try:
            yield
        finally:
            self.store = None
            _close(self._parts)

    def close(self) -> None:
        """Leave what nobody has begun, now and later."""
        with self.begun(sys.maxsize):
            pass

    def agree(self, num_ranks: int) -> None:
        """Drop what was prepared if a member has not prepared all of it; the same on all members, which are here now."""
        if (store := self.store) is not None:
            keys, names = _keys(store, self._number), [f"done/{rank}" for rank in range(num_ranks)]
            if not keys.check(names) or b"0" in keys.multi_get(names):
                _close(self._parts)

    def get(self, make: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs) -> Result:
        """Return what this function returned when it was prepared; otherwise call it, on all ranks."""
        return self._parts.pop(make) if make in self._parts else make(*args, **options)


def _make(
    parts: Parts, rank: int, ranks: tuple[int, ...], gather: Gather, inner: str, gpu: str, timeout_s: float
) -> None:
    found, hosts = find_inner(inner, gpu, gather), find_hosts(gather)
    if len(hosts.hosts) == 1:  # between hosts rows need groups
        parts[share_rows] = share_rows(hosts, rank, gather, lambda ranks: gather, timeout_s)
    if not found.ranks:
        parts[share_sums] = share_sums(hosts, rank, ranks, gather, timeout_s)
    if found.backend_of(ranks) != "nccl":
        parts[share_statistics] = share_statistics(hosts, rank, ranks, gather, timeout_s)
    parts[find_inner], parts[find_hosts] = found, hosts


def _close(parts: Parts) -> None:
    """Leave shared memory; members that wait for this one learn it."""
    for made in parts.values():
        for part in made if isinstance(made, tuple) else (made,):
            if isinstance(part, HostExchange | SharedChannel | SharedSums):
                part.close()
    parts.clear()


def _keys(store: Store, number: int) -> Store:
    return PrefixStore(f"evenload/prepared/{number}", store)


def _gather_in(keys: Store, rank: int, num_ranks: int, check: Callable[[], None]) -> Gather:
    """Return an all-gather through the store; RuntimeError if a rank does not come."""
    rounds = itertools.count()

    def gather(own: torch.Tensor) -> torch.Tensor:
        number, began_s = next(rounds), time.monotonic()
        names = [f"{number}/{other}" for other in range(num_ranks)]
        keys.set(names[rank], own.numpy().tobytes())  # type: ignore[arg-type]
        while not keys.check(names):
            check()
            if time.monotonic() - began_s > _PATIENCE_S:
                raise RuntimeError("a member of the next generation did not answer")
            time.sleep(_POLL_S)
        rows = [np.frombuffer(row, own.numpy().dtype) for row in keys.multi_get(names)]
        return torch.from_numpy(np.stack(rows))

    return gather
