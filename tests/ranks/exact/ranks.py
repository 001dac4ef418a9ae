"""The same tasks through Evenload, on ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

import evenload
from evenload.testing import run_ranks
from evenload.training.parallel import buckets
from evenload.training.step.plan_source import PlanSource
from tests.ranks.exact.tasks import TASKS, Recorder, Task
from tests.ranks.exact.tasks.tuples import Paired

STRATEGIES = ("ddp", "dp")
CHANGING = ((24, 6, 2), (2, 10, 20), (11, 10, 11), (0, 24, 8), (24, 0, 8), (22, 10, 0))


class EpochOrder(Sampler[int]):
    """The task's own order of an epoch, or another."""

    def __init__(self, task: Task, order: Callable[[int], list[int]] | None = None) -> None:
        self._order = order or task.order
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._order(0))

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self._order(self._epoch))


def run_split(fn: Callable[..., Any], num_parts: int, strategy: str, *args: Any, **options: Any) -> list[Any]:
    """Calls a function on ranks, or under strategy dp in one process that has as many replicas; a result for each process."""
    if strategy != "dp":
        return run_ranks(fn, num_parts, *args, **options)
    replicas = [{"device": "cpu", "name": f"replica {index}", "num_threads": 1} for index in range(num_parts)]
    return run_ranks(fn, 1, *args, replicas=tuple(replicas), **options)


def loaders_of(task: Task) -> Any:
    """The task's DataLoader, or its tuple of them."""
    if not isinstance(task, Paired):
        return DataLoader(task.dataset, batch_size=task.batch_size, sampler=EpochOrder(task), collate_fn=task.collate)
    return tuple(
        DataLoader(rows, batch_size=task.batch_size * unit, sampler=EpochOrder(task, order))
        for rows, unit, order in zip((task.first, task.second), task.units, task.orders(), strict=True)
    )


@dataclass(frozen=True)
class Setting:
    """How the ranks share the work."""

    balance: Any = "even"
    micro_batch: Any = "auto"
    changing: bool = False
    precision: str = "no"
    strategy: str = "ddp"
    optimizer_first: bool = False
    fused: bool = False
    """Optimizers of torch are fused, where they can be: they skip a step by `found_inf`."""
    bucket_bytes: int | None = 400
    """Buckets so small that even these models have several; None: as they are."""
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        shares = "changing" if self.changing else ":".join(map(str, self.balance)) if self.balance != "even" else "even"
        return (
            f"{shares} micro={self.micro_batch}"
            + " fused" * self.fused
            + (f" {self.precision}" if self.precision != "no" else "")
        )


class ChangingShares(PlanSource):
    """Other shares in each step; of a ragged batch too."""

    sets_shares = True

    def shares(self, global_step: int, num_samples: int) -> tuple[int, ...]:
        shares = CHANGING[global_step % len(CHANGING)]
        if num_samples == sum(shares):
            return shares
        return tuple(num_samples if rank == global_step % 3 else 0 for rank in range(3))


def _fuse(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if "fused" in optimizer.defaults and not any(param.is_complex() for param in params):
            optimizer._step_supports_amp_scaling = True
            for group in optimizer.param_groups:
                group["fused"] = True


def train(task: Task, setting: Setting, folder: str, *, wrong: Callable[[Any], None] | None = None) -> Recorder:
    """Trains to the end of the task on these ranks.

    Args:
        task: what to train.
        setting: how to share it.
        folder: for the run's records.
        wrong: given the run, to do something wrong on purpose.
    """
    run = evenload.init(
        project_dir=folder,
        seed=0,
        strategy=setting.strategy,
        precision=setting.precision,
        micro_batch=setting.micro_batch,
        balance=setting.balance,
        **setting.options,
    )
    if setting.bucket_bytes is not None:
        buckets.FIRST_BUCKET_BYTES, buckets.BUCKET_BYTES = setting.bucket_bytes // 2, setting.bucket_bytes
        buckets.SMALL_BYTES = setting.bucket_bytes // 4  # gradients of both kinds
    task.rank, task.run, task.run_by_evenload = run.rank, run, True
    torch.manual_seed(task.seed + run.rank)  # other initial weights on each rank: rank 0's must count
    task.build()
    if setting.optimizer_first:
        task.make_optimizers()
    *models, loader = run.prepare(
        *task.models,
        loaders_of(task),
    )
    assert all(ours is theirs for ours, theirs in zip(task.models, models, strict=True))
    task.place(models)
    if not setting.optimizer_first:
        task.make_optimizers()
    if setting.fused:
        _fuse(task.optimizers)
    if setting.changing:
        loader.planner.use(ChangingShares())
    if wrong is not None:
        wrong(run)
    record = Recorder(task)
    precision = run._context.engine.precision
    try:
        while loader.epoch * len(loader) < task.num_steps:
            for step in loader:
                task.step_index = step.index

                def backward(loss_fn: Any, *, batch_loss: Any = None, step: Any = step) -> torch.Tensor:
                    loss = step.backward(loss_fn, batch_loss=batch_loss)
                    record.scales.append(precision.scale)
                    return loss

                task.body(backward, record)
                record.end_of_step(step.metrics)
                record.num_micro.append(step.batch.plan.num_micro)
                record.redone.append(step.stats.redone)
                if step.index + 1 == task.num_steps:
                    break
            else:
                continue
            break
        record.finish()
    finally:
        run.close()
    record.events = read_events(folder) if run.rank == 0 else []
    return record


def read_events(folder: str) -> list[dict[str, Any]]:
    lines = Path(folder, "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def train_all(jobs: list[tuple[str, Setting]], folder: str) -> list[Recorder]:
    """Several trainings one after the other, in the processes that are there."""
    torch.set_num_threads(1)
    return [train(TASKS[name](), setting, f"{folder}/{index}") for index, (name, setting) in enumerate(jobs)]
