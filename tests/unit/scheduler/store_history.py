"""Queues that things happen to at random, as far as they can happen; what can't is refused by the store."""

from __future__ import annotations

import random
from typing import Any

from evenload.errors import QueueError
from evenload.scheduler.core import events
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import After, Device, JobSpec, Limits, Needs, Reservation, Settings
from evenload.scheduler.store.ledger import Entry, ProgramStarted, RunnerStarted
from evenload.scheduler.store.writer import QueueStore


class Happenings:
    """A user, a program, a host and a clock without a plan."""

    def __init__(self, store: QueueStore, seed: int) -> None:
        self.store = store
        self.rng = random.Random(seed)
        self.now_s = store.queue_state.time_s
        self.num_refused = 0

    def happen(self, num: int) -> None:
        """Records `num` entries that the queue takes."""
        while num:
            self.now_s += self.rng.choice([0.0, 0.1, 7.0, 900.0])
            entry = self._entry()
            extra = {"command": ["train", entry.job], "é": 1} if isinstance(entry, events.Submitted) else None
            try:
                self.store.record(entry, extra=extra)
                num -= 1
            except QueueError:
                self.num_refused += 1

    def _entry(self) -> Entry:
        rng, queue_state, now_s = self.rng, self.store.queue_state, self.now_s
        jobs = list(queue_state.jobs.values())
        job = rng.choice(jobs) if jobs else None
        name = job.id if job else "none"
        devices = list(queue_state.devices)
        some = tuple(rng.sample(devices, min(len(devices), rng.randint(1, 2))))
        number = rng.randint(0, 5)
        match rng.randint(0, 24) if devices else 19:
            case 0 | 1 | 2 | 3:
                return events.Submitted(
                    now_s, f"j{self.store.last}", self._spec(list(queue_state.outcomes) + list(queue_state.jobs))
                )
            case 4 | 5 | 6 | 7:
                return events.Placed(now_s, name, some, (job.attempt if job else 0) + 1, "it fits")
            case 8 | 9:
                return events.JobStarted(now_s, name)
            case 10:
                if rng.random() < 0.3:
                    return events.MemoryMeasured(now_s, name, number * 2**30)
                return events.Reported(
                    now_s, name, rng.random() * 100, rng.choice([None, 100.0]), 0.1 + 0.2, (1.0, 1.9)
                )
            case 11:
                return events.ResizeRequested(now_s, name, some, "more room", rng.random() < 0.5)
            case 12:
                return events.StopRequested(
                    now_s, name, rng.choice([JobState.PENDING, JobState.CANCELLED]), "for bob's"
                )
            case 13:
                return events.Yielded(now_s, name)
            case 14:
                return events.Ended(now_s, name, rng.random() < 0.5, "code 0")
            case 15:
                return events.Lost(now_s, name, "its runner is gone")
            case 16:
                return rng.choice([events.Cancelled, events.JobHeld, events.Released])(now_s, name)
            case 17:
                return events.SpecChanged(now_s, name, self._spec([]))
            case 18 | 19:
                host = f"h{number % 2}"
                return events.DeviceAdded(now_s, Device(f"{host}.{number}", host, memory_bytes=number, speed=1.5))
            case 20:
                known = rng.choice(devices) if devices else "none"
                kinds: list[Any] = [events.DeviceOpened, events.DeviceRemoved, events.DeviceRemoved]
                closed = events.DeviceClosed(now_s, known, "a process outside the queue: python, pid 3")
                return rng.choice([closed, rng.choice(kinds)(now_s, known)])
            case 21:
                return events.LimitsSet(now_s, f"user{number}", Limits(max_queued=number or None, share=1 + number))
            case 22:
                window = Reservation(f"r{number}", frozenset(some), now_s, now_s + 60, frozenset({"ann"}))
                return rng.choice([events.ReservationSet(now_s, window), events.ReservationEnded(now_s, f"r{number}")])
            case 23:
                return events.SettingsSet(now_s, Settings(policy="srpt", starve_after_s=float("inf"), max_lost=2))
            case _:
                attempt = job.attempt if job else 1
                if rng.random() < 0.5:
                    return ProgramStarted(now_s, name, attempt, now_s - 0.5)
                return RunnerStarted(now_s, name, attempt, {"pid": 4711, "boot_id": "b-1", "started": 12.5})

    def _spec(self, known: list[str]) -> JobSpec:
        rng = self.rng
        after = (After(rng.choice(known), rng.choice(["ok", "any"])),) if known and rng.random() < 0.3 else ()
        most = rng.randint(1, 2)
        return JobSpec(
            user=rng.choice(["ann", "bob"]),
            needs=Needs(1, most),
            share_device=most == 1 and rng.random() < 0.7,
            peak_bytes=rng.choice([0, 2**30]),
            name=rng.choice(["", "größe\n'; DROP TABLE jobs;--"]),
            priority=rng.randint(-1, 1),
            after=after,
            retries=rng.randint(0, 1),
            total=rng.choice([None, 1000.0]),
        )
