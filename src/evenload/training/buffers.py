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
    copy: torch.Tensor


class BufferGuard:
    """Saves the buffers of models before an attempt; the first attempt learns which of them change."""

    def __init__(self, models: Sequence[nn.Module] = ()) -> None:
        self._watched = [
            (module, name)
            for model in models
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if buffer is not None
        ]
        self._learnt = False
        self._saved: list[_Saved] = []

    @torch.no_grad()
    def save(self) -> None:
        """Copies what may change."""
        self._saved = []
        for module, name in self._watched:
            tensor = getattr(module, name)
            self._saved.append(_Saved(module, name, tensor, tensor._version, tensor.clone()))

    def forget(self) -> None:
        """The attempt was good."""
        if not self._learnt:
            self._learnt = True
            self._watched = [
                (saved.module, saved.name)
                for saved in self._saved
                if getattr(saved.module, saved.name) is not saved.tensor or saved.tensor._version != saved.version
            ]
        self._saved = []

    @torch.no_grad()
    def restore(self) -> None:
        """Puts back what `save` copied."""
        for saved in self._saved:
            saved.tensor.copy_(saved.copy)
            setattr(saved.module, saved.name, saved.tensor)
        self._saved = []
