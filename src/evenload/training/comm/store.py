"""The store through which the members of a generation find each other, and the time at which they connect."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from evenload.training.comm.generation import Membership

_POLL_S = 0.005
_ATTEMPT = timedelta(seconds=1)
_LATE = "TORCH_GLOO_LAZY_INIT"


def connect(membership: Membership, rank: int, timeout: timedelta, check: Callable[[], None] | None = None) -> Store:
    """Return the store of `Membership.store`; RuntimeError if it can't be reached.

    `check` is called every few seconds meanwhile, and raises to give up: the machine that serves the store may be gone.
    """
    url = membership.store
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


def wait_for_members(
    keys: Store, rank: int, world_size: int, timeout: timedelta, check: Callable[[], None] | None
) -> None:
    """Wait until all members are here, calling `check` meanwhile, which raises to give up; without it return at once.

    Gloo would wait for a member that dies on its way until its own time limit, and nothing wakes it.
    """
    if check is None:
        return
    keys.set(f"here/{rank}", "1")
    names = [f"here/{other}" for other in range(world_size)]
    deadline_s = time.monotonic() + timeout.total_seconds()
    while not keys.check(names):
        check()
        if time.monotonic() > deadline_s:
            missing = ", ".join(str(other) for other in range(world_size) if not keys.check([names[other]]))
            raise RuntimeError(f"rank {missing} did not come within {timeout.total_seconds():g} s")
        time.sleep(_POLL_S)


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
