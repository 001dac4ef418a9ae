"""Choose the number of loader workers of each rank from the costs of its steps. Pure: no clock, no torch.

Note [Objective]
  Minimise the seconds of the whole step per sample of the global batch. A rank's own seconds would not do: workers take cores
  that other ranks compute on, so one rank's gain may be another's loss.

Note [Search]
  All ranks search together. Each knows the seconds and settings of every rank (they travel in the exchange of a step), so all
  make the same decision without further communication. The search begins with the settings of the DataLoaders, mostly
  without workers: that shows the time of reading beside computing, hence the number of workers that could keep up, on each
  rank for itself. Then the ranks that still wait double theirs, deepen the queue where waits come in bursts, and all halve
  while nothing is lost by it. Each setting is measured for `WINDOW_STEPS`, and longer where steps are short. Samples are
  keyed by their global position, so they are the same whichever process reads them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from statistics import mean, median

SKIPPED_STEPS = 2
"""Steps ignored after a change: new workers start, and the first samples come late."""
WINDOW_STEPS = 8
WINDOW_S, LONGEST_WINDOW_STEPS = 0.4, 16
"""Short steps scatter more: measure for this many seconds, up to this many steps."""
NEGLIGIBLE = 0.02
"""Below this part of a rank's own seconds, waiting is no reason to try more workers."""
SAME = 0.02
"""Relative difference of costs that count as equal; the setting with fewer workers is then used."""
MOST_PREFETCH = 8
PINNING_PAYS = 0.9
"""Pin memory where copies to the GPU take less than this part of the usual time."""
WATCH_STEPS = 20
REOPEN = 0.10
"""Search again where a rank waits for this part of its seconds, and for twice as much as when the setting was chosen."""
_MAX_SEARCHES = 4
_ANY_NUMBER = 1 << 30


class SettingsOrigin(IntEnum):
    USER = 0
    """Set by the user, in the DataLoader."""
    TRIAL = 1
    """Under trial in the search."""
    CHOSEN = 2
    """Chosen by the search, which has ended."""


@dataclass(frozen=True)
class ReadSettings:
    num_workers: int = 0
    prefetch: int = 0
    """Tasks (parts of a micro-batch) prefetched by each worker; 0 without workers."""
    pinned: bool = False
    """Workers return samples in pinned memory."""
    origin: SettingsOrigin = SettingsOrigin.USER

    @property
    def depth(self) -> int:
        return self.num_workers * self.prefetch

    def code(self) -> float:
        return float(((self.num_workers * 64 + min(self.prefetch, 63)) * 2 + self.pinned) * 4 + self.origin)

    def __str__(self) -> str:
        if not self.num_workers:
            return "no loader workers"
        pinned = ", pinned memory" if self.pinned else ""
        return (
            f"{self.num_workers} loader worker{'s' if self.num_workers > 1 else ''} (prefetch {self.prefetch}{pinned})"
        )


@functools.lru_cache(maxsize=256)
def decode_settings(code: float) -> ReadSettings:
    rest, origin = divmod(int(code), 4)
    rest, pinned = divmod(rest, 2)
    num_workers, prefetch = divmod(rest, 64)
    return ReadSettings(num_workers, prefetch, bool(pinned), SettingsOrigin(origin))


@dataclass(frozen=True)
class StepCost:
    seconds: float
    num_samples: int
    data_s: Sequence[float]
    """Each rank's wait for samples; without workers its reading."""
    busy_s: Sequence[float]
    """Each rank's forward, backward and optimizer."""
    readings: tuple[ReadSettings, ...]

    @property
    def sizes(self) -> Sizes:
        first = self.readings[0]
        if self.readings.count(first) == len(self.readings):  # nearly always, and of many ranks much faster
            return ((first.num_workers, first.prefetch),) * len(self.readings)
        return tuple((reading.num_workers, reading.prefetch) for reading in self.readings)


Sizes = tuple[tuple[int, int], ...]
"""Workers and prefetch of each rank."""


@dataclass(frozen=True)
class _TrialResult:
    cost_s: float
    """Seconds per sample: the mean over the window without its slowest and fastest step."""
    waiting: tuple[float, ...]
    """Part of each rank's own seconds spent waiting for samples."""
    ratio: tuple[float, ...]
    """Seconds of waiting over seconds of computing, of each rank."""
    bursts: tuple[bool, ...]
    """True for a rank where most steps wait little, and a few much."""

    def is_late(self, rank: int) -> bool:
        return self.waiting[rank] >= NEGLIGIBLE


class _Change(Enum):
    """A change of settings; its effect on a rank depends on that rank's waiting."""

    KEEP_UP = 1
    """From no workers to as many as read as fast as the rank computes."""
    ONE = 2
    DOUBLE = 3
    DEEPEN = 4
    HALVE = 5


