"""`UnreadLog`: what `run.log` received while it lay on a device, in the order of the calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from evenload.records.recorder import as_float, is_media
from evenload.training.compute.device_read import DeviceRead, scalars_on


class LoggedLine(NamedTuple):
    step: int
    numbers: dict[str, float]
    names: tuple[str, ...]
    """Of the values that lie on a device."""
    values: DeviceRead | None


class UnreadLog:
    """Begins to read values of a device when they are logged, and writes them when their step is recorded."""

    def __init__(
        self, write: Callable[[Mapping[str, Any], int], None], *, is_late: type[torch.Tensor] | None = None
    ) -> None:
        """`write` takes numbers and their step. Tests set `is_late`: tensors of this type count as values of a device."""
        self._write = write
        self._is_late = is_late
        self._lines: deque[LoggedLine] = deque()

    @property
    def is_waiting(self) -> bool:
        return bool(self._lines)

    def add(self, metrics: Mapping[str, Any], step: int) -> None:
        """Take the values of one call.

        Raises:
            StepError: a value is neither one number nor an image, a text, a histogram or a table.
        """
        late = {str(name): value for name, value in metrics.items() if self._lies_on_device(value)}
        if not late and not self._lines:
            self._write(metrics, step)
            return
        shown = {str(name): value for name, value in metrics.items() if str(name) not in late and is_media(name, value)}
        apart = late.keys() | shown.keys()
        numbers = {str(name): as_float(name, value) for name, value in metrics.items() if str(name) not in apart}
        if shown:
            self._write(shown, step)  # in no order with numbers
        if not late and not numbers:
            return
        read = None
        if late:
            device = next(iter(late.values())).device
            read = DeviceRead(scalars_on(device, list(late.values())))
        self._lines.append(LoggedLine(step, numbers, tuple(late), read))

    def write(self, up_to: int | None = None, *, waits: bool = True) -> None:
        """Write what was logged in steps up to this one, or all of it; without `waits` only what the host has."""
        while self._lines and (up_to is None or self._lines[0].step <= up_to):
            line = self._lines[0]
            if not waits and line.values is not None and not line.values.is_here:
                return
            self._lines.popleft()
            late = [] if line.values is None else line.values.read()
            self._write({**line.numbers, **dict(zip(line.names, late, strict=True))}, line.step)

    def _lies_on_device(self, value: Any) -> bool:
        # A tensor with several elements is refused by the recorder, at once.
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.is_complex():
            return False
        return value.is_cuda or (self._is_late is not None and isinstance(value, self._is_late))
