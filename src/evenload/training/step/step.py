"""A step in the user's loop: one global batch, from the loader to its commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch

from evenload.errors import DivergenceError, StepError
from evenload.foreign_names import STEP_ELSEWHERE
from evenload.training.comm.control import Operation
from evenload.training.compute.batch_loss import CoupledLoss
from evenload.training.compute.device_state import slow_down
from evenload.training.compute.micro_steps import LossFn
from evenload.training.data.global_batch import GlobalBatch
from evenload.training.data.loader import GlobalLoader
from evenload.training.launch import worker
from evenload.training.step.attempt import Attempt
from evenload.training.step.engine import Engine
from evenload.training.step.planner import Planner
from evenload.training.step.stats import StepStats
from evenload.training.step.straight import StraightLine, begin_line
from evenload.training.step.update_watch import UpdateWatch
from evenload.training.step.wrong_loops import half_done, not_a_batch, not_a_function, second_loop, step_is_over
from evenload.wrong_calls import shows_usage, unknown_attribute

_RESTS = attrgetter("rests")


class Step:
    """One optimizer step = one global batch. Yielded by a prepared loader, valid inside the loop body.

    Attributes:
        index: global index of the step, over all epochs and loaders.
        epoch: the epoch.
        num_samples: samples of the global batch; units, where a tuple of loaders was prepared.
    """

    def __init__(
        self,
        loop: StepLoop,
        loader: GlobalLoader,
        planner: Planner,
        batch: GlobalBatch,
        *,
        arm: str = "",
        record_index: int | None = None,
    ) -> None:
        """Args:
        arm: arm of a measurement that the step belongs to (measure.py); empty in training.
        record_index: index of the step in the records, if it is not `index`.
        """
        self._loop = loop
        self._loader = loader
        self.batch = batch
        self.planner = planner
        self.stats = StepStats()
        self.index = loop.steps_done if planner.in_order else planner.step_index(batch.epoch_step, loop.steps_done)
        self.record_index = self.index if record_index is None else record_index
        self.arm = arm
        self.epoch = batch.plan.epoch
        self.num_samples = batch.plan.num_samples
        self.committed = bool(arm)  # training uses a measurement's samples later, so they never count here

    @shows_usage("step.backward(loss_fn), where loss_fn(batch) returns the loss of a micro-batch")
    def backward(self, loss_fn: LossFn, *, batch_loss: Callable[..., Any] | None = None) -> torch.Tensor:
        """Run forward and backward of the whole global batch; this rank computes its share.

        Args:
            loss_fn: called with each micro-batch of this rank's share, on its device, as the user's collate_fn made it.
                Returns the loss as a mean over the samples, ``(loss, weight)`` as a mean over `weight` units, or a dict
                with ``loss``, optionally ``weight``, and further scalars.
            batch_loss: for a loss that couples the samples of the batch (CLIP, SimCLR, triplets). Then `loss_fn` encodes: it
                returns a tensor or a tuple of tensors of shape ``(samples, ...)``. `batch_loss` receives those of the whole
                global batch, in global order, on every rank, and returns the loss in one of the three forms. With several
                micro-batches `loss_fn` runs twice for each sample; see docs/contrastive.md.

        Returns:
            The weighted mean loss over the global batch: a scalar on `run.device`, the same on all ranks. `.item()` waits for
            the device, `run.log` does not. `.grad` of the parameters is final: clip it, step the optimizer.

        Raises:
            StepError: wrong use, with the line to write instead.
            NonFiniteError: the loss or gradient was NaN or infinite in several steps in a row (on a GPU: a step later).
        """
        if not callable(loss_fn) or not (batch_loss is None or callable(batch_loss)):
            raise not_a_function(batch_loss if callable(loss_fn) else loss_fn)
        return self._loop.backward(self, loss_fn if batch_loss is None else CoupledLoss(loss_fn, batch_loss))

    def __iter__(self) -> Iterator[Any]:
        raise not_a_batch()

    def __getitem__(self, key: object) -> Any:
        raise not_a_batch()

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise not_a_batch()

    def __getattr__(self, name: str) -> Any:
        raise unknown_attribute(self, name, STEP_ELSEWHERE)

    @property
    def metrics(self) -> Mapping[str, float | torch.Tensor]:
        """Averages over the global batch of the further scalars that loss_fn returned; on a GPU scalars on `run.device`."""
        return self.stats.metrics_now

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples (units of a tuple of loaders) of each rank in this step."""
        return self.batch.plan.shares

    @property
    def loader(self) -> GlobalLoader:
        return self._loader

    def commit(self) -> None:
        """Count the step's samples as used; a checkpoint in the loop body does it before the body ends."""
        if not self.committed:
            self.committed = True
            self._loop.steps_done += self._loader.commit(self.batch)

    def __repr__(self) -> str:
        return f"Step(index={self.index}, epoch={self.epoch}, num_samples={self.num_samples})"


