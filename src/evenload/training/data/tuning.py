"""How many loader workers a rank should have: what its steps cost in, decisions out. No clock, no torch.

Note [What is made small]
  A rank's own seconds for a sample: waiting for samples, computing, optimizer. Not the seconds of the step, for they belong
  to the slowest rank; and by the sample, for shares move meanwhile. Workers that take the rank's own cores show up in what
  it computes, so more of them are kept only where the sum gets smaller.

Note [The search]
  It begins with what the DataLoader says, so mostly without workers: that tells what reading a sample takes beside computing
  it, hence how many workers could keep up. From there it doubles while the rank still waits, deepens the queue where it
  waits now and then, and halves while nothing is lost by it. Each setting is looked at for `WINDOW_STEPS`. Samples are
  keyed by their place in the global order, so whoever reads them, and however often, they are the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from statistics import mean, median

SKIPPED_STEPS = 2
"""After a change: the new workers start, and the first samples come late."""
WINDOW_STEPS = 8
NEGLIGIBLE = 0.02
"""Waiting of less than this part of a rank's own seconds is no reason to look for more workers."""
SAME = 0.02
"""Settings whose costs are this near count as equal: the one with fewer workers is taken."""
MOST_PREFETCH = 8
PINNING_PAYS = 0.9
"""Pinned memory is used where copies to the GPU take less than this part of the usual time."""
WATCH_STEPS = 20
REOPEN = 0.10
"""Once chosen, the search begins anew where a rank waits for so much of its seconds, and twice as much as when it chose."""
_MAX_SEARCHES = 4


class How(IntEnum):
    """Who set it."""

    GIVEN = 0
    """The user, in the DataLoader."""
    TRIED = 1
    """The search, which goes on."""
    CHOSEN = 2
    """The search, which has ended."""


@dataclass(frozen=True)
class Reading:
    """How a rank reads its samples."""

    num_workers: int = 0
    prefetch: int = 0
    """Tasks (parts of a micro-batch) ahead, for each worker; 0 without workers."""
    pinned: bool = False
    """Whether what is read comes in pinned memory."""
    how: How = How.GIVEN

    @property
    def depth(self) -> int:
        """Tasks that are out at once."""
        return self.num_workers * self.prefetch

    def code(self) -> float:
        """As one number, for the exchange of a step."""
        return float(((self.num_workers * 64 + min(self.prefetch, 63)) * 2 + self.pinned) * 4 + self.how)

    def __str__(self) -> str:
        if not self.num_workers:
            return "no loader workers"
        pinned = ", pinned memory" if self.pinned else ""
        return (
            f"{self.num_workers} loader worker{'s' if self.num_workers > 1 else ''} (prefetch {self.prefetch}{pinned})"
        )


@functools.lru_cache(maxsize=256)
def read_code(code: float) -> Reading:
    """What `Reading.code` gave."""
    rest, how = divmod(int(code), 4)
    rest, pinned = divmod(rest, 2)
    num_workers, prefetch = divmod(rest, 64)
    return Reading(num_workers, prefetch, bool(pinned), How(how))


@dataclass(frozen=True)
class StepCost:
    """What a step cost one rank."""

    data_s: float
    """Waiting for samples; without workers the reading itself."""
    busy_s: float
    """Forward, backward, optimizer."""
    num_samples: int


@dataclass(frozen=True)
class _Trial:
    cost_s: float
    """Of a sample; the mean over the window without its dearest and its cheapest step."""
    waiting: float
    """Part of the rank's own seconds that went by waiting for samples."""
    ratio: float
    """Seconds of waiting over seconds of computing."""
    bursts: bool
    """Whether most steps waited little, and a few much."""


_Size = tuple[int, int]
"""Workers, prefetch."""


