"""What a job learns of its own speed while it runs, and what it predicts for other numbers of devices.

As in Pollux (Qiao et al., OSDI 2021, section 3.2), the job's side fits a model to the steps it has run and tells the
queue a curve. With a local batch b on k devices computing takes ``C = a + c·b`` seconds and the network
``N = n + m·(k − 2)``, with other n, m inside one host and across hosts; they overlap, so that a step takes
``(C^γ + N^γ)^(1/γ)``. Each γ of a few is tried: it turns what was measured into network times, lines are fitted to them
in closed form, and the γ that explains the steps best is kept. What was never seen is taken to cost nothing (across
hosts: a tenth more than inside), so that it gets tried. The batch for each number of devices is the one with the most
goodput: steps a second times the gain of a step (`tables`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.pollux.tables import Application

_NUM_BATCHES = 50
_UNSEEN = 1.1
_GAMMAS = (1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
_SIMPLER = 1e-3
"""As in Pollux: a small preference for little overlap."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Setting:
    """A local batch, and how many are accumulated for one step."""

    local: int
    num_micro: int


class Learner:
    """One job's model of its own speed."""

    def __init__(self, app: Application, host_size: int, fixed_batch: int | None = None) -> None:
        """Knows the application's limits and nothing of its speed."""
        self._app, self._host_size, self._fixed_batch = app, host_size, fixed_batch
        self._seen: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._fit: _Model | None = None
        self._grad = (1.0, 1.0)
        self.max_seen = 0

    def observe(self, num_hosts: int, num_devices: int, local: int, seconds: tuple[float, float]) -> None:
        """A step was measured: its whole seconds, and those of its synchronisation."""
        key = (num_hosts, num_devices, local)
        if key not in self._seen:
            self._seen[key] = seconds
            self._fit = None
            self.max_seen = max(self.max_seen, num_devices)

    def set_gradient(self, sqr: float, var: float) -> None:
        """The gradient's squared norm and variance, as of now."""
        self._grad = (sqr, var)

    @property
    def most_devices(self) -> int:
        """As many as it dares to predict for: twice what it has run on, as in Pollux."""
        return max(1, min(2 * self.max_seen, most_devices(self._app)))

    def rates(self) -> tuple[float, ...]:
        """Predicted goodput on 1, 2, … devices in as few hosts as can be: progress a second."""
        if not self._seen:
            return ()
        num = np.arange(1, self.most_devices + 1)
        goodput, _, _ = self._best(-(-num // self._host_size), num)
        return tuple(float(rate) for rate in goodput)

    def best(self, num_hosts: int, num_devices: int) -> Setting:
        """The batch with the most predicted goodput on these devices."""
        app = self._app
        if not self._seen or self._fixed_batch is not None:
            batch = self._fixed_batch or max(app.init_batch, app.min_local * num_devices)
            return split_batch(app, batch, num_devices)
        _, local, num_micro = self._best(np.array([num_hosts]), np.array([num_devices]))
        return Setting(_within(app, int(local[0]), int(num_micro[0]), num_devices), int(num_micro[0]))

    def _best(self, hosts: NDArray[np.int64], num: NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
        """For each column the largest goodput over batches between the least and the largest, and its setting."""
        app = self._app
        if self._fixed_batch is not None:
            batch = np.full((1, len(num)), float(self._fixed_batch))
        else:
            low = np.maximum(app.init_batch, app.min_local * num).astype(float)
            batch = np.geomspace(low, app.max_batch, _NUM_BATCHES)
        local = batch / num
        num_micro = np.ceil(local / app.max_local - 1e-8)
        # One device alone can't tell the noise of the gradient from a single micro-batch.
        num_micro = np.where((num == 1) & (local > app.init_batch + 1e-8), np.maximum(num_micro, 2), num_micro)
        atomic = np.ceil(local / num_micro - 1e-8)
        model = self._model()
        compute = model.compute_s(atomic)
        step = _overlap(compute, model.network_s(hosts, num), model.gamma)
        batch = num * atomic * num_micro
        sqr, var = self._grad
        gain = (var + sqr) / (var * app.init_batch / batch + sqr)
        goodput = gain / ((num_micro - 1) * compute + step)
        goodput = np.where((atomic >= app.min_local) & (atomic <= app.max_local), goodput, 0.0)
        best = np.argmax(goodput, axis=0), np.arange(goodput.shape[1])
        return goodput[best], atomic[best], num_micro[best]

    def _model(self) -> _Model:
        if self._fit is None:
            hosts, num, local = np.array(list(self._seen), dtype=float).T
            step, sync = np.array(list(self._seen.values())).T
            self._fit = _fitted(hosts, num, local, step, np.maximum(step - sync, 1e-6))
        return self._fit


@dataclass(frozen=True)
class _Model:
    """Seconds of computing are ``a + c·b``, of the network ``n + m·(k − 2)``."""

    compute: tuple[float, float]
    intra: tuple[float, float]
    inter: tuple[float, float]
    gamma: float

    def compute_s(self, local: Floats) -> Floats:
        return self.compute[0] + self.compute[1] * local

    def network_s(self, hosts: NDArray[Any], num: NDArray[Any]) -> Floats:
        further = np.maximum(num - 2.0, 0.0)
        across = self.inter[0] + self.inter[1] * further
        within = self.intra[0] + self.intra[1] * further
        return np.where(hosts > 1, across, np.where(num > 1, within, 0.0))


def _overlap(compute: Floats, network: Floats, gamma: float) -> Floats:
    """Seconds of a step in which computing and the network overlap: their γ-norm."""
    longest = np.maximum(compute, network)
    shorter = np.minimum(compute, network) / np.maximum(longest, 1e-12)
    return longest * (1.0 + shorter**gamma) ** (1.0 / gamma)


def _fitted(hosts: Floats, num: Floats, local: Floats, step: Floats, compute: Floats) -> _Model:
    """The model whose steps are nearest to those measured, by the mean square of the logarithms' differences."""
    line = _line(local, compute, 1.0 / compute, half=True)
    within, across = (hosts == 1) & (num > 1), hosts > 1
    best: tuple[float, _Model] | None = None
    for gamma in _GAMMAS:
        ratio = np.minimum(compute / step, 1.0)
        network = step * (1.0 - ratio**gamma) ** (1.0 / gamma)
        intra = _line(num[within] - 2, network[within], 1.0 / step[within]) if within.any() else (0.0, 0.0)
        inter = (_UNSEEN * intra[0], _UNSEEN * intra[1])
        if across.any():
            inter = _line(num[across] - 2, network[across], 1.0 / step[across])
        model = _Model(line, intra, inter, gamma)
        predicted = _overlap(model.compute_s(local), model.network_s(hosts, num), gamma)
        error = float(np.sqrt(np.mean((np.log(predicted) - np.log(step)) ** 2))) + _SIMPLER * (gamma - 1) ** 2
        if best is None or error < best[0]:
            best = (error, model)
        if not (within.any() or across.any()):
            break
    if best is None:
        raise RuntimeError("no gamma was tried")
    return best[1]


def most_devices(app: Application) -> int:
    """As many as can share the largest batch."""
    return 1 if app.name == "ncf" else min(64, app.max_batch // app.min_local)


def split_batch(app: Application, batch: int, num_devices: int) -> Setting:
    """A global batch over devices, accumulated where a local batch would be too large."""
    local = _ceil(batch / num_devices)
    num_micro = _ceil(local / app.max_local)
    if num_devices == 1 and batch > app.init_batch:
        num_micro = max(2, num_micro)
    return Setting(_within(app, _ceil(local / num_micro), num_micro, num_devices), num_micro)


def _within(app: Application, local: int, num_micro: int, num_devices: int) -> int:
    return min(local, app.max_batch // (num_devices * num_micro))


def _ceil(value: float) -> int:
    return int(-(-(value - 1e-8) // 1))


def _line(x: Floats, y: Floats, weight: Floats, half: bool = False) -> tuple[float, float]:
    """``y = a + c·x`` by weighted least squares with a, c ≥ 0; from one x alone, half of it or all is a."""
    if np.ptp(x) == 0:
        mean = float(np.mean(y))
        return (mean / 2, mean / 2 / float(x[0])) if half else (mean, 0.0)
    square = weight * weight
    sum_w, sum_x, sum_y = square.sum(), (square * x).sum(), (square * y).sum()
    sum_xx, sum_xy = (square * x * x).sum(), (square * x * y).sum()
    c = float((sum_w * sum_xy - sum_x * sum_y) / (sum_w * sum_xx - sum_x * sum_x))
    a = float((sum_y - c * sum_x) / sum_w)
    if c < 0:
        return float(sum_y / sum_w), 0.0
    if a < 0:
        return 0.0, float(sum_xy / sum_xx)
    return a, c
