"""Speeds of elastic jobs as they are learned while a job runs: they age, and follow what drifts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from evenload.balance.scaling import ScalingModel, StepCosts
from evenload.balance.speed_curve import rates_from
from evenload.job.protocol import ProgressReport
from evenload.scheduler.core import events
from evenload.scheduler.core.values import Job
from evenload.scheduler.daemon.learning import Learning
from evenload.scheduler.learned_speeds import LearnedSpeeds
from tests.unit.scheduler.queue import Queue, box, spec


class _Machine:
    """A queue of two devices and one job, which runs at the speeds that a test sets; resizes cost 60 s."""

    def __init__(self) -> None:
        self.queue = Queue(box(2), min_run_s=0.0)
        self.queue.submit(spec((1, 2), restart_s=60.0, total=1e9), "j")
        clock = SimpleNamespace(now_s=lambda: self.queue.now_s)
        store = SimpleNamespace(queue_state=self.queue.queue_state)
        state: Any = SimpleNamespace(clock=clock, store=store, reader=None)
        self.learning = Learning(state)
        self.done, self.num_resizes = 0.0, 0
        self.queue.apply(events.DeviceClosed(0.0, "gpu0.1", "for its first minutes"))
        self.queue.settle()
        self.run(0.1, {1: 10.0})
        self.queue.apply(events.DeviceOpened(self.queue.now_s, "gpu0.1"))

    @property
    def num_devices(self) -> int:
        return len(self.queue.devices("j"))

    def run(self, hours: float, speeds: dict[int, float]) -> int:
        """Runs on, with a report and a decision each minute; the minutes on two devices."""
        on_two = 0
        for _ in range(round(hours * 60)):
            self.queue.now_s += 60.0
            job = self.queue.queue_state.jobs["j"]
            rate = speeds[self.num_devices]
            self.done += 60.0 * rate
            report = ProgressReport("j", job.attempt, 1, int(self.done), 10**9, rate, 0.0, "running", 0.0)
            live: Any = SimpleNamespace(report=report, recorded_s=1.0)
            reported = self.learning.reported(live, job)
            assert reported is not None
            self.queue.apply(reported)
            on_two += self.num_devices == 2
            self.num_resizes += len([c for c in self.queue.settle() if isinstance(c, events.ResizeRequested)])
        return on_two


def test_a_job_that_became_fast_on_two_devices_gets_them_again() -> None:
    machine = _Machine()
    assert 0 < machine.run(0.5, {1: 10.0, 2: 6.0}) < 15 and machine.num_devices == 1
    assert machine.run(2.0, {1: 10.0, 2: 19.0}) > 30, "it stays on one"
    assert machine.num_devices == 2


def test_a_job_that_stays_slow_on_two_is_tried_there_ever_less() -> None:
    machine = _Machine()
    machine.run(1.0, {1: 10.0, 2: 6.0})
    on_two = [machine.run(8.0, {1: 10.0, 2: 6.0}) for _ in range(3)]
    assert sum(on_two) <= 10 and on_two[2] <= 1, on_two


def test_a_drift_on_the_present_devices_is_one_of_all() -> None:
    """All steps become three times as long: what was measured on two devices before says so too."""
    machine = _Machine()
    machine.run(0.5, {1: 10.0, 2: 19.0})
    machine.run(0.5, {1: 10.0 / 3, 2: 19.0 / 3})
    rates = machine.queue.queue_state.jobs["j"].rates
    assert machine.num_devices == 2 and rates[1] / rates[0] == pytest.approx(2**0.9, rel=0.05)


def test_step_costs_predict_speeds_that_were_never_measured() -> None:
    """After one and two devices the queue knows four; a drift of the steps is one of all sizes."""
    true = ScalingModel((0.0, 0.01), (0.05, 0.02), (0.3, 0.0), 1.0)
    speeds, job = LearnedSpeeds(), Job("j", spec((1, 8)), 0.0)

    def measure(attempt: int, num: int, now_s: float, slower: float = 1.0) -> tuple[float, ...]:
        step_s, compute_s = slower * true.step_s(1, num, 64), slower * 0.64 / num
        placed = replace(job, attempt=attempt, devices=tuple(f"gpu{i}" for i in range(num)), attempt_began_s=now_s)
        for minute in range(5):
            speeds.measure(placed, 1 / step_s, now_s + 60.0 * minute, StepCosts(64, 1, compute_s, step_s))
        speeds.measure(placed, 1 / step_s, now_s + 300.0, None)  # a report without costs changes nothing
        return speeds.rates(placed, 1 / step_s, 8, 8, now_s + 300.0)

    alone = measure(1, 1, 0.0)
    assert len(alone) == 2 and alone[1] / alone[0] == pytest.approx(2.0)  # what was never seen costs nothing
    measure(2, 2, 1000.0)
    rates = measure(3, 3, 2000.0)
    assert len(rates) == 6 and [rates[k - 1] for k in (1, 2, 4, 6)] == pytest.approx(
        [1 / true.step_s(1, k, 64) for k in (1, 2, 4, 6)], rel=0.05
    )
    slow = measure(3, 3, 2000.0, slower=2.0)
    assert slow[0] == pytest.approx(rates[0] / 2, rel=0.05) and slow[5] == pytest.approx(rates[5] / 2, rel=0.05)


def test_an_old_measurement_gives_way_to_the_shape() -> None:
    measured = {1: 10.0, 2: 5.0}
    assert rates_from(measured, 2, trust={1: 1.0, 2: 1.0}) == pytest.approx((10.0, 5.0))
    assert rates_from(measured, 2, trust={1: 1.0, 2: 0.0}) == pytest.approx((10.0, 10.0 * 2**0.9))