class Tuner:
    """Chooses the workers of one rank's loader.

    Args:
        first: where to begin.
        most_workers: more than so many are never tried.
    """

    def __init__(self, first: Reading, most_workers: int) -> None:
        self.reading = replace(first, how=How.TRIED)
        self._most = max(most_workers, first.num_workers)
        self._left_out = SKIPPED_STEPS
        self._window: list[StepCost] = []
        self._tried: dict[_Size, _Trial] = {}
        self._num_searches = 1
        self._refused = False

    def observe(self, cost: StepCost) -> None:
        """Takes one step under `reading`; which may be another one afterwards."""
        if self._left_out > 0:
            self._left_out -= 1
            return
        if cost.num_samples <= 0 or self._refused:
            return
        self._window.append(cost)
        chosen = self.reading.how is How.CHOSEN
        if len(self._window) < (WATCH_STEPS if chosen else WINDOW_STEPS):
            return
        trial, self._window = _judge(self._window), []
        size = (self.reading.num_workers, self.reading.prefetch)
        if chosen:
            if not self._is_worse(trial, self._tried.get(size)):
                return
            self._num_searches += 1
            self._tried.clear()
        self._tried[size] = trial
        best = best_size(self._tried)
        target = self._following(best)
        self._take(best if target is None else target, How.CHOSEN if target is None else How.TRIED)

    def pin(self) -> None:
        """Pinned memory from now on."""
        self.reading = replace(self.reading, pinned=True)

    def refuse(self) -> None:
        """Workers failed where reading in the rank itself did not: there are none from now on."""
        self._refused = True
        self._take((0, 0), How.CHOSEN)

    def _take(self, size: _Size, how: How) -> None:
        if size != (self.reading.num_workers, self.reading.prefetch):
            self._left_out = SKIPPED_STEPS
        self.reading = replace(self.reading, num_workers=size[0], prefetch=size[1], how=how)

    def _is_worse(self, trial: _Trial, then: _Trial | None) -> bool:
        before = then.waiting if then is not None else 0.0
        return self._num_searches < _MAX_SEARCHES and trial.waiting >= max(REOPEN, 2 * before)

    def _following(self, best: _Size) -> _Size | None:
        """What to try next, beside the best so far; None where the search is over."""
        num_workers, prefetch = best
        trial = self._tried[best]
        candidates: list[_Size] = []
        if trial.waiting >= NEGLIGIBLE:
            if num_workers == 0:
                # So many at once read as fast as the rank computes; one alone, where these only took the rank's cores.
                candidates += [(self._power(trial.ratio), 2), (1, 2)]
            else:
                candidates.append((min(2 * num_workers, self._most), prefetch))
                if trial.bursts and prefetch < MOST_PREFETCH:
                    candidates.append((num_workers, 2 * prefetch))
        if num_workers > 1:
            candidates.append((num_workers // 2, prefetch))
        elif num_workers == 1:
            candidates.append((0, 0))
        return next((size for size in candidates if size not in self._tried), None)

    def _power(self, ratio: float) -> int:
        """The power of two from `ratio` on, at least 1 and at most what is allowed."""
        wanted = 1 << math.ceil(math.log2(max(1.0, min(ratio, 1024.0))))
        return max(1, min(wanted, self._most))


def best_size(tried: Mapping[_Size, _Trial]) -> _Size:
    """The cheapest; of those that cost about the same, the one with the fewest workers and the shortest queue."""
    least = min(trial.cost_s for trial in tried.values())
    return min(size for size, trial in tried.items() if trial.cost_s <= least * (1 + SAME))


def _judge(window: list[StepCost]) -> _Trial:
    data_s, busy_s = sum(cost.data_s for cost in window), sum(cost.busy_s for cost in window)
    usual_s = median(cost.data_s for cost in window)
    costs = sorted((cost.data_s + cost.busy_s) / cost.num_samples for cost in window)
    return _Trial(
        cost_s=mean(costs[1:-1] or costs),
        waiting=data_s / (data_s + busy_s) if data_s + busy_s > 0 else 0.0,
        ratio=data_s / busy_s if busy_s > 0 else math.inf,
        bursts=usual_s < 0.5 * mean(cost.data_s for cost in window),
    )
