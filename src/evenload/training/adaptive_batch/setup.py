"""Set up an adaptive batch: check what `batch_max` requires, and record what it decides."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from evenload.errors import ConfigError
from evenload.training.adaptive_batch.growth import BatchGrowth, BatchReport, sentence
from evenload.training.adaptive_batch.learning_rate import RateFollower
from evenload.training.data import checks
from evenload.training.step.context import TrainingContext, device_names
from evenload.training.step.step import Step, StepListener
from evenload.training.step.step_loader import StepLoader


@dataclass(frozen=True)
class AdaptiveBatch(StepListener):
    growth: BatchGrowth
    rates: RateFollower

    def on_trained(self, step: Step) -> None:
        self.growth.observe(step.stats, step.stats.is_usual)


def open_adaptive_batch(context: TrainingContext, loader: StepLoader, index: int) -> AdaptiveBatch | None:
    """Return the adaptive batch of the `index`-th loader; None without `batch_max`, or if nothing is trained."""
    limit = context.config.batch_max
    if limit is None:
        return None
    if loader.loader.is_joint:
        raise ConfigError(
            f"{_spelled(context)} works with one loader, and a tuple has a batch for each; prepare one loader, or leave it out"
        )
    base = _check(context, loader.loader.user_loader, limit, index)
    if context.spec.mode != "train":
        return None  # verify and measurements look at steps of the user's batch

    def record(report: BatchReport) -> None:
        now, choice = report.chosen, report.choice
        gains = rates.expected()
        context.recorder.event(
            "batch",
            sentence(report, base, gains),
            step=context.loop.steps_done,
            epoch=report.epoch,
            epoch_step=report.epoch_step,
            before=report.before,
            batch_size=now.batch_size,
            noise_samples=now.noise,
            noise_measured=report.measured,
            num_measured=report.num_measured,
            decision="unmeasured" if choice is None else choice.kind,
            before_per_s=None if choice is None else choice.before_per_s,
            expected_per_s=None if choice is None else choice.expected_per_s,
            rate_gains=gains,
            epoch_steps=report.epoch_steps,
        )

    growth = BatchGrowth(
        loader.loader,
        loader.planner,
        base=base,
        limit=limit,
        devices=lambda: device_names(context),
        record=record,
    )
    rates = RateFollower(growth, context.config.batch_lr)
    adaptive_batch = AdaptiveBatch(growth, rates)
    context.loop.add_listener(adaptive_batch)
    return adaptive_batch


def _check(context: TrainingContext, loader: DataLoader[Any], limit: int, index: int) -> int:
    spelled = _spelled(context)
    if context.config.strategy != "ddp":
        raise ConfigError(
            f"{spelled}: under strategy={context.config.strategy!r} the gradient noise is not measured; use strategy='ddp', "
            "or leave it out"
        )
    if index > 0:
        raise ConfigError(
            f"{spelled} works with one loader, and this is the second: its batch and gradient noise would be ambiguous; prepare "
            "one loader, or leave it out"
        )
    if checks.is_stream(loader):
        raise ConfigError(f"{spelled} has no effect on an iterable dataset, which makes its own batches; leave it out")
    base = loader.batch_size
    if base is None or not checks.has_plain_batches(loader):
        raise ConfigError(f"{spelled} has no effect on a loader with a batch_sampler, which makes its own batches")
    if isinstance(loader.sampler, Sized) and len(loader.sampler) <= base:
        raise ConfigError(
            f"{spelled} has no effect: an epoch of {len(loader.sampler)} samples is one batch of {base} already; leave it out"
        )
    if limit <= base:
        raise ConfigError(
            f"{spelled} has no effect: the loader's batch_size is {base} already; set it higher, or leave it out"
        )
    cap = context.config.micro_batch
    if context.num_sharing == 1 and isinstance(cap, int) and cap >= base:
        raise ConfigError(
            f"{spelled}: one rank that computes a batch of {base} at once (micro_batch={cap}) can't measure its "
            f"gradient noise; set micro_batch to {max(1, base // 2)} or less, or use two ranks"
        )
    return base


def _spelled(context: TrainingContext) -> str:
    return context.config.sources.get("batch_max", f"batch_max={context.config.batch_max}")
