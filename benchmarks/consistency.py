"""Whether a rank that no longer holds what the others hold is found within N steps, and what looking costs.

Method, divergence: two CPU ranks train a small GPT with a few buffers, check_every as it is by default. Fifty times, at a
step drawn at random, one rank (drawn too) is harmed: a random bit of a random value of a random parameter flips, two values
change places, a buffer or a value in the optimizer's state changes, or a buffer is updated from the rank's own samples.
Counted are the steps until all ranks raise the error that names it; then the ranks are made equal again, and training goes
on.

Method, cost: two CPU ranks train the example's GPT. Blocks of steps alternate in one set of processes: compared in every
step, and never. The ratio of their times is that of one comparison in every step; by default there is one in N. Medians over
rounds, with a 95 % bootstrap interval. Beside it, the seconds that the checksum itself takes, by the clock.

Bars: found within N steps in 50 of 50, the harmed tensor named; the upper bound of the cost at the default N at most 0.5 % of
a step.
"""

from __future__ import annotations

import random
import tempfile
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import evenload
from benchmarks.models import GPT, TINY_GPT, Size, build, loss_of
from evenload.config import Config
from evenload.errors import DivergenceError
from evenload.records.measurement import TimedBlock, bootstrap
from evenload.testing import run_ranks

EVERY = int(Config.check_every)
KINDS = ("a bit of a parameter", "two values of a parameter", "a buffer", "optimizer state", "a buffer of own samples")


def measure(quick: bool) -> dict[str, Any]:
    """Both."""
    count = 5 if quick else 50
    with tempfile.TemporaryDirectory(prefix="evenload-bench-") as folder:
        harms = run_ranks(_harm, 2, f"{folder}/harm", count, timeout_s=600.0)
        cost = run_ranks(_cost, 2, f"{folder}/cost", TINY_GPT if quick else GPT, 2 if quick else 20, timeout_s=900.0)[0]
    same = harms[0] == harms[1]
    in_time = sum(harm["steps"] is not None and harm["steps"] <= EVERY and harm["named"] for harm in harms[0])
    result: dict[str, Any] = {"every": EVERY, "count": count, "in_time": in_time, "harms": harms[0], "cost": cost}
    result["bars"] = {
        f"found within {EVERY} steps, on both ranks, by name: {in_time} of {count}": same and in_time == count,
        "upper bound of the cost at most 0.5 % of a step": cost["share"]["high"] <= 0.005,
    }
    return result


def table(result: dict[str, Any]) -> str:
    """For people."""
    cost, share = result["cost"], result["cost"]["share"]
    steps = [harm["steps"] for harm in result["harms"]]
    return (
        f"found within {result['every']} steps: {result['in_time']} of {result['count']} (after {steps} steps)\n"
        f"a comparison: {cost['checksum_s'] * 1e3:.2f} ms of checksum in a step of {cost['step_s'] * 1e3:.1f} ms; one in "
        f"{result['every']} steps costs {share['value'] * 100:.3f} % ({share['low'] * 100:.3f} to {share['high'] * 100:.3f})"
    )


