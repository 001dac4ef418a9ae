"""A third strategy, of this file alone: whole gradients go to rank 0, which sums them, and the sum comes back to all.

Nothing in Evenload knows of it but the factory, where `register` puts it. It keeps no buckets and overlaps nothing; it shows
that a strategy is one class behind `Strategy`, and that the suite measures any of them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from evenload.balance.values import StepPlan
from evenload.errors import PeerLostError, StepError
from evenload.training.comm.groups import Groups
from evenload.training.compute import batchnorm
from evenload.training.compute.label_watch import LabelWatch
from evenload.training.compute.micro_steps import LossFn, LossSums, StepContext, run_micro_steps
from evenload.training.compute.replicated_state import replicated_state
from evenload.training.data.global_batch import GlobalBatch
from evenload.training.parallel.factory import StrategyParts, register_strategy
from evenload.training.parallel.plain_backward import refuse_plain_backward
from evenload.training.parallel.strategy import BackwardCall, LocalResult, StepResult

NAME = "gather"


def register() -> None:
    register_strategy(NAME, GatherStrategy)


class GatherStrategy:
    def __init__(self, parts: StrategyParts) -> None:
        self._parts = parts
        self._groups = parts.groups
        self._statistics = batchnorm.Statistics(parts.groups, parts.clock)
        self._context = StepContext(parts.device, parts.seed, self._statistics, parts.precision, LabelWatch().check)
        self._models: list[nn.Module] = []
        self._params: list[nn.Parameter] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._earlier: list[torch.Tensor | None] | None = None
        """Gradients from before the running call, in the order of `_params`."""
        self._touched: list[bool] = []
        self._skipped: set[int] = set()
        """Parameters of which a call of this update was skipped, by id."""
        self._running = False

    def attach(self, models: Sequence[nn.Module], groups: Groups) -> None:
        self.detach()
        self._groups = groups
        self._models = list(models)
        self._statistics.in_use = any(batchnorm.has_global_statistics(model) for model in models)
        with torch.no_grad():
            for model in models:
                for tensor in (*model.parameters(), *model.buffers()):
                    flat = tensor.detach().flatten()
                    self._broadcast(flat)
                    tensor.copy_(flat.view(tensor.shape))
        self._follow_parameters()

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._params = [], []

    def run(self, plan: StepPlan, batch: GlobalBatch, loss_fn: LossFn, call: BackwardCall) -> StepResult:
        self._follow_parameters()
        if call.begins_update:
            self._skipped.clear()
        self._earlier = [p.grad for p in self._params]
        self._touched = [False] * len(self._params)
        for p in self._params:
            p.grad = None
        sums = LossSums()
        try:
            with batchnorm.Active(self._statistics):
                run_micro_steps(
                    self._context,
                    batch,
                    loss_fn,
                    sums,
                    self._backward,
                    column=self._groups.generation.data_index,
                    call_index=call.index,
                    last_units=call.last_units,
                )
        finally:
            self._statistics.idle = False
        totals = call.exchange(
            [
                LocalResult(
                    weighted=sums.weighted,
                    units=sums.units,
                    loss_sum=float(sums.loss_sum),
                    metrics={name: float(value) for name, value in sums.metrics.items()},
                    touched_key=float(zlib.crc32(bytes(self._touched)) + (len(self._params) << 32)),
                )
            ]
        )
        correction = sums.nominal / (totals.units * self._parts.precision.scale)
        finite = self._sum(correction, totals.loss)
        return StepResult(totals.units, torch.tensor(totals.loss, dtype=sums.dtype), finite, sums.nominal)

    def rollback(self, *, together: bool) -> None:
        self._running = False
        if self._earlier is not None:
            for p, grad in zip(self._params, self._earlier, strict=True):
                p.grad = grad
            self._earlier = None

    def state_dict(self) -> Mapping[str, object]:
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        assert not state

    def fingerprint(self) -> Mapping[str, torch.Tensor]:
        return replicated_state(self._models)

    def _backward(self, loss: torch.Tensor, *, last: bool, idle: bool) -> None:
        before = [p.grad for p in self._params]
        if idle:
            for p in self._params:
                p.grad = None
        self._running = True
        loss.backward()  # type: ignore[no-untyped-call]
        self._running = False
        for index, (p, grad) in enumerate(zip(self._params, before, strict=True)):
            self._touched[index] |= p.grad is not None
            if p.grad is not None and p.grad.is_sparse:
                raise StepError(f"strategy={NAME!r} sums dense gradients: use sparse=False")
            if idle:
                p.grad = grad

    def _sum(self, correction: float, loss: float) -> bool:
        """Set the final gradients, to None if they or the loss are not finite; return whether the gradients are."""
        finite = True
        flags = torch.tensor(self._touched, dtype=torch.float64)
        self._sum_on_rank_0(flags)
        touched = (flags > 0).tolist()
        sums: dict[int, torch.Tensor] = {}
        kinds = {p.dtype: None for p in self._params}
        with torch.no_grad():
            for dtype in kinds:
                members = [
                    p for p, is_touched in zip(self._params, touched, strict=True) if is_touched and p.dtype == dtype
                ]
                if not members:
                    continue
                flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in members])
                self._sum_on_rank_0(flat)
                flat.mul_(correction)
                finite = finite and bool(flat.isfinite().all())
                for p, part in zip(members, flat.split([p.numel() for p in members]), strict=True):
                    sums[id(p)] = part.view(p.shape)
            for p, earlier, is_touched in zip(self._params, self._earlier or (), touched, strict=True):
                if is_touched and not (finite and math.isfinite(loss)):
                    self._skipped.add(id(p))
                if id(p) in self._skipped:
                    p.grad = None
                elif is_touched:
                    p.grad = sums[id(p)] if earlier is None else earlier + sums[id(p)]
                else:
                    p.grad = earlier
        self._earlier = None
        return finite

    def _sum_on_rank_0(self, flat: torch.Tensor) -> None:
        rows = [torch.empty_like(flat) for _ in self._groups.generation.computing] if self._groups.rank == 0 else None
        parts = None if rows is None else [row.view(torch.uint8) for row in rows]
        self._collect(lambda group: dist.gather(flat.view(torch.uint8), parts, group_dst=0, group=group))
        if rows is not None and self._groups.gradients is not None:
            flat.copy_(torch.stack(rows).sum(0))
        self._broadcast(flat)

    def _broadcast(self, flat: torch.Tensor) -> None:
        # As bytes: gloo does not send every dtype.
        self._collect(lambda group: dist.broadcast(flat.view(torch.uint8), group_src=0, group=group))

    def _collect(self, collective: Callable[[dist.ProcessGroup], object]) -> None:
        group = self._groups.gradients
        if group is None:
            return
        try:
            collective(group)
        except RuntimeError as error:
            raise PeerLostError(f"the gradients could not be gathered: {error}") from error

    def _follow_parameters(self) -> None:
        params = list({id(p): p for model in self._models for p in model.parameters() if p.requires_grad}.values())
        if [id(p) for p in params] == [id(p) for p in self._params]:
            return
        self.detach()
        self._params = params
        self._hooks = refuse_plain_backward(params, lambda: self._running)
