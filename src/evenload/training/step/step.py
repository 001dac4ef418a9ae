"""A step in the user's loop: one global batch, from the loader to its commit."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import islice
from typing import Any, Protocol

import torch

from evenload.errors import StepError
from evenload.training.compute.micro_steps import LossFn
from evenload.training.data.global_batch import GlobalBatch
from evenload.training.data.loader import GlobalLoader
from evenload.training.step.engine import Engine
from evenload.training.step.planner import Planner
from evenload.training.step.stats import StepStats

_NUM_WATCHED = 16
"""Parameters of each model whose changes are looked at: an update by hand changes all of them, or nearly."""


class Step:
    """One optimizer step = one global batch. Yielded by a prepared loader, valid inside the loop body.

    Attributes:
        index: global index of the step, over all epochs and loaders.
        epoch: the epoch.
        num_samples: samples of the global batch.
    """

    def __init__(self, loop: StepLoop, loader: GlobalLoader, planner: Planner, batch: GlobalBatch) -> None:
        self._loop = loop
        self._loader = loader
        self.batch = batch
        self.planner = planner
        self.stats = StepStats()
        self.index = loop.steps_done
        self.number = self.index
        """What the records count it as: the index, except in a window."""
        self.arm = ""
        """The arm of a window's step (measure.py); empty in training."""
        self.epoch = batch.epoch
        self.num_samples = batch.plan.num_samples
        self.committed = False

    def backward(self, loss_fn: LossFn) -> torch.Tensor:
        """Forward and backward of the whole global batch; this rank's share of it is computed here.

        Args:
            loss_fn: called with each micro-batch of this rank's share, on its device, as the user's collate_fn made it.
                Returns the loss as a mean over the samples, ``(loss, weight)`` as a mean over `weight` units, or a dict
                with ``loss``, perhaps ``weight``, and further scalars.

        Returns:
            The weighted mean loss over the global batch: a scalar CPU tensor, the same on all ranks. `.grad` of the
            parameters is final: clip it, step the optimizer.

        Raises:
            StepError: wrong use, with the line to write instead.
            NonFiniteError: the loss or gradient was NaN or infinite in several steps in a row.
        """
        if self._loop.step is not self:
            raise StepError("this step is over; call step.backward inside the loop body of its own step")
        if self._loop.inspect is not None:
            self._loop.inspect(self, loss_fn)
        self._loop.failed = True
        loss = self._loop.engine.backward(
            self.batch, self.planner, self.stats, loss_fn, stepped=self._loop.optimizer_stepped
        )
        self._loop.backward_done()
        return loss

    @property
    def metrics(self) -> dict[str, float]:
        """Averages over the global batch of the further scalars that loss_fn returned."""
        return self.stats.metrics

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank in this step."""
        return self.batch.plan.shares

    def commit(self) -> None:
        """Counts the step's samples as used; a checkpoint in the loop body does it before the body ends."""
        if not self.committed:
            self.committed = True
            self._loader.commit(self.batch)
            self._loop.steps_done += 1

    def __repr__(self) -> str:
        return f"Step(index={self.index}, epoch={self.epoch}, num_samples={self.num_samples})"


class Interlude(Protocol):
    """Takes over the loader between two steps of training, and leaves everything as it was."""

    def is_due(self, num_steps: int) -> bool:
        """Whether it begins after so many steps of this session."""
        ...

    def steps(self, loader: StepLoader) -> Iterator[Step]:
        """The steps it puts in."""
        ...


