"""Open a job on this rank: make groups, an engine and records from the spec and the settings. Wiring only."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from evenload.atomic_file import write_atomically
from evenload.config import COMMAND_LINE, LOCAL_SETTINGS, SETTINGS, SPAWN, Config, as_table, check_setting, resolve
from evenload.errors import ConfigError
from evenload.job import attempt
from evenload.job.output import open_standard_streams
from evenload.records.folder_lock import LOCK_FILE, lock_folder
from evenload.records.loggers.catalogue import check_loggers
from evenload.records.reader import last_step_in
from evenload.records.recorder import Recorder, print_lines
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
from evenload.training.launch.run_control import RUN_FOLDER_FILE
from evenload.training.launch.throttle import ComputeThrottle
from evenload.training.launch.uncaught import report_uncaught
from evenload.training.parallel.factory import StrategyParts, open_strategy
from evenload.training.parallel.wire.gradient_wire import GradientWire
from evenload.training.session import async_run
from evenload.training.session.late_init import name_if_late
from evenload.training.step.context import TrainingContext
from evenload.training.step.engine import Engine
from evenload.training.step.step import StepLoop
from evenload.training.step.step_recorder import StepRecorder

_NAME_WORDS = 8
"""Numbers that hold the name of a device, 6 bytes each: integers below 2^53 are exact."""
_FRESH_FOR = "fresh_for_job"
"""File in the run folder that names the queue's job whose ``--fresh`` was applied there."""


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
    config = resolve(script, spec.settings, SPAWN if spec.origin == "spawn" else COMMAND_LINE)
    if "batch_lr" in config.sources and config.batch_max is None:
        raise ConfigError(
            f"{config.sources['batch_lr']} has no effect: it sets how the learning rate follows a growing batch; set "
            "batch_max too, or leave it out"
        )
    if config.fresh and config.override:
        raise ConfigError("--override has no effect with --fresh, which resumes nothing; leave one of them out")
    if config.wire != "fp32" and config.strategy not in ("ddp", "local"):
        raise ConfigError(
            f"{config.sources['wire']} has no effect with strategy={config.strategy!r}: it is the format in which the ranks of "
            "strategy='ddp' sum gradients, and the islands of strategy='local' pseudo-gradients; leave one of them out"
        )
    _check_local(config, spec.mode)
    replicas: tuple[ReplicaDevice, ...] = ()
    if config.strategy == STRATEGY:
        replicas = replica_devices(spec, config.sources.get("strategy", f"strategy={STRATEGY!r}"))
    async_run.check_settings(config, spec)
    _check_balance(config, len(replicas) or spec.world_size)
    if "project_dir" not in config.sources:
        config = replace(config, project_dir=f"runs/{_run_name()}")
    if len(replicas) > 1:
        spec = replace(spec, device=replicas[0].device, device_names=tuple(replica.name for replica in replicas))
    device = _device(spec)
    if spec.num_threads:
        torch.set_num_threads(spec.num_threads)
    sums_encoded = config.wire != "fp32" and config.strategy == "ddp"
    options: dict[str, Any] = {
        # `Groups` checks whether each rank has a GPU of its own.
        "backend": spec.backend if spec.backend != "auto" else "nccl" if device.type == "cuda" else "gloo",
        "timeout_s": config.timeout_s,
        "is_watched": is_watched(config, spec) and "timeout_s" not in config.sources,
        "gpu": _gpu(device),
        "inner_backend": spec.inner_backend,
        "has_wire": sums_encoded,
    }
    # A worker that joins a run is a world of one until the others admit it (elastic/).
    alone = Membership(spec.generation, (spec.worker,), "", spec.device_names[spec.rank : spec.rank + 1])
    members = alone if spec.joining else Membership(spec.generation, spec.workers, spec.store)
    groups = Groups(members, 0 if spec.joining else spec.rank, **options)
    if groups.world_size > 1:
        late.enter_context(name_if_late(groups.rank))
    offer_store()
    control = Control(groups)
    _check_same_settings(config, control)
    if spec.world_size > 1 and not spec.device_names:
        spec = replace(spec, device_names=_exchange_names(_device_name(device), control))
    islands: IslandMap | None = None
    if config.strategy == "local" and spec.mode == "train":
        node = f"{spec.node_rank}/{socket.gethostname()}"
        islands = find_islands(config.islands, config.sources.get("islands", ""), node, spec.rank, control)
    step_groups = IslandGroups(groups, islands, **options) if islands is not None and len(islands) > 1 else groups
    randomness.seed_all(device, config.seed)
    folder = Path(check_setting("project_dir", Path(config.project_dir).absolute(), f"run folder {config.project_dir}"))
    writes = spec.rank == 0 and not config.dry_run and spec.mode != "verify"
    if config.fresh and _fresh_is_done(folder):
        config = replace(config, fresh=False)
    control.barrier(Operation.INIT)
    check_loggers(config.loggers, config.logger_options)
    if config.fresh and writes and (folder / LOCK_FILE).exists():
        lock_folder(folder).close()  # before anything of another run is moved
    if config.fresh and Path.cwd().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"--fresh would move {folder} aside, which holds the folder of this script; set a project_dir of its own, such as "
            "runs/name"
        )
    old = _contents(folder) if config.fresh and writes else {}
    recorder = StepRecorder(
        None if old else _open_records(spec, config, folder, writes), writes, on_device=device.type == "cuda"
    )

    def open_folder() -> None:
        if old:
            with lock_folder(folder):  # from here on no other run begins in the folder that is moved
                _locks.append(_move_aside(folder, old))
            old.clear()
            recorder.open(_open_records(spec, config, folder, writes))

    def take_records() -> None:
        records = _open_records(spec, config, folder, writes=True, takes_over=True)
        recorder.take_over(records, last_step_in(folder))

    if config.fresh and writes and not old:
        _note_fresh(folder)
    control.barrier(Operation.INIT)  # the folder exists when init returns, on every rank of this machine
    clock = StepClock(device)
    precision = Precision(config.precision, device)
    grad_norms = GradNorms() if config.batch_max is not None and spec.mode == "train" else None
    if len(replicas) == 1:
        recorder.event("replicas", _one_device(replicas[0].device))
    if why := groups.why_not_shared:
        recorder.event("exchange", f"ranks of one host exchange through gloo, which takes about 1 ms each time: {why}")
    throttle = ComputeThrottle(spec if len(replicas) < 2 else replace(spec, throttle={}))
    seed = mix(config.seed, islands.own) if islands is not None and islands.own else config.seed
    link = LinkMeter(groups, always=config.wire == "auto")
    wire = GradientWire(config.wire, groups, config.seed, recorder.event, link) if sums_encoded else None
    parts = StrategyParts(
        spec,
        device,
        seed,
        step_groups,
        clock,
        precision,
        throttle,
        grad_norms,
        replicas,
        wire,
        link,
        staleness=config.staleness,
        compensates=config.staleness_lr == "compensate",
        report_lost=async_run.lost_reporter(recorder.event, spec.launch_dir),
    )
    if config.strategy == async_run.STRATEGY:
        recorder.event("async", async_run.describe(config, spec))
    asynchronous = async_run.is_asynchronous(config, spec)
    engine = Engine(
        device=device,
        groups=step_groups,
        control=control if step_groups is groups else Control(step_groups),
        strategy=open_strategy(config.strategy, parts),
        precision=precision,
        clock=clock,
        recorder=recorder,
        throttle=throttle,
        check_every=0 if config.check_every == "off" or asynchronous else int(config.check_every),
        grad_norms=grad_norms,
    )
    if islands is not None:
        engine.stays_because = "under strategy local no rank leaves its island"
    loop = StepLoop(engine)
    registry = Registry(lambda: loop.steps_done)
    worker.set_initialised(folder)
    return TrainingContext(
        *(spec, config, folder, device, groups, control, clock, recorder, engine, loop, registry),
        take_records,
        open_folder,
        step_groups,
        islands,
        wire,
        link,
    )


