"""`run.prepare`: check models and loaders, and return what the loop needs."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from evenload.balance.contention import Contention
from evenload.balance.decision import Decision
from evenload.errors import ConfigError, DesyncError, StepError
from evenload.hardware import usable_cores
from evenload.training.comm.control import Operation
from evenload.training.compute import batchnorm
from evenload.training.data import checks, fingerprint, order
from evenload.training.data.loader import GlobalLoader
from evenload.training.data.randomness import mix
from evenload.training.islands.planner import IslandPlanner
from evenload.training.launch.environment import devices_without_effect
from evenload.training.parallel.asynchronous.strategy import AsyncStrategy
from evenload.training.parallel.call_gradients import SHARDED, is_sharded
from evenload.training.parallel.model_split.transfers import split_of
from evenload.training.session import gradient_contract
from evenload.training.step.context import TrainingContext, device_names
from evenload.training.step.part_planner import PartPlanner
from evenload.training.step.plan_source import PlanSource
from evenload.training.step.planner import Planner
from evenload.training.step.step_loader import StepLoader

_REPORTED_GAIN = 1.05
"""Separate processes are recommended if they would be this many times as fast."""


def prepare_model(context: TrainingContext, model: nn.Module) -> nn.Module:
    """Move the model to the device unless it was cut over several, convert its BatchNorm, and refuse what can't be trained."""
    name = type(model).__name__
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ConfigError(
            f"{name}: pass the bare model (model.module) to run.prepare; Evenload sums the gradients itself"
        )
    parameters = list(model.named_parameters())
    lazy = [key for key, p in parameters if nn.parameter.is_lazy(p)]
    if lazy:
        raise ConfigError(
            f"{name} has uninitialised lazy parameters ({lazy[0]}): run a batch through it before run.prepare"
        )
    meta = [key for key, p in parameters if p.is_meta]
    if meta:
        raise ConfigError(f"{name} has parameters on the meta device ({meta[0]}): materialise them before run.prepare")
    if (
        not parameters
        and not any(True for _ in model.buffers())
        and not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    ):
        raise ConfigError(
            f"{name} has no parameters, no buffers and no BatchNorm: there is nothing to prepare; use it as it is"
        )
    if sharded := [key for key, p in parameters if is_sharded(p)]:
        raise ConfigError(SHARDED.format(name=f"{name}.{sharded[0]}"))
    gradient_contract.check_hooks(model, ConfigError)
    if context.num_sharing > 1:
        _check_embeddings(model)
    _move(context, model)
    # With a channel other ranks may join later.
    may_share = context.num_sharing > 1 or context.spec.channel >= 0
    if context.config.batch_norm == "global" and may_share and not isinstance(context.engine.strategy, AsyncStrategy):
        converted, left = batchnorm.convert(model)
        if converted and context.num_sharing > 1:
            context.recorder.event(
                "batch_norm",
                f"{converted} BatchNorm modules of {name} take their statistics over all ranks "
                '(batch_norm="local" leaves them unchanged)',
            )
        if left:
            context.recorder.event(
                "batch_norm",
                f"{name}: {', '.join(left)} are subclasses of BatchNorm with their own forward and keep statistics of one "
                "rank alone",
            )
    return model


def _check_embeddings(model: nn.Module) -> None:
    """Raise ConfigError if an embedding changes its weights in the forward: each rank would change other rows."""
    for key, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            path = f"{type(model).__name__}.{key}" if key else type(model).__name__
            raise ConfigError(
                f"{path} has max_norm={module.max_norm}: each forward scales down the rows that this rank's samples use, so the "
                "weights would differ between ranks. Make it without max_norm, and scale all rows after optimizer.step(): "
                f"with torch.no_grad(): embedding.weight.renorm_({module.norm_type}, 0, {module.max_norm})"
            )


def _move(context: TrainingContext, model: nn.Module) -> None:
    """Move the model to this rank's device; of one that `evenload.place` has cut, check and record the placement."""
    name = type(model).__name__
    placement = split_of(model)
    if placement is None:
        for key, module in model.named_modules():
            if split_of(module) is not None:
                raise ConfigError(
                    f"{name}.{key} was cut by evenload.place, {name} itself wasn't: give place the model that run.prepare gets"
                )
        model.to(context.device)
        return
    if context.config.strategy not in ("ddp", "local"):
        raise ConfigError(
            f"strategy={context.config.strategy!r} spreads whole models, and {name} was cut by evenload.place; use strategy='ddp'"
        )
    if context.groups.rank in context.groups.nccl_ranks and "cpu" in placement.devices:
        raise ConfigError(
            f"{name} lies on {', '.join(placement.devices)}, and the ranks sum gradients over NCCL, which takes no CPU tensors; "
            "start with `evenload run -d 0+cpu,1+cpu`, which sums over gloo"
        )
    context.recorder.event("place", placement.sentence(), pieces=[asdict(piece) for piece in placement.pieces])


