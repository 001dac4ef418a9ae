"""Refuse a plain ``loss.backward()`` on a prepared model, for strategies without hooks of their own on its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from evenload.errors import StepError
from evenload.training.parallel.call_gradients import PLAIN_BACKWARD


def refuse_plain_backward(
    params: Iterable[torch.Tensor], in_backward: Callable[[], bool]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Raise StepError at a gradient that arrives while ``in_backward()`` is False; return the hooks, to be removed."""

    def arrived(param: torch.Tensor) -> None:
        if not in_backward():
            param.grad = None
            raise StepError(PLAIN_BACKWARD)

    return [param.register_post_accumulate_grad_hook(arrived) for param in params]  # type: ignore[no-untyped-call]
