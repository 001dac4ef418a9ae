"""Find better shares close to the present ones by measuring them: what a line through far shares can't tell.

A rank's own seconds are no line where it computes under a quota (they grow in periods), shares a core, or meets tiles of a
kernel; and ranks whose seconds scatter wait for each other in turns, also where they are equal on the average. So the
seconds of each step are kept for each split that ran since the last change of a rank's speed. They give

* **a proposal**: the shares n' that would have made the steps under the present shares n shortest, were the seconds t of a
  rank proportional to its samples: the least mean over steps of max_r t_r * n'_r / n_r. In the optimum a rank that scatters
  more has time to spare. Where ranks have fixed cost this undershoots, and the next proposal goes on from there;
* **a verdict** on each move, whoever proposed it: where whole steps did not become shorter, the shares go back, and the next
  proposal comes later and goes half as far. A move of short steps must bring part of what was expected of it (short_steps.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from evenload.balance.decision import Seconds
from evenload.balance.rank_costs import MANY_RANKS
from evenload.balance.split import Caps, scale_shares, split_batch
from evenload.balance.values import Cost

_BLOCK = 4
"""Errors are those of means of so many steps, because steps that follow each other are alike."""
_MOST_STEPS = 128
_MOST_TIMES = 8192
"""Of all ranks that are kept for a split: with many ranks fewer steps."""
_FEWEST_STEPS = 8
_MOST_FACTOR = 1.6
"""A step longer than its median by more is a spike, and counts as so long."""
_SURE = 3.0
_LEAST_GAIN = 0.01
_CHECK_AT = frozenset((8, 16, 24, 32, 48, 64, 96, 128))
_CHECK_EVERY = 64
_VERDICT_STEPS = 24
"""After so many steps the lower mean decides; before, a difference of `_CLEAR` standard errors."""
_CLEAR = 2.0
_DOUBT = 0.5
"""By so many standard errors a step may be longer after a move that stays: going back has a price too."""
_DRIFT_STEPS = 32
_SURELY = 2.0
_LAST_VERDICT_STEPS = 48
"""A move that must bring a gain is taken back if that isn't sure after so many steps."""
_MOST_REJECTED = 6
_NEAR, _FAR = 0.75, 2.0
"""Of the way to rejected shares: what goes between so far and so far is rejected too."""
_MOST_CHANGE = 0.125
"""Part of a rank's share that a proposal takes or adds: larger moves are those of the line."""
_WAIT = 16
"""Steps before another proposal after the first rejected one; doubles with each."""
_WAIT_AFTER_NO_GAIN = 64
"""The same after a move that had to bring a gain."""
_MEMORY = 512
"""Steps after which what was measured under another split holds no longer."""
_SPARES = (0.0, 0.5, 1.0, 1.5, 2.0)
"""Candidates leave each rank so many standard deviations of its seconds to spare."""

Key = tuple[tuple[int, ...], int]
"""Shares and K."""


