"""Workloads from files: a simple table of jobs, a queue's own log of events, Pollux' workloads, the Philly trace.

Tables are told apart by their columns, a log by its ending ``.jsonl`` (`recorded`). The simple table is what a queue's
record is exported to, and what a person writes by hand: one row a job, times in seconds.

========================= =========================================================================================
``job``                   its name, once
``submitted_s``           when it is submitted
``devices``               ``2``, or ``1:4`` for an elastic job
``duration_s``            how long it runs on the least number of devices it asks for, each of speed 1; or:
``job_type``, ``steps``   so many steps of a type that a table of speeds tells of (``--speeds``)
``user`` ``priority`` ``kinds`` (``a100|v100``) ``memory_gib`` ``one_host`` ``one_kind`` ``preemptible`` ``estimate_s``
``soft_limit_s`` ``hard_limit_s`` ``not_before_s`` ``after`` (``job;job:any``) ``array`` ``array_limit`` ``restart_s``
                          as in `JobSpec`; may be missing, or empty
``scaling``               speed grows like n^scaling with the number of devices; 0.9 where not given
``rates``                 instead: speeds on 1, 2, … devices in any unit, ``1|1.9|2.7``; the job tells the queue of them
``name`` ``state`` ``started_s`` ``ended_s``
                          kept in a record for people; not read
========================= =========================================================================================
"""

from __future__ import annotations

import csv
import datetime
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evenload.errors import ConfigError
from evenload.scheduler.core.values import After, JobSpec, Needs
from evenload.scheduler.simulator.programs import SimulatedProgram, TimedProgram, TypedProgram

DEFAULT_SCALING = 0.9
_IGNORED = ("name", "state", "started_s", "ended_s")
_COLUMNS = (
    "job", "submitted_s", "devices", "duration_s", "job_type", "steps", "user", "priority", "kinds", "memory_gib",
    "one_host", "one_kind", "preemptible", "estimate_s", "soft_limit_s", "hard_limit_s", "not_before_s", "after", "array",
    "array_limit", "restart_s", "scaling", "rates",
)  # fmt: skip
_POLLUX = {"name", "time", "application", "num_replicas", "batch_size"}
_PHILLY = {"timestamp", "duration", "num_gpus"}
_DAY_S = 86400.0


@dataclass(frozen=True)
class JobArrival:
    """A job of a workload."""

    time_s: float
    job: str
    spec: JobSpec
    make: Callable[[], SimulatedProgram]
    """A new program of it: a workload is simulated more than once."""


def read_workload(
    path: Path,
    *,
    elastic: bool = False,
    host_size: int = 4,
    tables: Path | None = None,
    speeds: Path | None = None,
) -> list[JobArrival]:
    """The jobs of a file, in order of their times.

    Args:
        path: the file.
        elastic: of Pollux' workloads, let jobs use any number of devices and tune their batch.
        host_size: devices of a host, which elastic jobs know when they predict.
        tables: of Pollux' workloads, the folder with a folder for each application; ``../traces`` where not given.
        speeds: a table of steps a second by kind and job type (Gavel's ``simulation_throughputs.json``).

    Raises:
        ConfigError: the file can't be read, or is none of the kinds known.
    """
    if path.suffix == ".jsonl":
        if elastic or tables is not None or speeds is not None:
            raise ConfigError(
                f"elastic, --tables and --speeds have no effect on a queue's record, {path}: leave them out"
            )
        from evenload.scheduler.simulator.recorded import read_log

        return arrivals_of(read_log(path).rows, path)
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            columns = set(reader.fieldnames or ())
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"workload {path} can't be read: {error}") from error
    if columns >= _POLLUX:
        if speeds is not None:
            raise ConfigError("--speeds has no effect on a workload of applications: leave it out")
        from evenload.scheduler.simulator.pollux_workload import pollux_arrivals

        arrivals = pollux_arrivals(rows, tables or path.parent.parent / "traces", elastic, host_size)
    elif tables is not None:
        raise ConfigError(f"--tables has no effect: {path} has no column application")
    elif elastic:
        raise ConfigError(f"elastic has no effect: {path} has no column application; use devices MIN:MAX in its rows")
    elif columns >= _PHILLY:
        if speeds is not None:
            raise ConfigError("--speeds has no effect on this trace, which holds durations: leave it out")
        arrivals = _philly(rows)
    elif {"job", "submitted_s", "devices"} <= columns:
        arrivals = _simple(rows, columns, path, speeds)
    else:
        raise ConfigError(
            f"workload {path} has the columns {', '.join(sorted(columns)) or 'of an empty file'}: expected job, "
            f"submitted_s, devices, duration_s and others (see docs/simulator.md), or those of Pollux or of Philly"
        )
    if not arrivals:
        raise ConfigError(f"workload {path} holds no job")
    return sorted(arrivals, key=lambda arrival: arrival.time_s)


