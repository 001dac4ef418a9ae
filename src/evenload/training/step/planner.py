"""Which rank computes what in the next steps: decided on rank 0, known to all as integers.

An assignment is a set of shares, caps and the step from which they hold. Every rank keeps the same list of assignments and turns
them into plans with the same integer arithmetic, so plans for steps that have not come yet can be made ahead, by the
loader's prefetch, without asking anyone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evenload.balance.batch import best_split
from evenload.balance.rebalance import Balancer, Decision, Observation
from evenload.balance.replicas import Contention, ReplicaBalancer, ReplicaObservation
from evenload.balance.split import Split, even_shares, micro_shares, num_micro, scale_shares, slice_sizes
from evenload.balance.values import Cost, StepPlan
from evenload.errors import ConfigError, DataError
from evenload.training.comm.control import Control

LEAD_STEPS = 2
"""A decision heard in step s holds from step s + 2: step s + 1 is loaded already, s + 2 gets a step's time to load."""

QUANTA_IN_A_BATCH = 64
"""A compiled model's shares are multiples of one part in so many of the batch: each new size may cost a compilation, and
what the coarser split costs stays small."""

Shares = tuple[int, ...]
Caps = tuple[int | None, ...]


@dataclass(frozen=True)
class ShareAssignment:
    """Shares and caps from a step on."""

    from_step: int
    shares: Shares
    min_num_micro: int
    caps: Caps