class StepListener:
    """Callbacks at the defined points of a step. Subclasses override the ones they need; the defaults do nothing.

    begin -> backward -> gradients (once per call) -> trained -> end -> boundary -> extra_steps, if due
    """

    @property
    def rests(self) -> bool:
        """True if no callback has anything to do in the next steps of a rank that computes alone, until `StepLoop.leave_line` is
        called. `on_trained` is called where other ranks stand by.

        A listener that waits for something outside of the training may learn of it 0.2 s later (straight.py).
        """
        return False

    def on_begin(self, step: Step) -> None:
        """A loop body begins."""

    def on_backward(self, step: Step, loss_fn: LossFn) -> None:
        """`step.backward` was called and has not computed anything yet."""

    def on_gradients(self, step: Step) -> None:
        """`step.backward` is done without an error; `.grad` is final."""

    def on_trained(self, step: Step) -> None:
        """A step of training ended, before its commit."""

    def on_end(self, step: Step) -> None:
        """A loop body with a backward ended, in training or in a measurement, before the commit."""

    def on_boundary(self, step: Step) -> None:
        """A step of training is committed and the next has not begun; the callback may end the script.
        Not called while a stop is requested and the step's gradients are still unused: no checkpoint would hold them.
        """

    def on_loop_end(self) -> None:
        """A loop over a loader came to the end of its epoch, on all ranks."""

    def is_due(self, num_steps: int) -> bool:
        """Return whether `extra_steps` begins now, after `num_steps` steps of this session."""
        return False

    def extra_steps(self, loader: Any) -> Iterator[Step]:
        """Yield steps of its own between two steps of training of a `StepLoader`, and leave everything as it was."""
        return iter(())


