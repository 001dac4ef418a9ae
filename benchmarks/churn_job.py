"""The job of the churn benchmark: a recurrent block whose cost per sample is known, the same for all arms.

As a script: evenload FOLDER BATCH; ddp FOLDER BATCH SAVE_EVERY under torchrun; torchft FOLDER BATCH, which starts the
replicas. Each process notes when it is ready to join and when a step is done; the note of a process that is killed ends
there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, DEPTH = 512, 64
EPOCH_STEPS = 100
_EPOCHS = 10_000


class Net(nn.Module):
    """Applies one layer again and again: much to compute, little to send."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(DEPTH):
            x = torch.tanh(self.layer(x))
        out: torch.Tensor = self.last(x)
        return out


def make_data(batch_size: int) -> TensorDataset:
    x = torch.randn(batch_size * EPOCH_STEPS, WIDTH, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.mean(1, keepdim=True))


def sample_seconds() -> float:
    """Return the seconds of forward and backward for a sample on one core."""
    torch.set_num_threads(1)
    model, x = Net(), torch.randn(32, WIDTH)
    took_s = []
    for _ in range(5):
        began_s = time.perf_counter()
        model(x).square().mean().backward()
        took_s.append((time.perf_counter() - began_s) / len(x))
    return min(took_s)


class Notes:
    """One line for each fact, with its time; appended at once."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "notes" / str(os.getpid())).open("ab", buffering=0)

    def add(self, what: str) -> None:
        self._file.write(f"{time.time()} {what}\n".encode())


def train_evenload(folder: Path, batch_size: int) -> None:
    from evenload import init  # imports everything that a run needs

    torch.set_num_threads(1)
    notes = Notes(folder)
    notes.add("ready")
    run = init(project_dir=str(folder / "run"), seed=0, log_every_s=1000)
    model, loader = run.prepare(Net(), DataLoader(make_data(batch_size), batch_size=batch_size, shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run.resume(model=model, optimizer=optimizer)
    for _ in range(loader.epoch, _EPOCHS):
        for step in loader:
            step.backward(lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1]))
            optimizer.step()
            optimizer.zero_grad()
            notes.add(f"step {step.index}")
            run.checkpoint(every="10min")


def train_ddp(folder: Path, batch_size: int, save_every: int) -> None:
    import torch._dynamo  # the first optimizer imports it
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["LOCAL_RANK"])]})
    notes = Notes(folder)
    notes.add("ready")
    # Where torchrun restarts the ranks, they find the addresses of the ranks before in the store, and may wait for them.
    shared = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", shared)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = make_data(batch_size)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, world_size, rank, seed=0)
    loader = DataLoader(data, batch_size=batch_size // world_size, sampler=sampler)
    saved, done = folder / "saved.pt", 0
    if saved.exists():
        state = torch.load(saved)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["done"]
    for epoch in range(done // EPOCH_STEPS, _EPOCHS):
        sampler.set_epoch(epoch)
        for index, (x, y) in enumerate(loader):
            if epoch * EPOCH_STEPS + index < done:
                continue
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            notes.add(f"step {done - 1}")
            if rank == 0 and done % save_every == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
                torch.save(state, folder / "saved.partial")
                (folder / "saved.partial").replace(saved)


def run_torchft(folder: Path, batch_size: int) -> None:
    """Start two replicas of torchft and what they agree by; start each again when it has ended."""
    from torchft import _torchft

    lighthouse = _torchft.LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=50, heartbeat_timeout_ms=1000
    )
    variables = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address()}
    replicas: dict[int, subprocess.Popen[bytes]] = {}
    while True:
        for index in (0, 1):
            if index not in replicas or replicas[index].poll() is not None:
                command = [sys.executable, __file__, "replica", str(folder), str(batch_size), str(index)]
                replicas[index] = subprocess.Popen(command, env=variables)
        time.sleep(0.05)


def train_torchft(folder: Path, batch_size: int, index: int) -> None:
    import torch._dynamo  # the first optimizer imports it
    import torch.distributed as dist
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[index]})
    notes = Notes(folder)
    notes.add("ready")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(0)
    net = Net()
    inner = torch.optim.AdamW(net.parameters(), lr=1e-4)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica{index}",
        hostname="127.0.0.1",
    )
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, inner)
    part = batch_size // 2
    x, y = (tensor[index * part :][:part] for tensor in make_data(batch_size).tensors)
    done = 0
    while True:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if manager.current_step() > done:
            done = manager.current_step()
            notes.add(f"step {done}")


if __name__ == "__main__":
    if sys.argv[1] == "evenload":
        train_evenload(Path(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1] == "torchft":
        run_torchft(Path(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1] == "replica":
        train_torchft(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        train_ddp(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
