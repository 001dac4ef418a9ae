"""``evenload simulate``: what a queue would do with a workload, recorded or written by hand, under other policies or devices."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from evenload.scheduler.simulator.cluster import KindFacts
    from evenload.scheduler.simulator.outcome import Outcome


def simulate(
    workload: Annotated[Path, typer.Argument(metavar="WORKLOAD", help="A CSV of jobs; see docs/simulator.md.")],
    cluster: Annotated[
        list[str] | None,
        typer.Option(
            "--cluster", "-c", help="HOSTSxDEVICES[:KIND][,...], such as 16x4; again for one more to compare."
        ),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", "-p", help="A policy; again for one more to compare.")
    ] = None,
    remaining: Annotated[
        str,
        typer.Option("--remaining", help="What the queue knows of remaining work: known, unknown, or noisy[:SIGMA]."),
    ] = "known",
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Pollux' workloads: any number of devices, batch tuned for goodput.")
    ] = False,
    tables: Annotated[
        Path | None, typer.Option("--tables", help="Pollux' workloads: the folder of the applications' tables.")
    ] = None,
    speeds: Annotated[
        Path | None, typer.Option("--speeds", help="Steps a second by kind and job type, as Gavel's JSON.")
    ] = None,
    every: Annotated[int, typer.Option("--every", help="Take each N-th job only.")] = 1,
    cap: Annotated[bool, typer.Option("--cap", help="Jobs that ask for more devices than there are take all.")] = False,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kind", help="NAME:speed=1,price=0,watts=0,memory=0: a kind's speed, price an hour, power, GiB."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE of a setting of the queue, such as min_run_s=60.")
    ] = None,
    interval: Annotated[float, typer.Option("--interval", help="Seconds between decisions at the latest.")] = 60.0,
    ticks_only: Annotated[
        bool, typer.Option("--ticks-only", help="Decide at these intervals only, not when jobs come and go.")
    ] = False,
    save: Annotated[float, typer.Option("--save", help="Seconds that a job needs to save and stop.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the noise.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    jobs: Annotated[bool, typer.Option("--jobs", help="With --json: each job's times too.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a picture to this SVG file.")] = None,
) -> None:
    """Simulate a queue: mean, median and p99 completion time, use, restarts, fairness, cost."""
    from evenload.errors import ConfigError
    from evenload.scheduler.core.values import settings_from
    from evenload.scheduler.simulator.cluster import devices_of
    from evenload.scheduler.simulator.report import as_row, report_of, table
    from evenload.scheduler.simulator.simulate import Conditions
    from evenload.scheduler.simulator.simulate import simulate as run
    from evenload.scheduler.simulator.workloads import capped, read_workload, thinned

    if jobs and not json:
        raise ConfigError("--jobs without --json has no effect: add --json")
    clusters, policies = cluster or ["16x4"], policy or ["default"]
    overrides = _settings(set_ or [])
    knows, sigma = _remaining(remaining)
    facts = dict(_kind(text) for text in kind or [])
    outcomes, reports = [], []
    for text in clusters:
        devices = devices_of(text, facts)
        hosts = [device.host for device in devices]
        arrivals = thinned(
            read_workload(
                workload, elastic=elastic, host_size=max(map(hosts.count, set(hosts))), tables=tables, speeds=speeds
            ),
            every,
        )
        if cap:
            arrivals = capped(arrivals, len(devices))
        for name in policies:
            conditions = Conditions(
                devices=devices,
                settings=settings_from({**overrides, "policy": name}),
                interval_s=interval,
                at_events=not ticks_only,
                save_s=save,
                remaining=knows,
                noise=sigma,
                seed=seed,
            )
            outcome = run(arrivals, conditions)
            outcomes.append((name if len(clusters) == 1 else f"{name} {text}", outcome))
            reports.append(report_of(outcome, text))
    if plot is not None:
        _plot(plot, outcomes)
    if json:
        from dataclasses import asdict
        from json import dumps

        rows = [as_row(report) for report in reports]
        if jobs:
            for row, (_, outcome) in zip(rows, outcomes, strict=True):
                row["jobs"] = [asdict(job) | {"jct_s": job.jct_s} for job in outcome.jobs]
        print(dumps(rows, indent=1))
    else:
        print(f"{len(arrivals)} jobs, remaining work {remaining}")
        print(table(reports))
    if plot is not None:
        print(f"picture: {plot}", file=sys.stderr)


def _settings(texts: list[str]) -> dict[str, str]:
    from evenload.errors import ConfigError

    settings = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name in settings:
            raise ConfigError(f"--set {text}: expected NAME=VALUE, each name once")
        if name == "policy":
            raise ConfigError(f"--set {text}: use --policy {value}")
        settings[name] = value
    return settings


def _remaining(text: str) -> tuple[str, float]:
    from evenload.errors import ConfigError

    name, colon, sigma = text.partition(":")
    try:
        if colon and name != "noisy":
            raise ValueError
        return name, float(sigma) if colon else 1.0
    except ValueError:
        raise ConfigError(f"--remaining {text}: expected known, unknown, noisy, or noisy:SIGMA") from None


def _kind(text: str) -> tuple[str, KindFacts]:
    from evenload.errors import ConfigError
    from evenload.scheduler.simulator.cluster import KindFacts

    name, colon, rest = text.partition(":")
    try:
        facts = dict(part.split("=", 1) for part in rest.split(","))
        if not colon or not facts.keys() <= {"speed", "price", "watts", "memory"}:
            raise ValueError
        return name, KindFacts(
            speed=float(facts.get("speed", 1)),
            price_per_hour=float(facts.get("price", 0)),
            power_w=float(facts.get("watts", 0)),
            memory_bytes=int(float(facts.get("memory", 0)) * 2**30),
        )
    except ValueError:
        raise ConfigError(
            f"--kind {text}: expected NAME:speed=1,price=0,watts=0,memory=0 (some of these, numbers)"
        ) from None


def _plot(path: Path, outcomes: list[tuple[str, Outcome]]) -> None:
    from evenload.errors import ConfigError
    from evenload.scheduler.simulator.plot import svg

    if path.suffix != ".svg":
        raise ConfigError(f"--plot {path}: the picture is an SVG; name the file so (.svg)")
    try:
        path.write_text(svg(outcomes))
    except OSError as error:
        raise ConfigError(f"--plot {path}: can't be written ({error.strerror})") from error
