"""Choice of the global batch: what a larger one gains in throughput against what each of its samples is worth less.

Note [Goodput]
  Pollux (Qiao et al. 2021, OSDI, equations 5 and 6): with noise scale phi, the batch B0 that the user chose and a step of
  t(B) seconds,

      goodput(B) = B / t(B) * (phi + B0) / (phi + B)

  The first factor is samples a second; the second, the statistical efficiency, is how much a sample of a batch of B brings
  on, measured in samples of a batch of B0. Where gradients are noisy (phi large) it stays near 1 as B grows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evenload.balance.split import Caps, MayLeave, Split, num_micro, scale_shares, slowest_s, split_batch
from evenload.balance.values import Cost

LEAST_GAIN = 0.05
"""Another batch must promise so much more goodput: it makes the run differ from the one without the setting."""
MOST_GROWTH = 2.0
"""At most by this factor at a time: t(B) is known near the batches that ran."""
TRIAL_LOSS = 0.05
"""Where overhead can't be separated from samples yet, a larger batch is tried if it costs no more efficiency than this."""
CHOICE_STEPS = 40
"""Steps after which the batch is chosen inside an epoch: enough to time them, and to measure the gradient's noise."""
_FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class StepOverhead:
    """Seconds of a step beside the ranks' own."""

    fixed_s: float = 0.0
    """Collectives, waiting, what the loop costs: whatever the batch."""
    per_sample_s: float = 0.0
    """Waiting for samples, by the sample of the global batch."""

    def predict_s(self, num_samples: int) -> float:
        return self.fixed_s + self.per_sample_s * num_samples


@dataclass(frozen=True)
class BatchChoice:
    """The global batch from the next epoch on."""

    batch_size: int
    kind: str
    """``grown``, ``shrunk``, ``trial`` or ``kept``."""
    before_per_s: float
    """Goodput of the batch until now, in samples of the user's batch a second."""
    expected_per_s: float
    """The same of the one chosen."""


@dataclass
class ChoiceTimes:
    """When the batch is chosen: at the end of an epoch, and on other devices inside it, until it stays or turns back."""

    steps_left: float | None = None
    """Steps up to a choice inside the epoch; None where the next one is at its end."""
    direction: int = 0
    """1 if the last choice on these devices was a larger batch, -1 a smaller one, 0 before the first."""

    def begin(self) -> None:
        """Choose anew: the devices are others."""
        self.steps_left, self.direction = CHOICE_STEPS, 0

    def is_due(self, *, in_epoch: bool) -> bool:
        return self.steps_left == 0 or (self.steps_left is None and not in_epoch)

    def chose(self, before: int, batch_size: int) -> None:
        if self.steps_left is not None:
            direction = (batch_size > before) - (batch_size < before)
            self.steps_left = CHOICE_STEPS if direction and direction != -self.direction else None
            self.direction = direction


def efficiency(noise: float, base: int, batch_size: int) -> float:
    """Return what a sample of a batch is worth, in samples of the user's batch; all in samples."""
    return (noise + base) / (noise + batch_size)


def rate_gain(noise: float, base: int, batch_size: int, *, rule: str) -> float:
    """Return the factor on the learning rate for `batch_size` in place of `base`; all in samples.

    ``adascale``: the gain ratio of Johnson et al. 2020, "AdaScale SGD", with the variance written by the noise scale;
    ``sqrt``: as usual for Adam.
    """
    if rule == "none" or batch_size == base:
        return 1.0
    ratio = batch_size / base
    return float(ratio**0.5) if rule == "sqrt" else ratio * efficiency(noise, base, batch_size)


def candidates(base: int, limit: int, now: int) -> list[int]:
    """Return the batches that may follow `now`: `base` by round factors up to `limit`, within `MOST_GROWTH`, ascending."""
    sizes = {limit, now}
    scale = 1
    while base * scale <= limit:
        sizes.update(round(base * factor * scale) for factor in _FACTORS)
        scale *= 8
    near = (size for size in sizes if base <= size <= limit and now <= MOST_GROWTH * size and size <= MOST_GROWTH * now)
    return sorted({*near} or {min(max(base, now), limit)})


def best_split(
    num_samples: int,
    costs: Sequence[Cost],
    caps: Caps,
    shares: Sequence[int] | None,
    quantum: int = 1,
    may_leave: MayLeave = None,
) -> Split:
    """Split a batch as fast as possible, or in the proportions of `shares` where these are fixed."""
    if shares is None:
        return split_batch(num_samples, costs, caps, quantum=quantum, may_leave=may_leave)
    scaled = scale_shares(shares, num_samples)
    count = num_micro(scaled, caps)
    return Split(scaled, count, slowest_s(costs, scaled, count, may_leave))


def choose_batch(
    *,
    base: int,
    limit: int,
    now: int,
    noise: float,
    seconds_of: Callable[[int], float],
    may_try: bool,
    tried_from: int | None = None,
) -> BatchChoice:
    """Choose the batch of the next epoch; `base` is the user's batch, `now` that of the epoch that ended, all in samples.

    `may_try`: only one size ran, so overhead can't be separated from samples yet, and another size may be tried for it.
    `tried_from`: the batch before, where `now` is such a trial: staying must pay against that one.
    """

    def goodput(size: int) -> float:
        return size / seconds_of(size) * efficiency(noise, base, size)

    sizes = candidates(base, limit, now)
    held = now if tried_from is None else tried_from
    before = goodput(now)
    best = max(sizes, key=lambda size: (goodput(size), -size))
    if goodput(best) < (1 + LEAST_GAIN) * goodput(held):
        best = min(held, limit)
        if may_try and tried_from is None:
            cheap = [s for s in sizes if s > now and efficiency(noise, now, s) >= 1 - TRIAL_LOSS]
            if cheap:
                return BatchChoice(cheap[0], "trial", before, goodput(cheap[0]))
    kind = "grown" if best > now else "shrunk" if best < now else "kept"
    return BatchChoice(best, kind, before, goodput(best))
