"""Speeds of elastic jobs as they are learned while a job runs: they age, and follow what drifts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from evenload.job.protocol import ProgressReport
from evenload.scheduler.core import events
from evenload.scheduler.core.speed import rates_from
from evenload.scheduler.daemon.learning import Learning
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


def test_an_old_measurement_gives_way_to_the_shape() -> None:
    measured = {1: 10.0, 2: 5.0}
    assert rates_from(measured, 2, trust={1: 1.0, 2: 1.0}) == pytest.approx((10.0, 5.0))
    assert rates_from(measured, 2, trust={1: 1.0, 2: 0.0}) == pytest.approx((10.0, 10.0 * 2**0.9))
