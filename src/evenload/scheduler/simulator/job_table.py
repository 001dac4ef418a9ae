"""Jobs from a table, written by hand or exported from a queue's record. One row a job, times in seconds.

========================= =========================================================================================
``job``                   its name, once
``submitted_s``           when it is submitted
``devices``               ``2``, or ``1:4`` for an elastic job
``duration_s``            its duration on its minimum of devices, each of speed 1; or:
``job_type``, ``steps``   so many steps of a type in a table of speeds (``--speeds``)
``user`` ``priority`` ``kinds`` (``a100|v100``) ``memory_gib`` ``one_host`` ``one_kind`` ``preemptible`` ``estimate_s``
``soft_limit_s`` ``hard_limit_s`` ``not_before_s`` ``after`` (``job;job:any``) ``array`` ``array_limit`` ``restart_s``
``resize_s`` ``deadline_s`` as in `JobSpec`; may be missing, or empty
``scaling``               speed grows like n^scaling with the number of devices; 0.9 where not given
``rates``                 instead: speeds on 1, 2, … devices in any unit, ``1|1.9|2.7``; the job reports them to the queue
``evenload``              an Evenload job: on unequal devices it runs at their mean speed, any other at the slowest's; yes for
                          an elastic job and one with ``rates`` where not given
``command``               jobs with the same one are similar, where run times are estimated from earlier ones
``name`` ``state`` ``started_s`` ``ended_s``
                          kept in a record for people; not read
========================= =========================================================================================
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from evenload.errors import ConfigError
from evenload.scheduler.core.values import After, JobSpec, Needs
from evenload.scheduler.simulator.arrivals import DEFAULT_SCALING, JobArrival, timed_program
from evenload.scheduler.simulator.programs import SimulatedProgram, TypedProgram

_IGNORED = ("name", "state", "started_s", "ended_s")
_COLUMNS = (
    "job", "submitted_s", "devices", "duration_s", "job_type", "steps", "user", "priority", "kinds", "memory_gib",
    "one_host", "one_kind", "preemptible", "estimate_s", "soft_limit_s", "hard_limit_s", "not_before_s", "deadline_s",
    "after", "array", "array_limit", "restart_s", "resize_s", "scaling", "rates", "evenload", "command",
)  # fmt: skip


def table_arrivals(rows: Sequence[Mapping[str, str]], path: Path, speeds: Path | None = None) -> list[JobArrival]:
    """Return the jobs of a table, in the order of its rows; `ConfigError` for an unknown column or invalid row.

    Args:
        rows: column → text.
        path: the file they were read from, for errors.
        speeds: a table of steps a second by kind and job type (Gavel's ``simulation_throughputs.json``).
    """
    columns = {name for name in (rows[0] if rows else ()) if name is not None}  # None: cells beyond the header
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
            raise ConfigError(f"workload {path}, line {number}: {_message(error)}") from error
        if arrival.job in names:
            raise ConfigError(f"workload {path}, line {number}: job {arrival.job} is there twice")
        names.add(arrival.job)
        arrivals.append(arrival)
    for arrival in arrivals:
        for after in arrival.spec.after:
            if after.job not in names:
                raise ConfigError(f"workload {path}: job {arrival.job} is after {after.job}, which is not in the file")
    return arrivals


def _message(error: Exception) -> str:
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
        for name in (
            "estimate_s",
            "soft_limit_s",
            "hard_limit_s",
            "not_before_s",
            "deadline_s",
            "restart_s",
            "resize_s",
        )
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
    is_elastic = needs.min_devices < needs.max_devices
    is_evenload = _flag(row["evenload"]) if "evenload" in row else is_elastic or "rates" in row
    if "job_type" in row:
        if {"duration_s", "scaling", "rates"} & row.keys():
            raise ValueError("job_type and duration_s, scaling or rates in one row: a job has steps, or a duration")
        rates = table.get(row["job_type"])
        if rates is None:
            raise ValueError(
                f"job_type {row['job_type']!r} is in no table of speeds (--speeds); "
                f"there are {', '.join(sorted(table)) or 'none'}"
            )
        steps, job_type = float(row["steps"]), row["job_type"]
        make: Callable[[], SimulatedProgram] = partial(TypedProgram, steps, job_type, rates, is_evenload)
    else:
        if "rates" in row and "scaling" in row:
            raise ValueError("rates and scaling in one row: expected one of them")
        rates_ = tuple(float(rate) for rate in row["rates"].split("|")) if "rates" in row else ()
        scaling = float(row.get("scaling", DEFAULT_SCALING))
        make = timed_program(float(row["duration_s"]), needs.min_devices, scaling, rates_, is_evenload)
    make()  # an error in the numbers names the line
    return JobArrival(time_s, row["job"], spec, make, tuple(row.get("command", "").split()))


def _after(text: str) -> After:
    name, _, condition = text.partition(":")
    return After(name, condition or "ok")


def _flag(text: str) -> bool:
    if text.lower() in ("yes", "true", "1"):
        return True
    if text.lower() in ("no", "false", "0"):
        return False
    raise ValueError(f"{text!r}: expected yes or no")


def read_speeds(path: Path) -> dict[str, dict[tuple[str, int], float]]:
    """Return job type → (kind, number of devices) → steps a second, of jobs that don't share devices.

    Raises `ConfigError` if the file is not such a table.
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
