"""How many loader workers the ranks should have: what their steps cost in, decisions out. No clock, no torch.

Note [What is made small]
  The seconds of the whole step for a sample of the global batch. A rank's own seconds would not do: workers take cores that
  other ranks compute on, so what one rank gains another may lose.

Note [The search]
  All ranks search together: each sees what every rank spent and how it read (they travel in the exchange of a step), so each
  comes to the same decision without a further word. It begins with what the DataLoaders say, so mostly without workers: that
  tells what reading takes beside computing, hence how many workers could keep up, on each rank for itself. From there the
  ranks that still wait double theirs, deepen the queue where they wait now and then, and all halve while nothing is lost by
  it. A setting is looked at for `WINDOW_STEPS`, and longer where steps are short. Samples are keyed by their place in the
  global order, so whoever reads them, and however often, they are the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from statistics import mean, median

SKIPPED_STEPS = 2
"""After a change: the new workers start, and the first samples come late."""
WINDOW_STEPS = 8
WINDOW_S, LONGEST_WINDOW_STEPS = 0.4, 16
"""Short steps scatter more: so many seconds are looked at, as long as that isn't too many steps."""
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
_ANY_NUMBER = 1 << 30


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
    """What a step cost, as all ranks know it."""

    seconds: float
    """Of the whole step."""
    num_samples: int
    """Of the global batch."""
    data_s: tuple[float, ...]
    """Each rank's waiting for samples; without workers the reading itself."""
    busy_s: tuple[float, ...]
    """Each rank's forward, backward, optimizer."""
    readings: tuple[Reading, ...]
    """How each rank read."""

    @property
    def sizes(self) -> Sizes:
        """The setting that it was measured under."""
        return tuple((reading.num_workers, reading.prefetch) for reading in self.readings)


Sizes = tuple[tuple[int, int], ...]
"""Of each rank: workers, prefetch."""


@dataclass(frozen=True)
class _Trial:
    cost_s: float
    """Of a sample; the mean over the window without its dearest and its cheapest step."""
    waiting: tuple[float, ...]
    """Part of each rank's own seconds that went by waiting for samples."""
    ratio: tuple[float, ...]
    """Of each rank: seconds of waiting over seconds of computing."""
    bursts: tuple[bool, ...]
    """Of each rank: whether most steps waited little, and a few much."""

    def is_late(self, rank: int) -> bool:
        """Whether the rank waits for samples enough to look for more workers."""
        return self.waiting[rank] >= NEGLIGIBLE


class _Move(Enum):
    """From one setting to another; each rank knows what that is for itself."""

    KEEP_UP = 1
    """Without workers: so many at once as read as fast as the rank computes."""
    ONE = 2
    DOUBLE = 3
    DEEPEN = 4
    HALVE = 5


