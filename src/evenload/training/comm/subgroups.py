"""Make the groups of `run.group`, after comparing all ranks' requests: differing ones would wait forever."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch.distributed as dist

from evenload.errors import ConfigError, DesyncError, PeerLostError, StepError
from evenload.training.comm.control import Control, Operation
from evenload.training.comm.groups import Groups
from evenload.training.comm.subset import Subset

KINDS = ("node", "cuda", "cpu")
_WORD_BITS = 48
"""Ranks encoded in one number of an exchange, which is exact below 2^53."""


@dataclass(frozen=True)
class RankLocation:
    """Device type and machine of a rank, by which groups can be named."""

    device_type: str
    """``cuda`` or ``cpu``."""
    node_rank: int


@dataclass(frozen=True)
class _GroupRequest:
    """Request and location of one rank: one row of the exchange."""

    wrong: bool
    kind: str
    """One of `KINDS`, or empty for a list."""
    ranks: tuple[int, ...]
    device_type: str
    machine: tuple[float, float]

    def row(self, num_ranks: int) -> list[float]:
        words = [0] * -(-num_ranks // _WORD_BITS)
        for rank in self.ranks:
            words[rank // _WORD_BITS] |= 1 << rank % _WORD_BITS
        kind = KINDS.index(self.kind) if self.kind else -1
        return [float(self.wrong), float(kind), float(KINDS.index(self.device_type)), *self.machine, *map(float, words)]

    @classmethod
    def read(cls, row: list[float]) -> _GroupRequest:
        wrong, kind, device_type, node, machine, *words = row
        ranks = tuple(
            index * _WORD_BITS + bit
            for index, word in enumerate(words)
            for bit in range(_WORD_BITS)
            if int(word) >> bit & 1
        )
        name = KINDS[int(kind)] if kind >= 0 else ""
        return cls(bool(wrong), name, ranks, KINDS[int(device_type)], (node, machine))

    def __str__(self) -> str:
        return "an invalid list" if self.wrong else repr(self.kind) if self.kind else str(list(self.ranks))


def user_group(ranks: object, location: RankLocation, groups: Groups, control: Control) -> dist.ProcessGroup:
    """Return the process group that this rank requests; see `Run.group`. All ranks call it.

    Raises:
        ConfigError: not a list of distinct existing ranks, or an unknown kind of ranks.
        DesyncError: the ranks request different groups.
        StepError: in a measurement, where each rank is alone.
    """
    num_ranks = len(groups.membership.workers)
    if groups.world_size < num_ranks:
        raise StepError("run.group was called in a measurement, where each rank is alone; make groups before the loop")
    wrong = _problem_with(ranks, num_ranks)
    own = _GroupRequest(
        wrong=bool(wrong),
        kind=ranks if isinstance(ranks, str) and not wrong else "",
        ranks=() if wrong or isinstance(ranks, str) else tuple(sorted(ranks)),  # type: ignore[call-overload]
        device_type=location.device_type,
        machine=(float(location.node_rank), float(zlib.crc32(socket.gethostname().encode()))),
    )
    everyone = [_GroupRequest.read(row) for row in control.exchange(Operation.GROUP, own.row(num_ranks))]
    if wrong:
        raise ConfigError(wrong)
    if len({str(request) for request in everyone}) > 1:
        requests = "; ".join(f"rank {rank}: {request}" for rank, request in enumerate(everyone))
        raise DesyncError(
            f"run.group received different requests: {requests}. Call it on all ranks with the same ranks"
        )
    try:
        return _make(own, everyone, groups)
    except RuntimeError as error:
        raise PeerLostError(f"run.group: another rank is gone ({error})") from error


def _problem_with(ranks: object, num_ranks: int) -> str:
    expected = f"run.group(ranks={ranks!r}): expected a list of different ranks from 0 to {num_ranks - 1}, or one of "
    expected += ", ".join(map(repr, KINDS))
    if isinstance(ranks, str):
        return "" if ranks in KINDS else expected
    if isinstance(ranks, bytes) or not isinstance(ranks, Sequence | Set) or not ranks:
        return expected
    if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in ranks):
        return expected
    if unknown := sorted(rank for rank in ranks if not 0 <= rank < num_ranks):
        return f"{expected}; there is no rank {', '.join(map(str, unknown))}"
    return f"{expected}; a rank is named twice" if len(set(ranks)) != len(ranks) else ""


def _make(own: _GroupRequest, everyone: list[_GroupRequest], groups: Groups) -> dist.ProcessGroup:
    if not own.kind:
        return groups.subset(own.ranks)
    if own.kind != "node":
        members = [rank for rank, request in enumerate(everyone) if request.device_type == own.kind]
        if not members:
            types = ", ".join(sorted({request.device_type for request in everyone}))
            raise ConfigError(f"run.group(ranks={own.kind!r}): no rank computes there; all are on {types}")
        return groups.subset(members)
    # Every rank takes part in making every machine's group, in one order.
    by_machine = {
        machine: groups.subset([rank for rank, request in enumerate(everyone) if request.machine == machine])
        for machine in dict.fromkeys(request.machine for request in everyone)
    }
    return by_machine[own.machine]


def subset_of(group: object, groups: Groups) -> Subset | None:
    """Return the members of a process group; None for a rank outside. ConfigError for one that can't carry numbers."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    try:
        ranks = tuple(dist.get_process_group_ranks(group))  # type: ignore[arg-type]
        backends = dist.get_backend_config(group)  # type: ignore[arg-type]
    except (KeyError, ValueError, RuntimeError, AttributeError, TypeError) as error:
        raise ConfigError(f"run.reduce(group={group!r}): expected what run.group returned, in this run") from error
    if "cpu:" not in backends:
        raise ConfigError(
            f"run.reduce(group=...): that group has the backend {backends} alone, and numbers travel over the CPU; make it with "
            "run.group"
        )
    return Subset(group, groups.rank, ranks, groups.limits.timeout_s, groups.closed, groups.gone)  # type: ignore[arg-type]
