"""Find BatchNorm that loss_fn runs in training mode in a model that was not prepared: its statistics would be one rank's."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn

from evenload.errors import StepError
from evenload.training.compute import batchnorm
from evenload.training.session.live_objects import live_objects
from evenload.training.step.context import TrainingContext


class UnpreparedNorms:
    """Watches modules during each backward only: a hook that stays would be in the user's copies and files."""

    def __init__(self, context: TrainingContext, modules: Sequence[nn.Module]) -> None:
        """`modules` are all BatchNorm modules that exist."""
        self._context = context
        self._modules = [weakref.ref(module) for module in modules if not batchnorm.has_global_statistics(module)]
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def watch(self) -> None:
        """Until `release`, a forward of a module that takes statistics of this rank alone raises StepError."""
        self.release()
        if not self._modules or self._context.config.batch_norm != "global" or self._context.num_sharing == 1:
            return
        modules = filter(None, (reference() for reference in self._modules))
        self._handles = [m.register_forward_pre_hook(self._refuse) for m in modules if _is_at_risk(m)]

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _refuse(self, module: nn.Module, _: object) -> None:
        if self._context.loop.in_backward and _is_at_risk(module):
            raise StepError(
                f"loss_fn runs {_name(module)} in training mode, and its model was not given to run.prepare: it would take the "
                "statistics of this rank's samples alone. Give the model to run.prepare too (a frozen one may be prepared; "
                "layers must be in it before), or call its .eval()"
            )


def _is_at_risk(module: nn.Module) -> bool:
    return batchnorm.takes_batch_statistics(module) and not batchnorm.has_global_statistics(module)


def _name(module: nn.Module) -> str:
    """Return the longest path of a module in the models that hold it, such as ``ResNet.layer1.0.bn1``."""
    paths = [
        f"{type(model).__name__}.{path}"
        for model in live_objects(nn.Module)
        for path, part in model.named_modules()
        if part is module and path
    ]
    return max(paths, key=len, default=type(module).__name__)