def attach_models(context: TrainingContext, models: Sequence[nn.Module]) -> None:
    """Attach all models to the strategy and the engine; raise DesyncError if the ranks prepare different ones."""
    shapes = [(name, tuple(p.shape), p.requires_grad) for model in models for name, p in model.named_parameters()]
    key = float(zlib.crc32(repr(shapes).encode()))
    rows = context.control.exchange(Operation.PREPARE, [float(len(models)), key])
    different = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if different:
        raise DesyncError(
            f"run.prepare received different models: rank {', '.join(map(str, different))} differs from rank 0 (in number, "
            "names, shapes or frozen parameters); build the same model on all ranks"
        )
    context.engine.strategy.attach(models, context.groups)
    context.engine.attach(models)


def prepare_loader(
    context: TrainingContext,
    loader: DataLoader[Any] | tuple[Any, ...],
    index: int,
    source: PlanSource | None = None,
) -> StepLoader:
    """Wrap a DataLoader whose batch_size is the global batch, or a tuple of them; the `index`-th has its own order of samples."""

    def announce(decision: Decision, _: int) -> None:
        context.recorder.event(
            "balance",
            decision.reason and decision.reason + _outlook(planner.outlook()),
            # Plans count the steps of one loader, records those of all loaders.
            step=context.loop.steps_done + decision.lead_steps,
            decision=decision.kind,
            shares=list(decision.shares),
            num_micro=decision.num_micro,
            rank=decision.rank,
            factor=decision.factor,
            expected_s=decision.expected_s,
            before_s=decision.before_s,
            **planner.outlook(),
        )

    if isinstance(loader, tuple):
        for value in loader:
            if not isinstance(value, DataLoader):
                refuse_in_tuple(value)
        checks.check_tuple(loader)
        usual, is_guess = math.gcd(*(one.batch_size or 1 for one in loader)), False
    else:
        checks.check_loader(loader)
        usual, is_guess = _usual_batch(loader, context.config.balance)
    for one in loader if isinstance(loader, tuple) else (loader,):
        check_same_loader(context, one, Operation.PREPARE)
    given = (context, loader, usual, announce)
    planner = (
        _part_planner(*given, is_guess=is_guess)
        or _island_planner(*given, is_guess=is_guess)
        or Planner(
            context.control,
            rank=context.groups.rank,
            world_size=context.num_sharing,
            batch_size=usual,
            # Fixed shares are those of the ranks that began; one that joins gets its own from them.
            balance="even" if context.joins and isinstance(context.config.balance, tuple) else context.config.balance,
            micro_batch=context.config.micro_batch,
            announce=announce,
            is_guess=is_guess,
            source=source,
            on_contention=functools.partial(_report_contention, context)
            if context.num_sharing > context.groups.world_size
            else None,
        )
    )
    global_loader = GlobalLoader(
        loader,
        planner,
        seed=context.config.seed if index == 0 else mix(context.config.seed, index),
        device=context.device,
        keyed_rng=context.config.dataset_rng == "keyed",
        clock=context.clock,
        most_workers=_most_workers(context),
        ranks=range(context.num_sharing) if context.num_sharing > context.step_groups.world_size else None,
        reader_rank=None if context.islands is None else context.groups.rank,
    )
    prepared = StepLoader(global_loader, planner, context.loop)
    _describe(context, prepared, planner, usual)
    return prepared


def _part_planner(
    context: TrainingContext,
    loader: DataLoader[Any] | tuple[Any, ...],
    batch_size: int,
    announce: Callable[[Decision, int], None],
    *,
    is_guess: bool,
) -> PartPlanner | None:
    """Return the planner of strategy ``async``; None under another one."""
    strategy = context.engine.strategy
    if not isinstance(strategy, AsyncStrategy):
        return None
    loaders = loader if isinstance(loader, tuple) else (loader,)
    if any(checks.is_stream(one) for one in loaders):
        raise ConfigError(
            "strategy='async' needs a dataset with an index: workers take parts out of order, and an iterable dataset gives its "
            "samples in order only; use a map-style dataset, or strategy='ddp'"
        )
    return PartPlanner(
        context.control,
        strategy,
        context.groups,
        context.clock,
        batch_size=batch_size,
        micro_batch=context.config.micro_batch,
        announce=announce,
        is_guess=is_guess,
        reads_ahead=any(one.num_workers for one in loaders) or context.config.num_workers == "auto",
        is_dry=context.config.dry_run,
    )