def is_watched(config: Config, spec: WorkerSpec) -> bool:
    """Return whether a supervisor watches this rank, and lets others go on when it is lost."""
    trains = spec.mode == "train" and not async_run.is_asynchronous(config, spec)
    return MessageChannel.is_free(spec.channel) and trains and not config.dry_run


def _check_local(config: Config, mode: str) -> None:
    """Raise ConfigError for settings that have no effect with or without strategy local."""
    given = [config.sources[name] for name in LOCAL_SETTINGS if name in config.sources]
    if config.strategy != "local":
        if given:
            raise ConfigError(
                f"{given[0]} has no effect with strategy {config.strategy}: only islands of strategy='local' synchronise rarely; "
                "set strategy='local', or leave it out"
            )
        return
    if mode == "measure":
        raise ConfigError(
            "strategy='local' cannot be measured against others in one set of processes; measure strategy='ddp'"
        )
    if config.batch_max is not None:
        raise ConfigError(
            "batch_max with strategy='local': a batch grows by noise that all ranks measure; leave one of them out"
        )
    if config.wire == "auto":
        raise ConfigError(
            f"{config.sources['wire']} with strategy='local': it chooses by the noise of gradients, which all ranks of "
            "strategy='ddp' measure in each step; set bf16, fp16, int8 or powersgd for the pseudo-gradients"
        )
    if config.local_steps == "auto" and config.sync_every == 1:
        raise ConfigError(
            f"{config.sources['local_steps']} has no effect with sync_every=1: each island makes at least one step between two "
            "synchronisations; set a larger sync_every, or local_steps='equal', which divides each batch by speed"
        )
    if config.fragments > config.sync_every:
        raise ConfigError(
            f"fragments={config.fragments} with sync_every={config.sync_every}: each fragment needs a step of its own; set "
            "fewer fragments, or a larger sync_every"
        )
    if config.sync_delay * config.fragments > config.sync_every:
        raise ConfigError(
            f"sync_delay={config.sync_delay} with sync_every={config.sync_every} and fragments={config.fragments}: a sum is used "
            f"before the next one begins, at most {config.sync_every // config.fragments} steps after it was sent"
        )


