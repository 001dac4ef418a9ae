"""Values that go into and out of a `Balancer`, and the words for its decisions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evenload.balance.drift import SpeedChange
from evenload.balance.split import even_shares
from evenload.balance.values import Cost

LEAD_STEPS = 2
"""A decision received in step s holds from step s + 2: step s + 1 is loaded already, s + 2 gets a step's time to load."""
Seconds = tuple[float | None, ...]
"""Own seconds of each rank; None for one that has left the step."""


@dataclass(frozen=True)
class Observation:
    """One committed step as measured."""

    step: int
    """Steps since the start of the run; only grows."""
    shares: tuple[int, ...]
    """The shares the step really ran with, also where a newer decision is under way."""
    num_micro: int
    seconds: Seconds
    """Each rank's own seconds: compute and optimizer, without waiting for others and without collectives. None for a rank that
    has left the step, whose share is 0."""
    step_s: float | None = None
    """Seconds of the whole step, waiting and collectives included; None if unknown: then those of the slowest rank count."""
    left_out: bool = False
    """The step doesn't represent the next ones: it compiled, was done again, or wrote a checkpoint."""
    num_steps: int = 1
    """More than 1 where it is the mean of so many short steps, of which `step` is the last."""
    parts: tuple[Seconds, ...] = ()
    """The seconds of each of these."""
    delay_s: float = 0.0
    """Seconds by which the ranks computed longer because other programs had their processors."""

    @property
    def is_measured(self) -> bool:
        """True if all ranks with samples, and rank 0, have seconds."""
        if self.seconds[0] is None:
            return False
        for share, time_s in zip(self.shares, self.seconds, strict=True):
            if not 0 < time_s < math.inf if time_s is not None else share:
                return False
        return True

    @property
    def first_step(self) -> int:
        return self.step - self.num_steps + 1

    @property
    def whole_s(self) -> float:
        return self.step_s or max(time_s for time_s in self.seconds if time_s is not None)


@dataclass(frozen=True)
class Decision:
    """New shares, and the reason."""

    shares: tuple[int, ...]
    num_micro: int
    kind: str
    """``measured`` (the first split), ``slower``, ``faster``, ``left_out``, ``returned``, ``refined``, ``memory``, or ``trial``:
    a rank that has left comes back for a few steps, or leaves again after them. No moves: ``too_short`` (the steps are), and
    ``process_lost`` (the one that decides for many ranks)."""
    rank: int | None
    """The rank it is about, None where it is about all."""
    factor: float | None
    """Factor by which the rank became slower or faster, at least 1; None if it didn't change."""
    reason: str
    """A sentence for people."""
    before_s: float
    expected_s: float
    """The same under the new shares."""
    lead_steps: int = LEAD_STEPS
    """Steps from the one in which it is received to the first for which it holds."""


def expected_gains(decision: Decision, costs: Sequence[Cost] | None, rest_s: float) -> dict[str, float]:
    """Return how many times as fast the shares are expected to be: as equal shares, as the best rank alone.

    `rest_s`: seconds of a step in which no rank computes. Nothing without costs.
    """
    if costs is None or not decision.expected_s:
        return {}
    num_samples, count = sum(decision.shares), decision.num_micro
    even = even_shares(num_samples, len(costs))
    equal_s = max(cost.predict_s(share, count) for cost, share in zip(costs, even, strict=True))
    alone_s = min(cost.predict_s(num_samples, count) for cost in costs)
    expected_s = decision.expected_s + rest_s
    return {"over_equal": (equal_s + rest_s) / expected_s, "over_best_alone": alone_s / expected_s}


def explain_move(
    old: tuple[int, ...],
    new: tuple[int, ...],
    changes: Mapping[int, SpeedChange],
    idle_s: Mapping[int, float],
    usual: tuple[str, str],
) -> tuple[str, int | None, float | None, str]:
    """Return kind, rank, factor, and the first half of the sentence.

    `changes` are those of speed that are worth a word, `idle_s` what ranks left out would need for their first samples, `usual`
    kind and text where no rank changed, left or came back.
    """
    moved = {
        rank: "left_out" if before else "returned"
        for rank, (before, after) in enumerate(zip(old, new, strict=True))
        if bool(before) != bool(after)
    }
    about = {
        rank: f"needs {format_seconds(idle_s[rank])} for its first samples and is left out"
        if kind == "left_out"
        else "can help again"
        for rank, kind in moved.items()
    }
    if changes:
        # The rank that changed is the cause, also where another one is left out or brought back for it.
        rank = max(changes, key=lambda r: abs(math.log(changes[r].factor)))
        factor, what = _describe(rank, changes[rank])
        others = "".join(f", rank {r} {text}" for r, text in about.items() if r != rank)
        own = f", {about[rank]}" if rank in about else ""
        kind = moved.get(rank, "slower" if changes[rank].factor > 1 else "faster")
        return kind, rank, factor, what + own + others
    if moved:
        rank, kind = next(iter(moved.items()))
        return kind, rank, None, ", ".join(f"rank {r} {text}" for r, text in about.items())
    return usual[0], None, None, usual[1]


def describe_shares(
    rank: int | None, old: tuple[int, ...], new: tuple[int, ...], old_micro: int, new_micro: int
) -> str:
    """Return the second half: how the shares move, those of `rank` alone where they do."""
    if rank is not None and new[rank] != old[rank]:
        how = f"share {old[rank]} → {new[rank]} of {sum(new)}"
    elif new != old:
        how = f"shares {_list(old)} → {_list(new)} of {sum(new)}"
    else:
        how = "shares unchanged"
    return how if new_micro == old_micro else f"{how}, micro-batches {old_micro} → {new_micro}"


def _describe(rank: int, change: SpeedChange) -> tuple[float, str]:
    if change.factor > 1:
        return change.factor, f"rank {rank} slowed {change.factor:.1f}× since step {change.step}"
    return 1 / change.factor, f"rank {rank} sped up {1 / change.factor:.1f}× since step {change.step}"


def _list(shares: tuple[int, ...]) -> str:
    text = ", ".join(str(share) for share in shares[:8])
    return text if len(shares) <= 8 else f"{text}, …"


def format_seconds(time_s: float) -> str:
    return f"{time_s:.2f} s" if time_s >= 1 else f"{time_s * 1e3:.3g} ms"
