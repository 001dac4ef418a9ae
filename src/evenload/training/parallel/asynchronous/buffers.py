"""`BufferChanges`: what a part changed in the buffers of the models, as the server applies it to its own.

Running statistics follow r <- (1 - m) r + m b for the statistics b of each micro-batch. A part of n of them maps r to
a r + c with a = (1 - m)^n. The worker sends c; the server computes a r + c with its own r. Of a cumulative average
(momentum None) r = S / k, the worker sends the growth of S. So the server's statistics are those of all parts in the order of
the updates, each counted once.
Integers (numbers of batches) add up; other buffers are taken from the part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class BufferChanges:
    """The buffers of some models, in one order on all ranks."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.buffers: list[torch.Tensor] = []
        self._norms: list[nn.modules.batchnorm._NormBase | None] = []
        """By buffer, the module whose running statistics it is."""
        known: set[int] = set()
        for model in models:
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is None or id(buffer) in known:
                        continue
                    known.add(id(buffer))
                    running = isinstance(module, nn.modules.batchnorm._NormBase) and name.startswith("running_")
                    self.buffers.append(buffer)
                    self._norms.append(module if running else None)  # type: ignore[arg-type]

    def save(self) -> list[torch.Tensor]:
        """Return copies of the buffers before a part."""
        return [buffer.clone() for buffer in self.buffers]

    @torch.no_grad()
    def since(self, before: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the changes since `save`, one tensor for each buffer."""
        olds = {id(buffer): old for buffer, old in zip(self.buffers, before, strict=True)}
        changes = []
        for buffer, norm in zip(self.buffers, self._norms, strict=True):
            old = olds[id(buffer)]
            if norm is not None:
                tracked = norm.num_batches_tracked
                num_before = 0 if tracked is None else int(olds[id(tracked)])
                kept, unit = _mapping(norm, num_before, 0 if tracked is None else int(tracked) - num_before)
                changes.append((buffer - kept * old) / unit)
            else:
                changes.append(buffer - old if _adds_up(buffer) else buffer.clone())
        return changes

    @torch.no_grad()
    def apply(self, changes: Sequence[torch.Tensor]) -> None:
        """Change the buffers of the server by what a part changed; `changes` come from `since`."""
        by_id = {id(buffer): change for buffer, change in zip(self.buffers, changes, strict=True)}
        for buffer, norm in zip(self.buffers, self._norms, strict=True):
            change = by_id[id(buffer)].to(buffer.device)
            if norm is not None:
                tracked = norm.num_batches_tracked
                numbers = (0, 0) if tracked is None else (int(tracked), int(by_id[id(tracked)]))
                kept, unit = _mapping(norm, *numbers)
                buffer.mul_(kept).add_(change, alpha=unit)
            elif not _adds_up(buffer):
                buffer.copy_(change)
        for buffer in filter(_adds_up, self.buffers):  # after the statistics, which need the numbers before the part
            buffer.add_(by_id[id(buffer)].to(buffer.device))


def _adds_up(buffer: torch.Tensor) -> bool:
    return not buffer.is_floating_point() and not buffer.is_complex() and buffer.dtype != torch.bool


def _mapping(norm: nn.modules.batchnorm._NormBase, before: int, num: int) -> tuple[float, float]:
    """Return a, and the unit in which c travels, for `num` micro-batches after `before` others."""
    if norm.num_batches_tracked is None:
        return 0.0, 1.0  # nobody counts: the part's statistics replace the old ones
    if norm.momentum is None:
        total = max(1, before + num)
        return before / total if num else 1.0, 1.0 / total
    return float((1.0 - norm.momentum) ** num), 1.0