class StepLoop:
    """State of the user's loop: the running step, and what has happened to it. One for all loaders of a job."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.step: Step | None = None
        """The step whose loop body runs."""
        self.steps_done = 0
        """Global index of the next step to run, over all epochs and sessions."""
        self.failed = False
        """True if the last backward raised."""
        self.in_backward = False
        """True while `step.backward` computes."""
        self.left_early = False
        """True if the last loop over a loader was left before the end of its epoch."""
        self.ran_out = False
        """True if a loop over a loader came to the end of its epoch in this session."""
        self.stop_requested = False
        """True if a rank received a request to stop; the same on all ranks."""
        self.defers_stop = False  # under strategy local islands learn of a request when they synchronise
        self.stopped = False
        """True if the script is being ended on request, with its state saved, on all ranks."""
        self.left = False
        """True if this rank has left the run on request, while the others continue (elastic/)."""
        self.last_loss = 0.0
        """Loss of the last step whose body has ended."""
        self.before_use: Callable[[], None] = lambda: None
        """Called before the position or the steps of a loader are used: a rank may have to wait for others there."""
        self.unsound = ""
        """The error that shows that this rank's state may be wrong, so that no checkpoint may hold it."""
        self._listeners: dict[str, list[StepListener]] = {n: [] for n in vars(StepListener) if n[:3] in ("on_", "is_")}
        """By callback, those that override it."""
        self.optimizer_stepped = False
        self._session_steps = 0
        self._all_listeners: list[StepListener] = []
        self.line: StraightLine | None = None
        """Computes the steps, as long as nothing changes."""
        self.watch = UpdateWatch(engine)
        self._dropped: Step | None = None

    def add_listener(self, listener: StepListener) -> None:
        """Call `listener` at each point of a step, after the listeners added before it."""
        self._all_listeners.append(listener)
        for name, listeners in self._listeners.items():
            if getattr(type(listener), name) is not getattr(StepListener, name):
                listeners.append(listener)

    def leave_line(self) -> None:
        """Let what follows go the usual way: something has to be done."""
        if (line := self.line) is not None:
            self.line = None
            line.learn()

    def stop(self) -> None:
        """Note that the script ends here on request, with its state saved."""
        self.left_early = self.stopped = True

    def leave(self) -> None:
        """Note that this rank leaves the run here."""
        self.left_early = self.left = True

    def close(self) -> None:
        """Forget the running step: an exception may hold a loop that ends after the run."""
        self.step = self.line = None

    def begin(self, step: Step) -> None:
        self.step = step
        self.optimizer_stepped, self._dropped = False, None
        worker.progress.step = step.index
        if self.line is not None and self.line.has_ended(step.batch.plan):
            self.leave_line()
        if self.line is None or self.line.has_others:
            self.engine.control.set_position(step.epoch, step.batch.plan.step)
        if self.line is None:
            for listener in self._listeners["on_begin"]:
                listener.on_begin(step)
        self.engine.clock.switch("optimizer")

    def backward(self, step: Step, loss_fn: LossFn) -> torch.Tensor:
        if self.step is not step:
            self.engine.control.check_open(Operation.BEGIN)
            raise step_is_over()
        if self.in_backward:
            raise StepError(
                "step.backward was called inside loss_fn; return the sum of both losses from loss_fn, or call step.backward "
                "twice, one after the other: gradients add up"
            )
        line, loss = self.line, None
        if line is not None and not line.takes(step.batch, step.stats, loss_fn):
            line = None
            self.leave_line()
        for listener in () if line is not None else self._listeners["on_backward"]:
            listener.on_backward(step, loss_fn)
        self.failed = self.in_backward = True
        try:
            if line is not None:
                loss = line.backward(step.batch, step.stats, loss_fn)
            if loss is None:
                if line is not None:
                    self.leave_line()
                kept = step.stats.calls > 0 and not self.optimizer_stepped and self.watch.keeps_weights
                attempt = Attempt(step.batch, step.planner, step.stats, loss_fn, self.optimizer_stepped, kept)
                attempt.failure = None if line is None else line.failure
                loss = self.engine.backward(attempt)
        except DivergenceError as error:
            self.unsound = type(error).__name__
            raise
        finally:
            self.in_backward = False
        self.failed = self.optimizer_stepped = False
        self.unsound = ""
        self.watch.begin()
        for listener in () if line is not None else self._listeners["on_gradients"]:
            listener.on_gradients(step)
        return loss

    @property
    def awaits_optimizer(self) -> bool:
        """True if an optimizer that steps now uses a step's gradients, in a loop body or after a loop that was left."""
        return (self.step is not None and not self.in_backward) or self._dropped is not None

    def optimizer_done(self) -> None:
        """Note that an optimizer of torch has stepped, in a loop body or after a loop that was left before it did."""
        if self.in_backward:
            return  # an inner loop of loss_fn over parameters of its own
        self.optimizer_stepped = True
        if self._dropped is not None:
            self._dropped.commit()
            self._dropped = None

    def end(self, step: Step, *, finished: bool = True) -> None:
        """End the loop body of `step`: record it and commit it, unless it was left (not `finished`) with unused gradients."""
        if self.step is not step and not finished:
            return  # the run ended before: an exception held the loop until Python collected it, in the middle of other code
        engine, line = self.engine, self.line
        is_usual = not finished or step.stats.calls != 1 or step.stats.stop_requested
        if line is not None and not is_usual and (not line.has_others or line.holds):
            self._end_straight(step, line)
            return
        if line is not None:
            self.leave_line()
        engine.totals.end_body(finished=finished)
        dropped = not finished and not step.committed and self.is_half_done
        self.stop_requested = self.stop_requested or (step.stats.stop_requested and not self.defers_stop)
        at_boundary = finished and not step.arm and not (self.stop_requested and self.is_half_done)
        self.left_early = not finished
        if step.stats.calls:
            self.last_loss = step.stats.loss
            if engine.throttle.active:
                slow_down(engine.throttle, engine.device, step.stats.body_since_s)
        engine.clock.switch("other")
        self.step = None
        engine.control.set_position(step.epoch, -1)
        self._dropped = step if dropped else None
        if step.stats.calls:
            if not dropped:
                self._record(step)
            for listener in self._listeners["on_end"]:
                listener.on_end(step)
        if finished or (step.stats.calls and not dropped):
            step.commit()
        if at_boundary:
            for listener in self._listeners["on_boundary"]:
                listener.on_boundary(step)
            if not (self.stop_requested or step._loader.is_tuned):
                self.line = begin_line(engine, step.batch, step.planner, step.stats, map(_RESTS, self._all_listeners))

    def _end_straight(self, step: Step, line: StraightLine) -> None:
        self.last_loss, self.left_early, self.step = step.stats.loss, False, None
        if line.has_others:
            self.engine.clock.switch("other")
            self.engine.control.set_position(step.epoch, -1)
            self._record(step)
        else:
            self._session_steps += 1
            line.end(step.record_index, step.batch, step.stats, at_once=step.committed)
        step.commit()

    def settle(self) -> None:
        """Wait for what devices hold of the steps so far, and record it. All ranks call it together; raises as `backward`."""
        self.leave_line()
        self.engine.totals.agree_units()
        self.engine.recorder.write_waiting()

    def _record(self, step: Step) -> None:
        timed = stats if (stats := step.stats).is_timed else stats.earlier
        stats.plan, stats.global_step, stats.is_first = step.batch.plan, step.batch.global_step, not self._session_steps
        self._session_steps += 1
        if timed is not None and (plan := timed.plan) is not None:
            if not step.planner.learns:
                step.planner.follow_step(timed.global_step, plan)
            elif self.line is not None:
                self.line.unlearned.append(timed)
            else:
                step.planner.observe(timed.global_step, plan, *timed.costs())
            if step._loader.is_tuned and not step.arm and not timed.unusual:
                step.loader.observe(timed.cost(plan.num_samples))
        for listener in () if step.arm else self._listeners["on_trained"]:
            listener.on_trained(step)
        at_once = step.committed or self.left_early
        self.engine.recorder.step(step.record_index, step.batch.plan, stats, step.arm, at_once=at_once)

    def end_epoch(self) -> None:
        self.settle()
        self.engine.clock.switch("other")
        self.left_early, self.ran_out = False, True
        for listener in self._listeners["on_loop_end"]:
            listener.on_loop_end()

    def due_listener(self) -> StepListener | None:
        for listener in self._listeners["is_due"]:
            if listener.is_due(self._session_steps):
                return listener
        return None

    @property
    def has_unused_gradients(self) -> bool:
        """True if the last step, running or left early, has gradients that nobody has used."""
        return self._dropped is not None or self.is_half_done

    @property
    def is_half_done(self) -> bool:
        """True if the running step has gradients that nobody has used yet, as far as `UpdateWatch` can know."""
        step = self.step
        if step is None or not step.stats.calls or step.stats.skipped or self.optimizer_stepped:
            return False
        return self.watch.are_unused

    def check_alone(self, loader: GlobalLoader) -> None:
        """Raise StepError if a step is open: a step can't be of two loaders, and a loader has one loop at a time."""
        if self.step is not None:
            raise second_loop(same_loader=self.step.loader is loader)

    def check_between_steps(self, what: str) -> None:
        """Raise StepError if `what` would see gradients that no optimizer has used yet."""
        if self.is_half_done:
            raise half_done(what)
