"""A copy of an object's state in host memory, which leaves the memory of its device to the training."""

from __future__ import annotations

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
