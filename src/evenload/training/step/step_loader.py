"""`StepLoader`: a prepared loader, whose iteration yields steps."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from evenload.errors import StepError
from evenload.foreign_names import LOADER_ELSEWHERE
from evenload.training.data.loader import GlobalLoader
from evenload.training.step.planner import Planner
from evenload.training.step.step import Step, StepListener, StepLoop
from evenload.wrong_calls import unknown_attribute


class StepLoader:
    """Result of `run.prepare` for a DataLoader: iterating over it yields steps."""

    epoch_was_read = False
    """True if the script has read `epoch`, to count its epochs from it."""

    def __init__(self, loader: GlobalLoader, planner: Planner, loop: StepLoop) -> None:
        self.loader = loader
        self.planner = planner
        self._loop = loop

    def __len__(self) -> int:
        """Steps per epoch; depends on the data and the global batch alone."""
        return len(self.loader)

    @property
    def epoch(self) -> int:
        """Epoch of the running iteration, or of the next one; after `run.resume` the one to continue with."""
        self.epoch_was_read = True
        self._loop.before_use()
        return self.loader.epoch

    @property
    def dataset(self) -> Any:
        """The user's dataset; of a tuple of loaders a tuple."""
        return self.loader.dataset

    @property
    def batch_size(self) -> int | tuple[int, ...] | None:
        """The global batch, in samples, of each loader of a tuple; None where a batch_sampler decides."""
        return self.loader.batch_size

    def __getitem__(self, index: object) -> Any:
        raise StepError("a prepared loader has no index; iterate over it: for step in loader: step.backward(loss_fn)")

    def __getattr__(self, name: str) -> Any:
        raise unknown_attribute(self, name, LOADER_ELSEWHERE)

    def __iter__(self) -> Iterator[Step]:
        while (listener := (yield from self._train())) is not None:
            yield from listener.extra_steps(self)

    def _train(self) -> Generator[Step, None, StepListener | None]:
        """Yield steps to the end of the epoch, or until a listener's extra steps are due; return that listener."""
        loop = self._loop
        loop.before_use()
        loop.engine.control.set_position(self.loader.epoch, -1)  # a rank may have no step in an epoch (async)
        batches = iter(self.loader)
        while True:
            if loop.step is not None:
                loop.check_alone(self.loader)
            loop.engine.clock.switch("data")
            if (batch := next(batches, None)) is None:
                self.planner.end_loop(self.loader, loop)
                loop.end_epoch()
                return None
            step = Step(loop, self.loader, self.planner, batch)
            loop.begin(step)
            finished = False
            try:
                yield step
                finished = True
            finally:
                # A `break` ends the generator here: samples count as used where their gradients were.
                loop.end(step, finished=finished)
                if not finished:
                    self.planner.leave_loop(self.loader, loop)
            if loop.line is None and (listener := loop.due_listener()) is not None:
                return listener
