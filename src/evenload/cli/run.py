"""``evenload run``: train a script on the devices of this machine, or of several."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from evenload.cli.nodes import NodeOptions, read_rendezvous_config
from evenload.cli.settings import CONTEXT_SETTINGS as CONTEXT_SETTINGS
from evenload.cli.settings import (
    LAUNCH_KEYS,
    ConfigFile,
    Module,
    NprocPerNode,
    Port,
    Script,
    ScriptCommand,
    merge,
    takes_settings,
)
from evenload.config import Config
from evenload.records.folder_lock import check_free
from evenload.records.loggers.catalogue import check_loggers
from evenload.rendezvous.settings import RendezvousConfig

COMMAND_CLASS = ScriptCommand


@takes_settings("run")
def run(
    arguments: Script = None,
    module: Module = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "-d",
            "--devices",
            metavar="DEVICES",
            help="auto (all GPUs, else the CPU), all, GPU indices such as 0,2, cpu, cpu:3 (three CPU ranks), a mix, or 0+1 "
            "(one rank with two GPUs).",
        ),
    ] = None,
    config: ConfigFile = None,
    throttle: Annotated[
        str | None,
        typer.Option(metavar="SPEEDS", help="Slow the ranks to these relative speeds, such as 1,0.5, for tests."),
    ] = None,
    port: Port = None,
    nproc_per_node: NprocPerNode = None,
    nodes: Annotated[
        str | None, typer.Option(metavar="N|MIN:MAX", help="Number of machines; start the same command on each.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(metavar="HOST[:PORT]", help="Machine of the rendezvous, as the other machines reach it."),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option("--node-rank", "--node_rank", metavar="N", help="Index of this machine; assigned if not given."),
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Time to wait for other machines (60), or to reach the rendezvous (10)."),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            "--max-restarts",
            "--max_restarts",
            metavar="N",
            help="Restarts of a lost rank on each device of this machine, or of all ranks (3); joins and leaves don't count.",
        ),
    ] = None,
    nnodes: Annotated[str | None, typer.Option("--nnodes", hidden=True)] = None,
    rdzv_endpoint: Annotated[str | None, typer.Option("--rdzv-endpoint", "--rdzv_endpoint", hidden=True)] = None,
    rdzv_backend: Annotated[str | None, typer.Option("--rdzv-backend", "--rdzv_backend", hidden=True)] = None,
    rdzv_id: Annotated[str | None, typer.Option("--rdzv-id", "--rdzv_id", hidden=True)] = None,
    master_addr: Annotated[str | None, typer.Option("--master-addr", "--master_addr", hidden=True)] = None,
    master_port: Annotated[int | None, typer.Option("--master-port", "--master_port", hidden=True)] = None,
    standalone: Annotated[bool, typer.Option("--standalone", hidden=True)] = False,
    **settings: Any,
) -> None:
    """Train a script on all devices of this machine, or on the devices you name.

    Options of evenload come before the script; everything after the script is passed to it.
    """
    launch = {"devices": devices, "throttle": throttle, "port": port}
    values, sources = merge(launch, settings, config, nproc_per_node)
    target = ("-m", module, *(arguments or ())) if module is not None else tuple(arguments or ())
    nodes_given = NodeOptions(
        nodes=nodes,
        host=host,
        node_rank=node_rank,
        wait_s=wait,
        nnodes=nnodes,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_backend=rdzv_backend,
        rdzv_id=rdzv_id,
        master_addr=master_addr,
        master_port=master_port,
        max_restarts=max_restarts,
        standalone=standalone,
    )
    rendezvous = read_rendezvous_config(
        nodes_given, values.get("port"), target, _common_options(values, sources, config)
    )
    raise typer.Exit(_launch(target, values, sources, rendezvous, max_restarts))


def _common_options(values: Mapping[str, Any], sources: Mapping[str, str], config: Path | None) -> list[str]:
    """Return the options that must be the same on all machines, as typed."""
    typed = [sources[key] for key in values if key not in LAUNCH_KEYS and sources[key].startswith("-")]
    words = [word for text in typed for word in text.split(" ", 1)]
    return words if config is None else ["-c", str(config), *words]


def _launch(
    target: tuple[str, ...],
    values: Mapping[str, Any],
    sources: Mapping[str, str],
    rendezvous: RendezvousConfig | None,
    max_restarts: int | None,
) -> int:
    from evenload.job.output import drop_what_is_not_taken
    from evenload.training.launch.devices import describe_workers
    from evenload.training.launch.queue_devices import default_devices
    from evenload.training.launch.request import MAX_RESTARTS, LaunchRequest, plan
    from evenload.training.launch.supervisor import launch
    from evenload.training.launch.throttle import parse_throttle
    from evenload.views.run.progress import RunProgress

    drop_what_is_not_taken()
    settings = {key: value for key, value in values.items() if key not in LAUNCH_KEYS}
    options = settings.get("logger_options", {})
    check_loggers(settings.get("loggers", tuple(options)), options)  # the script may name the loggers
    request = LaunchRequest(
        arguments=target,
        devices=values["devices"] if "devices" in values else default_devices(),
        settings=settings,
        throttle=parse_throttle(values["throttle"]) if "throttle" in values else (),
        port=values.get("port", 0) if rendezvous is None else 0,
        rendezvous=rendezvous,
        max_restarts=MAX_RESTARTS if max_restarts is None else max_restarts,
    )
    workers = plan(request)
    if "project_dir" in settings and rendezvous is None and not settings.get("dry_run"):
        check_free(Path(settings["project_dir"]))
    if rendezvous is None:  # otherwise printed after the rendezvous
        for line in describe_workers(workers):
            print(f"evenload: {line}", flush=True)
    if settings.get("dry_run"):
        for key, value in settings.items():
            print(f"evenload: {key} = {value!r} ({sources[key]})", flush=True)
        return launch(request, exits_afterwards=True)
    view = RunProgress(
        None,
        sys.stdout,
        log_every_s=settings.get("log_every_s", Config.log_every_s),
        devices=workers[0].device_names if rendezvous is None else (),
    )
    return launch(replace(request, view=view), exits_afterwards=True)
