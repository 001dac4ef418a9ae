"""`evenload verify`: compare the first step of the user's script on the real split with one process of plain PyTorch.

At each step.backward of the step, on all ranks:

    float64 if loss_fn allows it → the real split → (rank 0) one process → compare → test the causes of a difference

Then everything is restored and the script continues, so that the next call of the step (a GAN) starts from the same state.
The script ends with the body of the step. Nothing is written into the run folder (job/client.py, state.py).
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenload.errors import StepError
from evenload.training.comm.control import Operation
from evenload.training.compute import randomness
from evenload.training.compute.batchnorm import has_global_statistics
from evenload.training.compute.micro_steps import LossFn
from evenload.training.compute.out_of_memory import is_out_of_memory
from evenload.training.compute.precision import Precision
from evenload.training.compute.weighting import read_result
from evenload.training.step.context import TrainingContext, device_names
from evenload.training.step.plan_source import FixedProportions, PlanSource
from evenload.training.step.step import Step, StepListener
from evenload.training.verify.diagnosis import Diagnosis
from evenload.training.verify.double import float64, in_double
from evenload.training.verify.findings import NARROW_INSIDE, TOLERANCES, CallReport, DifferenceCause, VerifyReport
from evenload.training.verify.saved_state import (
    Tracked,
    batch_norms,
    params_key,
    put_back,
    switched_off,
    tracked_parameters,
)
from evenload.training.verify.sides import Variant, VerifyCall

_STOP = -1


class Verifier(StepListener):
    """Verifies the first step of a script that calls `step.backward`, and writes a report."""

    def __init__(self, context: TrainingContext, models: Sequence[nn.Module]) -> None:
        self._context = context
        self._models = models
        self._calls: list[CallReport] = []
        self._done = False

    def plan_source(self) -> PlanSource | None:
        """Return uneven shares for a loader, unless the user set some: equal ones hide forgotten weights."""
        world_size = self._context.groups.world_size
        if self._context.config.balance != "auto" or world_size == 1:
            return None
        return FixedProportions(range(2 * world_size - 1, 0, -2))

    def on_begin(self, step: Step) -> None:
        """End the script here after a `break` out of the verified step."""
        if self._done:
            raise SystemExit(0)

    def on_backward(self, step: Step, loss_fn: LossFn) -> None:
        context, models = self._context, self._models
        keys = context.control.exchange(Operation.BACKWARD, params_key(models))
        tracked = tracked_parameters(models)
        context.engine.strategy.detach()
        with randomness.set_aside(context.device), _uncompiled(models):
            why_not = self._try_float64(step, loss_fn, tracked)
            report = self._verify(step, loss_fn, tracked, why_not)
            (again,) = self._agree(int(_looks_narrow(report)) if report is not None else 0)
            if again:
                gap = report.comparisons[0].difference if report is not None else math.nan
                why_not = f"an operation inside computes in less than float64: a difference of {gap:.1e} was left"
                report = self._verify(step, loss_fn, tracked, why_not)
        # Not after an error: attaching is a collective, and the other ranks may be gone.
        context.engine.strategy.attach(models, context.groups)
        if report is not None:
            self._calls.append(_with_ranks(report, keys))

    def on_end(self, step: Step) -> None:
        if self._done:
            return
        self._done = True
        context = self._context
        path = context.spec.options.get("report")
        if context.groups.rank == 0 and path:
            report = VerifyReport(
                equal=all(call.equal for call in self._calls),
                step=step.index,
                devices=tuple(device_names(context)),
                precision=context.config.precision,
                calls=tuple(self._calls),
            )
            Path(path).write_text(json.dumps(report.table()))
        # Raised here after a `break` it would be lost (the generator is being closed); then `on_begin` ends the script.
        if not isinstance(sys.exception(), GeneratorExit):
            raise SystemExit(0)

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _agree(self, own: int) -> list[int]:
        return self._context.control.agree([own] if self._context.groups.rank == 0 else None)

    def _try_float64(self, step: Step, loss_fn: LossFn, tracked: Sequence[Tracked]) -> str:
        """Return why the ranks can't compute the step in float64; empty if they can."""
        why_not = ""
        norms = [module for _, module in batch_norms(self._models)]
        data = step.batch.micro(0).data
        with put_back(self._models, tracked):
            try:
                # Without BatchNorm: one sample may be too few for it, and it would call other ranks.
                with float64(self._models, tracked), switched_off(norms), torch.enable_grad():
                    loss = read_result(in_double(loss_fn)(data)).loss
                    if loss.dtype != torch.float64:
                        why_not = f"the loss is still {str(loss.dtype).removeprefix('torch.')}"
                    loss.backward()  # type: ignore[no-untyped-call]
            except Exception as error:  # the script's code may raise anything in a dtype it was not written for
                why_not = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        rows = self._context.control.exchange(Operation.BACKWARD, [float(bool(why_not))])
        failed = [rank for rank, row in enumerate(rows) if row[0]]
        if failed and not why_not:
            why_not = f"rank {', '.join(map(str, failed))} can't"
        return why_not

    def _verify(
        self, step: Step, loss_fn: LossFn, tracked: Sequence[Tracked], why_not_float64: str
    ) -> CallReport | None:
        """Compare both sides, in float64 unless there is a reason not to; return the report on rank 0."""
        context = self._context
        wide = not why_not_float64
        precision = Precision("no" if wide else context.config.precision, context.device)
        precision.load_state_dict(context.engine.precision.state_dict())
        batch = step.batch
        for m in range(batch.plan.num_micro):
            batch.micro(m)  # read before torch's default dtype changes
        call = VerifyCall(
            context=context,
            models=self._models,
            tracked=tracked,
            batch=batch,
            planner=step.planner,
            loss_fn=loss_fn,
            call_index=step.stats.calls,
            wide=wide,
            precision=precision,
            default_dtype=torch.get_default_dtype(),
        )
        dtype = "float64" if wide else _dtype_name(context.config.precision, tracked)
        diagnosis = Diagnosis(call, TOLERANCES[dtype])
        with put_back(self._models, tracked), float64(self._models, tracked) if wide else contextlib.nullcontext():
            variant = Variant()
            wire = context.wire is not None and context.wire.format is not None
            difference = call.split(variant, wire=True).distance(call.split(variant)) if wire else 0.0
            while True:
                split = call.split(variant)
                code = _STOP
                if context.groups.rank == 0:
                    with _explained_memory(call):
                        one = call.one_process(call.slices(), variant)
                        following = diagnosis.add(variant, split, one)
                    code = _STOP if following is None else following.code()
                (code,) = self._agree(code)
                if code == _STOP:
                    break
                variant = Variant.of(code)
        if context.groups.rank != 0:
            return None
        plan = batch.plan
        return CallReport(
            call=step.stats.calls,
            shares=plan.shares,
            num_micro=plan.num_micro,
            num_samples=plan.num_samples,
            dtype=dtype,
            why_not_float64=why_not_float64,
            tolerance=diagnosis.tolerance,
            equal=diagnosis.equal,
            comparisons=tuple(diagnosis.comparisons),
            causes=tuple(diagnosis.causes),
            notes=tuple(
                _notes(self._models, plan.shares, diagnosis.comparisons[-1].norm) + _wire_notes(context, difference)
            ),
        )


