"""Run a simulation: a shell around the core, as the daemon is one, with a clock that jumps from event to event."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from evenload.errors import ConfigError
from evenload.scheduler.core import events
from evenload.scheduler.core.decide import decide
from evenload.scheduler.core.queue_state import QueueState
from evenload.scheduler.core.states import JobState
from evenload.scheduler.core.values import Device, Job, JobSpec, Limits, Reservation, Settings
from evenload.scheduler.learned_speeds import LearnedSpeeds
from evenload.scheduler.runtime_history import RunKey, RuntimeHistory, run_keys
from evenload.scheduler.simulator.arrivals import JobArrival
from evenload.scheduler.simulator.cluster import shape_of
from evenload.scheduler.simulator.fairness import packed_shape, with_fair_times
from evenload.scheduler.simulator.metering import Meter
from evenload.scheduler.simulator.outcome import SimulationOutcome
from evenload.scheduler.simulator.programs import ProgramReport, SimulatedProgram, alone_s
from evenload.scheduler.tariff import tariff_of

KNOWLEDGE = ("known", "unknown", "noisy", "history")
_MOST_ROUNDS = 50
"""Most decisions at one time: a stop that takes no time frees devices for the next command at once."""
_LEARN_EVERY_S = 600.0
"""Where a program reports the same again: what was learned on other devices ages slowly."""
_ENDLESS_S = 20 * 365 * 86400.0
_STALLED_S = 31 * 86400.0
"""Where nothing happens for so long, although no job waits for a time, nothing ever will."""


@dataclass(frozen=True)
class Conditions:
    devices: tuple[Device, ...]
    settings: Settings = field(default_factory=Settings)
    interval_s: float = 60.0
    """The queue decides at multiples of this."""
    at_events: bool = True
    """It also decides whenever a job arrives or ends."""
    save_s: float = 0.0
    """Time for which a job holds its devices after a stop request."""
    resize_s: float | None = None
    """Time that an elastic job loses where it gets or gives devices on its one host, without a stop; None: a restart."""
    remaining: str = "known"
    """The queue's knowledge of the work a job has left: ``known``, ``unknown``, ``noisy`` (times a factor that each job
    keeps, log-normal with `noise`), or ``history`` (estimated from similar jobs that have ended, as the daemon does)."""
    noise: float = 1.0
    """Standard deviation of the factor's logarithm."""
    seed: int = 0
    limits: Mapping[str, Limits] = field(default_factory=dict)
    """Of users; how many jobs may be queued doesn't count here: a refused job would be submitted again."""
    reservations: tuple[Reservation, ...] = ()
    deadline_times: float | None = None
    """Deadline of jobs without one: so many times their time alone on the fastest devices they can use; None: none."""
    midnight_s: float = 0.0
    """Time of some midnight, for `Settings.cheap_hours`."""
    equal_kinds: bool = False
    """The queue takes all kinds of devices to be equally fast; programs run at their speeds all the same."""

    def __post_init__(self) -> None:
        if self.remaining not in KNOWLEDGE:
            raise ConfigError(f"remaining={self.remaining!r}: expected one of {', '.join(KNOWLEDGE)}")
        others_s = (self.save_s, self.noise, self.resize_s or 0.0)
        if not 0 < self.interval_s < math.inf or not all(0 <= value < math.inf for value in others_s):
            raise ConfigError(
                f"interval_s={self.interval_s}, save_s={self.save_s}, resize_s={self.resize_s}, noise={self.noise}: expected "
                f"an interval above 0, the others at least 0, and none infinite"
            )
        if not math.isfinite(self.midnight_s):
            raise ConfigError(f"midnight_s={self.midnight_s}: expected a time; --start-hour is an hour of the day")
        if self.deadline_times is not None and not 1 < self.deadline_times < math.inf:
            raise ConfigError(
                f"deadline_times={self.deadline_times}: expected a number above 1: 1 is a job's time alone"
            )
        if not self.devices:
            raise ConfigError("a simulation without devices")


def simulate(
    arrivals: Sequence[JobArrival], conditions: Conditions, log: list[events.QueueEvent] | None = None
) -> SimulationOutcome:
    """Run a workload to its end; `log` collects the queue's events, as a daemon would record them.

    Raises:
        ConfigError: a job can never run on these devices.
        QueueError: a reservation is of a device that is not there.
    """
    return _Simulation(arrivals, conditions, log).run()


