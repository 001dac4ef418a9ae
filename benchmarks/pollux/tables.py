"""The measured tables of Pollux' simulator: how long a step takes on which placement, and how far a step gets.

Read from a folder for each application: ``placements.csv`` and ``scalability.csv`` (seconds of a step, and of its
synchronisation, by placement and local batch), ``validation-<batch>.csv`` (after each epoch: progress, iterations, and
the squared norm and variance of the gradient). A step with batch B advances the training by the gain
``(var + sqr) / (var · B₀ / B + sqr)`` steps of the smallest batch B₀ (Qiao et al., OSDI 2021, section 3.1), with var and
sqr as of this epoch and interpolated between the batches that were measured.
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from evenload.errors import ConfigError

_NODE_SIZE = 4
"""Devices of a host of those measured; a larger host counts as several."""
_EPOCHS = {"bert": 2, "cifar10": 100, "ncf": 10, "imagenet": 90, "deepspeech2": 80, "yolov3": 50}
_MOST_LOCAL = {"yolov3": 8}
"""Limits of local batches that the published simulator sets by hand."""

Curve = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
"""Local batches, step seconds, synchronisation seconds."""


@dataclass(frozen=True)
class Epochs:
    """One ``validation-<batch>.csv``."""

    progress: tuple[float, ...]
    iterations: tuple[float, ...]
    grad_sqr: tuple[float, ...]
    grad_var: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Application:
    """One application's tables."""

    name: str
    validation: dict[int, Epochs]
    placements: dict[tuple[int, ...], Curve]
    grid: dict[tuple[int, int], Curve]
    """(hosts, devices) → a curve: means over placements, and what was measured on many hosts."""
    num_epochs: int
    min_local: int
    max_local: int

    @property
    def init_batch(self) -> int:
        """The smallest batch; progress is counted in its steps."""
        return min(self.validation)

    @property
    def max_batch(self) -> int:
        """The largest batch."""
        return max(self.validation)

    def progress(self, epoch: int) -> float:
        """Steps of the smallest batch after `epoch` epochs."""
        return 0.0 if epoch == 0 else min(v.progress[epoch - 1] for v in self.validation.values())

    def grad_stats(self, batch: float, epoch: int) -> tuple[float, float]:
        """Squared norm and variance of the gradient during an epoch (counted from 0), at a batch size."""
        sizes = sorted(self.validation)
        upper = min(bisect_left(sizes, batch), len(sizes) - 1)
        lower = upper if sizes[upper] <= batch or upper == 0 else upper - 1
        low, high = self.validation[sizes[lower]], self.validation[sizes[upper]]
        part = 0.0 if lower == upper else (batch - sizes[lower]) / (sizes[upper] - sizes[lower])
        return (
            low.grad_sqr[epoch] * (1 - part) + high.grad_sqr[epoch] * part,
            low.grad_var[epoch] * (1 - part) + high.grad_var[epoch] * part,
        )

    def gain(self, batch: float, epoch: int) -> float:
        """Progress of one step with this batch."""
        sqr, var = self.grad_stats(batch, epoch)
        return (var + sqr) / (var * self.init_batch / batch + sqr)

    def step_s(self, per_host: Sequence[int], local: float) -> tuple[float, float]:
        """Seconds of a step, and of its synchronisation alone, with so many devices in each host.

        As measured where this placement was, up to rotation; otherwise between the nearest that were.
        """
        return _step_s(self, tuple(per_host), local)


@cache
def _step_s(app: Application, per_host: tuple[int, ...], local: float) -> tuple[float, float]:
    nodes = tuple(min(_NODE_SIZE, n - i) for n in per_host for i in range(0, n, _NODE_SIZE))
    rotated = min(nodes[i:] + nodes[:i] for i in range(len(nodes)))
    if rotated in app.placements:
        return _along(app.placements[rotated], local)
    return _between(app, len(nodes), sum(nodes), local)


def _along(curve: Curve, local: float) -> tuple[float, float]:
    """Linear between the local batches measured, and on beyond the last."""
    sizes, steps, syncs = curve
    if len(sizes) == 1:
        return steps[0], syncs[0]
    upper = max(1, min(bisect_left(sizes, local), len(sizes) - 1))
    part = (local - sizes[upper - 1]) / (sizes[upper] - sizes[upper - 1])
    sync = max(0.0, syncs[upper - 1] + part * (syncs[upper] - syncs[upper - 1]))
    return max(sync, steps[upper - 1] + part * (steps[upper] - steps[upper - 1])), sync


