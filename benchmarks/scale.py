"""The step's own cost at 64, 1,000 and 10,000 ranks, and a prediction of its exchange.

Method: the real Python of one rank's step, on a table of as many rows as there are ranks: `ReportExchange` (own row,
table, reading), checks and totals, `StepStats`, `Planner` (plan, observe), and the cost for the loader. The deciding
rank (0) also has the `Balancer`, of more than 128 ranks in a process of its own, and the `Recorder`, which writes to a temporary
folder. The table comes from memory instead of a network. Ranks have speeds over a factor of two, 2 % of noise, and one of them
halves its speed midway. Each step is followed by 50 ms without work, in which that process computes. Figures are CPU seconds
of the thread, the median and the longest over all steps but the first, and the seconds of that process.

The exchange is a formula: twice the shared memory of a host (a row in, the table out), one hop after the other
between hosts (`grid_gather.num_hops`), and the bytes of the table at 10 Gbit/s. Once with hops of 50 us, once with an
all-gather of gloo between two ranks of this machine as a hop, which is slower than a network's: it wakes two threads
on shared cores.

Bars, at 1,000 ranks: Python of any rank at most 1 ms a step (median), the longest of the deciding rank at most 5 ms, all of its
calls in a step together.
Exchange with hops of 50 us: at most 1 ms at 64 ranks and 3 ms at 1,000, with 8 ranks on each host.
"""

from __future__ import annotations

import random
import resource
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import exchange as small_exchanges
from benchmarks.report import rows
from evenload.balance.decision import Decision
from evenload.balance.rank_costs import MANY_RANKS
from evenload.records.recorder import Recorder
from evenload.training.comm.clock import SEGMENTS, StepClock
from evenload.training.comm.control import Control, Operation
from evenload.training.comm.grid_gather import num_hops
from evenload.training.comm.host_exchange import ROW_VALUES
from evenload.training.parallel.strategy import LocalResult
from evenload.training.step.consistency import Consistency
from evenload.training.step.exchange import ReportExchange, check_trained, totals_of
from evenload.training.step.planner import Planner
from evenload.training.step.report import COLUMNS, SECONDS
from evenload.training.step.stats import StepStats
from evenload.training.step.step_recorder import StepRecorder

STEPS = {64: 300, 1_000: 120, 10_000: 16}
RANKS_PER_HOST = 8
HOP_S = 50e-6
BYTES_PER_S = 1.25e9
STEP_S = 0.05
"""Between two steps, where a process decides."""
_SAMPLES_PER_RANK = 32
_HEAD = 4
"""Columns of a row before those of the report."""


class SimulatedRanks:
    """The members of an exchange, of which this process is one; the rows of the others come from memory."""

    closed = gone = False
    timeout_s = 60.0

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.world_size = num_ranks
        self.ranks = range(num_ranks)
        self.control = object()
        self.compute_s = np.zeros(num_ranks)
        """Seconds that each rank reports for its next step."""
        self.made_s = 0.0
        """What it took to make the last table, in place of a network."""

    def exchange_row(self, row: Sequence[float]) -> NDArray[np.float64]:
        """Every rank sends what this one does, but for the seconds."""
        since_s = time.thread_time()
        table = np.repeat(np.array([row]), self.world_size, axis=0)
        if row[0] == Operation.BACKWARD:
            reports = table[:, _HEAD:]
            reports[:, SECONDS] = 0.0
            reports[:, SECONDS.start + SEGMENTS.index("compute")] = self.compute_s
            if self.rank:
                reports[0, COLUMNS["has_decision"]] = 0.0
        self.made_s = time.thread_time() - since_s
        return table


class _OwnControl(Control):
    def agree(self, values: Sequence[int] | None) -> list[int]:
        return list(values or ())


