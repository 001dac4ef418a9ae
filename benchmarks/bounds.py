"""Lower bounds of what any policy can reach on a recorded workload, by linear programs (SciPy).

Both are fluid in time: a job's work is divided over intervals between which nothing changes, and it may run on part of an
interval. They know all jobs beforehand and lose nothing by stops; a start costs `START_S`. So no policy is below them, and a good
one may be well above.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from evenload.scheduler.tariff import Tariff

START_S = 30.0
_TAIL = 7200.0
"""After the last arrival intervals grow, by their whole length in so many seconds."""


class PricedKind(NamedTuple):
    num_devices: int
    price: float
    """An hour of one device."""
    cheap_price: float


class DeadlineJob(NamedTuple):
    num_devices: int
    time_s: float
    alone_s: Mapping[str, float]
    """Kind → its time there, alone."""
    deadline_s: float


class ElasticJob(NamedTuple):
    time_s: float
    alone_s: Mapping[int, float]
    """Number of devices → its time there, alone."""


class _Program:
    """A linear program built row by row: the least Σ cost · x with x ≥ 0 and rows ≤ their bounds."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.least: list[float] = []
        self.bounds: list[float] = []
        self._entries: tuple[list[int], list[int], list[float]] = ([], [], [])

    def row(self, bound: float) -> int:
        self.bounds.append(bound)
        return len(self.bounds) - 1

    def column(self, cost: float, entries: Iterable[tuple[int, float]], least: float = 0.0) -> int:
        self.costs.append(cost)
        self.least.append(least)
        number = len(self.costs) - 1
        for row, value in entries:
            self.put(row, number, value)
        return number

    def put(self, row: int, column: int, value: float) -> None:
        for numbers, number in zip(self._entries, (row, column, value), strict=True):
            numbers.append(number)

    def least_cost(self) -> float:
        """Solve it; `ValueError` if it can't be satisfied."""
        rows, columns, values = self._entries
        matrix = coo_matrix((values, (rows, columns)), shape=(len(self.bounds), len(self.costs))).tocsr()
        bounds = [(least, None) for least in self.least]
        found: Any = linprog(self.costs, A_ub=matrix, b_ub=self.bounds, bounds=bounds, method="highs")
        if found.status:
            raise ValueError(found.message)
        return float(found.fun)


def least_cost(jobs: Sequence[DeadlineJob], kinds: Mapping[str, PricedKind], tariff: Tariff) -> float:
    """Return the least cost at which rigid jobs all meet their deadlines on these devices."""
    program = _Program()
    spans = [(job.time_s + START_S, job.deadline_s) for job in jobs]
    times = {time_s for span in spans for time_s in span}
    now_s, last_s = min(times), max(times)
    while (now_s := tariff.next_change_s(now_s)[1]) < last_s:
        times.add(now_s)
    works = [program.row(-1.0) for _ in jobs]
    for began_s, ended_s in pairwise(sorted(times)):
        seconds, (is_cheap, _) = ended_s - began_s, tariff.next_change_s(began_s)
        devices = {name: program.row(kind.num_devices * seconds) for name, kind in kinds.items()}
        for job, span, work in zip(jobs, spans, works, strict=True):
            if not span[0] <= began_s < ended_s <= span[1]:
                continue
            own = program.row(seconds)
            for name, alone_s in job.alone_s.items():
                price = kinds[name].cheap_price if is_cheap else kinds[name].price
                entries = [(work, -1.0 / alone_s), (own, 1.0), (devices[name], float(job.num_devices))]
                program.column(job.num_devices * price / 3600.0, entries)
    starts = sum(job.num_devices for job in jobs) * START_S / 3600.0
    return program.least_cost() + starts * min(min(kind.price, kind.cheap_price) for kind in kinds.values())


def least_mean_s(jobs: Sequence[ElasticJob], num_devices: int, step_s: float = 400.0) -> float:
    """Return a bound of the mean completion time of elastic jobs, of any sizes at any time.

    A job ends at the earliest half of its shortest time alone after the mean time at which its work is done, because the work is
    done no faster than there.
    """
    program = _Program()
    last_s = max(job.time_s for job in jobs)
    longest_s = sum(min(k * alone_s for k, alone_s in job.alone_s.items()) for job in jobs) / num_devices
    times = [0.0]
    while times[-1] < last_s + 12 * longest_s:
        times.append(times[-1] + step_s * max(1.0, (times[-1] - last_s) / _TAIL))
    devices = [program.row(num_devices * (after - before)) for before, after in pairwise(times)]
    for job in jobs:
        shortest_s, began_s = min(job.alone_s.values()), job.time_s + START_S
        work, middle = program.row(-1.0), program.row(-shortest_s / 2)
        program.column(1.0 / len(jobs), [(middle, -1.0)], least=began_s + shortest_s)
        sizes = _hull([(num, 1.0 / alone_s) for num, alone_s in sorted(job.alone_s.items())])
        for (before_s, after_s), of_all in zip(pairwise(times), devices, strict=True):
            first_s = max(before_s, began_s)
            if after_s <= first_s:
                continue
            own = program.row(after_s - first_s)
            for num, rate in sizes:
                entries = [(work, -rate), (middle, rate * first_s), (own, 1.0), (of_all, float(num))]
                program.column(0.0, entries)
    return program.least_cost() - sum(job.time_s for job in jobs) / len(jobs)


def _hull(rates: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the corners of the upper concave hull of (devices, rate) from (0, 0): others are no better than a mixture."""
    corners = [(0, 0.0)]
    for num, rate in rates:
        while len(corners) > 1:
            (k1, r1), (k2, r2) = corners[-2:]
            if (r2 - r1) * (num - k2) > (rate - r2) * (k2 - k1):
                break
            corners.pop()
        if rate > corners[-1][1]:
            corners.append((num, rate))
    return corners[1:]
