"""State shared by the daemon's parts: the store, the devices, the runners, the settings. It decides nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evenload.scheduler.clock import QueueClock
from evenload.scheduler.core.snapshot import QueueSnapshot
from evenload.scheduler.core.states import ENDED, JobState
from evenload.scheduler.core.values import Job
from evenload.scheduler.daemon.budgets import Budgets, within_budgets
from evenload.scheduler.daemon.devices import LocalDevice
from evenload.scheduler.daemon.external_processes import DeviceUse, GpuScan
from evenload.scheduler.daemon.memory_history import MemoryHistory
from evenload.scheduler.daemon.queue_file import QueueFile
from evenload.scheduler.daemon.run_estimates import RunEstimates
from evenload.scheduler.daemon.runners import Runners
from evenload.scheduler.forecast.eta_cache import EtaCache
from evenload.scheduler.forecast.forecast import Forecast
from evenload.scheduler.program import JobProgram, program_from
from evenload.scheduler.store.ledger import Entry
from evenload.scheduler.store.reader import Reader
from evenload.scheduler.store.writer import QueueStore


@dataclass(frozen=True, slots=True)
class StoredProgram:
    """A job's program, with what is stored beside it."""

    program: JobProgram
    learns: bool = False
    """Its first report means that it can be preempted."""
    measures: bool = False
    """The cost of a stop and resume is measured."""


@dataclass
class DaemonState:
    folder: Path
    store: QueueStore
    reader: Reader
    runners: Runners
    settings: QueueFile
    devices: Mapping[str, LocalDevice]
    next_number: int
    clock: QueueClock
    """The queue's time: of all events, and of everything that is measured by them."""
    since_s: float = field(default_factory=time.time)
    alive_s: float = 0.0
    """When the daemon before this one was last known to run, by the queue's clock."""
    scan: GpuScan | None = None
    """The last scan of the GPUs; None before the first, and without GPUs."""
    problems: dict[str, str] = field(default_factory=dict)
    """Problems that an admin should know, by source."""
    external_since_s: dict[tuple[str, int], float] = field(default_factory=dict)
    """Device and process → when it was first seen there."""
    ended: list[Job] = field(default_factory=list)
    """Jobs that events not yet on disk have ended."""
    has_changed: bool = True
    """An event was recorded since the last decision."""
    memory_history: MemoryHistory = field(init=False)
    budgets: Budgets = field(init=False)
    run_estimates: RunEstimates = field(init=False)
    _eta_cache: EtaCache = field(default_factory=EtaCache)

    def __post_init__(self) -> None:
        self.budgets = Budgets(self.reader)
        self._learn_anew()

    def _learn_anew(self) -> None:
        self.memory_history = MemoryHistory(self.reader)
        self.run_estimates = RunEstimates(self.reader)

    def record(self, entry: Entry, **rest: Any) -> tuple[Job, ...]:
        """`QueueStore.record`, which also notes that there is something to decide, and jobs that have ended."""
        changed = self.store.record(entry, **rest)
        self.has_changed = True
        self.ended += [job for job in changed if job.state in ENDED]
        return changed

    def roll_back(self) -> None:
        """Forget what was recorded and is not on disk: it is recorded again, and counts once."""
        self.ended.clear()
        self._learn_anew()
        self.has_changed = True

    def program_of(self, job: str) -> StoredProgram | None:
        """Return a job's program; None for no such job."""
        from evenload.scheduler.daemon.requests import LEARNED, MEASURED

        row = self.reader.program(job)
        return (
            None if row is None else StoredProgram(program_from(row), bool(row.get(LEARNED)), bool(row.get(MEASURED)))
        )

    def held(self, device: str) -> DeviceUse | None:
        return None if self.scan is None else self.scan.held.get(device)

    def snapshot(self) -> tuple[QueueSnapshot, dict[str, str]]:
        """Return the queue to decide on, and the reasons of jobs that are left out of it."""
        now = self.store.queue_state.snapshot(self.run_estimates.past())
        now = replace(now, midnight_s=self.clock.midnight_s(self.clock.now_s()))
        return within_budgets(now, self.budgets.spent)

    def forecasts(self, must_have: str = "") -> Mapping[str, Forecast]:
        spent = self.budgets.spent
        snapshot, waits = self.snapshot()
        found = self._eta_cache.forecasts(snapshot, self.store.last, self.clock.now_s(), must_have)
        if not spent:
            return found
        found = {**found, **{job: Forecast(reason) for job, reason in waits.items()}}
        for job in snapshot.jobs:
            if (reason := spent.get(job.spec.user)) and job.id in found and job.spec.preemptible:
                known = found[job.id]
                text = f"{reason}, so it uses idle devices only"
                text = f"{text}; {known.reason}" if job.state is JobState.PENDING else text
                found[job.id] = replace(known, reason=text)
        return found
