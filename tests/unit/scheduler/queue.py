"""A queue in a test: events go in, commands come out, time is a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evenload.scheduler.core import events
from evenload.scheduler.core.decide import decide, plan
from evenload.scheduler.core.events import Command
from evenload.scheduler.core.queue_state import QueueState
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Device, Job, JobSpec, Needs, Settings
from tests.unit.scheduler.invariants import violations

GIB = 2**30


def box(num: int = 8, hosts: int = 1, kind: str = "gpu", **facts: Any) -> list[Device]:
    """Hosts of `num` devices each."""
    return [Device(f"{kind}{h}.{d}", f"{kind}-host{h}", kind=kind, **facts) for h in range(hosts) for d in range(num)]


def spec(num: int | tuple[int, int] = 1, user: str = "ann", **rest: Any) -> JobSpec:
    low, high = num if isinstance(num, tuple) else (num, num)
    inner = {name: rest.pop(name) for name in ("kinds", "memory_bytes", "one_host", "one_kind") if name in rest}
    return JobSpec(user=user, needs=Needs(low, high, **inner), **rest)


def is_preemption(command: Command) -> bool:
    return isinstance(command, events.StopRequested) and command.is_preemption


class Queue:
    """A queue state, its log, and a clock."""

    def __init__(self, devices: Sequence[Device], **settings: Any) -> None:
        self.queue_state = QueueState()
        self.log: list[events.QueueEvent] = []
        self.now_s = 0.0
        self.num = 0
        self.apply(events.SettingsSet(0.0, Settings(**settings)))
        for device in devices:
            self.apply(events.DeviceAdded(0.0, device))

    def apply(self, event: events.QueueEvent) -> tuple[Job, ...]:
        changed = self.queue_state.apply(event)
        self.log.append(event)
        assert violations(self.queue_state.snapshot()) == []
        return changed

    def submit(self, what: JobSpec | int | tuple[int, int] = 1, name: str = "", **rest: Any) -> str:
        self.num += 1
        name = name or f"j{self.num}"
        self.apply(events.Submitted(self.now_s, name, what if isinstance(what, JobSpec) else spec(what, **rest)))
        return name

    def decide(self) -> tuple[Command, ...]:
        """Decides and records the commands; nothing is carried out."""
        commands = decide(self.queue_state.snapshot(), self.now_s)
        for command in commands:
            self.apply(command)
        return commands

    def settle(self) -> list[Command]:
        """Decides and carries out at once, until there is nothing to do."""
        done: list[Command] = []
        for _ in range(100):
            commands = self.decide()
            if not commands:
                return done
            done += commands
            for command in commands:
                if isinstance(command, events.Placed):
                    self.began(command.job)
                elif not isinstance(command, events.Cancelled):
                    self.yielded(command.job)
        raise AssertionError(f"never settles: {commands}")

    def began(self, *names: str) -> None:
        for name in names:
            self.apply(events.JobStarted(self.now_s, name))

    def yielded(self, name: str) -> None:
        self.apply(events.Yielded(self.now_s, name))
        job = self.queue_state.jobs.get(name)
        if job is not None and job.state is JobState.STARTING:
            self.began(name)

    def ended(self, *names: str, is_success: bool = True) -> None:
        for name in names:
            self.apply(events.Ended(self.now_s, name, is_success))

    def report(self, name: str, done: float, total: float | None = None, rate: float = 0.0, **rest: Any) -> None:
        self.apply(events.Reported(self.now_s, name, done, total, rate, **rest))

    def waits(self) -> dict[str, str]:
        return plan(self.queue_state.snapshot(), self.now_s, explain=True).waits

    def state(self, name: str) -> JobState:
        job = self.queue_state.jobs.get(name)
        return job.state if job is not None else self.queue_state.outcomes[name]

    def devices(self, name: str) -> tuple[str, ...]:
        return self.queue_state.jobs[name].devices

    @property
    def running(self) -> set[str]:
        """Jobs that hold devices."""
        return {job.id for job in self.queue_state.jobs.values() if job.devices}
