"""A model under Evenload, without anything about speeds; its ranks only write their process ids, for quotas from outside."""

import argparse
import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Subset

import evenload

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.models import UNEVEN, build, loss_of

parser = argparse.ArgumentParser()
parser.add_argument("model", choices=sorted(UNEVEN))
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--pids", type=Path)
args = parser.parse_args()
size = UNEVEN[args.model]

run = evenload.init()
if args.pids is not None:
    (args.pids / str(run.rank)).write_text(str(os.getpid()))
model, data = build(size)
data = Subset(data, range(min(len(data), args.steps * size.batch_size)))
model, loader = run.prepare(model, DataLoader(data, batch_size=size.batch_size, shuffle=True))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
run.resume(model=model, optimizer=optimizer)

for _ in range(loader.epoch, -(-args.steps // len(loader))):
    for step in loader:
        loss = step.backward(lambda batch: loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
