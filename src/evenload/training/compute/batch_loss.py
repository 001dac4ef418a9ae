"""A loss over the whole global batch: `encode` gives tensors for a micro-batch, `batch_loss` takes those of all samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evenload.errors import StepError

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class CoupledLoss:
    """Both functions of ``step.backward(encode, batch_loss=fn)``."""

    encode: Callable[[Any], Any]
    batch_loss: Callable[..., Any]

    def __call__(self, data: Any) -> Any:
        """Return the loss as if `data` were the whole global batch."""
        tensors = self.encode(data)
        return self.batch_loss(*(tensors if isinstance(tensors, tuple | list) else (tensors,)))


def wrap(loss_fn: Callable[[Any], Any], wrapper: Wrapper) -> Callable[[Any], Any]:
    """Wrap a loss function, or both functions of a `CoupledLoss`."""
    if isinstance(loss_fn, CoupledLoss):
        return CoupledLoss(wrapper(loss_fn.encode), wrapper(loss_fn.batch_loss))
    return wrapper(loss_fn)


def read_rows(returned: Any, num_samples: int) -> tuple[torch.Tensor, ...]:
    """Return the tensors that encode returned for a micro-batch, each of shape ``(num_samples, ...)``.

    Raises:
        StepError: another value, or another number of rows.
    """
    tensors = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
    if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        kinds = ", ".join(type(value).__name__ for value in tensors) or "nothing"
        raise StepError(
            f"encode returned {kinds}; with batch_loss it returns a tensor or a tuple of tensors, samples first: those of "
            "the whole global batch are the arguments of batch_loss"
        )
    for index, tensor in enumerate(tensors):
        if tensor.dim() == 0 or tensor.shape[0] != num_samples:
            hint = ""
            if tensor.dim() and num_samples and tensor.shape[0] % num_samples == 0:
                count = tensor.shape[0] // num_samples
                hint = f"; it has {count} rows per sample (views?): return them as {count} tensors, or as one of shape "
                hint += f"({num_samples}, {count}, ...)"
            raise StepError(
                f"encode returned a tensor of shape {tuple(tensor.shape)} (number {index}) for {num_samples} samples; with "
                "batch_loss its first dimension is that of the samples it received, so that those of all devices can be put "
                f"together{hint}"
            )
        if tensor.layout != torch.strided:
            raise StepError(f"encode returned a tensor of layout {tensor.layout}; return dense ones")
    return tensors


class _WithGradients(torch.autograd.Function):
    """A zero whose backward gives tensors the gradients that were computed elsewhere, whatever it is multiplied by."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], anchor: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return anchor.detach().clone()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.gradients


def with_gradients(
    tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Return a scalar zero whose backward continues in the graphs of `tensors` with their gradients."""
    # It has a graph even where no tensor has one, so that a backward of nothing is no error.
    anchor = torch.zeros((), device=device, requires_grad=True)
    root: torch.Tensor = _WithGradients.apply(list(gradients), anchor, *tensors)  # type: ignore[no-untyped-call]
    return root
