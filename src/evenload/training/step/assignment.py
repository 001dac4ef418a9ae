"""`ShareAssignment`: shares and limits of the ranks from a step on, and how it follows a change of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from evenload.balance.split import micro_shares, num_micro, scale_shares, slice_sizes
from evenload.errors import ConfigError

Shares = tuple[int, ...]
Caps = tuple[int | None, ...]
Cut = tuple[tuple[int, ...], ...]
"""Samples of each rank in each micro-batch."""
_MOST_KNOWN = 64


@dataclass(frozen=True)
class ShareAssignment:
    from_step: int
    shares: Shares
    min_num_micro: int
    caps: Caps
    out: tuple[int, ...] = ()
    """Ranks that leave the groups of gradients: their share is 0."""

    @cached_property
    def num_samples(self) -> int:
        return sum(self.shares)


class MicroCuts:
    """Cuts global batches into micro-batches, and remembers how."""

    def __init__(self, *, fills_each: bool) -> None:
        """`fills_each`: there are at most as many micro-batches as the largest share has samples."""
        self._fills_each = fills_each
        self._known: dict[tuple[Shares, int, int, Caps], Cut] = {}
        self._last: tuple[Shares, Caps, tuple[int, int], Cut] | None = None

    def __call__(self, shares: Shares, num_samples: int, least: int, caps: Caps) -> Cut:
        """Return the samples of each rank in each of `least` micro-batches, or more where the caps want it."""
        last = self._last  # the hash of a thousand shares takes as long as the rest of a plan
        if last is not None and last[0] is shares and last[1] is caps and last[2] == (num_samples, least):
            return last[3]
        key = (shares, num_samples, least, caps)
        if key not in self._known:
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()
            count = min(max(least, num_micro(shares, caps)), max(num_samples, 1))
            if self._fills_each:
                count = min(count, max(*shares, 1))
            self._known[key] = micro_shares(shares, slice_sizes(num_samples, count), caps)
        self._last = shares, caps, (num_samples, least), self._known[key]
        return self._known[key]


def assignment_for(
    now: ShareAssignment, members: Sequence[int | None], batch_size: int, cap: int | None, rule: str
) -> list[int]:
    """Return an assignment for other ranks as integers, which `assignments_in` reads.

    Args:
        now: the assignment before.
        members: of each rank its rank before; None for one that joins.
        batch_size: the global batch.
        cap: the limit of a rank that joins.
        rule: ``kept``: in the proportions of `now`, and the mean share for a rank that joins; or ``even``.
    """
    known = [None if rank is None else now.shares[rank] for rank in members]
    given = [share for share in known if share]
    mean = max(1, round(sum(given) / len(given))) if given else 1
    weights = tuple(mean if share is None else share for share in known)
    if rule == "even" or not any(weights):
        weights = (1,) * len(members)
    shares = weights if sum(weights) == batch_size else scale_shares(weights, batch_size)
    caps = [cap if rank is None else now.caps[rank] for rank in members]
    return [batch_size, now.min_num_micro, *shares, *(-1 if limit is None else limit for limit in caps)]


def assignments_in(values: Sequence[int], out: Sequence[int], from_step: int) -> list[ShareAssignment]:
    """Return the assignments that integers hold; the ranks `out` compute nothing in steps before `from_step`."""
    batch_size, least, *rest = values
    shares = tuple(rest[: len(rest) // 2])
    caps: Caps = tuple(None if limit < 0 else limit for limit in rest[len(shares) :])
    if not out:
        return [ShareAssignment(0, shares, least, caps)]
    weights = tuple(0 if rank in out else max(share, 1) for rank, share in enumerate(shares))
    at_first = ShareAssignment(0, scale_shares(weights, batch_size), least, caps, tuple(out))
    return [at_first, ShareAssignment(from_step, shares, least, caps)]


def check_shares(shares: Shares, world_size: int) -> None:
    """Raise ConfigError if fixed shares don't fit the job."""
    if len(shares) != world_size:
        raise ConfigError(
            f"balance {','.join(map(str, shares))} has {len(shares)} shares, but there are {world_size} ranks"
        )
