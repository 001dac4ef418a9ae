"""Decide when to move shares. No clock, no I/O: the same observations give the same decisions.

One rank holds a `Balancer`, shows it every step, and broadcasts what it decides. A decision holds some steps later, so
observations go on under the old shares for a while: each names the shares it was measured under, and until the decided
ones appear nothing is decided again unless a rank changes meanwhile.

A move must pay: its predicted gain must exceed what the noise of the measurements could produce (`_SURE` standard errors)
and `_LEAST_GAIN`, which stands for the cost of a move (dropped prefetches, allocations of new sizes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from evenload.balance.cost import CostSample
from evenload.balance.drift import SpeedChange, SpeedTracker
from evenload.balance.neighbours import NeighbourSearch
from evenload.balance.split import Caps, Split, even_shares, num_micro, scale_shares, split_batch
from evenload.balance.values import Cost
from evenload.errors import ConfigError

_FIRST_LOOK = 3
_LOOKS = frozenset((_FIRST_LOOK, 6, 12, 24))
_LOOK_EVERY = 32
_BIG_CHANGE = 1.4
_LOOKS_AFTER_CHANGE = frozenset((1, 2, 3, 5, 8, 13, 21))
"""A big change that was seen but didn't pay surely enough yet is looked at again as its steps come in."""
_SURE = 3.5
_SURE_AFTER_CHANGE = 2.0
"""A run of steps out of the band is evidence by itself; the noise must not produce the rest of the gain."""
_SURE_AFTER_MOVE = 1.0
_LEAST_GAIN = 0.01
_LEAST_GAIN_AFTER_MOVE = 0.03
_FOLLOWED_UP = ("slower", "faster", "returned", "left_out")
_REVERSED_WITHIN = 64
"""A move that takes back half or more of one so few steps ago is a reversal. One may be a rank that recovered; from the second
on the cost is no line (a quota's periods, cores that two ranks share), and each halves how far a move goes. So many quiet
steps make up for one."""
_MOST_HALVINGS = 4
_OF_THE_SHARE = 1
"""Seconds that change so few steps after the rank's share did are the share's, and no change of its speed."""
_OVERRULES = 0.15
"""A predicted gain so large is followed though a move there was rejected, or one is being judged."""
_LEAST_MICRO_GAIN = 0.02
_REPORTED_CHANGE = 1.1
_LOST_AFTER = 32
"""A decision that hasn't appeared after so many steps was not carried out; what is measured holds."""


@dataclass(frozen=True)
class Observation:
    """One committed step as measured."""

    step: int
    """Steps since the start of the run; only grows."""
    shares: tuple[int, ...]
    """The shares the step really ran with, also where a newer decision is under way."""
    num_micro: int
    seconds: tuple[float, ...]
    """Each rank's own seconds: compute and optimizer, without waiting for others and without collectives."""
    step_s: float | None = None
    """Seconds of the whole step, waiting and collectives included; None if unknown: then those of the slowest rank count."""
    left_out: bool = False
    """The step doesn't represent the next ones: it compiled, was done again, or wrote a checkpoint."""


@dataclass(frozen=True)
class Decision:
    """New shares, and the reason."""

    shares: tuple[int, ...]
    num_micro: int
    kind: str
    """``measured`` (the first split), ``slower``, ``faster``, ``left_out``, ``returned``, ``refined`` or ``memory``."""
    rank: int | None
    """The rank it is about, None where it is about all."""
    factor: float | None
    """Factor by which the rank became slower or faster, at least 1; None if it didn't change."""
    reason: str
    """A sentence for people."""
    before_s: float
    expected_s: float
    """The same under the new shares."""


