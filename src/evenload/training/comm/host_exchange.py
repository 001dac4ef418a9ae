"""`HostExchange`: rows of all ranks, inside a host through shared memory and between hosts by the first rank of each.

A small all-gather of gloo takes about a millisecond even between two ranks of one host; through shared memory it takes some
microseconds. Between hosts, one rank per host sends the rows of all its ranks, so a rank has one connection per host.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

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
_ROWS, _STATISTICS, _TABLE = 0, 1, 2

Gather = Callable[[torch.Tensor], torch.Tensor]
"""All-gather of a vector over some ranks, shape ``(num_ranks, num_values)``."""


class HostExchange:
    """Exchanges among all ranks, of which each host's share a segment."""

    def __init__(
        self, segment: SharedSegment, hosts: Sequence[Sequence[int]], between_hosts: Gather | None, timeout_s: float
    ) -> None:
        self._segment = segment
        self._hosts = hosts
        self._between_hosts = between_hosts
        self._num_ranks = sum(map(len, hosts))
        self._max_local = max(map(len, hosts))
        self._rows = segment.channel(_ROWS, timeout_s)
        # Non-leaders wait for the hosts beyond theirs: longer than the leader does, whose error says more.
        self._table = segment.channel(_TABLE, 2 * timeout_s) if len(hosts) > 1 else None
        self.statistics: SharedChannel | None = segment.channel(_STATISTICS, timeout_s) if len(hosts) == 1 else None
        """Exchange of vectors of statistics; None with several hosts."""

    def exchange_row(self, row: Sequence[float]) -> Sequence[Sequence[float]]:
        """Exchange `ROW_VALUES` float64 and return those of all ranks, by rank; errors as in `SharedChannel`."""
        local = self._rows.exchange_row(row)
        if self._table is None:
            return local
        num_bytes = 8 * ROW_VALUES * self._num_ranks
        table = None
        if self._segment.index == 0:
            try:
                table = self._gather_hosts(local).numpy().tobytes()
            except Exception as error:
                self._segment.abort(f"the exchange with the other hosts failed: {error}")
                raise
        everyone = torch.frombuffer(self._table.broadcast(table, num_bytes), dtype=torch.float64)
        rows: list[list[float]] = everyone.view(self._num_ranks, ROW_VALUES).tolist()
        return rows

    def abort(self, reason: str) -> None:
        """End every exchange of this host's ranks with `PeerLostError(reason)`."""
        self._segment.abort(reason)

    def close(self) -> None:
        """Leave; other ranks that still wait for this one learn that it is gone."""
        self._segment.close()

    def _gather_hosts(self, local: list[tuple[float, ...]]) -> torch.Tensor:
        assert self._between_hosts is not None
        own = torch.zeros(self._max_local, ROW_VALUES, dtype=torch.float64)
        own[: len(local)] = torch.tensor(local, dtype=torch.float64)
        everyone = self._between_hosts(own.view(-1)).view(len(self._hosts), self._max_local, ROW_VALUES)
        rows = torch.empty(self._num_ranks, ROW_VALUES, dtype=torch.float64)
        for ranks, received in zip(self._hosts, everyone, strict=True):
            rows[list(ranks)] = received[: len(ranks)]
        return rows


def share_memory(
    rank: int,
    gather: Gather,
    gather_among: Callable[[Sequence[int]], Gather],
    timeout_s: float,
    host: str | None = None,
) -> HostExchange | None:
    """Map memory that this host's ranks share, or return None on all ranks if that is impossible or no two share a host.

    All ranks call it. It detects what really works: each rank maps the memory of the first rank of its host, and all compare.

    Args:
        rank: this rank.
        gather: all-gather over all ranks.
        gather_among: returns the all-gather over some ranks; all ranks call it with the same ones.
        timeout_s: limit of each wait in an exchange.
        host: name of this host; by default the machine since its last start, as seen by processes that see each other.
    """
    host = _host_key() if host is None else host
    key = -1 if why_unavailable() else int.from_bytes(hashlib.sha256(host.encode()).digest()[:7])
    table = gather(torch.tensor([key, os.getpid(), start_ticks(os.getpid())])).tolist()
    hosts = _group_by([row[0] for row in table])
    if any(row[0] < 0 for row in table) or max(map(len, hosts)) == 1:
        return None
    local = next(ranks for ranks in hosts if rank in ranks)
    members = [SegmentMember(member, *table[member][1:]) for member in local]
    layouts = [ChannelLayout(len(local), 8 * ROW_VALUES), ChannelLayout(len(local), _STATISTICS_BYTES)]
    if len(hosts) > 1:
        layouts[_STATISTICS:] = [ChannelLayout(0, 0), ChannelLayout(1, 8 * ROW_VALUES * len(table))]
    fd = _create(members, layouts) if rank == local[0] else -1
    fds = gather(torch.tensor([fd]))[:, 0].tolist()
    segment = _attach(f"/proc/{members[0].pid}/fd/{fds[local[0]]}", members, rank, layouts)
    attached = gather(torch.tensor([int(segment is not None)]))
    if fd >= 0:
        os.close(fd)
    if segment is None or not attached.all():
        return None
    between_hosts = gather_among([ranks[0] for ranks in hosts]) if len(hosts) > 1 else None
    return HostExchange(segment, hosts, between_hosts, timeout_s)


def _host_key() -> str:
    """Name the machine since its last start and the namespace of process ids: a rank must see the others' processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"unknown {os.urandom(8).hex()}"


def _group_by(keys: Sequence[int]) -> list[list[int]]:
    hosts: dict[int, list[int]] = {}
    for rank, key in enumerate(keys):
        hosts.setdefault(key, []).append(rank)
    return list(hosts.values())


def _create(members: Sequence[SegmentMember], layouts: Sequence[ChannelLayout]) -> int:
    try:
        return SharedSegment.create(members, layouts)
    except OSError:
        return -1


def _attach(
    path: str, members: Sequence[SegmentMember], rank: int, layouts: Sequence[ChannelLayout]
) -> SharedSegment | None:
    """Return the segment that the host's first rank has open, or None if this rank can't map it or see a member's process."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return SharedSegment(fd, members, rank, layouts) if all(member.alive for member in members) else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
