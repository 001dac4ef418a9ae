"""Precision of a step: autocast, and the dynamic scale of the loss in fp16.

The rule of the scale is torch.amp.GradScaler's (halve at a non-finite gradient, double after 2,000 good steps). All ranks
decide the same because they check the reduced gradient. Scales are powers of two: they cost no rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self._device = device
        self.scaled = name == "fp16"
        self.scale = 2.0**16 if self.scaled else 1.0
        self._good_steps = 0

    growth_interval_steps = 2000

    def run(self, function: Callable[[Any], Any], value: Any) -> Any:
        """Return ``function(value)``, computed in this precision."""
        if self.name == "no":
            return function(value)
        with self.autocast():
            return function(value)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.name == "no":
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=_DTYPES[self.name])

    def update(self, finite: bool) -> None:
        if not self.scaled:
            return
        if not finite:
            self.scale = max(self.scale / 2.0, 1.0)
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps >= self.growth_interval_steps:
            self.scale *= 2.0
            self._good_steps = 0

    @property
    def exhausted(self) -> bool:
        """True if the scale can't explain a non-finite gradient any more."""
        return self.scale <= 1.0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": float(self._good_steps)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load a saved scale, if this run scales."""
        if self.scaled:
            self.scale = state["scale"]
            self._good_steps = int(state["good_steps"])
