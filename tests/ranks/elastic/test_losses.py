"""Ranks that die anywhere in a step: the others continue, and the weights are those of one process."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.errors import PeerLostError
from evenload.training.comm.groups import Groups
from evenload.training.parallel import buckets
from evenload.training.parallel.reducer import BucketReducer
from evenload.training.step.exchange import ReportExchange
from tests.ranks.elastic.supervised import Supervised

BATCH, STEPS, EPOCHS = 12, 10, 2

Fault = tuple[str, str, int]
"""Worker, injection point, global step."""

SETS: dict[str, list[Fault]] = {
    "first ranks die": [("w0", "forward", 2), ("w1", "backward", 5), ("w2", "bucket", 8), ("w3", "evaluation", 9)],
    "between and in other collectives": [
        ("w4", "missed by w1", 2),
        ("w0", "missed by w2", 5),
        ("w1", "any", 8),
        ("w2", "checkpoint", 11),
    ],
    "last ranks die": [("w4", "statistics", 1), ("w3", "reduced", 4), ("w2", "exchange", 7), ("w1", "applied", 12)],
}


class Net(nn.Module):  # no bias before BatchNorm: AdamW would blow up its rounding
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH * STEPS, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True))


class Staged(TensorDataset):
    """Its samples are right once the script has changed it in its loop over epochs."""

    shift = 100.0

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + self.shift, y


class Faults:
    """Kills this process at its injection point."""

    def __init__(self, worker: str, faults: list[Fault]) -> None:
        self._mine = {(point, step) for name, point, step in faults if name == worker}
        self._missed = {step for _, point, step in faults if point == f"missed by {worker}"}
        self.step = -1
        self._num_sums = 0

    def at(self, point: str) -> None:
        if (point, self.step) in self._mine:
            os.kill(os.getpid(), signal.SIGKILL)
        if (f"memory in {point}", self.step) in self._mine:
            self._mine.remove((f"memory in {point}", self.step))
            raise torch.OutOfMemoryError("CUDA out of memory: injected")

    def inject(self) -> None:
        """Kill inside Evenload's collectives, too."""
        sum_async, sum_statistics, run = Groups.sum_async, Groups.sum_statistics, ReportExchange.run
        finish = BucketReducer.finish

        def summed(groups: Groups, tensor: torch.Tensor, *, on_host: bool = False) -> Any:
            pending = sum_async(groups, tensor, on_host=on_host)
            self._num_sums += not on_host
            if self._num_sums % 2 and not on_host:
                self.at("bucket")
            return pending

        def statistics(groups: Groups, tensor: torch.Tensor) -> None:
            self.at("statistics")
            sum_statistics(groups, tensor)

        def exchanged(exchange: ReportExchange, *args: Any, **options: Any) -> Any:
            reports = run(exchange, *args, **options)
            self.at("exchange")
            return reports

        def finished(reducer: BucketReducer, *args: Any) -> bool:
            if self.step in self._missed:  # as if the last rank had died before it sent its part to this one
                self._missed.remove(self.step)
                reducer.flush(args[0])
                list(reducer._summed())
                raise PeerLostError("the connection is closed")
            return finish(reducer, *args)

        BucketReducer.finish = finished  # type: ignore[method-assign, assignment]
        Groups.sum_async, Groups.sum_statistics = summed, statistics  # type: ignore[method-assign, assignment]
        ReportExchange.run = exchanged  # type: ignore[method-assign]