class Planner:
    """The plans of one loader; the same on all ranks, except that rank 0 also decides."""

    def __init__(
        self,
        control: Control,
        *,
        rank: int,
        world_size: int,
        batch_size: int,
        balance: str | Shares,
        micro_batch: int | str,
        announce: Callable[[Decision, int], None],
        is_guess: bool = False,
        tell: Callable[[Contention], None] | None = None,
    ) -> None:
        """Args:
        batch_size: the usual global batch, in samples.
        balance: ``auto``, ``even`` or fixed shares.
        micro_batch: cap for every rank, or ``auto``.
        announce: told each decision and the step from which it holds, on rank 0.
        is_guess: `batch_size` is not known (a batch_sampler doesn't tell): the first step's takes its place.
        tell: told what the replicas of one process cost one another; without it the ranks are processes.
        """
        self.rank = rank
        self.world_size = world_size
        self.generation = 0
        self._control = control
        self._announce = announce
        self._tell = tell
        self._watched: list[tuple[Sequence[float], Sequence[float], float, bool]] = []
        self._batch_size = batch_size
        self._is_guess = is_guess
        cap = None if micro_batch == "auto" else int(micro_batch)
        caps: Caps = (cap,) * world_size
        self._adapts = balance == "auto" and world_size > 1
        shares = even_shares(batch_size, world_size) if isinstance(balance, str) else tuple(balance)
        check_shares(shares, batch_size, world_size)
        self._assignments = [ShareAssignment(0, shares, 1, caps)]
        self._revision = 0
        self._pending: Decision | None = None
        self.forced: Callable[[int, int], Shares] | None = None
        """(global_step, num_samples) -> shares, in place of the assignments: the windows of a measurement."""
        self._balancer = self._new_balancer(shares)
        self._cache: dict[tuple[Shares, int, int, Caps], tuple[tuple[int, ...], ...]] = {}

    # -- plans ----------------------------------------------------------------------------------------------------------

    def plan(self, epoch: int, epoch_step: int, global_step: int, start: int, num_samples: int) -> StepPlan:
        """The plan of a step under the assignments known now."""
        assignment = self._at(global_step)
        shares = assignment.shares
        if self.forced is not None:
            shares = self.forced(global_step, num_samples)
        elif num_samples != sum(shares):
            shares = scale_shares(shares, num_samples)
        micro = self._cut(shares, num_samples, assignment.min_num_micro, assignment.caps)
        return StepPlan(self.generation, epoch, epoch_step, 0, start, micro)

    def revision(self) -> int:
        """Grows whenever plans of steps to come change."""
        return self._revision

    def touch(self) -> None:
        """Plans of steps to come have changed (a measurement's window began)."""
        self._revision += 1

    def agree(self, values: Sequence[int] | None) -> list[int]:
        """Rank 0's integers on all ranks."""
        return self._control.agree(values)

    @property
    def shares(self) -> Shares:
        """The newest assignment's shares."""
        return self._assignments[-1].shares

    def speeds(self) -> tuple[float, ...]:
        """Relative speeds of the ranks, for work outside of steps; equal on all ranks. No rank is left out."""
        shares = self._assignments[-1].shares
        return tuple(max(share, 0.25) / sum(shares) for share in shares)

    # -- decisions ------------------------------------------------------------------------------------------------------

    @property
    def assignments(self) -> tuple[ShareAssignment, ...]:
        """What is ruled; equal on all ranks. Set by who forces shares, to leave no trace."""
        return tuple(self._assignments)

    @assignments.setter
    def assignments(self, assignments: Sequence[ShareAssignment]) -> None:
        self._assignments = list(assignments)
        self._revision += 1

    def watch(self, own_s: Sequence[float], cpu_s: Sequence[float], together_s: float, in_turns: bool) -> None:
        """What a backward took each replica of this process; see `ReplicaObservation`. Asked for by `observe`."""
        self._watched.append((own_s, cpu_s, together_s, in_turns))

    @property
    def takes_turns(self) -> bool:
        """Whether the replicas of this process compute the next step in turns, to be measured."""
        return isinstance(self._balancer, ReplicaBalancer) and self.forced is None and self._balancer.takes_turns

    def observe(self, step: int, plan: StepPlan, seconds: Sequence[float], left_out: bool) -> None:
        """Rank 0 learns what a step cost each rank, in own seconds. All ranks call it."""
        watched, self._watched = self._watched, []
        if self.forced is not None:
            return
        if self._is_guess:
            self._settle(plan.num_samples)
        if self._balancer is None:
            return
        if isinstance(self._balancer, ReplicaBalancer):
            decision = self._observe_replicas(self._balancer, step, plan, watched, left_out)
        else:
            seen = Observation(step, plan.shares, plan.num_micro, tuple(seconds), left_out)
            decision = self._balancer.observe(seen)
        if decision is not None:
            self._pending = decision

    def _observe_replicas(
        self,
        balancer: ReplicaBalancer,
        step: int,
        plan: StepPlan,
        watched: Sequence[tuple[Sequence[float], Sequence[float], float, bool]],
        left_out: bool,
    ) -> Decision | None:
        if not watched:
            return None
        own_s, cpu_s, together_s, in_turns = zip(*watched, strict=True)
        decision = balancer.observe(
            ReplicaObservation(
                step,
                plan.shares,
                plan.num_micro,
                tuple(sum(column) for column in zip(*own_s, strict=True)),
                tuple(sum(column) for column in zip(*cpu_s, strict=True)),
                sum(together_s),
                all(in_turns),
                left_out or len(set(in_turns)) > 1,
            )
        )
        if (found := balancer.take_contention()) is not None and self._tell is not None:
            self._tell(found)
        return decision

    def coarsen(self) -> None:
        """The model is compiled: from now on shares are decided in larger pieces."""
        if self._balancer is not None:
            self._balancer.quantum = max(1, self._batch_size // QUANTA_IN_A_BATCH)

    @property
    def has_decision(self) -> bool:
        """Whether this rank (rank 0) has a decision to tell."""
        return self._pending is not None

    def sync_decision(self, step: int) -> None:
        """All ranks: rank 0 tells its decision during `step`; it holds `LEAD_STEPS` later."""
        decision = self._pending
        told = None if decision is None else [decision.num_micro, *decision.shares]
        integers = self._control.agree(told)
        from_step = step + LEAD_STEPS
        self._assign(ShareAssignment(from_step, tuple(integers[1:]), integers[0], self._assignments[-1].caps))
        if decision is not None:
            self._announce(decision, from_step)
            self._pending = None

    def lower_caps(self, plan: StepPlan, failed: Sequence[bool]) -> StepPlan:
        """After memory ran out on some ranks: the same step with smaller micro-batches, now and from now on.

        Raises:
            DataError: a rank can't hold a single sample.
        """
        caps = list(self._assignments[-1].caps)
        for rank, out in enumerate(failed):
            if out:
                largest = max(max(row[rank], 1) for row in plan.micro)
                if largest == 1:
                    raise DataError(
                        f"rank {rank} ran out of memory with one sample in a micro-batch; the model is too big for it"
                    )
                caps[rank] = largest // 2
        new = tuple(caps)
        if self._balancer is not None and self.forced is None:
            # Shares that suit the new caps are told in the exchange of the next attempt.
            self._pending = self._balancer.set_caps(new) or self._pending
        shares = plan.shares
        micro = self._cut(shares, plan.num_samples, 1, new)
        self._assign(ShareAssignment(0, self._assignments[-1].shares, 1, new))
        return StepPlan(plan.generation, plan.epoch, plan.step, plan.attempt + 1, plan.start, micro)

    def outlook(self) -> dict[str, float]:
        """What rank 0 expects of the newest shares: how many times as fast as equal shares, and as the best rank alone."""
        costs = self._balancer.costs if self._balancer is not None else None
        pending = self._pending
        if costs is None or pending is None or not pending.expected_s:
            return {}
        if isinstance(self._balancer, ReplicaBalancer) and pending.kind in ("trial", "left_out", "returned"):
            return {}  # found by trying, and told with what was measured
        even = even_shares(self._batch_size, self.world_size)
        equal_s = max(cost.predict_s(share, pending.num_micro) for cost, share in zip(costs, even, strict=True))
        alone_s = min(cost.predict_s(self._batch_size, pending.num_micro) for cost in costs)
        return {"over_equal": equal_s / pending.expected_s, "over_best_alone": alone_s / pending.expected_s}

    @property
    def num_micro(self) -> int:
        """K of a usual step, as ruled now."""
        assignment = self._assignments[-1]
        return max(assignment.min_num_micro, num_micro(assignment.shares, assignment.caps))

    def state_dict(self) -> dict[str, object]:
        """The newest assignment: a start for a run on the same ranks."""
        assignment = self._assignments[-1]
        shares = assignment.shares
        if self._adapts and isinstance(self._balancer, ReplicaBalancer):
            shares = self._balancer.shares  # the assignment may be a trial
        return {"shares": list(shares), "num_micro": assignment.min_num_micro, "world_size": self.world_size}

    def load_state_dict(self, state: dict[str, object], step: int) -> None:
        """Starts from a saved assignment where it fits this job; otherwise measures anew."""
        shares = state["shares"]
        if not self._adapts or state["world_size"] != self.world_size or not isinstance(shares, list):
            return
        if self._is_guess:
            self._settle(sum(shares))
        if sum(shares) == self._batch_size:
            least = state["num_micro"]
            caps = self._assignments[-1].caps
            self._assign(ShareAssignment(step, tuple(shares), least if isinstance(least, int) else 1, caps))
            # Else it would wait some thirty steps for the equal shares that it thinks were decided.
            self._balancer = self._new_balancer(tuple(shares), self.num_micro)

    def split(self, batch_size: int, costs: Sequence[Cost]) -> Split:
        """How a global batch of another size would be split, as things are set."""
        caps = self._assignments[-1].caps
        quantum = 1 if self._balancer is None else self._balancer.quantum
        return best_split(batch_size, costs, caps, None if self._adapts else self._assignments[-1].shares, quantum)

    def resize(self, batch_size: int, shares: Shares | None) -> None:
        """All ranks, between two epochs: another global batch, in these shares; without any in the proportions of now."""
        last, old = self._assignments[-1], self._balancer
        shares = shares or scale_shares(last.shares, batch_size)
        self._batch_size, self._pending = batch_size, None
        self.assignments = (ShareAssignment(0, shares, 1, last.caps),)
        self._balancer = self._new_balancer(shares)
        if old is not None and old.quantum > 1:
            self.coarsen()

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _new_balancer(self, shares: Shares, count: int | None = None) -> Balancer | ReplicaBalancer | None:
        """What decides from now on, beginning with these shares; None where nobody decides here."""
        caps = self._assignments[-1].caps
        if self._tell is not None and self.world_size > 1:
            return ReplicaBalancer(
                self._batch_size, self.world_size, caps, shares=shares, num_micro_batches=count, adapts=self._adapts
            )
        if not self._adapts or self.rank != 0:
            return None
        return Balancer(self._batch_size, self.world_size, caps, shares=shares, num_micro_batches=count)

    def _settle(self, batch_size: int) -> None:
        """All ranks alike: the usual global batch is known now; the balancer looks at steps of just this size."""
        self._is_guess = False
        if batch_size == self._batch_size:
            return
        self._batch_size = batch_size
        caps = self._assignments[-1].caps
        self.assignments = (ShareAssignment(0, even_shares(batch_size, self.world_size), 1, caps),)
        self._balancer = self._new_balancer(self._assignments[-1].shares)

    def _at(self, step: int) -> ShareAssignment:
        for assignment in reversed(self._assignments):
            if assignment.from_step <= step:
                return assignment
        return self._assignments[0]

    def _assign(self, assignment: ShareAssignment) -> None:
        # Later assignments replace earlier ones from their step on; two are enough: the one in force and the one to come.
        self._assignments = [*self._assignments[-1:], assignment]
        self._revision += 1

    def _cut(self, shares: Shares, num_samples: int, least: int, caps: Caps) -> tuple[tuple[int, ...], ...]:
        key = (shares, num_samples, least, caps)
        if key not in self._cache:
            if len(self._cache) > 64:
                self._cache.clear()
            count = min(max(least, num_micro(shares, caps)), max(num_samples, 1))
            if self._tell is not None:
                # One replica has samples in every micro-batch, and so sees all that buffers are to see (replica_modules.py).
                count = min(count, max(*shares, 1))
            self._cache[key] = micro_shares(shares, slice_sizes(num_samples, count), caps)
        return self._cache[key]


def check_shares(shares: Shares, batch_size: int, world_size: int) -> None:
    """Raises ConfigError where fixed shares don't fit the job."""
    if len(shares) != world_size:
        raise ConfigError(
            f"balance {','.join(map(str, shares))} has {len(shares)} shares, but there are {world_size} ranks"
        )
    if sum(shares) != batch_size:
        raise ConfigError(
            f"balance {','.join(map(str, shares))} sums to {sum(shares)}, but the loader's batch_size is {batch_size}: "
            "shares are the samples of each rank in one global batch"
        )
