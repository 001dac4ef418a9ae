"""The last steps are saved however a script ends; values, kept and best checkpoints. One rank, in this process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.cli.main import main
from evenload.errors import CheckpointError, ConfigError, NonFiniteError
from evenload.records.checkpoints import list_checkpoints, read_best
from evenload.training import run as run_module
from evenload.training.checkpoint import files

Body = Callable[["Job", Any], None]


class Job:
    """Four steps an epoch; BatchNorm, so that a backward changes buffers."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.run = evenload.init(project_dir=folder, **settings)
        torch.manual_seed(0)
        data = TensorDataset(torch.arange(16.0).reshape(8, 2), torch.ones(8, 1))
        self.model, self.loader = self.run.prepare(
            nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)), DataLoader(data, 2)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.saved = self.run.resume(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
        self.epochs = 1

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def epoch(self, body: Body = lambda job, step: None) -> None:
        for step in self.loader:
            step.backward(self.loss)
            self.update()
            body(self, step)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    yield lambda **settings: Job(tmp_path, **settings)
    if run_module._open is not None:
        run_module._open.close()


def _newest(folder: Path) -> tuple[int, dict[str, Any]]:
    newest = files.newest(folder)
    assert newest is not None
    return files.step_of(newest), files.read(newest)


def _fails(job: Job, body: Callable[[Job], None]) -> None:
    """The script ends by an error in `body`, and the run with it."""
    with pytest.raises((ZeroDivisionError, NameError)):
        try:
            body(job)
        finally:
            job.run.close()


def _after_the_loop(job: Job) -> None:
    job.epoch()
    job.expected = job.state()  # type: ignore[attr-defined]
    raise NameError("a typo")


def _after_the_update(job: Job) -> None:
    def body(job: Job, step: Any) -> None:
        job.expected = job.state()  # type: ignore[attr-defined]
        if step.index == 2:
            raise NameError("a typo")

    job.epoch(body)


def _before_the_update(job: Job) -> None:
    for step in job.loader:
        if step.index == 2:
            job.expected = job.state()  # type: ignore[attr-defined]
        step.backward(job.loss)
        if step.index == 2:
            raise NameError("a typo")
        job.update()


def _in_the_loss(job: Job) -> None:
    def loss(batch: Any) -> torch.Tensor:
        job.model(batch[0])
        raise ZeroDivisionError("in the loss")

    for step in job.loader:
        if step.index == 3:
            job.expected = job.state()  # type: ignore[attr-defined]
            step.backward(loss)
        step.backward(job.loss)
        job.update()


def _wrong_step(job: Job) -> None:
    """The error comes before anything is computed: nothing of the last step may be undone."""
    for step in job.loader:
        job.expected = job.state()  # type: ignore[attr-defined]
        if step.index == 2:
            job.model[0].weight.grad = torch.ones_like(job.model[0].weight)
            try:
                step.backward(job.loss)
            except evenload.EvenloadError:
                raise NameError("a typo") from None
        step.backward(job.loss)
        job.update()


@pytest.mark.parametrize(
    ("body", "step"),
    [(_after_the_loop, 4), (_after_the_update, 3), (_before_the_update, 2), (_in_the_loss, 3), (_wrong_step, 2)],
)
def test_an_error_anywhere_loses_no_step(
    job: Callable[..., Job], tmp_path: Path, body: Callable[[Job], None], step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    now = job()
    _fails(now, body)
    saved_step, state = _newest(tmp_path)
    assert saved_step == step == state["evenload"]["steps_done"] and not state["evenload"]["finished"]
    for name, value in now.expected.items():  # type: ignore[attr-defined]
        assert torch.equal(state["model"][name], value), name
    assert f"checkpoint at step {step} (the script ended by an error" in capsys.readouterr().out
    again = job()
    assert again.saved and again.run._context.loop.steps_done == step


def test_half_updated_weights_are_not_saved(
    job: Callable[..., Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(job: Job) -> None:
        for step in job.loader:
            step.backward(job.loss)
            if step.index == 2:
                job.optimizer.param_groups[0]["lr"] = "fast"
                try:
                    job.optimizer.step()
                except Exception:
                    raise NameError("in the optimizer") from None
            job.update()
            job.run.checkpoint(every=1)

    _fails(job(), train)
    assert _newest(tmp_path)[0] == 2
    assert "are not saved, the weights may be wrong: an optimizer had not finished" in capsys.readouterr().out


def test_losses_that_stay_nan_end_the_script_with_its_steps_saved(job: Callable[..., Job], tmp_path: Path) -> None:
    now = job()
    now.epoch()
    expected = now.state()
    with pytest.raises(NonFiniteError):
        try:
            while True:
                for step in now.loader:
                    step.backward(lambda batch: now.loss(batch) * math.nan)
                    now.update()
        finally:
            now.run.close()
    step, state = _newest(tmp_path)
    assert step >= 4 and torch.equal(state["model"]["0.weight"], expected["0.weight"])


def test_an_early_end_saves_without_run_checkpoint(job: Callable[..., Job], tmp_path: Path) -> None:
    now = job()
    for step in now.loader:
        step.backward(now.loss)
        if step.index == 1:
            break  # gradients that nobody used
        now.update()
    now.run.close()
    step, state = _newest(tmp_path)
    assert step == 1 and not state["evenload"]["finished"]


def test_values_come_back(job: Callable[..., Job], tmp_path: Path) -> None:
    now = job()
    assert not now.saved and now.saved.get("best_loss", math.inf) == math.inf and len(now.saved) == 0
    values = {"best_loss": torch.tensor(0.5), "names": ("a", "b"), "nested": {"x": 1}}

    def body(job: Job, step: Any) -> None:
        job.run.checkpoint(every=3, values={**values, "step": step.index})

    _fails(now, lambda job: (job.epoch(body), 1 / 0))  # type: ignore[arg-type,return-value]
    again = job()
    assert again.saved and dict(again.saved) == {"best_loss": 0.5, "names": ["a", "b"], "nested": {"x": 1}, "step": 3}
    _fails(again, lambda job: 1 / 0)  # type: ignore[arg-type,return-value]
    third = job()
    assert third.saved["step"] == 3
    changed = {"step": 4}
    third.run.checkpoint(every="1h", values=changed)
    changed["step"] = 5  # no step since the newest checkpoint: it is brought up to date
    third.run.close()
    third = job()
    assert dict(third.saved) == {"step": 5}
    third.run.checkpoint(every="1h", values={})
    third.run.close()
    empty = job().saved
    assert empty and len(empty) == 0


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"keep": 0}, "run.checkpoint(keep=0): expected a number of checkpoints, at least 1, or 'all'"),
        ({"keep": "none"}, "run.checkpoint(keep='none')"),
        ({"best": "val_loss"}, "such as best=('val_loss', 'min')"),
        ({"best": ("val_loss", "lowest")}, "such as best=('val_loss', 'min')"),
        ({"values": 3}, "expected a dict of plain values"),
        ({"values": {"model": nn.Linear(1, 1)}}, "a Linear is no plain value"),
        ({"values": {1: 2}}, "expected names as text"),
    ],
)
def test_wrong_arguments(job: Callable[..., Job], arguments: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError) as raised:
        job().run.checkpoint(every="1h", **arguments)
    assert found in str(raised.value)


