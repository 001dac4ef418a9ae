"""The small CNN under Evenload; an ordinary script, as a user would write it."""

import argparse
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Subset

import evenload

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.models import images, loss_of, small_cnn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch-size", type=int, default=270)
args = parser.parse_args()

run = evenload.init()
data = Subset(images(), range(min(24_000, args.steps * args.batch_size)))
model, loader = run.prepare(small_cnn(), DataLoader(data, batch_size=args.batch_size, shuffle=True))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
run.resume(model=model, optimizer=optimizer)

for _ in range(loader.epoch, -(-args.steps // len(loader))):
    for step in loader:
        loss = step.backward(lambda batch: loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
