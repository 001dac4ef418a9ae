"""Ranks that are asked to stop: all at the same step, saved, gone on with as if nothing had been. Real signals."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import evenload
from evenload.job.protocol import VARIABLE, RunnerContract, read_report, request_stop, write_contract
from evenload.testing import run_ranks
from evenload.training.checkpoint import files
from tests.ranks.exact.measure import relative
from tests.ranks.exact.ranks import run_split
from tests.system.job.programs import terms

EPOCHS, STEPS = 3, 4  # an epoch's


@dataclass(frozen=True)
class Ask:
    """Who is asked to stop, and when."""

    step: int
    rank: int = 1
    where: str = "body"
    """``body``: after the update; ``loss``: in the middle of the backward; ``data``: in the dataset; ``validation``."""
    slow_rank: int = -1
    own_handler: bool = False


class Noisy(Dataset[torch.Tensor]):
    """Rows with random numbers of their own: a sample drawn twice would be another."""

    def __init__(self, ask: Ask | None) -> None:
        generator = torch.Generator().manual_seed(3)
        self.rows = torch.randn(STEPS * 8, 6, generator=generator, dtype=torch.float64)
        self._ask, self._trainer = ask, os.getpid()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._ask is not None and self._ask.where == "data":
            with suppress(FileExistsError):
                Path("asked").touch(exist_ok=False)
                os.kill(self._trainer, signal.SIGTERM)  # from a loader worker, while the rank waits for this sample
        return self.rows[index] + 0.1 * torch.randn(6, dtype=torch.float64)


def sit(folder: str, ask: Ask | None, strategy: str, workers: int, micro_batch: Any) -> dict[str, Any]:
    """One session; what it did, and how it was left."""
    os.chdir(folder)
    if ask is not None and ask.own_handler:
        signal.signal(signal.SIGTERM, lambda *_: Path("handled").touch())
    run = evenload.init(project_dir="run", seed=0, strategy=strategy, micro_batch=micro_batch)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1)).double()
    data = Noisy(ask if run.rank == (ask.rank if ask is not None else 0) else None)
    model, loader = run.prepare(model, DataLoader(data, batch_size=8, shuffle=True, num_workers=workers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * STEPS)
    steps: list[int] = []
    drawn: list[float] = []

    def asked(where: str, step: int) -> None:
        if ask is not None and (where, step, run.rank) == (ask.where, ask.step, ask.rank):
            with suppress(FileExistsError):  # once
                Path("asked").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGTERM)

    def loss_fn(rows: torch.Tensor) -> torch.Tensor:
        asked("loss", len(steps) + began)
        if ask is not None and run.rank == ask.slow_rank:
            time.sleep(0.1)
        loss: torch.Tensor = model(rows).square().mean()
        return loss

    code: Any = 0
    validated = 0
    began = 0
    try:
        run.resume(model=model, optimizer=optimizer, scheduler=scheduler)
        began = run._context.loop.steps_done
        for epoch in range(loader.epoch, EPOCHS):
            for step in loader:
                step.backward(loss_fn)
                optimizer.step()
                run.checkpoint(every="1h")
                optimizer.zero_grad()
                scheduler.step()
                steps.append(step.index)
                drawn.append(float(torch.rand(())))
                asked("body", step.index)
            for batch in run.batches(DataLoader(data.rows, batch_size=8)):
                asked("validation", epoch)
                validated += len(batch)
    except SystemExit as leave:
        code = leave.code
    finally:
        run.close()
    return {
        "code": code,
        "began": began,
        "steps": steps,
        "drawn": drawn,
        "validated": validated,
        "lr": scheduler.get_last_lr()[0],
        "params": nn.utils.parameters_to_vector(model.parameters()).detach(),
        "handler": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run that nobody stopped."""
    folder = str(tmp_path_factory.mktemp("whole"))
    (result,) = run_ranks(sit, 1, folder, None, "ddp", 0, "auto")
    assert result["code"] == 0 and result["steps"] == list(range(EPOCHS * STEPS))
    return result