class WorkerTuner:
    def __init__(self, first: ReadSettings, most_workers: int, rank: int = 0) -> None:
        self.reading = replace(first, origin=SettingsOrigin.TRIAL)
        self._rank = rank
        self._most = max(most_workers, first.num_workers)
        self._left_out = SKIPPED_STEPS
        self._window: list[StepCost] = []
        self._sizes: Sizes = ()
        """Sizes that the window was measured with."""
        self._tried: dict[Sizes, _TrialResult] = {}
        self._changes: set[tuple[Sizes, _Change]] = set()
        """Changes made so far, with the sizes that they started from."""
        self._num_searches = 1
        self._refused = False

    def observe(self, cost: StepCost) -> None:
        """Record one step of all ranks; `reading` may change after it, on all ranks at once."""
        if cost.sizes != self._sizes:
            self._left_out = SKIPPED_STEPS if self._sizes else self._left_out
            self._sizes, self._window = cost.sizes, []
        if self._left_out > 0:
            self._left_out -= 1
            return
        if cost.num_samples <= 0 or self._refused:
            return
        self._window.append(cost)
        chosen = self.reading.origin is SettingsOrigin.CHOSEN
        if not _is_enough(self._window, WATCH_STEPS if chosen else WINDOW_STEPS):
            return
        trial, self._window = _summarize(self._window), []
        if chosen:
            if not self._is_worse(trial, self._tried.get(self._sizes)):
                return
            self._num_searches += 1
            self._tried.clear()
            self._changes.clear()
        self._tried[self._sizes] = trial
        best = best_sizes(self._tried)
        change = self._next_change(best)
        if change is None:
            self._set_size(best[self._rank], SettingsOrigin.CHOSEN)
            return
        self._changes.add((best, change))
        self._set_size(
            _apply_change(best[self._rank], change, self._tried[best], self._rank, self._most), SettingsOrigin.TRIAL
        )

    def follow(self, rank: int) -> None:
        """Continue as another rank, among other ranks: the search begins anew from the present settings."""
        self._rank = rank
        self._left_out, self._window, self._sizes = SKIPPED_STEPS, [], ()
        self._tried.clear()
        self._changes.clear()
        self.reading = replace(self.reading, origin=SettingsOrigin.TRIAL)

    def pin(self) -> None:
        self.reading = replace(self.reading, pinned=True)

    def disable_workers(self) -> None:
        """Use no workers from now on, because they failed where the rank itself can read the samples."""
        self._refused = True
        self._set_size((0, 0), SettingsOrigin.CHOSEN)

    def _set_size(self, size: tuple[int, int], origin: SettingsOrigin) -> None:
        self.reading = replace(self.reading, num_workers=size[0], prefetch=size[1], origin=origin)

    def _is_worse(self, trial: _TrialResult, before: _TrialResult | None) -> bool:
        waited = max(before.waiting) if before is not None else 0.0
        return self._num_searches < _MAX_SEARCHES and max(trial.waiting) >= max(REOPEN, 2 * waited)

    def _next_change(self, best: Sizes) -> _Change | None:
        """Return the change to try next, from the best sizes so far; None where the search is over."""
        trial = self._tried[best]
        late = [rank for rank in range(len(best)) if trial.is_late(rank)]
        changes: list[_Change] = []
        if late and not any(num_workers for num_workers, _ in best):
            changes += [_Change.KEEP_UP, _Change.ONE]  # a single worker, where several only take the rank's cores
        elif late:
            changes.append(_Change.DOUBLE)
            if any(trial.bursts[rank] and best[rank][0] and best[rank][1] < MOST_PREFETCH for rank in late):
                changes.append(_Change.DEEPEN)
        if any(num_workers for num_workers, _ in best):
            changes.append(_Change.HALVE)
        return next((change for change in changes if not self._is_known(best, change)), None)

    def _is_known(self, best: Sizes, change: _Change) -> bool:
        """Return True if the change was made before, or leads to sizes that were measured."""
        trial = self._tried[best]
        target = tuple(_apply_change(size, change, trial, rank, _ANY_NUMBER) for rank, size in enumerate(best))
        return (best, change) in self._changes or target in self._tried


def _apply_change(size: tuple[int, int], change: _Change, trial: _TrialResult, rank: int, most: int) -> tuple[int, int]:
    num_workers, prefetch = size
    is_late = trial.is_late(rank)
    match change:
        case _Change.KEEP_UP if is_late:
            return _power_of_two(trial.ratio[rank], most), 2
        case _Change.ONE if is_late:
            return min(1, most), 2
        case _Change.DOUBLE if is_late:
            return min(max(1, 2 * num_workers), most), prefetch or 2
        case _Change.DEEPEN if is_late and num_workers:
            return num_workers, min(2 * prefetch, MOST_PREFETCH)
        case _Change.HALVE:
            return (num_workers // 2, prefetch) if num_workers > 1 else (0, 0)
    return size


def _power_of_two(ratio: float, most: int) -> int:
    wanted = 1 << math.ceil(math.log2(max(1.0, min(ratio, 1024.0))))
    return max(1, min(wanted, most))


def best_sizes(tried: Mapping[Sizes, _TrialResult]) -> Sizes:
    """Return the cheapest sizes; among equal costs those with the fewest workers and the shortest queues."""
    least = min(trial.cost_s for trial in tried.values())
    equal = (sizes for sizes, trial in tried.items() if trial.cost_s <= least * (1 + SAME))
    return min(equal, key=lambda sizes: (sum(num for num, _ in sizes), sum(ahead for _, ahead in sizes), sizes))


def _is_enough(window: list[StepCost], least_steps: int) -> bool:
    if len(window) < least_steps:
        return False
    return len(window) >= LONGEST_WINDOW_STEPS or sum(cost.seconds for cost in window) >= WINDOW_S


def _summarize(window: list[StepCost]) -> _TrialResult:
    data_s = list(zip(*(cost.data_s for cost in window), strict=True))
    busy_s = list(zip(*(cost.busy_s for cost in window), strict=True))
    sums = [(sum(data), sum(busy)) for data, busy in zip(data_s, busy_s, strict=True)]
    costs = sorted(cost.seconds / cost.num_samples for cost in window)
    return _TrialResult(
        cost_s=mean(costs[1:-1] or costs),
        waiting=tuple(data / (data + busy) if data + busy > 0 else 0.0 for data, busy in sums),
        ratio=tuple(data / busy if busy > 0 else math.inf for data, busy in sums),
        bursts=tuple(median(data) < 0.5 * mean(data) for data in data_s),
    )
