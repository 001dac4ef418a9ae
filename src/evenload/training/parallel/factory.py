"""Make the strategy of a job by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from evenload.config import STRATEGY_NAMES
from evenload.errors import ConfigError
from evenload.training.comm.clock import StepClock
from evenload.training.comm.groups import Groups
from evenload.training.comm.link import LinkMeter
from evenload.training.compute.grad_norms import GradNorms
from evenload.training.compute.precision import Precision
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.replicas import ReplicaDevice
from evenload.training.launch.server_process import allow_losses, read_lost
from evenload.training.launch.throttle import ComputeThrottle
from evenload.training.parallel.ddp import ReplicaStrategy
from evenload.training.parallel.local import IslandStrategy
from evenload.training.parallel.strategy import Strategy
from evenload.training.parallel.threaded.strategy import open_threaded_strategy
from evenload.training.parallel.wire.gradient_wire import GradientWire


@dataclass(frozen=True)
class StrategyParts:
    """Parts of a job that strategies are made of."""

    spec: WorkerSpec
    device: torch.device
    seed: int
    groups: Groups
    clock: StepClock
    precision: Precision
    throttle: ComputeThrottle
    grad_norms: GradNorms | None = None
    replicas: Sequence[ReplicaDevice] = ()
    """Devices of this process, for a strategy that uses several."""
    wire: GradientWire | None = None
    """Sums gradients in another format than their own."""
    link: LinkMeter | None = None
    on_device: bool | None = None
    """See `ReplicaStrategy`; tests set it."""
    staleness: int = 0
    """Of strategy ``async``: the most updates that a gradient may be behind."""
    compensates: bool = False
    """Of strategy ``async``: delay compensation."""
    report_lost: Callable[[int, str, Sequence[int], bool], None] = lambda *_: None
    """Of strategy ``async``: called with a worker that is gone, the reason, and the parts that others take."""


def _open_ddp(parts: StrategyParts, kind: type[ReplicaStrategy] = ReplicaStrategy) -> ReplicaStrategy:
    return kind(
        device=parts.device,
        seed=parts.seed,
        precision=parts.precision,
        clock=parts.clock,
        throttle=parts.throttle,
        groups=parts.groups,
        grad_norms=parts.grad_norms,
        on_device=parts.on_device,
        wire=parts.wire,
        link=parts.link,
    )


def _open_dp(parts: StrategyParts) -> Strategy:
    if len(parts.replicas) < 2:
        return _open_ddp(parts)
    return open_threaded_strategy(parts.replicas, parts.spec, parts.precision, parts.clock, parts.seed)


def _open_async(parts: StrategyParts) -> Strategy:
    if parts.staleness == 0 or parts.groups.world_size == 1:
        return _open_ddp(parts)
    from evenload.training.parallel.asynchronous.strategy import open_async  # imports RPC, which takes 0.1 s

    strategy = open_async(
        _open_ddp(parts),
        parts.groups,
        parts.clock,
        parts.device,
        staleness=parts.staleness,
        compensates=parts.compensates,
        report_lost=parts.report_lost,
    )
    if strategy.server is not None:
        strategy.server.read_lost = partial(read_lost, parts.spec.launch_dir)
        strategy.server.allow_losses = partial(allow_losses, parts.spec.launch_dir)
    return strategy


def _open_local(parts: StrategyParts) -> Strategy:
    return _open_ddp(parts, IslandStrategy)


STRATEGIES: dict[str, Callable[[StrategyParts], Strategy]] = {
    "ddp": _open_ddp,
    "dp": _open_dp,
    "local": _open_local,
    "async": _open_async,
}


def register_strategy(name: str, open_it: Callable[[StrategyParts], Strategy]) -> None:
    """Add a strategy that ``evenload.init(strategy=name)`` accepts from then on; ConfigError if the name is taken.

    Call it on every rank, before `evenload.init`.
    """
    if name in STRATEGIES:
        raise ConfigError(f"register_strategy({name!r}): there is a strategy of this name already; choose another")
    STRATEGIES[name] = open_it
    STRATEGY_NAMES.append(name)


def open_strategy(name: str, parts: StrategyParts) -> Strategy:
    """Return the strategy called `name`; ConfigError if its devices are missing."""
    return STRATEGIES[name](parts)
