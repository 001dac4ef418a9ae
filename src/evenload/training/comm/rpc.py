"""`torch.distributed.rpc` inside a run: it starts on the run's store, and ends with the run (docs/rpc.md).

    options = rpc.TensorPipeRpcBackendOptions(init_method="evenload://")
    rpc.init_rpc(f"rank{run.rank}", rank=run.rank, world_size=run.world_size, rpc_backend_options=options)

So a script needs no further port, also under torchrun, srun and on several machines.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.distributed.rendezvous import register_rendezvous_handler

from evenload.errors import LaunchError

SCHEME = "evenload"
INIT_METHOD = f"{SCHEME}://"
_TRANSPORTS = ["ibv", "uv"]
"""InfiniBand, or sockets. Torch's third one, shared memory, takes a whole core of each rank to look for messages."""
_SOCKETS = ["uv"]
_END_S = 10
"""Time in which all ranks end RPC after the run has ended well on all of them."""

_registered = False


def offer_store() -> None:
    """Let ``init_method="evenload://"`` find the store of the run that is open; call it once the groups are made."""
    global _registered
    if not _registered:
        _registered = True
        register_rendezvous_handler(SCHEME, _rendezvous)  # type: ignore[no-untyped-call]


def start_rpc(rank: int, world_size: int, timeout_s: float) -> None:
    """Start RPC on this rank, called ``rank0``, ``rank1``, ...; all ranks call it. LaunchError: they don't reach each other."""
    from torch.distributed import rpc

    try:
        make_options = functools.partial(
            rpc.TensorPipeRpcBackendOptions, init_method=INIT_METHOD, rpc_timeout=timeout_s
        )
        try:
            options = make_options(_transports=_TRANSPORTS)
        except RuntimeError:  # this torch was built without InfiniBand
            options = make_options(_transports=_SOCKETS)
        rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise LaunchError(f"rank {rank} could not start RPC, which strategy='async' needs: {error}") from error


def is_running() -> bool:
    """Return whether RPC has been started in this process, by a script or by strategy ``async``."""
    rpc: Any = sys.modules.get("torch.distributed.rpc")
    return rpc is not None and rpc._is_current_rpc_agent_set()


def end_rpc(*, well: bool) -> None:
    """End RPC if the script has not: on all ranks together if the run ended `well`, otherwise without waiting for others."""
    if not is_running():
        return
    from torch.distributed import rpc

    with contextlib.suppress(RuntimeError):  # a rank is gone
        rpc.shutdown(graceful=well, timeout=_END_S)


def _rendezvous(url: str, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield store, rank and number of ranks, as torch's handlers do; torch puts rank and world_size into the URL."""
    given = {name: int(values[0]) for name, values in parse_qs(urlsplit(url).query).items()}
    if dist.is_initialized():
        # A connection of its own: init_rpc changes the timeout.
        shared: Any = _get_default_store()
        store: Store = shared.clone()
        rank, size = dist.get_rank(), dist.get_world_size()
    else:
        store, rank, size = HashStore(), 0, 1
    asked = given.get("rank", rank), given.get("world_size", size)
    if asked != (rank, size):
        raise LaunchError(
            f"init_rpc was called as rank {asked[0]} of {asked[1]}, and this is rank {rank} of {size} of the run; pass "
            "rank=run.rank, world_size=run.world_size"
        )
    warnings.filterwarnings("ignore", message="You are using a Backend")  # torch's own call in init_rpc
    yield PrefixStore("rpc", store), rank, size
