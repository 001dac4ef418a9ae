"""`Members`: the single owner of membership on this rank; it continues the run when ranks are lost, leave or join.

    a rank is lost:  abort (changes.py) -> a collective raises -> recover: rebuild, agree -> the step is computed again, or missed
    a rank joins or leaves:  all have received the change (it travels in the row of each backward) -> rebuild at the end of a step

Note [Agreement]
  After a change the remaining ranks exchange how many backwards and other collectives each has completed. None is ahead of
  another by more than one, because a collective completes only if all ranks have entered it, and because a rank takes all rows
  that rank 0 has pushed (row_ring.py) before it looks for an abort.
  - A rank with fewer backwards than another has *missed* the last one: its `.grad` is None, its loop body ends without effect,
    and at the end of the body it receives the state of a rank that has not missed it. That rank sends where its own state is
    that of the end of the same body: at once if it has left the body, otherwise at the end of it, or in a `run.checkpoint`.
  - If no rank has the gradients, all compute the step again, under a new plan.
  - Every other collective ends with a confirmation. If a rank has completed it, all of them hold its result; otherwise all of
    them repeat it. See `Members.repeat`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from evenload.errors import LaunchError, PeerLostError
from evenload.training.checkpoint import files
from evenload.training.comm.backend import end_queued
from evenload.training.comm.control import Control, Operation
from evenload.training.comm.generation import Membership
from evenload.training.elastic.changes import MembershipChanges
from evenload.training.elastic.own_wait import num_tcp_bytes
from evenload.training.elastic.stall_watch import StallWatch
from evenload.training.elastic.transfer import CheckpointSchedule, StateTransfer
from evenload.training.launch.left import watch_end
from evenload.training.launch.membership_messages import (
    Capable,
    Finished,
    Leaving,
    MembershipChange,
    MessageChannel,
    Ready,
    Switched,
)
from evenload.training.step.context import TrainingContext
from evenload.training.step.planner import Planner
from evenload.training.step.step import Step, StepListener
from evenload.training.step.step_loader import StepLoader

_READY_EVERY_S, _LOSS_KNOWN_S = 30.0, 10.0


@dataclass(frozen=True)
class _Standing:
    """Progress of a rank: its row of the first exchange of a generation."""

    joins: bool
    is_behind: bool
    """The rank has missed steps, and not received the state yet."""
    num_backwards: int
    num_collectives: int
    is_inside: bool
    """The loop body of a step with a backward has not ended."""
    loss: float
    """Of the last backward."""
    elapsed_s: float

    def row(self) -> list[float]:
        return list(map(float, vars(self).values()))

    @classmethod
    def read(cls, row: Sequence[float]) -> _Standing:
        joins, is_behind, num_backwards, num_collectives, is_inside, loss, elapsed_s = row
        return cls(
            bool(joins), bool(is_behind), int(num_backwards), int(num_collectives), bool(is_inside), loss, elapsed_s
        )


class Members(StepListener):
    def __init__(
        self,
        context: TrainingContext,
        loaders: Sequence[StepLoader],
        schedule: CheckpointSchedule,
        why_not: Callable[[], str],
        before_join: Callable[[], None],
    ) -> None:
        """`why_not` returns why this rank could not take part in a change: what a peer's state would not restore.
        `before_join` does, in a rank that joins, what the others would wait for in its first step.
        """
        self._context = context
        self._loaders = loaders
        self._why_not, self._before_join = why_not, before_join
        self._worker = context.spec.worker
        self._joins = context.spec.joining
        """True until this rank is admitted."""
        self._is_capable = False
        self._tried = context.groups.membership.number
        """Highest number of a membership that was built, or failed to be."""
        self._num_collectives = 0
        self._note_others_gather: Callable[[], None] = lambda: None
        self._is_away = False
        """This rank computed nothing before the change (leaving.py), so its state is old."""
        self._schedule = schedule
        self._transfer = StateTransfer(context, schedule)
        self._changes = MembershipChanges(
            MessageChannel.of_descriptor(context.spec.channel), self._worker, context.groups.abort, self._prepare
        )
        self.stall_watch = StallWatch(context, self._changes.send)
        """A listener of the loop."""
        self.stall_watch.start()
        context.control.guard = self.repeat
        context.control.after_others_gather = self._end_others_gather
        context.engine.continue_with(self)
        context.loop.before_use = self.admit

    @property
    def newest_number(self) -> int:
        return max(self._tried, self._changes.ready_number)

    # -- callbacks of the loop ------------------------------------------------------------------------------------------

    @property
    def rests(self) -> bool:
        return self._is_capable and not self._transfer.is_due and self._changes.newest_number <= self._tried

    def on_begin(self, step: Step) -> None:
        self.catch_up()  # a loop that was left has no boundary
        if not self._is_capable:
            self._is_capable = True
            self._changes.send(Capable(self._worker, self._why_not()))

    def on_boundary(self, step: Step) -> None:
        """Let a rank that missed the step catch up, and carry out a change that all ranks have received."""
        self._context.control.leave_loops()  # a rank that joins is in none
        self._transfer_state()
        change = self._changes.newest
        if change is None or change.urgent or not self._tried < change.number <= step.stats.agreed_membership:
            return
        groups = self._context.groups
        if change.left and (out := [rank for rank in groups.ranks if rank not in groups.generation.computing]):
            self._transfer.plan(out, groups.generation.computing[0], False, None)  # all that compute may leave
            self._transfer_state()
            if self._tried >= change.number:
                return  # a rank was lost meanwhile
        if self._worker in change.left:
            self._leave(step)
        try:
            self._switch(change)
        except (PeerLostError, LaunchError) as error:
            self._follow_changes(_as_lost(error))
        self._transfer_state()

    def _leave(self, step: Step) -> None:
        self._context.loop.leave()
        self._schedule.collect(waits=True)  # the next rank 0 may write one at once
        self._context.recorder.hand_over()
        self._changes.send(Leaving(self._worker))
        watch_end(num_tcp_bytes)
        raise SystemExit(0)

    # -- collectives outside of a backward ------------------------------------------------------------------------------

    def repeat(self, collective: Callable[[], object]) -> object:
        """Run a collective; among the remaining ranks again if ranks are lost in it before all hold its result."""
        while True:
            has_result, result = False, None
            try:
                result = collective()
                has_result = True
                self._context.control.confirm()
                break
            except PeerLostError as error:
                num_completed = self._follow_changes(error)
                if has_result and num_completed > self._num_collectives:
                    break
                if num_completed > self._num_collectives:  # a gather of others, in which this rank took part from here
                    self._note_others_gather()
                self._num_collectives = num_completed
        self._num_collectives += 1
        return result

    def _end_others_gather(self, note: Callable[[], None]) -> None:
        self._note_others_gather = note
        self._context.control.confirm()
        self._num_collectives += 1
        note()

    # -- Recovery -------------------------------------------------------------------------------------------------------

    @property
    def knows_loss(self) -> bool:
        change = self._changes.newest
        return self._is_capable and change is not None and change.urgent and change.number > self._tried

    def recover(self, error: PeerLostError) -> float | None:
        """See `Recovery.recover`."""
        self._follow_changes(error)
        return self._transfer.missed_loss

    def _follow_changes(self, error: PeerLostError) -> int:
        """Begin the newest generation after a loss; return how many collectives a rank in it has completed."""
        groups = self._context.groups
        if not self._is_capable or groups.closed or error.restarts_all:
            raise error
        after = self._tried
        while True:
            change = self._changes.wait(after, groups.limits.setup_s if after == self._tried else _LOSS_KNOWN_S)
            if change is None:
                raise error
            after = change.number
            if self._worker not in change.workers:
                continue  # it is to leave at the end of this step, in which another rank is lost: it goes on until then
            try:
                return self._switch(change)
            except (PeerLostError, LaunchError) as failed:
                error = _as_lost(failed)
                if error.restarts_all:
                    raise error from None

    # -- one change -----------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Join the run, if it is in progress and this rank does not take part yet: wait until the others let it in."""
        if not self._joins or self._is_capable:
            return
        self._is_capable = True
        if reason := self._why_not():
            raise LaunchError(f"this rank can't join the run: {reason}")
        for loader in self._loaders:
            loader.loader.draws_alone = True
        self._before_join()
        while self._joins:
            # Again now and then: a supervisor that does not expect it ends this process.
            self._changes.send(Ready(self._worker))
            change = self._changes.wait(self._tried, _READY_EVERY_S)
            if change is None and not self._changes.ended:
                continue
            if change is None:
                raise LaunchError("the run ended before this rank could join it")
            try:
                self._switch(change)
                self._transfer_state()
            except (PeerLostError, LaunchError):
                continue

    def _switch(self, change: MembershipChange) -> int:
        context, groups = self._context, self._context.groups
        before, was_main = groups.membership, groups.rank == 0 and not self._joins
        received_s = self._changes.received_s
        self._tried = change.number
        self._is_away = self._is_away or not groups.generation.computes
        rank = change.workers.index(self._worker)
        if change.urgent:
            end_queued(groups.own_groups)
        groups.rebuild(_membership_of(change), rank, self._check_newest)
        standings = self._exchange_standings()
        whole = [one.num_backwards for one in standings if not (one.joins or one.is_behind)]
        if not whole:
            context.loop.unsound = "they are of an earlier step"
            error = PeerLostError("the only rank that had computed the last step is lost, and the others had missed it")
            error.restarts_all = True
            raise error
        late = [r for r, o in enumerate(standings) if o.joins or o.is_behind or o.num_backwards < max(whole)]
        source = next(r for r in range(len(standings)) if r not in late)
        is_inside = any(one.is_inside for r, one in enumerate(standings) if r not in late)
        self._follow_plans(before, change, late if is_inside else ())
        own = standings[rank]
        missed = self._transfer.missed_loss is not None or (own.num_backwards < max(whole) and not own.joins)
        self._transfer.plan(late, source, self._joins, standings[source].loss if missed else None)
        if missed:
            context.engine.elapsed_s = standings[source].elapsed_s
            if context.wire is not None:
                context.wire.forget()
        if self._joins:
            self._num_collectives = standings[source].num_collectives
        num_collectives = max(one.num_collectives for one in standings if not one.joins)
        took_s = time.monotonic() - received_s
        self._changes.send(Switched(self._worker, change.number, took_s, context.loop.steps_done))
        takes_over = rank == 0 and not was_main
        waits, step = missed or own.joins or own.is_inside, context.loop.step  # then the last step's weights are gone
        now = step.index + step.batch.num_steps if waits and step is not None else context.loop.steps_done
        self._record(before, change, took_s, now, takes_over=takes_over)
        for behind in (r for r in late if not standings[r].joins):
            text = f"rank {behind} has missed steps; it receives the state of rank {source}"
            context.recorder.event("caught_up", text, step=context.loop.steps_done)
        if not waits:
            self._transfer_state()
            if takes_over and change.lost:
                self._schedule.save_best()  # the lost rank 0 may have been writing it
        return num_collectives

    def _prepare(self, change: MembershipChange, changes: MembershipChanges) -> None:
        if self._worker in change.workers:
            groups = self._context.groups
            if change.joined:
                self._transfer.prepare()
            rank = change.workers.index(self._worker)
            groups.prepare(_membership_of(change), rank, lambda: changes.newest_number > change.number or groups.closed)

    def _check_newest(self) -> None:
        if self._changes.newest_number > self._tried:
            raise PeerLostError("another rank is lost")

    def _exchange_standings(self) -> list[_Standing]:
        context, step, totals = self._context, self._context.loop.step, self._context.engine.totals
        with suppress(PeerLostError):
            totals.read()
        if totals.is_torn:
            context.loop.unsound = "a rank was lost before the gradients of all ranks were summed"
        is_inside = step is not None and bool(step.stats.calls) and not step.arm
        loss = step.stats.loss if is_inside and step is not None else self._context.loop.last_loss
        own = _Standing(
            joins=self._joins,
            is_behind=self._is_away or totals.is_torn or self._transfer.missed_loss is not None,
            num_backwards=context.engine.num_backwards,
            num_collectives=self._num_collectives,
            is_inside=is_inside,
            loss=loss,
            elapsed_s=context.engine.elapsed_s,
        )
        # A control of its own: the ranks stand at different positions.
        rows = Control(context.groups).exchange(Operation.REBUILD, own.row())
        return [_Standing.read(row) for row in rows]

    def _follow_plans(self, before: Membership, change: MembershipChange, out: Sequence[int]) -> None:
        groups = self._context.groups
        members = [before.workers.index(one) if one in before.workers else None for one in change.workers]
        control = Control(groups)
        for loader in self._loaders:
            planner: Planner = loader.planner
            values = control.agree(planner.shares_of(members) if groups.rank == 0 else None)
            step = loader.loader.cursor().global_step + 1
            planner.follow(change.number, groups.rank, values, out, step)
            loader.loader.set_rank(groups.rank)
        if out:
            groups.set_computing([rank for rank in groups.ranks if rank not in out])

    def catch_up(self) -> None:
        """Send the state to ranks that missed a step or join, or receive it; every rank calls it at the end of the same body."""
        if self._transfer.is_due:
            self._context.control.leave_loops()
            self._transfer_state()

    def _transfer_state(self) -> None:
        groups = self._context.groups
        while self._transfer.is_due:
            try:
                self._context.engine.totals.agree_units()
                self._transfer.run()
            except PeerLostError as error:
                self._follow_changes(error)
            else:
                self._joins = self._is_away = False
                groups.set_computing(tuple(groups.ranks))

    def _record(
        self, before: Membership, change: MembershipChange, took_s: float, now: int, *, takes_over: bool
    ) -> None:
        context, recorder, step = self._context, self._context.recorder, self._context.loop.steps_done
        if takes_over and not self._joins:
            context.take_records()
            if before.workers[0] in [lost.worker for lost in change.lost]:
                self._report_lost_checkpoint()
                if text := self._schedule.retention.lost_best(now):
                    recorder.event("checkpoint_failed", text, step=step)
        for lost in change.lost:
            recorder.event("lost", lost.reason, step=step, worker=lost.worker, time_s=lost.time_s)
        if context.wire is not None and (change.lost or change.left):
            text = "the errors of gradients that a rank held are lost with it: once, at most what one step loses (error feedback)"
            recorder.event("wire", text, step=step)
        names = dict(zip(change.workers, change.device_names, strict=False))
        for worker in change.workers:
            if worker not in before.workers:
                rank = change.workers.index(worker)
                recorder.event(
                    "joined", f"rank {rank} ({names.get(worker, worker)}) joins the run", step=step, worker=worker
                )
        for worker in change.left:
            recorder.event(
                "left", f"rank {before.workers.index(worker)} leaves the run on request", step=step, worker=worker
            )
        shares = ", ".join(str(list(loader.planner.shares)) for loader in self._loaders)
        num_ranks = "1 rank" if len(change.workers) == 1 else f"{len(change.workers)} ranks"
        recorder.event(
            "rebuilt",
            f"the run continues on {num_ranks} after {took_s:.2f} s, shares {shares}",
            step=step,
            workers=list(change.workers),
            devices=list(change.device_names),
            seconds=took_s,
            number=change.number,
        )

    def _report_lost_checkpoint(self) -> None:
        """Report a checkpoint that the lost rank 0 had begun and not completed."""
        context, (_, begun_step) = self._context, self._schedule.last_save()
        newest = files.newest(context.folder)
        newest_step = 0 if newest is None else files.step_of(newest)
        if begun_step > newest_step:
            rest = f"the newest complete one is of step {newest_step}" if newest else "there is no complete one yet"
            text = f"rank 0 was lost while it wrote the checkpoint of step {begun_step}: {rest}"
            context.recorder.event("checkpoint_failed", text, step=context.loop.steps_done)

    def finish(self) -> None:
        """Report that the script ends here: nobody can join any more."""
        self.catch_up()
        self._changes.send(Finished(self._worker))

    def close(self) -> None:
        self.stall_watch.close()
        self._changes.close()


def _membership_of(change: MembershipChange) -> Membership:
    return Membership(change.number, change.workers, change.store, change.device_names)


def _as_lost(error: PeerLostError | LaunchError) -> PeerLostError:
    return error if isinstance(error, PeerLostError) else PeerLostError(str(error))
