"""Policies on recorded workloads, through the simulator: faithful to what was published, and better than it.

Needs ``--traces DIR``: a folder with ``workloads/workload-N.csv``, ``traces/<application>/`` and ``results/*.json`` of Pollux'
artifact (petuum/adaptdl, branch osdi21-artifact). 16 hosts of 4 devices, a restart costs 30 s, the queue decides every
60 s as theirs does ("events": also when jobs come and go).

1. Faithful: `las` with the one published threshold of 16 device-hours, hosts filled emptiest first, no protection from
   preemption, rigid jobs with the replicas and batches of the workload. Bar: the mean completion time of each workload
   within 5 % of the published one.
2. Elastic with Pollux' agent: `goodput`, all settings as by default; jobs learn speeds. Bars over workloads 1 to 4: mean at
   most 0.93 × Pollux' published one with p99 at most its own (over all jobs); at most 1.03 × where the queue isn't told
   how much work jobs have. Tuned on workloads 1 and 2.
3. One box of 8 (two hosts of 4 in the tables): every 8th job of each workload, rigid, those that ask for more take 8;
   means over the four workloads. `default` against `fifo` and `las` (neither is told anything). Bars: mean 2.0 × below
   FIFO and 1.4 × below LAS, 1.8 × below FIFO where remaining work is told with a log-normal error (σ = 1, mean over five
   seeds); a job's time over its own under FIFO: p99 at most 3. The bars are of offset 0 (jobs 0, 8, 16, …); the other
   seven offsets are reported beside.

`queue_product` has jobs as the product runs them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.pollux.workload import pollux_workload
from benchmarks.report import rows
from evenload.scheduler.core.values import Settings
from evenload.scheduler.simulator.arrivals import JobArrival, capped, thinned
from evenload.scheduler.simulator.cluster import devices_of
from evenload.scheduler.simulator.outcome import SimulationOutcome
from evenload.scheduler.simulator.report import mean, percentile, report_of, slowdowns
from evenload.scheduler.simulator.simulate import Conditions, simulate

AS_TIRESIAS = Settings(
    policy="las",
    min_run_s=0.0,
    max_preemptions_per_hour=10**6,
    starve_after_s=1e12,
    packing="spread",
    las_thresholds_device_s=(16 * 3600.0,),
)
_WORKLOADS = (1, 2, 3, 4)
_CLUSTER, _BOX = "16x4", "2x4"


def measure(quick: bool, traces: str | None = None) -> dict[str, Any]:
    """Completion times."""
    if traces is None:
        return {"left_out": "no --traces DIR was given"}
    folder = pollux_folder(Path(traces))
    workloads = _WORKLOADS[:1] if quick else _WORKLOADS
    faithful = _faithful(folder, workloads)
    elastic = _elastic(folder, workloads, quick)
    box = _box(folder, workloads, range(1) if quick else range(8), range(1) if quick else range(5))
    known, unknown, first = elastic["known"], elastic["unknown"], box[0]
    return {
        "faithful": faithful,
        "elastic": elastic,
        "box": box,
        "bars": {
            "las: each workload within 5 % of Tiresias as published": all(
                abs(row["ratio"] - 1) <= 0.05 for row in faithful["workloads"]
            ),
            "goodput: mean at most 0.93 × Pollux": known["ratio"] <= 0.93,
            "goodput: p99 at most that of Pollux": known["p99_s"] <= known["published_p99_s"],
            "goodput, remaining work unknown: at most 1.03 × Pollux": unknown["ratio"] <= 1.03,
            "box of 8: mean 2.0 × below FIFO": first["fifo_over_default"] >= 2.0,
            "box of 8: mean 1.4 × below LAS": first["las_over_default"] >= 1.4,
            "box of 8, noisy: mean 1.8 × below FIFO": first["fifo_over_noisy"] >= 1.8,
            "box of 8: p99 of a job's time over that under FIFO at most 3": first["slowdown_p99"] <= 3.0,
        },
    }


def pollux_folder(traces: Path) -> Path:
    """The artifact's folder, or the one above it."""
    inner = traces / "pollux_osdi21"
    return inner if inner.is_dir() else traces


def _published(folder: Path, policy: str) -> dict[str, dict[str, float]]:
    jcts: dict[str, dict[str, float]] = json.loads((folder / "results" / f"{policy}.json").read_text())["jcts"]
    return jcts


def _read(folder: Path, number: int, elastic: bool = False) -> list[JobArrival]:
    return pollux_workload(folder / "workloads" / f"workload-{number}.csv", elastic=elastic)


def _faithful(folder: Path, workloads: tuple[int, ...]) -> dict[str, Any]:
    published = _published(folder, "tiresias")
    told: list[dict[str, Any]] = []
    beside: list[dict[str, Any]] = []
    for number in workloads:
        arrivals = _read(folder, number)
        conditions = Conditions(devices_of(_CLUSTER), AS_TIRESIAS, at_events=False, remaining="unknown")
        outcome = simulate(arrivals, conditions)
        theirs = list(published[f"workload-{number}"].values())
        ours = [job.jct_s for job in outcome.jobs]
        told.append(
            {
                "workload": number,
                "mean_s": mean(ours),
                "published_s": mean(theirs),
                "ratio": mean(ours) / mean(theirs),
                "p99_ratio": percentile(ours, 99) / percentile(theirs, 99),
            }
        )
        for policy, remaining in (("fifo", "known"), ("las", "unknown"), ("srpt", "known"), ("default", "known")):
            conditions = Conditions(devices_of(_CLUSTER), Settings(policy=policy), at_events=False, remaining=remaining)
            report = report_of(simulate(arrivals, conditions))
            beside.append(
                {"workload": number, "policy": policy, "mean_s": report.mean_jct_s, "p99_s": report.p99_jct_s}
            )
    return {"workloads": told, "rigid": beside}


