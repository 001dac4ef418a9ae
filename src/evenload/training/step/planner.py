"""Decide which rank computes what in the next steps: on rank 0, sent to all ranks as integers.

A `ShareAssignment` holds shares, caps and the step from which they hold. Every rank keeps the same assignments and turns
them into plans with the same integer arithmetic, so the loader's prefetch can plan later steps without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from evenload.balance.batch import best_split
from evenload.balance.contention import Contention, ReplicaObservation
from evenload.balance.decision import LEAD_STEPS, Decision, Observation, expected_gains
from evenload.balance.fixed_shares import FixedShares
from evenload.balance.memory_caps import SINGLE_TRIES, MemoryCaps
from evenload.balance.rank_costs import MANY_RANKS
from evenload.balance.rebalance import Balancer
from evenload.balance.replicas import ReplicaBalancer
from evenload.balance.split import Split, even_shares, num_micro, scale_shares
from evenload.balance.values import Cost, StepPlan
from evenload.errors import DataError
from evenload.training.comm.control import Control
from evenload.training.parallel.strategy import ReplicaTimes
from evenload.training.step.assignment import (
    Caps,
    MicroCuts,
    ShareAssignment,
    Shares,
    assignment_for,
    assignments_in,
    check_shares,
)
from evenload.training.step.balancer_process import AnyBalancer, BalancerProcess, take_note
from evenload.training.step.plan_source import PlanSource, StepsInOrder

QUANTA_IN_A_BATCH = 64
"""A compiled model's shares are multiples of this part of the batch: each new size may cost a compilation, and the loss
from the coarser split stays small."""


class Planner(StepsInOrder):
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
        on_contention: Callable[[Contention], None] | None = None,
        source: PlanSource | None = None,
    ) -> None:
        """Args:
        balance: ``auto``, ``even``, fixed shares, or their proportions where they do not sum to the batch.
        announce: called on rank 0 with each decision and the step from which it holds.
        is_guess: `batch_size` is unknown (a batch_sampler without one): the first step's size replaces it.
        on_contention: called with what the replicas of one process cost one another; None where the ranks are processes.
        source: see `use`.
        """
        self.rank = rank
        self.world_size = world_size
        self.generation = 0
        self.may_leave: Sequence[bool] = [False] * world_size
        """For each rank whether it may leave the groups of gradients, as of the last step (engine.py)."""
        self._leaving: tuple[Sequence[bool], tuple[bool, ...]] = (), ()
        """The last `may_leave`, and the same with rank 0, which stays."""
        self._control = control
        self._announce = announce
        self._on_contention = on_contention
        self._replica_times: list[ReplicaTimes] = []
        self._batch_size = batch_size
        self._is_guess = is_guess
        self._source = source or PlanSource()
        cap = None if micro_batch == "auto" else int(micro_batch)
        caps: Caps = (cap,) * world_size
        self._memory = MemoryCaps(caps)
        self._cap = cap
        self._is_auto, self._is_even = balance == "auto", balance == "even"
        self._adapts = self._is_auto and world_size > 1
        shares = even_shares(batch_size, world_size) if isinstance(balance, str) else tuple(balance)
        check_shares(shares, world_size)
        shares = scale_shares(shares, batch_size)  # as proportions, where they don't sum to the batch
        self._assignments = [ShareAssignment(0, shares, 1, caps)]
        self._revision = 0
        self._pending: Decision | None = None
        self._balancer = self._new_balancer(shares)
        # One replica has samples in every micro-batch, and so sees all that buffers must see (replica_modules.py).
        self._cut = MicroCuts(fills_each=on_contention is not None)

    # -- plans ----------------------------------------------------------------------------------------------------------

    def use(self, source: PlanSource) -> None:
        """Take shares and batch sizes from `source` from the next plan on; all ranks alike."""
        self._source = source
        self._revision += 1

    @contextmanager
    def override(self, source: PlanSource, assignments: Sequence[ShareAssignment] = ()) -> Iterator[None]:
        """Take plans from `source` while the body runs, beginning with `assignments`; then restore everything."""
        source_before, assignments_before = self._source, self._assignments
        self._assignments = list(assignments or assignments_before)
        self.use(source)
        try:
            yield
        finally:
            self._assignments = assignments_before
            self.use(source_before)

    def plan(self, epoch: int, epoch_step: int, global_step: int, start: int, num_samples: int) -> StepPlan:
        """Return the plan of a step under the assignments known now."""
        assignment = self._at(global_step)
        shares, out = assignment.shares, assignment.out
        if self._source.sets_shares:
            shares, out = self._source.shares(global_step, num_samples), ()
        elif num_samples != assignment.num_samples:
            shares = scale_shares(shares, num_samples)
        micro = self._cut(shares, num_samples, assignment.min_num_micro, assignment.caps)
        return StepPlan(self.generation, epoch, epoch_step, 0, start, micro, out)

    def revision(self) -> int:
        """Return a number that grows whenever plans of later steps change."""
        return self._revision

    def repeats_plans(self, global_step: int) -> bool:
        is_plain = type(self) is Planner and type(self._source) is PlanSource
        return is_plain and self._assignments[-1].from_step <= global_step

    def next_batch_size(self, step: int | None) -> int | None:
        return self._source.next_batch_size(step)

    def agree(self, values: Sequence[int] | None) -> list[int]:
        return self._control.agree(values)

    def plan_again(self, plan: StepPlan, global_step: int) -> StepPlan:
        """Return the plan of the same step in the present generation."""
        again = self.plan(plan.epoch, plan.step, global_step, plan.start, plan.num_samples)
        return replace(again, attempt=plan.attempt + 1)

    def shares_of(self, members: Sequence[int | None]) -> list[int]:
        """Return what `follow` takes: the present assignment, for these ranks of the present generation; None joins.

        See `assignment_for`.
        """
        rule = "even" if self._is_even else "kept"
        return assignment_for(self._assignments[-1], members, self._batch_size, self._cap, rule)

    def follow(self, generation: int, rank: int, values: Sequence[int], out: Sequence[int], from_step: int) -> None:
        """Plan for another generation; `values` are rank 0's `shares_of`, equal on all ranks.

        The ranks `out` compute nothing in steps before `from_step`.
        """
        self._batch_size = values[0]
        self._assignments = assignments_in(values, out, from_step)
        shares = self._assignments[-1].shares
        self.world_size, self.rank, self.generation = len(shares), rank, generation
        self._adapts = self._is_auto and self.world_size > 1
        self._memory = MemoryCaps((self._cap,) * self.world_size)
        self.may_leave = [False] * self.world_size
        self._pending, self._replica_times = None, []
        self._revision += 1
        self._balancer = self._new_balancer(shares, self.num_micro)

    @property
    def assignments(self) -> tuple[ShareAssignment, ...]:
        """The assignments in force and to come; equal on all ranks."""
        return tuple(self._assignments)

    @property
    def shares(self) -> Shares:
        return self._assignments[-1].shares

    def speeds(self) -> tuple[float, ...]:
        """Return relative speeds for work outside of steps, 0 for a rank that has left; equal on all ranks."""
        shares, out = self._assignments[-1].shares, self._assignments[-1].out
        return tuple(0.0 if rank in out else max(share, 0.25) / sum(shares) for rank, share in enumerate(shares))

    # -- decisions ------------------------------------------------------------------------------------------------------

    def add_replica_times(
        self, own_s: Sequence[float], cpu_s: Sequence[float], together_s: float, in_turns: bool
    ) -> None:
        """Take what a backward cost each replica of this process, for the next `observe`; see `ReplicaObservation`."""
        self._replica_times.append((own_s, cpu_s, together_s, in_turns))

    @property
    def takes_turns(self) -> bool:
        """True if the replicas of this process compute the next step in turns, to be measured."""
        balancer = self._balancer
        return isinstance(balancer, ReplicaBalancer) and not self._source.sets_shares and balancer.takes_turns

    @property
    def learns(self) -> bool:
        """True if `observe` learns from the times of a step; else `follow_step` is enough."""
        return self._balancer is not None or self._is_guess

    def follow_step(self, step: int, plan: StepPlan) -> bool:
        """Note that a step has ended; False if its shares were not decided here, or not for these ranks. All ranks call it."""
        self._replica_times.clear()
        if self._source.sets_shares or plan.generation != self.generation:  # a rank was lost after the backward
            return False
        if self._is_guess:
            self._settle(plan.num_samples)
        self._try_higher_caps(step)
        return True

    def observe(
        self,
        step: int,
        plan: StepPlan,
        seconds: Sequence[float],
        left_out: bool,
        step_s: float | None = None,
        delay_s: float = 0.0,
    ) -> None:
        """Learn on rank 0 what a step cost each rank, in own seconds; the others as in `Observation`. All ranks call it."""
        times, self._replica_times = self._replica_times, []
        if not self.follow_step(step, plan) or self._balancer is None:
            return
        own_s = tuple(None if r in plan.out else t for r, t in enumerate(seconds)) if plan.out else tuple(seconds)
        seen = Observation(step, plan.shares, plan.num_micro, own_s, step_s or None, left_out, delay_s=delay_s)
        if isinstance(self._balancer, ReplicaBalancer):
            decision = self._observe_replicas(self._balancer, seen, times)
        else:
            if self.may_leave is not self._leaving[0]:
                self._leaving = self.may_leave, (False, *self.may_leave[1:])
            self._balancer.may_leave = self._leaving[1]
            decision = self._balancer.observe(seen)
        if (note := take_note(self._balancer)) is not None:
            self._announce(Decision(self.shares, self.num_micro, note[0], None, None, note[1], 0.0, 0.0), step)
        self._pending = decision or self._pending

    def _observe_replicas(
        self, balancer: ReplicaBalancer, seen: Observation, times: Sequence[ReplicaTimes]
    ) -> Decision | None:
        if not times:
            return None
        own_s, cpu_s, together_s, in_turns = zip(*times, strict=True)
        decision = balancer.observe(
            ReplicaObservation(
                seen.step,
                seen.shares,
                seen.num_micro,
                tuple(sum(column) for column in zip(*own_s, strict=True)),
                tuple(sum(column) for column in zip(*cpu_s, strict=True)),
                sum(together_s),
                all(in_turns),
                seen.left_out or len(set(in_turns)) > 1,
                seen.step_s,
            )
        )
        if (found := balancer.take_contention()) is not None and self._on_contention is not None:
            self._on_contention(found)
        return decision

    def set_return_price(self, seconds: float) -> None:
        """Set what it costs to let a rank return, for the decision when to try one that has left."""
        if isinstance(self._balancer, BalancerProcess):
            self._balancer.paid(seconds)
        elif isinstance(self._balancer, Balancer):
            self._balancer.left_out.paid(seconds)

    def coarsen(self) -> None:
        """Decide shares in larger pieces from now on: each new size costs a compilation, or a search by cuDNN."""
        if self._balancer is not None:
            self._balancer.quantum = max(1, self._batch_size // QUANTA_IN_A_BATCH)

    @property
    def has_decision(self) -> bool:
        """True if this rank (rank 0) has a decision to send."""
        return self._pending is not None

    def sync_decision(self, step: int) -> None:
        """Send rank 0's decision to all ranks during `step`; it holds `lead_steps` later. All ranks call it."""
        decision = self._pending
        integers: list[int] = []
        if decision is not None:
            leaves = [int(r > 0 and not share and self.may_leave[r]) for r, share in enumerate(decision.shares)]
            integers = [decision.lead_steps, decision.num_micro, *decision.shares, *leaves]
        if not (agreed := self._control.agree(integers)):
            return  # rank 0 was lost in this exchange, and its decision with it
        (lead_steps, count), shares, flags = agreed[:2], agreed[2 : 2 + self.world_size], agreed[2 + self.world_size :]
        out = tuple(rank for rank, leaves in enumerate(flags) if leaves)
        from_step = step + lead_steps
        self._assign(ShareAssignment(from_step, tuple(shares), count, self._assignments[-1].caps, out))
        if decision is not None:
            self._announce(decision, from_step)
            self._pending = None

    def may_retry(self, step: int) -> bool:
        """Return whether a step that ran out of memory is repeated once as it is. All ranks call it."""
        return self._memory.may_retry(step)

    def lower_caps(self, plan: StepPlan, failed: Sequence[bool], step: int) -> StepPlan:
        """Return the step in smaller micro-batches, which hold from now on: ranks ran out of memory.

        Raises:
            DataError: a rank can't hold a single sample, and the step was repeated for it before.
        """
        largest = [max(max(row[rank], 1) for row in plan.micro) if out else None for rank, out in enumerate(failed)]
        if 1 in largest and self._memory.gives_up(step):
            who = f"rank {largest.index(1)} ran out of memory {SINGLE_TRIES} times in step {step}"
            raise DataError(f"{who} with one sample in a micro-batch: the model is too big for it; leave it out (-d)")
        new = self._memory.lower(self._assignments[-1].caps, largest, step)
        self._set_caps(new, from_step=0)
        micro = self._cut(plan.shares, plan.num_samples, 1, new)
        return replace(plan, attempt=plan.attempt + 1, micro=micro)

    def _set_caps(self, caps: Caps, from_step: int) -> None:
        if self._balancer is not None and not self._source.sets_shares:
            # Shares for the new caps travel in the exchange of the next attempt.
            self._pending = self._balancer.set_caps(caps) or self._pending
        newest = self._assignments[-1]
        self._assign(ShareAssignment(from_step, newest.shares, 1, caps, newest.out))

    def _try_higher_caps(self, step: int) -> None:
        newest = self._assignments[-1]
        if newest.from_step > step or (caps := self._memory.trial(newest.caps, newest.shares, step)) is None:
            return
        before, from_step = self.num_micro, step + LEAD_STEPS
        self._set_caps(caps, from_step)
        if self.rank == 0:
            reason = f"memory sufficed for many steps: micro-batches {before} → {self.num_micro} on trial"
            self._announce(Decision(newest.shares, self.num_micro, "memory", None, None, reason, 0.0, 0.0), from_step)

    def outlook(self) -> dict[str, float]:
        """Return how many times as fast rank 0 expects the newest shares to be: as equal shares, as the best rank alone."""
        balancer, pending = self._balancer, self._pending
        if balancer is None or pending is None:
            return {}
        if isinstance(balancer, BalancerProcess):
            return balancer.outlook()
        if isinstance(balancer, ReplicaBalancer) and pending.kind in ("trial", "left_out", "returned"):
            return {}  # found by a trial, and announced with its measurements
        return expected_gains(pending, balancer.costs, balancer.rest_s) if balancer.foresees else {}

    @property
    def num_micro(self) -> int:
        """K of a usual step under the newest assignment."""
        assignment = self._assignments[-1]
        return max(assignment.min_num_micro, num_micro(assignment.shares, assignment.caps))

    def state_dict(self) -> dict[str, object]:
        """Return the newest assignment: a start for a run on the same ranks."""
        assignment, shares = self._assignments[-1], self.shares
        if self._adapts and isinstance(self._balancer, ReplicaBalancer):
            shares = self._balancer.shares  # the assignment may be a trial
        return {"shares": list(shares), "num_micro": assignment.min_num_micro, "world_size": self.world_size}

    def load_state_dict(self, state: dict[str, object], step: int) -> None:
        """Start from a saved assignment if it fits this job; otherwise measure anew."""
        shares = state["shares"]
        if not self._adapts or state["world_size"] != self.world_size or not isinstance(shares, list):
            return
        if self._is_guess:
            self._settle(sum(shares))
        if sum(shares) == self._batch_size:
            least = count if isinstance(count := state["num_micro"], int) else 1
            self._assign(ShareAssignment(step, tuple(shares), least, self._assignments[-1].caps))
            # Without a new balancer it would wait some thirty steps for the equal shares it believes were decided.
            self._balancer = self._new_balancer(tuple(shares), self.num_micro)

    def split(self, batch_size: int, costs: Sequence[Cost]) -> Split:
        """Return how a global batch of another size would be split under the current settings."""
        caps = self._assignments[-1].caps
        quantum = 1 if self._balancer is None else self._balancer.quantum
        shares = None if self._adapts else self._assignments[-1].shares
        return best_split(batch_size, costs, caps, shares, quantum, (False, *self.may_leave[1:]))

    def resize(self, batch_size: int, shares: Shares | None) -> None:
        """Set another global batch between two steps, on all ranks; without shares in the present proportions."""
        old, self._pending = self._balancer, None
        self._restart(batch_size, shares or scale_shares(self.shares, batch_size))
        if old is not None and old.quantum > 1:
            self.coarsen()

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _new_balancer(self, shares: Shares, count: int | None = None) -> AnyBalancer | None:
        """Return what decides from now on, beginning with these shares; None where nothing is decided here."""
        caps = self._assignments[-1].caps
        if self._on_contention is not None and self.world_size > 1:
            return ReplicaBalancer(
                self._batch_size, self.world_size, caps, shares=shares, num_micro_batches=count, adapts=self._adapts
            )
        if self.rank:
            return None
        if not self._adapts:
            return FixedShares(shares) if 0 in shares[1:] else None
        kind = Balancer if self.world_size <= MANY_RANKS else BalancerProcess
        return kind(self._batch_size, self.world_size, caps, shares=shares, num_micro_batches=count)

    def _settle(self, batch_size: int) -> None:
        """Replace a guessed global batch: the balancer looks at steps of exactly this size."""
        self._is_guess = False
        if batch_size != self._batch_size:
            self._restart(batch_size, even_shares(batch_size, self.world_size))

    def _restart(self, batch_size: int, shares: Shares) -> None:
        self._batch_size = batch_size
        self._assignments = [ShareAssignment(0, shares, 1, self._assignments[-1].caps)]
        self._revision += 1
        self._balancer = self._new_balancer(shares)

    def _at(self, step: int) -> ShareAssignment:
        return next((one for one in reversed(self._assignments) if one.from_step <= step), self._assignments[0])

    def _assign(self, assignment: ShareAssignment) -> None:
        # Later assignments replace earlier ones from their step on; two are enough: the one in force and the one to come.
        self._assignments = [*self._assignments[-1:], assignment]
        self._revision += 1
