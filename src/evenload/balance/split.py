"""Exact split of a batch over ranks, and its spread over the micro-batches.

A rank with share n of a step of K micro-batches needs ``t(n) = K * a + c * max(n, K)`` seconds: a rank computes at
least one sample in each micro-batch, because one without samples of its own runs one of weight 0 (all ranks then call
the model equally often). So a share of 0 costs ``K * (a + c)``: a device slower than the others at that slows every
step it is a member of, whatever its share. Where such a rank may leave the gradient group (``may_leave``), 0 costs it nothing.

Everything here is integers and sums of a few floats in a fixed order; ties go to the rank with fewer samples, then to
the lower rank. Even so, one rank computes a split and broadcasts the integers: the last bit of a fit may differ between
CPUs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evenload.balance.values import Cost
from evenload.errors import ConfigError

Caps = Sequence[int | None] | None
"""For each rank the most samples in one micro-batch, None where memory sets no limit; None alone for no limits."""

MayLeave = Sequence[bool] | None
"""For each rank whether it leaves the step where its share is 0, which then costs nothing; None where all stay."""

_MANY_RANKS = 128
"""Of more ranks, arrays are faster than lists."""
_SCAN_MICRO = 8
"""Up to so many values of K are all tried; beyond, the time is taken as convex in K, which it is up to rounding."""
_SCAN_MICRO_LEAVING = 64
"""The same where ranks may leave: with each that does the time is another convex function, and least in several places."""


@dataclass(frozen=True)
class Split:
    """Shares of one global batch, and the seconds expected of the slowest rank."""

    shares: tuple[int, ...]
    num_micro: int
    expected_s: float


def even_shares(num_samples: int, world_size: int) -> tuple[int, ...]:
    """Return equal shares; if the samples can't be divided, the first ranks get one more."""
    if world_size < 1 or num_samples < 0:
        raise ConfigError(f"{num_samples} samples over {world_size} ranks: expected at least 0 samples and 1 rank")
    share, rest = divmod(num_samples, world_size)
    return tuple(share + (rank < rest) for rank in range(world_size))


def slice_sizes(num_samples: int, num_micro: int) -> tuple[int, ...]:
    """Return the samples of each micro-batch of a global batch: K fixed slices, the first ``num_samples % K`` one larger."""
    if num_micro < 1:
        raise ConfigError(f"a step of {num_micro} micro-batches: expected at least 1")
    return even_shares(num_samples, num_micro)


