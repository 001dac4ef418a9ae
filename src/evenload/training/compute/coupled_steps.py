"""Run one attempt of ``step.backward(encode, batch_loss=fn)`` on this rank.

    1. encode all micro-batches without a graph → put the rows of all ranks together
    2. batch_loss of the whole batch, on every rank → the gradient of each row
    3. encode each micro-batch again, with a graph → go on backward from the gradients of its rows

This is GradCache (Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", RepL4NLP 2021) over
ranks with unequal shares: memory is that of one micro-batch, and the gradient that of the whole batch. With one micro-batch
its graph is kept, and nothing is encoded twice.

Note [Twice alike]
  Both passes draw the same random numbers and begin with the same buffers, so BatchNorm's running statistics move once.

Note [Parameters of batch_loss]
  Every rank computes the same batch_loss. With a of them that have samples, each enters the sum with 1/a, so a temperature
  receives its gradient once; the rows' gradients are multiplied by a.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evenload.balance.values import StepPlan
from evenload.errors import StepError
from evenload.training.compute.batch_loss import CoupledLoss, read_rows, with_gradients
from evenload.training.compute.buffers import buffers_restored
from evenload.training.compute.micro_steps import (
    BackwardPass,
    LossFn,
    LossSums,
    StepContext,
    add_result,
    run_micro_steps,
    seed,
)
from evenload.training.compute.row_exchange import Rows, gather_rows
from evenload.training.compute.weighting import LossResult, read_result
from evenload.training.data.batches import MicroBatch
from evenload.training.data.global_batch import GlobalBatch

_COMPARE_EVERY = 32
"""Steps after which both passes are compared again; on a GPU that waits for it."""


@dataclass(frozen=True)
class _Encoded:
    """The tensors of this rank's part of a micro-batch."""

    rows: Rows
    tensors: tuple[torch.Tensor, ...]
    idle: bool


def run_steps(
    context: StepContext,
    batch: GlobalBatch,
    loss_fn: LossFn,
    sums: LossSums,
    backward: BackwardPass,
    *,
    column: int,
    call_index: int,
    last_units: float | None,
) -> None:
    """Run all micro-batches of a plan's column; see `run_micro_steps`."""
    if isinstance(loss_fn, CoupledLoss):
        _CoupledSteps(context, batch, loss_fn, column, call_index).run(sums, backward)
    else:
        run_micro_steps(
            context, batch, loss_fn, sums, backward, column=column, call_index=call_index, last_units=last_units
        )
    batch.copy_next()


def exchange_rows(plan: StepPlan, loss_fn: LossFn) -> list[Sequence[int]]:
    """Return, for each stage of an attempt in which ranks may exchange, the samples of each rank that takes part."""
    if isinstance(loss_fn, CoupledLoss):
        return [*plan.micro, plan.shares, *plan.micro]
    return list(plan.micro)


