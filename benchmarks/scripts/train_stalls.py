"""A training for a time on devices whose speed stalls: a rank becomes five times as slow for two seconds, at random."""

import argparse
import json
import random
import sys
import threading
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import evenload
from evenload.testing.faults import set_throttle

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.models import small_cnn

STALL_S, FACTOR = 2.0, 5.0
BATCH = 2048

parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float, required=True)
parser.add_argument("--speeds", required=True, help="of all processes, the server too")
parser.add_argument("--stalling", required=True, help="the processes that stall")
parser.add_argument("--validate-every", type=int, default=10, help="steps; those of a synchronisation under local")
parser.add_argument("--every", type=float, default=10.0, help="mean seconds between two stalls of one of them")
args = parser.parse_args()

speeds = [float(speed) for speed in args.speeds.split(",")]
stalling = [int(rank) for rank in args.stalling.split(",")]


def stall(until_s: float) -> None:
    """Begin and end stalls in rank 0's process; each device draws its own times, the same in all arms."""
    draws = {rank: random.Random(int(speeds[rank] * 100)) for rank in stalling}
    next_s = {rank: time.monotonic() + draw.expovariate(1 / args.every) for rank, draw in draws.items()}
    ends_s = dict.fromkeys(stalling, 0.0)
    before: list[float] = []
    while (now_s := time.monotonic()) < until_s:
        for rank in stalling:
            if now_s >= next_s[rank]:
                ends_s[rank] = now_s + STALL_S
                next_s[rank] = ends_s[rank] + draws[rank].expovariate(1 / args.every)
        factors = [speed / FACTOR if now_s < ends_s.get(rank, 0.0) else speed for rank, speed in enumerate(speeds)]
        if factors != before:
            set_throttle(factors)
            before = factors
        time.sleep(0.05)


torch.manual_seed(0)
run = evenload.init()
generator = torch.Generator().manual_seed(0)
centres = torch.randn(10, 3, 16, 16, generator=generator)
labels = torch.randint(0, 10, (24_400,), generator=generator)
data = centres[labels] + 2.5 * torch.randn(24_400, 3, 16, 16, generator=generator)
# Epochs of a hundred steps: at the end of each one every rank waits for the last gradient.
train_set = Subset(TensorDataset(data[:24_000], labels[:24_000]), [*range(24_000)] * 10)
model = small_cnn()
model, loader = run.prepare(model, DataLoader(train_set, batch_size=BATCH, shuffle=True, drop_last=True))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
curve: list[tuple[float, float]] = []
num_samples, began_s, over = 0, 0.0, False


def loss_fn(batch: list[torch.Tensor]) -> torch.Tensor:
    images, classes = batch
    loss: torch.Tensor = F.cross_entropy(model(images), classes)
    return loss


def validate(module: nn.Module) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(module(data[24_000:]), labels[24_000:]))


while not over:
    for step in loader:
        if not began_s and run.is_main:  # the first steps start everything
            began_s = time.monotonic()
            threading.Thread(target=stall, args=(began_s + args.seconds,), daemon=True).start()
        elif not began_s:
            began_s = time.monotonic()
        over = run.any(time.monotonic() - began_s > args.seconds)
        if over:
            break
        if run.is_main and step.index % args.validate_every == 0:  # islands hold the same weights now
            curve.append((time.monotonic() - began_s, validate(model)))
        step.backward(loss_fn)
        optimizer.step()
        optimizer.zero_grad()
        num_samples += BATCH
    over = run.any(over)
if run.is_main:
    seconds = time.monotonic() - began_s
    found = {"samples": num_samples, "seconds": seconds, "loss": validate(model), "curve": curve}
    Path(run._context.folder, "stalls.json").write_text(json.dumps(found))
