"""Programs that behave as the jobs of Pollux' simulator: epochs of measured throughput and statistical efficiency.

A rigid job keeps the batch that its owner chose, as under Tiresias; it reports optimizer steps. One with Pollux' agent tunes
its batch after each epoch and each change of devices by what it has learnt (`learning`), and reports progress and a curve.
An Evenload job reports the costs of its steps, of which the queue learns; with `batch_max` it chooses its batch after each
epoch, and on other devices inside it, by `evenload.balance.batch` as `Run` does.
"""

from __future__ import annotations

from benchmarks.pollux.learning import Learner, Setting, split_batch
from benchmarks.pollux.tables import Application
from evenload.balance.batch import ChoiceTimes, choose_batch
from evenload.balance.scaling import StepCosts, StepPoint, fit_scaling
from evenload.scheduler.simulator.cluster import DeviceShape
from evenload.scheduler.simulator.programs import ProgramReport


class EpochProgram:
    """One job through its epochs."""

    _is_evenload = False

    def __init__(self, app: Application, batch: int, learner: Learner | None) -> None:
        """`learner` makes it elastic; without one it keeps `batch`."""
        self._app, self._batch, self._learner = app, batch, learner
        self._shape: tuple[int, ...] = ()
        self._speed = 1.0
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
        self._speed = shape.speed(self._is_evenload)
        self._configure()

    def until_change_s(self) -> float:
        """Until the end of the epoch."""
        return self._until_epoch_s()

    def _until_epoch_s(self) -> float:
        left = self._app.progress(self._epoch + 1) - self._progress
        return max(0.0, left / self._gain * self._seconds)

    def advance(self, seconds: float) -> None:
        """Runs on; at the end of an epoch the gradient's noise and so the best batch change."""
        whole_s = self._until_epoch_s()
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

    def _step_s(self) -> tuple[float, float]:
        """Seconds of a step and of its synchronisation: devices of another speed than those measured compute so much slower."""
        step_s, sync_s = self._app.step_s(self._shape, self._setting.local)
        return (step_s - sync_s) / self._speed + sync_s, sync_s

    def _configure(self) -> None:
        app, num = self._app, sum(self._shape)
        if self._learner is None:
            self._setting = split_batch(app, self._batch, num)
        else:
            self._setting = self._learner.best(len(self._shape), num)
        step_s, sync_s = self._step_s()
        self._seconds = step_s + (self._setting.num_micro - 1) * (step_s - sync_s)
        batch = self._actual_batch()
        self._gain = app.gain(batch, self._epoch)
        if self._learner is not None:
            self._learner.observe(len(self._shape), num, self._setting.local, (step_s, sync_s))
            self._learner.set_gradient(*app.grad_stats(batch, self._epoch))
            self._is_curve_old = True


class EvenloadProgram(EpochProgram):
    """A job as `Run` trains and reports it."""

    _is_evenload = True

    def __init__(self, app: Application, batch: int, batch_max: int = 0) -> None:
        """`batch` stays, or is where the job begins if it may choose up to `batch_max`."""
        super().__init__(app, batch, None)
        self._base, self._limit = batch, batch_max
        self._points: dict[tuple[int, ...], StepPoint] = {}
        self._has_tried = False
        self._tried_from: int | None = None
        self._times = ChoiceTimes()

    def start(self, shape: DeviceShape) -> None:
        """Forgets the times of steps on earlier devices, and on others chooses its batch once it has new ones."""
        before = self._shape
        self._points.clear()
        super().start(shape)
        if self._limit and before and before != self._shape:
            self._has_tried, self._tried_from = False, None
            self._times.begin()

    def until_change_s(self) -> float:
        """Until the end of the epoch, or until the batch is chosen inside it."""
        left_s, steps_left = super().until_change_s(), self._times.steps_left
        return left_s if steps_left is None else min(left_s, steps_left * self._seconds)

    def advance(self, seconds: float) -> None:
        epoch, steps = self._epoch, seconds / self._seconds
        super().advance(seconds)
        times = self._times
        if times.steps_left is not None:
            left = times.steps_left - steps
            times.steps_left = left if left > 1e-6 else 0.0
        if self._limit and not self.is_done and times.is_due(in_epoch=self._epoch == epoch):
            before = self._batch
            self._choose()
            times.chose(before, self._batch)
            self._configure()

    def report(self) -> ProgramReport:
        total = self._app.progress(self._app.num_epochs)
        return ProgramReport(self._progress, total, self._gain / self._seconds, costs=self._costs(), is_learned=True)

    def _costs(self) -> StepCosts:
        app, setting = self._app, self._setting
        step_s, sync_s = self._step_s()
        compute_s = step_s - sync_s
        return StepCosts(
            self._actual_batch(),
            setting.num_micro,
            setting.num_micro * compute_s,
            step_s + (setting.num_micro - 1) * compute_s,
            cap=app.max_local,
            base_batch=self._base if self._limit else 0,
            max_batch=self._limit,
            noise_samples=self._noise_samples() if self._limit else None,
        )

    def _noise_samples(self) -> float:
        epoch = min(self._epoch, self._app.num_epochs - 1)
        sqr, var = self._app.grad_stats(self._actual_batch(), epoch)
        return var * self._app.init_batch / max(sqr, 1e-9 * var, 1e-30)  # 0 was measured at the end of some

    def _configure(self) -> None:
        super()._configure()
        costs, num = self._costs(), sum(self._shape)
        self._points[(*self._shape, costs.batch_size)] = StepPoint.of(costs, len(self._shape), num)

    def _choose(self) -> None:
        num_hosts, num = len(self._shape), sum(self._shape)
        here = list(self._points.values())
        model = fit_scaling(here)
        choice = choose_batch(
            base=self._base,
            limit=self._limit,
            now=self._batch,
            noise=self._noise_samples(),
            seconds_of=lambda size: model.step_s(num_hosts, num, size, self._app.max_local),
            may_try=not self._has_tried and len(here) < 2,
            tried_from=self._tried_from,
        )
        self._has_tried = self._has_tried or choice.kind == "trial"
        self._tried_from = self._batch if choice.kind == "trial" else None
        self._batch = choice.batch_size