def _steps(now: Job, folder: Path) -> list[int]:
    """The steps on the disk, after the write beside the training."""
    now.run._saver.collect(waits=True)
    return [info.step for info in list_checkpoints(folder)]


def test_the_newest_three_are_kept(job: Callable[..., Job], tmp_path: Path) -> None:
    now = job()
    now.epoch(lambda job, step: job.run.checkpoint(every=1) and None)
    assert _steps(now, tmp_path) == [2, 3, 4]
    (files.newest(tmp_path) / "info.json").unlink()  # type: ignore[operator]  # as of an earlier version
    now.epoch(lambda job, step: job.run.checkpoint(every=1, keep=1) and None)
    assert _steps(now, tmp_path) == [4, 6, 7, 8]


def test_all_are_kept(job: Callable[..., Job], tmp_path: Path) -> None:
    now = job()
    now.epoch(lambda job, step: job.run.checkpoint(every=1, keep="all") and None)
    assert _steps(now, tmp_path) == [1, 2, 3, 4]


def test_the_best_is_written_before_weights_change(job: Callable[..., Job], tmp_path: Path) -> None:
    now = job()
    for loss in (0.5, 0.3, 0.4, math.nan, 0.2):
        now.epoch(lambda job, step: job.run.checkpoint(every=100, keep=1, best=("val_loss", "min")) and None)
        now.run.log({"val_loss": torch.tensor(loss)})
        if loss == 0.3:
            expected = now.state()
        if loss == 0.4:
            now.run._saver.collect(waits=True)
            best = read_best(tmp_path)
            assert best is not None and (best.step, round(best.value, 3)) == (8, 0.3)
            state = files.read(tmp_path / "checkpoints" / "step-00000008")
            assert all(torch.equal(state["model"][name], value) for name, value in expected.items())
    now.run.close()
    assert [(info.step, info.is_best, info.is_last) for info in list_checkpoints(tmp_path)] == [(20, True, True)]
    again = job()
    again.epoch(lambda job, step: job.run.checkpoint(every=1, keep=2, best=("val_loss", "min")) and None)
    again.run.log({"val_loss": 0.25})
    again.run.close()
    rows = [(info.step, info.is_best, info.is_last, info.value, info.epoch) for info in list_checkpoints(tmp_path)]
    assert rows == [(20, True, False, pytest.approx(0.2), 5), (23, False, False, None, 5), (24, False, True, 0.25, 5)]