def _check(whole: dict[str, Any], *sessions: list[dict[str, Any]]) -> None:
    """Together they are the whole: each step once, on all ranks alike, the same weights."""
    for ranks in sessions:
        assert all(rank["steps"] == ranks[0]["steps"] for rank in ranks), [rank["steps"] for rank in ranks]
        assert all(rank["code"] == (0 if ranks is sessions[-1] else 75) for rank in ranks)
    assert [step for ranks in sessions for step in ranks[0]["steps"]] == whole["steps"]
    assert [value for ranks in sessions for value in ranks[0]["drawn"]] == whole["drawn"]
    last = sessions[-1][0]
    assert last["lr"] == whole["lr"] and relative(last["params"], whole["params"]) <= 1e-12


@pytest.mark.parametrize(
    ("ask", "stopped_after", "strategy", "workers", "micro_batch"),
    [
        (Ask(1), 3, "ddp", 0, "auto"),
        (Ask(4, where="loss"), 5, "ddp", 0, 2),  # a request before the exchange of a step: that step is the last
        (Ask(2, rank=0, slow_rank=1), 4, "ddp", 0, 3),
        (Ask(0, where="data"), 1, "ddp", 1, "auto"),
        (Ask(1, where="validation"), 9, "ddp", 0, "auto"),
        (Ask(10, where="loss"), 11, "ddp", 0, "auto"),
        (Ask(11, where="loss"), 12, "ddp", 0, "auto"),  # the last step: what follows the loop comes after the resume
        (Ask(5, rank=0), 7, "dp", 0, 2),
    ],
    ids=["body", "loss, K > 1", "slow rank", "loading", "validation", "last but one", "last", "dp"],
)
def test_all_ranks_stop_at_one_step_and_go_on_exactly(
    whole: dict[str, Any], tmp_path: Path, ask: Ask, stopped_after: int, strategy: str, workers: int, micro_batch: Any
) -> None:
    first = run_split(sit, 2, strategy, str(tmp_path), ask, strategy, workers, micro_batch)
    assert len(first[0]["steps"]) == stopped_after
    newest = files.newest(tmp_path / "run")
    assert newest is not None and files.step_of(newest) == stopped_after
    assert not files.read(newest)["evenload"]["finished"]
    # Whoever was asked keeps the default for a second signal; whoever wasn't has its own handler back.
    assert all(rank["handler"] for rank in first)
    second = run_split(sit, 2, strategy, str(tmp_path), None, strategy, workers, micro_batch)
    assert all(rank["began"] == stopped_after for rank in second)
    _check(whole, first, second)
    assert _is_finished(tmp_path)
    if stopped_after == 12:
        assert sum(rank["validated"] for rank in first) == 2 * STEPS * 8
        assert sum(rank["validated"] for rank in second) == STEPS * 8


def _is_finished(folder: Path) -> bool:
    newest = files.newest(folder / "run")
    assert newest is not None
    return bool(files.read(newest)["evenload"]["finished"])


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunnerContract]:
    """The ranks of this test are a queue's."""
    agreed = terms(tmp_path, grace_s=60.0)
    write_contract(tmp_path / "job.json", agreed)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "job.json"))
    yield agreed


def test_a_stop_file_and_the_reports(whole: dict[str, Any], tmp_path: Path, queue: RunnerContract) -> None:
    request_stop(queue, "another job is more urgent")
    first = run_ranks(sit, 2, str(tmp_path), None, "ddp", 0, "auto")
    assert all(rank["code"] == 75 and rank["steps"] == [] for rank in first)  # asked before it began: at once
    told = read_report(queue)
    assert told is not None and (told.state, told.step, told.total) == ("stopped", 0, None)
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert "stopped before step 1 (another job is more urgent); the queue continues job 17 automatically" in events
    Path(queue.stop_file).unlink()
    second = run_ranks(sit, 2, str(tmp_path), Ask(6), "ddp", 0, "auto")
    told = read_report(queue)
    assert told is not None and (told.state, told.step) == ("stopped", 8) and told.steps_per_s > 0
    third = run_ranks(sit, 1, str(tmp_path), None, "ddp", 0, "auto")
    told = read_report(queue)
    assert told is not None and (told.state, told.step) == ("finished", 12) and told.samples_per_s > 0
    costs = told.costs
    assert costs is not None and 0 < costs.compute_s <= costs.step_s and costs.batch_size * told.steps_per_s > 0
    assert costs.memory_bytes > 0 and costs.noise_samples is None and costs.max_batch == 0
    _check(whole, first, second, third)


