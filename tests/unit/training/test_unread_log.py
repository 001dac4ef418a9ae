"""Values of a device that `run.log` receives are written in order, as they were when it was called."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evenload.errors import StepError
from evenload.records.reader import read_steps
from evenload.records.recorder import Recorder
from evenload.training.compute.device_read import DeviceRead
from evenload.training.step.unread_log import UnreadLog
from tests.unit.records.make import make_step


def test_lines_are_written_in_order_with_the_values_of_their_time(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    log = UnreadLog(recorder.log, is_late=torch.Tensor)
    value = torch.tensor(1.5)
    log.add({"a": value, "b": 2}, 0)
    value.fill_(7)
    log.add({"b": 3}, 0)  # waits behind the first, or it would not be the newest
    log.add({"a": value}, 1)
    assert log.is_waiting
    log.write(0)
    recorder.step(make_step(0))
    assert log.is_waiting
    log.write()
    assert not log.is_waiting
    recorder.step(make_step(1))
    log.add({"late": 4.0}, 1)  # nothing waits: written at once
    recorder.close()
    first, second = read_steps(tmp_path)
    assert {name: first.metrics[name] for name in ("a", "b")} == {"a": 1.5, "b": 3}
    assert (second.metrics["a"], second.metrics["late"]) == (7, 4)


def test_a_line_whose_values_are_not_here_yet_is_written_later(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[dict[str, float], int]] = []
    log = UnreadLog(lambda metrics, step: written.append((dict(metrics), step)), is_late=torch.Tensor)
    log.add({"a": torch.tensor(1.5)}, 0)
    log.add({"b": 2.0}, 1)
    with monkeypatch.context() as patch:
        patch.setattr(DeviceRead, "is_here", False)  # as on a GPU that has not come so far
        log.write(waits=False)
    assert log.is_waiting and not written
    log.write(waits=False)
    assert not log.is_waiting and written == [({"a": 1.5}, 0), ({"b": 2.0}, 1)]


def test_a_text_beside_a_value_of_a_device_is_written_at_once() -> None:
    written: list[dict[str, object]] = []
    log = UnreadLog(lambda metrics, step: written.append(dict(metrics)), is_late=torch.Tensor)
    log.add({"loss": torch.tensor(1.5), "sample": "a text"}, 0)
    assert written == [{"sample": "a text"}] and log.is_waiting
    log.add({"sample": "another"}, 0)
    log.write()
    assert written[1:] == [{"sample": "another"}, {"loss": 1.5}]


@pytest.mark.parametrize("wrong", [torch.ones(2), None])
def test_what_is_not_a_number_is_refused_at_once(tmp_path: Path, wrong: object) -> None:
    recorder = Recorder(tmp_path)
    log = UnreadLog(recorder.log, is_late=torch.Tensor)
    with pytest.raises(StepError, match=r"'a' is .*; expected a number"):
        log.add({"ok": torch.ones(()), "a": wrong}, 0)
    with pytest.raises(StepError, match=r"'a' is .*; expected a number"):
        log.add({"a": wrong}, 0)
    assert not log.is_waiting
    recorder.close()
