"""Restore buffers (BatchNorm's running statistics) after a failed attempt; copies only those that change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


@dataclass(frozen=True)
class _Saved:
    module: nn.Module
    name: str
    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None
    """None for a buffer that has never changed."""

    @property
    def changed(self) -> bool:
        return self.module._buffers.get(self.name) is not self.tensor or self.tensor._version != self.version


class BufferGuard:
    """Saves the buffers of models before an attempt.

    The first attempt copies all of them and records which change; later ones copy those, and watch the others for a first
    change (large tables of constants are not copied again). A first change in the attempt that fails is not undone, unless
    it replaces the tensor.
    """

    def __init__(self, models: Sequence[nn.Module] = (), *, persistent_only: bool = False) -> None:
        self._places = [
            (module, name)
            for model in models
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if buffer is not None and not (persistent_only and name in module._non_persistent_buffers_set)
        ]
        self.are_present = bool(self._places)
        self._changing: set[tuple[nn.Module, str]] | None = None
        self._saved: list[_Saved] = []

    def save(self) -> None:
        self._saved = []
        if not self._places:
            return
        with torch.no_grad():
            for place in self._places:
                module, name = place
                tensor = module._buffers.get(name)
                if tensor is not None:
                    # torch's kernels update running statistics without a new version.
                    copied = self._changing is None or place in self._changing or isinstance(module, _NormBase)
                    copy = tensor.clone() if copied else None
                    self._saved.append(_Saved(module, name, tensor, tensor._version, copy))

    def forget(self) -> None:
        """Note which buffers the attempt changed. The copies stay until the next `save`: its gradients may never be used."""
        if self._changing is None:
            self._changing = set()
        for saved in self._saved:
            if (place := (saved.module, saved.name)) not in self._changing and saved.changed:
                self._changing.add(place)

    def changed(self) -> list[tuple[str, torch.Tensor]]:
        """Return the names and copies of the buffers that have changed since the last `save`."""
        now = ((saved.name, saved.module._buffers.get(saved.name)) for saved in self._saved if saved.changed)
        return [(name, value.detach().clone()) for name, value in now if value is not None]

    def drop(self) -> None:
        self._saved = []

    @torch.no_grad()
    def restore(self) -> None:
        for saved in self._saved:
            if saved.copy is not None:
                saved.tensor.copy_(saved.copy)
            if saved.module._buffers.get(saved.name) is not saved.tensor:
                saved.module._buffers[saved.name] = saved.tensor
        self._saved = []


@contextmanager
def buffers_restored(models: Sequence[nn.Module]) -> Iterator[None]:
    """Restore the buffers after the body."""
    guard = BufferGuard(models)
    guard.save()
    try:
        yield
    finally:
        guard.restore()
