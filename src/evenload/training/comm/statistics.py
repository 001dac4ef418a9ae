"""Exchanges of BatchNorm's statistics inside a forward and a backward, in a process group or through shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
import torch.distributed as dist

from evenload.errors import DesyncError, PeerLostError
from evenload.training.comm.collective_errors import check_setup
from evenload.training.comm.generation import CollectiveAbortedError
from evenload.training.comm.host_exchange import Gather
from evenload.training.comm.pending import Pending
from evenload.training.comm.shared_memory import SharedChannel

StatisticsGroup = dist.ProcessGroup | SharedChannel
_FAILURES = (RuntimeError, TimeoutError, PeerLostError)


def sum_in(group: StatisticsGroup, tensor: torch.Tensor, begin: Callable[[dist.Work | None, bool], Pending]) -> None:
    """Sum a vector over the group, in place; `begin` makes a collective one that an abort ends.

    Raises:
        CollectiveAbortedError: another rank has left the exchange.
        DesyncError: the ranks exchange different numbers of values.
    """
    try:
        if not isinstance(group, SharedChannel):
            work = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group, async_op=True)
            begin(work, tensor.device.type == "cpu").wait()
        elif tensor.device.type == "cpu":
            group.sum(tensor)
        else:  # a GPU among CPU ranks
            group.sum(on_cpu := tensor.cpu())
            tensor.copy_(on_cpu)
    except _FAILURES as error:
        _raise(error, "BatchNorm's statistics could not be summed")


def gather_in(
    group: StatisticsGroup, own: torch.Tensor, gather_of: Callable[[dist.ProcessGroup], Gather]
) -> torch.Tensor:
    """Gather vectors over the group, shape ``(num_ranks, len(own))``; errors as in `sum_in`."""
    try:
        if isinstance(group, SharedChannel):
            return group.gather(own.cpu()).to(own.device)
        return gather_of(group)(own)
    except _FAILURES as error:
        _raise(error, "BatchNorm's statistics could not be gathered")


def _raise(error: Exception, what: str) -> NoReturn:
    if isinstance(error, DesyncError):
        raise error
    check_setup(error, what)
    raise CollectiveAbortedError(f"{what}: {error}") from error
