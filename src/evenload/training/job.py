"""Opens a job on this rank: the spec and the settings become groups, an engine, records. Wiring without behaviour."""

from __future__ import annotations

import os
import shutil
import sys
import time
import zlib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from evenload.config import Config, as_table, resolve
from evenload.errors import ConfigError
from evenload.records.recorder import Recorder
from evenload.training import randomness
from evenload.training.batchnorm import Statistics
from evenload.training.checkpoint.registry import Registry
from evenload.training.engine import Engine
from evenload.training.journal import Journal
from evenload.training.launch import worker
from evenload.training.launch.clock import StepClock
from evenload.training.launch.control import Control, Operation
from evenload.training.launch.environment import WorkerSpec, detect
from evenload.training.launch.groups import Groups, Membership
from evenload.training.launch.supervisor import RUN_FOLDER_FILE
from evenload.training.launch.throttle import Burner
from evenload.training.parallel.ddp import ReplicaStrategy
from evenload.training.precision import Precision
from evenload.training.step import StepLoop


@dataclass(frozen=True)
class Job:
    """One job on one rank: the parts that `Run` speaks to."""

    spec: WorkerSpec
    config: Config
    folder: Path
    device: torch.device
    groups: Groups
    control: Control
    clock: StepClock
    recorder: Recorder
    journal: Journal
    engine: Engine
    loop: StepLoop
    registry: Registry


def open_job(script: dict[str, Any]) -> Job:
    """Joins the job that this process was started for.

    Args:
        script: what the script gave to `evenload.init`.

    Raises:
        ConfigError: settings are wrong or contradict each other.
        LaunchError: the other ranks don't come.
    """
    spec = _spec()
    config = resolve(script, spec.settings)
    _check_balance(config, spec.world_size)
    if "project_dir" not in config.sources:
        config = replace(config, project_dir=f"runs/{Path(sys.argv[0]).stem or 'interactive'}")
    device = _device(spec)
    if spec.num_threads:
        torch.set_num_threads(spec.num_threads)
    groups = Groups(
        Membership(spec.generation, spec.workers, spec.store),
        spec.rank,
        backend=_backend(spec, device),
        timeout_s=config.timeout_s,
    )
    control = Control(groups)
    _check_same_settings(config, control)
    randomness.seed_all(device, config.seed)
    folder = Path(config.project_dir).absolute()
    writes = spec.rank == 0 and not config.dry_run and spec.mode != "verify"
    if config.fresh and writes:
        _move_aside(folder)
    control.barrier(Operation.INIT)
    recorder = Recorder(
        folder if writes else None,
        loggers=config.loggers,
        console=spec.origin != "evenload",
        log_every_s=config.log_every_s,
    )
    if writes:
        recorder.settings(as_table(config))
        if spec.launch_dir:
            _tell_launcher(Path(spec.launch_dir), folder)
    clock = StepClock(device)
    journal = Journal(recorder, writes)
    engine = Engine(
        rank=spec.rank,
        device=device,
        seed=config.seed,
        control=control,
        strategy=ReplicaStrategy(),
        statistics=Statistics(groups, clock),
        precision=Precision(config.precision, device),
        clock=clock,
        journal=journal,
        burner=Burner(spec),
    )
    loop = StepLoop(engine)
    registry = Registry(lambda: loop.steps_done)
    worker.progress.initialised = True
    return Job(spec, config, folder, device, groups, control, clock, recorder, journal, engine, loop, registry)


def device_names(job: Job) -> list[str]:
    """What a person calls the device of each rank."""
    if job.spec.device_names:
        return list(job.spec.device_names)
    return [str(job.device) if job.groups.world_size == 1 else f"rank {r}" for r in range(job.groups.world_size)]


def _spec() -> WorkerSpec:
    spec = detect()
    if spec.origin == "alone" and dist.is_initialized():
        world_size = dist.get_world_size()
        workers = tuple(f"worker-{rank}" for rank in range(world_size))
        local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
        return replace(
            spec, rank=dist.get_rank(), local_rank=local_rank, world_size=world_size, workers=workers, origin="group"
        )
    return spec


def _device(spec: WorkerSpec) -> torch.device:
    if spec.device != "auto":
        device = torch.device(spec.device)
    elif torch.cuda.is_available():
        device = torch.device("cuda", spec.local_rank % torch.cuda.device_count())
    else:
        device = torch.device("cpu")
    if device.type == "cuda":
        if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"device {device} was asked for; torch sees {torch.cuda.device_count()} GPUs. `evenload doctor` tells why"
            )
        torch.cuda.set_device(device)
    return device


def _backend(spec: WorkerSpec, device: torch.device) -> str:
    if spec.backend != "auto":
        return spec.backend
    if device.type != "cuda":
        return "gloo"
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", spec.world_size))
    return "nccl" if ranks_here <= torch.cuda.device_count() else "gloo"


def _check_balance(config: Config, world_size: int) -> None:
    if isinstance(config.balance, tuple) and len(config.balance) != world_size:
        raise ConfigError(
            f"{config.sources['balance']}: {len(config.balance)} shares, but there are {world_size} ranks; give one share "
            "for each"
        )


def _tell_launcher(launch_dir: Path, folder: Path) -> None:
    """The launcher's view follows the run folder from now on."""
    partial = launch_dir / f".{RUN_FOLDER_FILE}.partial"
    partial.write_text(str(folder))
    partial.replace(launch_dir / RUN_FOLDER_FILE)


def _check_same_settings(config: Config, control: Control) -> None:
    """Compares what the ranks set; what concerns rank 0 alone may differ (a folder named after the time of day).

    Raises:
        ConfigError: on all ranks, if one has another setting; ``seed=rank`` would give each rank its own order of samples.
    """
    keys = [
        f.name for f in fields(config) if f.name not in ("project_dir", "loggers", "log_every_s", "fresh", "sources")
    ]
    rows = control.exchange(Operation.INIT, [float(zlib.crc32(repr(getattr(config, key)).encode())) for key in keys])
    for rank, row in enumerate(rows):
        for key, own, first in zip(keys, row, rows[0], strict=True):
            if own != first:
                raise ConfigError(
                    f"{key} is set otherwise on rank {rank} than on rank 0; every rank must give init the same settings"
                )


def _move_aside(folder: Path) -> None:
    if not folder.exists() or not any(folder.iterdir()):
        return
    aside = folder.with_name(f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}")
    index = 1
    while aside.exists():
        aside = folder.with_name(f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}-{index}")
        index += 1
    shutil.move(folder, aside)
    print(f"evenload: --fresh: what {folder.name} held is now in {aside.name}", flush=True)