class StepLoop:
    """Which step's loop body runs now; one for all loaders of a job."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.step: Step | None = None
        self.steps_done = 0
        """Global index of the next step to run, over all epochs and sessions."""
        self.optimizer_stepped = False
        """Whether an optimizer of torch stepped after the last backward of the running step."""
        self.failed = False
        """Whether the last backward raised."""
        self.left_early = False
        """Whether the last loop over a loader was left before the end of its epoch."""
        self.ran_out = False
        """Whether a loop over a loader came to the end of its epoch in this session."""
        self.inspect: Callable[[Step, LossFn], None] | None = None
        """Called before a backward by `evenload verify`."""
        self.on_begin: Callable[[Step], None] | None = None
        """Told that a loop body begins (the first step of a session looks around)."""
        self.on_end: Callable[[Step], None] | None = None
        """Told that a loop body with a backward has ended, by `evenload verify`."""
        self.on_record: Callable[[GlobalBatch, StepStats, bool], None] | None = None
        """Told of each step of training, and whether its times are those of a usual one (growth.py)."""
        self.on_boundary: Callable[[Step], None] | None = None
        """Told that a step is committed and the next has not begun; it may end the script (stop.py). Not told of one
        that leaves gradients to a later step when the script is to stop: they are in no checkpoint."""
        self.asked = False
        """Whether a rank was asked to stop, as all ranks heard in the same step."""
        self.stopped = False
        """Whether the script is being ended on request, saved, on all ranks alike."""
        self.interlude: Interlude | None = None
        """What yields further steps between two steps of training (measure.py)."""
        self._session_steps = 0
        self._watched: list[tuple[torch.Tensor, int]] = []
        self._dropped: Step | None = None

    def begin(self, step: Step) -> None:
        """The loop body of `step` begins."""
        self.step = step
        self.optimizer_stepped = False
        self._dropped = None
        self.engine.control.place = (step.epoch, step.batch.epoch_step)
        if self.on_begin is not None:
            self.on_begin(step)
        self.engine.clock.switch("optimizer")

    def backward_done(self) -> None:
        """A backward of the running step has ended: its gradients wait to be used."""
        self.failed = self.optimizer_stepped = False
        self._watched = [
            (parameter, parameter._version)
            for model in self.engine.models
            for parameter in islice((p for p in model.parameters() if p.grad is not None), _NUM_WATCHED)
        ]

    @property
    def awaits_optimizer(self) -> bool:
        """Whether an optimizer that steps now uses a step's gradients: in a loop body, or behind a loop left before it did."""
        return self.step is not None or self._dropped is not None

    def optimizer_done(self) -> None:
        """An optimizer of torch has stepped, in a loop body or behind a loop that was left before it did."""
        self.optimizer_stepped = True
        if self._dropped is not None:
            self._dropped.commit()
            self._dropped = None

    def end(self, step: Step, *, dropped: bool = False) -> None:
        """The loop body of `step` has ended: what it did is looked at by the planner, and written down.

        One that is `dropped`, left with its gradients unused, is no step of training.
        """
        engine = self.engine
        if step.stats.calls:
            engine.slow_down(step.stats.body_since_s)
        engine.clock.switch("other")
        self.step = None
        engine.control.place = (step.epoch, -1)
        self._dropped = step if dropped else None
        if not step.stats.calls:
            return
        if not dropped:
            self._record(step)
        if self.on_end is not None:
            self.on_end(step)

    def _record(self, step: Step) -> None:
        """What a step of training did: the planner learns from it, and it is written down."""
        engine = self.engine
        first = self._session_steps == 0
        self._session_steps += 1
        step.planner.observe(
            step.batch.global_step, step.batch.plan, step.stats.own_seconds(), first or step.stats.unusual
        )
        usual = not (first or step.arm or step.stats.unusual)
        if usual:
            step._loader.observe(step.stats.cost(step.batch.plan.num_samples))
        if self.on_record is not None and not step.arm:
            self.on_record(step.batch, step.stats, usual)
        engine.recorder.step(step.number, step.batch.plan, step.stats, step.arm)

    def is_due(self) -> bool:
        """Whether the interlude begins now, after a committed step."""
        return self.interlude is not None and self.interlude.is_due(self._session_steps)

    @property
    def is_half_done(self) -> bool:
        """Whether there are gradients of a running step that nobody has used yet.

        An optimizer of torch tells it (`optimizer_done`). An update by hand is seen by the parameters it changed, or by the
        gradients it took away; one through ``.data`` that leaves its gradients can't be seen.
        """
        step = self.step
        if step is None or not step.stats.calls or step.stats.skipped or self.optimizer_stepped:
            return False
        if any(parameter._version != version for parameter, version in self._watched):
            return False
        return bool(self.engine.strategy.leftovers())

    def check_between_steps(self, what: str) -> None:
        """Raises where `what` would see gradients that no optimizer has used yet."""
        if self.is_half_done:
            raise StepError(
                f"{what} between step.backward and optimizer.step(): the step is half done; call it at the end of the "
                "loop body (after an update by hand through .data, take the gradients away first: model.zero_grad())"
            )


class StepLoader:
    """What `run.prepare` makes of a DataLoader: it yields steps."""

    def __init__(self, loader: GlobalLoader, planner: Planner, loop: StepLoop) -> None:
        self.loader = loader
        self.planner = planner
        self._loop = loop

    def __len__(self) -> int:
        """Steps per epoch; depends on the data and the global batch alone."""
        return len(self.loader)

    @property
    def epoch(self) -> int:
        """The epoch that the next (or the running) iteration is; after `run.resume` the one to go on with."""
        return self.loader.epoch

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self.loader.dataset

    @property
    def batch_size(self) -> int | None:
        """The global batch, in samples; None where a batch_sampler decides."""
        return self.loader.batch_size

    def __iter__(self) -> Iterator[Step]:
        while (yield from self._train()):
            if self._loop.interlude is not None:
                yield from self._loop.interlude.steps(self)

    def _train(self) -> Generator[Step, None, bool]:
        """Steps to the end of the epoch, or until the interlude is due; tells whether it is."""
        loop = self._loop
        batches = iter(self.loader)
        while True:
            loop.engine.clock.switch("data")
            try:
                batch = next(batches)
            except StopIteration:
                loop.engine.clock.switch("other")
                loop.left_early, loop.ran_out = False, True
                return False
            step = Step(loop, self.loader, self.planner, batch)
            loop.begin(step)
            finished = False
            try:
                yield step
                finished = True
            finally:
                # A `break` ends the generator here: samples count as used where their gradients were.
                dropped = not finished and not step.committed and loop.is_half_done
                loop.asked = loop.asked or step.stats.asked
                complete = finished and not (loop.asked and loop.is_half_done)
                loop.left_early = not finished
                loop.end(step, dropped=dropped)
                if finished or (step.stats.calls and not dropped):
                    step.commit()
            if complete and loop.on_boundary is not None:
                loop.on_boundary(step)
            if loop.is_due():
                return True
