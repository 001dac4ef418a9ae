"""Divide the global batch, or the batches of a round, over islands: by measured speed, as over ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import fmean

from evenload.balance.decision import Decision, Observation
from evenload.balance.rebalance import Balancer
from evenload.balance.split import scale_shares
from evenload.errors import DataError

NUM_BLOCKS = 8
"""Means of step times that an island reports at a synchronisation: each is an observation of the balancer."""


class IslandShares:
    """Proportions of the islands; equal on all ranks, and only rank 0 decides.

    A share counts samples of a global batch, or batches of a round where islands take unequal numbers of steps.
    """

    def __init__(self, total: int, proportions: Sequence[int], *, decides: bool) -> None:
        """`decides`: this rank measures and decides; `balance` was not set otherwise, and there are several islands."""
        self.total = total
        self.shares = at_least_one(scale_shares(proportions, total))
        self._balancer = Balancer(total, len(self.shares), shares=self.shares) if decides else None
        self._num_seen = 0

    def cut(self, size: int) -> list[int]:
        """Return where each island's part of `size` begins, and `size`; DataError if some island would have none."""
        if size < len(self.shares):
            raise DataError(
                f"a step of {size} samples cannot be divided over {len(self.shares)} islands, each of which needs one: set "
                "DataLoader(drop_last=True), or a larger batch_size"
            )
        shares = self.shares if size == self.total else at_least_one(scale_shares(self.shares, size))
        return list(itertools.accumulate(shares, initial=0))

    def observe(self, blocks: Sequence[Sequence[float]]) -> Decision | None:
        """Take the seconds that each island needed for its share, in several blocks; return new shares where they pay."""
        decision: Decision | None = None
        for seconds in zip(*blocks, strict=True):
            if self._balancer is not None and all(time_s > 0 for time_s in seconds):
                self._num_seen += 1
                decision = (
                    self._balancer.observe(Observation(self._num_seen, self.shares, 1, tuple(seconds))) or decision
                )
        return decision

    def set(self, shares: Sequence[int]) -> None:
        """Take decided shares; an island without any would be left behind."""
        self.shares = at_least_one(shares)


def at_least_one(shares: Sequence[int]) -> tuple[int, ...]:
    """Return the shares with those of 0 raised to 1, from the largest; their sum is at least their number."""
    found = list(shares)
    for index, share in enumerate(found):
        if not share:
            found[found.index(max(found))] -= 1
            found[index] = 1
    return tuple(found)


def blocks_of(seconds: Sequence[float]) -> list[float]:
    """Return `NUM_BLOCKS` means of consecutive steps; zeros if there are none."""
    count = len(seconds)
    if not count:
        return [0.0] * NUM_BLOCKS
    edges = [index * count // NUM_BLOCKS for index in range(NUM_BLOCKS + 1)]
    return [fmean(seconds[low : max(high, low + 1)]) for low, high in itertools.pairwise(edges)]
