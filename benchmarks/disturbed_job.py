"""The job of the fault campaign (faults.py): a small network with BatchNorm whose ranks die, stall, leave and join.

As a script under `evenload run`: FOLDER NUM_WORKERS MICRO_BATCH. The folder holds ``faults.json``, and ``wanted``: how many ranks
there should be. While fewer take part a step takes longer, so that others join before the next fault.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import evenload
from evenload.errors import PeerLostError
from evenload.testing.faults import Fault, FaultInjector
from evenload.testing.ledger import SampleLedger
from evenload.training.parallel import buckets

BATCH, STEPS, EPOCHS = 48, 24, 10
NUM_SAMPLES = BATCH * STEPS
_SHORT_OF_RANKS_S = 0.05

Sample = tuple[torch.Tensor, torch.Tensor, int]


class Net(nn.Module):  # no bias before BatchNorm: AdamW would blow up its rounding
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class Data(Dataset[Sample]):
    def __init__(self) -> None:
        self.x = torch.randn(NUM_SAMPLES, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.y = self.x.sin().sum(1, keepdim=True)
        self.injector: FaultInjector | None = None

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Sample:
        if self.injector is not None:
            self.injector.at("loader", step=_STEP_OF[index])
        return self.x[index], self.y[index], index


ORDER: list[int] = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(2)).tolist()
"""Of every epoch."""
_STEP_OF = {sample: place // BATCH for place, sample in enumerate(ORDER)}
EXPECTED = [ORDER[place : place + BATCH] for place in range(0, NUM_SAMPLES, BATCH)] * EPOCHS
"""The ids of the samples of each step."""


def _optimizers(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)


def undisturbed(sizes: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Train in this process, with the samples of each step in micro-batches of these sizes; return the weights and buffers."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        model, data = Net(), Data()
    finally:
        torch.set_default_dtype(dtype)
    optimizer, scheduler = _optimizers(model)
    for ids, parts in zip(EXPECTED, sizes, strict=True):
        for part in torch.tensor(ids).split(list(parts)):
            loss = nn.functional.mse_loss(model(data.x[part]), data.y[part]) * (len(part) / len(ids))
            loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


def main(folder: Path, num_workers: int, micro_batch: str) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    (folder / "pids" / str(os.getpid())).touch()
    torch.set_default_dtype(torch.float64)
    buckets.FIRST_BUCKET_BYTES = buckets.BUCKET_BYTES = 256  # a bucket for each layer
    run = evenload.init(
        project_dir=str(folder / "run"),
        seed=0,
        timeout_s=60,
        balance="even",
        micro_batch=micro_batch if micro_batch == "auto" else int(micro_batch),
        log_every_s=1000,
    )
    torch.manual_seed(0)
    data = Data()
    model, loader = run.prepare(Net(), DataLoader(data, batch_size=BATCH, sampler=ORDER, num_workers=num_workers))
    optimizer, scheduler = _optimizers(model)
    run.resume(model=model, optimizer=optimizer, scheduler=scheduler)
    faults = [Fault(**row) for row in json.loads((folder / "faults.json").read_text())]
    injector = data.injector = FaultInjector(run, faults, folder / "happened")
    ledger = SampleLedger(run, lambda batch: batch[2].tolist())

    def loss_fn(batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    for epoch in range(loader.epoch, EPOCHS):
        for step in loader:
            if run.world_size < int((folder / "wanted").read_text()):
                time.sleep(_SHORT_OF_RANKS_S)
            injector.at("begin")
            for is_last in (False, False, True):
                try:
                    loss = ledger.backward(step, loss_fn)
                    break
                except (PeerLostError, RuntimeError) as error:
                    # The script's own exception, on all ranks: it tries again.
                    if is_last or not (
                        "injected" in str(error) or "raised an exception in step.backward" in str(error)
                    ):
                        raise
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            run.log({"loss": loss})
            injector.at("any")
            assert not run.any(False)
            run.checkpoint(every=10)
            injector.at("end")
        found: list[int] = []
        for number, (_, _, ids) in enumerate(run.batches(DataLoader(data, batch_size=BATCH))):
            if number == 3:
                injector.at("evaluation")
            found += ids.tolist()
        found = run.gather(found)
        if found != [*range(NUM_SAMPLES)]:
            raise AssertionError(f"the evaluation after epoch {epoch} had the samples {found}")
    if run.is_main:
        torch.save(model.state_dict(), folder / "weights.pt")
    run.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
