"""Pollux' workloads as plain jobs: rows of application, replicas and batch become jobs of a fixed duration.

A duration is steps × seconds of a step, both from the measured tables of the application (Qiao et al., OSDI 2021):
``validation-<batch>.csv`` counts the steps of a whole training with a batch, ``placements.csv`` and ``scalability.csv`` the
seconds of a step by placement and local batch. The nearest values are taken, so that a duration is within about 10 % of an
emulation of every epoch (`python -m benchmarks queue_policies` has one, which also tunes the batch as Pollux does).
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from math import ceil
from pathlib import Path

from evenload.errors import ConfigError
from evenload.scheduler.core.values import JobSpec, Needs
from evenload.scheduler.simulator.arrivals import JobArrival, timed_program

COLUMNS = {"name", "time", "application", "num_replicas", "batch_size"}
_HOST_SIZE = 4
"""Devices of a host of those measured."""


def pollux_arrivals(rows: Sequence[Mapping[str, str]], tables: Path) -> list[JobArrival]:
    """Return rigid jobs with the file's replicas, in the order of the rows; `ConfigError` for an invalid row."""
    arrivals = []
    for number, row in enumerate(rows, start=2):
        try:
            num, batch, time_s = int(row["num_replicas"]), int(row["batch_size"]), float(row["time"])
        except (TypeError, ValueError) as error:
            raise ConfigError(f"line {number} of the workload: {error}") from error
        spec = JobSpec(user="user", needs=Needs(num, num), name=row["name"])
        duration_s = _duration_s(tables / row["application"], num, batch)
        command = ("python", f"{row['application']}.py", f"--replicas={num}", f"--batch={batch}")
        arrivals.append(JobArrival(time_s, row["name"], spec, timed_program(duration_s, num), command))
    return arrivals


@cache
def _duration_s(folder: Path, num_devices: int, batch: int) -> float:
    measured = {int(path.stem.split("-")[1]): path for path in folder.glob("validation-*.csv")}
    if not measured:
        raise ConfigError(f"{folder}: expected the tables of an application, validation-<batch>.csv among them")
    nearest = min(measured, key=lambda size: abs(size - batch))
    num_steps = _rows(measured[nearest], "iteration")[-1][0] * nearest / batch
    placements = [
        (len(digits), sum(map(int, digits)), *rest)
        for placement, *rest in _rows(folder / "placements.csv", "placement", "local_bsz", "step_time", "sync_time")
        for digits in [str(int(placement))]
    ]
    scaled = _rows(folder / "scalability.csv", "num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
    num_hosts, largest = ceil(num_devices / _HOST_SIZE), max(row[2] for row in placements)
    num_micro = ceil(batch / num_devices / largest)
    local = batch / num_devices / num_micro

    def distance(row: Sequence[float]) -> tuple[float, float, float]:
        return abs(row[1] - num_devices), abs(row[0] - num_hosts), abs(row[2] - local)

    _, _, _, step_s, sync_s = min((*placements, *scaled), key=distance)
    return num_steps * (step_s + (num_micro - 1) * (step_s - sync_s))


def _rows(path: Path, *columns: str) -> list[tuple[float, ...]]:
    try:
        with path.open(newline="") as file:
            table = [tuple(float(row[name]) for name in columns) for row in csv.DictReader(file)]
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: expected a table with the columns {', '.join(columns)} ({error})") from error
    if not table:
        raise ConfigError(f"{path} holds no row")
    return table
