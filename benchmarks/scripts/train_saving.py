"""Two ranks train the GPT: blocks with one checkpoint written beside the training alternate with blocks without one."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader

import evenload

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.models import Size, build, loss_of

from evenload.records.measurement import bootstrap
from evenload.records.reader import read_events

parser = argparse.ArgumentParser()
parser.add_argument("size", type=json.loads)
parser.add_argument("--block-s", type=float, default=10.0)
parser.add_argument("--num-rounds", type=int, default=8)
args = parser.parse_args()
size = Size(**args.size)

run = evenload.init()
torch.manual_seed(0)
model, data = build(size)
model, loader = run.prepare(model, DataLoader(data, batch_size=size.batch_size, shuffle=True))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
run.resume(model=model, optimizer=optimizer)


def forever() -> Iterator[Any]:
    while True:
        yield from loader


steps = forever()


def block(num_steps: int, saves: bool) -> tuple[float, float]:
    """Wall seconds and CPU seconds of this process, threads included, in which a checkpoint begins after the first step."""
    run.barrier()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    for index in range(num_steps):
        step = next(steps)
        step.backward(lambda batch: loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        # An interval that is due once: the way a script asks for one.
        if saves and index == 0:
            run.checkpoint(every=1, keep=1)
    run.barrier()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


block(8, saves=True)
num_steps = max(2, round(args.block_s / (run.reduce(block(3, saves=False)[0], "max") / 3)))
rounds: list[dict[bool, tuple[float, float]]] = []
for index in range(args.num_rounds):
    order = (True, False) if index % 2 else (False, True)
    rounds.append({saves: block(num_steps, saves=saves) for saves in order})
run.close()
if run.is_main:
    saved = [event for event in read_events(run._context.folder) if event.kind == "checkpoint"]
    cost_s = bootstrap([found[True][0] - found[False][0] for found in rounds])
    cpu_s = bootstrap([found[True][1] - found[False][1] for found in rounds])
    result = {
        "num_rounds": len(rounds),
        "steps_a_block": num_steps,
        "block_s": median(found[False][0] for found in rounds),
        "cost_s": vars(cost_s),
        "cpu_s": vars(cpu_s),
        "held_s": median(event.fields["seconds"] for event in saved),
        "write_s": median(event.fields["write_s"] for event in saved),
        "size_bytes": saved[-1].fields["size_bytes"],
    }
    Path(run._context.folder, "saving.json").write_text(json.dumps(result))
