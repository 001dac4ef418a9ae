"""Exchanges between two ranks of one host: through shared memory, and over gloo.

Method: two processes, each on a core of its own. Blocks of 25 exchanges of each kind alternate; the figure is the median over
single exchanges on rank 0. A rank then waits for the other, which sleeps: its CPU time per wait, and the time from the other's
row until it has it.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.report import rows
from evenload.testing import run_ranks
from evenload.training.comm.host_exchange import ROW_VALUES, find_hosts, share_rows, share_statistics
from evenload.training.comm.shared_sums import SharedSums, share_sums
from evenload.training.launch.environment import detect

WAITS_S = (0.001, 0.01, 0.1, 1.0)


def measure(quick: bool) -> dict[str, Any]:
    """Both kinds, by size."""
    num_rounds = 1 if quick else 20
    result: dict[str, Any] = run_ranks(_measure_rank, 2, num_rounds, WAITS_S[:1] if quick else WAITS_S, timeout_s=300)[
        0
    ]
    gather, largest = result["exchanges"]["gather of 129"], result["exchanges"]["gradients of 25 MiB"]
    bars = {
        "a gather of 129 floats takes < 50 us": gather["shared"] < 50,
        "gradients of 25 MiB are added up in at most half of gloo's time": largest["shared"] <= largest["gloo"] / 2,
    }
    bars = {} if quick else bars
    return {**result, "bars": bars}


def table(result: dict[str, Any]) -> str:
    """For people."""
    exchanges = [
        [name, f"{found['shared']:.1f} us", f"{found['gloo']:.1f} us"] for name, found in result["exchanges"].items()
    ]
    waits = [
        [f"{float(wait_s):g} s", f"{found['cpu_us']:.0f} us", f"{found['late_us']:.0f} us"]
        for wait_s, found in result["waits"].items()
    ]
    return "\n\n".join(
        [
            rows(["exchange", "shared memory", "gloo"], exchanges),
            rows(["wait", "CPU of the waiter", "until it has the row"], waits),
        ]
    )


def _measure_rank(num_rounds: int, waits_s: tuple[float, ...]) -> dict[str, Any]:
    spec = detect()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[spec.rank % len(cores)]})
    host, _, port = spec.store.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False)
    dist.init_process_group("gloo", store=store, rank=spec.rank, world_size=spec.world_size)
    hosts = find_hosts(_gloo_gather)
    shared = share_rows(hosts, spec.rank, _gloo_gather, lambda _: _gloo_gather, 60.0)
    channel = share_statistics(hosts, spec.rank, (0, 1), _gloo_gather, 60.0)[1]
    sums = share_sums(hosts, spec.rank, (0, 1), _gloo_gather, 60.0)[1]
    if shared is None or channel is None or sums is None:
        raise RuntimeError("the ranks of this machine can't share memory")
    row = torch.zeros(ROW_VALUES, dtype=torch.float64)
    kinds: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        f"row of {ROW_VALUES}": (
            functools.partial(shared.exchange_row, row.tolist()),
            lambda: _gloo_gather(row).tolist(),
        )
    }
    for size in (129, 4_097):
        own = torch.randn(size)
        kinds[f"gather of {size}"] = (
            functools.partial(channel.gather, own),
            functools.partial(_gloo_gather, own),
        )
        kinds[f"sum of {size}"] = (
            functools.partial(channel.sum, torch.zeros(size)),
            functools.partial(dist.all_reduce, torch.zeros(size)),
        )
    for name, num_bytes in {"64 KiB": 1 << 16, "1 MiB": 1 << 20, "4 MiB": 4 << 20, "25 MiB": 25 << 20}.items():
        own = torch.zeros(num_bytes // 4)
        kinds[f"gradients of {name}"] = functools.partial(_sum, sums, own), functools.partial(dist.all_reduce, own)
    times_us: dict[str, dict[str, list[float]]] = {name: {"shared": [], "gloo": []} for name in kinds}
    for round_index in range(num_rounds + 1):
        for name, pair in kinds.items():
            for way, exchange in zip(("shared", "gloo"), pair, strict=True):
                found = _time_us(exchange, 25)
                if round_index:
                    times_us[name][way] += found
    waits = {str(wait_s): _wait(shared.exchange_row, spec.rank, wait_s) for wait_s in waits_s}
    shared.close()
    sums.close()
    exchanges = {name: {way: median(found) for way, found in ways.items()} for name, ways in times_us.items()}
    return {"exchanges": exchanges, "waits": waits}


def _sum(sums: SharedSums, gradients: torch.Tensor) -> None:
    sums.begin_attempt()
    started = sums.begin(gradients)
    assert started is not None
    started.wait()


def _gloo_gather(own: torch.Tensor) -> torch.Tensor:
    everyone = own.new_empty(dist.get_world_size(), own.numel())
    dist.all_gather(list(everyone.unbind()), own)
    return everyone


def _time_us(exchange: Callable[[], Any], count: int) -> list[float]:
    found = []
    for _ in range(count):
        began_s = time.perf_counter()
        exchange()
        found.append((time.perf_counter() - began_s) * 1e6)
    return found


def _wait(exchange_row: Callable[[list[float]], Any], rank: int, wait_s: float) -> dict[str, float]:
    """Rank 0 waits for rank 1; the times of both come from the same clock."""
    cpu_us, late_us = [], []
    for _ in range(max(3, round(0.5 / wait_s)) if wait_s < 1 else 2):
        if rank == 1:
            time.sleep(wait_s)
        before_s = time.thread_time()
        received = exchange_row([time.perf_counter()] * ROW_VALUES)
        now_s = time.perf_counter()
        cpu_us.append((time.thread_time() - before_s) * 1e6)
        late_us.append((now_s - received[1][0]) * 1e6)
    return {"cpu_us": median(cpu_us), "late_us": median(late_us)}
