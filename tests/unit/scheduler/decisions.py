"""Hashes of everything that is decided on random queues, to see that a change of the code changes no decision.

A hash covers all commands, and now and then the reasons, the order and the forecasts of all jobs, and the state that follows.

``python -m tests.unit.scheduler.decisions`` compares `QUEUES` and `LARGE` with `STORED`; ``--store`` stores them anew after an
intended change; ``--traces DIR`` also simulates recorded workloads (see `benchmarks.queue_policies`).
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.pollux.workload import pollux_workload
from benchmarks.queue_policies import AS_TIRESIAS, pollux_folder

from evenload.balance.run_times import PastRuns
from evenload.errors import QueueError
from evenload.scheduler.core import events
from evenload.scheduler.core.decide import decide, plan
from evenload.scheduler.core.queue_state import QueueState
from evenload.scheduler.core.states import WITH_DEVICES, JobState
from evenload.scheduler.core.values import After, Device, Job, JobSpec, Limits, Needs, Reservation, Settings
from evenload.scheduler.forecast.forecast import forecast
from evenload.scheduler.simulator.arrivals import thinned
from evenload.scheduler.simulator.cluster import devices_of
from evenload.scheduler.simulator.simulate import Conditions, simulate

STORED = Path(__file__).with_suffix(".json")
GIB = 2**30
FEATURES = frozenset(
    ("elastic", "one_host", "shares", "limits", "reservations", "closed", "after", "deadlines", "faults")
)


@dataclass(frozen=True)
class RandomQueue:
    """A queue of random jobs that is full most of the time."""

    settings: Settings
    num_devices: int = 48
    host_size: int = 4
    num_calls: int = 70
    features: frozenset[str] = FEATURES
    seed: int = 0
    every: int = 5
    """Each so many calls reasons and forecasts count too."""


QUEUES: dict[str, RandomQueue] = {
    "default": RandomQueue(Settings()),
    "default, spread, no backfill": RandomQueue(Settings(packing="spread", backfill=False, min_run_s=0.0), seed=1),
    "default, short ageing": RandomQueue(Settings(ageing_s=300.0, starve_after_s=1800.0, fairness=0.0), seed=2),
    "default, few preemptions": RandomQueue(Settings(max_preemptions_per_hour=1, max_sharers=2), seed=3, host_size=8),
    "default, one box": RandomQueue(Settings(), num_devices=8, host_size=8, seed=4),
    "fifo": RandomQueue(Settings(policy="fifo"), seed=5),
    "fifo, no preemption at all": RandomQueue(Settings(policy="fifo", max_preemptions_per_hour=0), seed=6, every=3),
    "priority": RandomQueue(Settings(policy="priority", packing="spread"), seed=7),
    "fair_share": RandomQueue(Settings(policy="fair_share", half_life_s=3600.0), seed=8),
    "las": RandomQueue(Settings(policy="las", las_thresholds_device_s=(3600.0, 7200.0)), seed=9),
    "srpt": RandomQueue(Settings(policy="srpt", min_run_s=60.0), seed=10),
    "srpt, nothing shared": RandomQueue(Settings(policy="srpt"), seed=11, features=FEATURES - {"shares", "faults"}),
    "goodput": RandomQueue(Settings(policy="goodput"), seed=12),
    "goodput, elastic only": RandomQueue(
        Settings(policy="goodput", restart_s=60.0), seed=13, features=frozenset(("elastic", "limits"))
    ),
    "cost": RandomQueue(Settings(policy="cost", cheap_hours="1-2,3-5"), seed=14),
    "cost, no margin": RandomQueue(
        Settings(policy="cost", cheap_hours="22-6", deadline_margin=1.0, cheap_wait_s=3600.0), seed=15, host_size=2
    ),
}
"""Small ones, which `test_decisions` computes."""
LARGE: dict[str, RandomQueue] = {
    "default, 300": RandomQueue(Settings(), 300, 8, 80, seed=20),
    "goodput, 300": RandomQueue(Settings(policy="goodput"), 300, 8, 60, seed=21),
    "cost, 300": RandomQueue(Settings(policy="cost", cheap_hours="1-3"), 300, 8, 60, seed=22),
    "fair_share, 300, spread": RandomQueue(Settings(policy="fair_share", packing="spread"), 300, 4, 80, seed=23),
    "default, 2000": RandomQueue(
        Settings(), 2000, 8, 25, features=FEATURES - {"shares", "deadlines"}, seed=24, every=12
    ),
    "default, 2000, one kind": RandomQueue(
        Settings(), 2000, 8, 25, features=frozenset(("elastic", "one_host", "limits")), seed=25, every=12
    ),
    "las, 2000": RandomQueue(
        Settings(policy="las"), 2000, 8, 20, features=FEATURES - {"reservations"}, seed=26, every=10
    ),
}


class _Driver:
    def __init__(self, queue: RandomQueue) -> None:
        self.queue, self.rng, self.now_s = queue, random.Random(queue.seed), 0.0
        self.digest = hashlib.sha256()
        self.state = QueueState()
        self.num_submitted = 0
        self.past = PastRuns()
        self.runs: list[tuple[int, float]] = []
        self.apply(events.SettingsSet(0.0, queue.settings))
        for index in range(queue.num_devices):
            self.apply(events.DeviceAdded(0.0, self._device(index)))
        if "limits" in queue.features:
            for user in range(6):
                most = queue.num_devices // 3 if user % 2 else None
                limits = Limits(max_devices=most, max_running=20 if user == 2 else None, share=1 + user % 3)
                self.apply(events.LimitsSet(0.0, f"u{user}", limits))
        for _ in range(queue.num_devices):
            self.submit()

    def has(self, feature: str) -> bool:
        return feature in self.queue.features

    def note(self, *values: Any) -> None:
        self.digest.update(repr(values).encode())

    def apply(self, event: events.QueueEvent) -> None:
        try:
            self.state.apply(event)
        except QueueError as error:
            self.note(str(error))

    def run(self) -> str:
        for call in range(self.queue.num_calls):
            snapshot = replace(self.state.snapshot(self.past), midnight_s=0.0)
            commands = decide(snapshot, self.now_s)
            self.note([(type(command).__name__, dataclasses.astuple(command)) for command in commands])
            if call % self.queue.every == 0:
                told = plan(snapshot, self.now_s, explain=True)
                self.note(told.commands == commands, sorted(told.waits.items()), [job.id for job in told.order])
                self.note([dataclasses.astuple(one) for one in forecast(snapshot, self.now_s, 500).values()])
                self.note(sorted(dataclasses.astuple(user) for user in self.state.users.values()))
                self.note([_facts(job) for job in self.state.jobs.values()], sorted(self.state.holder.items()))
            for command in commands:
                self.apply(command)
            for command in commands:
                self.carry_out(command)
            self.go_on()
        return self.digest.hexdigest()[:16]

    def _device(self, index: int) -> Device:
        host = index // self.queue.host_size
        kind = "abc"[host % 5 % 3] if self.has("one_host") else "a"
        memory, speed, price = {"a": (80, 2.0, 3.0), "b": (24, 1.0, 1.0), "c": (24, 1.0, 1.5)}[kind]
        return Device(f"d{index}", f"h{host}", kind, memory * GIB, speed, price, price / 2 if kind == "a" else None)

    def submit(self) -> None:
        rng, has = self.rng, self.has
        num = rng.choice((1, 1, 1, 1, 2, 2, 3, 4, 8))
        is_elastic, shares = has("elastic") and rng.random() < 0.35, has("shares") and rng.random() < 0.15
        is_known = rng.random() < 0.5
        names = list(self.state.jobs)
        array = rng.choice(("", "", "", "s1", "s2"))
        estimate_s = rng.choice((None, rng.lognormvariate(8, 1.2)))
        soft_s = rng.uniform(600, 4000) if rng.random() < 0.1 else None
        most = num * rng.choice((2, 4)) if is_elastic else num
        spec = JobSpec(
            user=f"u{rng.randrange(6)}",
            needs=Needs(
                1 if shares else num,
                1 if shares else most,
                kinds=rng.choice(((), (), (), ("a",), ("b", "a"))) if has("one_host") else (),
                memory_bytes=rng.choice((0, 0, 8 * GIB, 40 * GIB)),
                one_host=has("one_host") and num <= 4 and rng.random() < 0.25,
                one_kind=has("one_host") and rng.random() < 0.15,
            ),
            priority=rng.choice((0, 0, 0, 0, 1, -1)),
            preemptible=rng.random() < 0.8,
            estimate_s=estimate_s,
            estimate_source="3 runs" if estimate_s and rng.random() < 0.3 else "",
            run_key=rng.choice(("", "k1", "k2")),
            total=1000.0 if is_known else None,
            rates=tuple(0.2 * k**0.8 for k in range(1, most + 1)) if is_known and rng.random() < 0.5 else (),
            restart_s=rng.choice((None, 10.0, 90.0)),
            resize_s=2.0 if is_elastic and rng.random() < 0.5 else None,
            soft_limit_s=soft_s,
            hard_limit_s=rng.uniform(5000, 20000) if rng.random() < 0.15 else None,
            not_before_s=self.now_s + rng.uniform(0, 2000) if rng.random() < 0.05 else None,
            deadline_s=self.now_s + rng.uniform(3000, 40000) if has("deadlines") and rng.random() < 0.4 else None,
            after=tuple(
                After(name, rng.choice(("ok", "any", "failed"))) for name in rng.sample(names, min(2, len(names)))
            )
            if has("after") and rng.random() < 0.08
            else (),
            array=array,
            array_limit=3 if array == "s1" else None,
            retries=rng.choice((0, 0, 2)),
            share_device=shares,
            peak_bytes=rng.choice((0, 2, 5)) * GIB if shares else 0,
        )
        refusal = self.state.refusal(spec)
        self.note(refusal)
        if refusal is None:
            self.num_submitted += 1
            self.apply(events.Submitted(self.now_s, f"j{self.num_submitted}", spec))

    def carry_out(self, command: events.Command) -> None:
        """Let most commands take effect at once, and some only by the next call."""
        if self.rng.random() < 0.85:
            self._carry_out(command.job)

    def _carry_out(self, name: str) -> None:
        job = self.state.jobs.get(name)
        if job is None:
            return
        if job.state is JobState.STARTING:
            self.apply(events.JobStarted(self.now_s, name))
        elif job.state is JobState.RESIZING and job.resizes_in_place:
            chance = self.rng.random()
            if chance < 0.1:
                self.apply(events.ResizeRefused(self.now_s, name, "no place"))
            else:
                devices, attempt = (job.target, job.attempt + 1) if chance < 0.9 else (job.devices, job.attempt)
                self.apply(events.Resized(self.now_s, name, devices, attempt, 2.0))
        elif job.state in (JobState.RESIZING, JobState.PREEMPTING):
            self.apply(events.Yielded(self.now_s, name, ended_s=self.now_s - 1.0))

    def go_on(self) -> None:
        """Some minutes in which jobs end, come, report and fail, and people change things."""
        rng = self.rng
        self.now_s += rng.choice((20.0, 60.0, 400.0))
        for job in list(self.state.jobs.values()):
            if job.state in WITH_DEVICES and job.state is not JobState.RUNNING:
                self._carry_out(job.id)
        held = [job for job in self.state.jobs.values() if job.state is JobState.RUNNING]
        for job in rng.sample(held, min(len(held), 1 + len(held) // 15)):
            self._end(job)
        for _ in range(1 + rng.randrange(2 + len(held) // 8)):
            self.submit()
        for job in rng.sample(held, len(held) // 4):
            if job.id in self.state.jobs:
                done = min(990.0, job.done + rng.uniform(0, 100))
                rates = tuple(0.1 * k**0.7 for k in range(1, 9)) if rng.random() < 0.3 else None
                total = rng.choice((None, 1000.0))
                self.apply(events.Reported(self.now_s, job.id, done, total, rng.choice((0.0, 0.1, 0.5)), rates))
                if job.spec.share_device:
                    self.apply(events.MemoryMeasured(self.now_s, job.id, rng.randrange(1, 20) * GIB))
        self._people()

    def _end(self, job: Job) -> None:
        now_s, chance = self.now_s, self.rng.random()
        if chance < 0.75 or not self.has("faults"):
            self.runs = [*self.runs, (job.spec.needs.min_devices, job.held_until(now_s))][-100:]
            self.past = PastRuns(self.runs)
            self.apply(events.Ended(now_s, job.id, True, ended_s=now_s - 5.0))
        elif chance < 0.85:
            self.apply(events.Ended(now_s, job.id, False, "it failed"))
        elif chance < 0.93:
            self.apply(events.Lost(now_s, job.id, "its runner was killed", now_s - 10.0))
        else:
            self.apply(events.StopRequested(now_s, job.id, JobState.CANCELLED, "cancelled"))

    def _people(self) -> None:
        rng, now_s, devices = self.rng, self.now_s, list(self.state.devices)
        waiting = [job for job in self.state.jobs.values() if job.state is JobState.PENDING]
        if self.has("faults") and waiting:
            job = rng.choice(waiting)
            kinds = (events.JobHeld, events.Released, events.Cancelled)
            self.apply(rng.choice(kinds)(now_s, job.id))
            job = rng.choice(waiting)
            self.apply(events.SpecChanged(now_s, job.id, replace(job.spec, priority=rng.choice((0, 2)))))
            for kind in (events.JobHeld, events.Yielded):  # mostly refused, and what is refused changes nothing
                self.apply(kind(now_s, rng.choice([*self.state.jobs, "none"])))
        if self.has("closed"):
            self.apply(events.DeviceClosed(now_s, rng.choice(devices), "broken"))
            for device in list(self.state.closed)[: len(self.state.closed) // 2]:
                self.apply(events.DeviceOpened(now_s, device))
            if rng.random() < 0.1 and len(devices) > 0.8 * self.queue.num_devices:
                self.apply(events.DeviceRemoved(now_s, rng.choice(devices)))
            if rng.random() < 0.1:
                self.apply(events.DeviceAdded(now_s, self._device(rng.randrange(self.queue.num_devices))))
        if self.has("reservations") and rng.random() < 0.2:
            start_s = now_s + rng.uniform(0, 2000)
            number = rng.randrange(3)
            kept = frozenset(rng.sample(devices, max(1, len(devices) // 10)))
            users = frozenset(rng.sample([f"u{n}" for n in range(6)], rng.randrange(3)))
            self.apply(events.ReservationSet(now_s, Reservation(f"r{number}", kept, start_s, start_s + 3000, users)))
            if rng.random() < 0.2:
                self.apply(events.ReservationEnded(now_s, f"r{rng.randrange(3)}"))


def _facts(job: Job) -> tuple[Any, ...]:
    return tuple(getattr(job, field.name) for field in dataclasses.fields(job) if field.name != "spec")


def hash_of(queue: RandomQueue) -> str:
    return _Driver(queue).run()


def recorded_hashes(traces: Path) -> dict[str, str]:
    """Hashes of the events of recorded workloads in the simulator, every 3rd job."""
    folder = pollux_folder(traces)
    found = {}
    for number, settings, is_elastic, remaining in (
        (1, Settings(), False, "known"),
        (2, Settings(policy="goodput"), True, "known"),
        (3, Settings(policy="goodput"), True, "unknown"),
        (4, AS_TIRESIAS, False, "unknown"),
        (1, Settings(policy="fair_share"), True, "unknown"),
        (3, Settings(policy="cost", cheap_hours="1-4"), False, "known"),
        (2, Settings(), False, "history"),
    ):
        arrivals = thinned(pollux_workload(folder / "workloads" / f"workload-{number}.csv", elastic=is_elastic), 3)
        deadline_times = 2.0 if settings.policy == "cost" else None
        conditions = Conditions(devices_of("8x4"), settings, remaining=remaining, deadline_times=deadline_times)
        log: list[events.QueueEvent] = []
        simulate(arrivals, conditions, log)
        text = "\n".join(repr((type(event).__name__, dataclasses.astuple(event))) for event in log)
        name = f"workload {number}, {settings.policy}, {'elastic' if is_elastic else 'rigid'}, {remaining}"
        found[name] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--traces", type=Path)
    given = parser.parse_args(arguments)
    stored: dict[str, str] = json.loads(STORED.read_text()) if STORED.exists() else {}
    found = {name: hash_of(queue) for name, queue in (QUEUES | LARGE).items()}
    if given.traces is not None:
        found |= recorded_hashes(given.traces)
    changed = [name for name, value in found.items() if stored.get(name) != value]
    print(f"{len(found) - len(changed)} of {len(found)} as stored; changed: {', '.join(changed) or 'none'}")
    if given.store:
        STORED.write_text(json.dumps(stored | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