def train(
    folder: str,
    faults: list[Fault],
    num_workers: int = 0,
    waits: Mapping[int, str] | None = None,
    wire: str = "fp32",
) -> dict[str, Any]:
    """Train; `waits` names files that exist before a step goes on."""
    waits = waits or {}
    torch.set_default_dtype(torch.float64)
    buckets.FIRST_BUCKET_BYTES = buckets.BUCKET_BYTES = 256  # a bucket for each layer
    worker = Path(os.environ["EVENLOAD_WORKER"]).stem
    fault = Faults(worker, faults)
    fault.inject()
    run = evenload.init(project_dir=folder, seed=0, timeout_s=30, balance="even", wire=wire)
    torch.manual_seed(0)
    dataset = Staged(*data().tensors)
    model, loader = run.prepare(Net(), DataLoader(dataset, batch_size=BATCH, num_workers=num_workers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    run.resume(model=model, optimizer=optimizer, scheduler=scheduler)
    seen: dict[str, Any] = {"losses": {}, "sizes": {}, "evaluated": [], "looks": []}
    get_objects = gc.get_objects

    def looked(generation: int | None = None) -> list[Any]:
        seen["looks"].append(run.world_size)
        return get_objects(generation)

    gc.get_objects = looked
    for _ in range(loader.epoch, EPOCHS):
        dataset.shift = 0.0
        for step in loader:
            fault.step = step.index
            fault.at("body")
            while step.index in waits and not Path(waits[step.index]).exists():
                time.sleep(0.01)
            time.sleep(
                1.0 if step.index in waits else 0.0
            )  # until the thread has read the change, and is prepared for it

            def loss_fn(batch: Any) -> torch.Tensor:
                fault.at("forward")
                x, y = batch
                out = model(x)
                out.register_hook(lambda grad: fault.at("backward"))
                return nn.functional.mse_loss(out, y)

            seen["losses"][step.index] = float(step.backward(loss_fn))
            fault.at("reduced")
            for other in range(5):
                fault.at(f"missed by w{other}")
            fault.at("any")
            assert not run.any(False)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            scheduler.step()
            fault.at("applied")
            optimizer.zero_grad()
            fault.at("checkpoint")
            run.checkpoint(every=4)
            assert run.reduce(1) == run.world_size
            seen["sizes"][step.index] = run.world_size
        total, found = 0.0, []
        for number, (x, _) in enumerate(run.batches(DataLoader(data(), batch_size=BATCH))):
            if number == 3:
                fault.at("evaluation")
            total += float(x.sum())
            found += x[:, 0].tolist()
        seen["evaluated"].append((run.reduce(total), run.gather(found)))
    seen["weights"] = torch.cat([v.detach().flatten().double() for v in model.state_dict().values()])
    seen["rank"], seen["lr"] = run.rank, scheduler.get_last_lr()[0]
    run.close()
    return seen


def plain() -> tuple[torch.Tensor, list[float]]:
    """One process that nothing disturbs."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
        x, y = data().tensors
        losses = []
        for index in range(STEPS * EPOCHS):
            part = slice(index % STEPS * BATCH, index % STEPS * BATCH + BATCH)
            loss = nn.functional.mse_loss(model(x[part]), y[part])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return torch.cat([v.detach().flatten().double() for v in model.state_dict().values()]), losses
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", SETS)
def test_all_but_one_rank_may_die(tmp_path: Path, name: str) -> None:
    faults = SETS[name]
    supervised = Supervised(tmp_path, train, str(tmp_path / "run"), faults, 1)
    supervised.start(5)
    results = supervised.run(90)
    assert supervised.lost == [worker for worker, _, _ in faults]
    ((_, seen),) = results.items()
    weights, losses = plain()
    assert float((seen["weights"] - weights).norm() / weights.norm()) <= 1e-12
    assert [seen["losses"][index] for index in range(STEPS * EPOCHS)] == pytest.approx(losses, rel=1e-12)
    for total, found in seen["evaluated"]:
        assert found == data().tensors[0][:, 0].tolist() and total == pytest.approx(float(data().tensors[0].sum()))
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    lost = [event for event in events if event.get("kind") == "lost"]
    assert [event["fields"]["worker"] for event in lost] == supervised.lost
    steps = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if "step" in row] == list(range(STEPS * EPOCHS))


def test_a_rank_may_run_out_of_memory_while_another_dies(tmp_path: Path) -> None:
    """It can't agree on that with the others any more; the step is computed again, from the same running statistics."""
    faults = [("w0", "backward", 2), ("w1", "memory in backward", 2)]
    supervised = Supervised(tmp_path, train, str(tmp_path / "run"), faults)
    supervised.start(3)
    results = supervised.run(90)
    assert supervised.lost == ["w0"] and sorted(results) == ["w1", "w2"]
    weights, _ = plain()
    for seen in results.values():
        assert float((seen["weights"] - weights).norm() / weights.norm()) <= 1e-12


def test_a_rank_joins_and_another_leaves(tmp_path: Path) -> None:
    waits = {6: str(tmp_path / "change-2"), 12: str(tmp_path / "change-3")}
    supervised = Supervised(tmp_path, train, str(tmp_path / "run"), [("w0", "backward", 2)], 1, waits)
    supervised.leaves = {2: "w1"}
    supervised.start(3)
    results = supervised.run(120, joiners={1: "j0"})
    assert results["w1"] == {"exit": 0} and supervised.lost == ["w0"]
    weights, losses = plain()
    for worker, rank in (("w2", 0), ("j0", 1)):
        seen = results[worker]
        assert float((seen["weights"] - weights).norm() / weights.norm()) <= 1e-12
        assert all(loss == pytest.approx(losses[index], rel=1e-12) for index, loss in seen["losses"].items())
        assert seen["rank"] == rank and seen["evaluated"][-1][1] == data().tensors[0][:, 0].tolist()
    # To look through all objects takes long: a rank that joins does so while it is alone, before the others wait for it.
    assert results["j0"]["looks"] == [1, 1] and set(results["w2"]["looks"]) == {3}
    sizes = results["w2"]["sizes"]
    assert [size for size, _ in itertools.groupby(sizes[index] for index in sorted(sizes))] == [3, 2, 3, 2]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    kinds = [event["kind"] for event in events if event.get("kind") in ("lost", "joined", "left", "rebuilt")]
    assert kinds == ["lost", "rebuilt", "joined", "rebuilt", "left", "rebuilt"]
    texts = [event.get("message", "") for event in events if event.get("kind") == "checkpoint"]
    assert texts and not any("ended by an error" in text for text in texts), "w1 was rank 0 and left: the others write"
    steps = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if "step" in row] == list(range(STEPS * EPOCHS))


def test_ranks_of_a_wire_format_may_die_and_join(tmp_path: Path) -> None:
    faults = [("w4", "missed by w1", 2), ("w0", "backward", 5), ("w2", "checkpoint", 11)]
    waits = {8: str(tmp_path / "change-3")}
    supervised = Supervised(tmp_path, train, str(tmp_path / "run"), faults, 0, waits, "bf16")
    supervised.start(5)
    results = supervised.run(90, joiners={2: "j0"})
    assert supervised.lost == ["w4", "w0", "w2"] and sorted(results) == ["j0", "w1", "w3"]
    weights, _ = plain()
    for seen in results.values():
        assert torch.equal(seen["weights"], results["w1"]["weights"])
        assert float((seen["weights"] - weights).norm() / weights.norm()) <= 2e-2
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    texts = [event["message"] for event in events if event.get("kind") == "wire"]
    assert sum("held are lost with it" in text for text in texts) == 3, texts
    steps = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if "step" in row] == list(range(STEPS * EPOCHS))
