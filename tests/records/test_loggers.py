from __future__ import annotations

import importlib.util
import sys
import threading
import warnings
from pathlib import Path

import pytest

from evenload.errors import ConfigError
from evenload.records.recorder import Recorder
from tests.records.make import make_step


def read_back(folder: Path) -> dict[str, dict[int, float]]:
    """Tag to step to value, by TensorBoard's own reader."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    accumulator = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: {point.step: point.value for point in accumulator.Scalars(tag)} for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboards_own_reader_finds_it_all(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    recorder = Recorder(tmp_path, loggers=("tensorboard",))
    assert set(threading.enumerate()) == threads
    recorder.log({"lr": 0.5}, 0)
    recorder.step(make_step(0, metrics={"lr": 9.0, "accuracy": 0.25}))
    recorder.log({"val_loss": 3.0}, 0)
    recorder.step(make_step(1, loss=float("nan")))
    recorder.close()
    scalars = read_back(tmp_path)
    assert scalars["lr"] == {0: 0.5}
    assert scalars["accuracy"] == {0: 0.25}
    assert scalars["val_loss"] == {0: 3.0}
    assert scalars["loss"][0] == 4.0
    assert scalars["loss"][1] != scalars["loss"][1]
    assert scalars["evenload/samples_per_s"] == {0: 512.0, 1: 512.0}
    assert scalars["share/rank1"] == {0: 85.0, 1: 85.0}
    assert scalars["wait_s/rank1"][0] == pytest.approx(0.1)
    assert scalars["memory_bytes/rank0"][0] == 3 << 30


def test_the_users_own_loss_is_written_once(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, loggers=("tensorboard",))
    recorder.log({"loss": 42.0}, 0)
    recorder.step(make_step(0))
    recorder.close()
    assert read_back(tmp_path)["loss"] == {0: 42.0}


def test_steps_done_again_replace_the_lost_ones(tmp_path: Path) -> None:
    for first, loss in ((0, 1.0), (3, 2.0)):
        recorder = Recorder(tmp_path, loggers=("tensorboard",))
        for index in range(first, 5 if first == 0 else 4):
            recorder.step(make_step(index, loss=loss, time=make_step(index).time + 1000 * first))
        recorder.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    assert read_back(tmp_path)["loss"] == {0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0}


@pytest.mark.parametrize("folder", [None, "run"])
def test_a_missing_package_is_named_at_the_start_on_every_rank(
    tmp_path: Path, folder: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'evenload\[tensorboard\]'"):
        Recorder(None if folder is None else tmp_path / folder, loggers=("tensorboard",))


def test_a_broken_package_is_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with pytest.raises(ConfigError, match=r"pip install 'evenload\[tensorboard\]'"):
        Recorder(tmp_path, loggers=("tensorboard",))


def test_an_unknown_logger_is_an_error() -> None:
    with pytest.raises(ConfigError, match="there is no logger 'nope'; expected some of tensorboard"):
        Recorder(None, loggers=("nope",))
