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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import evenload
from evenload.errors import PeerLostError
from evenload.testing.faults import Fault, FaultInjector
from evenload.testing.ledger import SampleLedger
from evenload.training.comm import collect
from evenload.training.comm.control import Control
from evenload.training.data import gather
from evenload.training.elastic.evaluating import LiveEvaluationMembers
from evenload.training.parallel import buckets
from evenload.training.step.planner import Planner

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


def undisturbed(sizes: Sequence[Sequence[int]], noise: float = 0.0) -> dict[str, torch.Tensor]:
    """Train in this process, with the samples of each step in micro-batches of these sizes; return the weights and buffers.

    `noise`: relative noise of the gradients, which shows what rounding alone may do. BatchNorm makes -1 and 1 of two samples, so
    in micro-batches of two its gradients are nearly rounding, and AdamW makes them large.
    """
    generator = torch.Generator().manual_seed(0)
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
        for p in model.parameters() if noise else ():
            assert p.grad is not None
            p.grad.mul_(1 + noise * (2 * torch.rand(p.shape, generator=generator, dtype=p.dtype) - 1))
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


def wrap_calls(run: evenload.Run, injector: FaultInjector) -> None:
    """Add points: before the values travel in `run.reduce` and `run.gather`; at the end of a loop over `run.batches`; and when
    a rank has the result of a call of all ranks, and the others may not, in a step (confirm) and between two."""
    confirm = Control.confirm

    def before(point: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def call_at(*args: Any) -> Any:
            injector.at(point)
            return call(*args)

        return call_at

    def at_confirm(control: Control) -> None:
        injector.at("confirm" if run._context.loop.step is not None else "confirm_between")
        confirm(control)

    setattr(collect, "_reduce", before("reduce", collect._reduce))  # noqa: B010
    setattr(gather, "_exchange_bytes", before("gather", gather._exchange_bytes))  # noqa: B010
    setattr(LiveEvaluationMembers, "_meet", before("round", LiveEvaluationMembers._meet))  # noqa: B010
    setattr(Control, "confirm", at_confirm)  # noqa: B010


def check_calls(run: evenload.Run) -> None:
    """All ranks have the same results of `run.reduce` and `run.gather`, with each rank's value at most once."""
    before = run.world_size
    num_ranks, places = run.reduce(1), run.gather([os.getpid()])
    if not run.world_size <= num_ranks <= before or len({*places}) != len(places):
        raise AssertionError(f"{before} ranks, then {run.world_size}: reduced {num_ranks}, gathered {places}")
    seen = [num_ranks, sum(places)]
    if run.reduce(seen, op="min") != seen or run.reduce(seen, op="max") != seen:
        raise AssertionError(f"the ranks have other results than {seen}")


def evaluate(run: evenload.Run, data: Data, injector: FaultInjector, epoch: int) -> None:
    """Every sample once, after a loop that is left early: in each second epoch with gathers, in each third one rank has none."""
    Planner.speeds = _speeds_without_the_last if epoch % 3 == 1 else _SPEEDS  # type: ignore[method-assign]
    loader = DataLoader(data, batch_size=BATCH)
    for number, _ in enumerate(run.batches(loader)):
        if number == epoch % 4:
            break
    found: list[int] = []
    gathered: list[int] = []
    num_before = run.world_size
    for number, (_, _, ids) in enumerate(run.batches(loader)):
        if number == 3:
            injector.at("evaluation")
        found += ids.tolist()
        if epoch % 2:
            gathered += run.gather(ids).tolist()
    num_ranks = run.world_size
    found, everyones = run.gather(found), run.gather(gathered)
    is_whole = found == [*range(NUM_SAMPLES)]
    if epoch % 2:  # those of a lost rank were gathered by all that had batches then
        is_once = len({*found}) == len(found) and len({*gathered}) == len(gathered)
        is_whole = is_once and (len({*everyones}) == NUM_SAMPLES or num_before - run.world_size > 1)
    # A rank that is lost after the loop takes its part with it.
    if not is_whole and (epoch % 2 or run.world_size == num_ranks or len({*found}) != len(found)):
        raise AssertionError(f"the evaluation after epoch {epoch} had {sorted(found)} and gathered {sorted(gathered)}")
    check_calls(run)


_SPEEDS = Planner.speeds


def _speeds_without_the_last(planner: Planner) -> tuple[float, ...]:
    return (*_SPEEDS(planner)[:-1], 0.0)


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
    wrap_calls(run, injector)
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
            if step.index % 6 == 1:
                check_calls(run)
            run.checkpoint(every=10)
            injector.at("end")
        evaluate(run, data, injector, epoch)
    if run.is_main:
        torch.save(model.state_dict(), folder / f"{os.getpid()}.partial")
        (folder / f"{os.getpid()}.partial").replace(folder / "weights.pt")
    injector.at("last")
    run.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
