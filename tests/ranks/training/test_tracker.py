"""`run.tracker`: the own objects of the loggers' libraries, for what is no number."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import evenload
from evenload.errors import ConfigError
from evenload.training.session.trackers import IgnoredCalls
from tests.ranks.wrong_uses.jobs import Job


def _train(tmp_path: Path, loggers: tuple[str, ...], body: Any, **options: Any) -> None:
    run = evenload.init(project_dir=tmp_path / "run", loggers=loggers, logger_options=options)
    try:
        job = Job(run)
        for step in job.loader:
            job.step(step)
            body(run, step)
    finally:
        run.close()


def test_tensorboards_summary_writer(tmp_path: Path) -> None:
    def body(run: evenload.Run, step: Any) -> None:
        if step.index == 2:
            writer = run.tracker("tensorboard")
            writer.add_image("samples", torch.rand(3, 8, 8), step.index)
            writer.add_histogram("weights", torch.randn(100), step.index)
            writer.add_text("note", "a text", step.index)

    _train(tmp_path, ("tensorboard",), body)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    (file,) = (tmp_path / "run" / "tensorboard").iterdir()
    accumulator = EventAccumulator(str(file))
    accumulator.Reload()
    tags = accumulator.Tags()
    assert tags["images"] == ["samples"] and tags["histograms"] == ["weights"]
    assert [point.step for point in accumulator.Images("samples")] == [2]
    assert [point.step for point in accumulator.Scalars("loss")] == [0, 1, 2, 3]


def test_other_ranks_ignore_calls_and_unknown_names_are_errors(tmp_path: Path) -> None:
    nothing = IgnoredCalls()
    nothing.log({"x": nothing.Image(1)}, step=3)
    with nothing.start() as inner:
        inner.add_image("x")
    client, run_id = nothing
    client.log_text(run_id, "a", "b.txt")

    def body(run: evenload.Run, _: Any) -> None:
        with pytest.raises(ConfigError, match=r"the loggers of this run are: none; add it: init\(loggers='wandb'\)"):
            run.tracker("wandb")

    _train(tmp_path, (), body)
