"""Decide when to move shares. No clock, no I/O: the same observations give the same decisions.

One rank holds a `Balancer`, shows it every step, and broadcasts what it decides. A decision holds some steps later, so
observations go on under the old shares for a while: each names the shares it was measured under, and until the decided
ones appear nothing is decided again unless a rank changes meanwhile.

A move must pay: its predicted gain must exceed what the noise of the measurements could produce (`_SURE` standard errors)
and `_LEAST_GAIN`, which stands for the cost of a move (dropped prefetches, allocations of new sizes). Short steps are merged
into blocks (blocks.py), and there a move must also prove itself (short_steps.py); below, "step" is one of the blocks then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from evenload.balance.blocks import StepBlocks
from evenload.balance.decision import LEAD_STEPS, Decision, Observation, describe_shares, explain_move, format_seconds
from evenload.balance.first_look import FirstLook
from evenload.balance.left_out import TRIAL_STEPS, LeftOut, ReturnTrial, check_may_leave
from evenload.balance.neighbours import NeighbourSearch, Verdict
from evenload.balance.rank_costs import RankCosts
from evenload.balance.reversals import Reversals, num_parts, part_of_the_way
from evenload.balance.short_steps import ShortSteps
from evenload.balance.speed_changes import SpeedChanges
from evenload.balance.split import Caps, Split, even_shares, num_micro, slowest_s, split_batch
from evenload.balance.values import Cost
from evenload.errors import ConfigError

_FIRST_LOOK = 3
_LOOKS = frozenset((_FIRST_LOOK, 6, 12, 24))
_LOOK_EVERY = 32
_LOOKS_AFTER_CHANGE = frozenset((1, 2, 3, 5, 8, 13, 21))
"""A big change that was seen but didn't pay surely enough yet is looked at again as its steps come in."""
_SURE = 3.5
_SURE_AFTER_CHANGE = 2.0
"""A run of steps out of the band is evidence by itself; the noise must not produce the rest of the gain."""
_SURE_AFTER_MOVE = 1.0
_LEAST_GAIN = 0.01
_LEAST_GAIN_AFTER_MOVE = 0.03
_FOLLOWED_UP = ("slower", "faster", "returned", "left_out")
_OVERRULES = 0.15
"""A predicted gain so large is followed though a move there was rejected, or one is being judged."""
_LEAST_MICRO_GAIN = 0.02
_LEAST_HELP = 0.02
"""A rank that is tried returns if the steps become so much shorter."""
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
        self._ranks = RankCosts(world_size)
        self._blocks = StepBlocks()
        self._short_steps = ShortSteps()
        self.take_note = self._short_steps.take_note
        self._num_seen = 0
        """Steps seen, which are the time in all that follows."""
        self._num_warmup = num_warmup
        self._under: tuple[tuple[int, ...], int] | None = None
        self._num_under = 0
        self._num_pending, self._num_since_change = 0, _LOST_AFTER
        self._changes = SpeedChanges(world_size)
        self._is_measured = False
        self._last_kind: str | None = None
        self._reversals = Reversals()
        self._rests_s: deque[float] = deque(maxlen=_FIRST_LOOK)
        self._search = NeighbourSearch()
        self.may_leave = check_may_leave(may_leave, world_size)
        """May be set at any time, when it turns out who has to stay; such a rank then comes back and reports its seconds."""
        self.left_out = LeftOut(world_size)
        self._trial: ReturnTrial | None = None
        self._first_look = FirstLook()

    @property
    def costs(self) -> tuple[Cost, ...] | None:
        """The cost of each rank at the last fit, less and less certain for one that is out; None before the first fit."""
        if not self._ranks.has_fits:
            return None
        return tuple(self.left_out.aged(rank, cost) for rank, cost in enumerate(self._ranks.costs()))

    def observe(self, observation: Observation) -> Decision | None:
        """Add one step, in order; return new shares where they pay."""
        if not len(observation.shares) == len(observation.seconds) == len(self._ranks):
            raise ConfigError(
                f"step {observation.step} shows {len(observation.shares)} shares and {len(observation.seconds)} times: "
                f"expected {len(self._ranks)}, one a rank"
            )
        if not self._is_telling(observation):
            return None
        ends_trial = self._trial is not None and self._trial.ends_with(observation)
        block = observation if ends_trial else self._blocks.add(observation)
        return self._observe(block) if block is not None else None

    @property
    def foresees(self) -> bool:
        """False where steps are so short that no gain is certain before it was measured."""
        return not self._blocks.is_short

    @property
    def rest_s(self) -> float:
        """Seconds of a step in which no rank computes: the exchange. 0 where whole steps weren't measured."""
        return median(self._rests_s) if self._rests_s else 0.0

    def _observe(self, observation: Observation) -> Decision | None:
        self._num_seen += 1
        now = self._num_seen
        under, whole_s = (observation.shares, observation.num_micro), observation.whole_s
        self.left_out.observe(observation.seconds, whole_s * observation.num_steps)
        self._rests_s.append(whole_s - max(time_s for time_s in observation.seconds if time_s is not None))
        if under != self._under:
            self._changes.begin_shares(now, self._under[0] if self._under else under[0], under[0])
            self._under, self._num_under = under, 0
        self._num_under += 1
        self._reversals.add_step()
        if (rank := self.left_out.recalled(self.may_leave)) is not None:
            what = f"rank {rank} has to stay in the step"
            return self._move(Split(*under, 0.0), "returned", rank, None, what, self._expected_s())
        # A rank on trial warms up in its first step.
        skipped = self._trial.rank if self._trial is not None and not self._trial.num_seen else None
        found = self._ranks.add(now, observation, skipped)
        has_changed, is_of_speed = bool(found), self._changes.add(now, observation.first_step, found)
        is_new = is_of_speed and bool(self._changes.reported())
        if is_of_speed and not (self._blocks.is_short and self._search.before):
            self._short_steps.is_confirmed = self._short_steps.is_confirmed and not is_new
            self._search.forget(is_new=is_new and not self._blocks.is_short)
        else:
            self._search.add(now, under, observation.parts or (observation.seconds,), whole_s)
        self._num_since_change = 0 if has_changed and self._changes.has_big else self._num_since_change + 1
        if self._trial is not None:
            return self._observe_trial(self._trial, observation, whole_s)
        if (decision := self._cut_at_once(observation)) is not None:
            return decision
        if under != (self.shares, self.num_micro):
            self._num_pending += 1
            if self._num_pending <= _LOST_AFTER:
                return self._look(observation.step) if has_changed and not self._blocks.is_short else None
            self.shares, self.num_micro = under
        self._num_pending = 0
        verdict = self._search.verdict(now, under)
        if verdict is not None and verdict.back is not None:
            return self._go_back(verdict, verdict.back)
        if self._blocks.is_short:
            self._short_steps.is_confirmed = self._short_steps.is_confirmed or verdict is not None
            if (before := self._search.before) is not None:
                return self._end_trial(before) if is_new and not self._short_steps.is_confirmed else None
            is_due = verdict is not None or self._short_steps.is_due(self._num_under, self._ranks.num_steps)
            decision = self._look(observation.step) if is_due else None
            return decision or (self._try_return(whole_s) or self._try_neighbours() if self._ranks.has_fits else None)
        since_last = self._num_under - max(_LOOKS)
        if (
            has_changed
            or self._num_under in _LOOKS
            or (not self._ranks.has_fits and self._num_under > _FIRST_LOOK)
            or self._num_since_change in _LOOKS_AFTER_CHANGE
            or (since_last > 0 and since_last % _LOOK_EVERY == 0)
        ):
            decision = self._look(observation.step)
            if decision is not None:
                return decision
        if has_changed or not self._ranks.has_fits:
            return None
        return self._try_return(whole_s) or self._try_neighbours()

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
        split = self._split(list(self.costs or ())) if self._ranks.has_fits else Split(self.shares, needed, 0.0)
        cap = caps[over] if caps else None
        what = f"rank {over} has memory for {cap} samples in a micro-batch"
        return self._move(split, "memory", over, None, what, self._expected_s())

    def _is_telling(self, observation: Observation) -> bool:
        if observation.left_out or not observation.is_measured:
            return False
        if self._num_warmup > 0:
            self._num_warmup -= 1
            return False
        return sum(observation.shares) == self.num_samples

    def _cut_at_once(self, seen: Observation) -> Decision | None:
        """Don't wait for more steps of a rank that takes many times as long as the others: each is as dear."""
        least = max(self.num_micro, self.quantum)
        split, anew = self._first_look(seen, least, lambda costs: self._split(costs, self.num_micro), self._refit)
        self._ranks.begin_anew(*anew)
        if split is None:
            return None
        self._refit()
        return replace(self._move(split, *self._explain(seen.step, split), self._expected_s()), lead_steps=1)

    def _look(self, step: int) -> Decision | None:
        costs = self._refit()
        before_s = self._expected_s()
        split = self._split(costs)
        if self.left_out.ranks:
            everyone = split_batch(self.num_samples, costs, self._caps, None, self.quantum, self.may_leave)
            self.left_out.ask_if_faster(everyone, (1 - 2 * _LEAST_HELP) * split.expected_s)
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
        seen_s = self._ranks.seen_s(split.shares, split.num_micro, self.may_leave)
        seen_before_s = self._ranks.seen_s(self.shares, self.num_micro, self.may_leave)
        if seen_s is not None and seen_before_s is not None:
            gain = min(gain, 1 - seen_s / seen_before_s)
        if self._blocks.is_short:
            return self._look_at_short_steps(step, split, gain)
        # The first look under new shares shows whether the move helped; it may be followed up on weaker evidence, once.
        sure, least = _SURE, _LEAST_GAIN
        if self._num_under == _FIRST_LOOK and self._last_kind in _FOLLOWED_UP:
            sure, least = _SURE_AFTER_MOVE, _LEAST_GAIN_AFTER_MOVE
        elif self._num_since_change < _FIRST_LOOK:
            sure, least = _SURE_AFTER_CHANGE, _LEAST_GAIN_AFTER_MOVE
        if gain < max(least, sure * self._ranks.gain_error(self.shares, self.num_micro, self.may_leave)):
            return None
        now, new = (self.shares, self.num_micro), (split.shares, split.num_micro)
        is_refined = self._is_measured and not self._changes.reported() and gain < _OVERRULES
        if is_refined and self._search.forbids(self._num_seen, new, now):
            return None
        num_reversals = self._reversals.num_with(self.shares, split.shares)
        parts = num_parts(num_reversals)
        if parts > 1:
            split = part_of_the_way(self.shares, split, parts, self._caps)
            if gain < parts * _LEAST_GAIN_AFTER_MOVE:
                return None
        self._reversals.accept(num_reversals)
        return self._move(split, *self._explain(step, split), before_s)

    def _look_at_short_steps(self, step: int, split: Split, gain: float) -> Decision | None:
        now, costs, before_s = (self.shares, self.num_micro), list(self.costs or ()), self._expected_s()
        whole_s = self._search.seen_s(now)
        if whole_s is None or not self._search.may_try(self._num_seen):
            return None
        new = split.shares, split.num_micro
        is_worse = self._short_steps.is_confirmed and self._search.forbids(self._num_seen, new, now)
        if is_worse or gain < _SURE * self._ranks.gain_error(*now, self.may_leave):
            return None
        evidence = whole_s, self._ranks.num_steps
        found = self._short_steps.allowed(now, new, costs, self.may_leave, self.quantum, *evidence)
        if found is None:
            return None
        (shares, count), least_saved_s = found
        goal = Split(shares, max(count, num_micro(shares, self._caps)), split.expected_s)
        kind, rank, factor, what = self._explain(step, goal)
        what = what if self._short_steps.is_confirmed else f"{what}, on trial"
        return self._move(goal, kind, rank, factor, what, before_s, least_saved_s)

    def _explain(self, step: int, split: Split) -> tuple[str, int | None, float | None, str]:
        costs = self.costs or ()
        idle_s = {r: cost.predict_s(0, split.num_micro) for r, cost in enumerate(costs) if r not in self.left_out}
        word = "again " if self._is_measured else ""
        usual = "refined" if self._is_measured else "measured", f"measured {word}up to step {step}"
        return explain_move(self.shares, split.shares, self._changes.reported(), idle_s, usual)

    def _try_neighbours(self) -> Decision | None:
        if not self._is_measured or (self._blocks.is_short and not self._short_steps.is_confirmed):
            return None
        found = self._search.propose(self._num_seen, (self.shares, self.num_micro), self._caps, self.quantum)
        if found is None:
            return None
        before_s = self._expected_s()
        what = f"ranks wait {found.waiting:.0%} of the time"
        split = Split(found.shares, self.num_micro, (1 - found.gain) * before_s)
        least_saved_s = found.gain * before_s / 4 if self._blocks.is_short else None
        return self._move(split, "refined", None, None, what, before_s, least_saved_s)

    def _idle(self, split: Split) -> int | None:
        """Return a rank that computes with a share of 0 though it may leave: the run began so, or it had to stay until now."""
        if self._num_under <= _FIRST_LOOK or (self.shares, self.num_micro) != self._under:
            return None
        ranks = range(1, len(self.shares))
        return next(
            (r for r in ranks if self.may_leave[r] and r not in self.left_out and not self.shares[r] + split.shares[r]),
            None,
        )

    def _try_return(self, step_s: float) -> Decision | None:
        """Let a rank that is out return for some steps, where the budget allows it."""
        if not self.left_out.ranks:
            return None
        trial_share = max(self.num_micro, self.quantum)
        rank = self.left_out.due(lambda r: (self.costs or ())[r].predict_s(trial_share, self.num_micro), step_s)
        if rank is None or not self.may_leave[rank] or trial_share >= self.num_samples:
            return None
        rest = self._split(list(self.costs or ()), self.num_micro, self.num_samples - trial_share)
        shares = tuple(trial_share if r == rank else share for r, share in enumerate(rest.shares))
        if num_micro(shares, self._caps) > self.num_micro:
            return None
        before_s, before = self._expected_s(), (self.shares, self.num_micro)
        self._trial = ReturnTrial(rank, shares, before, self._search.seen_s(before) or step_s)
        self.left_out.begin(rank)
        self._ranks.begin_anew(rank)
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
        self.left_out.charge(trial.extra_s(step_s))
        if not trial.is_over:
            return None
        self._trial = None
        costs = self._refit()
        with_it, without_s = self._split(costs), slowest_s(costs, *trial.before, self.may_leave)
        helps = with_it.shares[trial.rank] > 0 and with_it.expected_s < (1 - _LEAST_HELP) * without_s
        self.left_out.end(trial.rank, returned=helps)
        if helps:
            return self._move(with_it, "returned", trial.rank, None, f"rank {trial.rank} can help again", without_s)
        needs = format_seconds(costs[trial.rank].predict_s(0, self.num_micro))
        lead_steps = 1 if trial.is_hopeless else LEAD_STEPS
        self.left_out.charge(lead_steps * (step_s - trial.usual_s))
        what = f"rank {trial.rank} needs {needs} for its first samples and stays left out"
        back = self._move(Split(*trial.before, without_s), "trial", trial.rank, None, what, without_s)
        return replace(back, lead_steps=lead_steps)

    def _end_trial(self, key: tuple[tuple[int, ...], int]) -> Decision:
        """Take back a move on trial while a speed changed: whole steps show that, and not what the move does."""
        decision = self._move(Split(*key, 0.0), *self._explain(0, Split(*key, 0.0)), self._expected_s())
        self._search.forget(is_new=False)
        return decision

    def _go_back(self, verdict: Verdict, key: tuple[tuple[int, ...], int]) -> Decision:
        seen = f"{format_seconds(verdict.now_s)} after it, {format_seconds(verdict.before_s)} before"
        what = f"the last move did not make the step shorter ({seen})"
        decision = self._move(Split(*key, 0.0), "refined", None, None, what, self._expected_s())
        if self._blocks.is_short:
            self._search.forget_move()
        return decision

    def _refit(self) -> list[Cost]:
        """Fit all ranks with steps; return the cost of each."""
        self._ranks.refit()
        return list(self.costs or ())

    def _split(self, costs: Sequence[Cost], num_micro: int | None = None, num_samples: int | None = None) -> Split:
        """Split over the ranks that are not out."""
        size = num_samples or self.num_samples
        return self.left_out.split(size, costs, self._caps, num_micro, self.quantum, self.may_leave)

    def _expected_s(self) -> float:
        costs = self.costs
        return slowest_s(costs, self.shares, self.num_micro, self.may_leave) if costs is not None else 0.0

    def _move(
        self,
        split: Split,
        kind: str,
        rank: int | None,
        factor: float | None,
        what: str,
        before_s: float,
        least_saved_s: float | None = None,
    ) -> Decision:
        how = describe_shares(rank, self.shares, split.shares, self.num_micro, split.num_micro)
        before, after = (self.shares, self.num_micro), (split.shares, split.num_micro)
        # Who is in the step is judged by trials.
        is_judged = kind not in ("trial", "returned", "left_out") or least_saved_s is not None
        self._search.begin(before if is_judged else after, after, least_saved_s)
        self._reversals.moved(self.shares, split.shares, counts=self._is_measured)
        self.shares, self.num_micro = split.shares, split.num_micro
        self._num_pending = 0
        self._num_since_change = _LOST_AFTER
        self._changes.clear()
        self._last_kind = kind
        self._is_measured = self._is_measured or kind != "memory"
        return Decision(
            split.shares, split.num_micro, kind, rank, factor, f"{what}: {how}", before_s, self._expected_s()
        )
