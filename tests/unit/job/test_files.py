"""What a program writes is read with care: it may be anybody's."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from evenload.balance.scaling import StepCosts
from evenload.errors import ConfigError, QueueError
from evenload.job.protocol import (
    ProgressReport,
    RunnerContract,
    read_contract,
    read_report,
    write_contract,
    write_report,
)
from tests.system.job.programs import terms

COSTS = StepCosts(64, 2, 0.08, 0.1, 10**9, cap=16, base_batch=32, max_batch=128, noise_samples=900.5)
TOLD = ProgressReport("17", 2, 4711, 412, 1000, 9.5, 304.0, "running", 1.7e9, costs=COSTS)


def test_there_and_back(tmp_path: Path) -> None:
    line = terms(tmp_path)
    write_contract(tmp_path / "job.json", line)
    assert read_contract(str(tmp_path / "job.json")) == line
    assert read_report(line) is None
    write_report(line, TOLD)
    assert read_report(line) == TOLD
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.json", "report.json"]


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1}, {"step": 2**70}, {"step": 1.5}, {"step": True}, {"step": None}, {"steps_per_s": float("nan")},
        {"steps_per_s": float("inf")}, {"samples_per_s": "fast"}, {"state": "root"}, {"state": ["running"]},
        {"attempt": 1}, {"job": "18"}, {"schema": 2}, {"total": "all"}, {"costs": 5}, {"costs": {"batch_size": 8}},
        {"costs": {"batch_size": 8, "num_micro": 1, "compute_s": -1.0, "step_s": 1.0}},
        {"costs": {"batch_size": 8, "num_micro": 1, "compute_s": "1", "step_s": 1.0}},
    ],
)  # fmt: skip
def test_a_report_that_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    line = terms(tmp_path)
    write_report(line, TOLD)
    path = Path(line.report_file)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(QueueError):
        read_report(line)


@pytest.mark.parametrize("what", ["torn", "large", "deep", "link", "pipe", "folder", "list"])
def test_what_is_no_report_is_refused_without_reading_it(tmp_path: Path, what: str) -> None:
    line = terms(tmp_path)
    path = Path(line.report_file)
    match what:
        case "link":
            (tmp_path / "secret").write_text("{}")
            path.symlink_to(tmp_path / "secret")
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case _:
            texts = {"torn": '{"schema": 1, "st', "large": " " * 100_000, "deep": "[" * 60_000, "list": "[1]"}
            path.write_text(texts[what])
    with pytest.raises(QueueError, match=r"the report of job 17, .*report\.json: "):
        read_report(line)


@pytest.mark.parametrize(
    "change",
    [{"grace_s": -1}, {"grace_s": float("inf")}, {"attempt": 0}, {"job": ""}, {"report_every_s": "2"}],
)
def test_terms_that_cannot_be_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        terms(tmp_path, **change)
    with pytest.raises(ConfigError, match="absolute path"):
        RunnerContract("1", 1, "report.json", "/stop", 1.0)
