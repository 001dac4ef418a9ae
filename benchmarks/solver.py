"""The split of one step: 1,000 ranks, a global batch of 1,000,000 samples.

Method: random costs (fixed seconds and seconds a sample over a factor of eight, every tenth rank with a memory cap), seeds
0 to 19; the time of one `split_batch` call, in one thread, of which the slowest and the median are told. Equality with
brute force on small cases is a property test (tests/unit/balance/test_split.py).

Bar: at most 20 ms.
"""

from __future__ import annotations

import random
import time
from statistics import median
from typing import Any

from evenload.balance.split import split_batch
from evenload.balance.values import Cost

BAR_S = 0.020


def measure(quick: bool) -> dict[str, Any]:
    """Times of one split."""
    times = []
    for seed in range(3 if quick else 20):
        rng = random.Random(seed)
        costs = [Cost(rng.uniform(0, 0.05), 1e-3 * 2 ** rng.uniform(0, 3)) for _ in range(1000)]
        caps = [4000 if rank % 10 == 0 else None for rank in range(1000)]
        began_s = time.perf_counter()
        split = split_batch(1_000_000, costs, caps)
        times.append(time.perf_counter() - began_s)
        if sum(split.shares) != 1_000_000:
            raise RuntimeError(f"the shares of seed {seed} sum to {sum(split.shares)}")
    return {
        "seconds": times,
        "median_s": median(times),
        "slowest_s": max(times),
        "bars": {f"1,000 ranks in {BAR_S * 1e3:g} ms": median(times) <= BAR_S},
    }


def table(result: dict[str, Any]) -> str:
    """For people."""
    return (
        f"1,000 ranks, 1,000,000 samples: median {result['median_s'] * 1e3:.1f} ms, slowest "
        f"{result['slowest_s'] * 1e3:.1f} ms of {len(result['seconds'])}"
    )
