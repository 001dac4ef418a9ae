"""Policies on recorded workloads with jobs as the product runs them, through the simulator.

Needs ``--traces DIR`` as `queue_policies` does. ``--only box,load,tuned,fixed,bound,kinds,policies`` runs some parts; the others
keep their recorded results.

box: one box of 8 (two hosts of 4 in the tables), every 8th job of workloads 1 to 4, rigid. Nothing is known of the jobs
   (`las`, and `default`, which remembers run times), or their commands too (``history``). Means over all jobs of the eight
   choices of the first job, and of the first choice. Bars: `default` at most 0.9 of `las`; with history at most 0.75.
load: the same with every 16th and every 5th job, and of every 4th on 16 devices.
tuned, fixed: elastic Evenload jobs under `goodput` on 64 devices. What they report is what `Run` reports, and the queue learns of
   it by the daemon's code; it decides each minute and when a job arrives or ends, as the daemon does. Their batch grows as that
   of `Run` with `batch_max` (``tuned``: chosen after each epoch, and on other devices 40 steps later), or stays (``fixed``). A
   change of devices is a restart, which costs 30 to 180 s: most jobs change between hosts, where there is no resize in place.
   Bars: mean over Pollux' published one at most 0.95 tuned and 1.05 fixed, p99 tuned at most its own; mean with a longer restart
   at most 1.15 of that with 30 s.
kinds: 4 devices and 4 of half their speed, gangs as in the box, work known or not. `default` with Evenload gangs, against the
   same policy without the kinds' speeds, with Evenload gangs (``equal``) and with gangs that split evenly and so run at the
   speed of the slowest (``even split``).
bound: a lower bound of what any policy reaches with fixed batches (`benchmarks.bounds`), over Pollux' published mean; tuned
   batches have none, because their speed depends on the batches that they had before.
policies: each policy in the box of 8 with nothing known.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bounds import START_S, ElasticJob, least_mean_s
from benchmarks.pollux.workload import pollux_workload
from benchmarks.queue_policies import pollux_folder
from benchmarks.report import RESULTS, commit, rows
from evenload.scheduler.core.values import POLICIES, Settings
from evenload.scheduler.simulator.arrivals import JobArrival, capped, thinned
from evenload.scheduler.simulator.cluster import DeviceShape, KindFacts, devices_of
from evenload.scheduler.simulator.programs import alone_s
from evenload.scheduler.simulator.report import mean, percentile
from evenload.scheduler.simulator.simulate import Conditions, simulate

_WORKLOADS = (1, 2, 3, 4)
_LOADS = {"every 16th job": (16, 16, "2x4"), "every 5th job": (5, 5, "2x4"), "every 4th job, 16 devices": (4, 4, "4x4")}
_RESTARTS_S = (30.0, 60.0, 90.0, 120.0, 180.0)
_KINDS = ("1x4:fast,1x4:slow", "1x4:slow,1x4:fast")
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_SLOW = {"slow": KindFacts(speed=0.5)}


def measure(quick: bool, traces: str | None = None, only: str | None = None) -> dict[str, Any]:
    """Completion times."""
    if traces is None:
        return {"left_out": "no --traces DIR was given"}
    folder = pollux_folder(Path(traces))
    workloads = _WORKLOADS[:1] if quick else _WORKLOADS
    parts: dict[str, Callable[[Path, tuple[int, ...], bool], Any]] = {
        "box": _box,
        "load": _load,
        "tuned": partial(_evenload, "tuned"),
        "fixed": partial(_evenload, "fixed"),
        "bound": _bound,
        "kinds": _kinds,
        "policies": _policies,
    }
    chosen = only.split(",") if only else list(parts)
    if unknown := set(chosen) - parts.keys():
        raise SystemExit(f"--only: there is no part {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    result = _recorded() if only and not quick else {}
    for name in chosen:
        result[name] = {"commit": commit(), "rows": parts[name](folder, workloads, quick)}
    return {**result, "bars": _bars(result)}


def _recorded() -> dict[str, Any]:
    path = RESULTS / "queue_product.json"
    found: dict[str, Any] = json.loads(path.read_text())["result"] if path.exists() else {}
    found.pop("bars", None)
    return found


def _bars(result: dict[str, Any]) -> dict[str, bool]:
    bars = {}
    if "box" in result:
        first = result["box"]["rows"][0]
        bars["box of 8, work unknown: default at most 0.9 × las"] = first["unknown"] <= 0.9
        bars["box of 8, history: default at most 0.75 × las"] = first["history"] <= 0.75
    for batch, most in (("tuned", 0.95), ("fixed", 1.05)):
        if batch in result:
            found = result[batch]["rows"]
            bars[f"Evenload jobs, batch {batch}: mean at most {most} × Pollux"] = found[0]["ratio"] <= most
            bars[f"Evenload jobs, batch {batch}: mean at most 1.15 × that with restarts of 30 s"] = all(
                row["over_30_s"] <= 1.15 for row in found
            )
    if "tuned" in result:
        bars["Evenload jobs, batch tuned: p99 at most that of Pollux"] = result["tuned"]["rows"][0]["p99_ratio"] <= 1.0
    if "kinds" in result:
        bars["kinds: at most 0.85 × the same policy with equal kinds and even splits"] = all(
            row["over_even_split"] <= 0.85 for row in result["kinds"]["rows"]
        )
    return bars


def _jobs(folder: Path, number: int, every: int, offset: int, most: int, evenload: str = "") -> list[JobArrival]:
    arrivals = pollux_workload(folder / "workloads" / f"workload-{number}.csv", evenload=evenload)
    return capped(thinned(arrivals, every, offset), most)


def _times(jobs: Iterable[list[JobArrival]], conditions: Conditions) -> list[float]:
    return [job.jct_s for arrivals in jobs for job in simulate(arrivals, conditions).jobs]


def _compare(jobs: Sequence[list[JobArrival]], cluster: str) -> dict[str, Any]:
    """Return the mean under `las`, and those of `default` over it."""
    las_s = mean(_times(jobs, Conditions(devices_of(cluster), Settings(policy="las"), remaining="unknown")))
    found: dict[str, Any] = {"las_s": las_s}
    for remaining in ("unknown", "history", "known"):
        found[remaining] = mean(_times(jobs, Conditions(devices_of(cluster), remaining=remaining))) / las_s
    return found


def _box(folder: Path, workloads: tuple[int, ...], quick: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for offset in range(1 if quick else 8):
        jobs = [_jobs(folder, number, 8, offset, 8) for number in workloads]
        found.append({"offset": offset, **_compare(jobs, "2x4")})
    las_s = mean([row["las_s"] for row in found])
    total = {
        name: mean([row[name] * row["las_s"] for row in found]) / las_s for name in ("unknown", "history", "known")
    }
    return [*found, {"offset": "all", "las_s": las_s, **total}]


def _load(folder: Path, workloads: tuple[int, ...], quick: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name, (every, num_offsets, cluster) in _LOADS.items():
        offsets = range(1) if quick else range(0, num_offsets, max(1, num_offsets // 4))
        most = len(devices_of(cluster))
        jobs = [_jobs(folder, number, every, offset, most) for offset in offsets for number in workloads]
        found.append({"load": name, **_compare(jobs, cluster)})
    return found


def _evenload(batch: str, folder: Path, workloads: tuple[int, ...], quick: bool) -> list[dict[str, Any]]:
    published = json.loads((folder / "results" / "pollux.json").read_text())["jcts"]
    theirs = [value for number in workloads for value in published[f"workload-{number}"].values()]
    found: list[dict[str, Any]] = []
    for restart_s in _RESTARTS_S[:1] if quick else _RESTARTS_S:
        by_workload = []
        for number in workloads:
            arrivals = pollux_workload(folder / "workloads" / f"workload-{number}.csv", evenload=batch)
            settings = Settings(policy="goodput", restart_s=restart_s)
            by_workload.append(_times([arrivals], Conditions(devices_of("16x4"), settings)))
        ours = [time_s for times in by_workload for time_s in times]
        found.append(
            {
                "restart_s": restart_s,
                "mean_s": mean(ours),
                "by_workload_s": [mean(times) for times in by_workload],
                "ratio": mean(ours) / mean(theirs),
                "p99_ratio": percentile(ours, 99) / percentile(theirs, 99),
                "over_30_s": mean(ours) / (found[0]["mean_s"] if found else mean(ours)),
            }
        )
    return found


def _bound(folder: Path, workloads: tuple[int, ...], quick: bool) -> list[dict[str, Any]]:
    published = json.loads((folder / "results" / "pollux.json").read_text())["jcts"]
    found: list[dict[str, Any]] = []
    for number in workloads:
        jobs = []
        times: dict[Any, dict[int, float]] = {}
        for arrival in pollux_workload(folder / "workloads" / f"workload-{number}.csv", evenload="fixed"):
            key = (arrival.make, most := arrival.spec.needs.max_devices)
            if key not in times:
                sizes = {num for num in _SIZES if num < most} | {min(most, _SIZES[-1])}
                times[key] = {num: alone_s(arrival.make(), _packed(num)) for num in sizes}
            jobs.append(ElasticJob(arrival.time_s, times[key]))
        theirs = mean(list(published[f"workload-{number}"].values()))
        alone = mean([min(job.alone_s.values()) + START_S for job in jobs])
        bound_s = least_mean_s(jobs, _SIZES[-1], 1800.0 if quick else 400.0)
        found.append({"workload": number, "alone_s": alone, "bound_s": bound_s, "over_pollux": bound_s / theirs})
    return found


def _packed(num: int) -> DeviceShape:
    """Return devices in as few hosts of 4 as can be."""
    per_host = (4,) * (num // 4) + ((num % 4,) if num % 4 else ())
    return DeviceShape(per_host, ("gpu",) * num, (1.0,) * num)


def _kinds(folder: Path, workloads: tuple[int, ...], quick: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for cluster in _KINDS:
        for remaining in ("known", "unknown"):
            means = []
            for evenload, equal_kinds in (("gangs", False), ("gangs", True), ("", True)):
                jobs = [
                    _jobs(folder, number, 8, offset, 8, evenload)
                    for offset in range(1 if quick else 4)
                    for number in workloads
                ]
                conditions = Conditions(devices_of(cluster, _SLOW), remaining=remaining, equal_kinds=equal_kinds)
                means.append(mean(_times(jobs, conditions)))
            found.append(
                {
                    "cluster": cluster,
                    "remaining": remaining,
                    "default_s": means[0],
                    "over_equal": means[0] / means[1],
                    "over_even_split": means[0] / means[2],
                }
            )
    return found


def _policies(folder: Path, workloads: tuple[int, ...], quick: bool) -> list[dict[str, Any]]:
    jobs = [_jobs(folder, number, 8, offset, 8) for offset in range(1 if quick else 4) for number in workloads]
    found: list[dict[str, Any]] = []
    for policy in POLICIES:
        times = _times(jobs, Conditions(devices_of("2x4"), Settings(policy=policy), remaining="unknown"))
        found.append({"policy": policy, "mean_s": mean(times), "p99_s": percentile(times, 99)})
    las_s = next(row["mean_s"] for row in found if row["policy"] == "las")
    return [{**row, "over_las": row["mean_s"] / las_s} for row in found]


def table(result: dict[str, Any]) -> str:
    """For people."""
    if "left_out" in result:
        return f"left out: {result['left_out']}"
    texts = []
    for name, part in result.items():
        if name == "bars":
            continue
        names = [column for column in part["rows"][0] if column != "by_workload_s"]
        cells = [tuple(_cell(row[column]) for column in names) for row in part["rows"]]
        texts.append(f"{name} ({part['commit']})\n{rows(tuple(names), cells)}")
    return "\n\n".join(texts)


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value >= 20 else f"{value:.3f}"
