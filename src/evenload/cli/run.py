"""``evenload run``: train a script on the devices of this machine, or of several."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from evenload.cli.nodes import Spelled, read_terms
from evenload.cli.script import CONTEXT_SETTINGS as CONTEXT_SETTINGS
from evenload.cli.script import ScriptCommand
from evenload.cli.settings import LAUNCH_KEYS, devices_of, merge
from evenload.config import (
    Config,
    parse_balance,
    parse_check_every,
    parse_logger_options,
    parse_loggers,
    parse_micro_batch,
)
from evenload.errors import ConfigError
from evenload.records.loggers.catalogue import check_loggers
from evenload.rendezvous.settings import Terms

COMMAND_CLASS = ScriptCommand


def run(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its own arguments.")
    ] = None,
    module: Annotated[str | None, typer.Option("-m", metavar="MODULE", help="Run a module, as python -m does.")] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "-d", "--devices", help="auto (every GPU, else the CPU), all, 0,2, cpu, cpu:3, a mix, or 0+1 (one rank)."
        ),
    ] = None,
    balance: Annotated[str | None, typer.Option(help="auto, even, or one share for each rank: 24,6,2.")] = None,
    micro_batch: Annotated[str | None, typer.Option(help="auto, or most samples a rank computes at once.")] = None,
    batch_max: Annotated[
        int | None, typer.Option(metavar="SAMPLES", help="The global batch may grow up to this, for goodput.")
    ] = None,
    batch_lr: Annotated[
        str | None, typer.Option(help="How the learning rate follows it: auto, adascale, sqrt or none.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="no, bf16 or fp16.")] = None,
    strategy: Annotated[
        str | None, typer.Option(help="How the model is spread: ddp (a process a device), or dp (one process).")
    ] = None,
    num_workers: Annotated[
        str | None, typer.Option(help="Loader workers: auto (by measurement), or loader (as each DataLoader says).")
    ] = None,
    check_every: Annotated[
        str | None, typer.Option(metavar="STEPS", help="Between two comparisons of all ranks' parameters, or off.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the order of samples and all keyed randomness.")] = None,
    project_dir: Annotated[str | None, typer.Option(help="The run folder.")] = None,
    loggers: Annotated[
        str | None, typer.Option(help="Other places for metrics: tensorboard, wandb, mlflow, several with commas.")
    ] = None,
    logger_option: Annotated[
        list[str] | None,
        typer.Option(metavar="LOGGER.OPTION=VALUE", help="Such as wandb.project=gpt; may be repeated."),
    ] = None,
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
    nodes: Annotated[
        str | None, typer.Option(metavar="N or MIN:MAX", help="How many machines; type the same command on each.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(metavar="HOST[:PORT]", help="Where they meet: one of them, by the name or address others know."),
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option("--node-rank", "--node_rank", help="Of this machine; without it they are numbered.")
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="For the other machines; 60 at the meeting point, 10 to reach it."),
    ] = None,
    nnodes: Annotated[str | None, typer.Option("--nnodes", hidden=True)] = None,
    rdzv_endpoint: Annotated[str | None, typer.Option("--rdzv-endpoint", "--rdzv_endpoint", hidden=True)] = None,
    rdzv_backend: Annotated[str | None, typer.Option("--rdzv-backend", "--rdzv_backend", hidden=True)] = None,
    rdzv_id: Annotated[str | None, typer.Option("--rdzv-id", "--rdzv_id", hidden=True)] = None,
    master_addr: Annotated[str | None, typer.Option("--master-addr", "--master_addr", hidden=True)] = None,
    master_port: Annotated[int | None, typer.Option("--master-port", "--master_port", hidden=True)] = None,
    max_restarts: Annotated[int | None, typer.Option("--max-restarts", "--max_restarts", hidden=True)] = None,
    standalone: Annotated[bool, typer.Option("--standalone", hidden=True)] = False,
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
        "batch_max": batch_max,
        "batch_lr": batch_lr,
        "precision": precision,
        "strategy": strategy,
        "num_workers": num_workers,
        "check_every": parse_check_every(check_every) if check_every is not None else None,
        "seed": seed,
        "project_dir": project_dir,
        "loggers": parse_loggers(loggers) if loggers is not None else None,
        "logger_options": parse_logger_options(logger_option) if logger_option else None,
        "log_every_s": log_every,
        "fresh": fresh or None,
        "dry_run": dry_run or None,
    }
    values, sources = merge(given, config)
    if nproc_per_node is not None:
        if "devices" in values:
            raise ConfigError(
                f"--nproc-per-node {nproc_per_node} and {sources['devices']} both say which ranks to start"
            )
        if values.get("strategy") == "dp" and nproc_per_node != "1":
            raise ConfigError(
                f"--nproc-per-node {nproc_per_node} asks for several processes, {sources['strategy']} is one that owns all its "
                "devices; name them by -d, such as -d cpu:2"
            )
        values["devices"] = devices_of(nproc_per_node)
    target = ("-m", module, *(arguments or ())) if module is not None else tuple(arguments or ())
    spelled = Spelled(
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
    terms = read_terms(spelled, values.get("port"), target, _common_options(values, sources, config))
    raise typer.Exit(_launch(target, values, sources, terms))


def _common_options(values: Mapping[str, Any], sources: Mapping[str, str], config: Path | None) -> list[str]:
    """The options that must be the same on all machines, as they were typed."""
    typed = [sources[key] for key in values if key not in LAUNCH_KEYS and sources[key].startswith("-")]
    words = [word for text in typed for word in text.split(" ", 1)]
    return words if config is None else ["-c", str(config), *words]


def _launch(target: tuple[str, ...], values: Mapping[str, Any], sources: Mapping[str, str], terms: Terms | None) -> int:
    from evenload.training.launch.devices import describe_workers
    from evenload.training.launch.supervisor import LaunchRequest, launch, plan
    from evenload.training.launch.throttle import parse_throttle
    from evenload.views.run.progress import Progress

    settings = {key: value for key, value in values.items() if key not in LAUNCH_KEYS}
    options = settings.get("logger_options", {})
    check_loggers(settings.get("loggers", tuple(options)), options)  # the script may name the loggers
    request = LaunchRequest(
        arguments=target,
        devices=values.get("devices", "auto"),
        settings=settings,
        throttle=parse_throttle(values["throttle"]) if "throttle" in values else (),
        port=values.get("port", 0) if terms is None else 0,
        terms=terms,
    )
    workers = plan(request)
    if terms is None:  # else said once all machines are there
        for line in describe_workers(workers):
            print(f"evenload: {line}", flush=True)
    if settings.get("dry_run"):
        for key, value in settings.items():
            print(f"evenload: {key} = {value!r} ({sources[key]})", flush=True)
        return launch(request, leaves=True)
    view = Progress(
        None,
        sys.stdout,
        log_every_s=settings.get("log_every_s", Config.log_every_s),
        devices=workers[0].device_names if terms is None else (),
    )
    return launch(replace(request, view=view), leaves=True)
