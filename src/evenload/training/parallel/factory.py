"""Make the strategy of a job by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from evenload.training.comm.clock import StepClock
from evenload.training.comm.groups import Groups
from evenload.training.compute.grad_norms import GradNorms
from evenload.training.compute.precision import Precision
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.replicas import ReplicaDevice
from evenload.training.launch.throttle import ComputeThrottle
from evenload.training.parallel.ddp import ReplicaStrategy
from evenload.training.parallel.strategy import Strategy
from evenload.training.parallel.threaded.strategy import open_threaded_strategy


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


def _open_ddp(parts: StrategyParts) -> Strategy:
    return ReplicaStrategy(
        device=parts.device,
        seed=parts.seed,
        precision=parts.precision,
        clock=parts.clock,
        throttle=parts.throttle,
        groups=parts.groups,
        grad_norms=parts.grad_norms,
    )


def _open_dp(parts: StrategyParts) -> Strategy:
    if len(parts.replicas) < 2:
        return _open_ddp(parts)
    return open_threaded_strategy(parts.replicas, parts.spec, parts.precision, parts.clock, parts.seed)


STRATEGIES: dict[str, Callable[[StrategyParts], Strategy]] = {"ddp": _open_ddp, "dp": _open_dp}


def open_strategy(name: str, parts: StrategyParts) -> Strategy:
    """Return the strategy called `name`; ConfigError if its devices are missing."""
    return STRATEGIES[name](parts)
