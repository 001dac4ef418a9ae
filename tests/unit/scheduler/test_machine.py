"""Whatever happens to a queue, in whatever order: after every event its invariants hold. A rule-based state machine."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from evenload.scheduler.core import events
from evenload.scheduler.core.decide import decide, plan
from evenload.scheduler.core.queue_state import QueueState
from evenload.scheduler.core.sharing import expected_bytes, free_bytes
from evenload.scheduler.core.states import WITH_DEVICES, JobState
from evenload.scheduler.core.values import POLICIES, After, Device, Job, JobSpec, Limits, Needs, Reservation, Settings
from evenload.scheduler.forecast.forecast import forecast
from evenload.scheduler.store.event_rows import as_row, from_row
from tests.unit.scheduler.invariants import violations
from tests.unit.scheduler.queue import is_preemption

USERS = ("ann", "bob", "cyd")

KINDS = ("a", "b")
STATES = st.sampled_from


class QueueMachine(RuleBasedStateMachine):
    """Users, programs, hosts and the clock do what they like; the queue decides in between."""

    def __init__(self) -> None:
        super().__init__()
        self.queue_state = QueueState()
        self.log: list[events.QueueEvent] = []
        self.now_s = 0.0
        self.num = 0

    def apply(self, event: events.QueueEvent) -> None:
        self.queue_state.apply(event)
        self.log.append(event)

    def some(self, data: st.DataObject, *states: JobState) -> str | None:
        names = [job.id for job in self.queue_state.jobs.values() if not states or job.state in states]
        return data.draw(st.sampled_from(names)) if names else None

    @initialize(
        policy=st.sampled_from(POLICIES),
        sizes=st.lists(st.tuples(st.integers(1, 4), st.sampled_from(KINDS), st.booleans()), min_size=1, max_size=4),
        min_run_s=st.sampled_from([0.0, 60.0, 600.0]),
        most=st.integers(0, 3),
        packing=st.sampled_from(["pack", "spread"]),
        starve_after_s=st.sampled_from([300.0, 1e6]),
        backfill=st.booleans(),
    )
    def begin(
        self,
        policy: str,
        sizes: list[Any],
        min_run_s: float,
        most: int,
        packing: str,
        starve_after_s: float,
        backfill: bool,
    ) -> None:
        self.apply(
            events.SettingsSet(
                0.0,
                Settings(
                    policy=policy,
                    min_run_s=min_run_s,
                    max_preemptions_per_hour=most,
                    packing=packing,
                    starve_after_s=starve_after_s,
                    backfill=backfill,
                ),
            )
        )
        for host, (size, kind, is_mixed) in enumerate(sizes):
            for number in range(size):
                mixed = KINDS[number % 2] if is_mixed else kind
                device = Device(f"{host}.{number}", f"h{host}", kind=mixed, memory_bytes=(number + 1) * 10)
                self.apply(events.DeviceAdded(0.0, device))

    @rule(
        user=st.sampled_from(USERS),
        low=st.integers(1, 5),
        more=st.sampled_from([0, 0, 0, 1, 4]),
        kinds=st.sampled_from([(), (), ("a",), ("b",), ("a", "b")]),
        memory=st.sampled_from([0, 0, 15]),
        flags=st.tuples(st.booleans(), st.booleans()),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        is_preemptible=st.sampled_from([True, True, False]),
        estimate_s=st.sampled_from([None, 50.0, 5000.0]),
        limit_s=st.sampled_from([None, None, 400.0]),
        retries=st.integers(0, 1),
        shares=st.booleans(),
        data=st.data(),
    )
    def submit(
        self, user: str, low: int, more: int, kinds: Any, memory: int, flags: Any, data: st.DataObject, **rest: Any
    ):  # type: ignore[no-untyped-def]
        after = ()
        known = [*self.queue_state.jobs, *self.queue_state.outcomes]
        if known and data.draw(st.integers(0, 4)) == 0:
            after = (After(data.draw(st.sampled_from(known)), data.draw(st.sampled_from(["ok", "any", "failed"]))),)
        limit_s = rest["limit_s"]
        is_array = data.draw(st.integers(0, 5)) == 0
        what = JobSpec(
            user=user,
            needs=Needs(low, low + more, kinds, memory, *flags),
            priority=rest["priority"],
            preemptible=rest["is_preemptible"],
            estimate_s=rest["estimate_s"],
            hard_limit_s=limit_s,
            soft_limit_s=limit_s / 2 if limit_s else None,
            retries=rest["retries"],
            share_device=rest["shares"] and low + more == 1,
            after=after,
            array="array" if is_array else "",
            array_limit=1 if is_array else None,
        )
        if self.queue_state.refusal(what) is None:
            self.num += 1
            self.apply(events.Submitted(self.now_s, f"j{self.num}", what))

    @rule(seconds=st.sampled_from([0.0, 1.0, 30.0, 200.0, 1000.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def decide(self) -> None:
        """What is decided can be recorded, keeps all limits, protections and reservations, and is decided once."""
        snapshot = self.queue_state.snapshot()
        commands = decide(snapshot, self.now_s)
        assert decide(snapshot, self.now_s) == commands
        assert plan(snapshot, self.now_s, explain=True).commands == commands
        settings_ = self.queue_state.settings
        before = dict(self.queue_state.jobs)
        for command in commands:
            job = before[command.job]
            if is_preemption(command) or (isinstance(command, events.ResizeRequested) and command.is_forced):
                is_reserved = any(
                    r.start_s <= self.now_s < r.end_s and job.spec.user not in r.users and r.devices & set(job.devices)
                    for r in snapshot.reservations
                )
                assert job.spec.preemptible
                recent = sum(t > self.now_s - 3600 for t in job.preempted_s)
                if not is_reserved and job.spec.priority >= 0:
                    assert recent < settings_.max_preemptions_per_hour
            if isinstance(command, events.Placed):
                self.check_room(job, command.devices[0])
            self.apply(command)
        given = {c.job for c in commands if isinstance(c, events.Placed | events.ResizeRequested)}
        for user in {before[name].spec.user for name in given}:
            limits = self.queue_state.users[user].limits
            held = [j for j in self.queue_state.jobs.values() if j.spec.user == user and j.state in WITH_DEVICES]
            if limits.max_running is not None and any(
                isinstance(c, events.Placed) and before[c.job].spec.user == user for c in commands
            ):
                assert len(held) <= limits.max_running
            if limits.max_devices is not None:
                assert sum(len({*j.devices, *j.target}) for j in held) <= limits.max_devices
        for reservation in snapshot.reservations:
            if reservation.start_s <= self.now_s < reservation.end_s:
                for name in given:
                    job = self.queue_state.jobs[name]
                    new = set(job.target or job.devices) - set(before[name].devices)
                    assert job.spec.user in reservation.users or not reservation.devices & new
        elements = [j for j in self.queue_state.jobs.values() if j.spec.array == "array" and j.state in WITH_DEVICES]
        assert len(elements) <= 1

    def check_room(self, job: Job, device: str) -> None:
        """Who comes to others finds memory enough."""
        others = [self.queue_state.jobs[name] for name in self.queue_state.holder.get(device, ())]
        if others:
            room = free_bytes(others, self.queue_state.devices[device].memory_bytes, self.queue_state.settings)
            assert room is not None and (expected_bytes(job) or room + 1) <= room

    @rule(data=st.data(), peak_bytes=st.sampled_from([1, 4, 9, 30]))
    def is_measured(self, data: st.DataObject, peak_bytes: int) -> None:
        """A job that may share is seen to take some of its device's memory; others like it are told."""
        names = [job.id for job in self.queue_state.jobs.values() if job.spec.share_device]
        if names:
            job = self.queue_state.jobs[data.draw(st.sampled_from(names))]
            if job.devices:
                self.apply(events.MemoryMeasured(self.now_s, job.id, peak_bytes))
            else:
                self.apply(events.SpecChanged(self.now_s, job.id, replace(job.spec, peak_bytes=peak_bytes)))

    @rule(data=st.data(), is_success=st.booleans())
    def runner_speaks(self, data: st.DataObject, is_success: bool) -> None:
        """A program starts, reports, saves and goes, ends, or is lost."""
        name = self.some(data, *WITH_DEVICES)
        if name is None:
            return
        state = self.queue_state.jobs[name].state
        what = data.draw(st.sampled_from(["go on", "go on", "go on", "end", "lose"]))
        if what == "end":
            self.apply(events.Ended(self.now_s, name, is_success))
        elif what == "lose":
            self.apply(events.Lost(self.now_s, name, "its host is gone"))
        elif state is JobState.STARTING:
            self.apply(events.JobStarted(self.now_s, name))
        elif state is JobState.RUNNING:
            done = data.draw(st.floats(0, 90))
            self.apply(events.Reported(self.now_s, name, done, 100.0, 1.0, (1.0, 1.8, 2.4, 2.8)))
        else:
            self.apply(events.Yielded(self.now_s, name))

    @rule(data=st.data())
    def user_acts(self, data: st.DataObject) -> None:
        """An owner cancels, holds or releases."""
        name = self.some(data)
        if name is None:
            return
        job = self.queue_state.jobs[name]
        if job.state is not JobState.PENDING:
            self.apply(events.StopRequested(self.now_s, name, JobState.CANCELLED, "asked for"))
        elif data.draw(st.booleans()):
            self.apply(events.Cancelled(self.now_s, name, "asked for"))
        elif job.is_held:
            self.apply(events.Released(self.now_s, name))
        else:
            self.apply(events.JobHeld(self.now_s, name))

    @rule(data=st.data())
    def device_changes(self, data: st.DataObject) -> None:
        """An external process takes a device, or it comes back."""
        device = data.draw(st.sampled_from(list(self.queue_state.devices)))
        if device in self.queue_state.closed:
            self.apply(events.DeviceOpened(self.now_s, device))
        else:
            self.apply(events.DeviceClosed(self.now_s, device, "an external process"))

    @rule(user=st.sampled_from(USERS), most=st.sampled_from([None, 1, 3]), running=st.sampled_from([None, 1]))
    def limits_change(self, user: str, most: int | None, running: int | None) -> None:
        # Below what is held already nothing can be promised, so the limits only change where nothing is held.
        if not any(j.devices for j in self.queue_state.jobs.values() if j.spec.user == user):
            self.apply(events.LimitsSet(self.now_s, user, Limits(max_devices=most, max_running=running)))

    @rule(data=st.data(), start=st.sampled_from([0.0, 100.0]), users=st.sets(st.sampled_from(USERS), max_size=1))
    def reserve(self, data: st.DataObject, start: float, users: set[str]) -> None:
        devices = data.draw(st.sets(st.sampled_from(list(self.queue_state.devices)), min_size=1, max_size=3))
        start_s = self.now_s + start
        reservation = Reservation("r", frozenset(devices), start_s, start_s + 500, frozenset(users))
        self.apply(events.ReservationSet(self.now_s, reservation))

    @precondition(lambda self: len(self.log) % 7 == 0)
    @rule()
    def replay(self) -> None:
        """The log, written and read again, folds to the same state."""
        rows = json.loads(json.dumps([as_row(event) for event in self.log]))
        again = QueueState()
        for row in rows:
            again.apply(from_row(row))
        assert again.snapshot() == self.queue_state.snapshot()
        assert (again.outcomes, again.holder) == (self.queue_state.outcomes, self.queue_state.holder)
        queue_state = self.queue_state
        stored = QueueState(
            time_s=queue_state.time_s,
            settings=queue_state.settings,
            devices=dict(queue_state.devices),
            closed=dict(queue_state.closed),
            users=dict(queue_state.users),
            reservations=dict(queue_state.reservations),
            jobs=dict(queue_state.jobs),
            outcomes=dict(queue_state.outcomes),
        )
        assert (stored.snapshot(), stored.holder, stored.time_s) == (
            queue_state.snapshot(),
            queue_state.holder,
            queue_state.time_s,
        )
        waiting = {
            name: [job for job in jobs if job in queue_state.jobs] for name, jobs in queue_state.dependents.items()
        }
        assert stored.dependents == {name: jobs for name, jobs in waiting.items() if jobs}

    @rule()
    def look_ahead(self) -> None:
        """Everybody is told something that can be, whatever happened."""
        told = forecast(self.queue_state.snapshot(), self.now_s)
        assert list(told) == list(self.queue_state.jobs)
        for name, job in self.queue_state.jobs.items():
            one = told[name]
            assert one.reason or job.state is JobState.RUNNING
            assert one.start_s is None or (not job.devices and one.start_s >= self.now_s)
            assert one.end_s is None or one.end_s >= (one.start_s or self.now_s)

    @invariant()
    def holds(self) -> None:
        assert violations(self.queue_state.snapshot()) == []

    def teardown(self) -> None:
        """Once nothing comes any more, and programs run to their end, everybody who fits in gets devices and ends."""
        for reservation in list(self.queue_state.reservations):
            self.apply(events.ReservationEnded(self.now_s, reservation))
        for device in list(self.queue_state.closed):
            self.apply(events.DeviceOpened(self.now_s, device))
        for job in list(self.queue_state.jobs.values()):
            if job.is_held:
                self.apply(events.Released(self.now_s, job.id))
        for user in self.queue_state.users:
            self.apply(events.LimitsSet(self.now_s, user, Limits()))
        for _ in range(40 + 12 * len(self.queue_state.jobs)):
            if not self.queue_state.jobs:
                break
            self.now_s += 500.0
            self.decide()
            for job in list(self.queue_state.jobs.values()):
                if job.state is JobState.STARTING:
                    self.apply(events.JobStarted(self.now_s, job.id))
                elif job.state in (JobState.PREEMPTING, JobState.RESIZING):
                    self.apply(events.Yielded(self.now_s, job.id))
                elif job.state is JobState.RUNNING and job.held_until(self.now_s) >= 1000:
                    self.apply(events.Ended(self.now_s, job.id, is_success=True))
                assert violations(self.queue_state.snapshot()) == []
        assert not self.queue_state.jobs, plan(self.queue_state.snapshot(), self.now_s, explain=True).waits


QueueMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestQueueMachine = QueueMachine.TestCase
