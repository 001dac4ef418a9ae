"""A peer trains the same model with equal shares: plain DDP, Accelerate or Lightning, as their manuals show it.

Started by benchmarks/peers.py with torchrun's variables set; rank 0 prints the samples/s of each block of steps as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.models import Size, build, loss_of


class Blocks:
    """Times blocks of steps on rank 0; the first block warms up and is left out."""

    def __init__(self, block_s: float, num_blocks: int, batch_size: int) -> None:
        self._block_s, self._num_blocks, self._batch_size = block_s, num_blocks, batch_size
        self._steps, self._began_s = 0, time.perf_counter()
        self.per_s: list[float] = []

    def step(self) -> bool:
        """After each step; whether all ranks have had enough, asked of rank 0 at the end of a block alone."""
        self._steps += 1
        took_s = time.perf_counter() - self._began_s
        # One small collective a step, as a training that logs its mean loss has.
        ended = torch.tensor([float(took_s >= self._block_s)])
        dist.broadcast(ended, 0)
        if not ended.item():
            return False
        self.per_s.append(self._steps * self._batch_size / (time.perf_counter() - self._began_s))
        self._steps, self._began_s = 0, time.perf_counter()
        return len(self.per_s) > self._num_blocks


def train_ddp(model: torch.nn.Module, data: Any, size: Size, blocks: Blocks) -> None:
    """torch's own DistributedDataParallel."""
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
    loader = DataLoader(data, batch_size=size.batch_size // dist.get_world_size(), sampler=DistributedSampler(data))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    while True:
        for batch in loader:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if blocks.step():
                return


def train_accelerate(model: torch.nn.Module, data: Any, size: Size, blocks: Blocks) -> None:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(data, batch_size=size.batch_size // accelerator.num_processes, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    while True:
        for batch in loader:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            if blocks.step():
                return


def train_lightning(model: torch.nn.Module, data: Any, size: Size, blocks: Blocks) -> None:
    """PyTorch Lightning."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return loss_of(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)

        def on_train_batch_end(self, *_: Any) -> None:
            if blocks.step():
                self.trainer.should_stop = True

    world_size = int(os.environ["WORLD_SIZE"])
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=world_size,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(data, batch_size=size.batch_size // world_size, shuffle=True))


def main() -> None:
    """Trains until enough blocks are timed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=("ddp", "accelerate", "lightning"))
    parser.add_argument("size", type=json.loads)
    parser.add_argument("block_s", type=float)
    parser.add_argument("num_blocks", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = Size(**args.size)
    model, data = build(size)
    blocks = Blocks(args.block_s, args.num_blocks, size.batch_size)
    {"ddp": train_ddp, "accelerate": train_accelerate, "lightning": train_lightning}[args.peer](
        model, data, size, blocks
    )
    if int(os.environ["RANK"]) == 0:
        print("RESULT " + json.dumps(blocks.per_s[1:]), flush=True)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may end a process badly after its work


main()
