"""``evenload run``: train a script on the devices of this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from evenload.cli.script import CONTEXT_SETTINGS as CONTEXT_SETTINGS
from evenload.cli.script import ScriptCommand
from evenload.cli.settings import LAUNCH_KEYS, devices_of, merge
from evenload.config import Config, parse_balance, parse_micro_batch
from evenload.errors import ConfigError

COMMAND_CLASS = ScriptCommand


def run(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its own arguments.")
    ] = None,
    module: Annotated[str | None, typer.Option("-m", metavar="MODULE", help="Run a module, as python -m does.")] = None,
    devices: Annotated[
        str | None,
        typer.Option("-d", "--devices", help="auto (every GPU, else the CPU), all, 0,2, cpu, cpu:3, or a mix."),
    ] = None,
    balance: Annotated[str | None, typer.Option(help="auto, even, or one share for each rank: 24,6,2.")] = None,
    micro_batch: Annotated[str | None, typer.Option(help="auto, or most samples a rank computes at once.")] = None,
    precision: Annotated[str | None, typer.Option(help="no, bf16 or fp16.")] = None,
    strategy: Annotated[str | None, typer.Option(help="How the model is spread: ddp.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the order of samples and all keyed randomness.")] = None,
    project_dir: Annotated[str | None, typer.Option(help="The run folder.")] = None,
    log_every: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Between two progress lines where there is no terminal.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew: no resume from the run folder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what is decided, and why; train nothing.")] = False,
    config: Annotated[
        Path | None, typer.Option("-c", "--config", metavar="FILE", help="A TOML file of settings, by the same keys.")
    ] = None,
    throttle: Annotated[
        str | None, typer.Option(help="Relative speeds of the ranks, to try unequal devices: 1,0.5.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Of the ranks' meeting point; 0: a free one.")
    ] = None,
    nproc_per_node: Annotated[
        str | None, typer.Option("--nproc-per-node", "--nproc_per_node", help="As torchrun spells it: so many ranks.")
    ] = None,
    nnodes: Annotated[str | None, typer.Option("--nnodes", hidden=True)] = None,
    rdzv_endpoint: Annotated[str | None, typer.Option("--rdzv-endpoint", "--rdzv_endpoint", hidden=True)] = None,
    max_restarts: Annotated[int | None, typer.Option("--max-restarts", "--max_restarts", hidden=True)] = None,
) -> None:
    """Train a script on every device here, or on those you name.

    Options of evenload come before the script; what follows the script is the script's own.
    """
    given: dict[str, Any] = {
        "devices": devices,
        "throttle": throttle,
        "port": port,
        "balance": parse_balance(balance) if balance is not None else None,
        "micro_batch": parse_micro_batch(micro_batch) if micro_batch is not None else None,
        "precision": precision,
        "strategy": strategy,
        "seed": seed,
        "project_dir": project_dir,
        "log_every_s": log_every,
        "fresh": fresh or None,
        "dry_run": dry_run or None,
    }
    _check_machines(nnodes, rdzv_endpoint, max_restarts)
    values, sources = merge(given, config)
    if nproc_per_node is not None:
        if "devices" in values:
            raise ConfigError(
                f"--nproc-per-node {nproc_per_node} and {sources['devices']} both say which ranks to start"
            )
        values["devices"] = devices_of(nproc_per_node)
    target = ("-m", module, *(arguments or ())) if module is not None else tuple(arguments or ())
    raise typer.Exit(_launch(target, values, sources))


def _launch(target: tuple[str, ...], values: Mapping[str, Any], sources: Mapping[str, str]) -> int:
    from evenload.training.launch.devices import describe_workers
    from evenload.training.launch.supervisor import LaunchRequest, launch, plan
    from evenload.training.launch.throttle import parse_throttle
    from evenload.views.progress import Progress

    settings = {key: value for key, value in values.items() if key not in LAUNCH_KEYS}
    request = LaunchRequest(
        arguments=target,
        devices=values.get("devices", "auto"),
        settings=settings,
        throttle=parse_throttle(values["throttle"]) if "throttle" in values else (),
        port=values.get("port", 0),
    )
    workers = plan(request)
    for line in describe_workers(workers):
        print(f"evenload: {line}", flush=True)
    if settings.get("dry_run"):
        for key, value in settings.items():
            print(f"evenload: {key} = {value!r} ({sources[key]})", flush=True)
        return launch(request)
    view = Progress(
        None,
        sys.stdout,
        log_every_s=settings.get("log_every_s", Config.log_every_s),
        devices=workers[0].device_names,
    )
    return launch(replace(request, view=view))


def _check_machines(nnodes: str | None, rdzv_endpoint: str | None, max_restarts: int | None) -> None:
    """Accepts torchrun's spellings where they change nothing; refuses what isn't there yet."""
    if nnodes not in (None, "1", "1:1"):
        raise ConfigError(f"--nnodes {nnodes}: several machines are not there yet; leave it out, or give 1")
    if rdzv_endpoint is not None:
        raise ConfigError(
            f"--rdzv-endpoint {rdzv_endpoint}: several machines are not there yet; one machine needs no endpoint "
            f"(--port N fixes the port)"
        )
    if max_restarts not in (None, 0):
        raise ConfigError(
            f"--max-restarts {max_restarts}: ranks are not started again yet; leave it out, and start the same command "
            f"again to resume from the newest checkpoint"
        )
