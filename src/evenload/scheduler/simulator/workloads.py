"""Workloads from files: a table of jobs, a queue's own log of events, Pollux' workloads, the Philly trace.

Tables are distinguished by their columns (`job_table`, `pollux`), a log by its ending ``.jsonl`` (`recorded`).
"""

from __future__ import annotations

import csv
import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path

from evenload.errors import ConfigError
from evenload.scheduler.core.values import JobSpec, Needs
from evenload.scheduler.simulator.arrivals import JobArrival, timed_program
from evenload.scheduler.simulator.job_table import table_arrivals
from evenload.scheduler.simulator.pollux import COLUMNS, pollux_arrivals
from evenload.scheduler.simulator.recorded import read_log

_PHILLY = {"timestamp", "duration", "num_gpus"}


def read_workload(path: Path, *, tables: Path | None = None, speeds: Path | None = None) -> list[JobArrival]:
    """Return the jobs of a file in the order of their times.

    Args:
        path: the file.
        tables: of Pollux' workloads, the folder with a folder for each application; ``../traces`` if None.
        speeds: a table of steps a second by kind and job type (Gavel's ``simulation_throughputs.json``).

    Raises:
        ConfigError: the file can't be read, or is none of the kinds known.
    """
    if path.suffix == ".jsonl":
        if tables is not None or speeds is not None:
            raise ConfigError(f"--tables and --speeds have no effect on a queue's record, {path}: leave them out")
        return arrivals_of(read_log(path).rows, path)
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            columns = set(reader.fieldnames or ())
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"workload {path} can't be read: {error}") from error
    is_table = {"job", "submitted_s", "devices"} <= columns
    if not (columns >= COLUMNS or columns >= _PHILLY or is_table):
        raise ConfigError(
            f"workload {path} has the columns {', '.join(sorted(columns)) or 'of an empty file'}: expected job, "
            f"submitted_s, devices, duration_s and others (see docs/simulator.md), or those of Pollux or of Philly"
        )
    if tables is not None and not columns >= COLUMNS:
        raise ConfigError(f"--tables has no effect: {path} has no column application")
    if speeds is not None and not is_table:
        raise ConfigError(f"--speeds has no effect: {path} has no column job_type")
    if columns >= COLUMNS:
        arrivals = pollux_arrivals(rows, tables or path.parent.parent / "traces")
    elif columns >= _PHILLY:
        arrivals = _philly(rows)
    else:
        arrivals = table_arrivals(rows, path, speeds)
    if not arrivals:
        raise ConfigError(f"workload {path} holds no job")
    return sorted(arrivals, key=lambda arrival: arrival.time_s)


def arrivals_of(rows: Sequence[Mapping[str, str]], path: Path) -> list[JobArrival]:
    """Return the jobs of a queue's record (`recorded`), which was read from `path`; `ConfigError` if there are none."""
    if not rows:
        raise ConfigError(f"record {path} holds no job that ran and ended")
    return sorted(table_arrivals(rows, path), key=lambda arrival: arrival.time_s)


def _philly(rows: Sequence[Mapping[str, str]]) -> list[JobArrival]:
    """The trace of Jeon et al., ATC 2019: times count from its first job, and each virtual cluster is a user."""
    arrivals = []
    stamps = [datetime.datetime.fromisoformat(row["timestamp"]) for row in rows]
    first = min(stamps, default=None)
    for index, (row, stamp) in enumerate(zip(rows, stamps, strict=True)):
        num, duration_s = int(float(row["num_gpus"])), float(row["duration"])
        if num < 1 or duration_s <= 0 or first is None:
            continue
        arrivals.append(
            JobArrival(
                time_s=(stamp - first).total_seconds(),
                job=f"philly-{index}",
                spec=JobSpec(user=row.get("cluster") or "user", needs=Needs(num, num)),
                make=timed_program(duration_s, num),
            )
        )
    return arrivals