def _open_records(
    spec: WorkerSpec, config: Config, folder: Path, writes: bool, *, takes_over: bool = False
) -> Recorder:
    records = Recorder(
        folder if writes else None,
        loggers=config.loggers,
        logger_options=config.logger_options,
        hyperparameters=as_table(config),
        console=spec.origin != "evenload",
        log_every_s=config.log_every_s,
        job=None if (now := attempt()) is None else now[0],
        takes_over=takes_over,
    )
    if writes:
        # The rank before has written both; a full disk is no reason to end the run.
        with contextlib.suppress(OSError) if takes_over else contextlib.nullcontext():
            records.settings(as_table(config))
            if spec.launch_dir:
                write_atomically(Path(spec.launch_dir) / RUN_FOLDER_FILE, str(folder))
    return records


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


def _check_balance(config: Config, world_size: int) -> None:
    if isinstance(config.balance, tuple) and len(config.balance) != world_size:
        raise ConfigError(
            f"{config.sources['balance']}: {len(config.balance)} shares, but there are {world_size} ranks; give one share "
            "per rank"
        )


def _check_same_settings(config: Config, control: Control) -> None:
    """Raise ConfigError on all ranks if a setting differs; ``seed=rank`` would give each rank its own order of samples."""
    keys = [name for name, setting in SETTINGS.items() if not setting.rank_0_only]
    rows = control.exchange(Operation.INIT, [float(zlib.crc32(repr(getattr(config, key)).encode())) for key in keys])
    for rank, row in enumerate(rows):
        for key, own, first in zip(keys, row, rows[0], strict=True):
            if own != first:
                raise ConfigError(
                    f"{key} differs: rank {rank} has another value than rank 0; give init the same settings on every rank"
                )


def _fresh_is_done(folder: Path) -> bool:
    """Return whether an earlier attempt of this queue's job applied ``--fresh``, which holds once per job."""
    now = attempt()
    if now is None or now[1] == 1:
        return False
    try:
        return (folder / _FRESH_FOR).read_text() == now[0]
    except OSError:
        return False


def _note_fresh(folder: Path) -> None:
    now = attempt()
    if now is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _FRESH_FOR).write_text(now[0])


def _contents(folder: Path) -> dict[str, int]:
    """Return the names in a folder, with the times of their last change."""
    return {path.name: path.lstat().st_mtime_ns for path in folder.iterdir()} if folder.is_dir() else {}


_locks: list[IO[str]] = []
"""Of folders that were begun anew; to close one would end the lock that the recorder holds on the same file."""


def _move_aside(folder: Path, old: Mapping[str, int]) -> IO[str]:
    """Move a folder away, but leave the files that the script wrote since its contents were `old`; return the new one's lock."""
    name, folder = folder.name, folder.resolve()  # of a link the target is moved, and the link stays
    aside = folder.with_name(f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}")
    index = 1
    while aside.exists():
        aside = folder.with_name(f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}-{index}")
        index += 1
    new = folder.with_name(f".{folder.name}.{os.getpid()}")
    new.mkdir(exist_ok=True)
    lock = lock_folder(new)  # no other run may begin in it before this one
    shutil.move(folder, aside)
    try:
        new.rename(folder)
    except OSError as error:
        raise ConfigError(
            f"the run folder {folder} is in use by another process, which begins it anew ({error})"
        ) from error
    for entry, changed_ns in _contents(aside).items():
        is_new = entry not in old or (changed_ns != old[entry] and not (aside / entry).is_dir())
        if is_new and entry != LOCK_FILE:
            (aside / entry).rename(folder / entry)
    _note_fresh(folder)
    print_lines([f"evenload: --fresh: moved the contents of {name} to {aside.name if name == folder.name else aside}"])
    return lock