def _elastic(folder: Path, workloads: tuple[int, ...], quick: bool) -> dict[str, Any]:
    published = _published(folder, "pollux")
    variants = {"known": ("known", False), "unknown": ("unknown", False)}
    if not quick:
        variants |= {"known, events": ("known", True), "unknown, events": ("unknown", True)}
    result = {}
    for name, (remaining, at_events) in variants.items():
        rows_, ours, theirs = [], [], []
        for number in workloads:
            conditions = Conditions(
                devices_of(_CLUSTER), Settings(policy="goodput"), at_events=at_events, remaining=remaining
            )
            outcome = simulate(_read(folder, number, elastic=True), conditions)
            report = report_of(outcome)
            own = [job.jct_s for job in outcome.jobs]
            of_pollux = list(published[f"workload-{number}"].values())
            ours += own
            theirs += of_pollux
            rows_.append(
                {
                    "workload": number,
                    "mean_s": mean(own),
                    "published_s": mean(of_pollux),
                    "ratio": mean(own) / mean(of_pollux),
                    "p99_s": percentile(own, 99),
                    "published_p99_s": percentile(of_pollux, 99),
                    "restarts_per_job": report.restarts_per_job,
                    "utilisation": report.utilisation,
                    "worst_unfairness": report.worst_unfairness,
                }
            )
        result[name] = {
            "workloads": rows_,
            "mean_s": mean(ours),
            "published_s": mean(theirs),
            "ratio": mean(ours) / mean(theirs),
            "p99_s": percentile(ours, 99),
            "published_p99_s": percentile(theirs, 99),
        }
    return result


def _box(folder: Path, workloads: tuple[int, ...], offsets: range, seeds: range) -> list[dict[str, Any]]:
    told = []
    for offset in offsets:
        jobs = {n: capped(thinned(_read(folder, n), 8, offset), 8) for n in workloads}
        fifo = _runs(jobs, "fifo", "unknown")
        las = _runs(jobs, "las", "unknown")
        ours = _runs(jobs, "default", "known")
        noisy = [_runs(jobs, "default", "noisy", seed) for seed in seeds]
        slower = [s for n in workloads for s in slowdowns(ours[n].jobs, fifo[n].jobs)]
        told.append(
            {
                "offset": offset,
                "fifo_s": _mean(fifo),
                "fifo_told_s": _mean(_runs(jobs, "fifo", "known")),
                "las_s": _mean(las),
                "default_s": _mean(ours),
                "srpt_s": _mean(_runs(jobs, "srpt", "known")),
                "noisy_s": mean([_mean(run) for run in noisy]),
                "fifo_over_default": _mean(fifo) / _mean(ours),
                "las_over_default": _mean(las) / _mean(ours),
                "fifo_over_noisy": _mean(fifo) / mean([_mean(run) for run in noisy]),
                "slowdown_p99": percentile(slower, 99),
                "slowdown_worst": max(slower),
            }
        )
    return told


def _runs(
    jobs: dict[int, list[JobArrival]], policy: str, remaining: str, seed: int = 0
) -> dict[int, SimulationOutcome]:
    conditions = Conditions(devices_of(_BOX), Settings(policy=policy), remaining=remaining, seed=seed)
    return {number: simulate(arrivals, conditions) for number, arrivals in jobs.items()}


def _mean(runs: dict[int, SimulationOutcome]) -> float:
    return mean([job.jct_s for outcome in runs.values() for job in outcome.jobs])


def table(result: dict[str, Any]) -> str:
    """For people."""
    if "left_out" in result:
        return f"left out: {result['left_out']}"
    faithful = rows(
        ("workload", "las", "Tiresias as published", "ratio"),
        [
            (row["workload"], f"{row['mean_s']:.0f} s", f"{row['published_s']:.0f} s", f"{row['ratio']:.3f}")
            for row in result["faithful"]["workloads"]
        ],
    )
    elastic = rows(
        ("goodput", "workload", "mean", "Pollux", "ratio", "p99", "its p99", "restarts/job"),
        [
            (
                name,
                row.get("workload", "all"),
                f"{row['mean_s']:.0f} s",
                f"{row['published_s']:.0f} s",
                f"{row['ratio']:.3f}",
                f"{row['p99_s']:.0f} s",
                f"{row['published_p99_s']:.0f} s",
                f"{row['restarts_per_job']:.2f}" if "restarts_per_job" in row else "",
            )
            for name, case in result["elastic"].items()
            for row in (*case["workloads"], case)
        ],
    )
    box = rows(
        (
            "box of 8, offset",
            "fifo",
            "las",
            "default",
            "noisy",
            "fifo/default",
            "las/default",
            "fifo/noisy",
            "p99",
            "worst",
        ),
        [
            (
                row["offset"],
                *(f"{row[name]:.0f} s" for name in ("fifo_s", "las_s", "default_s", "noisy_s")),
                *(f"{row[name]:.2f}" for name in ("fifo_over_default", "las_over_default", "fifo_over_noisy")),
                *(f"{row[name]:.2f}" for name in ("slowdown_p99", "slowdown_worst")),
            )
            for row in result["box"]
        ],
    )
    return "\n\n".join((faithful, elastic, box))