def _island_planner(
    context: TrainingContext,
    loader: DataLoader[Any] | tuple[Any, ...],
    batch_size: int,
    announce: Callable[[Decision, int], None],
    *,
    is_guess: bool,
) -> IslandPlanner | None:
    """Return the planner of strategy ``local``; None under another one."""
    config = context.config
    if context.islands is None:
        return None
    if config.local_steps == "auto" and isinstance(loader, DataLoader) and checks.is_stream(loader):
        raise ConfigError(
            "local_steps='auto' with an iterable dataset: islands would have to read ahead by a whole round; use "
            "local_steps='equal', or a map-style dataset"
        )
    planner = IslandPlanner(
        context.engine.control,
        context.islands,
        world=context.control,
        world_rank=context.groups.rank,
        rank=context.step_groups.rank,
        batch_size=batch_size,
        balance=config.balance,
        micro_batch=config.micro_batch,
        sync_every=config.sync_every,
        by_speed=config.local_steps == "auto",
        announce=announce,
        is_guess=is_guess,
    )
    if isinstance(loader, DataLoader) and checks.has_plain_batches(loader) and not (loader.drop_last or is_guess):
        planner.check_last_batch(len(loader.sampler) % batch_size if isinstance(loader.sampler, Sized) else 0)
    return planner


def refuse(value: Any) -> None:
    """Raise ConfigError with the reason why `run.prepare` doesn't accept an object."""
    if isinstance(value, torch.optim.Optimizer | LRScheduler):
        raise ConfigError(
            f"run.prepare received a {type(value).__name__}: optimizers and schedulers stay your own; use them as they are, and "
            "pass them to run.resume so that checkpoints hold them"
        )
    if isinstance(value, StepLoader):
        raise ConfigError("run.prepare received a loader that is already prepared")
    received = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
    hint = ". Loaders that make one loader together go in a tuple" if isinstance(value, list) else ""
    if hasattr(value, "__next__"):
        hint = ". Pass the DataLoader itself, without iterating over it"
    elif callable(value) and not isinstance(value, type):
        hint = ". A loss function goes to step.backward(loss_fn)"
    raise ConfigError(f"run.prepare takes models and DataLoaders; it received {received}{hint}")


def check_models_prepared(context: TrainingContext, models: Sequence[nn.Module]) -> None:
    """Raise if there is no prepared model, or devices that no model uses."""
    if not models:
        raise StepError("no model was passed to run.prepare; write: model, loader = run.prepare(model, loader)")
    if not any(p.requires_grad for model in models for p in model.parameters()):
        raise StepError(
            f"no prepared model has a trainable parameter ({', '.join(type(model).__name__ for model in models)}): all are "
            "frozen. Pass the model that is trained to run.prepare too"
        )
    if len(context.spec.devices) > 1 and not any(split_of(model) for model in models):
        raise ConfigError(devices_without_effect(context.spec))


def refuse_in_tuple(value: Any) -> None:
    """Raise ConfigError with the reason why an object can't be part of a tuple of loaders."""
    if isinstance(value, StepLoader):
        raise ConfigError("the tuple given to run.prepare holds a prepared loader; give it the plain DataLoaders")
    raise ConfigError(
        f"a tuple given to run.prepare holds DataLoaders that make one loader together; it holds a {type(value).__name__}. Give "
        "models, and loaders of their own, as arguments of their own: model, loader = run.prepare(model, (labeled, unlabeled))"
    )


def _report_contention(context: TrainingContext, found: Contention) -> None:
    message = ""
    if found.gain >= _REPORTED_GAIN:
        message = (
            "the replicas share one interpreter: computing concurrently, the slowest takes "
            f"{found.side_by_side_s * 1e3:.3g} ms a step, and waits up to {max(found.waiting_s) * 1e3:.3g} ms of it for the "
            "others' Python (in turns they take "
            f"{', '.join(f'{s * 1e3:.3g}' for s in found.alone_s if s)} ms); separate processes (strategy='ddp') would take "
            f"about {found.separate_s * 1e3:.3g} ms, {found.gain:.2f}× as fast"
        )
    context.recorder.event("contention", message, step=context.loop.steps_done, gain=found.gain, **asdict(found))


