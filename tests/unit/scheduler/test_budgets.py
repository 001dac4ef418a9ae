"""Jobs of users whose budget is spent get idle devices, or wait."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from evenload.errors import ConfigError
from evenload.scheduler.clock import QueueClock
from evenload.scheduler.core import events
from evenload.scheduler.core.decide import decide, plan
from evenload.scheduler.core.values import After, Device, Limits, User
from evenload.scheduler.daemon.budgets import Budgets, within_budgets
from evenload.scheduler.daemon.queue_file import UserGroup, read_queue_file
from evenload.scheduler.store.reader import Reader
from evenload.scheduler.store.usage import month_began_s
from evenload.scheduler.store.writer import QueueStore
from tests.unit.scheduler.queue import Queue, box, spec

SPENT = {"ann": "the budget of ann is spent"}


def test_idle_devices_only_and_given_back_at_once() -> None:
    """A job that saves starts where nobody wants the device, and stops for any other; one that can't save waits."""
    queue = Queue(box(1), min_run_s=300.0)
    own = queue.submit(spec(user="ann"))
    fixed = queue.submit(spec(user="ann", preemptible=False))
    snapshot, waits = within_budgets(queue.queue_state.snapshot(), SPENT)
    assert list(waits) == [fixed] and waits[fixed].startswith(SPENT["ann"]) and "--requeue" in waits[fixed]
    (placed,) = decide(snapshot, queue.now_s)
    assert isinstance(placed, events.Placed) and placed.job == own
    queue.apply(placed)
    queue.apply(events.JobStarted(queue.now_s, own))
    other = queue.submit(spec(user="bob"))
    assert decide(queue.queue_state.snapshot(), 1.0) == ()  # with a budget left, its first minutes protect it
    (stop,) = decide(within_budgets(queue.queue_state.snapshot(), SPENT)[0], 1.0)
    assert isinstance(stop, events.StopRequested) and stop.job == own and other in queue.queue_state.jobs
    assert within_budgets(queue.queue_state.snapshot(), {})[0].jobs == tuple(queue.queue_state.jobs.values())


def test_jobs_that_could_not_start_anyway_keep_their_reasons() -> None:
    """Held back, or after another; one that can never start is cancelled all the same."""
    queue = Queue(box(1))
    first = queue.submit(spec(user="bob"))
    held = queue.submit(spec(user="ann", preemptible=False))
    queue.apply(events.JobHeld(0.0, held))
    later = queue.submit(spec(user="ann", preemptible=False, after=(After(first),)))
    never = queue.submit(spec(user="ann", preemptible=False, after=(After(held, "failed"), After(first, "failed"))))
    queue.settle()
    snapshot, waits = within_budgets(queue.queue_state.snapshot(), SPENT)
    assert waits == {}
    reasons = plan(snapshot, 0.0, explain=True).waits
    assert reasons[held] == "its owner holds it back" and f"waits for job {first}" in reasons[later]
    queue.ended(first)
    snapshot, waits = within_budgets(queue.queue_state.snapshot(), SPENT)
    assert list(waits) == [later]
    assert [command.job for command in decide(snapshot, 1.0) if isinstance(command, events.Cancelled)] == [never]


def test_use_counts_in_its_month_alone(tmp_path: Path) -> None:
    """Two devices since two hours before the month: what was held in it counts, for the user and the group."""
    began_s = month_began_s(time.time())
    with QueueStore(tmp_path, holder="test") as store:
        for name in ("d0", "d1"):
            store.record(events.DeviceAdded(began_s - 9000.0, Device(name, "h")))
        store.record(events.Submitted(began_s - 8000.0, "1", spec(user="ann")), extra={"command": ["true"]})
        store.record(events.Placed(began_s - 7200.0, "1", ("d0", "d1"), 1))
        store.record(events.Lost(began_s + 1800.0, "1"))
        store.commit()
    group = {"vision": UserGroup(("ann", "bob"), 1.5)}
    users = {"ann": User("ann", Limits(budget_device_hours=0.5)), "bob": User("bob")}
    with Reader(tmp_path) as reader:
        budgets = Budgets(reader)
        clock = QueueClock(None, began_s + 3600.0)
        budgets.read(users, {}, clock)
        assert budgets.used_hours == {"ann": pytest.approx(1.0)} and list(budgets.spent) == ["ann"]
        assert "1.0 of 0.5 device-hours" in budgets.spent["ann"]
        again = Budgets(reader)
        again.read({}, group, clock)
        assert again.spent == {} and again.hours_of(("ann", "bob")) == pytest.approx(1.0)
        further = Budgets(reader)
        further.read({}, {"vision": UserGroup(("ann", "bob"), 1.0)}, clock)
        assert set(further.spent) == {"ann", "bob"} and "group vision" in further.spent["bob"]
        further.used_hours = {"ann": 1234.5, "bob": 0.0123}
        assert "(1234.5 of 1000 " in (further._reason("ann", 1000.0, ("ann",), "2026-11") or "")
        assert "(0.012 of 0.01 " in (further._reason("bob", 0.01, ("bob",), "2026-11") or "")
        budgets.read({"bob": User("bob")}, {}, clock)
        assert budgets.spent == {} == budgets.used_hours


def test_groups_of_the_file_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "queue.toml"
    file.write_text('[groups.a]\nusers = ["ann"]\n[groups.b]\nusers = ["bob", "ann"]\n')
    with pytest.raises(ConfigError, match="ann is in a and in b"):
        read_queue_file(tmp_path)
    file.write_text('[groups.a]\nusers = ["ann"]\nbudget_device_hours = -1\n')
    with pytest.raises(ConfigError, match="budget_device_hours"):
        read_queue_file(tmp_path)
