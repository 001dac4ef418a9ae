"""Describe a run for ``--dry-run``: its settings, the first step and the models."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from evenload.config import Config, as_table
from evenload.training.step.step import Step


def describe_run(config: Config, models: Sequence[nn.Module], decisions: Sequence[str], step: Step | None) -> list[str]:
    """Return the lines; `decisions` are those about the newest checkpoint, `step` the first one, or None if no step began."""
    lines = [*decisions, "settings:"]
    for key, value in as_table(config).items():
        if key != "sources":
            lines.append(f"  {key} = {value!r}  ({config.sources.get(key, 'default')})")
    if step is None:
        lines.append("nothing to train: no step began")
    else:
        plan = step.batch.plan
        lines.append(
            f"first step: {plan.num_samples} {step.loader.unit_name}, shares {list(plan.shares)}, {plan.num_micro} micro-batches"
        )
    for model in models:
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        held = sum(p.numel() * p.element_size() for p in model.parameters())
        lines.append(f"model {type(model).__name__}: {count:,} trainable parameters, {held / 2**20:,.1f} MiB")
    return lines
