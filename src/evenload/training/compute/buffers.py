"""Buffers as they were before an attempt (BatchNorm's running statistics): copied only where they change at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class _Saved:
    module: nn.Module
    name: str
    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None
    """None of a buffer that never changed so far."""

    @property
    def changed(self) -> bool:
        return self.module._buffers.get(self.name) is not self.tensor or self.tensor._version != self.version


class BufferGuard:
    """Saves the buffers of models before an attempt.

    The first attempt copies all of them and learns which change; later ones copy those, and watch the others for a first
    change (large tables of constants are never copied again). A change that begins in the very attempt that fails is not
    undone, unless it puts another tensor in place.
    """

    def __init__(self, models: Sequence[nn.Module] = ()) -> None:
        self._places = [
            (module, name)
            for model in models
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if buffer is not None
        ]
        self._changing: set[tuple[nn.Module, str]] | None = None
        self._saved: list[_Saved] = []

    @torch.no_grad()
    def save(self) -> None:
        """Copies what may change."""
        self._saved = []
        for place in self._places:
            module, name = place
            tensor = module._buffers.get(name)
            if tensor is not None:
                copied = self._changing is None or place in self._changing
                self._saved.append(_Saved(module, name, tensor, tensor._version, tensor.clone() if copied else None))

    def forget(self) -> None:
        """The attempt was good."""
        if self._changing is None:
            self._changing = set()
        self._changing.update((saved.module, saved.name) for saved in self._saved if saved.changed)
        self._saved = []

    @torch.no_grad()
    def restore(self) -> None:
        """Puts back what `save` copied."""
        for saved in self._saved:
            if saved.copy is not None:
                saved.tensor.copy_(saved.copy)
            if saved.module._buffers.get(saved.name) is not saved.tensor:
                saved.module._buffers[saved.name] = saved.tensor
        self._saved = []
