"""A copy of an object's state in host memory, which leaves the memory of its device to the training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from evenload.training.checkpoint import files


@dataclass(frozen=True)
class HostTensor:
    """A tensor of a saved state."""

    values: torch.Tensor
    """On the CPU, shared with nothing."""
    device: torch.device
    """Where it was."""


class HostCopy:
    """The state that an object had when this was made; `restore` loads it any number of times."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._state = files.map_state(value.state_dict(), _to_host)

    def restore(self) -> None:
        """Load the state bit by bit, on the devices where it was."""
        # A module copies into its own tensors; other objects may keep what they are given.
        keeps = not isinstance(self._value, nn.Module)
        self._value.load_state_dict(files.map_state(self._state, lambda saved, _: _to_device(saved, keeps)))


def _to_host(value: Any, _: str) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return HostTensor(value.detach().to("cpu", copy=True), value.device)


def _to_device(saved: Any, keeps: bool) -> Any:
    if not isinstance(saved, HostTensor):
        return saved
    return saved.values.to(saved.device, copy=True) if keeps else saved.values


class HostBuffers:
    """Host memory for a copy of many tensors, which the next copy uses again."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies on the CPU, which are valid until the next call; wait until they are complete."""
        before, self._buffers = self._buffers, {}
        for name, tensor in tensors.items():
            if not files.is_dense(tensor):
                self._buffers[name] = tensor.detach().to("cpu", copy=True)
                continue
            buffer = before.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                # A GPU copies into pinned memory directly, one tensor after the other without the host.
                buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
            self._buffers[name] = buffer.copy_(tensor.detach(), non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return dict(self._buffers)
