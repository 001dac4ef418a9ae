"""Running jobs move to faster devices that come free."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.queue import Queue, box


def two_kinds(**settings: float) -> Queue:
    """Two fast devices, and two of half their speed; a job that blocks the fast ones, and another on the slow ones."""
    queue = Queue([*box(2, kind="fast"), *box(2, kind="slow", speed=0.5)], **settings)
    queue.submit(2, name="first", estimate_s=5000.0)
    queue.submit(2, name="second", estimate_s=9000.0)
    queue.settle()
    assert all(device.startswith("fast") for device in queue.devices("first"))
    assert all(device.startswith("slow") for device in queue.devices("second"))
    return queue


def test_a_job_moves_once_the_fast_devices_are_free_and_nobody_else_gets_them() -> None:
    queue = two_kinds()
    queue.now_s = 1000.0
    queue.ended("first")
    queue.settle()
    assert all(device.startswith("fast") for device in queue.devices("second"))
    assert queue.queue_state.jobs["second"].num_restarts == 1
    assert not queue.queue_state.jobs["second"].preempted_s  # it gained by that


def test_a_job_stays_where_a_move_saves_less_than_two_restarts() -> None:
    queue = two_kinds()
    queue.now_s = 8900.0
    queue.ended("first")
    assert queue.settle() == []


@pytest.mark.parametrize("seconds", [100.0, 8000.0])
def test_the_one_that_goes_first_gets_them(seconds: float) -> None:
    """A shorter job that waits starts there; a longer one gets the slow devices."""
    queue = two_kinds()
    queue.now_s = 1000.0
    queue.submit(2, name="third", estimate_s=seconds, preemptible=True)
    queue.ended("first")
    queue.settle()
    expected = ("fast", "slow") if seconds < 8000.0 else ("slow", "fast")
    found = tuple(queue.devices(name)[0][:4] for name in ("third", "second"))
    assert found == expected


def test_a_job_that_just_began_or_cannot_save_stays() -> None:
    queue = two_kinds(min_run_s=2000.0)
    queue.now_s = 1000.0
    queue.ended("first")
    assert queue.settle() == []
    queue = Queue([*box(1, kind="fast"), *box(1, kind="slow", speed=0.5)])
    queue.submit(1, name="first")
    queue.submit(1, name="second", preemptible=False)
    queue.settle()
    queue.now_s = 1000.0
    queue.ended("first")
    assert queue.settle() == []
