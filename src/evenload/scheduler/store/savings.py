"""The cost of devices held, and what the same work would have cost at once on the fastest kind that a job may use. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from evenload.scheduler.core.layout import Layout, layout_of
from evenload.scheduler.core.values import Device, Needs
from evenload.scheduler.policies.deadlines import offers_of
from evenload.scheduler.store.ledger import AttemptRecord
from evenload.scheduler.tariff import Tariff, tariff_of

_DAY_S = 86400.0


@dataclass
class Prices:
    """Prices of a queue, and up to when each job's work would have been done under ``default``."""

    devices: Mapping[str, Device]
    cheap_hours: str
    midnight_s: Callable[[float], float]
    """Returns the last midnight before a time, by the hours of the day that hold then."""
    _done_s: dict[str, float] = field(default_factory=dict)

    @cached_property
    def _layout(self) -> Layout:
        return layout_of(self.devices.values())

    def cost(self, names: Sequence[str], began_s: float, ended_s: float) -> float:
        """Return what the devices of these names cost over a span of time; a device that is gone costs nothing."""
        held = [self.devices[name] for name in names if name in self.devices]
        return sum(
            tariff.cost(device.price_per_hour, device.cheap_price_per_hour, from_s, until_s)
            for from_s, until_s, tariff in self._spans(began_s, ended_s)
            for device in held
        )

    def _spans(self, began_s: float, ended_s: float) -> Iterator[tuple[float, float, Tariff]]:
        """Yield a span of time in parts between changes of summer time, each with its tariff."""
        first, last = (tariff_of(self.cheap_hours, self.midnight_s(at_s)) for at_s in (began_s, ended_s))
        half_s = (began_s + ended_s) / 2
        shift_s = (last.midnight_s - first.midnight_s) % _DAY_S
        if not first.spans or min(shift_s, _DAY_S - shift_s) < 1.0 or ended_s - began_s < 1.0:
            yield began_s, ended_s, first
        else:
            yield from self._spans(began_s, half_s)
            yield from self._spans(half_s, ended_s)

    def cost_of(self, attempts: Iterable[AttemptRecord], now_s: float) -> float:
        """Return what attempts cost so far."""
        return sum(
            self.cost(attempt.devices, attempt.began_s, now_s if attempt.ended_s is None else attempt.ended_s)
            for attempt in attempts
        )

    def usual_cost(
        self, job: str, needs: Needs, submitted_s: float, names: Sequence[str], began_s: float, ended_s: float
    ) -> float:
        """Return the cost of the same work as ``default`` would place it, without waiting.

        The attempt's seconds, times its devices' speed over that of the fastest kind the job may use, at that kind's prices,
        from the job's submission on without a pause. To be called for a job's attempts in their order, each once.
        """
        held = [self.devices[name] for name in names if name in self.devices]
        offers = offers_of(self._layout, needs)
        if not held or not offers:
            return self.cost(names, began_s, ended_s)
        at_s = self._done_s.get(job, submitted_s)
        seconds = (ended_s - began_s) * min(device.speed for device in held) / offers[0].speed
        self._done_s[job] = at_s + seconds
        return len(names) * sum(
            tariff.cost(offers[0].price, offers[0].cheap_price, from_s, until_s)
            for from_s, until_s, tariff in self._spans(at_s, at_s + seconds)
        )
