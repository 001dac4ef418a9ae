"""Images, texts, histograms and tables of `run.log`: their files, and what TensorBoard receives."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from evenload.errors import StepError
from evenload.records.loggers.logger import LoggerContext
from evenload.records.loggers.scalars import LoggerPosition, read_records, to_scalars
from evenload.records.loggers.tensorboard import TensorBoard
from evenload.records.media import kind_of, size_of_png, write_media
from evenload.records.recorder import Recorder
from tests.unit.records.make import make_step

PIXELS = (np.arange(5 * 4 * 3) * 4).reshape(5, 4, 3).astype(np.uint8)


class Figure:
    def savefig(self, file: Any, format: str) -> None:
        Image.fromarray(PIXELS).save(file, format)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (PIXELS, PIXELS),
        (torch.from_numpy(PIXELS).permute(2, 0, 1), PIXELS),
        (torch.from_numpy(PIXELS).permute(2, 0, 1) / 255, PIXELS),
        (torch.from_numpy(PIXELS).permute(2, 0, 1).bfloat16() / 255, PIXELS),
        (torch.from_numpy(PIXELS)[:3, :, 0].reshape(1, 3, 4) / 255, PIXELS[:3, :, 0]),
        (torch.zeros(3, 8, 3), np.zeros((8, 3, 3))),
        (np.zeros((3, 8, 3)), np.zeros((3, 8, 3))),
        (Image.fromarray(PIXELS), PIXELS),
        (Figure(), PIXELS),
    ],
)
def test_an_image_becomes_a_png(tmp_path: Path, value: Any, expected: Any) -> None:
    path = tmp_path / write_media(tmp_path, "seen/a b", 7, value)
    assert path == tmp_path / "media" / "seen" / "a b" / "step-7.png"
    found = np.asarray(Image.open(io.BytesIO(path.read_bytes())))
    assert found.shape == expected.shape and np.abs(found.astype(float) - expected).max() <= 1
    assert size_of_png(path.read_bytes())[:2] == (found.shape[1], found.shape[0])


def test_what_is_none_of_them() -> None:
    for value in (
        1,
        1.0,
        torch.ones(3),
        torch.ones(2, 8, 8),
        torch.ones(1, 1, 8, 8),
        (1, 2),
        [1, 2],
        [],
        {"a": 1},
        None,
    ):
        assert kind_of(value) is None, value


def log_everything(folder: Path) -> None:
    recorder = Recorder(folder)
    table = [{"id": 1, "found": "a|b"}, {"id": torch.tensor(2), "score": 0.5}]
    recorder.log({"loss": 1.0, "seen": PIXELS, "note": "a text", "weights": np.histogram([0.0, 1.0, 1.0], 2)}, 0)
    recorder.step(make_step(0))
    recorder.log({"errors": table}, 0)
    recorder.close()


def test_files_follow_their_step_to_the_loggers(tmp_path: Path) -> None:
    log_everything(tmp_path)
    records, _ = read_records(tmp_path / "steps.jsonl", 0)
    rows, _ = to_scalars(records, LoggerPosition(), False)
    assert [row.step for row in rows] == [0, 0, 0]
    assert rows[0].scalars["loss"] == 1.0 and not rows[0].media
    assert sorted(rows[1].media) == ["note", "seen", "weights"] and list(rows[2].media) == ["errors"]
    assert json.loads((tmp_path / rows[1].media["weights"]).read_text()) == {"counts": [1, 2], "edges": [0.0, 0.5, 1.0]}
    assert json.loads((tmp_path / rows[2].media["errors"]).read_text()) == {
        "columns": ["id", "found", "score"],
        "rows": [[1, "a|b", None], [2, None, 0.5]],
    }
    logger = TensorBoard(LoggerContext(tmp_path))
    logger.write(rows)
    logger.close(True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert accumulator.Images("seen")[0].width == 4 and accumulator.Images("seen")[0].step == 0
    assert accumulator.Histograms("weights")[0].histogram_value.bucket == [1.0, 2.0]
    assert accumulator.Tensors("note")[0].tensor_proto.string_val == [b"a text"]
    assert b"| 1 | a" in accumulator.Tensors("errors")[0].tensor_proto.string_val[0]


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("0.125", "log it without formatting it"),
        (torch.ones(3), "x.mean()"),
        (torch.ones(2, 3, 8, 8), "of shape (2, 3, 8, 8)"),
        (PIXELS * 2.0, "floats are from 0 to 1"),
        (object(), "expected a number"),
    ],
)
def test_what_cannot_be_logged(tmp_path: Path, value: Any, fix: str) -> None:
    recorder = Recorder(tmp_path)
    try:
        with pytest.raises(StepError) as raised:
            recorder.log({"x": value}, 0)
    finally:
        recorder.close()
    assert fix in str(raised.value)
