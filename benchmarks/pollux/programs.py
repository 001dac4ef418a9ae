"""Programs that behave as the jobs of Pollux' simulator: epochs of measured throughput and statistical efficiency.

A rigid job keeps the batch that its owner chose, as under Tiresias; it reports optimizer steps. An elastic one tunes its
batch after each epoch and each change of devices by what it has learnt (`learning`), and reports progress.
"""

from __future__ import annotations

from benchmarks.pollux.learning import Learner, Setting, split_batch
from benchmarks.pollux.tables import Application
from evenload.scheduler.simulator.cluster import DeviceShape
from evenload.scheduler.simulator.programs import ProgramReport


class EpochProgram:
    """One job through its epochs."""

    def __init__(self, app: Application, batch: int, learner: Learner | None) -> None:
        """`learner` makes it elastic; without one it keeps `batch`."""
        self._app, self._batch, self._learner = app, batch, learner
        self._shape: tuple[int, ...] = ()
        self._epoch = 0
        self._progress = 0.0
        self._steps = 0.0
        self._setting = Setting(1, 1)
        self._gain = 1.0
        self._seconds = 1.0
        self._is_curve_old = False
        self.is_done = False

    def start(self, shape: DeviceShape) -> None:
        """Takes new devices and chooses a batch for them."""
        self._shape = shape.per_host
        self._configure()

    def until_change_s(self) -> float:
        """Until the end of the epoch."""
        left = self._app.progress(self._epoch + 1) - self._progress
        return max(0.0, left / self._gain * self._seconds)

    def advance(self, seconds: float) -> None:
        """Runs on; at the end of an epoch the gradient's noise and so the best batch change."""
        whole_s = self.until_change_s()
        steps = seconds / self._seconds
        self._progress += steps * self._gain
        self._steps += steps
        if seconds < whole_s - 1e-6:
            return
        self._epoch += 1
        self._progress = self._app.progress(self._epoch)
        if self._epoch >= self._app.num_epochs:
            self.is_done = True
        else:
            self._configure()

    def report(self) -> ProgramReport:
        """Optimizer steps of a rigid job, which has so many in all; progress of an elastic one."""
        if self._learner is None:
            return ProgramReport(self._steps, self._steps + self._steps_left(), 1 / self._seconds)
        rates = None
        if self._is_curve_old:
            self._is_curve_old = False
            rates = self._learner.rates()
        total = self._app.progress(self._app.num_epochs)
        return ProgramReport(self._progress, total, self._gain / self._seconds, rates)

    def _steps_left(self) -> float:
        app, batch = self._app, self._actual_batch()
        if self.is_done:
            return 0.0
        left = (app.progress(self._epoch + 1) - self._progress) / self._gain
        for epoch in range(self._epoch + 1, app.num_epochs):
            left += (app.progress(epoch + 1) - app.progress(epoch)) / app.gain(batch, epoch)
        return left

    def _actual_batch(self) -> int:
        return sum(self._shape) * self._setting.local * self._setting.num_micro

    def _configure(self) -> None:
        app, num = self._app, sum(self._shape)
        if self._learner is None:
            self._setting = split_batch(app, self._batch, num)
        else:
            self._setting = self._learner.best(len(self._shape), num)
        step_s, sync_s = app.step_s(self._shape, self._setting.local)
        self._seconds = step_s + (self._setting.num_micro - 1) * (step_s - sync_s)
        batch = self._actual_batch()
        self._gain = app.gain(batch, self._epoch)
        if self._learner is not None:
            self._learner.observe(len(self._shape), num, self._setting.local, (step_s, sync_s))
            self._learner.set_gradient(*app.grad_stats(batch, self._epoch))
            self._is_curve_old = True