def arrivals_of(rows: Sequence[Mapping[str, str]], path: Path) -> list[JobArrival]:
    """The jobs of a queue's record (`recorded`), which was read from `path`.

    Raises:
        ConfigError: there is none.
    """
    if not rows:
        raise ConfigError(f"record {path} holds no job that ran and ended")
    return sorted(_simple(rows, set(rows[0]), path, None), key=lambda arrival: arrival.time_s)


def thinned(arrivals: Sequence[JobArrival], every: int, offset: int = 0) -> list[JobArrival]:
    """Each `every`-th job, beginning with the one at `offset`."""
    if every < 1 or not 0 <= offset < every:
        raise ConfigError(f"every={every}, offset={offset}: expected every >= 1 and 0 <= offset < every")
    return list(arrivals[offset::every])


def capped(arrivals: Iterable[JobArrival], num_devices: int) -> list[JobArrival]:
    """Rigid jobs that ask for more than there is ask for all there is; elastic ones may use at most that."""
    fitted = []
    for arrival in arrivals:
        needs = arrival.spec.needs
        if needs.max_devices > num_devices:
            least = min(needs.min_devices, num_devices)
            smaller = replace(needs, min_devices=least, max_devices=num_devices)
            arrival = replace(arrival, spec=replace(arrival.spec, needs=smaller))
        fitted.append(arrival)
    return fitted


def _philly(rows: Sequence[Mapping[str, str]]) -> list[JobArrival]:
    """The trace of Jeon et al., ATC 2019; times count from its first job, each virtual cluster is a user."""
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
                make=_timed(duration_s, num, DEFAULT_SCALING),
            )
        )
    return arrivals


def _simple(rows: Sequence[Mapping[str, str]], columns: set[str], path: Path, speeds: Path | None) -> list[JobArrival]:
    if unknown := columns - {*_COLUMNS, *_IGNORED}:
        raise ConfigError(
            f"workload {path} has the unknown columns {', '.join(sorted(unknown))}; there are {', '.join(_COLUMNS)}"
        )
    if speeds is not None and "job_type" not in columns:
        raise ConfigError(f"--speeds has no effect: {path} has no column job_type")
    table = read_speeds(speeds) if speeds is not None else {}
    arrivals = []
    names: set[str] = set()
    for number, row in enumerate(rows, start=2):
        try:
            arrival = _simple_row({name: value for name, value in row.items() if value}, table)
        except (KeyError, ValueError) as error:
            raise ConfigError(f"workload {path}, line {number}: {_say(error)}") from error
        if arrival.job in names:
            raise ConfigError(f"workload {path}, line {number}: job {arrival.job} is there twice")
        names.add(arrival.job)
        arrivals.append(arrival)
    for arrival in arrivals:
        for after in arrival.spec.after:
            if after.job not in names:
                raise ConfigError(f"workload {path}: job {arrival.job} is after {after.job}, which is not in the file")
    return arrivals


def _say(error: Exception) -> str:
    return f"the column {error} is missing or empty" if isinstance(error, KeyError) else str(error)


