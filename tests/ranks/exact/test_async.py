"""Strategy async over real ranks: every update replayed by one process in the recorded order, the bound, resume, a stop."""

from __future__ import annotations

import functools
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.staleness import BOUND, count
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.errors import ConfigError, DesyncError, StepError
from evenload.records.reader import read_steps
from evenload.records.values import StepRecord
from evenload.testing import run_ranks
from evenload.training import run as run_module
from evenload.training.comm import rpc
from evenload.training.data.cursor import Cursor
from evenload.training.launch import worker
from tests.ranks.exact.measure import relative

SAMPLES, BATCH, EPOCHS = 168, 8, 2  # 21 parts an epoch
State = dict[str, torch.Tensor]


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1), nn.BatchNorm1d(1, momentum=None)
    ).double()


def rows() -> torch.Tensor:
    return torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return ((model(batch) - batch.sum(1, keepdim=True)) ** 2).mean()


def optimizers(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * SAMPLES // BATCH)


def train(folder: str, settings: dict[str, Any], stop_at: int = -1, epochs: int = EPOCHS) -> dict[str, Any]:
    """Train on this rank; rank 2 is slow. Return the state at the end, and what this rank saw."""
    run = evenload.init(project_dir=folder, micro_batch=4, **settings)
    data = rows()
    model, loader = run.prepare(make_model(), DataLoader(TensorDataset(data), batch_size=BATCH))
    optimizer, scheduler = optimizers(model)
    run.resume(model=model, optimizer=optimizer, scheduler=scheduler)
    computed: list[int] = []
    errors: set[str] = set()

    def loss_fn(batch: list[torch.Tensor]) -> torch.Tensor:
        if run.rank == 2:
            time.sleep(0.004)
        return loss_of(model, batch[0])

    for _ in range(loader.epoch, epochs):
        model.train()
        for step in loader:
            if step.index == stop_at:
                break
            computed.append(step.index)
            step.backward(loss_fn)
            try:
                run.barrier()
            except StepError as error:
                errors.add(str(error))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen = sum(len(batch[0]) for batch in run.batches(DataLoader(TensorDataset(data), batch_size=BATCH)))
        assert run.reduce(seen) == SAMPLES and len(run.gather([run.rank])) == run.world_size
    strategy = run._context.engine.strategy
    bound = getattr(strategy, "server", None)
    found = {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "computed": computed,
        "errors": errors,
        "max_staleness": bound.max_staleness if bound else 0,
        "lr": scheduler.get_last_lr()[0],
        "cursor": loader.loader.cursor(),
        "steps_done": run._context.loop.steps_done,
    }
    run.close()
    return found


CASES: dict[str, dict[str, Any]] = {
    "plain": {"strategy": "async"},
    "inverse": {"strategy": "async", "staleness": 3, "staleness_lr": "inverse"},
    "compensated": {"strategy": "async", "staleness": 6, "staleness_lr": "compensate"},
}


def run_cases(folder: str) -> dict[str, Any]:
    found = {name: train(f"{folder}/{name}", settings) for name, settings in CASES.items()}
    found["ddp"] = train(f"{folder}/ddp", {"balance": "even"})
    found["synchronous"] = train(f"{folder}/zero", {"strategy": "async", "staleness": 0, "balance": "even"})
    found["left"] = train(f"{folder}/left", CASES["plain"], stop_at=11, epochs=1)
    # The rest of an epoch that async left out of order, by ddp.
    found["begun"] = interrupted(f"{folder}/resumed")
    found["resumed"] = train(f"{folder}/resumed", {"balance": "even"}, epochs=1)
    found["counted"] = count(f"{folder}/counted", 0, 1, 300, bound=2)
    found["refused"] = refusals(folder)
    found["averages"] = averages(f"{folder}/averages")
    return found


def interrupted(folder: str) -> dict[str, Any]:
    """Save while a part that came first is still computed and later ones are applied, and end there."""
    run = evenload.init(project_dir=folder, micro_batch=4, strategy="async")
    model, loader = run.prepare(make_model(), DataLoader(TensorDataset(rows()), batch_size=BATCH))
    optimizer, scheduler = optimizers(model)
    run.resume(model=model, optimizer=optimizer, scheduler=scheduler)
    taken, saved = Path(f"{folder}.taken"), Path(f"{folder}.saved")

    def loss_fn(batch: list[torch.Tensor]) -> torch.Tensor:
        if run.rank == 2:
            taken.touch()
        while not (saved if run.rank == 2 else taken).exists():
            time.sleep(0.005)
        return loss_of(model, batch[0])

    cursor = Cursor()
    for step in loader:
        step.backward(loss_fn)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if run.is_main and step.index == 3:
            run.checkpoint()
            cursor = loader.loader.cursor()
            saved.touch()
            break
    run_module._open = None  # without close: the state of the checkpoint stays the newest
    run._closed = True
    run._session._saver.resumed = False
    run._session.close()
    return {"cursor": cursor}


def averages(folder: str) -> State:
    """Train two epochs with an average of the weights that is not prepared."""
    run = evenload.init(project_dir=folder, micro_batch=4, strategy="async")
    model, loader = run.prepare(make_model(), DataLoader(TensorDataset(rows()), batch_size=BATCH))
    average = AveragedModel(model, use_buffers=True)
    optimizer, _ = optimizers(model)
    run.resume(model=model, optimizer=optimizer, average=average)
    for _ in range(2):
        for step in loader:
            step.backward(lambda batch: loss_of(model, batch[0]))
            optimizer.step()
            average.update_parameters(model)
            optimizer.zero_grad()
    run.close()
    return {name: value.clone() for name, value in average.state_dict().items()}


def fail_in_the_body(folder: str, how: str) -> tuple[int, str, float]:
    """Train an epoch in which rank 1 fails in its first loop body.

    Returns the updates by then, the error, and the seconds that the end took.
    """
    run = evenload.init(project_dir=folder, strategy="async", timeout_s=20.0)
    model, loader = run.prepare(make_model(), DataLoader(TensorDataset(rows()), batch_size=BATCH))
    optimizer, _ = optimizers(model)
    run.resume(model=model, optimizer=optimizer)
    rank, error, failed = run.rank, "", Path(f"{folder}.failed")

    def loss_fn(batch: list[torch.Tensor]) -> torch.Tensor:
        while rank == 2 and not failed.exists():  # it would take all parts of a short epoch
            time.sleep(0.005)
        return loss_of(model, batch[0])

    try:
        for step in loader:
            step.backward(loss_fn)
            with torch.no_grad():
                if rank == 1:
                    failed.touch()
                    raise ValueError("a mistake in the body")
            optimizer.step()
            optimizer.zero_grad()
    except ValueError as failure:
        error = str(failure)
    done = run._context.loop.steps_done
    if how == "reduce":  # the script goes on
        error = str(run.reduce(1.0))
    elif how == "any":
        error = str(float(run.any(rank == 1) + 2))
    elif how == "checkpoint":
        error = str(float(run.checkpoint() + 2))
    elif how == "epoch":
        error = str(float(loader.epoch + 2))
    elif how == "exit":
        worker.progress.exit_code = 0
    began_s = time.monotonic()
    run._session.close()
    return done, error, time.monotonic() - began_s


def test_a_worker_that_fails_in_its_body_ends_no_epoch(tmp_path: Path) -> None:
    server, failed, _ = run_ranks(fail_in_the_body, 3, str(tmp_path), "", timeout_s=60.0)
    assert failed[1] == "a mistake in the body"
    assert server[0] == SAMPLES // BATCH
    assert failed[2] < rpc._END_S  # it waits for nobody: the others go on without it


@pytest.mark.parametrize("how", ["reduce", "any", "checkpoint", "epoch"])
def test_a_script_that_catches_the_error_outside_its_loop_goes_on(tmp_path: Path, how: str) -> None:
    found = run_ranks(fail_in_the_body, 3, str(tmp_path), how, timeout_s=60.0)
    assert [error for _, error, _ in found] == ["3.0"] * 3


def test_a_script_that_ends_well_in_its_loop_ends_for_all(tmp_path: Path) -> None:
    found = run_ranks(fail_in_the_body, 3, str(tmp_path), "exit", timeout_s=60.0)
    assert [error for _, error, _ in found] == ["", "a mistake in the body", ""]


def train_one_part_an_epoch(folder: str) -> tuple[list[int], int]:
    """Return the epochs in which this rank computed, and those that it has counted."""
    run = evenload.init(project_dir=folder, strategy="async")
    model, loader = run.prepare(make_model(), DataLoader(TensorDataset(rows()[:BATCH]), batch_size=BATCH))
    optimizer, _ = optimizers(model)
    computed = []
    for epoch in range(4):
        for step in loader:
            computed.append(epoch)
            step.backward(lambda batch: loss_of(model, batch[0]))
            optimizer.step()
            optimizer.zero_grad()
    epochs = loader.epoch
    run.close()
    return computed, epochs


def test_a_worker_without_a_part_in_an_epoch_stays_in_the_run(tmp_path: Path) -> None:
    (server, _), *workers = found = run_ranks(train_one_part_an_epoch, 3, str(tmp_path), timeout_s=60.0)
    assert server == sorted(epoch for computed, _ in workers for epoch in computed) == [0, 1, 2, 3]
    assert {epochs for _, epochs in found} == {4}


def leave_by_own_count(folder: str) -> str:
    """Leave both loops after so many steps of this rank: the server, whose loop has all, ends before the workers."""
    run = evenload.init(project_dir=folder, strategy="async")
    model, loader = run.prepare(make_model(), DataLoader(TensorDataset(rows()), batch_size=BATCH))
    optimizer, _ = optimizers(model)
    count = 0
    try:
        for _ in range(2):
            for step in loader:
                step.backward(lambda batch: loss_of(model, batch[0]))
                optimizer.step()
                optimizer.zero_grad()
                count += 1
                if count == 4:
                    break
            if count >= 4:
                break
        run.close()
    except DesyncError as error:
        return str(error)
    return ""


def test_a_server_that_ends_before_its_workers_is_named(tmp_path: Path) -> None:
    found = run_ranks(leave_by_own_count, 3, str(tmp_path), timeout_s=60.0)
    for error in found:
        # A worker may have ended by then, too: "each of ranks 0, 1 has ended its script".
        assert re.search(r"\branks? 0\b[^;]* has ended its script", error) and "begins an epoch" in error


def check_updates(folder: Path, counted: dict[str, Any], num_updates: int, bound: int) -> None:
    """Compare what was counted from parameters and gradients with the server's counter, the records and the bound."""
    records, ages = read_steps(folder), counted["updates_by_staleness"]
    assert [record.step for record in records] == list(range(num_updates)) and sum(ages.values()) == num_updates
    assert counted["repeated_or_lost"] == 0
    oldest = max(map(int, ages))
    assert max(record.metrics["staleness"] for record in records) == counted["by_the_server"] == oldest <= bound
    assert oldest > 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_bound_holds_in_ten_thousand_updates(tmp_path: Path) -> None:
    counted = run_ranks(count, 4, str(tmp_path), 0, 20, 500, timeout_s=600.0)
    check_updates(tmp_path, counted[0], 10_000, BOUND)


def refusals(folder: str) -> dict[str, str]:
    wrong: dict[str, dict[str, Any]] = {
        "other": {"staleness": 2},
        "servers": {"strategy": "async", "servers": 2},
        "balance": {"strategy": "async", "balance": "even"},
        "zero": {"strategy": "async", "staleness": 0, "staleness_lr": "inverse"},
    }
    found = {}
    for name, settings in wrong.items():
        with pytest.raises(ConfigError) as error:
            evenload.init(project_dir=folder, **settings)
        found[name] = str(error.value)
    return found


def replay(records: list[StepRecord], settings: dict[str, Any]) -> tuple[State, float]:
    """One process makes the same updates: each gradient at the parameters of so many updates before."""
    model, data = make_model(), rows()
    model.train()
    optimizer, scheduler = optimizers(model)
    rule = settings.get("staleness_lr")
    versions: list[State] = []
    params = dict(model.named_parameters())
    for index, record in enumerate(records):
        versions.append({name: value.clone() for name, value in model.state_dict().items()})
        staleness = int(record.metrics["staleness"])
        assert records[index - staleness].epoch == record.epoch  # parameters are equal on all ranks between two epochs
        now = versions[-1]
        then = versions[index - staleness]
        model.load_state_dict(
            {**then, **{name: now[name] for name in now if "num_batches" in name or "running" in name}}
        )
        optimizer.zero_grad()
        low = record.epoch_step * BATCH
        for half in range(2):
            loss_of(model, data[low + 4 * half : low + 4 * half + 4]).div(2).backward()
        with torch.no_grad():
            for name, param in params.items():
                assert param.grad is not None
                param.copy_(now[name])
                if rule == "compensate":
                    param.grad += 0.04 * param.grad**2 * (now[name] - then[name])
        rate = optimizer.param_groups[0]["lr"]
        if rule == "inverse":
            optimizer.param_groups[0]["lr"] = rate / max(1, staleness)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = rate
        scheduler.step()
    return model.state_dict(), scheduler.get_last_lr()[0]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("async")
    return folder, run_ranks(run_cases, 3, str(folder), timeout_s=150.0)


def distance(one: State, other: State) -> float:
    return max(relative(one[name].double(), other[name].double()) for name in one)


@pytest.mark.parametrize("name", CASES)
def test_updates_equal_those_of_one_process_in_the_same_order(
    ranks: tuple[Path, list[dict[str, Any]]], name: str
) -> None:
    folder, found = ranks
    records = read_steps(folder / name)
    assert len(records) == EPOCHS * SAMPLES // BATCH
    for epoch in range(EPOCHS):  # each sample once
        assert sorted(r.epoch_step for r in records if r.epoch == epoch) == list(range(SAMPLES // BATCH))
    expected, rate = replay(records, CASES[name])
    for rank in found:
        assert distance(rank[name]["state"], expected) < 1e-12
        assert rank[name]["steps_done"] == len(records)
        assert rank[name]["cursor"] == found[0][name]["cursor"]
    assert found[0][name]["lr"] == pytest.approx(rate, abs=1e-15)
    bound = CASES[name].get("staleness", 4)
    staleness = [r.metrics["staleness"] for r in records]
    assert max(staleness) == found[0][name]["max_staleness"] <= bound
    assert {r.metrics["worker"] for r in records} == {1.0, 2.0} and max(staleness) > 0
    assert all(r.shares[int(r.metrics["worker"])] == BATCH for r in records)


def test_the_bound_holds_in_three_hundred_updates(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    check_updates(ranks[0] / "counted", ranks[1][0]["counted"], 300, 2)


def test_a_bound_of_zero_is_ddp(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in ranks[1]:
        assert distance(rank["synchronous"]["state"], rank["ddp"]["state"]) == 0


def test_a_break_on_any_rank_ends_the_loop_everywhere(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, found = ranks
    assert [r.step for r in read_steps(folder / "left")] == list(range(11))
    assert all(rank["left"]["steps_done"] == 11 for rank in found)
    assert len({repr(rank["left"]["cursor"]) for rank in found}) == 1
    states = [rank["left"]["state"] for rank in found]
    assert distance(states[1], states[0]) == distance(states[2], states[0]) == 0


def test_an_epoch_left_out_of_order_is_finished_by_ddp(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, found = ranks
    assert found[0]["begun"]["cursor"].ahead
    records = read_steps(folder / "resumed")
    assert sorted(r.epoch_step for r in records) == list(range(SAMPLES // BATCH))
    assert [r.metrics for r in records][-1].get("worker") is None
    assert all(rank["resumed"]["steps_done"] == SAMPLES // BATCH for rank in found)


def test_an_average_of_the_weights_is_that_of_the_server_between_loops(
    ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    first, *workers = (seen["averages"] for seen in ranks[1])
    assert int(first["n_averaged"]) == 2 * SAMPLES // BATCH
    for average in workers:
        assert all(torch.equal(value, first[name]) for name, value in average.items())


def test_wrong_uses_are_named(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    refused = ranks[1][0]["refused"]
    assert "(staleness=2) has no effect under strategy='ddp'" in refused["other"]
    assert "one server holds all parameters" in refused["servers"]
    assert "there are no shares" in refused["balance"]
    assert "no gradient is stale" in refused["zero"]
    assert all("run.barrier" in text for rank in ranks[1] for text in rank["plain"]["errors"])
    assert functools.reduce(set.union, (rank["plain"]["errors"] for rank in ranks[1]))
