"""`decide` on queues of 1,000, 10,000 and 100,000 jobs with as many devices, in one thread.

Method: hosts of 8 devices, of two kinds; jobs of 1 to 16 devices from 50 users with limits, priorities, estimates and needs
of a kind or of memory, fixed seed. First everything waits and every device is free ("cold": one call, all commands).
Then the queue is kept full: before each call some jobs end, as many are submitted, and running ones report; each call's
commands are carried out at once. The times are those of `decide` alone, on a snapshot made before; what a snapshot and an
event take is told beside. The policy is `default`; the others are measured at 1,000 and 10,000. The processor time is
told beside, for a machine on which others compute; bars are of the wall's clock.

Bar: p99 at most 10 ms, 100 ms and 2 s.
"""

from __future__ import annotations

import random
import time
from statistics import median
from typing import Any

from benchmarks.report import rows
from evenload.scheduler.core import events
from evenload.scheduler.core.decide import decide
from evenload.scheduler.core.queue_state import QueueState
from evenload.scheduler.core.states import WITH_DEVICES, JobState
from evenload.scheduler.core.values import POLICIES, Device, JobSpec, Limits, Needs, Settings
from evenload.scheduler.simulator.report import percentile

BARS_S = {1_000: 0.010, 10_000: 0.100, 100_000: 2.0}
_CALLS = {1_000: 600, 10_000: 150, 100_000: 40}
_QUICK_CALLS = {1_000: 20}
_OTHERS_UP_TO = 10_000
_GIB = 2**30


