"""Read Pollux' workloads as jobs that follow the measured tables of their applications, epoch by epoch."""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import cache
from pathlib import Path

from benchmarks.pollux.learning import Learner, most_devices
from benchmarks.pollux.programs import EpochProgram
from benchmarks.pollux.tables import Application, application
from evenload.scheduler.core.values import JobSpec, Needs
from evenload.scheduler.simulator.arrivals import JobArrival
from evenload.scheduler.simulator.programs import SimulatedProgram

_FIXED_BATCH = {"ncf": 32768}
"""As published: this application keeps its batch and runs on one device."""


def pollux_workload(path: Path, *, elastic: bool = False, tables: Path | None = None) -> list[JobArrival]:
    """Return the jobs of a workload in order of their times.

    Args:
        path: a CSV with the columns name, time, application, num_replicas, batch_size.
        elastic: let jobs use any number of devices and tune their batch; otherwise they keep replicas and batch.
        tables: the folder with a folder for each application; ``../traces`` if None.
    """
    folder = tables or path.parent.parent / "traces"
    arrivals = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            app, num = application(folder / row["application"]), int(row["num_replicas"])
            needs = Needs(1, most_devices(app)) if elastic else Needs(num, num)
            make = _elastic(app) if elastic else _rigid(app, int(row["batch_size"]))
            spec = JobSpec(user="user", needs=needs, name=row["name"])
            arrivals.append(JobArrival(float(row["time"]), row["name"], spec, make))
    return sorted(arrivals, key=lambda arrival: arrival.time_s)


@cache
def _rigid(app: Application, batch: int) -> Callable[[], SimulatedProgram]:
    return lambda: EpochProgram(app, batch, None)


@cache
def _elastic(app: Application) -> Callable[[], SimulatedProgram]:
    fixed = _FIXED_BATCH.get(app.name)
    return lambda: EpochProgram(app, fixed or app.init_batch, Learner(app, host_size=4, fixed_batch=fixed))
