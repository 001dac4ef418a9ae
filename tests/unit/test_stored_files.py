"""Runs, checkpoints and queues of an earlier version open (tests/stored)."""

from __future__ import annotations

import gzip
import json
import sqlite3
import tarfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.scheduler.store.audit import audit
from evenload.scheduler.store.writer import DATABASE, QueueStore
from evenload.views.run.summary import summarize_run
from evenload.views.run.summary_text import format_run_summary
from tests.paths import TESTS

STORED = TESTS / "stored"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    with tarfile.open(STORED / "run.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run"


def test_a_run_is_summarized(run_folder: Path) -> None:
    summary = summarize_run(run_folder)
    text = format_run_summary(summary)
    assert "6 steps, 96 samples" in text and "share 8 of 16" in text and "checkpoint at step 6" in text


def test_a_checkpoint_of_two_ranks_continues_to_the_same_weights(run_folder: Path) -> None:
    """The script that wrote it, on one rank; BatchNorm statistics, optimizer, scheduler, cursor and order included."""
    run = evenload.init(project_dir=run_folder, seed=0)
    try:
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(64, 4, dtype=torch.float64), torch.randint(0, 3, (64,)))
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Linear(6, 3)
        ).double()
        model, loader = run.prepare(model, DataLoader(data, batch_size=16, shuffle=True))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        run.resume(model=model, optimizer=optimizer, scheduler=scheduler)
        indices = []
        for _ in range(loader.epoch, 2):
            for step in loader:
                step.backward(lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                indices.append(step.index)
    finally:
        run.close()
    assert indices == [6, 7]
    found = torch.cat([value.double().flatten() for value in model.state_dict().values()])
    expected = torch.tensor(json.loads((STORED / "run_weights.json").read_text()), dtype=torch.float64)
    assert float((found - expected).norm() / expected.norm()) <= 1e-12


def test_a_log_of_events_folds_to_the_same_queue(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / DATABASE)
    connection.executescript(gzip.decompress((STORED / "history.sql.gz").read_bytes()).decode())
    connection.executescript("PRAGMA application_id = 1165388900; PRAGMA user_version = 1;")
    connection.close()
    expected = json.loads((STORED / "history.json").read_text())
    with QueueStore(tmp_path, holder="a test") as store:
        queue = store.queue_state
        jobs = {job.id: [job.state.value, list(job.devices), job.attempt] for job in queue.jobs.values()}
        assert jobs == expected["jobs"]
        assert {job: outcome.value for job, outcome in queue.outcomes.items()} == expected["outcomes"]
        assert sorted(queue.devices) == expected["devices"]
        assert dict(queue.closed) == expected["closed"]
        assert store.last == expected["last"]
    assert audit(tmp_path) == []
