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
from dataclasses import replace
from statistics import median_low

from evenload.balance.cost import CostSample
from evenload.balance.decision import Decision, Observation, describe_shares, explain_move, format_seconds
from evenload.balance.drift import SpeedChange, SpeedTracker, gain_error, slowest_seen_s
from evenload.balance.left_out import LEAD_STEPS, TRIAL_STEPS, LeftOut, ReturnTrial, check_may_leave
from evenload.balance.neighbours import NeighbourSearch
from evenload.balance.split import Caps, Split, even_shares, num_micro, scale_shares, slowest_s, split_batch
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
_LEAST_HELP = 0.02
"""A rank that is tried returns if the steps become so much shorter."""
_REPORTED_CHANGE = 1.1
_LOST_AFTER = 32
"""A decision that hasn't appeared after so many steps was not carried out; what is measured holds."""


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
        may_leave: Sequence[bool] | None = None,
    ) -> None:
        """``caps``: most samples of each rank in one micro-batch. ``shares`` and ``num_micro_batches`` are what the run starts
        with; by default equal shares and the smallest K that the caps allow. The first ``num_warmup`` observations are left
        out, because a run's first step allocates and tunes. ``may_leave``: the ranks that leave the step where their share is 0
        (not rank 0); the others compute samples of weight 0 then, and the step waits for them.
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
        self.may_leave = check_may_leave(may_leave, world_size)
        """May be set at any time, when it turns out who has to stay; such a rank then comes back and reports its seconds."""
        self.left_out = LeftOut(world_size)
        self._trial: ReturnTrial | None = None

    @property
    def costs(self) -> tuple[Cost, ...] | None:
        """The cost of each rank at the last fit, less and less certain for one that is out; None before the first fit."""
        if not self._has_fits:
            return None
        known = [track.fit.cost if track.has_steps else None for track in self._tracks]
        # A rank that never ran (out since a resume) is taken as fast as the median of the others.
        typical_s = median_low(cost.per_sample_s for cost in known if cost is not None)
        return tuple(self.left_out.aged(rank, cost or Cost(0.0, typical_s)) for rank, cost in enumerate(known))

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
        whole_s = observation.step_s or max(time_s for time_s in observation.seconds if time_s is not None)
        self.left_out.observe(observation.seconds, whole_s)
        if under != self._under:
            before = self._under[0] if self._under else under[0]
            self._resized = tuple(new != old for new, old in zip(under[0], before, strict=True))
            self._under, self._num_under, self._under_since = under, 0, observation.step
        self._num_under += 1
        self._num_since_move += 1
        if self._num_since_move % _REVERSED_WITHIN == 0:
            self._num_reversals = max(0, self._num_reversals - 1)
        if (rank := self.left_out.recalled(self.may_leave)) is not None:
            what = f"rank {rank} has to stay in the step"
            return self._move(Split(*under, 0.0), "returned", rank, None, what, self._expected_s())
        has_changed, is_of_speed = self._add(observation)
        if is_of_speed:
            self._search.forget(is_new=bool(self._reported()))
        else:
            self._search.add(observation.step, under, tuple(time_s or 0.0 for time_s in observation.seconds), whole_s)
        big = has_changed and any(abs(math.log(c.factor)) > math.log(_BIG_CHANGE) for c in self._changes.values())
        self._num_since_change = 0 if big else self._num_since_change + 1
        if self._trial is not None:
            return self._observe_trial(self._trial, observation, whole_s)
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
        if has_changed or not self._has_fits:
            return None
        return self._try_return(whole_s) or self._try_neighbours(observation.step)

    def set_caps(self, caps: Caps) -> Decision | None:
        """Set new limits of memory; return shares that keep them if the present ones don't.

        With nothing measured the shares stay and K rises; otherwise shares and K are what is fastest within the limits.
        """
        self._caps, self._trial = caps, None
        self._search.forget(is_new=True)
        needed = num_micro(self.shares, caps)
        if needed <= self.num_micro:
            return None
        over = next(r for r, cap in enumerate(caps or ()) if cap is not None and self.shares[r] > self.num_micro * cap)
        split = Split(self.shares, needed, 0.0)
        if self._has_fits:
            split = self._split(list(self.costs or ()))
        cap = caps[over] if caps else None
        what = f"rank {over} has memory for {cap} samples in a micro-batch"
        return self._move(split, "memory", over, None, what, self._expected_s())

    def _is_telling(self, observation: Observation) -> bool:
        for share, time_s in zip(observation.shares, observation.seconds, strict=True):
            if not (0 < time_s < math.inf if time_s is not None else not share):
                return False
        if observation.left_out or observation.seconds[0] is None:
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
            if time_s is None or (self._trial is not None and rank == self._trial.rank and not self._trial.num_seen):
                continue  # it is out, or warms up
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
        costs = self._refit()
        before_s = self._expected_s()
        split = self._split(costs)
        self._ask_those_out(costs, split)
        if (idle := self._idle(split)) is not None:
            needs = format_seconds(costs[idle].predict_s(0, self.num_micro))
            what = f"rank {idle} needs {needs} for its first samples and is left out"
            return self._move(Split(self.shares, self.num_micro, 0.0), "left_out", idle, None, what, before_s)
        if split.num_micro != self.num_micro and num_micro(self.shares, self._caps) <= self.num_micro:
            stay = self._split(costs, self.num_micro)
            if split.expected_s > (1 - _LEAST_MICRO_GAIN) * stay.expected_s:
                split = stay
        gain = 1 - split.expected_s / before_s
        # Where both splits have been run, what they took counts for more than the line through them: time may grow in
        # steps (a quota's periods, tiles of a kernel), and then a fit of either sends us to the other and back for ever.
        seen_s = slowest_seen_s(self._tracks, split.shares, split.num_micro, self.may_leave)
        seen_before_s = slowest_seen_s(self._tracks, self.shares, self.num_micro, self.may_leave)
        if seen_s is not None and seen_before_s is not None:
            gain = min(gain, 1 - seen_s / seen_before_s)
        # The first look under new shares shows whether the move helped; it may be followed up on weaker evidence, once.
        sure, least = _SURE, _LEAST_GAIN
        if self._num_under == _FIRST_LOOK and self._last_kind in _FOLLOWED_UP:
            sure, least = _SURE_AFTER_MOVE, _LEAST_GAIN_AFTER_MOVE
        elif self._num_since_change < _FIRST_LOOK:
            sure, least = _SURE_AFTER_CHANGE, _LEAST_GAIN_AFTER_MOVE
        if gain < max(least, sure * gain_error(self._tracks, self.shares, self.num_micro, self.may_leave)):
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
        idle_s = {
            r: track.fit.cost.predict_s(0, split.num_micro) for r, track in enumerate(self._tracks) if self._is_in(r)
        }
        word = "again " if self._is_measured else ""
        usual = "refined" if self._is_measured else "measured", f"measured {word}up to step {step}"
        why = explain_move(self.shares, split.shares, self._reported(), idle_s, usual)
        return self._move(split, *why, before_s)

    def _try_neighbours(self, step: int) -> Decision | None:
        if not self._is_measured:
            return None
        found = self._search.propose(step, (self.shares, self.num_micro), self._caps, self.quantum)
        if found is None:
            return None
        before_s = self._expected_s()
        what = f"ranks wait {found.waiting:.0%} of the time"
        return self._move(
            Split(found.shares, self.num_micro, (1 - found.gain) * before_s), "refined", None, None, what, before_s
        )

    def _idle(self, split: Split) -> int | None:
        """Return a rank that computes with a share of 0 though it may leave: the run began so, or it had to stay until now."""
        if self._num_under <= _FIRST_LOOK or (self.shares, self.num_micro) != self._under:
            return None
        ranks = range(1, len(self.shares))
        return next(
            (r for r in ranks if self.may_leave[r] and self._is_in(r) and not self.shares[r] + split.shares[r]), None
        )

    def _ask_those_out(self, costs: Sequence[Cost], without: Split) -> None:
        """Try ranks that are out at once where they would help by what was last known, because the others are slower now."""
        if self.left_out.ranks:
            everyone = split_batch(self.num_samples, costs, self._caps, None, self.quantum, self.may_leave)
            for rank in self.left_out.ranks:
                if everyone.shares[rank] and everyone.expected_s < (1 - 2 * _LEAST_HELP) * without.expected_s:
                    self.left_out.ask(rank)

    def _try_return(self, step_s: float) -> Decision | None:
        """Let a rank that is out return for some steps, where the budget allows it."""
        if not self.left_out.ranks:
            return None
        trial_share = max(self.num_micro, self.quantum)
        rank = self.left_out.due(lambda r: (self.costs or ())[r].predict_s(trial_share, self.num_micro) - step_s)
        if rank is None or not self.may_leave[rank] or trial_share >= self.num_samples:
            return None
        costs = list(self.costs or ())
        rest = self._split(costs, self.num_micro, self.num_samples - trial_share)
        shares = tuple(trial_share if r == rank else share for r, share in enumerate(rest.shares))
        if num_micro(shares, self._caps) > self.num_micro:
            return None
        before_s = self._expected_s()
        before = self.shares, self.num_micro
        self._trial = ReturnTrial(rank, shares, before, self._search.seen_s(before) or step_s)
        self.left_out.begin(rank)
        self._tracks[rank].begin_anew()
        what = f"rank {rank} is tried again for {TRIAL_STEPS} steps"
        return self._move(Split(shares, self.num_micro, before_s), "trial", rank, None, what, before_s)

    def _observe_trial(self, trial: ReturnTrial, observation: Observation, step_s: float) -> Decision | None:
        if observation.shares != trial.shares or observation.seconds[trial.rank] is None:
            trial.num_waiting += 1
            if trial.num_waiting <= _LOST_AFTER:
                return None
            self._trial = None
            self.left_out.end(trial.rank, returned=False)
            (self.shares, self.num_micro) = trial.before
            return None
        trial.num_seen += 1
        self.left_out.charge(step_s - trial.usual_s)
        if trial.num_seen < TRIAL_STEPS:
            return None
        self._trial = None
        costs = self._refit()
        with_it, without_s = self._split(costs), slowest_s(costs, *trial.before, self.may_leave)
        helps = with_it.shares[trial.rank] > 0 and with_it.expected_s < (1 - _LEAST_HELP) * without_s
        self.left_out.end(trial.rank, returned=helps)
        if helps:
            return self._move(with_it, "returned", trial.rank, None, f"rank {trial.rank} can help again", without_s)
        needs = format_seconds(costs[trial.rank].predict_s(0, self.num_micro))
        self.left_out.charge(LEAD_STEPS * (step_s - trial.usual_s))
        what = f"rank {trial.rank} needs {needs} for its first samples and stays left out"
        return self._move(Split(*trial.before, without_s), "trial", trial.rank, None, what, without_s)

    def _go_back(self, key: tuple[tuple[int, ...], int]) -> Decision:
        shares, num_micro = key
        what = "the last move did not make the step shorter"
        return self._move(Split(shares, num_micro, 0.0), "refined", None, None, what, self._expected_s())

    def _refit(self) -> list[Cost]:
        """Fit all ranks with steps; return the cost of each."""
        present = [track for track in self._tracks if track.has_steps]
        noises = sorted(track.refit().noise for track in present)
        for track in present:
            track.refit(noises[len(noises) // 2])
        self._has_fits = True
        return list(self.costs or ())

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

    def _is_in(self, rank: int) -> bool:
        return rank not in self.left_out

    def _split(self, costs: Sequence[Cost], num_micro: int | None = None, num_samples: int | None = None) -> Split:
        """Split over the ranks that are not out."""
        ranks = [rank for rank in range(len(costs)) if self._is_in(rank)]
        caps = None if self._caps is None else [self._caps[rank] for rank in ranks]
        found = split_batch(
            num_samples or self.num_samples,
            [costs[rank] for rank in ranks],
            caps,
            num_micro,
            self.quantum,
            [self.may_leave[rank] for rank in ranks],
        )
        shares = dict(zip(ranks, found.shares, strict=True))
        return replace(found, shares=tuple(shares.get(rank, 0) for rank in range(len(costs))))

    def _expected_s(self) -> float:
        costs = self.costs
        return slowest_s(costs, self.shares, self.num_micro, self.may_leave) if costs is not None else 0.0

    def _reported(self) -> dict[int, SpeedChange]:
        least = math.log(_REPORTED_CHANGE)
        return {rank: change for rank, change in self._changes.items() if abs(math.log(change.factor)) > least}

    def _move(
        self, split: Split, kind: str, rank: int | None, factor: float | None, what: str, before_s: float
    ) -> Decision:
        how = describe_shares(rank, self.shares, split.shares, self.num_micro, split.num_micro)
        before, after = (self.shares, self.num_micro), (split.shares, split.num_micro)
        # Who is in the step is judged by trials.
        self._search.begin(before if kind not in ("trial", "returned", "left_out") else after, after)
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