def measure(quick: bool) -> dict[str, Any]:
    """Times of `decide`."""
    calls = _QUICK_CALLS if quick else _CALLS
    cases = [_case("default", num, calls[num]) for num in calls]
    for policy in POLICIES[1:]:
        cases += [_case(policy, num, max(10, calls[num] // 4)) for num in calls if num <= _OTHERS_UP_TO]
    own = {case["num"]: case for case in cases if case["policy"] == "default"}
    return {
        "cases": cases,
        "bars": {
            f"{num:,} jobs × {num:,} devices: p99 at most {BARS_S[num] * 1e3:g} ms": own[num]["p99_s"] <= BARS_S[num]
            for num in own
        },
    }


def _case(policy: str, num: int, calls: int) -> dict[str, Any]:
    rng = random.Random(num)
    queue = _Full(policy, num, rng)
    cold_s, _ = queue.decide()
    times, cpu_times, snapshots = [], [], []
    for _ in range(calls):
        queue.go_on()
        began_s = time.perf_counter()
        snapshot = queue.queue_state.snapshot()
        snapshots.append(time.perf_counter() - began_s)
        took_s, cpu_s = queue.decide(snapshot)
        times.append(took_s)
        cpu_times.append(cpu_s)
    return {
        "policy": policy,
        "num": num,
        "calls": calls,
        "median_s": median(times),
        "p99_s": percentile([*times, cold_s], 99),
        "cpu_p99_s": percentile(cpu_times, 99),
        "slowest_s": max(times),
        "cold_s": cold_s,
        "snapshot_s": median(snapshots),
        "event_s": queue.event_s / max(1, queue.num_events),
        "commands_per_call": queue.num_commands / (calls + 1),
    }


class _Full:
    """A queue that has always more jobs than devices."""

    def __init__(self, policy: str, num: int, rng: random.Random) -> None:
        self.rng, self.now_s, self.num_submitted, self.num_commands = rng, 0.0, 0, 0
        self.event_s, self.num_events = 0.0, 0
        self.queue_state = QueueState()
        self.apply(events.SettingsSet(0.0, Settings(policy=policy)))
        for index in range(num):
            kind = "a" if index // 8 % 5 < 3 else "b"
            device = Device(
                f"d{index}",
                f"h{index // 8}",
                kind,
                80 * _GIB if kind == "a" else 24 * _GIB,
                2.0 if kind == "a" else 1.0,
            )
            self.apply(events.DeviceAdded(0.0, device))
        for user in range(50):
            self.apply(events.LimitsSet(0.0, f"u{user}", Limits(max_devices=max(32, num // 10), share=1 + user % 3)))
        for _ in range(num):
            self.submit()

    def apply(self, event: events.QueueEvent) -> None:
        began_s = time.perf_counter()
        self.queue_state.apply(event)
        self.event_s += time.perf_counter() - began_s
        self.num_events += 1

    def submit(self) -> None:
        rng = self.rng
        num = rng.choice((1, 1, 1, 1, 2, 2, 4, 8, 16))
        spec = JobSpec(
            user=f"u{rng.randrange(50)}",
            needs=Needs(
                num,
                num * 4 if rng.random() < 0.1 else num,
                kinds=rng.choice(((), (), (), ("a",), ("b",))),
                memory_bytes=rng.choice((0, 0, 16 * _GIB, 40 * _GIB)),
                one_host=num <= 8 and rng.random() < 0.2,
            ),
            priority=rng.choice((0, 0, 0, 0, 1, -1)),
            preemptible=rng.random() < 0.8,
            estimate_s=rng.choice((None, rng.lognormvariate(8, 1.5))),
        )
        if self.queue_state.refusal(spec) is None:
            self.num_submitted += 1
            self.apply(events.Submitted(self.now_s, f"j{self.num_submitted}", spec))

    def go_on(self) -> None:
        """A minute in which jobs end, come, and report."""
        self.now_s += 60.0
        held = [job for job in self.queue_state.jobs.values() if job.state in WITH_DEVICES]
        for job in self.rng.sample(held, max(1, len(held) // 200)):
            self.apply(events.Ended(self.now_s, job.id, is_success=True))
            self.submit()
        for job in self.rng.sample(held, max(1, len(held) // 20)):
            if (
                self.queue_state.jobs.get(job.id) is not None
                and self.queue_state.jobs[job.id].state is JobState.RUNNING
            ):
                self.apply(events.Reported(self.now_s, job.id, 10.0, 1000.0, 0.1))

    def decide(self, snapshot: Any = None) -> tuple[float, float]:
        """Seconds of the wall's clock, and of this thread's processor time."""
        snapshot = snapshot or self.queue_state.snapshot()
        began_s, cpu_began_s = time.perf_counter(), time.thread_time()
        commands = decide(snapshot, self.now_s)
        took_s, cpu_s = time.perf_counter() - began_s, time.thread_time() - cpu_began_s
        self.num_commands += len(commands)
        for command in commands:
            self.apply(command)
            if isinstance(command, events.Placed):
                self.apply(events.JobStarted(self.now_s, command.job))
            elif command.job in self.queue_state.jobs:
                self.apply(events.Yielded(self.now_s, command.job))
                job = self.queue_state.jobs.get(command.job)
                if job is not None and job.state is JobState.STARTING:
                    self.apply(events.JobStarted(self.now_s, command.job))
        return took_s, cpu_s


def table(result: dict[str, Any]) -> str:
    """For people."""
    return rows(
        ("policy", "jobs", "median", "p99", "p99 of CPU", "slowest", "cold", "snapshot", "event", "commands/call"),
        [
            (
                case["policy"],
                f"{case['num']:,}",
                f"{case['median_s'] * 1e3:.2f} ms",
                f"{case['p99_s'] * 1e3:.2f} ms",
                f"{case['cpu_p99_s'] * 1e3:.2f} ms",
                f"{case['slowest_s'] * 1e3:.2f} ms",
                f"{case['cold_s'] * 1e3:.1f} ms",
                f"{case['snapshot_s'] * 1e3:.2f} ms",
                f"{case['event_s'] * 1e6:.1f} µs",
                f"{case['commands_per_call']:.1f}",
            )
            for case in result["cases"]
        ],
    )