class _Watched(torch.nn.Module):
    """The model with buffers that a rank may get wrong."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(1000, dtype=torch.float64))
        self.register_buffer("average", torch.zeros(4))
        self.tracks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tracks:
            self.average.lerp_(x[:, :4].float().mean(0), 0.5)
        return self.inner(x)


def _harm(folder: str, count: int) -> list[dict[str, Any]]:
    """Harms one rank after the other; both ranks return what they were told."""
    run = evenload.init(project_dir=folder, seed=0, balance="even")
    inner, data = build(TINY_GPT)
    model, loader = run.prepare(_Watched(inner), DataLoader(data, batch_size=TINY_GPT.batch_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rng = random.Random(0)  # the same on all ranks
    found: list[dict[str, Any]] = []
    now: dict[str, Any] | None = None
    wait = 3
    for step in loader:
        if now is None and wait <= 0:
            kind = KINDS[len(found) % len(KINDS)]
            now = {"kind": kind, "since": step.index, "rank": rng.randrange(2), "steps": None, "named": False}
            now["tensor"] = _do(kind, model, optimizer, rng, harmed=run.rank == now["rank"])
        wait -= 1
        try:
            step.backward(lambda batch: loss_of(model, batch))
        except DivergenceError as error:
            if now is None:
                raise
            found.append({**now, "steps": step.index - now["since"], "named": now["tensor"] in str(error)})
            _heal(model, optimizer)
            now, wait = None, rng.randint(2, 11)
            if len(found) == count:
                break
            continue
        optimizer.step()
        optimizer.zero_grad()
        if now is not None and step.index - now["since"] > 2 * EVERY:
            found.append(now)  # never found
            break
    run.close()
    return found


def _do(kind: str, model: Any, optimizer: torch.optim.Optimizer, rng: random.Random, *, harmed: bool) -> str:
    """Draws alike on all ranks, and harms one; the name of the tensor."""
    if kind == "a buffer of own samples":
        model.tracks = True
        return "buffer average"
    if kind == "a buffer":
        if harmed:
            model.table[rng.randrange(1000)] += 1e-9
        else:
            rng.randrange(1000)
        return "buffer table"
    name, parameter = rng.choice(list(model.named_parameters()))
    tensor = parameter.data if kind != "optimizer state" else optimizer.state[parameter]["exp_avg"]
    flat = tensor.view(-1)
    first, second, bit = rng.randrange(flat.numel()), rng.randrange(flat.numel()), rng.randrange(23)
    if harmed and kind == "two values of a parameter":
        flat[[first, second]] = flat[[second, first]]
        if flat[first] == flat[second]:
            flat[first] += 1e-3  # equal, or the same place: nothing would have changed
    elif harmed and kind == "optimizer state":
        flat += 0.01
    elif harmed:
        flat.view(torch.int32)[first] ^= 1 << bit
    return f"parameter {name}"


def _heal(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Everything as on rank 0."""
    model.tracks = False
    state = [value for held in optimizer.state.values() for value in held.values()]
    for tensor in (*model.parameters(), *model.buffers(), *state):
        dist.broadcast(tensor.detach(), 0)


def _cost(folder: str, size: Size, num_rounds: int) -> dict[str, Any]:
    """Alternates blocks of steps with and without comparisons."""
    run = evenload.init(project_dir=folder, seed=0, balance="even", check_every=1)
    model, data = build(size)
    model, loader = run.prepare(model, DataLoader(data, batch_size=size.batch_size, shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    consistency = run._context.engine._consistency
    begin, key, checksum_s = consistency.begin, consistency.key, [0.0, 0]

    def timed_begin(*args: Any, **kwargs: Any) -> None:
        began_s = time.perf_counter()
        begin(*args, **kwargs)
        checksum_s[0] += time.perf_counter() - began_s

    def timed_key() -> float:
        began_s = time.perf_counter()
        found = key()
        checksum_s[0] += time.perf_counter() - began_s
        checksum_s[1] += found > 0
        return found

    consistency.begin, consistency.key = timed_begin, timed_key
    steps = iter(_forever(loader))

    def block(arm: str, num_steps: int) -> float:
        consistency.every = 1 if arm == "compared" else 0
        dist.barrier()
        began_s = time.perf_counter()
        for _ in range(num_steps):
            next(steps).backward(lambda batch: loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        return time.perf_counter() - began_s

    block("compared", 3)
    num_steps = 4
    rounds = []
    checksum_s[:] = [0.0, 0]
    for index in range(num_rounds):
        arms = ("compared", "never") if index % 2 else ("never", "compared")
        rounds.append({arm: TimedBlock(arm, index, (num_steps,), (block(arm, num_steps),)) for arm in arms})
    ratio = bootstrap([one["never"].per_s[0] / one["compared"].per_s[0] for one in rounds])
    run.close()
    return {
        "num_rounds": num_rounds,
        "step_s": median(1 / one["never"].per_s[0] for one in rounds),
        "checksum_s": checksum_s[0] / max(1, checksum_s[1]),
        "num_values": sum(p.numel() for p in model.parameters()),
        "share": {
            "value": (ratio.value - 1) / EVERY,
            "low": (ratio.low - 1) / EVERY,
            "high": (ratio.high - 1) / EVERY,
        },
    }


def _forever(loader: Any) -> Any:
    while True:
        yield from loader