def _between(app: Application, num_nodes: int, num_devices: int, local: float) -> tuple[float, float]:
    """Between numbers of hosts that were measured, with the same devices a host; on each, between numbers of devices."""
    counts = sorted({nodes for nodes, _ in app.grid})
    num_nodes = min(num_nodes, counts[-1])
    upper = counts[bisect_left(counts, num_nodes)]
    lower = upper if upper == num_nodes else counts[bisect_left(counts, num_nodes) - 1]

    def on(nodes: int) -> tuple[float, float]:
        wanted = num_devices * nodes / num_nodes
        known = sorted(devices for n, devices in app.grid if n == nodes)
        high = min(bisect_left(known, wanted - 1e-9), len(known) - 1)
        low = high if known[high] <= wanted or high == 0 else high - 1
        part = 0.0 if low == high else (wanted - known[low]) / (known[high] - known[low])
        return _mix(_along(app.grid[nodes, known[low]], local), _along(app.grid[nodes, known[high]], local), part)

    part = 0.0 if lower == upper else (num_nodes - lower) / (upper - lower)
    return _mix(on(lower), on(upper), part)


def _mix(low: tuple[float, float], high: tuple[float, float], part: float) -> tuple[float, float]:
    return low[0] + part * (high[0] - low[0]), low[1] + part * (high[1] - low[1])


@cache
def application(folder: Path) -> Application:
    """Reads one application's folder; the same object each time.

    Raises:
        ConfigError: files are missing or not as expected.
    """
    validation = {}
    for path in sorted(folder.glob("validation-*.csv")):
        rows = _rows(path, "progress", "iteration", "grad_sqr", "grad_var")
        validation[int(path.stem.split("-")[1])] = Epochs(*map(tuple, zip(*rows, strict=True)))
    if not validation:
        raise ConfigError(f"{folder}: expected the tables of an application, validation-<batch>.csv among them")
    by_placement: dict[tuple[int, ...], list[tuple[float, float, float]]] = {}
    by_grid: dict[tuple[int, int], dict[float, list[tuple[float, float]]]] = {}
    for written, local, step_s, sync_s in _rows(folder / "placements.csv", "placement", "local_bsz", *_SECONDS):
        nodes = tuple(int(digit) for digit in str(int(written)))
        by_placement.setdefault(nodes, []).append((local, step_s, sync_s))
        by_grid.setdefault((len(nodes), sum(nodes)), {}).setdefault(local, []).append((step_s, sync_s))
    for num_nodes, devices, local, step_s, sync_s in _rows(
        folder / "scalability.csv", "num_nodes", "num_replicas", "local_bsz", *_SECONDS
    ):
        by_grid.setdefault((int(num_nodes), int(devices)), {}).setdefault(local, []).append((step_s, sync_s))
    locals_ = [local for points in by_placement.values() for local, _, _ in points]
    return Application(
        name=folder.name,
        validation=validation,
        placements={nodes: _curve(points) for nodes, points in by_placement.items()},
        grid={
            key: _curve([(b, sum(p[0] for p in ps) / len(ps), sum(p[1] for p in ps) / len(ps)) for b, ps in c.items()])
            for key, c in by_grid.items()
        },
        num_epochs=_EPOCHS.get(folder.name, min(len(v.progress) for v in validation.values())),
        min_local=int(min(locals_)),
        max_local=_MOST_LOCAL.get(folder.name, int(max(locals_))),
    )


_SECONDS = ("step_time", "sync_time")


def _curve(points: list[tuple[float, float, float]]) -> Curve:
    sizes, steps, syncs = zip(*sorted(points), strict=True)
    return sizes, steps, syncs


def _rows(path: Path, *columns: str) -> list[tuple[float, ...]]:
    try:
        with path.open(newline="") as file:
            return [tuple(float(row[name]) for name in columns) for row in csv.DictReader(file)]
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: expected a table with the columns {', '.join(columns)} ({error})") from error
