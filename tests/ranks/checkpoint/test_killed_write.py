"""Checkpoints of processes that are killed while they write, and of two ranks that go on meanwhile."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.errors import CheckpointError, UnwritableError
from evenload.testing import run_ranks
from evenload.training.checkpoint import files
from evenload.training.checkpoint.retention import Retention

KILLS = 8


def _state(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((50_000,), float(step))}, "other": {"step": step}}


def _write_for_ever(run: Path, written: int) -> None:
    """Write checkpoint after checkpoint, and the number of each complete one to a pipe."""
    retention = Retention(run)
    retention.set_options(2, None)
    for step in range((files.step_of(found) if (found := files.newest(run)) else 0) + 1, 10_000):
        files.write(run, step, _state(step))
        os.write(written, step.to_bytes(4))
        files.update_values(run / "checkpoints" / f"step-{step:08d}", {"other": {"updated": True}})
        files.write(run, step, _state(step))  # in place of the one that is there
        retention.settle(step)


def _killed(folder: str) -> list[tuple[int, int, int]]:
    """Kill a writer at random moments; return what it had finished, what is found then, and how many files are left over."""
    run, choose, rows = Path(folder), random.Random(0), []
    os.fsync = lambda _: None  # a killed process loses nothing that it wrote, unlike a machine without power
    files.write(run, 1, _state(1))  # and import what that needs, once for all children
    for _ in range(KILLS):
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                _write_for_ever(run, writes)
            finally:
                os._exit(1)
        os.close(writes)
        finished = os.read(reads, 4)  # at least one
        time.sleep(choose.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(reads, 4):
            finished = more
        os.close(reads)
        files.clean_up(run)
        found = files.read_newest(run)
        assert found is not None and not found.damaged
        step = files.step_of(found.folder)
        assert float(found.state["model"]["weight"][-1]) == step == found.state["other"]["step"]
        left = [path for path in (run / "checkpoints").iterdir() if path.name[0] == "."]
        rows.append((int.from_bytes(finished), step, len(left)))
    return rows


def _beside(folder: str) -> dict[str, Any]:
    """Two ranks; the disk fails in the writes of the steps 6, 8 and 9, the last of which the script requests."""
    run = evenload.init(project_dir=folder, seed=0)
    write, gate = files.write, threading.Event()

    def slow(folder: Path, step: int, *arguments: Any) -> int:
        gate.wait(10)
        if step in (6, 8, 9):
            raise UnwritableError("the disk is gone")
        return write(folder, step, *arguments)

    files.write = slow
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 3, dtype=torch.float64), torch.randn(40, 1, dtype=torch.float64))
    model, loader = run.prepare(nn.Linear(3, 1, dtype=torch.float64), DataLoader(data, batch_size=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run.resume(model=model, optimizer=optimizer)
    weights, failed, ahead = {}, [], 0
    for step in loader:
        step.backward(lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1]))
        optimizer.step()
        optimizer.zero_grad()
        weights[step.index + 1] = model.weight.detach().clone()
        try:
            run.checkpoint(every=None if step.index == 8 else 2)
        except CheckpointError as error:
            failed.append((step.index + 1, str(error)))
        if step.index + 1 == 3:
            ahead = int(files.newest(Path(folder)) is None)
            gate.set()
    run.close()
    files.write = write
    saved = files.read_newest(Path(folder)) if run.rank == 0 else None
    return {"weights": weights, "failed": failed, "ahead": ahead, "saved": saved and saved.state["model"]["weight"]}


def test_killed_while_it_writes(tmp_path: Path) -> None:
    (rows,) = run_ranks(_killed, 1, str(tmp_path / "run"))
    assert len(rows) == KILLS
    assert all(found in (finished, finished + 1) and not left for finished, found, left in rows), rows


def test_two_ranks_go_on_and_learn_of_a_failure_together(tmp_path: Path) -> None:
    first, second = run_ranks(_beside, 2, str(tmp_path / "run"))
    assert first["ahead"] == second["ahead"] == 1, "step 3 was done before the checkpoint of step 2 was written"
    assert first["failed"] == [(9, "the disk is gone")]
    assert second["failed"] == [(9, "rank 0 failed to write the checkpoint")]
    assert all(torch.equal(first["weights"][step], second["weights"][step]) for step in first["weights"])
    assert torch.equal(first["saved"], first["weights"][10])
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert "CHECKPOINT FAILED: the disk is gone; training goes on" in events
