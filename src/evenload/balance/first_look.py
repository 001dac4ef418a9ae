"""Take nearly all samples from ranks that a run's first step shows to be hopeless. No clock, no I/O.

Equal shares cost a rank that is 100 times slower as much in each step as a hundred steps without it, so the usual three looks
are too dear. What one step shows may be a disturbance, so such a rank keeps the least share for one more step. That also
separates its fixed cost from that of a sample, which is the price of its later trials. Still hopeless then, it is left out;
else it is measured anew, as the usual looks do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from evenload.balance.blocks import BLOCK_S
from evenload.balance.decision import Observation
from evenload.balance.split import Split
from evenload.balance.values import Cost

HOPELESS = 8.0
"""A rank is hopeless where it takes so many times as long as a whole step without it."""
LEAST_S = HOPELESS * BLOCK_S
"""Less is a disturbance, and costs little."""


class FirstLook:
    """Looks at the first step, and at the first in which hopeless ranks have the least share."""

    def __init__(self) -> None:
        self._is_due = True
        self._cut: tuple[int, ...] = ()
        """Ranks that have the least share."""
        self._shares: tuple[int, ...] = ()
        """All shares then."""

    def __call__(
        self,
        seen: Observation,
        least: int,
        split: Callable[[Sequence[Cost]], Split],
        fit: Callable[[], Sequence[Cost]],
    ) -> tuple[Split | None, tuple[int, ...]]:
        """Return shares to take at once, None for none, and ranks to measure anew.

        Args:
            seen: the newest step.
            least: samples of the least share.
            split: returns the best split.
            fit: returns what the ranks cost by the steps so far.
        """
        own_s = [time_s or 0.0 for time_s in seen.seconds]
        if self._is_due:
            self._is_due = False
            return self._cut_hopeless(own_s, seen.shares, least, split), ()
        if not self._cut or seen.shares != self._shares:
            return None, ()
        cut, self._cut = self._cut, ()
        found = split(fit())
        anew = tuple(rank for rank in cut if not own_s[rank] > HOPELESS * found.expected_s)
        return (found if len(anew) < len(cut) else None), anew

    def _cut_hopeless(
        self, own_s: Sequence[float], shares: tuple[int, ...], least: int, split: Callable[[Sequence[Cost]], Split]
    ) -> Split | None:
        if max(own_s) < LEAST_S or not all(own_s) or not all(shares):
            return None
        found = split([Cost(0.0, time_s / share) for time_s, share in zip(own_s, shares, strict=True)])
        self._cut = tuple(rank for rank, time_s in enumerate(own_s) if time_s > HOPELESS * found.expected_s)
        new = [max(share, least) for share in found.shares]
        new[new.index(max(new))] -= sum(new) - sum(shares)
        if not self._cut or min(new) < least:
            self._cut = ()
            return None
        self._shares = tuple(new)
        return replace(found, shares=self._shares)
