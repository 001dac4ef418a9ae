"""The plans of one island: its part of each global batch, or whole batches of a round that it takes by itself.

    equal steps    step s: samples [s B, (s+1) B) in order of the islands, each with its share n_i;  Σ n_i = B
    by speed       L steps = I L batches of B / I samples, in order of the islands, each with h_i of them;  Σ h_i = I L

Few samples or batches are divided in pieces: n_i and h_i change by one from step to step, from round to round, about the share.

Inside an island the part is split over its ranks as any global batch is (step/planner.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from evenload.balance.decision import Decision
from evenload.balance.split import even_shares, scale_shares
from evenload.balance.values import StepPlan, StepProgress
from evenload.errors import ConfigError
from evenload.training.comm.control import Control
from evenload.training.comm.islands import IslandMap
from evenload.training.data.places import BatchPlace, RoundPlanner
from evenload.training.islands.shares import FEW, FIRST_GAP, LEAD, PIECES, IslandShares
from evenload.training.step.plan_source import PlanSource
from evenload.training.step.planner import Planner


class IslandPlanner(Planner, RoundPlanner):
    """The plans of one loader on one island; `world` is the exchange among all ranks, `control` that of the island."""

    def __init__(
        self,
        control: Control,
        islands: IslandMap,
        *,
        world: Control,
        world_rank: int,
        rank: int,
        batch_size: int,
        balance: str | tuple[int, ...],
        micro_batch: int | str,
        sync_every: int,
        by_speed: bool,
        announce: Callable[[Decision, int], None],
        is_guess: bool = False,
        source: PlanSource | None = None,
    ) -> None:
        """Args as in `Planner`, of the whole job; `by_speed`: islands take unequal numbers of steps."""
        count = len(islands)
        if by_speed and is_guess:
            raise ConfigError("local_steps='auto' needs a DataLoader with a batch_size: a batch_sampler's is unknown")
        if batch_size < count:
            raise ConfigError(
                f"batch_size {batch_size} is less than the {count} islands: each needs a sample in every step"
            )
        self.islands = islands
        self._world = world
        self._whole_size = batch_size
        self._sync_every = sync_every
        self._cut_at: int | None = None
        self.by_speed = by_speed = by_speed and count > 1
        per_rank = (
            balance
            if isinstance(balance, tuple)
            else even_shares(max(batch_size, islands.num_ranks), islands.num_ranks)
        )
        proportions = [sum(per_rank[rank] for rank in members) for members in islands.ranks]
        if 0 in proportions:
            raise ConfigError(f"balance {','.join(map(str, per_rank))} leaves an island without samples")
        size = count * sync_every if by_speed else batch_size
        # The balancer inside an island of several ranks looks at steps of one size.
        is_fine = size < FEW * count and (by_speed or islands.num_ranks == count)
        self.parts = IslandShares(
            size,
            proportions,
            decides=balance == "auto" and world_rank == 0 and count > 1,
            pieces=PIECES if is_fine else 1,
        )
        self.adapts_parts = balance == "auto" and count > 1
        inner = tuple(balance[rank] for rank in islands.members) if isinstance(balance, tuple) else balance
        super().__init__(
            control,
            rank=rank,
            world_size=len(islands.members),
            batch_size=self.own_size,
            balance=inner,
            micro_batch=micro_batch,
            announce=announce,
            is_guess=is_guess,
            source=source,
        )

    def agree(self, values: Sequence[int] | None) -> list[int]:
        return self._world.agree(values)  # the order of samples is that of all islands

    def set_parts(self, shares: Sequence[int]) -> None:
        """Divide over the islands in this way from the next plan on; all ranks alike."""
        before = self.own_size
        self.parts.set(shares)
        if self.own_size != before:
            self.resize(self.own_size, None)
        self._revision += 1

    def cut_round(self, step: int) -> None:
        """Let a round end at this step of the run, which lies in it; all ranks alike."""
        self._cut_at = step
        self._revision += self.by_speed

    def check_last_batch(self, num_samples: int) -> None:
        """Raise DataError before training, not at the end of an epoch, if the last batch is too short; 0: there is none."""
        if num_samples:
            self._pieces(num_samples)

    # -- plans ----------------------------------------------------------------------------------------------------------

    def plan(self, epoch: int, epoch_step: int, global_step: int, start: int, num_samples: int) -> StepPlan:
        if len(self.islands) == 1:
            return super().plan(epoch, epoch_step, global_step, start, num_samples)
        before = global_step * num_samples if num_samples == self._whole_size else None
        low, high = self.parts.cut(num_samples, before)[self.islands.own :][:2]
        own = super().plan(epoch, epoch_step, global_step, start + low, high - low)
        return replace(own, of=StepProgress(epoch_step + 1, start + num_samples, num_samples))

    def place(self, step: int, global_step: int, num_steps: int) -> BatchPlace:
        length = min(self._sync_every - global_step % self._sync_every, num_steps - step)
        if self._cut_at is None:
            self._cut_at = global_step + FIRST_GAP + LEAD if self.adapts_parts else 0
        if self._cut_at > global_step:
            length = min(length, self._cut_at - global_step)
        count = len(self.islands)
        low, high = self.parts.cut(count * length, count * global_step)[self.islands.own :][:2]
        return BatchPlace(step, global_step * count, 0, high - low, length, low)

    def plan_at(self, place: BatchPlace, epoch: int, bounds: Sequence[int]) -> StepPlan:
        count = len(self.islands)
        ahead, piece = divmod(place.first + place.index, count)
        low, high = bounds[place.step + ahead], bounds[place.step + ahead + 1]
        edges = self._pieces(high - low)
        before, after = (
            place.step + index * place.num_steps // place.num_batches for index in (place.index, place.index + 1)
        )
        own = super().plan(epoch, before, place.number, low + edges[piece], edges[piece + 1] - edges[piece])
        ends = (place.num_batches, place.num_steps) if place.is_last else None
        return replace(own, of=StepProgress(after, bounds[after], bounds[after] - bounds[before], ends))

    def _pieces(self, num_samples: int) -> list[int]:
        """Return the edges of the equal batches of a step."""
        even = IslandShares(num_samples, [1] * len(self.islands), decides=False)
        return even.cut(num_samples)

    @property
    def own_size(self) -> int:
        """Samples of a usual batch of this island; one more in some."""
        return int(self.own_mean)

    @property
    def own_mean(self) -> float:
        """Samples of a batch of this island, on average."""
        return self._whole_size // len(self.islands) if self.by_speed else self.parts.means[self.islands.own]

    @property
    def steps_per_batch(self) -> int:
        """The most steps of the run that an island goes on by with one of its batches."""
        return math.ceil(self._sync_every / min(self.parts.means)) if self.by_speed else 1

    def speeds(self) -> tuple[float, ...]:
        """Return relative speeds of all ranks for work outside of steps; those of an island share its part evenly."""
        total = sum(self.parts.shares)
        found = [0.0] * self.islands.num_ranks
        for share, members in zip(self.parts.shares, self.islands.ranks, strict=True):
            for rank in members:
                found[rank] = share / total / len(members)
        return tuple(found)

    def first_shares(self) -> tuple[int, ...]:
        """Return the shares of all ranks as they begin, to be announced."""
        edges = self._pieces(self._whole_size) if self.by_speed else self.parts.cut(self._whole_size)
        sizes = [high - low for low, high in itertools.pairwise(edges)]
        found = [0] * self.islands.num_ranks
        for size, members in zip(sizes, self.islands.ranks, strict=True):
            inner = even_shares(size, len(members))
            if members == self.islands.members:
                inner = self.shares if sum(self.shares) == size else scale_shares(self.shares, size)
            for rank, share in zip(members, inner, strict=True):
                found[rank] = share
        return tuple(found)

    def state_dict(self) -> dict[str, object]:
        return super().state_dict() | {"islands": list(self.parts.shares)}

    def load_state_dict(self, state: dict[str, object], step: int) -> None:
        """Begin with the saved division where there are as many islands."""
        saved = state.get("islands")
        if isinstance(saved, list) and len(saved) == len(self.islands) and self.adapts_parts:
            self.set_parts(saved)
        super().load_state_dict(state, step)
