"""Open a job on this rank: make groups, an engine and records from the spec and the settings. Wiring only."""

from __future__ import annotations

import contextlib
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from evenload.config import COMMAND_LINE, SPAWN, Config, check_setting, resolve
from evenload.errors import ConfigError
from evenload.job.output import open_standard_streams
from evenload.records.loggers.catalogue import check_loggers
from evenload.training.checkpoint.registry import Registry
from evenload.training.comm.adopted import adopt_group
from evenload.training.comm.clock import StepClock
from evenload.training.comm.control import Control, Operation
from evenload.training.comm.generation import Membership
from evenload.training.comm.groups import Groups
from evenload.training.comm.islands import IslandGroups, IslandMap, find_islands
from evenload.training.comm.link import LinkMeter
from evenload.training.comm.rpc import offer_store
from evenload.training.compute import randomness
from evenload.training.compute.grad_norms import GradNorms
from evenload.training.compute.precision import Precision
from evenload.training.data.randomness import mix
from evenload.training.launch import worker
from evenload.training.launch.environment import WorkerSpec, detect
from evenload.training.launch.membership_messages import MessageChannel
from evenload.training.launch.replicas import STRATEGY, ReplicaDevice, replica_devices
from evenload.training.launch.throttle import ComputeThrottle
from evenload.training.launch.uncaught import report_uncaught
from evenload.training.parallel.factory import StrategyParts, open_strategy
from evenload.training.parallel.wire.gradient_wire import GradientWire
from evenload.training.session import async_run
from evenload.training.session.late_init import name_if_late
from evenload.training.session.run_folder import RunFolder, fresh_is_done
from evenload.training.session.setting_checks import check_balance, check_contradictions, check_same_settings
from evenload.training.step.context import TrainingContext
from evenload.training.step.engine import Engine
from evenload.training.step.step import StepLoop
from evenload.training.step.step_recorder import StepRecorder

_NAME_WORDS = 8
"""Numbers that hold the name of a device, 6 bytes each: integers below 2^53 are exact."""


def open_context(script: dict[str, Any], late: contextlib.ExitStack) -> TrainingContext:
    """Join the job that this process was started for; `script` holds the arguments of `evenload.init`.

    Until `late` is closed, a line names this rank if the others wait for it.

    Raises:
        ConfigError: settings are wrong or contradict each other.
        LaunchError: the other ranks do not arrive.
    """
    open_standard_streams()
    spec = adopt_group() if dist.is_initialized() else detect()
    if spec.origin not in ("evenload", "spawn"):
        report_uncaught(spec.world_size, spec.rank)
    config, replicas = _read_settings(script, spec)
    if len(replicas) > 1:
        spec = replace(spec, device=replicas[0].device, device_names=tuple(replica.name for replica in replicas))
    device = _device(spec)
    if spec.num_threads:
        torch.set_num_threads(spec.num_threads)
    options = _group_options(config, spec, device)
    # A worker that joins a run is a world of one until the others admit it (elastic/).
    alone = Membership(spec.generation, (spec.worker,), "", spec.device_names[spec.rank : spec.rank + 1])
    members = alone if spec.joining else Membership(spec.generation, spec.workers, spec.store)
    groups = Groups(members, 0 if spec.joining else spec.rank, **options)
    if groups.world_size > 1:
        late.enter_context(name_if_late(groups.rank))
    offer_store()
    control = Control(groups)
    check_same_settings(config, control)
    if spec.world_size > 1 and not spec.device_names:
        spec = replace(spec, device_names=_exchange_names(_device_name(device), control))
    islands: IslandMap | None = None
    if config.strategy == "local" and spec.mode == "train":
        node = f"{spec.node_rank}/{socket.gethostname()}"
        islands = find_islands(config.islands, config.sources.get("islands", ""), node, spec.rank, control)
    step_groups = IslandGroups(groups, islands, **options) if islands is not None and len(islands) > 1 else groups
    randomness.seed_all(device, config.seed)
    folder = Path(check_setting("project_dir", Path(config.project_dir).absolute(), f"run folder {config.project_dir}"))
    if config.fresh and fresh_is_done(folder):
        config = replace(config, fresh=False)
    control.barrier(Operation.INIT)
    check_loggers(config.loggers, config.logger_options)
    run_folder = RunFolder(folder, spec, config, on_device=device.type == "cuda")
    recorder = run_folder.recorder
    control.barrier(Operation.INIT)  # the folder exists when init returns, on every rank of this machine
    if len(replicas) == 1:
        recorder.event("replicas", _one_device(replicas[0].device))
    if why := groups.why_not_shared:
        recorder.event("exchange", f"ranks of one host exchange through gloo, which takes about 1 ms each time: {why}")
    throttle = ComputeThrottle(spec if len(replicas) < 2 else replace(spec, throttle={}))
    seed = mix(config.seed, islands.own) if islands is not None and islands.own else config.seed
    link = LinkMeter(groups, always=config.wire == "auto")
    wire = GradientWire(config.wire, groups, config.seed, recorder.event, link) if _sums_encoded(config) else None
    parts = StrategyParts(
        spec,
        device,
        seed,
        step_groups,
        StepClock(device),
        Precision(config.precision, device),
        throttle,
        GradNorms() if config.batch_max is not None and spec.mode == "train" else None,
        replicas,
        wire,
        link,
        staleness=config.staleness,
        compensates=config.staleness_lr == "compensate",
        report_lost=async_run.lost_reporter(recorder.event, spec.launch_dir),
    )
    if config.strategy == async_run.STRATEGY:
        recorder.event("async", async_run.describe(config, spec))
    engine = _open_engine(config, parts, control if step_groups is groups else Control(step_groups), recorder)
    if islands is not None:
        engine.stays_because = "under strategy local no rank leaves its island"
    loop = StepLoop(engine)
    registry = Registry(lambda: loop.steps_done)
    worker.set_initialised(folder)
    return TrainingContext(
        *(spec, config, folder, device, groups, control, parts.clock, recorder, engine, loop, registry),
        run_folder.take_records,
        run_folder.open,
        step_groups,
        islands,
        wire,
        link,
    )


