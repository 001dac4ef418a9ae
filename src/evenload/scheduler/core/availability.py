"""Devices during a plan: those free now, and those that come free because a job stops."""

from __future__ import annotations

from collections.abc import Sequence

from evenload.scheduler.core.layout import Layout
from evenload.scheduler.core.placement import FreeDevices, PoolChoice


class Availability:
    """Devices free now and soon, kept in step: what is given out is removed from both."""

    def __init__(
        self, layout: Layout, pool_of: Sequence[int], packing: str, free: list[int], coming: list[int]
    ) -> None:
        """Start with the devices free now, and those of jobs that are already saving."""
        self._layout, self._pool_of, self._packing = layout, pool_of, packing
        self.now = FreeDevices(layout, free, pool_of, packing)
        self._coming = list(coming)
        self._soon: FreeDevices | None = None

    @property
    def soon(self) -> FreeDevices:
        """Devices free now or coming that were not given out; built on first use."""
        if self._soon is None:
            self._soon = FreeDevices(self._layout, [*self.now.free(), *self._coming], self._pool_of, self._packing)
        return self._soon

    @property
    def is_anything_coming(self) -> bool:
        """True if waiting for devices of other jobs can make sense."""
        return bool(self._coming) if self._soon is None else self._soon.num_free > self.now.num_free

    @property
    def is_empty(self) -> bool:
        return self.now.num_free == 0 and not self.is_anything_coming

    def take_now(self, choice: PoolChoice, num: int) -> tuple[int, ...] | None:
        devices = self.now.place(choice, num)
        if devices is not None and self._soon is not None:
            self._soon.take(devices)
        return devices

    def claim(self, choice: PoolChoice, num: int) -> tuple[int, ...] | None:
        """Take devices that are free now or soon, for a job that may have to wait for some of them."""
        devices = self.soon.place(choice, num)
        if devices is not None:
            self.now.take(devices)
        return devices

    def give_back(self, devices: Sequence[int]) -> None:
        """Make devices free: those just taken, or a job's own, of which it may keep some and exchange others."""
        self.now.give(devices)
        if self._soon is not None:
            self._soon.give(devices)

    def take_back(self, devices: Sequence[int]) -> None:
        """Undo `give_back` for devices that stay with the job."""
        self.now.take(devices)
        if self._soon is not None:
            self._soon.take(devices)

    def comes_free(self, devices: Sequence[int]) -> None:
        if self._soon is None:
            self._coming += devices
        else:
            self._soon.give(devices)
