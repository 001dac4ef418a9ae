"""What the daemon's parts share: the record, the devices, the runners, what is set. It decides nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenload.scheduler.core.forecast import Forecast
from evenload.scheduler.core.snapshot import QueueSnapshot
from evenload.scheduler.core.states import ENDED
from evenload.scheduler.core.values import Job
from evenload.scheduler.daemon.devices import LocalDevice
from evenload.scheduler.daemon.eta_cache import EtaCache
from evenload.scheduler.daemon.external_processes import DeviceUse, GpuScan
from evenload.scheduler.daemon.memory_history import MemoryHistory
from evenload.scheduler.daemon.queue_file import QueueFile
from evenload.scheduler.daemon.runners import Runners
from evenload.scheduler.program import JobProgram, program_from
from evenload.scheduler.store.ledger import Entry
from evenload.scheduler.store.reader import Reader
from evenload.scheduler.store.writer import QueueStore


@dataclass(frozen=True, slots=True)
class StoredProgram:
    """What is kept beside a job that was submitted."""

    program: JobProgram
    learns: bool = False
    """Its first report tells that it can be preempted."""
    measures: bool = False
    """What a stop and resume costs it is measured."""


@dataclass
class DaemonState:
    """The queue as its daemon has it."""

    folder: Path
    store: QueueStore
    reader: Reader
    runners: Runners
    settings: QueueFile
    devices: Mapping[str, LocalDevice]
    next_number: int
    """Of the next job."""
    since_s: float = field(default_factory=time.time)
    scan: GpuScan | None = None
    """The last look at the GPUs; None before the first, and where there are none."""
    problems: dict[str, str] = field(default_factory=dict)
    """What an admin should know, by where it comes from."""
    external_since_s: dict[tuple[str, int], float] = field(default_factory=dict)
    """Device and process → when it was first seen there."""
    ended: list[Job] = field(default_factory=list)
    """Jobs that events not yet on disk have ended."""
    has_changed: bool = True
    """Something was recorded since the last decision."""
    memory_history: MemoryHistory = field(init=False)
    """What jobs took of a device's memory, for others like them."""
    _eta_cache: EtaCache = field(default_factory=EtaCache)

    def __post_init__(self) -> None:
        self.memory_history = MemoryHistory(self.reader)

    def record(self, entry: Entry, **rest: Any) -> tuple[Job, ...]:
        """`QueueStore.record`, which also notes what there is to decide on and to tell afterwards."""
        changed = self.store.record(entry, **rest)
        self.has_changed = True
        self.ended += [job for job in changed if job.state in ENDED]
        return changed

    def program_of(self, job: str) -> StoredProgram | None:
        """What a job runs; None for no such job."""
        from evenload.scheduler.daemon.requests import LEARNED, MEASURED

        row = self.reader.program(job)
        return (
            None if row is None else StoredProgram(program_from(row), bool(row.get(LEARNED)), bool(row.get(MEASURED)))
        )

    def held(self, device: str) -> DeviceUse | None:
        """What the last look saw on a device."""
        return None if self.scan is None else self.scan.held.get(device)

    def forecasts(self, snapshot: QueueSnapshot) -> Mapping[str, Forecast]:
        """Why jobs wait and when they will be done; see `foresight`."""
        return self._eta_cache.of(snapshot, self.store.last)