class Balancer:
    """Estimates what the ranks cost, and decides when other shares pay."""

    def __init__(
        self,
        num_samples: int,
        world_size: int,
        caps: Caps = None,
        *,
        shares: tuple[int, ...] | None = None,
        num_micro_batches: int | None = None,
        num_warmup: int = 1,
    ) -> None:
        """``caps``: most samples of each rank in one micro-batch. ``shares`` and ``num_micro_batches`` are what the run starts
        with; by default equal shares and the smallest K that the caps allow. The first ``num_warmup`` observations are left
        out, because a run's first step allocates and tunes.
        """
        self.num_samples = num_samples
        self.shares = shares or even_shares(num_samples, world_size)
        if len(self.shares) != world_size or sum(self.shares) != num_samples:
            raise ConfigError(
                f"shares {self.shares} sum to {sum(self.shares)}: expected {world_size} of them, {num_samples} in sum"
            )
        self.num_micro = num_micro_batches or num_micro(self.shares, caps)
        self.quantum = 1
        """Shares are multiples of so many samples: more than 1 where the model is compiled, and each size may cost."""
        self._caps = caps
        self._tracks = [SpeedTracker() for _ in range(world_size)]
        self._num_warmup = num_warmup
        self._under: tuple[tuple[int, ...], int] | None = None
        self._num_under = 0
        self._under_since = 0
        self._resized: tuple[bool, ...] = (False,) * world_size
        """Of each rank whether its share is another than under the shares before."""
        self._num_pending = 0
        self._num_since_change = _LOST_AFTER
        self._changes: dict[int, SpeedChange] = {}
        self._is_measured = False
        self._last_kind: str | None = None
        self._last_delta: tuple[int, ...] = ()
        self._num_since_move = 0
        self._num_reversals = 0
        self._has_fits = False
        self._search = NeighbourSearch()

    @property
    def costs(self) -> tuple[Cost, ...] | None:
        """The cost of each rank at the last fit; None before the first."""
        return tuple(track.fit.cost for track in self._tracks) if self._has_fits else None

    def observe(self, observation: Observation) -> Decision | None:
        """Add one step, in order; return new shares where they pay."""
        if not len(observation.shares) == len(observation.seconds) == len(self._tracks):
            raise ConfigError(
                f"step {observation.step} shows {len(observation.shares)} shares and {len(observation.seconds)} times: "
                f"expected {len(self._tracks)}, one a rank"
            )
        if not self._is_telling(observation):
            return None
        under = (observation.shares, observation.num_micro)
        if under != self._under:
            before = self._under[0] if self._under else under[0]
            self._resized = tuple(new != old for new, old in zip(under[0], before, strict=True))
            self._under, self._num_under, self._under_since = under, 0, observation.step
        self._num_under += 1
        self._num_since_move += 1
        if self._num_since_move % _REVERSED_WITHIN == 0:
            self._num_reversals = max(0, self._num_reversals - 1)
        has_changed, is_of_speed = self._add(observation)
        if is_of_speed:
            self._search.forget(is_new=bool(self._reported()))
        else:
            whole_s = observation.step_s or max(observation.seconds)
            self._search.add(observation.step, under, observation.seconds, whole_s)
        big = has_changed and any(abs(math.log(c.factor)) > math.log(_BIG_CHANGE) for c in self._changes.values())
        self._num_since_change = 0 if big else self._num_since_change + 1
        if under != (self.shares, self.num_micro):
            self._num_pending += 1
            if self._num_pending <= _LOST_AFTER:
                return self._look(observation.step) if has_changed else None
            self.shares, self.num_micro = under
        self._num_pending = 0
        back = self._search.verdict(observation.step, under)
        if back is not None:
            return self._go_back(back)
        since_last = self._num_under - max(_LOOKS)
        if (
            has_changed
            or self._num_under in _LOOKS
            or self._num_since_change in _LOOKS_AFTER_CHANGE
            or (since_last > 0 and since_last % _LOOK_EVERY == 0)
        ):
            decision = self._look(observation.step)
            if decision is not None:
                return decision
        return self._try_neighbours(observation.step) if self._is_measured and not has_changed else None

    def set_caps(self, caps: Caps) -> Decision | None:
        """Set new limits of memory; return shares that keep them if the present ones don't.

        With nothing measured the shares stay and K rises; otherwise shares and K are what is fastest within the limits.
        """
        self._caps = caps
        self._search.forget(is_new=True)
        needed = num_micro(self.shares, caps)
        if needed <= self.num_micro:
            return None
        over = next(r for r, cap in enumerate(caps or ()) if cap is not None and self.shares[r] > self.num_micro * cap)
        split = Split(self.shares, needed, 0.0)
        if self._has_fits:
            split = self._split([track.fit.cost for track in self._tracks])
        cap = caps[over] if caps else None
        what = f"rank {over} has memory for {cap} samples in a micro-batch"
        return self._move(split, "memory", over, None, what, self._expected_s())

    def _is_telling(self, observation: Observation) -> bool:
        if observation.left_out or not all(0 < time_s < math.inf for time_s in observation.seconds):
            return False
        if self._num_warmup > 0:
            self._num_warmup -= 1
            return False
        return sum(observation.shares) == self.num_samples

    def _add(self, observation: Observation) -> tuple[bool, bool]:
        """Return whether seconds of a rank changed, and whether that is a change of its speed."""
        has_changed = is_of_speed = False
        for rank, (track, share, time_s) in enumerate(
            zip(self._tracks, observation.shares, observation.seconds, strict=True)
        ):
            point = CostSample(observation.step, max(share, observation.num_micro), observation.num_micro, time_s)
            if change := track.add(point):
                has_changed = True
                if self._resized[rank] and change.step <= self._under_since + _OF_THE_SHARE:
                    continue
                is_of_speed = True
                before = self._changes.get(rank)
                if before:
                    change = SpeedChange(before.step, before.factor * change.factor)
                self._changes[rank] = change
        return has_changed and self._has_fits, is_of_speed and self._has_fits

    def _look(self, step: int) -> Decision | None:
        noise = sorted(track.refit().noise for track in self._tracks)[len(self._tracks) // 2]
        fits = [track.refit(noise) for track in self._tracks]
        self._has_fits = True
        costs = [fit.cost for fit in fits]
        before_s = self._expected_s()
        split = self._split(costs)
        if split.num_micro != self.num_micro and num_micro(self.shares, self._caps) <= self.num_micro:
            stay = self._split(costs, self.num_micro)
            if split.expected_s > (1 - _LEAST_MICRO_GAIN) * stay.expected_s:
                split = stay
        gain = 1 - split.expected_s / before_s
        # Where both splits have been run, what they took counts for more than the line through them: time may grow in
        # steps (a quota's periods, tiles of a kernel), and then a fit of either sends us to the other and back for ever.
        seen_s, seen_before_s = self._seen_s(split.shares, split.num_micro), self._seen_s(self.shares, self.num_micro)
        if seen_s is not None and seen_before_s is not None:
            gain = min(gain, 1 - seen_s / seen_before_s)
        # The first look under new shares shows whether the move helped; it may be followed up on weaker evidence, once.
        sure, least = _SURE, _LEAST_GAIN
        if self._num_under == _FIRST_LOOK and self._last_kind in _FOLLOWED_UP:
            sure, least = _SURE_AFTER_MOVE, _LEAST_GAIN_AFTER_MOVE
        elif self._num_since_change < _FIRST_LOOK:
            sure, least = _SURE_AFTER_CHANGE, _LEAST_GAIN_AFTER_MOVE
        if gain < max(least, sure * self._gain_error()):
            return None
        now, new = (self.shares, self.num_micro), (split.shares, split.num_micro)
        is_refined = self._is_measured and not self._reported() and gain < _OVERRULES
        if is_refined and self._search.forbids(step, new, now):
            return None
        num_reversals = self._num_reversals + self._is_reversal(split)
        parts = 2 ** min(max(0, num_reversals - 1), _MOST_HALVINGS)
        if parts > 1:
            split = self._go_part_of_the_way(split, parts)
            if gain < parts * _LEAST_GAIN_AFTER_MOVE:
                return None
        self._num_reversals = num_reversals
        return self._move(split, *self._why(split, step), before_s)

    def _try_neighbours(self, step: int) -> Decision | None:
        found = self._search.propose(step, (self.shares, self.num_micro), self._caps, self.quantum)
        if found is None:
            return None
        before_s = self._expected_s()
        what = f"ranks wait {found.waiting:.0%} of the time"
        return self._move(
            Split(found.shares, self.num_micro, (1 - found.gain) * before_s), "refined", None, None, what, before_s
        )

    def _go_back(self, key: tuple[tuple[int, ...], int]) -> Decision:
        shares, num_micro = key
        what = "the last move did not make the step shorter"
        return self._move(Split(shares, num_micro, 0.0), "refined", None, None, what, self._expected_s())

    def _is_reversal(self, split: Split) -> bool:
        """Return whether the split takes back half or more of a recent move."""
        along = sum((n - old) * b for n, old, b in zip(split.shares, self.shares, self._last_delta, strict=False))
        return self._num_since_move <= _REVERSED_WITHIN and along < -0.5 * sum(b * b for b in self._last_delta)

    def _go_part_of_the_way(self, split: Split, parts: int) -> Split:
        if any(bool(new) != bool(old) for new, old in zip(split.shares, self.shares, strict=True)):
            return split  # left out or back again: there is nothing in between
        near = [old * (parts - 1) + new for new, old in zip(split.shares, self.shares, strict=True)]
        shares = scale_shares(near, self.num_samples)
        return split if num_micro(shares, self._caps) > split.num_micro else replace(split, shares=shares)

    def _split(self, costs: Sequence[Cost], num_micro: int | None = None) -> Split:
        return split_batch(self.num_samples, costs, self._caps, num_micro, self.quantum)

    def _expected_s(self) -> float:
        if not self._has_fits:
            return 0.0
        return max(
            track.fit.cost.predict_s(share, self.num_micro)
            for track, share in zip(self._tracks, self.shares, strict=True)
        )

    def _seen_s(self, shares: tuple[int, ...], num_micro: int) -> float | None:
        seen = [
            track.seen_s(max(share, num_micro), num_micro) for track, share in zip(self._tracks, shares, strict=True)
        ]
        known = [time_s for time_s in seen if time_s is not None]
        return max(known) if len(known) == len(seen) else None

    def _gain_error(self) -> float:
        """Standard error of the gain: the slowest rank's time against the mean of all, weighted by their shares."""
        slowest = max(
            range(len(self._tracks)), key=lambda r: self._tracks[r].fit.cost.predict_s(self.shares[r], self.num_micro)
        )
        variance = 0.0
        for rank, (track, share) in enumerate(zip(self._tracks, self.shares, strict=True)):
            part = share / self.num_samples
            weight = 1 - part if rank == slowest else part
            variance += (weight * track.fit.predict_error(share, self.num_micro)) ** 2
        return math.sqrt(variance)

    def _reported(self) -> dict[int, SpeedChange]:
        least = math.log(_REPORTED_CHANGE)
        return {rank: change for rank, change in self._changes.items() if abs(math.log(change.factor)) > least}

    def _why(self, split: Split, step: int) -> tuple[str, int | None, float | None, str]:
        """Return kind, rank, factor, and the first half of the sentence."""
        reported = self._reported()
        moved = [
            (rank, "left_out" if old else "returned")
            for rank, (old, new) in enumerate(zip(self.shares, split.shares, strict=True))
            if bool(old) != bool(new)
        ]
        about = {
            rank: f"needs {_seconds(self._tracks[rank].fit.cost.predict_s(0, split.num_micro))} for its first samples "
            f"and is left out"
            if kind == "left_out"
            else "can help again"
            for rank, kind in moved
        }
        if reported:
            # The rank that changed is the cause, also where another one is left out or brought back for it.
            rank = max(reported, key=lambda r: abs(math.log(reported[r].factor)))
            factor, what = _describe(rank, reported[rank])
            others = "".join(f", rank {r} {text}" for r, text in about.items() if r != rank)
            own = f", {about[rank]}" if rank in about else ""
            kind = dict(moved).get(rank, "slower" if reported[rank].factor > 1 else "faster")
            return kind, rank, factor, what + own + others
        if moved:
            rank, kind = moved[0]
            return kind, rank, None, ", ".join(f"rank {r} {text}" for r, text in about.items())
        if not self._is_measured:
            return "measured", None, None, f"measured up to step {step}"
        return "refined", None, None, f"measured again up to step {step}"

    def _move(
        self, split: Split, kind: str, rank: int | None, factor: float | None, what: str, before_s: float
    ) -> Decision:
        if rank is not None and split.shares[rank] != self.shares[rank]:
            how = f"share {self.shares[rank]} → {split.shares[rank]} of {self.num_samples}"
        elif split.shares != self.shares:
            how = f"shares {_list(self.shares)} → {_list(split.shares)} of {self.num_samples}"
        else:
            how = "shares unchanged"
        if split.num_micro != self.num_micro:
            how += f", micro-batches {self.num_micro} → {split.num_micro}"
        self._search.begin((self.shares, self.num_micro), (split.shares, split.num_micro))
        self._last_delta = (
            tuple(new - old for new, old in zip(split.shares, self.shares, strict=True)) if self._is_measured else ()
        )
        self._num_since_move = 0
        self.shares, self.num_micro = split.shares, split.num_micro
        self._num_pending = 0
        self._num_since_change = _LOST_AFTER
        self._changes.clear()
        self._last_kind = kind
        self._is_measured = self._is_measured or kind != "memory"
        return Decision(
            split.shares, split.num_micro, kind, rank, factor, f"{what}: {how}", before_s, self._expected_s()
        )


def _describe(rank: int, change: SpeedChange) -> tuple[float, str]:
    if change.factor > 1:
        return change.factor, f"rank {rank} slowed {change.factor:.1f}× since step {change.step}"
    return 1 / change.factor, f"rank {rank} sped up {1 / change.factor:.1f}× since step {change.step}"


def _list(shares: tuple[int, ...]) -> str:
    text = ", ".join(str(share) for share in shares[:8])
    return text if len(shares) <= 8 else f"{text}, …"


def _seconds(time_s: float) -> str:
    return f"{time_s:.2f} s" if time_s >= 1 else f"{time_s * 1e3:.3g} ms"
