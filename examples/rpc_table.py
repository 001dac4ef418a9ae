"""A table that one rank keeps and all ranks use over torch's RPC: the mean loss of each class, for harder classes first.

    python examples/rpc_table.py                                 # one device
    evenload run -d cpu:2 examples/rpc_table.py                  # two CPU ranks

RPC starts on the run's own store and ends with the run, so no port is chosen. Rank 0 keeps the table. Each rank reports the
losses of its samples once a step, without waiting for the answer, and reads the whole table once an epoch.
"""

import argparse
import threading

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import rpc
from torch.utils.data import DataLoader, TensorDataset

import evenload

NUM_CLASSES = 4


class LossTable:
    """Sums by class, on rank 0. RPC calls `add` from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = torch.zeros(2, NUM_CLASSES)

    def add(self, losses: torch.Tensor, labels: torch.Tensor) -> None:
        with self._lock:
            self._sums[0].index_add_(0, labels, losses)
            self._sums[1].index_add_(0, labels, torch.ones_like(losses))

    def means(self) -> torch.Tensor:
        with self._lock:
            total, count = self._sums.clone()
            self._sums.zero_()
        return total / count.clamp(min=1)


TABLE = LossTable()


def add(losses: torch.Tensor, labels: torch.Tensor) -> None:
    """Run on rank 0."""
    TABLE.add(losses, labels)


def means() -> torch.Tensor:
    """Run on rank 0."""
    return TABLE.means()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    run = evenload.init(project_dir="runs/rpc_table", seed=0)
    options = rpc.TensorPipeRpcBackendOptions(init_method="evenload://")
    rpc.init_rpc(f"rank{run.rank}", rank=run.rank, world_size=run.world_size, rpc_backend_options=options)

    labels = torch.arange(800) % NUM_CLASSES
    points = torch.stack([labels.sin(), labels.cos()], 1) + 0.4 * torch.randn(800, 2)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, NUM_CLASSES))
    loader = DataLoader(TensorDataset(points, labels), batch_size=32, shuffle=True)
    model, loader = run.prepare(model, loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights = torch.ones(NUM_CLASSES, device=run.device)
    answers: list[torch.futures.Future[None]] = []

    def loss_fn(batch: list[torch.Tensor]) -> tuple[torch.Tensor, float]:
        rows, label = batch
        losses = F.cross_entropy(model(rows), label, reduction="none")
        answers.append(rpc.rpc_async("rank0", add, (losses.detach().cpu(), label.cpu())))
        weight = weights[label]
        return (losses * weight).sum() / weight.sum(), float(weight.sum())

    for epoch in range(args.epochs):
        for step in loader:
            step.backward(loss_fn)
            optimizer.step()
            optimizer.zero_grad()
        torch.futures.wait_all(answers)  # an error of rank 0 is raised here
        answers.clear()
        run.barrier()  # all ranks have reported
        table = run.reduce(rpc.rpc_sync("rank0", means) if run.is_main else torch.zeros(NUM_CLASSES))
        weights = (0.5 + table / table.mean().clamp(min=1e-6)).to(run.device)  # harder classes count more
        run.print(f"epoch {epoch}: mean loss by class {[round(value, 3) for value in table.tolist()]}")


if __name__ == "__main__":
    main()
