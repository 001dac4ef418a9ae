"""One set of processes, two equal ranks: blocks of Evenload's steps alternate with blocks of plain DDP's.

On a single rank they alternate with those of a plain loop. The model, the optimizer, the data and the samples of each rank
are the same; both gradients travel over gloo. Rank 0 prints a result as JSON. The arm `local` is Evenload
with BatchNorm over each rank alone.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import evenload

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.models import Size, build, loss_of

from evenload.records.measurement import TimedBlock, bootstrap
from evenload.training.compute import batchnorm

parser = argparse.ArgumentParser()
parser.add_argument("size", type=json.loads)
parser.add_argument("--block-s", type=float, default=3.0)
parser.add_argument("--warm-steps", type=int, default=8, help="of each arm; the balancer looks for the first time")
parser.add_argument("--limit-s", type=float, default=300.0)
parser.add_argument("--arms", default="evenload,ddp,ddp again")
parser.add_argument("--goal", type=float, default=0.005, help="half-width of the interval of the ratio")
args = parser.parse_args()
size = Size(**args.size)
ARMS = tuple(args.arms.split(","))


def forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


run = evenload.init()
torch.manual_seed(0)
model, data = build(size)
ours, loader = run.prepare(model, DataLoader(data, batch_size=size.batch_size, shuffle=True))
optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-4, fused=True)
clock, loop = run._context.clock, run._context.loop
has_batch_norm = batchnorm.has_global_statistics(ours)


def barrier() -> None:
    if run.world_size > 1:
        dist.barrier()


def plain(seed: int) -> Callable[[], None]:
    """A step of plain DDP, with a replica, an optimizer and a loader of its own."""
    bare = build(size)[0]
    wrapped = torch.nn.parallel.DistributedDataParallel(bare) if run.world_size > 1 else bare
    own = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)
    sampler = DistributedSampler(data, run.world_size, run.rank, seed=seed)
    batches = forever(DataLoader(data, batch_size=size.batch_size // run.world_size, sampler=sampler))

    def step() -> None:
        loss_of(wrapped, next(batches)).backward()
        own.step()
        own.zero_grad()

    return step


plain_steps = {"ddp": plain(1), "ddp again": plain(2)}
steps = forever(loader)


def evenload_step() -> None:
    step = next(steps)
    step.backward(lambda batch: loss_of(ours, batch))
    optimizer.step()
    optimizer.zero_grad()


def set_batch_norm(*, is_global: bool) -> None:
    """What the setting batch_norm would be for the whole run."""
    if has_batch_norm:
        (batchnorm.convert if is_global else batchnorm.restore)(ours)
        run._context.engine.strategy._statistics.in_use = is_global


def block(arm: str, num_steps: int) -> tuple[float, float]:
    """Wall and this thread's CPU seconds of some steps, from a barrier to a barrier."""
    # What is no step of Evenload's must neither count as the last step's optimizer nor be checked as such.
    before, step = clock.switch("other"), loop.step
    set_batch_norm(is_global=arm == "evenload")
    barrier()
    wall_s, cpu_s = time.perf_counter(), time.thread_time()
    if arm in ("evenload", "local"):
        for _ in range(num_steps):
            evenload_step()
        clock.switch("other")
    else:
        loop.step = None
        for _ in range(num_steps):
            plain_steps[arm]()
        loop.step = step
    cpu_s = time.thread_time() - cpu_s
    barrier()
    wall_s = time.perf_counter() - wall_s
    clock.switch(before)
    return wall_s, cpu_s


for arm in ARMS:
    block(arm, args.warm_steps)
num_steps = max(2, round(args.block_s / (run.reduce(block("ddp", 4)[0], "max") / 4)))
rounds: list[dict[str, TimedBlock]] = []
cpu: dict[str, list[float]] = {arm: [] for arm in ARMS}
began_s = time.monotonic()


def ratio(above: str, below: str) -> Any:
    return bootstrap([found[above].per_s[0] / found[below].per_s[0] for found in rounds])


def own_wall_s() -> Any:
    """Seconds that a step of Evenload takes longer."""
    return bootstrap([(found["evenload"].seconds[0] - found["ddp"].seconds[0]) / num_steps for found in rounds])


while True:
    round_: dict[str, TimedBlock] = {}
    turn = len(rounds) % len(ARMS)
    order = ARMS[turn:] + ARMS[:turn]
    for arm in order if len(rounds) % 2 else order[::-1]:
        wall_s, cpu_s = block(arm, num_steps)
        round_[arm] = TimedBlock(arm, len(rounds), (num_steps * size.batch_size,), (wall_s,))
        cpu[arm].append(cpu_s / num_steps)
    rounds.append(round_)
    enough = len(rounds) >= 6 and ratio("evenload", "ddp").half_width <= args.goal
    if run.any(run.is_main and (enough or time.monotonic() - began_s > args.limit_s)):
        break


def nothing() -> None:
    """What a call costs under the profiler."""


def profiler_cost_s(count: int = 20_000) -> float:
    """Self time that the profiler adds to a Python function at each call."""
    probe = cProfile.Profile(time.thread_time)
    probe.enable()
    for _ in range(count):
        nothing()
    probe.disable()
    return (
        next(self_s for (_, _, name), (_, _, self_s, _, _) in pstats.Stats(probe).stats.items() if name == "nothing")
        / count
    )


# Evenload's own CPU time: what its own Python takes, without what it calls in torch.
call_s = profiler_cost_s()
profile = cProfile.Profile(time.thread_time)
before = clock.switch("other")
barrier()
profile.enable()
for _ in range(num_steps):
    evenload_step()
profile.disable()
own_s: dict[str, float] = {}
here = str(Path(evenload.__file__).parent)
for (file, line, name), (_, num_calls, self_s, _, _) in pstats.Stats(profile).stats.items():
    if file.startswith(here):
        own_s[f"{Path(file).name}:{line} {name}"] = (self_s - num_calls * call_s) / num_steps
step_s = median(found["evenload"].seconds[0] for found in rounds) / num_steps
if run.is_main:
    result = {
        **{f"{arm.split()[0]}_over_ddp": vars(ratio(arm, "ddp")) for arm in ARMS if arm != "ddp"},
        **({"local_over_evenload": vars(ratio("local", "evenload"))} if "local" in ARMS else {}),
        "own_wall_s": vars(own_wall_s()),
        "step_s_of": {arm: median(found[arm].seconds[0] for found in rounds) / num_steps for arm in ARMS},
        "num_rounds": len(rounds),
        "steps_a_block": num_steps,
        "step_s": step_s,
        "own_cpu_s": sum(own_s.values()),
        "own_cpu_share": sum(own_s.values()) / step_s,
        "thread_cpu_s": {arm: median(seconds) for arm, seconds in cpu.items()},
        "dearest": dict(sorted(own_s.items(), key=lambda item: -item[1])[:12]),
        "shares": list(loader.planner.shares),
    }
    Path(run._context.folder, "overhead.json").write_text(json.dumps(result))
run.any(False)
