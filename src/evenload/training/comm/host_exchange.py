"""`HostExchange`: rows of all ranks, inside a host through shared memory and between hosts by the first rank of each.

A small all-gather of gloo takes about a millisecond even between two ranks of one host; through shared memory it takes some
microseconds. Between hosts, one rank per host sends the rows of all its ranks, so a rank has one connection per host.

What is possible is found by trying: each rank maps the memory that the first rank of its host made, and all compare. Where one
of them fails (a container of its own, no memory, another processor), all ranks use process groups.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from evenload.training.comm.row_ring import RowRing, ring_layout
from evenload.training.comm.shared_memory import (
    ChannelLayout,
    SegmentMember,
    SharedChannel,
    SharedSegment,
    start_ticks,
    why_unavailable,
)

ROW_VALUES = 60
"""Values of one row."""
_STATISTICS_BYTES = 1 << 15
"""Statistics of a BatchNorm with 2,048 channels in float64; larger ones take several rounds."""
_ROWS, _TABLE, _RING = 0, 1, 1

Gather = Callable[[torch.Tensor], torch.Tensor]
"""All-gather of a vector over some ranks, shape ``(num_ranks, num_values)``."""


@dataclass(frozen=True)
class HostMap:
    """The ranks of each host, and their processes."""

    hosts: tuple[tuple[int, ...], ...]
    members: tuple[SegmentMember, ...]
    """By rank."""
    unable: tuple[int, ...]
    """Ranks whose system can't share memory."""

    def neighbours(self, rank: int, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return those of `ranks` that are on the host of `rank`."""
        local = next(host for host in self.hosts if rank in host)
        return tuple(other for other in local if other in ranks)

    def why_not(self) -> str:
        """Return why ranks of one host can't share memory, which `share_rows` found; empty if each has a host of its own."""
        if self.unable:
            return f"the system of rank {', '.join(map(str, self.unable))} can't share memory (Linux on x86-64 can)"
        if len(self.hosts) == len(self.members):
            return ""
        return "a rank could not map another's memory: memory is full, or they run in separate containers"

    def are_together(self, ranks: Sequence[int]) -> bool:
        return set(self.neighbours(ranks[0], ranks)) == set(ranks)


class HostExchange:
    """Exchanges of rows among all ranks, of which each host's share a segment."""

    def __init__(
        self,
        segment: SharedSegment,
        hosts: Sequence[Sequence[int]],
        between_hosts: Gather | None,
        timeout_s: float,
    ) -> None:
        self._segment = segment
        self._hosts = hosts
        self._between_hosts = between_hosts
        self._num_ranks = sum(map(len, hosts))
        self._max_local = max(map(len, hosts))
        placed = [
            (rank, host * self._max_local + local)
            for host, ranks in enumerate(hosts)
            for local, rank in enumerate(ranks)
        ]
        self._order = [row for _, row in sorted(placed)]
        """For each rank the row that holds its values, where each host sends equally many rows."""
        self._rows = segment.channel(_ROWS, timeout_s)
        # The others wait longer than the first rank does for the other hosts, because its error says more.
        self._table = segment.channel(_TABLE, 2 * timeout_s) if between_hosts is not None else None
        self.ring: RowRing | None = None
        """Rows of the first rank, where all ranks are on one host."""
        if between_hosts is None:
            self.ring = RowRing(segment, _RING, self._rows, ROW_VALUES, timeout_s)

    def exchange_row(self, row: Sequence[float]) -> NDArray[np.float64]:
        """Exchange `ROW_VALUES` float64 and return a copy of those of all ranks, by rank; errors as in `SharedChannel`."""
        local = self._rows.exchange_row(row)
        if self._table is None or self._between_hosts is None:
            return local
        table = None
        if self._segment.index == 0:
            try:
                table = self._gather_hosts(local, self._between_hosts).tobytes()
            except Exception as error:
                self._segment.abort(f"the exchange with the other hosts failed: {error}")
                raise
        everyone = np.frombuffer(self._table.broadcast(table, 8 * ROW_VALUES * self._num_ranks))
        return everyone.reshape(self._num_ranks, ROW_VALUES).copy()

    def abort(self, reason: str) -> None:
        """End every exchange of this host's ranks with `PeerLostError(reason)`."""
        self._segment.abort(reason)

    def close(self) -> None:
        """Leave; other ranks that still wait for this one learn that it is gone."""
        self._segment.close()

    def _gather_hosts(self, local: NDArray[np.float64], between_hosts: Gather) -> NDArray[np.float64]:
        own = np.zeros((self._max_local, ROW_VALUES))
        own[: len(local)] = local
        everyone: NDArray[np.float64] = between_hosts(torch.from_numpy(own.reshape(-1))).numpy()
        return everyone.reshape(-1, ROW_VALUES)[self._order]


def find_hosts(gather: Gather, host: str = "") -> HostMap:
    """Find which ranks share a host; all ranks call it. `gather`: over all ranks. `host`: another name for this host."""
    name = host or _host_name()
    key = -1 if why_unavailable() else int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
    table = gather(torch.tensor([key, os.getpid(), start_ticks(os.getpid())])).tolist()
    hosts: dict[int, list[int]] = {}
    for rank, row in enumerate(table):
        hosts.setdefault(row[0], []).append(rank)
    return HostMap(
        hosts=tuple(tuple(ranks) for ranks in hosts.values()),
        members=tuple(SegmentMember(rank, *row[1:]) for rank, row in enumerate(table)),
        unable=tuple(hosts.get(-1, ())),
    )


def share_rows(
    found: HostMap, rank: int, gather: Gather, gather_among: Callable[[Sequence[int]], Gather], timeout_s: float
) -> HostExchange | None:
    """Return the exchange of rows among all ranks, or None on all of them if it is impossible. All ranks call it.

    Args:
        found: the hosts of this generation.
        rank: this rank.
        gather: all-gather over all ranks.
        gather_among: returns the all-gather over some ranks; all ranks call it with the same ones.
        timeout_s: limit of each wait in an exchange.
    """
    ranks = range(len(found.members))
    layouts = [ChannelLayout(len(found.neighbours(rank, ranks)), 8 * ROW_VALUES)]
    several = len(found.hosts) > 1
    layouts.append(ChannelLayout(1, 8 * ROW_VALUES * len(ranks)) if several else ring_layout(len(ranks), ROW_VALUES))
    agreed, segment = _share(found, rank, ranks, layouts, gather)
    if not agreed or segment is None:
        return None
    between_hosts = gather_among([host[0] for host in found.hosts]) if several else None
    return HostExchange(segment, found.hosts, between_hosts, timeout_s)


def share_statistics(
    found: HostMap, rank: int, ranks: Sequence[int], gather: Gather, timeout_s: float
) -> tuple[bool, SharedChannel | None]:
    """Return whether some ranks of one host can exchange statistics through memory, and how; None for a rank outside.

    All ranks call it, and get the same answer to the first.
    """
    agreed, channels = share_channels(found, rank, ranks, _STATISTICS_BYTES, 1, gather, timeout_s)
    return agreed, channels[0] if channels else None


def share_channels(
    found: HostMap,
    rank: int,
    ranks: Sequence[int],
    row_bytes: int,
    num_channels: int,
    gather: Gather,
    timeout_s: float,
) -> tuple[bool, list[SharedChannel]]:
    """Return whether some ranks share memory, which must be on one host, and their channels; none for a rank outside.

    All ranks call it, and get the same answer to the first.
    """
    if not found.are_together(ranks):
        return False, []
    layouts = [ChannelLayout(len(ranks), row_bytes)] * num_channels
    agreed, segment = _share(found, rank, ranks, layouts, gather)
    return agreed, [] if segment is None else [segment.channel(index, timeout_s) for index in range(num_channels)]


def _share(
    found: HostMap, rank: int, ranks: Sequence[int], layouts: Sequence[ChannelLayout], gather: Gather
) -> tuple[bool, SharedSegment | None]:
    """Map memory that those of `ranks` on one host share; the first value is False on all ranks if one of them can't."""
    if found.unable or len(found.hosts) == len(found.members):
        return False, None
    local = found.neighbours(rank, ranks)
    members = [found.members[member] for member in local]
    takes_part = rank in ranks
    fd = _create(members, layouts) if takes_part and rank == local[0] else -1
    try:
        fds = gather(torch.tensor([fd]))[:, 0].tolist()
        segment = _attach(fds[local[0]], members, rank, layouts) if takes_part else None
        attached = gather(torch.tensor([int(not takes_part or segment is not None)]))
    finally:
        if fd >= 0:
            os.close(fd)
    agreed = bool(attached.all())
    return agreed, segment if agreed else None


def _host_name() -> str:
    """Name the machine since its last start and the namespaces: a rank must see the processes of the others.

    Processes of different network namespaces are on different hosts for everything else that Evenload does.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()} {Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return f"unknown {os.urandom(8).hex()}"


def _create(members: Sequence[SegmentMember], layouts: Sequence[ChannelLayout]) -> int:
    try:
        return SharedSegment.create(members, layouts)
    except OSError:
        return -1


def _attach(
    their_fd: int, members: Sequence[SegmentMember], rank: int, layouts: Sequence[ChannelLayout]
) -> SharedSegment | None:
    """Return the segment that the first member has open, or None if this rank can't map it or see a member's process."""
    try:
        fd = os.open(f"/proc/{members[0].pid}/fd/{their_fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return SharedSegment(fd, members, rank, layouts) if all(member.alive for member in members) else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