def scale_shares(shares: Sequence[int], num_samples: int) -> tuple[int, ...]:
    """Scale shares to another number of samples in the same proportions, such as the ragged last batch of an epoch.

    Largest remainders, in integers, ties to the lower rank. A share of 0 stays 0, and no share grows when there are
    fewer samples, so the caps still hold.
    """
    total = sum(shares)
    if total < 1 or min(shares) < 0 or num_samples < 0:
        raise ConfigError(
            f"shares {tuple(shares)} scaled to {num_samples} samples: expected shares of at least 0, some more"
        )
    scaled = [share * num_samples // total for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda rank: (-(shares[rank] * num_samples % total), rank))
    for rank in by_remainder[: num_samples - sum(scaled)]:
        scaled[rank] += 1
    return tuple(scaled)


def slowest_s(costs: Sequence[Cost], shares: Sequence[int], num_micro: int, may_leave: MayLeave = None) -> float:
    """Return the seconds of the slowest rank under these shares; 0 where all have left."""
    leaves = may_leave or (False,) * len(costs)
    return max(
        cost.predict_s(share, num_micro) if share or not left else 0.0
        for cost, share, left in zip(costs, shares, leaves, strict=True)
    )


def num_micro(shares: Sequence[int], caps: Caps) -> int:
    """Return the smallest K that keeps each rank's micro-batches within its cap: ``max_r ceil(n_r / cap_r)``, at least 1."""
    checked = _check_caps(caps, len(shares))
    return max([1, *(-(-share // cap) for share, cap in zip(shares, checked, strict=True) if cap is not None)])


def micro_shares(shares: Sequence[int], slices: Sequence[int], caps: Caps = None) -> tuple[tuple[int, ...], ...]:
    """Spread each rank's share over the micro-batches: ``micro[m][rank]``, rows sum to ``slices``, columns to ``shares``.

    With the slices of `slice_sizes` every entry is ``n_r / K`` rounded down or up, so it is solvable exactly when
    ``n_r <= K * cap_r``. Any other slices are served too, as evenly as they allow; `ConfigError` if no spread keeps to the caps.
    """
    checked = _check_caps(caps, len(shares))
    if sum(shares) != sum(slices) or min(shares, default=-1) < 0 or min(slices, default=-1) < 0:
        raise ConfigError(
            f"shares {tuple(shares)} sum to {sum(shares)}, the micro-batches {tuple(slices)} to {sum(slices)}: "
            f"expected equal sums of numbers of at least 0"
        )
    count = len(slices)
    micro = [[0] * len(shares) for _ in slices]
    if count == 1:
        micro = [list(shares)]
    elif tuple(slices) == slice_sizes(sum(shares), count):
        # What is left of each share after the division is dealt round the micro-batches, each rank beginning where the
        # one before ended. No rank comes round twice, and the rows end at most one apart, the larger ones first.
        turn = 0
        for rank, share in enumerate(shares):
            whole, rest = divmod(share, count)
            for index in range(count):
                micro[index][rank] = whole + ((index - turn) % count < rest)
            turn = (turn + rest) % count
    else:
        _spread_unevenly(shares, slices, checked, micro)
    parts = zip(*micro, strict=True) if micro else [()] * len(shares)
    for rank, (share, cap, own) in enumerate(zip(shares, checked, parts, strict=True)):
        if sum(own) != share or (cap is not None and max(own) > cap):
            raise ConfigError(
                f"rank {rank} has {share} samples, at most {cap} in a micro-batch: they don't fit into micro-batches "
                f"of {tuple(slices)}; give it fewer samples, or use more micro-batches"
            )
    return tuple(tuple(row) for row in micro)


def _spread_unevenly(
    shares: Sequence[int], slices: Sequence[int], caps: Sequence[int | None], micro: list[list[int]]
) -> None:
    """Put each sample, rank by rank, into the micro-batch with most space left.

    That leaves the rows as level as any choice could; since a cap belongs to a rank and not to a micro-batch, level
    rows are solvable whenever any others are.
    """
    room = list(slices)
    for rank, share in enumerate(shares):
        cap = caps[rank]
        for _ in range(share):
            free = [m for m in range(len(slices)) if room[m] and (cap is None or micro[m][rank] < cap)]
            if not free:
                return
            best = max(free, key=lambda m: (room[m], -micro[m][rank], -m))
            micro[best][rank] += 1
            room[best] -= 1


def split_batch(
    num_samples: int,
    costs: Sequence[Cost],
    caps: Caps = None,
    num_micro: int | None = None,
    quantum: int = 1,
    may_leave: MayLeave = None,
) -> Split:
    """Return the integer shares whose slowest rank is as fast as possible.

    Minimises ``max_r t_r(n_r)`` with ``sum n_r = num_samples`` and ``n_r <= K * cap_r``, exactly. The samples are
    dealt one by one to the rank that would be done with it first, so among equal optima no rank is needlessly slow, and
    a rank gets 0 where the others finish the batch before it would finish its first sample. That costs it ``K * (a + c)``, or
    nothing where it may leave; the dealing is the same, but K may differ.

    Without ``num_micro``, K is that of the shortest step; of equal ones the smallest. Shares are multiples of ``quantum``,
    except one that takes what the batch has over: a compiled model then meets few sizes. Where no cap binds, no rank ends
    more than a quantum of its samples after the finest split; where the caps leave no room for multiples, the finest split
    is returned. Raises `ConfigError` for a negative or infinite cost, or if the caps don't let K micro-batches hold the batch.
    """
    world_size = len(costs)
    if world_size < 1 or num_samples < 1:
        raise ConfigError(f"a global batch of {num_samples} samples on {world_size} ranks: expected at least 1 of each")
    for rank, cost in enumerate(costs):
        if not (0 <= cost.per_micro_s < math.inf and 0 <= cost.per_sample_s < math.inf):
            raise ConfigError(f"rank {rank} costs {cost}: expected finite seconds of at least 0")
    checked = _check_caps(caps, world_size)
    if num_micro is not None:
        if num_micro < 1:
            raise ConfigError(f"a step of {num_micro} micro-batches: expected at least 1")
        split = _split(num_samples, costs, checked, num_micro, may_leave)
    else:
        split = _split_best_micro(num_samples, costs, checked, may_leave)
    return split if quantum <= 1 else _coarsen(split, costs, checked, quantum, may_leave)


def _coarsen(
    split: Split, costs: Sequence[Cost], caps: Sequence[int | None], quantum: int, may_leave: MayLeave
) -> Split:
    """Round the shares down to multiples, then deal the rest by the quantum to the rank that would finish first."""
    count, num_samples = split.num_micro, sum(split.shares)
    limits = [num_samples if cap is None else count * cap for cap in caps]
    shares = [share - share % quantum for share in split.shares]
    left = num_samples - sum(shares)
    while left:
        given = min(quantum, left)
        fits = [rank for rank, share in enumerate(shares) if share + given <= limits[rank] and share % quantum == 0]
        if not fits:
            return split  # the caps leave no room for whole quanta
        first = min(fits, key=lambda rank: (costs[rank].predict_s(shares[rank] + given, count), rank))
        shares[first] += given
        left -= given
    return Split(tuple(shares), count, slowest_s(costs, shares, count, may_leave))


def _split_best_micro(
    num_samples: int, costs: Sequence[Cost], caps: Sequence[int | None], may_leave: MayLeave
) -> Split:
    lowest = 1
    if None not in caps:
        lowest = -(-num_samples // sum(cap for cap in caps if cap is not None))
    # From the K on where no cap binds, more micro-batches only cost.
    unbound: tuple[None, ...] = (None,) * len(caps)
    highest = lowest
    while (
        needed := num_micro((free := _split(num_samples, costs, unbound, highest, may_leave)).shares, caps)
    ) > highest:
        highest = needed
    tried = {highest: free}

    def expected_s(count: int) -> float:
        if count not in tried:
            tried[count] = _split(num_samples, costs, caps, count, may_leave)
        return tried[count].expected_s

    most = _SCAN_MICRO_LEAVING if may_leave and any(may_leave) else _SCAN_MICRO
    while highest - lowest >= most:
        middle = (lowest + highest) // 2
        if expected_s(middle + 1) < expected_s(middle):
            lowest = middle + 1
        else:
            highest = middle
    return tried[min(range(lowest, highest + 1), key=expected_s)]


def _split(
    num_samples: int, costs: Sequence[Cost], caps: Sequence[int | None], count: int, may_leave: MayLeave
) -> Split:
    """Deal the samples one by one to the rank that would finish first, but skip to just before the end."""
    limits = [num_samples if cap is None else min(num_samples, count * cap) for cap in caps]
    if sum(limits) < num_samples:
        raise ConfigError(
            f"{num_samples} samples in {count} micro-batches: the caps {tuple(caps)} hold {sum(limits)}; use at least "
            f"{-(-num_samples // sum(cap or num_samples for cap in caps))} micro-batches, or a smaller batch"
        )
    shares = _skip_ahead(num_samples, costs, limits, count)
    left = num_samples - sum(shares)
    # The first K samples of a rank cost the same, and where a sample costs nothing all do.
    flat = [min(count, limit) if cost.per_sample_s else limit for cost, limit in zip(costs, limits, strict=True)]
    queue = [
        (cost.predict_s(share + 1, count), share, rank)
        for rank, (cost, share, limit) in enumerate(zip(costs, shares, limits, strict=True))
        if share < limit
    ]
    heapq.heapify(queue)
    while left:
        time_s, share, rank = heapq.heappop(queue)
        tied = [rank]
        if share < flat[rank]:
            # Ranks whose next samples all cost this same time share them evenly.
            while queue and queue[0][0] == time_s and queue[0][1] < flat[queue[0][2]]:
                tied.append(heapq.heappop(queue)[2])
            given = _fill_evenly([flat[r] for r in tied], left)
        else:
            given = [share + 1]
        for r, samples in zip(tied, given, strict=True):
            left -= samples - shares[r]
            shares[r] = samples
            if samples < limits[r]:
                heapq.heappush(queue, (costs[r].predict_s(samples + 1, count), samples, r))
    return Split(tuple(shares), count, slowest_s(costs, shares, count, may_leave))


def _skip_ahead(num_samples: int, costs: Sequence[Cost], limits: Sequence[int], count: int) -> list[int]:
    """Return shares after dealing every sample that is done by some time, a little before the end.

    ``held(t)``, the samples that all ranks can have done by t, jumps at the time of a rank's first samples and is
    concave in between: the jumps are bisected, then Newton's method comes from below and never goes too far.
    """
    # Plain lists of (K * a, c, time of the first sample, limit): this runs over a thousand ranks about fifteen times.
    rows = [
        (count * cost.per_micro_s, cost.per_sample_s, cost.predict_s(1, count), limit)
        for cost, limit in zip(costs, limits, strict=True)
    ]

    def held(time_s: float) -> list[int]:
        shares = []
        for fixed_s, slope_s, first_s, limit in rows:
            if first_s > time_s:
                share = 0
            elif fixed_s + slope_s * limit <= time_s:
                share = limit
            else:
                share = int((time_s - fixed_s) / slope_s)
                # Rounding may be one off; the dealing needs the very largest share with t(share) <= time.
                while fixed_s + slope_s * (share + 1) <= time_s:
                    share += 1
                while share > count and fixed_s + slope_s * share > time_s:
                    share -= 1
                share = min(max(share, count), limit)
            shares.append(share)
        return shares

    if len(rows) > _MANY_RANKS:
        held = _held_by_many(rows, count)  # type: ignore[assignment]  # a function of the same kind
    firsts = sorted({row[2] for row in rows})
    low, high = 0, len(firsts)
    best = [0] * len(rows)
    while low < high:
        middle = (low + high) // 2
        shares = held(firsts[middle])
        if sum(shares) <= num_samples:
            low, best = middle + 1, shares
        else:
            high = middle
    if not low:
        return best
    time_s = firsts[low - 1]
    for _ in range(64):
        growing = [row for row, share in zip(rows, best, strict=True) if 0 < share < row[3]]
        if sum(best) == num_samples or not growing:
            break
        full = sum(share for row, share in zip(rows, best, strict=True) if share == row[3])
        real = sum((time_s - fixed_s) / slope_s for fixed_s, slope_s, _, _ in growing)
        next_s = time_s + (num_samples - full - real) / sum(1 / slope_s for _, slope_s, _, _ in growing)
        shares = held(next_s)
        if next_s <= time_s or sum(shares) > num_samples or (low < len(firsts) and next_s >= firsts[low]):
            break
        time_s, best = next_s, shares
    return best


def _held_by_many(rows: Sequence[tuple[float, float, float, int]], count: int) -> Callable[[float], list[int]]:
    """Return `held` of `_skip_ahead` in arrays: the same operations, and the same integers."""
    import numpy as np  # here, because most readers of this module need no arrays

    fixed_s, slope_s, first_s, limit = (np.array(column) for column in zip(*rows, strict=True))
    full_s = fixed_s + slope_s * limit
    least = np.minimum(count, limit)
    positive_s = np.where(slope_s > 0, slope_s, 1.0)

    def held(time_s: float) -> list[int]:
        share = np.clip(((time_s - fixed_s) / positive_s), 0, limit).astype(np.int64)
        while (more := (fixed_s + slope_s * (share + 1) <= time_s) & (share < limit)).any():
            share += more
        while (less := (share > count) & (fixed_s + slope_s * share > time_s)).any():
            share -= less
        share = np.clip(share, least, limit)
        found: list[int] = np.where(first_s > time_s, 0, np.where(full_s <= time_s, limit, share)).tolist()
        return found

    return held


def _fill_evenly(limits: Sequence[int], num_samples: int) -> list[int]:
    given = [0] * len(limits)
    left = min(num_samples, sum(limits))
    while left:
        free = [i for i, limit in enumerate(limits) if given[i] < limit]
        each, rest = divmod(left, len(free))
        for position, i in enumerate(free):
            take = min(each + (position < rest), limits[i] - given[i])
            given[i] += take
            left -= take
    return given


def _check_caps(caps: Caps, world_size: int) -> tuple[int | None, ...]:
    if caps is None:
        return (None,) * world_size
    if len(caps) != world_size or any(cap is not None and cap < 1 for cap in caps):
        raise ConfigError(
            f"caps {tuple(caps)} for {world_size} ranks: expected one for each rank, each at least 1 sample or None"
        )
    return tuple(caps)
