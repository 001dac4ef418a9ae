"""``evenload simulate``: simulate a workload, recorded or written by hand, under other policies or devices."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenload.errors import ConfigError

if TYPE_CHECKING:
    from evenload.scheduler.core.values import Device, Limits, Reservation
    from evenload.scheduler.simulator.cluster import KindFacts
    from evenload.scheduler.simulator.outcome import SimulationOutcome
    from evenload.scheduler.simulator.recorded import QueueRecord


def simulate(
    workload: Annotated[
        Path | None,
        typer.Argument(
            metavar="[WORKLOAD]",
            help="A queue's folder or log (.jsonl), or a CSV of jobs; this machine's queue where not given.",
        ),
    ] = None,
    cluster: Annotated[
        list[str] | None,
        typer.Option(
            "--cluster",
            "-c",
            help="HOSTSxDEVICES[:KIND][,...], such as 16x4; own, own+1; again for one more to compare.",
        ),
    ] = None,
    policy: Annotated[list[str] | None, typer.Option("--policy", "-p", help="A policy; again for one more.")] = None,
    remaining: Annotated[
        str,
        typer.Option(
            help="What the queue knows of remaining work: known, unknown, noisy[:SIGMA], or history (of similar jobs)."
        ),
    ] = "known",
    tables: Annotated[
        Path | None, typer.Option(help="Pollux' workloads: the folder of the applications' tables.")
    ] = None,
    speeds: Annotated[Path | None, typer.Option(help="Steps a second by kind and job type, as Gavel's JSON.")] = None,
    every: Annotated[int, typer.Option(help="Take each N-th job only.")] = 1,
    cap: Annotated[bool, typer.Option("--cap", help="Jobs that need more devices than there are take all.")] = False,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME:speed=1,price=0,cheap=0,watts=0,memory=0: a kind's speed, price an hour, in cheap hours, power, GiB."
        ),
    ] = None,
    equal_kinds: Annotated[
        bool, typer.Option("--equal-kinds", help="The queue takes all kinds to be equally fast, to compare.")
    ] = False,
    limit: Annotated[
        list[str] | None,
        typer.Option(help="USER:devices=N,jobs=N,share=1: what a user may have; some of these."),
    ] = None,
    reserve: Annotated[
        list[str] | None,
        typer.Option(help="devices=ID|ID,from=S,until=S,users=A|B: kept for these; without users, for no job."),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE of a setting of the queue, such as min_run_s=60.")
    ] = None,
    deadline: Annotated[
        float | None,
        typer.Option(help="Deadline of jobs without one: so many times their time alone on the fastest devices."),
    ] = None,
    start_hour: Annotated[
        float, typer.Option(help="Of a table: hour of the day at its time 0, for cheap_hours.")
    ] = 0.0,
    interval: Annotated[float, typer.Option(help="Seconds between decisions at the latest.")] = 60.0,
    ticks_only: Annotated[
        bool, typer.Option("--ticks-only", help="Decide at these intervals only, not when jobs come and go.")
    ] = False,
    save: Annotated[float, typer.Option(help="Seconds that a job needs to save and stop.")] = 0.0,
    resize: Annotated[
        float | None,
        typer.Option(help="Seconds that an elastic job loses by a resize in place. Default: a restart."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the noise.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    jobs: Annotated[bool, typer.Option("--jobs", help="With --json: each job's times too.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture to this SVG file.")] = None,
    export: Annotated[
        Path | None, typer.Option(help="Of a queue: write its jobs as a CSV, to change and simulate.")
    ] = None,
) -> None:
    """Simulate a queue: mean, median and p99 completion time, use, restarts, fairness, cost."""
    from evenload.scheduler.queue_settings import settings_from
    from evenload.scheduler.simulator.arrivals import capped, thinned
    from evenload.scheduler.simulator.cluster import devices_of
    from evenload.scheduler.simulator.report import report_of, table
    from evenload.scheduler.simulator.simulate import Conditions
    from evenload.scheduler.simulator.simulate import simulate as run
    from evenload.scheduler.simulator.workloads import arrivals_of, read_workload

    if jobs and not json:
        raise ConfigError("--jobs without --json has no effect: add --json")
    if plot is not None and plot.suffix != ".svg":
        raise ConfigError(f"--plot {plot}: the picture is an SVG; name the file so (.svg)")
    path = _queue_folder() if workload is None else workload
    record = _record(path)
    if record is not None and (tables is not None or speeds is not None):
        raise ConfigError(f"--tables and --speeds have no effect on a queue's record, {path}: leave them out")
    if equal_kinds and record is None and not any(":" in text and "speed=" in text for text in kind or []):
        raise ConfigError("--equal-kinds has no effect without --kind NAME:speed=…: all kinds are equally fast")
    if start_hour and record is not None:
        raise ConfigError("--start-hour has no effect on a queue's record, which has its own times: leave it out")
    if export is not None:
        _export(record, export)
    base = None if record is None else record.settings
    clusters = cluster or ["16x4" if record is None else "own"]
    policies = policy or ["default" if base is None else base.policy]
    overrides = _settings(set_ or [])
    knows, sigma = _remaining(remaining)
    facts = dict(_kind(text) for text in kind or [])
    limits = {**(record.limits if record is not None else {}), **dict(_limit(text) for text in limit or [])}
    outcomes, reports = [], []
    for text in clusters:
        devices = devices_of(text, facts, () if record is None else record.devices)
        if record is not None:
            arrivals = arrivals_of(record.rows, path)
        else:
            arrivals = read_workload(path, tables=tables, speeds=speeds)
        arrivals = thinned(arrivals, every)
        if cap:
            arrivals = capped(arrivals, len(devices))
        for name in policies:
            conditions = Conditions(
                devices=devices,
                settings=settings_from({**overrides, "policy": name}, base),
                interval_s=interval,
                at_events=not ticks_only,
                save_s=save,
                resize_s=resize,
                remaining=knows,
                noise=sigma,
                seed=seed,
                limits=limits,
                reservations=_reservations(record, reserve or [], devices),
                equal_kinds=equal_kinds,
                deadline_times=deadline,
                midnight_s=-3600.0 * start_hour if record is None else record.midnight_s,
            )
            outcome = run(arrivals, conditions)
            outcomes.append((name if len(clusters) == 1 else f"{name} {text}", outcome))
            reports.append(report_of(outcome, text))
    if plot is not None:
        _plot(plot, outcomes)
    if json:
        from dataclasses import asdict
        from json import dumps

        rows = [asdict(report) for report in reports]
        if jobs:
            for row, (_, outcome) in zip(rows, outcomes, strict=True):
                row["jobs"] = [asdict(job) | {"jct_s": job.jct_s} for job in outcome.jobs]
        print(dumps(rows, indent=1))
    else:
        left_out = f", {record.num_left_out} that never ran or go on left out" if record and record.num_left_out else ""
        print(f"{len(arrivals)} jobs, remaining work {remaining}{left_out}")
        print(table(reports))
    if plot is not None:
        print(f"picture: {plot}", file=sys.stderr)


def _queue_folder() -> Path:
    from evenload.scheduler.paths import default_folder

    folder = default_folder()
    if not folder.is_dir():
        raise ConfigError(f"no WORKLOAD was named, and there is no queue in {folder}: name a queue's folder or a file")
    return folder


def _record(path: Path) -> QueueRecord | None:
    """Return what a queue recorded if the path is one of a queue."""
    from evenload.scheduler.simulator.recorded import read_log, record_of

    if path.is_dir():
        from evenload.scheduler.store.ledger import AttemptEntry
        from evenload.scheduler.store.reader import Reader

        with Reader(path) as reader:
            return record_of(row.entry for row in reader.log() if not isinstance(row.entry, AttemptEntry))
    return read_log(path) if path.suffix == ".jsonl" else None


def _export(record: QueueRecord | None, path: Path) -> None:
    from evenload.scheduler.simulator.recorded import write_table

    if record is None:
        raise ConfigError("--export has no effect on a table of jobs: it writes a queue's record as one")
    try:
        write_table(record.rows, path)
    except OSError as error:
        raise ConfigError(f"--export {path}: can't be written ({error.strerror})") from error


def _settings(texts: list[str]) -> dict[str, str]:
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
    name, colon, sigma = text.partition(":")
    try:
        if colon and name != "noisy":
            raise ValueError
        return name, float(sigma) if colon else 1.0
    except ValueError:
        raise ConfigError(f"--remaining {text}: expected known, unknown, history, noisy, or noisy:SIGMA") from None


def _facts(text: str, known: set[str]) -> dict[str, str]:
    """Parse ``a=1,b=2`` with some of the known names, each once."""
    facts = dict(part.split("=", 1) for part in text.split(","))
    if not facts.keys() <= known or len(facts) != text.count(",") + 1:
        raise ValueError(text)
    return facts


def _kind(text: str) -> tuple[str, KindFacts]:
    from evenload.scheduler.simulator.cluster import KindFacts

    name, _, rest = text.partition(":")
    try:
        facts = _facts(rest, {"speed", "price", "cheap", "watts", "memory"})
        values = {name: float(value) for name, value in facts.items()}
        memory_gib = values.get("memory")
        return name, KindFacts(
            speed=values.get("speed"),
            price_per_hour=values.get("price"),
            cheap_price_per_hour=values.get("cheap"),
            power_w=values.get("watts"),
            memory_bytes=None if memory_gib is None else int(memory_gib * 2**30),
        )
    except ValueError:
        raise ConfigError(
            f"--kind {text}: expected NAME:speed=1,price=0,cheap=0,watts=0,memory=0 (some of these, numbers)"
        ) from None


def _limit(text: str) -> tuple[str, Limits]:
    from evenload.scheduler.core.values import Limits

    user, _, rest = text.partition(":")
    try:
        facts = _facts(rest, {"devices", "jobs", "share"})
        return user, Limits(
            max_devices=int(facts["devices"]) if "devices" in facts else None,
            max_running=int(facts["jobs"]) if "jobs" in facts else None,
            share=float(facts.get("share", 1)),
        )
    except ValueError:
        raise ConfigError(f"--limit {text}: expected USER:devices=N,jobs=N,share=1 (some of these, numbers)") from None


def _reservations(record: QueueRecord | None, texts: list[str], devices: tuple[Device, ...]) -> tuple[Reservation, ...]:
    from dataclasses import replace

    here = {device.id for device in devices}
    kept = (
        []
        if record is None
        else [replace(r, devices=r.devices & here) for r in record.reservations if r.devices & here]
    )
    return (*kept, *(_reservation(text, number, here) for number, text in enumerate(texts, start=1)))


def _reservation(text: str, number: int, here: set[str]) -> Reservation:
    from evenload.scheduler.core.values import Reservation

    try:
        facts = _facts(text, {"devices", "from", "until", "users"})
        wanted, start_s, end_s = frozenset(facts["devices"].split("|")), float(facts["from"]), float(facts["until"])
    except (KeyError, ValueError):
        raise ConfigError(f"--reserve {text}: expected devices=ID|ID,from=S,until=S[,users=A|B]") from None
    if strange := wanted - here:
        raise ConfigError(
            f"--reserve {text}: there is no device {', '.join(sorted(strange))}; there are {', '.join(sorted(here)[:8])}, …"
        )
    users = frozenset(facts["users"].split("|")) if "users" in facts else frozenset()
    return Reservation(f"option {number}", wanted, start_s, end_s, users)


def _plot(path: Path, outcomes: list[tuple[str, SimulationOutcome]]) -> None:
    from evenload.views.queue.simulation_chart import simulation_chart

    try:
        path.write_text(simulation_chart(outcomes))
    except OSError as error:
        raise ConfigError(f"--plot {path}: can't be written ({error.strerror})") from error
