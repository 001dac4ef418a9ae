"""`TrainingContext`: the parts of one training job on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from evenload.config import Config
from evenload.training.checkpoint.registry import Registry
from evenload.training.comm.clock import StepClock
from evenload.training.comm.control import Control
from evenload.training.comm.groups import Groups
from evenload.training.comm.islands import IslandMap
from evenload.training.comm.link import LinkMeter
from evenload.training.launch.environment import WorkerSpec
from evenload.training.parallel.threaded.strategy import ThreadedStrategy
from evenload.training.parallel.wire.gradient_wire import GradientWire
from evenload.training.step.engine import Engine
from evenload.training.step.step import StepLoop
from evenload.training.step.step_recorder import StepRecorder


@dataclass(frozen=True)
class TrainingContext:
    """Parts of one training job on one rank; `Run` and the session pass them on."""

    spec: WorkerSpec
    config: Config
    folder: Path
    device: torch.device
    groups: Groups
    control: Control
    clock: StepClock
    recorder: StepRecorder
    engine: Engine
    loop: StepLoop
    registry: Registry
    take_records: Callable[[], None]
    """Lets this rank write the records, whose writer is gone."""
    open_folder: Callable[[], None]
    """Makes the run folder ready at the end of all checks: with ``--fresh`` it moves the old contents away first."""
    step_groups: Groups
    """The groups of the ranks that share a step: `groups`, or those of this rank's island."""
    islands: IslandMap | None = None
    """Under strategy local."""
    wire: GradientWire | None = None
    """Sums gradients in another format than their own."""
    link: LinkMeter | None = None

    @property
    def joins(self) -> bool:
        """True while this worker is a world of one that waits to join a run in progress, which it must not disturb."""
        return self.spec.joining and self.groups.membership.number == self.spec.generation

    @property
    def rank(self) -> int:
        """Rank as the script sees it; before it joins that of a later member, so that nothing is printed or written twice."""
        return self.spec.rank if self.joins else self.groups.rank

    @property
    def num_sharing(self) -> int:
        """Number of ranks, or of replicas of this process, that share a step."""
        strategy = self.engine.strategy
        return len(strategy.threads) if isinstance(strategy, ThreadedStrategy) else self.step_groups.world_size


def device_names(context: TrainingContext) -> list[str]:
    if names := context.groups.membership.device_names or context.spec.device_names:
        return list(names)
    return [
        str(context.device) if context.groups.world_size == 1 else f"rank {r}" for r in range(context.groups.world_size)
    ]
