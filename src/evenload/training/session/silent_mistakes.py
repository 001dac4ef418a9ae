"""`SilentMistakes`: report once what raises no error and trains less than the script means to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from evenload.training.parallel.call_gradients import is_sharded
from evenload.training.step.context import TrainingContext
from evenload.training.step.step import Step, StepListener
from evenload.training.step.step_loader import StepLoader

NUM_STEPS = 10
"""Steps after which some weight must have changed: fp16 skips the first ones until its scale fits."""
_NUM_WATCHED, _NUM_VALUES = 16, 8
"""Parameters that are watched, and values of each."""
_CHANGED_BY_MODE = (_DropoutNd, _BatchNorm)


class SilentMistakes(StepListener):
    def __init__(self, context: TrainingContext, models: Sequence[nn.Module], loaders: Sequence[StepLoader]) -> None:
        """`models`, `loaders`: what was prepared; the lists grow."""
        self._context = context
        self._models = models
        self._loaders = loaders
        self._resumed_epoch = 0
        self.num_looks = 0
        self._watched: list[tuple[nn.Parameter, int, torch.Tensor]] = []
        """Parameters, with their versions and first values at the first step."""
        self._has_noted_mode = self._has_noted_update = False
        self._in_evaluation: dict[int, nn.Module] | None = None
        """In a step whose modes are looked at: the models that were in evaluation mode after each backward; None before."""
        self._looks_at_mode = False

    @property
    def rests(self) -> bool:
        return self.num_looks > NUM_STEPS

    def on_begin(self, step: Step) -> None:
        """Look at the first `NUM_STEPS` of a session and one more, and at the first of each epoch."""
        # Not in each step, which has no microsecond to spare.
        if step.arm or (self.num_looks > NUM_STEPS and step.batch.plan.step):
            return
        self._looks_at_mode = not (step.batch.plan.step and self.num_looks)
        self._check_epochs(step)
        if self.num_looks == 0:
            every = (p for model in self._models for p in model.parameters())
            trained = [p for p in every if p.requires_grad and not is_sharded(p)]
            self._watched = [(p, p._version, _first_values(p).clone()) for p in trained[:_NUM_WATCHED]]
        elif self.num_looks == NUM_STEPS:
            self._check_update(step)
        self.num_looks += 1

    def on_gradients(self, step: Step) -> None:
        # Not as the step begins or ends: a loop body, or loss_fn, may call train(), and evaluate after the optimizer.
        if self._looks_at_mode and not self._has_noted_mode:
            found = {id(model): model for model in self._models if not model.training}
            before = found if self._in_evaluation is None else self._in_evaluation
            self._in_evaluation = {key: model for key, model in found.items() if key in before}

    def on_end(self, step: Step) -> None:
        models, self._in_evaluation = self._in_evaluation, None
        for model in models.values() if models else ():
            self._check_mode(step, model)
        self._looks_at_mode = False

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """Report that the step's gradients were removed before an optimizer could use them."""
        step, loop = self._context.loop.step, self._context.loop
        if self._has_noted_update or step is None or loop.in_backward or not step.stats.calls or step.stats.skipped:
            return
        first = optimizer.param_groups[0]["params"]
        if first and first[0].grad is not None:
            return  # as in nearly every step
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        own = self._context.engine.parameters
        if loop.optimizer_stepped or any(p.grad is not None for p in parameters) or own.with_gradients(1):
            return
        self._has_noted_update = True
        self._context.recorder.event(
            "no_gradients",
            "NOTHING IS TRAINED: the gradients were removed between step.backward and optimizer.step(); call them in this order: "
            "step.backward(loss_fn), optimizer.step(), optimizer.zero_grad()",
            step=step.index,
        )

    def _check_epochs(self, step: Step) -> None:
        """Report a resumed script that goes from epoch to epoch without having asked with which one to begin."""
        if self.num_looks == 0:
            self._resumed_epoch = step.epoch
        elif step.epoch > self._resumed_epoch > 0:
            began, self._resumed_epoch = self._resumed_epoch, 0
            if not any(loader.epoch_was_read for loader in self._loaders):
                self._context.recorder.event(
                    "epoch_not_read",
                    f"RESUMED AT EPOCH {began}, NOW IN EPOCH {step.epoch}, and the script has never read loader.epoch: a loop "
                    "like `for epoch in range(N)` counts from 0 again and trains N more epochs. Write `for epoch in "
                    "range(loader.epoch, N)`. (A loop that ends by step.index, or counts from a value of run.resume, is right)",
                    step=step.index,
                )

    def _check_update(self, step: Step) -> None:
        watched, self._watched = self._watched, []
        if self._has_noted_update:
            return
        # The values, for an update through ``.data``, only where the versions leave no other: reading them waits for a GPU.
        if watched and all(p._version == version and torch.equal(_first_values(p), old) for p, version, old in watched):
            self._context.recorder.event(
                "no_update",
                f"NOTHING IS TRAINED: no weight has changed in {NUM_STEPS} steps; call optimizer.step() after "
                "step.backward(loss_fn), then optimizer.zero_grad(), with an optimizer of the model's parameters",
                step=step.index,
            )

    def _check_mode(self, step: Step, model: nn.Module) -> None:
        if self._has_noted_mode or not any(p.requires_grad for p in model.parameters()):
            return
        found = {type(module).__name__ for module in model.modules() if isinstance(module, _CHANGED_BY_MODE)}
        if found:
            self._has_noted_mode = True
            self._context.recorder.event(
                "eval_mode",
                f"{type(model).__name__} trains in evaluation mode: {', '.join(sorted(found))} "
                f"{'do' if len(found) > 1 else 'does'} not act as in training; call model.train() before the loop, after "
                "each model.eval()",
                step=step.index,
            )


def _first_values(param: torch.Tensor) -> torch.Tensor:
    return param.detach().flatten()[:_NUM_VALUES]