def _simple_row(row: Mapping[str, str], table: Mapping[str, Mapping[tuple[str, int], float]]) -> JobArrival:
    low, _, high = row["devices"].partition(":")
    needs = Needs(
        min_devices=int(low),
        max_devices=int(high or low),
        kinds=tuple(row["kinds"].split("|")) if "kinds" in row else (),
        memory_bytes=int(float(row.get("memory_gib", 0)) * 2**30),
        one_host=_flag(row.get("one_host", "no")),
        one_kind=_flag(row.get("one_kind", "no")),
    )
    optional: dict[str, Any] = {
        name: float(row[name])
        for name in ("estimate_s", "soft_limit_s", "hard_limit_s", "not_before_s", "restart_s")
        if name in row
    }
    if "array_limit" in row:
        optional["array_limit"] = int(row["array_limit"])
    spec = JobSpec(
        user=row.get("user", "user"),
        needs=needs,
        name=row.get("name", ""),
        priority=int(row.get("priority", 0)),
        preemptible=_flag(row.get("preemptible", "yes")),
        after=tuple(_after(part) for part in row.get("after", "").split(";") if part),
        array=row.get("array", ""),
        **optional,
    )
    time_s = float(row["submitted_s"])
    if not 0 <= time_s < math.inf:
        raise ValueError(f"submitted_s={time_s}: expected a number of at least 0")
    if "job_type" in row:
        if {"duration_s", "scaling", "rates"} & row.keys():
            raise ValueError("job_type and duration_s, scaling or rates in one row: a job has steps, or a duration")
        rates = table.get(row["job_type"])
        if rates is None:
            raise ValueError(
                f"job_type {row['job_type']!r} is in no table of speeds (--speeds); "
                f"there are {', '.join(sorted(table)) or 'none'}"
            )
        make = _typed(float(row["steps"]), row["job_type"], rates)
    else:
        if "rates" in row and "scaling" in row:
            raise ValueError("rates and scaling in one row: expected one of them")
        rates_ = tuple(float(rate) for rate in row["rates"].split("|")) if "rates" in row else ()
        scaling = float(row.get("scaling", DEFAULT_SCALING))
        make = _timed(float(row["duration_s"]), needs.min_devices, scaling, rates_)
    make()  # what is wrong with the numbers is said with the line
    return JobArrival(time_s, row["job"], spec, make)


def _after(text: str) -> After:
    name, _, condition = text.partition(":")
    return After(name, condition or "ok")


def _flag(text: str) -> bool:
    if text.lower() in ("yes", "true", "1"):
        return True
    if text.lower() in ("no", "false", "0"):
        return False
    raise ValueError(f"{text!r}: expected yes or no")


def _timed(
    duration_s: float, num_devices: int, scaling: float, rates: tuple[float, ...] = ()
) -> Callable[[], SimulatedProgram]:
    return lambda: TimedProgram(duration_s, num_devices, scaling, rates)


def _typed(steps: float, name: str, rates: Mapping[tuple[str, int], float]) -> Callable[[], SimulatedProgram]:
    return lambda: TypedProgram(steps, name, rates)


def read_speeds(path: Path) -> dict[str, dict[tuple[str, int], float]]:
    """Job type → (kind, number of devices) → steps a second, of jobs that have their devices for themselves.

    Raises:
        ConfigError: the file is not such a table.
    """
    try:
        table = json.loads(path.read_text())
        speeds: dict[str, dict[tuple[str, int], float]] = {}
        for kind, by_type in table.items():
            for written, beside in by_type.items():
                name, num = written.strip("()").rsplit(",", 1)
                rate = float(beside["null"])
                if rate > 0:
                    speeds.setdefault(name.strip().strip("'\""), {})[kind, int(num)] = rate
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'speeds {path}: expected JSON of kind → "(\'job type\', number of devices)" → "null" → steps a second '
            f"({error})"
        ) from error
    return speeds
