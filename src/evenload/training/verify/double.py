"""Compute a model and a loss function in float64, if they allow it.

The prepared models are converted, and while loss_fn runs every float16, bfloat16 and float32 it uses becomes float64:
batches, tensors of the script, frozen models that were never prepared, and casts such as ``logits.float()``, which would
otherwise add the rounding of float32 to the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from evenload.training.verify.saved_state import Tracked

NARROW = (torch.float16, torch.bfloat16, torch.float32)
_CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)
_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}
_UNTOUCHED = _IN_PLACE | {
    "__get__",
    "__set__",
    "__delete__",
    "__setitem__",
    "view",
    "backward",
    "register_hook",
    "data_ptr",
}
"""Functions that change their argument, or depend on its identity or bits."""


class Float64Mode(TorchFunctionMode):
    """Replaces narrower floats by float64 in the arguments of torch's functions."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CASTS:
            return args[0].double()
        name = getattr(func, "__name__", "")
        changes = name in _UNTOUCHED or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs
        if not changes:
            args, kwargs = tree_map(widen, args), tree_map(widen, kwargs)
        return func(*args, **kwargs)


def widen(value: Any) -> Any:
    """Return a narrow float tensor, or a narrow dtype, as float64; anything else unchanged."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.dtype in NARROW else value
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


def in_double(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a loss function so that its arguments, and everything it computes, are in float64."""

    def wide(*values: Any) -> Any:
        with Float64Mode():
            return loss_fn(*tree_map(widen, values))

    return wide


@contextmanager
def float64(models: Sequence[nn.Module], tracked: Sequence[Tracked]) -> Iterator[None]:
    """Convert the models in place; an enclosing `saved_state.put_back` undoes that. New tensors are float64 too."""
    before = torch.get_default_dtype()
    try:
        for model in models:
            model.double()
        for one in tracked:
            one.param.data = one.param.data.double() if one.param.dtype in NARROW else one.param.data
        torch.set_default_dtype(torch.float64)
        yield
    finally:
        torch.set_default_dtype(before)
