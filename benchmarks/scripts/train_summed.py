"""One machine of ``benchmarks islands --only summed``: islands and lone ranks by turns in one process.

Every `--block` steps, in the middle between two synchronisations, when the link is quiet, this rank trains a copy of the model
without Evenload for `--alone` seconds, from when it gets there. So the islands stay as far apart as they were, and no rank
waits here. The clock of the step stands still meanwhile. It runs until it is killed.
"""

import argparse
import copy
import json
import os
import socket
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import evenload
from evenload.training.comm.clock import ProcessorDelay

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.models import example_classes

parser = argparse.ArgumentParser()
parser.add_argument("--pids", required=True, help="folder for this process's id")
parser.add_argument("--out", required=True, help="folder for the result")
parser.add_argument("--size", required=True, help="batch, context, width, depth")
parser.add_argument("--warm", type=int, required=True, help="steps before the first turn alone")
parser.add_argument("--block", type=int, required=True, help="steps between two turns alone")
parser.add_argument("--alone", type=float, required=True, help="seconds of a turn alone")
args = parser.parse_args()

RANK = int(socket.gethostname() == "box2")
batch_size, context, width, depth = map(int, args.size.split(","))
Path(args.pids, str(RANK)).write_text(str(os.getpid()))
time.sleep(0.3)  # the quota holds from here
torch.manual_seed(0)
library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in library)), dtype=torch.uint8)
classes = example_classes()
model = classes.GPT(width, depth, context)
crops = classes.Crops(text[:-50_000], batch_size * 1000, context)


def loss_of(net: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    loss: torch.Tensor = F.cross_entropy(net(x).flatten(0, 1), y.flatten())
    return loss


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)


def stolen_s() -> float:
    """Seconds in which the cores were ready and the host of this virtual machine ran something else."""
    return int(Path("/proc/stat").read_text().split(maxsplit=9)[8]) / os.sysconf("SC_CLK_TCK")


class Alone:
    """Half a batch at a time on a copy of the model, as a rank of `ddp` would compute it, and nothing to exchange."""

    def __init__(self) -> None:
        self._net = copy.deepcopy(model)
        self._optimizer = adamw(self._net)
        self._batches: Iterator[Any] = iter(DataLoader(crops, batch_size=batch_size // 2))

    def turn(self, seconds: float) -> float:
        """Train so long, and return the samples in a second."""
        began_s, took_s, done = time.perf_counter(), 0.0, 0
        while took_s + took_s / max(done, 1) <= seconds:
            loss_of(self._net, next(self._batches)).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            done, took_s = done + 1, time.perf_counter() - began_s
        time.sleep(max(0.0, seconds - took_s))
        return done * (batch_size // 2) / took_s


run = evenload.init(seed=0, check_every="off")
torch.set_num_threads(1)  # each machine believes that it has all cores
net, loader = run.prepare(model, DataLoader(crops, batch_size=batch_size))
optimizer = adamw(model)
lone = Alone()
lone.turn(0.5)
clock = loader._loop.engine.clock  # nothing in a script's own hands stops it inside a loop of local_steps=auto
islands_per_s: list[float] = []
alone_per_s: list[float] = []
cpu_s: list[float] = []
trace: list[list[float]] = []
delay = ProcessorDelay()
samples, since_s, cpu_since_s, turns = 0, time.perf_counter(), time.process_time(), 0
for step in loader:
    samples += step.batch.plan.num_samples
    began_s, helpers_s = time.perf_counter(), time.process_time() - time.thread_time()
    step.backward(lambda batch: loss_of(net, batch))
    optimizer.step()
    optimizer.zero_grad()
    done = step.batch.plan.progress.step
    trace.append(
        [done, step.batch.plan.num_samples, began_s, time.perf_counter(), helpers_s, stolen_s(), delay.take_s()]
    )
    if done >= args.warm + turns * args.block:
        now_s = time.perf_counter()
        if turns:
            islands_per_s.append(samples / (now_s - since_s))
            cpu_s.append((time.process_time() - cpu_since_s) / (now_s - since_s))
        with clock.segment("other"):
            alone_per_s.append(lone.turn(args.alone))
        turns += 1
        found = {"islands": islands_per_s, "alone": alone_per_s, "cores": cpu_s, "trace": trace}
        part = Path(args.out, f"{RANK}.part")
        part.write_text(json.dumps(found))
        part.rename(Path(args.out, f"{RANK}.json"))
        samples, since_s, cpu_since_s = 0, time.perf_counter(), time.process_time()