@dataclass
class _RunningProgram:
    program: SimulatedProgram
    factor: float
    """Factor on the remaining work that the queue sees."""
    at_s: float = 0.0
    """Up to when the program has run."""
    version: int = 0
    """Incremented by each stop, which invalidates events scheduled before."""
    is_running: bool = False
    speeds: LearnedSpeeds = field(default_factory=LearnedSpeeds)
    learned_from: tuple[object, ...] = ()
    """The newest report that was learned from, and when: an unchanged one says nothing new for a while."""
    learned_s: float = 0.0


class _Simulation:
    def __init__(
        self, arrivals: Sequence[JobArrival], conditions: Conditions, log: list[events.QueueEvent] | None
    ) -> None:
        self.conditions = conditions
        self.queue_state = QueueState()
        self.log = log
        self.devices = {device.id: device for device in conditions.devices}
        self.heap: list[tuple[float, int, str, str, int]] = []
        self.num_pushed = 0
        self.live: dict[str, _RunningProgram] = {}
        self.meter = Meter(self.devices, tariff_of(conditions.settings.cheap_hours, conditions.midnight_s))
        self.useful_device_s = 0.0
        self.num_decisions = 0
        self.next_tick_s: float | None = None
        self.changed_s = 0.0
        """When the last event was applied."""
        self.rng = random.Random(conditions.seed)
        self.arrivals = {arrival.job: arrival for arrival in arrivals}
        if len(self.arrivals) != len(arrivals):
            raise ConfigError("two jobs of the workload have the same name")
        self.history = RuntimeHistory()
        self.tells = conditions.remaining in ("known", "noisy")
        self.factors = {
            arrival.job: self.rng.lognormvariate(0.0, conditions.noise) if conditions.remaining == "noisy" else 1.0
            for arrival in arrivals
        }
        self._apply(events.SettingsSet(0.0, conditions.settings))
        for device in conditions.devices:
            known = replace(device, speed=1.0) if conditions.equal_kinds else device
            self._apply(events.DeviceAdded(0.0, known))
        for user, limits in conditions.limits.items():
            self._apply(events.LimitsSet(0.0, user, replace(limits, max_queued=None)))
        for reservation in conditions.reservations:
            self._apply(events.ReservationSet(0.0, reservation))
        for arrival in arrivals:
            self._push(arrival.time_s, "arrive", arrival.job)

    def run(self) -> SimulationOutcome:
        while self.heap:
            now_s = self.heap[0][0]
            is_due = False
            while self.heap and self.heap[0][0] <= now_s:
                _, _, kind, job, version = heapq.heappop(self.heap)
                is_due |= self._happen(kind, job, version, now_s)
            if is_due:
                self._decide(now_s)
            if self.queue_state.jobs and self.next_tick_s is None:
                interval_s = self.conditions.interval_s
                self.next_tick_s = math.ceil(now_s / interval_s) * interval_s
                if self.next_tick_s <= now_s and is_due:
                    self.next_tick_s += interval_s
                self._push(self.next_tick_s, "tick", "")
            if now_s > _ENDLESS_S:
                waiting = ", ".join(list(self.queue_state.jobs)[:5])
                raise ConfigError(
                    f"after 20 years jobs are still waiting ({waiting}): limits may keep them out for ever"
                )
            if now_s - self.changed_s > _STALLED_S:
                self._check_stalled(now_s)
        meter = self.meter
        return SimulationOutcome(
            policy=self.conditions.settings.policy,
            num_devices=len(self.devices),
            jobs=tuple(with_fair_times(meter.ended, meter.samples, self.arrivals, self.conditions.devices)),
            samples=tuple(meter.samples),
            useful_device_s=self.useful_device_s,
            num_decisions=self.num_decisions,
        )

    def _check_stalled(self, now_s: float) -> None:
        """Raise `ConfigError` where no job runs, and none waits for a time that is to come."""
        jobs = self.queue_state.jobs
        times = [job.spec.not_before_s or 0.0 for job in jobs.values()]
        times += [reservation.end_s for reservation in self.queue_state.reservations.values()]
        if jobs and now_s - max([self.changed_s, *times]) > _STALLED_S:
            waiting = ", ".join(list(jobs)[:5])
            raise ConfigError(
                f"for a month no job runs and none starts, but jobs wait ({waiting}): limits or reservations keep them out "
                f"for ever, or a start takes that long (restart_s={self.conditions.settings.restart_s:g})"
            )

    def _push(self, time_s: float, kind: str, job: str, version: int = 0) -> None:
        heapq.heappush(self.heap, (time_s, self.num_pushed, kind, job, version))
        self.num_pushed += 1

    def _happen(self, kind: str, name: str, version: int, now_s: float) -> bool:
        """Handle one event; return whether the queue is to decide now."""
        if kind == "tick":
            self.next_tick_s = None
            return True
        if kind == "arrive":
            self._arrive(self.arrivals[name], now_s)
            return self.conditions.at_events
        live = self.live.get(name)
        if live is None or live.version != version:
            return False
        if kind == "begin":
            self._begin(live, name, now_s)
            return False
        if kind == "stop":
            self._yield(name, now_s)
            return self.conditions.at_events
        if kind == "switch":
            job = self.queue_state.jobs[name]
            self._apply(events.Resized(now_s, name, job.target, job.attempt + 1))
            self._run_on(live, name, now_s)
            return self.conditions.at_events
        self._run_to(live, name, now_s)
        if live.program.is_done:
            self._report(live, name, now_s)
            (ended, *_) = self._apply(events.Ended(now_s, name, is_success=True))
            self._learn_run(ended, now_s)
            return self.conditions.at_events
        self._push_change(live, name, now_s)
        return False

    def _arrive(self, arrival: JobArrival, now_s: float) -> None:
        spec = self._with_deadline(arrival)
        factor = self.factors[arrival.job]
        if not self.tells:
            spec = replace(spec, estimate_s=None, total=None, run_key="")
            if self.conditions.remaining == "history":
                spec = self.history.with_estimate(spec, run_keys(spec, arrival.command))
        elif spec.estimate_s is None and spec.needs.min_devices == spec.needs.max_devices:
            shape = packed_shape(self.conditions.devices, spec, spec.needs.min_devices)
            if shape is not None:
                spec = replace(spec, estimate_s=factor * alone_s(arrival.make(), shape))
        if self.conditions.resize_s is not None and spec.needs.min_devices < spec.needs.max_devices:
            spec = replace(spec, resize_s=self.conditions.resize_s)  # the daemon measures it
        refusal = self.queue_state.refusal(spec)
        if refusal is not None:
            raise ConfigError(f"job {arrival.job} of the workload: {refusal}")
        self.live[arrival.job] = _RunningProgram(arrival.make(), factor, speeds=LearnedSpeeds(spec.rates))
        self._apply(events.Submitted(now_s, arrival.job, spec))

    def _with_deadline(self, arrival: JobArrival) -> JobSpec:
        """Return the job's spec; without a deadline of its own, with the one that the conditions give."""
        spec, times = arrival.spec, self.conditions.deadline_times
        if times is None or spec.deadline_s is not None:
            return spec
        shape = packed_shape(self.conditions.devices, spec, spec.needs.max_devices)
        shape = shape or packed_shape(self.conditions.devices, spec, spec.needs.min_devices)
        if shape is None:
            return spec
        return replace(spec, deadline_s=arrival.time_s + times * alone_s(arrival.make(), shape))

    def _begin(self, live: _RunningProgram, name: str, now_s: float) -> None:
        self._apply(events.JobStarted(now_s, name))
        self._run_on(live, name, now_s)

    def _run_on(self, live: _RunningProgram, name: str, now_s: float) -> None:
        """Run a program on the devices that its job has now."""
        held = self.queue_state.jobs[name].devices
        live.program.start(shape_of(tuple(self.devices[device] for device in held)))
        live.at_s, live.is_running = now_s, True
        self._push_change(live, name, now_s)

    def _push_change(self, live: _RunningProgram, name: str, now_s: float) -> None:
        self._push(now_s + live.program.until_change_s(), "change", name, live.version)

    def _run_to(self, live: _RunningProgram, name: str, now_s: float) -> None:
        if live.is_running and now_s > live.at_s:
            self.useful_device_s += (now_s - live.at_s) * len(self.queue_state.jobs[name].devices)
            live.program.advance(now_s - live.at_s)
            live.at_s = now_s

    def _report(self, live: _RunningProgram, name: str, now_s: float) -> None:
        report = live.program.report()
        total = None
        if self.tells:
            total = report.done + live.factor * (report.total - report.done)
        rates = self._learned_rates(live, name, report, now_s) if report.is_learned else report.rates
        self._apply(events.Reported(now_s, name, report.done, total, report.rate_per_s, rates))

    def _learned_rates(
        self, live: _RunningProgram, name: str, report: ProgramReport, now_s: float
    ) -> tuple[float, ...] | None:
        """Learn speeds as the daemon does, which also records a report a minute."""
        job = self.queue_state.jobs[name]
        key = (job.attempt, report.rate_per_s, report.costs)
        if live.learned_from == key and now_s - live.learned_s < _LEARN_EVERY_S:
            return None
        live.learned_from, live.learned_s = key, now_s
        return live.speeds.learn(job, report.rate_per_s, report.costs, self.devices, now_s)

    def _learn_run(self, ended: Job, now_s: float) -> None:
        """Remember a job that has ended, and estimate similar ones by it, as the daemon does."""

        def keys_of(job: Job) -> tuple[RunKey, ...]:
            return run_keys(job.spec, self.arrivals[job.id].command) if self.conditions.remaining == "history" else ()

        for change in self.history.learn(ended, self.queue_state.jobs, keys_of, now_s):
            self._apply(change)

    def _decide(self, now_s: float) -> None:
        for _ in range(_MOST_ROUNDS):
            for name, job in list(self.queue_state.jobs.items()):
                if job.state is JobState.RUNNING:
                    self._run_to(self.live[name], name, now_s)
                    self._report(self.live[name], name, now_s)
            self.num_decisions += 1
            snapshot = replace(self.queue_state.snapshot(self.history.past()), midnight_s=self.conditions.midnight_s)
            commands = decide(snapshot, now_s)
            for command in commands:
                self._apply(command)
                if isinstance(command, events.Placed):
                    self._will_begin(command.job, now_s)
                elif isinstance(command, events.ResizeRequested) and self._resizes_in_place(command.job):
                    self._pause(self.live[command.job])
                    delay_s = self.queue_state.jobs[command.job].spec.resize_s or 0.0
                    self._push(now_s + delay_s, "switch", command.job, self.live[command.job].version)
                elif not isinstance(command, events.Cancelled):
                    self._will_stop(command.job, now_s)
            if not commands or self.conditions.save_s > 0:
                return

    def _will_begin(self, name: str, now_s: float) -> None:
        own_s = self.arrivals[name].spec.restart_s
        delay_s = self.conditions.settings.restart_s if own_s is None else own_s
        self._push(now_s + delay_s, "begin", name, self.live[name].version)

    def _will_stop(self, name: str, now_s: float) -> None:
        """Stop the program; it saves all it has done by now."""
        live = self.live[name]
        self._pause(live)
        if self.conditions.save_s > 0:
            self._push(now_s + self.conditions.save_s, "stop", name, live.version)
            return
        self._yield(name, now_s)

    def _pause(self, live: _RunningProgram) -> None:
        live.version += 1
        live.is_running = False

    def _resizes_in_place(self, name: str) -> bool:
        job = self.queue_state.jobs[name]
        return job.resizes_in_place and len({self.devices[device].host for device in (*job.devices, *job.target)}) == 1

    def _yield(self, name: str, now_s: float) -> None:
        self._apply(events.Yielded(now_s, name))
        job = self.queue_state.jobs.get(name)
        if job is not None and job.state is JobState.STARTING:
            self._will_begin(name, now_s)

    def _apply(self, event: events.QueueEvent) -> tuple[Job, ...]:
        if self.log is not None:
            self.log.append(event)
        changed = self.queue_state.apply(event)
        self.changed_s = self.queue_state.time_s
        self.meter.observe(event, changed, self.queue_state)
        name = getattr(event, "job", None)
        if name in self.queue_state.outcomes:
            self.live.pop(name, None)
        return changed
