"""Pollux' workloads: rows of application, replicas and batch become jobs that follow the measured tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from evenload.errors import ConfigError
from evenload.scheduler.core.values import JobSpec, Needs
from evenload.scheduler.simulator.learning import Learner, most_devices
from evenload.scheduler.simulator.pollux import Epochwise
from evenload.scheduler.simulator.programs import SimulatedProgram
from evenload.scheduler.simulator.tables import Application, application
from evenload.scheduler.simulator.workloads import JobArrival

_FIXED_BATCH = {"ncf": 32768}
"""As published: this one doesn't tune its batch, and runs on one device."""


def pollux_arrivals(rows: Sequence[Mapping[str, str]], tables: Path, elastic: bool, host_size: int) -> list[JobArrival]:
    """Rigid jobs with the replicas and the batch of the file, or elastic ones without either.

    Raises:
        ConfigError: a row or an application's tables are not as expected.
    """
    arrivals = []
    for number, row in enumerate(rows, start=2):
        try:
            num, batch, time_s = int(row["num_replicas"]), int(row["batch_size"]), float(row["time"])
        except (TypeError, ValueError) as error:
            raise ConfigError(f"line {number} of the workload: {error}") from error
        app = application(tables / row["application"])
        needs = Needs(1, most_devices(app)) if elastic else Needs(num, num)
        make = _elastic(app, host_size) if elastic else _rigid(app, batch)
        arrivals.append(JobArrival(time_s, row["name"], JobSpec(user="user", needs=needs, name=row["name"]), make))
    return arrivals


@cache
def _rigid(app: Application, batch: int) -> Callable[[], SimulatedProgram]:
    return lambda: Epochwise(app, batch, None)


@cache
def _elastic(app: Application, host_size: int) -> Callable[[], SimulatedProgram]:
    fixed = _FIXED_BATCH.get(app.name)
    return lambda: Epochwise(app, fixed or app.init_batch, Learner(app, host_size, fixed))