def measure(quick: bool) -> dict[str, Any]:
    """Own Python by number of ranks and role, and the predicted exchange."""
    found: dict[str, Any] = {}
    decisions: dict[str, Any] = {}
    for num_ranks, num_steps in STEPS.items():
        if quick and num_ranks > 1_000:
            continue
        for role, rank in (("plain", 1), ("deciding", 0)):
            with tempfile.TemporaryDirectory() as folder:
                before_s = _children_s()
                parts, num_decisions = _steps(rank, num_ranks, 8 if quick else num_steps, Path(folder))
            found[f"{num_ranks} {role}"] = {
                name: {"median_ms": 1e3 * median(times), "longest_ms": 1e3 * max(times)}
                for name, times in parts.items()
            }
            if rank == 0:
                process_ms = 1e3 * (_children_s() - before_s) / len(parts["whole"])
                decisions[f"{num_ranks} ranks"] = {"decisions": num_decisions, "process_ms_a_step": process_ms}
    measured = small_exchanges.measure(quick=True)["exchanges"][f"row of {ROW_VALUES}"]
    shared_s, gloo_s = measured["shared"] * 1e-6, measured["gloo"] * 1e-6
    predicted = {
        f"{num_ranks} ranks, {per_host} a host": {
            "hops": num_hops(-(-num_ranks // per_host)),
            "ms": 1e3 * predict_s(num_ranks, per_host, HOP_S, shared_s),
            "measured_hop_ms": 1e3 * predict_s(num_ranks, per_host, gloo_s, shared_s),
        }
        for num_ranks in STEPS
        for per_host in (RANKS_PER_HOST, 1)
    }
    own = {role: found[f"1000 {role}"] for role in ("plain", "deciding")}
    exchange_ms = [predicted[f"{num_ranks} ranks, {RANKS_PER_HOST} a host"]["ms"] for num_ranks in (64, 1_000)]
    return {
        "own": found,
        "decisions": decisions,
        "exchange": predicted,
        "shared_us": measured["shared"],
        "measured_hop_us": measured["gloo"],
        "bars": {
            "a plain rank's Python at 1,000 ranks <= 1 ms": own["plain"]["whole"]["median_ms"] <= 1,
            "the deciding rank's Python at 1,000 ranks <= 1 ms": own["deciding"]["whole"]["median_ms"] <= 1,
            "the deciding rank's longest call at 1,000 ranks <= 5 ms": own["deciding"]["whole"]["longest_ms"] <= 5,
            "exchange of 64 ranks <= 1 ms, of 1,000 <= 3 ms": exchange_ms[0] <= 1 and exchange_ms[1] <= 3,
        },
    }


def predict_s(num_ranks: int, ranks_per_host: int, hop_s: float, shared_s: float) -> float:
    """Return the seconds of one exchange of rows."""
    num_hosts = -(-num_ranks // ranks_per_host)
    inside_s = 2 * shared_s if ranks_per_host > 1 else 0.0
    return inside_s + num_hops(num_hosts) * hop_s + num_ranks * ROW_VALUES * 8 / BYTES_PER_S


def _children_s() -> float:
    """Return the CPU seconds of processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table(result: dict[str, Any]) -> str:
    """For people."""
    own = [
        [case, name, f"{times['median_ms']:.3f}", f"{times['longest_ms']:.2f}"]
        for case, parts in result["own"].items()
        for name, times in parts.items()
    ]
    predicted = [
        [case, str(found["hops"]), f"{found['ms']:.2f}", f"{found['measured_hop_ms']:.2f}"]
        for case, found in result["exchange"].items()
    ]
    hop = f"hop of {result['measured_hop_us']:.0f} us, measured [ms]"
    return "\n\n".join(
        [
            rows(["ranks, role", "part", "median [ms]", "longest [ms]"], own),
            rows(["exchange of", "hops", "hop of 50 us [ms]", hop], predicted),
        ]
    )


def _steps(rank: int, num_ranks: int, num_steps: int, folder: Path) -> tuple[dict[str, list[float]], int]:
    """Run steps of one rank; return the seconds of each part in each step but the first, and the number of decisions."""
    ranks = SimulatedRanks(rank, num_ranks)
    control = _OwnControl(ranks)  # type: ignore[arg-type]
    clock = StepClock(torch.device("cpu"))
    consistency = Consistency(0, control, print)
    exchange = ReportExchange(control, clock, consistency, torch.device("cpu"))
    batch_size = _SAMPLES_PER_RANK * num_ranks
    decided: list[Decision] = []

    def announce(decision: Decision, step: int) -> None:
        decided.append(decision)
        step_recorder.event("balance", decision.reason, step, shares=list(decision.shares))

    planner = Planner(
        control,
        rank=rank,
        world_size=num_ranks,
        batch_size=batch_size,
        balance="auto",
        micro_batch="auto",
        announce=announce,
    )
    recorder = Recorder(folder if rank == 0 else None)
    step_recorder = StepRecorder(recorder, rank == 0)
    batch: Any = SimpleNamespace(reading=SimpleNamespace(code=lambda: 0.0))
    rng = random.Random(num_ranks)
    speeds = np.array([rng.uniform(1, 2) for _ in range(num_ranks)])
    times: dict[str, list[float]] = {name: [] for name in ("rows", "totals", "plan", "decide", "record", "whole")}
    for step in range(num_steps):
        if step == num_steps // 2:
            speeds[num_ranks // 3] *= 2
        noise = np.array([rng.gauss(1, 0.02) for _ in range(num_ranks)])
        marks = [time.thread_time()]
        plan = planner.plan(0, step, step, 0, batch_size)
        marks.append(time.thread_time())
        ranks.compute_s = 1e-3 * (np.array(plan.shares) + 4) * speeds * noise
        stats = StepStats()
        batch.plan = plan
        result = LocalResult(units=1.0, loss_sum=rng.random(), metrics={"a": 1.0}, memory_bytes=1 << 30)
        exchange.begin()
        marks.append(time.thread_time())
        reports = exchange.run([result], batch, planner, stats)
        marks.append(time.thread_time())
        check_trained(reports, step)
        stats.add(reports)
        if reports.first("has_decision"):
            planner.sync_decision(step)
        if reports.agreed.failed:
            raise RuntimeError("no attempt fails here")
        planner.may_leave = reports.flags("may_leave")
        if reports.all("state_key"):
            consistency.check(step, reports.column("state_key"))
        totals = totals_of(reports, step)
        stats.metrics["a"] = totals.loss
        stats.loss, stats.calls = totals.loss, 1
        marks.append(time.thread_time())
        planner.observe(step, plan, stats.own_seconds(), step == 0 or stats.unusual, stats.whole_seconds())
        marks.append(time.thread_time())
        stats.cost(plan.num_samples)
        step_recorder.step(step, plan, stats)
        step_recorder.write_waiting()  # a step of so many ranks takes long enough to be written by itself
        marks.append(time.thread_time())
        plan_s, _, rows_s, totals_s, decide_s, record_s = (b - a for a, b in pairwise(marks))
        spent = {
            "rows": rows_s - ranks.made_s,
            "totals": totals_s,
            "plan": plan_s,
            "decide": decide_s,
            "record": record_s,
        }
        for name, seconds in {**spent, "whole": sum(spent.values())}.items():
            if step:
                times[name].append(seconds)
        if num_ranks > MANY_RANKS:
            time.sleep(STEP_S)
    recorder.close()
    return times, len(decided)