def test_a_metric_that_never_came_is_reported(job: Callable[..., Job], capsys: pytest.CaptureFixture[str]) -> None:
    now = job()
    now.epoch(lambda job, step: job.run.checkpoint(every=1, best=("val_los", "max")) and None)
    now.run.close()
    assert "no best checkpoint was kept: run.log never received 'val_los'" in capsys.readouterr().out


def test_a_session_that_ends_before_its_first_validation_has_the_best_of_the_one_before(
    job: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    for session in range(2):
        now = job()
        now.epochs = session + 1
        now.epoch(lambda job, step: job.run.checkpoint(every=1, best=("val_loss", "min")) and None)
        if not session:
            now.run.log({"val_loss": 0.5})
        now.run.close()
    assert "no best checkpoint" not in capsys.readouterr().out


def test_a_finished_run_goes_on_with_the_scheduler_of_its_end(job: Callable[..., Job], tmp_path: Path) -> None:
    now = job()
    now.epoch(lambda job, step: job.run.checkpoint(every=1) and None)
    now.scheduler.step()  # once an epoch, after the checkpoint of the last step
    now.run.close()
    again = job()
    assert again.loader.epoch == 1 and again.scheduler.last_epoch == 1
    again.epoch()
    again.run.close()
    assert _newest(tmp_path)[0] == 8


def test_weights_are_exported_and_loaded_elsewhere(job: Callable[..., Job], tmp_path: Path) -> None:
    now = job()
    now.epoch(lambda job, step: job.run.checkpoint(every=1, best=("acc", "max"), values={"step": step.index}) and None)
    now.run.log({"acc": 0.9})
    now.run.close()
    expected = now.state()
    again = job()
    again.epoch(lambda job, step: job.run.checkpoint(every=1, keep=1, best=("acc", "max")) and None)
    again.run.log({"acc": 0.8})
    again.run.close()
    loaded = evenload.load_checkpoint(tmp_path, "best")
    assert sorted(loaded) == ["model", "optimizer", "scheduler", "values"] and loaded["values"] == {"step": 3}
    now.model.load_state_dict(evenload.load_checkpoint(tmp_path, 4)["model"])
    assert all(torch.equal(now.state()[name], value) for name, value in expected.items())
    run = str(tmp_path)
    for arguments in (["best.pt", "--checkpoint", "best"], ["best.safetensors", "--checkpoint", "4"], ["last.pt"]):
        with pytest.raises(SystemExit) as ended:
            main(["export", run, str(tmp_path / arguments[0]), *arguments[1:]])
        assert ended.value.code in (0, None)
    best, last = (torch.load(tmp_path / name, weights_only=True) for name in ("best.pt", "last.pt"))
    safe = safetensors.torch.load_file(tmp_path / "best.safetensors")
    for name, value in expected.items():
        assert torch.equal(best[name], value) and torch.equal(safe[name], value)
    assert not torch.equal(last["0.weight"], best["0.weight"])
    with pytest.raises(
        CheckpointError, match="has no checkpoint '99'; expected 'last', 'best' or a step, and found the"
    ):
        evenload.load_checkpoint(tmp_path, "99")


def test_show_lists_checkpoints(job: Callable[..., Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = job()
    now.epoch(lambda job, step: job.run.checkpoint(every=2, best=("acc", "max")) and None)
    now.run.log({"acc": 0.75})
    now.run.close()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["show", str(tmp_path)])
    shown = [line.split() for line in capsys.readouterr().out.partition("Checkpoints\n")[2].splitlines()]
    assert shown[0] == ["step", "epoch", "written", "size", "acc"]
    assert shown[1][:2] == ["2", "0"] and shown[2][-3:] == ["0.7500", "best,", "last"]
    with pytest.raises(SystemExit):
        main(["show", str(tmp_path), "--json"])
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["step"], row["is_best"], row["value"]) for row in rows] == [(2, False, None), (4, True, 0.75)]
