"""A training with two loader workers, of which one rank becomes three times as slow at a step; records tell the rest."""

import argparse
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import evenload
from evenload.testing.faults import set_throttle

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.models import CHANGING, build, loss_of

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--change-at", type=int, required=True)
parser.add_argument("--rank", type=int, required=True)
parser.add_argument("--batch-size", type=int, default=CHANGING.batch_size)
args = parser.parse_args()

run = evenload.init()
model, data = build(CHANGING)
loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, num_workers=2)
model, loader = run.prepare(model, loader)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for step in loader:
    if step.index == args.steps:
        break
    if step.index == args.change_at and run.is_main:
        set_throttle([1 / 3 if rank == args.rank else 1.0 for rank in range(run.world_size)])
    loss = step.backward(lambda batch: loss_of(model, batch))
    optimizer.step()
    optimizer.zero_grad()