def _read_settings(script: dict[str, Any], spec: WorkerSpec) -> tuple[Config, tuple[ReplicaDevice, ...]]:
    """Return the settings of the script and of the command line, and the replicas of this process under strategy dp."""
    config = resolve(script, spec.settings, SPAWN if spec.origin == "spawn" else COMMAND_LINE)
    check_contradictions(config, spec)
    replicas: tuple[ReplicaDevice, ...] = ()
    if config.strategy == STRATEGY:
        replicas = replica_devices(spec, config.sources.get("strategy", f"strategy={STRATEGY!r}"))
    async_run.check_settings(config, spec)
    check_balance(config, len(replicas) or spec.world_size)
    if "project_dir" not in config.sources:
        config = replace(config, project_dir=f"runs/{_run_name()}")
    return config, replicas


def is_watched(config: Config, spec: WorkerSpec) -> bool:
    """Return whether a supervisor watches this rank, and lets others go on when it is lost."""
    trains = spec.mode == "train" and not async_run.is_asynchronous(config, spec)
    return MessageChannel.is_free(spec.channel) and trains and not config.dry_run


def _sums_encoded(config: Config) -> bool:
    """Return whether gradients are summed in another format than their own."""
    return config.wire != "fp32" and config.strategy == "ddp"


def _group_options(config: Config, spec: WorkerSpec, device: torch.device) -> dict[str, Any]:
    auto = "nccl" if device.type == "cuda" else "gloo"
    return {
        # `Groups` checks whether each rank has a GPU of its own.
        "backend": auto if spec.backend == "auto" else spec.backend,
        "timeout_s": config.timeout_s,
        "is_watched": is_watched(config, spec) and "timeout_s" not in config.sources,
        "gpu": _gpu(device),
        "inner_backend": spec.inner_backend,
        "has_wire": _sums_encoded(config),
    }


def _open_engine(config: Config, parts: StrategyParts, control: Control, recorder: StepRecorder) -> Engine:
    never_compares = config.check_every == "off" or async_run.is_asynchronous(config, parts.spec)
    return Engine(
        device=parts.device,
        groups=parts.groups,
        control=control,
        strategy=open_strategy(config.strategy, parts),
        precision=parts.precision,
        clock=parts.clock,
        recorder=recorder,
        throttle=parts.throttle,
        check_every=0 if never_compares else int(config.check_every),
        grad_norms=parts.grad_norms,
    )


def _one_device(device: str) -> str:
    return (
        f"strategy dp: there is one device ({device}), so there is one replica; `evenload run -d cpu:2 --strategy dp` makes "
        "two on the CPU, -d 0,cpu one on a GPU and one on the CPU"
    )


def _run_name() -> str:
    # A notebook has no file, and its sys.argv[0] is the kernel's.
    script = sys.argv[0] if hasattr(sys.modules["__main__"], "__file__") else ""
    return Path(script).stem or "interactive"


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
                f"device {device} was asked for; torch sees {torch.cuda.device_count()} GPUs. `evenload doctor` explains why"
            )
        torch.cuda.set_device(device)
    return device


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU of {socket.gethostname()}"


def _exchange_names(own: str, control: Control) -> tuple[str, ...]:
    """Return the names of all ranks' devices, which only our own launcher knows beforehand."""
    words = own.encode()[: _NAME_WORDS * 6].ljust(_NAME_WORDS * 6)
    numbers = [float(int.from_bytes(words[index : index + 6])) for index in range(0, len(words), 6)]
    rows = control.exchange(Operation.INIT, numbers)
    return tuple(b"".join(int(number).to_bytes(6) for number in row).decode(errors="replace").strip() for row in rows)


def _gpu(device: torch.device) -> str:
    """Return an identifier of this GPU that is unique over all machines."""
    if device.type != "cuda":
        return ""
    known = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return str(known or f"{socket.gethostname()}/{device.index}")
