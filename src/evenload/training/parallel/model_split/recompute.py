"""Activation checkpointing across a cut: a layer whose random numbers would be others when it is computed again.

`torch.utils.checkpoint` puts back the generators of the CPU and of the GPUs that its arguments are on. A layer inside that
computes on another GPU, because its input is brought there only in its own forward, would drop other values the second time
than the first, and its gradients would be wrong without a word. So that is looked for in the first forward, and refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from evenload.errors import StepError


class Again:
    """Follows one forward of a placed model through regions that will be computed again."""

    def __init__(self) -> None:
        self._with_grad = torch.is_grad_enabled()
        self._region: int | None = None
        self._kept: set[torch.device] = set()
        self._watched: list[tuple[nn.Module, torch.device, torch.Tensor]] = []

    def begin(self, module: nn.Module, args: Any, device: torch.device) -> None:
        """A layer begins; `args` are as they came, `device` is where it computes."""
        region = self._present()
        if region is None:
            self._region = None
            return
        if region != self._region:  # its first layer: what comes in is what checkpoint was called with
            self._region = region
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self._kept = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        if device not in self._kept and (state := drawn_so_far(device)) is not None:
            self._watched.append((module, device, state))

    def end(self, module: nn.Module) -> None:
        """The layer has ended.

        Raises:
            StepError: it drew random numbers that could not be drawn again.
        """
        if not self._watched or self._watched[-1][0] is not module:
            return
        _, device, before = self._watched.pop()
        now = drawn_so_far(device)
        if now is not None and not torch.equal(now, before):
            raise StepError(
                f"a {type(module).__name__} on {device} draws random numbers inside torch.utils.checkpoint, which was called "
                "with tensors of another device and so would draw others when it computes the layer again: its gradients "
                "would be wrong. Set dropout to 0 there, or call checkpoint inside the layer"
            )

    def _present(self) -> int | None:
        """The region that the forward is in, by a number; None outside of any."""
        if self._with_grad and not torch.is_grad_enabled():
            return -1  # use_reentrant=True runs its function without gradients
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook."):
            return id(hooks[0])
        return None


def drawn_so_far(device: torch.device) -> torch.Tensor | None:
    """The state of a GPU's generator; None of the CPU's, which checkpoint always puts back."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None