def test_a_handler_of_the_scripts_own_stays(tmp_path: Path) -> None:
    ask = Ask(2, own_handler=True)
    results = run_ranks(sit, 2, str(tmp_path), ask, "ddp", 0, "auto")
    assert [rank["code"] for rank in results] == [0, 0] and len(results[0]["steps"]) == EPOCHS * STEPS
    assert (tmp_path / "handled").exists()


def _two_models(folder: str) -> tuple[Any, list[int], bool]:
    """Gradients of one model are gathered over two steps: a stop waits until they are used."""
    run = evenload.init(project_dir=folder, seed=0)
    torch.manual_seed(5)
    first, second = nn.Linear(6, 1).double(), nn.Linear(6, 1).double()
    first, second, loader = run.prepare(first, second, DataLoader(torch.randn(48, 6, dtype=torch.float64), 8))
    one, two = torch.optim.SGD(first.parameters(), 1e-2), torch.optim.SGD(second.parameters(), 1e-2)
    run.resume(first=first, second=second, one=one, two=two)
    steps: list[int] = []
    code: Any = 0
    try:
        for step in loader:
            step.backward(lambda rows: first(rows).square().mean())
            one.step()
            one.zero_grad()
            step.backward(lambda rows: second(rows).square().mean())
            if step.index % 2:
                two.step()
                two.zero_grad()
            steps.append(step.index)
            if step.index == 1:
                os.kill(os.getpid(), signal.SIGINT)
    except SystemExit as leave:
        code = leave.code
    run.close()
    return code, steps, second.weight.grad is None


def test_a_half_done_step_is_not_saved(tmp_path: Path) -> None:
    assert run_ranks(_two_models, 1, str(tmp_path)) == [(75, [0, 1, 2, 3], True)]


def _without_checkpoints(folder: str, until: int, resumes: bool) -> tuple[Any, list[int]]:
    run = evenload.init(project_dir=folder, seed=0)
    torch.manual_seed(5)
    model, loader = run.prepare(nn.Linear(6, 1).double(), DataLoader(torch.randn(48, 6, dtype=torch.float64), 8))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    if resumes:
        run.resume(model=model, optimizer=optimizer)
    steps: list[int] = []
    code: Any = 0
    try:
        for _ in range(loader.epoch, 1):
            for step in loader:
                step.backward(lambda rows: model(rows).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                steps.append(step.index)
                if step.index == until:
                    os.kill(os.getpid(), signal.SIGTERM)
    except SystemExit as leave:
        code = leave.code
    run.close()
    return code, steps


def test_a_script_without_run_checkpoint_does_not_begin_at_the_stop_again(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    assert run_ranks(_without_checkpoints, 1, folder, 1, True) == [(75, [0, 1, 2])]
    assert run_ranks(_without_checkpoints, 1, folder, -1, True) == [(0, [3, 4, 5])]
    assert run_ranks(_without_checkpoints, 1, folder, -1, True) == [(0, [])]
    assert _is_finished(tmp_path)


def test_without_resume_a_queue_is_told_why_it_goes_on(tmp_path: Path, queue: RunnerContract) -> None:
    request_stop(queue, "the day is over")
    assert run_ranks(_without_checkpoints, 2, str(tmp_path / "run"), -1, False) == [(0, [0, 1, 2, 3, 4, 5])] * 2
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert (
        events.count("a stop was requested (the day is over), but there is no state to resume from: call run.resume")
        == 1
    )


def _fresh(folder: str) -> list[int]:
    run = evenload.init(project_dir=folder, seed=0)
    model, loader = run.prepare(nn.Linear(6, 1).double(), DataLoader(torch.randn(48, 6, dtype=torch.float64), 8))
    run.resume(model=model)
    steps = []
    for step in loader:
        step.backward(lambda rows: model(rows).square().mean())
        model.zero_grad()
        steps.append(step.index)
        if step.index % 3 == 2:
            run.checkpoint()
            break
    run.close()
    return steps


def test_a_queues_later_attempt_of_a_fresh_job_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"fresh": True}
    folder = str(tmp_path / "run")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "job.json"))
    begun = []
    for job, attempt in (("17", 1), ("17", 2), ("18", 2)):  # the first attempt of job 18 ended before it began
        write_contract(tmp_path / "job.json", terms(tmp_path, job=job, attempt=attempt))
        begun.append(run_ranks(_fresh, 2, folder, settings=settings)[1][0])
    assert begun == [0, 3, 0]
