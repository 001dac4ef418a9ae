"""Refuse activation checkpointing that would recompute a layer with different random numbers.

`torch.utils.checkpoint` restores the generators of the CPU and of the GPUs that its arguments are on. A layer inside that
computes on another GPU, because its input is moved there only in its own forward, would drop different values in the
recomputation, and its gradients would be silently wrong. The first forward detects and refuses that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from evenload.errors import StepError


class RecomputeGuard:
    """Follow one forward of a split model through regions that will be recomputed."""

    def __init__(self) -> None:
        self._with_grad = torch.is_grad_enabled()
        self._region: int | None = None
        self._kept: set[torch.device] = set()
        self._watched: list[tuple[nn.Module, torch.device, torch.Tensor]] = []

    def begin(self, module: nn.Module, args: Any, device: torch.device) -> None:
        """Begin a layer that computes on `device`; `args` are not yet moved there."""
        region = self._find_region()
        if region is None:
            self._region = None
            return
        if region != self._region:  # its first layer, whose input is that of checkpoint
            self._region = region
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self._kept = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        if device not in self._kept and (state := generator_state(device)) is not None:
            self._watched.append((module, device, state))

    def end(self, module: nn.Module) -> None:
        """End a layer; StepError if it drew random numbers that could not be drawn again."""
        if not self._watched or self._watched[-1][0] is not module:
            return
        _, device, before = self._watched.pop()
        now = generator_state(device)
        if now is not None and not torch.equal(now, before):
            raise StepError(
                f"a {type(module).__name__} on {device} draws random numbers inside torch.utils.checkpoint, which was called "
                "with tensors of another device and so would draw different ones when it recomputes the layer: its gradients "
                "would be wrong. Set dropout to 0 there, or call checkpoint inside the layer"
            )

    def _find_region(self) -> int | None:
        """Return a number for the region that the forward is in; None outside of regions."""
        if self._with_grad and not torch.is_grad_enabled():
            return -1  # use_reentrant=True runs its function without gradients
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook."):
            return id(hooks[0])
        return None


def generator_state(device: torch.device) -> torch.Tensor | None:
    """Return the state of a GPU's generator; None for the CPU's, which checkpoint always restores."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None
