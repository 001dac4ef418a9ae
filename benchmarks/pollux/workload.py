"""Read Pollux' workloads as jobs that follow the measured tables of their applications, epoch by epoch."""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import cache
from pathlib import Path

from benchmarks.pollux.learning import Learner, most_devices
from benchmarks.pollux.programs import EpochProgram, EvenloadProgram
from benchmarks.pollux.tables import Application, application
from evenload.scheduler.core.values import JobSpec, Needs
from evenload.scheduler.simulator.arrivals import JobArrival
from evenload.scheduler.simulator.programs import SimulatedProgram

_FIXED_BATCH = {"ncf": 32768}
"""As published: this application keeps its batch and runs on one device."""


def pollux_workload(
    path: Path, *, elastic: bool = False, evenload: str = "", tables: Path | None = None
) -> list[JobArrival]:
    """Return the jobs of a workload in order of their times.

    Args:
        path: a CSV with the columns name, time, application, num_replicas, batch_size.
        elastic: let jobs use any number of devices and tune their batch by Pollux' agent; otherwise they keep both.
        evenload: let jobs be Evenload jobs: ``gangs`` that keep replicas and batch; or on any number of devices with the
            ``fixed`` batch of the workload, or with one that grows from the application's smallest (``tuned``).
        tables: the folder with a folder for each application; ``../traces`` if None.
    """
    folder = tables or path.parent.parent / "traces"
    arrivals = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            app, num = application(folder / row["application"]), int(row["num_replicas"])
            batch = int(row["batch_size"])
            if evenload == "gangs":
                needs, make = Needs(num, num), _evenload(app, batch, 0)
            elif evenload:
                batch = _FIXED_BATCH.get(app.name) or (app.init_batch if evenload == "tuned" else batch)
                limit = app.max_batch if evenload == "tuned" and app.name not in _FIXED_BATCH else 0
                most = most_devices(app)
                needs = Needs(1, most if limit else max(1, min(most, batch // app.min_local)))
                make = _evenload(app, batch, limit)
            else:
                needs = Needs(1, most_devices(app)) if elastic else Needs(num, num)
                make = _elastic(app) if elastic else _rigid(app, batch)
            spec = JobSpec(user="user", needs=needs, name=row["name"])
            command = ("python", f"{app.name}.py", f"--replicas={num}", f"--batch={row['batch_size']}")
            arrivals.append(JobArrival(float(row["time"]), row["name"], spec, make, command))
    return sorted(arrivals, key=lambda arrival: arrival.time_s)


@cache
def _rigid(app: Application, batch: int) -> Callable[[], SimulatedProgram]:
    return lambda: EpochProgram(app, batch, None)


@cache
def _elastic(app: Application) -> Callable[[], SimulatedProgram]:
    fixed = _FIXED_BATCH.get(app.name)
    return lambda: EpochProgram(app, fixed or app.init_batch, Learner(app, host_size=4, fixed_batch=fixed))


@cache
def _evenload(app: Application, batch: int, batch_max: int) -> Callable[[], SimulatedProgram]:
    return lambda: EvenloadProgram(app, batch, batch_max)