class SplitTimes:
    """The steps under one split."""

    def __init__(self, step: int, world_size: int) -> None:
        self.last_step = step
        self.num_steps = 0
        most = max(_FEWEST_STEPS, min(_MOST_STEPS, _MOST_TIMES // world_size))
        self.rank_s: deque[Seconds] = deque(maxlen=most)
        """Own seconds of each rank: of single steps also where steps are merged, because ranks wait in single ones."""
        self.step_s: deque[float] = deque(maxlen=_MOST_STEPS)

    def add(self, step: int, rank_s: Sequence[Seconds], step_s: float) -> None:
        self.last_step = step
        self.num_steps += 1
        self.rank_s.extend(rank_s)
        self.step_s.append(step_s)

    def estimate_s(self) -> tuple[float, float]:
        """Return the mean seconds of a step and its standard error."""
        return mean_and_error(_without_spikes(self.step_s))


def _without_spikes(values: Sequence[float] | deque[float]) -> list[float]:
    most = _MOST_FACTOR * median(values)
    return [min(value, most) for value in values]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and its standard error by the scatter of blocks, at least that by the scatter of single values."""
    error = stdev(values) / math.sqrt(len(values))
    blocks = [fmean(values[i : i + _BLOCK]) for i in range(0, len(values) - _BLOCK + 1, _BLOCK)]
    return fmean(values), max(error, stdev(blocks) / math.sqrt(len(blocks))) if len(blocks) > 1 else error


@dataclass(frozen=True)
class Proposal:
    """Other shares at the same K, and what is expected of them."""

    shares: tuple[int, ...]
    waiting: float
    """Part of the present steps that the ranks wait, on the average, weighted by their shares."""
    gain: float


@dataclass(frozen=True)
class Verdict:
    """Effect of a move on the mean seconds of a step."""

    before_s: float
    now_s: float
    back: Key | None
    """The split to go back to; None where the move stays."""


class NeighbourSearch:
    """Keeps the steps under each split since the last change of a speed, and judges moves."""

    def __init__(self) -> None:
        self._times: dict[Key, SplitTimes] = {}
        self._judged: Key | None = None
        """The split from which the present one was moved to, until the verdict."""
        self._least_saved_s: float | None = None
        """Seconds that the move must save; None if it stays unless steps become longer."""
        self._rejected: list[tuple[int, ...]] = []
        self._num_rejected = 0
        self._not_before = 0
        self._running: tuple[Key, Generator[None, None, Proposal | None]] | None = None
        """The candidates that are being tried, of which split."""

    def forget(self, *, is_new: bool) -> None:
        """Discard what was measured: a rank's speed changed. With `is_new`, so much that rejected moves may help now."""
        self._times.clear()
        self._judged = self._running = None
        if is_new:
            self._rejected.clear()
            self._num_rejected = 0
            self._not_before = 0

    def add(self, step: int, key: Key, rank_s: Sequence[Seconds], step_s: float) -> None:
        """Add a step: own seconds of each rank (of each step of a block), and the seconds of the whole step."""
        times = self._times.get(key)
        if times is None or step - times.last_step > _MEMORY:
            # The first step under new shares allocates and loads: it doesn't count.
            self._times[key] = SplitTimes(step, len(key[0]))
            return
        times.add(step, rank_s, step_s)

    @property
    def before(self) -> Key | None:
        """The split that the last move is judged against; None where none is."""
        return self._judged

    def begin(self, before: Key, after: Key, least_saved_s: float | None = None) -> None:
        """Judge `after` against `before` from now on. A move back to what is being judged decides that.

        With `least_saved_s` steps must surely become so much shorter; without, they must not become longer.
        """
        if self._judged is not None and _along(after[0], before[0], self._judged[0]) > 0.5:
            self._reject(self._times[before].last_step if before in self._times else self._not_before, before)
        self._judged = before if before != after and self._known(before) is not None else None
        self._least_saved_s = least_saved_s
        self._running = None

    def forget_move(self) -> None:
        """Let the last move stay, whatever it does."""
        self._judged = None

    def verdict(self, step: int, key: Key) -> Verdict | None:
        """Return what the move to `key` did, once; None while that is open, or can't be said."""
        if self._judged is None:
            return None
        now, before = self._known(key), self._times[self._judged]
        if now is None or now.num_steps % _BLOCK:
            return None
        (now_s, now_error_s), (before_s, before_error_s) = now.estimate_s(), before.estimate_s()
        error_s = math.hypot(now_error_s, before_error_s)
        if self._least_saved_s is not None:
            saved_s = before_s - now_s
            is_gain = saved_s >= self._least_saved_s and saved_s > _SURELY * error_s
            is_open = now.num_steps < _LAST_VERDICT_STEPS and saved_s + _CLEAR * error_s >= self._least_saved_s
            if now.num_steps < _VERDICT_STEPS or (is_open and not is_gain):
                return None
            back, self._judged = self._judged, None
            if is_gain:
                self._num_rejected = max(0, self._num_rejected - 1)
                return Verdict(before_s, now_s, None)
            self._reject(step, key, _WAIT_AFTER_NO_GAIN)
            return Verdict(before_s, now_s, back)
        is_clear = abs(now_s - before_s) > _CLEAR * error_s
        if not is_clear and now.num_steps < _VERDICT_STEPS:
            return None
        back, self._judged = self._judged, None
        if _is_drifting(now.step_s) or _is_drifting(before.step_s):
            return None
        if now_s < before_s + _DOUBT * error_s:
            if is_clear:
                self._num_rejected = max(0, self._num_rejected - 1)
            return Verdict(before_s, now_s, None)
        self._reject(step, key)
        return Verdict(before_s, now_s, back)

    def seen_s(self, key: Key) -> float | None:
        """Return the mean seconds of a step under a split; None with too few."""
        times = self._known(key)
        return times.estimate_s()[0] if times is not None else None

    def may_try(self, step: int) -> bool:
        """Return whether enough steps have passed since the last rejected move."""
        return step >= self._not_before

    def _reject(self, step: int, key: Key, wait: int = _WAIT) -> None:
        self._rejected.append(key[0])
        self._num_rejected = min(self._num_rejected + 1, _MOST_REJECTED)
        self._not_before = step + wait * 2**self._num_rejected

    def is_known_worse(self, key: Key, than: Key) -> bool:
        """Return whether `key` has been measured and takes as long as `than`, or lies where that was found."""
        for shares in self._rejected[-_MOST_REJECTED:]:
            if _NEAR <= _along(key[0], than[0], shares) <= _FAR:
                return True
        one, other = self._known(key), self._known(than)
        if one is None or other is None:
            return False
        return one.estimate_s()[0] > (1 - _LEAST_GAIN / 2) * other.estimate_s()[0]

    def forbids(self, step: int, key: Key, now: Key) -> bool:
        """Return whether a move from `now` to `key` must wait: it follows a rejected one, or takes back what is being judged."""
        if step < self._not_before or (self._judged and _along(key[0], now[0], self._judged[0]) > 0):
            return True
        return self.is_known_worse(key, now)

    def propose(self, step: int, key: Key, caps: Caps, quantum: int) -> Proposal | None:
        """Return shares that should make the step shorter, where the waiting is more than noise.

        Of many ranks, each call tries one candidate, so that no step waits for all.
        """
        times = self._known(key)
        if times is None or step < self._not_before:
            return None
        if self._running is None or self._running[0] != key:
            if times.num_steps not in _CHECK_AT and times.num_steps % _CHECK_EVERY:
                return None
            self._running = key, self._candidates(step, key, times, caps, quantum)
        try:
            while True:
                next(self._running[1])
                if len(key[0]) > MANY_RANKS:
                    return None
        except StopIteration as found:
            self._running = None
            best: Proposal | None = found.value
            return best

    def _candidates(
        self, step: int, key: Key, times: SplitTimes, caps: Caps, quantum: int
    ) -> Generator[None, None, Proposal | None]:
        """Try the candidates, one after each `yield`; return the best."""
        shares, count = key
        present = [rank for rank, share in enumerate(shares) if share]
        if len(present) < 2:
            return None
        per_sample = [
            [time_s / max(shares[rank], count) for time_s in _without_spikes([one or 0.0 for one in column])]
            for rank, column in enumerate(zip(*times.rank_s, strict=True))
        ]
        before_s = [max(row) for row in zip(*_scaled(per_sample, shares, count), strict=True)]
        levels = [_mean_and_scatter(per_sample[rank]) for rank in present]
        present_caps = None if caps is None else [caps[rank] for rank in present]
        best: Proposal | None = None
        for spare in _SPARES:
            yield
            costs = [Cost(0.0, mean_s + spare * scatter_s) for mean_s, scatter_s in levels]
            split = split_batch(sum(shares), costs, present_caps, count, quantum)
            new = self._nearer(shares, dict(zip(present, split.shares, strict=True)), quantum)
            if new == shares or any(not new[rank] for rank in present) or self.forbids(step, (new, count), key):
                continue
            after_s = [max(row) for row in zip(*_scaled(per_sample, new, count), strict=True)]
            saved_s, error_s = mean_and_error([old - new_s for old, new_s in zip(before_s, after_s, strict=True)])
            gain = saved_s / fmean(before_s)
            if gain > (best.gain if best else _LEAST_GAIN) and saved_s > _SURE * error_s:
                own = (shares[rank] * level[0] * shares[rank] for rank, level in zip(present, levels, strict=True))
                own_s = sum(own) / sum(shares)
                best = Proposal(new, max(0.0, 1 - own_s / times.estimate_s()[0]), gain)
        return best

    def _known(self, key: Key) -> SplitTimes | None:
        times = self._times.get(key)
        return times if times is not None and times.num_steps >= _FEWEST_STEPS else None

    def _nearer(self, shares: tuple[int, ...], found: dict[int, int], quantum: int) -> tuple[int, ...]:
        """Return shares on the way to those found: at most `_MOST_CHANGE` of each, half of it after each rejected move."""
        most = max((abs(new - shares[rank]) / max(shares[rank] * _MOST_CHANGE, 1) for rank, new in found.items()))
        parts = max(1.0, most) * 2**self._num_rejected
        if parts == 1 or quantum > 1:
            return tuple(found.get(rank, 0) for rank in range(len(shares)))
        near = [round(1000 * (old + (found.get(rank, 0) - old) / parts)) for rank, old in enumerate(shares)]
        return scale_shares(near, sum(shares))


def _mean_and_scatter(values: Sequence[float]) -> tuple[float, float]:
    # Not by statistics.pstdev, whose exact fractions take some 50 us.
    mean = fmean(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


def _along(new: Sequence[int], now: Sequence[int], goal: Sequence[int]) -> float:
    """Return how far `new` goes on the way from `now` to `goal`: 1 is all of it, below 0 is away from it."""
    way = [there - here for there, here in zip(goal, now, strict=True)]
    length = sum(part * part for part in way)
    return sum((to - here) * part for to, here, part in zip(new, now, way, strict=True)) / length if length else 0.0


def _is_drifting(step_s: Sequence[float] | deque[float]) -> bool:
    """Return whether the last steps become longer or shorter by themselves: then those of before are no measure."""
    recent = _without_spikes(list(step_s)[-_DRIFT_STEPS:])
    half = len(recent) // 2
    (early_s, early_error_s), (late_s, late_error_s) = mean_and_error(recent[:half]), mean_and_error(recent[half:])
    return abs(late_s - early_s) > _CLEAR * math.hypot(early_error_s, late_error_s)


def _scaled(per_sample: Sequence[Sequence[float]], shares: Sequence[int], count: int) -> list[list[float]]:
    return [[max(share, count) * time_s for time_s in column] for share, column in zip(shares, per_sample, strict=True)]
