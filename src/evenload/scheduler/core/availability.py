"""Devices while a plan is made: those free now, and those that come free because somebody stops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from evenload.scheduler.core.layout import Layout
from evenload.scheduler.core.placement import FreeDevices, PoolChoice


class Availability:
    """Two fleets kept in step: what is given out is gone from both."""

    def __init__(
        self, layout: Layout, pool_of: Sequence[int], packing: str, free: list[int], coming: list[int]
    ) -> None:
        """Starts with the devices free now, and those of jobs that are saving already."""
        self._layout, self._pool_of, self._packing = layout, pool_of, packing
        self.now = FreeDevices(layout, free, pool_of, packing)
        self._coming = list(coming)
        self._soon: FreeDevices | None = None

    @property
    def soon(self) -> FreeDevices:
        """Free now or coming, and not given out; made when first asked for."""
        if self._soon is None:
            self._soon = FreeDevices(self._layout, [*self.now.free(), *self._coming], self._pool_of, self._packing)
        return self._soon

    @property
    def is_anything_coming(self) -> bool:
        """Whether waiting for devices of others can make sense."""
        return bool(self._coming) if self._soon is None else self._soon.num_free > self.now.num_free

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to give out, now or soon."""
        return self.now.num_free == 0 and (not self._coming if self._soon is None else self._soon.num_free == 0)

    def take_now(self, choice: PoolChoice, num: int) -> tuple[int, ...] | None:
        """Devices that are free now."""
        devices = self.now.place(choice, num)
        if devices is not None and self._soon is not None:
            self._soon.take(devices)
        return devices

    def claim(self, choice: PoolChoice, num: int) -> tuple[int, ...] | None:
        """Devices that are free now or soon, kept for somebody who may have to wait for some of them."""
        devices = self.soon.place(choice, num)
        if devices is not None:
            self.now.take(devices)
        return devices

    def give_back(self, devices: Iterable[int]) -> None:
        """Devices just taken are not wanted after all."""
        devices = tuple(devices)
        self.now.give(devices)
        if self._soon is not None:
            self._soon.give(devices)

    def lend(self, devices: Iterable[int]) -> None:
        """A job's own devices, as if they were free now: it may keep some of them and exchange others."""
        self.give_back(devices)

    def unlend(self, devices: Iterable[int]) -> None:
        """They are the job's own again."""
        devices = tuple(devices)
        self.now.take(devices)
        if self._soon is not None:
            self._soon.take(devices)

    def comes_free(self, devices: Iterable[int]) -> None:
        """Somebody will give these up."""
        if self._soon is None:
            self._coming += devices
        else:
            self._soon.give(devices)