def _outlook(outlook: Mapping[str, float]) -> str:
    if not outlook:
        return ""
    return f" (expected {outlook['over_equal']:.2f}× equal shares, {outlook['over_best_alone']:.2f}× the best device alone)"


def check_same_loader(context: TrainingContext, loader: DataLoader[Any], operation: Operation) -> None:
    """Raise DesyncError on all ranks if the data differs: the parts of a batch would be of different samples."""
    mismatch = fingerprint.describe_mismatch(context.control.exchange(operation, fingerprint.fingerprint_of(loader)))
    if mismatch:
        raise DesyncError(mismatch)


def _most_workers(context: TrainingContext) -> int | None:
    # Two workers per core, at least four: with remote data, workers mostly wait.
    if context.config.num_workers != "auto":
        return None
    spec = context.spec
    num_cores = len(spec.cores) or len(usable_cores()) // max(1, spec.world_size // max(1, spec.num_nodes))
    return min(16, max(4, 2 * num_cores))


def _usual_batch(loader: DataLoader[Any], balance: str | tuple[int, ...]) -> tuple[int, bool]:
    """Return the global batch, of the batch_sampler or else of fixed shares, and whether it is a guess."""
    sampler = loader.batch_sampler
    size = loader.batch_size or getattr(sampler, "batch_size", None)
    if isinstance(sampler, list | tuple) and all(isinstance(keys, Sized) for keys in sampler):
        lengths = {len(keys) for keys in sampler[:-1] or sampler}
        size = lengths.pop() if len(lengths) == 1 else size  # of all lists of keys but a shorter last one
    if isinstance(size, int) and size > 0:
        return size, False
    if isinstance(balance, tuple):
        return sum(balance), False
    try:
        return max(1, -(-len(loader.dataset) // len(loader))), True  # type: ignore[arg-type]
    except (TypeError, ZeroDivisionError):  # one of them has no length
        return 32, True


def _describe(context: TrainingContext, loader: StepLoader, planner: Planner, batch_size: int) -> None:
    try:
        epoch_steps: int | None = len(loader)
    except TypeError:
        epoch_steps = None
    names = device_names(context)
    parts = isinstance(planner, PartPlanner)
    shares = planner.first_shares() if isinstance(planner, IslandPlanner) else planner.shares
    lines = [
        f"rank {rank}: {name}, "
        + (
            f"share {share} of {batch_size}, micro-batch {-(-share // planner.num_micro)}"
            if not parts
            else "computes parts"
            if rank
            else "server"
        )
        for rank, (name, share) in enumerate(zip(names, shares, strict=True))
    ]
    epoch = f"{epoch_steps} steps an epoch" if epoch_steps is not None else "epochs of unknown length"
    batch = f"{batch_size} {loader.loader.unit_name}" if loader.loader.is_joint else str(batch_size)
    few = ""
    if loader.loader.is_joint and batch_size < context.num_sharing:
        few = " (fewer units than ranks: choose batch sizes with a larger common divisor)"
    context.recorder.event(
        "loader",
        f"global batch {batch}, {epoch}{few}\n  " + "\n  ".join(lines),
        epoch_steps=epoch_steps,
        devices=names,
        workers=list(context.groups.membership.workers),
    )
    for one in loader.loader.user_loaders:
        if order.is_computed(one):
            draws = one.sampler.replacement  # type: ignore[attr-defined]
            how = "drawn with replacement by a function" if draws else "shuffled by a permutation"
            context.recorder.event(
                "order",
                f"{len(one.sampler):,} samples are {how} that is computed where it is used "  # type: ignore[arg-type]
                f"(up to {order.MAX_DRAWN:,} all are drawn when an epoch begins)",
            )
    message = {"auto": "equal shares at first", "even": "equal shares, as set"}.get(
        str(context.config.balance), "shares as set"
    )
    if isinstance(context.config.balance, tuple) and sum(context.config.balance) != batch_size:
        message += f", {':'.join(map(str, context.config.balance))} of {batch_size}"
    if context.num_sharing > 1 and not parts:
        context.recorder.event("shares", message, shares=list(shares))