class Tuner:
    """Chooses the workers of one rank's loader, as its fellows choose theirs.

    Args:
        first: where to begin.
        most_workers: more than so many are never tried on this rank.
        rank: of this loader, in what `StepCost` tells.
    """

    def __init__(self, first: Reading, most_workers: int, rank: int = 0) -> None:
        self.reading = replace(first, how=How.TRIED)
        self._rank = rank
        self._most = max(most_workers, first.num_workers)
        self._left_out = SKIPPED_STEPS
        self._window: list[StepCost] = []
        self._sizes: Sizes = ()
        """That the window is of."""
        self._tried: dict[Sizes, _Trial] = {}
        self._moves: set[tuple[Sizes, _Move]] = set()
        """That were made."""
        self._num_searches = 1
        self._refused = False

    def observe(self, cost: StepCost) -> None:
        """Takes one step of all ranks; `reading` may be another one afterwards, on all ranks at once."""
        if cost.sizes != self._sizes:
            self._left_out = SKIPPED_STEPS if self._sizes else self._left_out
            self._sizes, self._window = cost.sizes, []
        if self._left_out > 0:
            self._left_out -= 1
            return
        if cost.num_samples <= 0 or self._refused:
            return
        self._window.append(cost)
        chosen = self.reading.how is How.CHOSEN
        if not _is_enough(self._window, WATCH_STEPS if chosen else WINDOW_STEPS):
            return
        trial, self._window = _judge(self._window), []
        if chosen:
            if not self._is_worse(trial, self._tried.get(self._sizes)):
                return
            self._num_searches += 1
            self._tried.clear()
            self._moves.clear()
        self._tried[self._sizes] = trial
        best = best_sizes(self._tried)
        move = self._following(best)
        if move is None:
            self._take(best[self._rank], How.CHOSEN)
            return
        self._moves.add((best, move))
        self._take(_moved(best[self._rank], move, self._tried[best], self._rank, self._most), How.TRIED)

    def pin(self) -> None:
        """Pinned memory from now on."""
        self.reading = replace(self.reading, pinned=True)

    def refuse(self) -> None:
        """Workers failed where reading in the rank itself did not: there are none from now on."""
        self._refused = True
        self._take((0, 0), How.CHOSEN)

    def _take(self, size: tuple[int, int], how: How) -> None:
        self.reading = replace(self.reading, num_workers=size[0], prefetch=size[1], how=how)

    def _is_worse(self, trial: _Trial, then: _Trial | None) -> bool:
        before = max(then.waiting) if then is not None else 0.0
        return self._num_searches < _MAX_SEARCHES and max(trial.waiting) >= max(REOPEN, 2 * before)

    def _following(self, best: Sizes) -> _Move | None:
        """What to try next, from the best so far; None where the search is over."""
        trial = self._tried[best]
        late = [rank for rank in range(len(best)) if trial.is_late(rank)]
        moves: list[_Move] = []
        if late and not any(num_workers for num_workers, _ in best):
            moves += [_Move.KEEP_UP, _Move.ONE]  # one alone, where these only took the rank's cores
        elif late:
            moves.append(_Move.DOUBLE)
            if any(trial.bursts[rank] and best[rank][0] and best[rank][1] < MOST_PREFETCH for rank in late):
                moves.append(_Move.DEEPEN)
        if any(num_workers for num_workers, _ in best):
            moves.append(_Move.HALVE)
        return next((move for move in moves if not self._is_known(best, move)), None)

    def _is_known(self, best: Sizes, move: _Move) -> bool:
        """Whether it was made, or leads to what was looked at."""
        trial = self._tried[best]
        target = tuple(_moved(size, move, trial, rank, _ANY_NUMBER) for rank, size in enumerate(best))
        return (best, move) in self._moves or target in self._tried


def _moved(size: tuple[int, int], move: _Move, trial: _Trial, rank: int, most: int) -> tuple[int, int]:
    """What a move makes of one rank's size."""
    num_workers, prefetch = size
    is_late = trial.is_late(rank)
    match move:
        case _Move.KEEP_UP if is_late:
            return _power(trial.ratio[rank], most), 2
        case _Move.ONE if is_late:
            return min(1, most), 2
        case _Move.DOUBLE if is_late:
            return min(max(1, 2 * num_workers), most), prefetch or 2
        case _Move.DEEPEN if is_late and num_workers:
            return num_workers, min(2 * prefetch, MOST_PREFETCH)
        case _Move.HALVE:
            return (num_workers // 2, prefetch) if num_workers > 1 else (0, 0)
    return size


def _power(ratio: float, most: int) -> int:
    """The power of two from `ratio` on, at least 1 and at most `most`."""
    wanted = 1 << math.ceil(math.log2(max(1.0, min(ratio, 1024.0))))
    return max(1, min(wanted, most))


def best_sizes(tried: Mapping[Sizes, _Trial]) -> Sizes:
    """The cheapest; of those that cost about the same, the one with the fewest workers and the shortest queues."""
    least = min(trial.cost_s for trial in tried.values())
    alike = (sizes for sizes, trial in tried.items() if trial.cost_s <= least * (1 + SAME))
    return min(alike, key=lambda sizes: (sum(num for num, _ in sizes), sum(ahead for _, ahead in sizes), sizes))


def _is_enough(window: list[StepCost], least_steps: int) -> bool:
    if len(window) < least_steps:
        return False
    return len(window) >= LONGEST_WINDOW_STEPS or sum(cost.seconds for cost in window) >= WINDOW_S


def _judge(window: list[StepCost]) -> _Trial:
    data_s = list(zip(*(cost.data_s for cost in window), strict=True))
    busy_s = list(zip(*(cost.busy_s for cost in window), strict=True))
    sums = [(sum(data), sum(busy)) for data, busy in zip(data_s, busy_s, strict=True)]
    costs = sorted(cost.seconds / cost.num_samples for cost in window)
    return _Trial(
        cost_s=mean(costs[1:-1] or costs),
        waiting=tuple(data / (data + busy) if data + busy > 0 else 0.0 for data, busy in sums),
        ratio=tuple(data / busy if busy > 0 else math.inf for data, busy in sums),
        bursts=tuple(median(data) < 0.5 * mean(data) for data in data_s),
    )
