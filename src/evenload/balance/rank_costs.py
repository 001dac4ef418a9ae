"""The cost of each rank, from the steps it ran: a `SpeedTracker` for each. No clock, no I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_low

from evenload.balance.cost import CostSample
from evenload.balance.decision import Observation
from evenload.balance.drift import SpeedChange, SpeedTracker
from evenload.balance.values import Cost

MANY_RANKS = 128
_FITS_IN_A_STEP = 16
"""Of more ranks, so many are fitted in one step, in turns: a fit takes about 0.1 ms. A changed speed is fitted at once."""


class RankCosts:
    def __init__(self, world_size: int) -> None:
        self._tracks = [SpeedTracker() for _ in range(world_size)]
        self.has_fits = False
        self._next_fit = 0

    def __len__(self) -> int:
        return len(self._tracks)

    def add(self, time: int, block: Observation, skipped: int | None = None) -> dict[int, SpeedChange]:
        """Add a step, or a block of short ones; return the changes it completes, by rank.

        Times are numbers of blocks, also in the changes. Ranks without seconds are passed over, and the one `skipped`.
        """
        if self.has_fits and len(self) > MANY_RANKS:
            self._fit_some()
        changes = {}
        for rank, (track, share, time_s) in enumerate(zip(self._tracks, block.shares, block.seconds, strict=True)):
            if time_s is not None and rank != skipped:
                change = track.add(CostSample(time, max(share, block.num_micro), block.num_micro, time_s))
                if change is not None:
                    changes[rank] = change
        return changes

    @property
    def num_steps(self) -> int:
        """Steps of which the costs are known: those since a speed changed, up to the window, of the rank with fewest."""
        return min((track.num_steps for track in self._tracks if track.num_steps), default=0)

    def begin_anew(self, *ranks: int) -> None:
        """Forget the level of these ranks' seconds: they were out, or disturbed."""
        for rank in ranks:
            self._tracks[rank].begin_anew()

    def refit(self) -> None:
        """Fit all ranks with steps; of many ranks only for the first time, because then `add` fits some in each step."""
        if not self.has_fits or len(self) <= MANY_RANKS:
            self._fit([track for track in self._tracks if track.has_steps])
        self.has_fits = True

    def _fit(self, tracks: Sequence[SpeedTracker]) -> None:
        noises = sorted(track.refit().noise for track in tracks)
        usual = noises[len(noises) // 2]
        for track in tracks:
            if track.fit.noise < usual:
                track.refit(usual)

    def _fit_some(self) -> None:
        first = self._next_fit % len(self)
        self._next_fit = first + _FITS_IN_A_STEP
        if tracks := [track for track in self._tracks[first : self._next_fit] if track.has_steps]:
            self._fit(tracks)

    def costs(self) -> list[Cost]:
        """Return the cost of each rank at the last fit."""
        known = [track.fit.cost if track.has_steps else None for track in self._tracks]
        # A rank that never ran (out since a resume) is taken as fast as the median of the others.
        typical_s = median_low(cost.per_sample_s for cost in known if cost is not None)
        return [cost or Cost(0.0, typical_s) for cost in known]

    def seen_s(self, shares: Sequence[int], num_micro: int, may_leave: Sequence[bool]) -> float | None:
        """Return the seconds measured for the slowest rank under exactly these shares; None where one of them wasn't."""
        slowest_s = -math.inf
        for track, share, leaves in zip(self._tracks, shares, may_leave, strict=True):
            if share or not leaves:
                time_s = track.seen_s(max(share, num_micro), num_micro)
                if time_s is None:
                    return None
                slowest_s = max(slowest_s, time_s)
        return slowest_s

    def gain_error(self, shares: Sequence[int], num_micro: int, may_leave: Sequence[bool]) -> float:
        """Return the standard error of a gain: the slowest rank's time against the mean of all, weighted by their shares."""
        tracks = self._tracks
        ranks = [r for r, share in enumerate(shares) if tracks[r].has_steps and (share or not may_leave[r])]
        slowest = max(ranks, key=lambda r: tracks[r].fit.cost.predict_s(shares[r], num_micro))
        variance = 0.0
        for rank in ranks:
            part = shares[rank] / sum(shares)
            weight = 1 - part if rank == slowest else part
            variance += (weight * tracks[rank].fit.predict_error(shares[rank], num_micro)) ** 2
        return math.sqrt(variance)