class _CoupledSteps:
    """One attempt on one rank."""

    def __init__(
        self, context: StepContext, batch: GlobalBatch, loss: CoupledLoss, column: int, call_index: int
    ) -> None:
        if context.grad_norms is not None:
            raise StepError(
                "init(batch_max=...) grows the batch by the noise of the gradients of its parts, which a loss over the whole "
                "batch has not; leave batch_max out, or batch_loss"
            )
        plan = self._plan = batch.plan
        self._context, self._batch, self._loss = context, batch, loss
        self._column, self._call_index = column, call_index
        self._own = [m for m in range(plan.num_micro) if context.computes_idle or plan.micro[m][column]]
        self._share = plan.shares[column]
        self._num_active = sum(share > 0 for share in plan.shares)
        self._keeps_graph = plan.num_micro == 1

    def run(self, sums: LossSums, backward: BackwardPass) -> None:
        context, plan = self._context, self._plan
        restored = contextlib.nullcontext() if self._keeps_graph else buffers_restored(context.models)
        with restored, torch.set_grad_enabled(self._keeps_graph):
            first = []
            for m in self._own:
                first.append(self._encode(m, stage=m))
                if not self._keeps_graph:
                    context.statistics.end(m)
        everyone = self._gather(first)
        self._run_batch_loss(everyone, sums, backward)
        with torch.enable_grad():
            for number, m in enumerate(self._own):
                stage = m if self._keeps_graph else plan.num_micro + 1 + m
                if self._keeps_graph:
                    encoded = first[number]
                    context.statistics.begin(stage, idle=encoded.idle)
                else:
                    encoded = self._encode(m, stage=stage)
                    self._compare(encoded, everyone)
                backward(self._root(encoded, everyone), last=m == self._own[-1], idle=encoded.idle)
                context.statistics.end(stage)

    def _encode(self, m: int, *, stage: int) -> _Encoded:
        context, plan = self._context, self._plan
        context.check()
        micro: MicroBatch = self._batch.micro(m, self._column, context.device)
        context.statistics.begin(stage, idle=micro.idle)
        seed(context, self._batch, self._call_index, m, self._column)
        with context.precision.autocast():
            returned = self._loss.encode(micro.data)
        low, high = plan.slice_of(m, self._column)
        tensors = read_rows(returned, max(high - low, 1))
        return _Encoded((low - plan.start, high - plan.start), tensors, micro.idle)

    def _gather(self, encoded: Sequence[_Encoded]) -> list[torch.Tensor]:
        """Return the tensors of the whole global batch as leaves of a graph."""
        plan, statistics = self._plan, self._context.statistics
        statistics.begin(plan.num_micro, idle=not self._share)
        own = [(one.rows, one.tensors) for one in encoded if not one.idle]
        with torch.no_grad():
            everyone = gather_rows(own, encoded[0].tensors, plan.num_samples, statistics, self._context.device)
        statistics.end(plan.num_micro)
        return [t.requires_grad_() if t.is_floating_point() or t.is_complex() else t for t in everyone]

    def _run_batch_loss(self, everyone: Sequence[torch.Tensor], sums: LossSums, backward: BackwardPass) -> None:
        context, idle = self._context, not self._share
        context.check()
        # A BatchNorm inside batch_loss has the whole batch: nothing of other ranks belongs to it.
        context.statistics.begin(None, idle=idle)
        # The same numbers on all ranks.
        seed(context, self._batch, self._call_index)
        with torch.enable_grad():
            with context.precision.autocast():
                result = self._read(self._loss.batch_loss(*everyone))
            factor = context.precision.scale / self._num_active
            backward(result.loss if factor == 1.0 else result.loss * factor, last=False, idle=idle)
        sums.nominal = float(self._plan.num_samples)
        add_result(sums, result, float(self._share))

    def _read(self, returned: Any) -> LossResult:
        result = read_result(returned)
        if result.weight is not None and not float(result.weight):
            raise StepError(
                f"step {self._batch.global_step}: batch_loss returned a weight of 0, so its mean is undefined"
            )
        # The whole batch's mean is the step's, over whatever units.
        return result._replace(weight=None)

    def _root(self, encoded: _Encoded, everyone: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what to run the backward of a micro-batch from."""
        if not any(tensor.requires_grad for tensor in encoded.tensors):
            raise StepError(
                "no tensor that encode returned depends on a trainable parameter; was it computed under torch.no_grad, "
                "detached, or are all parameters of the encoder frozen? A module that only batch_loss uses belongs in encode"
            )
        tensors, gradients = [], []
        for tensor, leaf in zip(encoded.tensors, everyone, strict=True):
            if tensor.requires_grad and leaf.grad is not None:
                low, high = encoded.rows
                tensors.append(tensor)
                gradients.append(
                    torch.zeros_like(tensor) if encoded.idle else (leaf.grad[low:high] * float(self._num_active))
                )
        return with_gradients(tensors, gradients, self._context.device)

    def _compare(self, encoded: _Encoded, everyone: Sequence[torch.Tensor]) -> None:
        """Raise StepError if encode returned other values for the same samples than in the first pass."""
        if encoded.idle or self._batch.global_step % _COMPARE_EVERY:
            return
        low, high = encoded.rows
        with torch.no_grad():
            for tensor, leaf in zip(encoded.tensors, everyone, strict=True):
                if not tensor.is_floating_point():
                    continue
                gap = float((tensor.double() - leaf[low:high].double()).norm())
                norm = float(tensor.double().norm())
                if gap > math.sqrt(torch.finfo(tensor.dtype).eps) * norm:
                    raise StepError(
                        f"encode, called a second time for the same samples, returned other values ({gap / norm:.1e} of their "
                        "norm): with batch_loss and several micro-batches it is called twice, and must do the same. Does it "
                        "draw from a generator of its own, count its calls, or change its batch in place? (Under dp, random "
                        "and numpy belong to all replicas.) Draw by torch, or set micro_batch so that one is enough"
                    )
