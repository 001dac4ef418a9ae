"""A user's script for the experiments with several ranks: ``evenload run -d 0,0 benchmarks/gpu/train.py --model gpts``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import evenload

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.gpu.models import SUBJECTS, loss_of

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="gpts", choices=SUBJECTS)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--batch", type=int)
arguments = parser.parse_args()

run = evenload.init(seed=0, log_every_s=60.0)
subject = SUBJECTS[arguments.model]
batch_size = arguments.batch or subject.batch
torch.manual_seed(0)
data = DataLoader(subject.data(batch_size * arguments.steps), batch_size=batch_size, shuffle=True, drop_last=True)
model, loader = run.prepare(subject.build(), data)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=run.device.type == "cuda")


def loss_fn(batch: Any) -> torch.Tensor:
    return loss_of(model, batch)


for step in loader:
    step.backward(loss_fn)
    optimizer.step()
    optimizer.zero_grad()
