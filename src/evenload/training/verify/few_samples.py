"""`FewSamples`: computes loss_fn once more for a few samples of a step, whole or in parts, with gradients of some parameters."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from evenload.training.compute import randomness
from evenload.training.compute.buffers import BufferGuard
from evenload.training.compute.label_watch import describe_unweighted
from evenload.training.compute.micro_steps import LossFn
from evenload.training.compute.weighting import read_result
from evenload.training.data.rows import NoRowsError, cut_rows
from evenload.training.step.context import TrainingContext
from evenload.training.step.step import Step
from evenload.training.verify.bent_means import Bend, find_bends
from evenload.training.verify.random_draws import OwnState, SharedDraws
from evenload.training.verify.sides import Gradient, without_dropout


class FewSamples:
    """The first `num` samples of `data`, a batch of `num_read` whose first is at the global position `first`."""

    def __init__(
        self,
        context: TrainingContext,
        models: Sequence[nn.Module],
        params: Sequence[nn.Parameter],
        step: Step,
        loss_fn: LossFn,
        call: int,
        batch: tuple[Any, int, int],
        num_samples: int,
    ) -> None:
        self.data, self.num_read, self.first = batch
        self.num = min(self.num_read, num_samples)
        self.has_rows = _has_rows(self.data, self.num_read)
        self.quiet: LossFn = without_dropout(loss_fn)
        self.is_unweighted = False
        """True once a loss came without the weight that its batch calls for."""
        self.is_half = False
        """True once loss_fn has computed in 16 bits."""
        self.set_in_calls: list[list[tuple[str, torch.Tensor]]] = []
        """Buffers that each of the first three calls changed."""
        self.metrics: list[dict[str, float]] = []
        self.bends: list[list[Bend]] = []
        """Operations of each call that bend a scalar on the way to the loss."""
        self.params = params
        self.dtypes = {param.dtype for param in params}
        self._context, self._step, self._call = context, step, call
        self._device = context.device
        # A change of others is no state unless a later call shows it: `CouplingWatch` restores those.
        self._buffers = BufferGuard(models, persistent_only=True)
        self._per_sample = 0.0

    def compute(self, low: int, high: int, shift: int = 0, *, gradients: bool = True, anew: bool = False) -> Gradient:
        """Compute samples `low` to `high`, with random numbers of another seed for each `shift`.

        `anew`: of a batch that collate_fn makes of them alone, in place of rows cut from the larger one.
        """
        step, device, buffers = self._step, self._device, self._buffers
        # What collate_fn makes of each part: of a batch without rows, such as one of graphs, nothing can be cut out.
        part = self.cut(low, high) if self.has_rows and not anew else self.read_anew(low, high)
        key = (self._context.config.seed + shift, step.index, self._call)
        randomness.seed_all(device, *key)
        buffers.save()
        try:
            with SharedDraws(low, high - low, self.num, OwnState(device, *key, 1)) as drawn:
                result = read_result(self.quiet(part))
            self.is_half = self.is_half or drawn.saw_half
            if len(self.set_in_calls) < 3:
                self.set_in_calls.append(buffers.changed())
            buffers.forget()
            self.is_unweighted = self.is_unweighted or (
                result.weight is None and bool(describe_unweighted(part, result.loss))
            )
            units = float(high - low if result.weight is None else result.weight)
            self.bends.append(find_bends(result.loss))
            self.metrics.append({name: float(value) for name, value in result.metrics.items()})
            # As in the step, for hooks and functions that clamp the gradient of a sample.
            self._per_sample = self._per_sample or units / self.num or 1.0
            scale = units / (self._per_sample * step.batch.num_samples) or 1.0
            take_hooks(self.params)
            grads = torch.autograd.grad(result.loss * scale, self.params, allow_unused=True) if gradients else ()
        finally:
            buffers.restore()
        values: list[torch.Tensor | None] = [None if grad is None else grad / scale for grad in grads]
        return Gradient(values, float(result.loss.detach()), units, result.weight is not None)

    def draws(self) -> bool:
        """Return True if random numbers of loss_fn are not those of each sample (mixup)."""
        self.compute(0, self.num, gradients=False)
        drew = probe(self._device)
        randomness.seed_all(self._device, self._context.config.seed, self._step.index, self._call)
        return drew != probe(self._device)

    def cut(self, low: int, high: int) -> Any:
        return cut_rows(self.data, low, high, self.num_read)

    def read_anew(self, low: int, high: int) -> Any:
        return self._step.batch.read(self.first + low, self.first + high)


def take_hooks(params: Sequence[nn.Parameter]) -> None:
    """Forget hooks that loss_fn has added in these calls."""
    for param in params:
        if param._backward_hooks:
            param._backward_hooks.clear()


def probe(device: torch.device) -> tuple[float, ...]:
    """Draw from all generators, to see whether two states are equal."""
    pair = (torch.rand((), dtype=torch.float32, device=where) for where in ("cpu", device))
    return *map(float, pair), random.random(), float(np.random.random())


def _has_rows(data: Any, num_samples: int) -> bool:
    try:
        cut_rows(data, 0, 1, num_samples)
    except NoRowsError:
        return False
    return True