def _looks_narrow(report: CallReport) -> bool:
    """Return whether the difference looks like rounding in float32, although float64 was requested."""
    return (
        report.dtype == "float64"
        and not report.equal
        and all(cause.kind == "unknown" for cause in report.causes)
        and report.comparisons[-1].difference <= NARROW_INSIDE
    )


def _with_ranks(report: CallReport, keys: Sequence[Sequence[float]]) -> CallReport:
    different = [rank for rank, row in enumerate(keys) if list(row) != list(keys[0])]
    if not different:
        return report
    cause = DifferenceCause(
        "ranks",
        f"before this call the parameters of rank {', '.join(map(str, different))} differed from those of rank 0: they were "
        "changed after run.prepare on some ranks only (weights loaded by rank 0, an update outside of the gradients)",
        "load weights on all ranks, or before run.prepare, which copies those of rank 0 to all",
    )
    return replace(report, equal=False, causes=(cause, *report.causes))


def _dtype_name(precision: str, tracked: Sequence[Tracked]) -> str:
    if precision != "no":
        return {"bf16": "bfloat16", "fp16": "float16"}[precision]
    names = {str(one.param.dtype).removeprefix("torch.") for one in tracked}
    return next((name for name in ("bfloat16", "float16", "float32") if name in names), "float64")


def _notes(models: Sequence[nn.Module], shares: Sequence[int], norm: float) -> list[str]:
    notes = []
    if norm == 0.0:
        notes.append("the gradient is 0, so nothing was compared")
    if len(shares) == 1:
        notes.append("there is one rank, so nothing was split; use -d cpu:2 (or -d 0,0) for two")
    elif len(set(shares)) == 1:
        notes.append(
            "the shares are equal, which hides forgotten weights; without --balance and init(balance=...) they are uneven"
        )
    if any(not has_global_statistics(module) for _, module in batch_norms(models)) and len(shares) > 1:
        notes.append("the model has BatchNorm modules that take statistics of one rank alone")
    if _is_compiled(models):
        notes.append("compiled models ran uncompiled")
    return notes


def _wire_notes(context: TrainingContext, difference: float) -> list[str]:
    if context.config.strategy == "local":
        return [
            "all ranks were compared as one island. In a run with strategy=local each island follows its own part of the data "
            "between two synchronisations, which is not the training of one device"
        ]
    if context.wire is None or context.groups.world_size == 1:
        return []
    if context.wire.format is None:
        return ["wire=auto begins with fp32, which was compared; a run reports what it chooses, and what that changes"]
    return [
        f"with wire={context.wire.name} this gradient differs from the exact one by {difference:.1e} (‖Δg‖/‖g‖); what it lacks "
        "is added to the next one. The comparison above is without it"
    ]


def _is_compiled(models: Sequence[nn.Module]) -> bool:
    return any(
        type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        for model in models
        for module in model.modules()
    )


def _uncompiled(models: Sequence[nn.Module]) -> contextlib.AbstractContextManager[Any]:
    # Parts of a batch differ in shape, and float64 in dtype: each would be compiled again.
    return torch.compiler.set_stance("force_eager") if _is_compiled(models) else contextlib.nullcontext()


@contextlib.contextmanager
def _explained_memory(call: VerifyCall) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        largest = max(high - low for low, high in call.slices())
        raise StepError(
            f"one process computes micro-batches of {largest} samples whole, and rank 0 ran out of memory; set "
            "--micro-batch lower"
        ) from error
