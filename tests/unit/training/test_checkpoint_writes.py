"""Checkpoints written beside the training: what they hold, one at a time, and errors of the disk. One rank, this process."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.errors import CheckpointError
from evenload.records.checkpoints import list_checkpoints, read_best
from evenload.records.reader import read_events
from evenload.training import run as run_module
from evenload.training.checkpoint import files
from evenload.training.checkpoint import retention as retention_module
from evenload.training.checkpoint.host_copy import HostBuffers
from evenload.training.checkpoint.retention import Retention
from tests.small_disk import small_disk

_LIMIT_S = 20.0


class Job:
    """Eight steps an epoch."""

    def __init__(self, folder: Path, model: nn.Module | None = None) -> None:
        self.run = evenload.init(project_dir=folder)
        torch.manual_seed(0)
        data = TensorDataset(torch.arange(32.0).reshape(16, 2), torch.ones(16, 1))
        self.model, self.loader = self.run.prepare(model or nn.Linear(2, 1), DataLoader(data, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)

    def resume(self) -> Job:
        self.run.resume(model=self.model, optimizer=self.optimizer)
        return self

    def steps(self) -> Iterator[int]:
        """Yield after each update, with the number of steps done."""
        for step in self.loader:
            step.backward(lambda batch: nn.functional.mse_loss(self.model(batch[0]), batch[1]))
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield step.index + 1

    def state(self) -> list[torch.Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [value.clone() for value in [*self.model.state_dict().values(), *moments]]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    yield lambda model=None: Job(tmp_path / "run", model)
    if run_module._open is not None:
        with suppress(CheckpointError):
            run_module._open.close()


class HeldWrite:
    """Holds each write until `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[int] = []
        self.release = threading.Semaphore(0)
        self._write = files.write
        monkeypatch.setattr(files, "write", self.write)

    def write(self, folder: Path, step: int, *arguments: Any) -> int:
        self.begun.append(step)
        assert self.release.acquire(timeout=_LIMIT_S)
        return self._write(folder, step, *arguments)


def _events(folder: Path, kind: str) -> list[Any]:
    return [event for event in read_events(folder / "run") if event.kind == kind]


def _steps(folder: Path) -> list[int]:
    return [info.step for info in list_checkpoints(folder / "run")]


def test_the_loop_goes_on_and_the_checkpoint_holds_the_boundary(
    job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, now, expected = HeldWrite(monkeypatch), job().resume(), {}
    for step in now.steps():
        expected[step] = now.state()
        assert now.run.checkpoint(every=4, keep="all") == (step % 4 == 0)
        if step == 6:
            assert held.begun == [4] and _steps(tmp_path) == [], "step 6 was reached before the checkpoint of step 4"
        if step == 7:
            held.release.release(3)
    now.run.close()
    assert held.begun == [4, 8] and _steps(tmp_path) == [4, 8]
    for step in (4, 8):
        saved = files.read(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
        moments = [value for state in saved["optimizer"]["state"].values() for value in state.values()]
        found = [*saved["model"].values(), *moments]
        assert all(torch.equal(a, b) for a, b in zip(expected[step], found, strict=True))
    assert [event.step for event in _events(tmp_path, "checkpoint")] == [4, 8]
    assert all(0 <= event.fields["seconds"] <= event.fields["write_s"] for event in _events(tmp_path, "checkpoint"))


def test_at_most_one_is_written_at_a_time(
    job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, now = HeldWrite(monkeypatch), job().resume()
    timer = threading.Timer(0.2, held.release.release)
    for step in now.steps():
        if step == 2:
            timer.start()
        now.run.checkpoint(every=1, keep=1)
        if step == 2:
            assert not timer.is_alive(), "the second waits for the first"
            break
    held.release.release(9)
    now.run.close()
    timer.join()
    assert held.begun == [1, 2] and _steps(tmp_path) == [2]


def test_without_an_interval_it_is_there_at_once(job: Callable[..., Job], tmp_path: Path) -> None:
    now = job().resume()
    for step in now.steps():
        assert now.run.checkpoint() and _steps(tmp_path)[-1] == step
    assert _steps(tmp_path) == [6, 7, 8]


def test_a_metric_logged_while_it_is_written(
    job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, now = HeldWrite(monkeypatch), job().resume()
    for step in now.steps():
        now.run.checkpoint(every=3, keep="all", best=("loss", "min"))
        if step == 3:
            now.run.log({"loss": 0.5})
        if step == 5:
            held.release.release(9)
            now.run._saver.collect(waits=True)
            best = read_best(tmp_path / "run")
            assert best is not None and (best.step, best.value) == (3, 0.5)
    assert held.begun == [3, 6], "the metric of step 3 caused no second write"


def _fails(*_: Any) -> None:
    raise RuntimeError("the writer broke")


def test_an_error_beside_the_training(
    job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is reported at the next boundary, once while it lasts; the training goes on, and a later checkpoint succeeds."""
    now, write_tensors = job().resume(), files._write_tensors
    for step in now.steps():
        if step == 4:
            now.run._saver.collect(waits=True)
            monkeypatch.setattr(files, "_write_tensors", _fails)
        before = now.state()
        now.run.checkpoint(every=2)
        assert all(torch.equal(a, b) for a, b in zip(before, now.state(), strict=True))
        if step in (4, 6):
            now.run._saver._writer._thread.join()  # type: ignore[union-attr]
        if step == 5:
            shown = capsys.readouterr().out
            assert "CHECKPOINT FAILED: the checkpoint" in shown and "the writer broke" in shown
            assert _steps(tmp_path) == [2]
        if step == 6:
            with pytest.raises(
                CheckpointError, match="step-00000006 can't be written: the writer broke; those before it"
            ):
                now.run.checkpoint()
            monkeypatch.setattr(files, "_write_tensors", write_tensors)
    now.run.close()
    assert "CHECKPOINT FAILED" not in capsys.readouterr().out
    assert _steps(tmp_path) == [2, 8]
    assert [event.step for event in _events(tmp_path, "checkpoint_failed")] == [4, 6]


def test_a_disk_that_is_full_for_a_moment(
    job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint that is due is reported and tried again; what the script requests raises."""
    now, room = job().resume(), shutil.disk_usage(tmp_path)
    for step in now.steps():
        if step == 3:
            monkeypatch.setattr(shutil, "disk_usage", lambda _: room._replace(free=10))
        assert now.run.checkpoint(every=1, best=("loss", "min")) == (step not in (3, 4))
        if step == 3:
            now.run.log({"loss": 0.5})
        if step == 4:
            with pytest.raises(CheckpointError, match=r"no space left.*free some room there, or keep fewer"):
                now.run.checkpoint()
            monkeypatch.undo()
    now.run.close()
    assert capsys.readouterr().out.count("training goes on, and the next one is tried when it is due") == 1
    assert _steps(tmp_path) == [6, 7, 8]
    assert {event.step for event in _events(tmp_path, "checkpoint_failed")} == {3, 4}


def test_the_end_raises_what_was_not_saved(
    job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = job().resume()
    for step in now.steps():
        now.run.checkpoint(every=4)
        if step == 4:
            now.run._saver.collect(waits=True)
            monkeypatch.setattr(files, "_write_tensors", _fails)
    with pytest.raises(CheckpointError, match="step-00000008 can't be written: the writer broke"):
        now.run.close()
    assert _steps(tmp_path) == [4]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]


def test_another_models_checkpoint_changes_nothing(job: Callable[..., Job], tmp_path: Path) -> None:
    """Part of it fits: torch copies that part before it refuses the rest."""
    now = job(nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))).resume()
    for _ in now.steps():
        pass
    now.run.close()
    other = job(nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 2), nn.Linear(2, 1)))
    before = other.state()
    with pytest.raises(CheckpointError, match="the checkpoint's model does not fit this script's"):
        other.resume()
    assert all(torch.equal(a, b) for a, b in zip(before, other.state(), strict=True))
    assert other.loader.loader.cursor().position == 0 and other.run._context.loop.steps_done == 0


def test_a_damaged_checkpoint_is_set_aside_and_the_run_goes_on(
    job: Callable[..., Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = job().resume()
    for step in now.steps():
        now.run.checkpoint(every=3)
        if step == 7:
            break
    now.run.close()
    assert _steps(tmp_path) == [3, 6, 7]
    victim = tmp_path / "run" / "checkpoints" / "step-00000007" / "skeleton.pt"
    victim.write_bytes(victim.read_bytes()[:-7])
    (victim.parent.with_name(".step-00000009.partial")).mkdir()
    again = job().resume()
    assert "DAMAGED CHECKPOINT: step-00000007" in (shown := capsys.readouterr().out)
    assert "the newest complete one, step-00000006" in shown and "resuming at step 6" in shown
    assert list(again.steps()) == [7, 8]
    again.run.close()
    assert _steps(tmp_path) == [3, 6, 8]
    names = sorted(path.name for path in victim.parents[1].iterdir())
    assert names[-2:] == ["step-00000007.damaged", "step-00000008"] and not any(name[0] == "." for name in names)


def test_a_file_with_the_name_of_a_checkpoint_is_passed_over(
    job: Callable[..., Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = job().resume()
    for _ in now.steps():
        now.run.checkpoint()
        break
    now.run.close()
    (tmp_path / "run" / "checkpoints" / "step-5").write_text("notes")
    again = job().resume()
    shown = capsys.readouterr().out
    assert "step-5 is no folder; taking the newest complete one, step-00000001" in shown
    assert "resuming at step 1" in shown
    again.run.close()
    kinds = [event.kind for event in read_events(tmp_path / "run")]
    assert "damaged_checkpoint" in kinds


def _kinds_of_tensors() -> dict[str, torch.Tensor]:
    parts = [torch.ones(2), torch.zeros(3)]
    return {
        "sparse": torch.eye(3).to_sparse(),
        "rows": torch.eye(3).to_sparse_csr(),
        "nested": torch.nested.nested_tensor(parts),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.quint8),
        "view": torch.arange(6.0)[1::2],
    }


@pytest.mark.filterwarnings("ignore")
def test_tensors_without_plain_memory_are_saved_too(tmp_path: Path) -> None:
    """torch.distributed.checkpoint refuses sparse and nested ones, and writes a quantized one that nothing reads."""
    saved = _kinds_of_tensors()
    files.write(tmp_path, 1, {"model": saved})
    found = files.read(tmp_path / "checkpoints" / "step-00000001")["model"]
    for name in ("sparse", "rows"):
        assert found[name].layout is saved[name].layout and torch.equal(found[name].to_dense(), saved[name].to_dense())
    assert [part.tolist() for part in found["nested"].unbind()] == [[1, 1], [0, 0, 0]]
    assert torch.equal(found["quantized"].int_repr(), saved["quantized"].int_repr())
    assert torch.equal(found["view"], saved["view"])


def test_a_tensor_without_values_is_refused_at_once(job: Callable[..., Job]) -> None:
    now = job().resume()
    for _ in now.steps():
        now.model.register_buffer("empty", torch.empty(3, device="meta"))
        with pytest.raises(CheckpointError, match=r"can't be saved.*model/empty is on the device meta"):
            now.run.checkpoint(every=1)
        del now.model.empty
        break


def test_a_fault_in_the_thread_is_raised_by_the_next_call(
    job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no full disk, which may pass: a run would train on to its end without a checkpoint."""
    now, write_tensors = job().resume(), files._write_tensors

    def faulty(*_: Any) -> None:
        monkeypatch.setattr(files, "_write_tensors", write_tensors)
        raise AttributeError("no such name")

    monkeypatch.setattr(files, "_write_tensors", faulty)
    for step in now.steps():
        if step == 4:
            with pytest.raises(CheckpointError, match="step 2 failed: AttributeError: no such name"):
                now.run.checkpoint(every=2)
        else:
            assert now.run.checkpoint(every=2) == (step % 2 == 0)
    now.run.close()
    assert capsys.readouterr().out.count("and the next one raises this error") == 1
    assert _steps(tmp_path) == [6, 8]


@pytest.mark.parametrize("value", [0.4, 0.6])
def test_a_disk_with_room_for_a_checkpoint_and_not_for_its_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """The old ones go, which makes room; one that can't be noted is complete nonetheless."""
    retention = Retention(tmp_path)
    retention.set_options(1, ("loss", "min"))
    write = retention_module.write_info
    is_full = True

    def written(folder: Path, info: Any) -> None:
        if is_full and len(list((tmp_path / "checkpoints").glob("step-*"))) > 2 - (value < 0.5):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(folder, info)

    for step, logged in ((1, 0.5), (2, 0.7), (3, value)):
        if step == 3:
            monkeypatch.setattr(retention_module, "write_info", written)
        files.write(tmp_path, step, _big(step))
        retention.log({"loss": logged}, step)
        retention.begin(step)
        retention.settle(step)
        retention.end(complete=True)
    assert not retention.take_trouble()
    best = read_best(tmp_path)
    assert best is not None and (best.step, best.value) == ((3, 0.4) if value < 0.5 else (1, 0.5))
    assert [info.step for info in list_checkpoints(tmp_path)] == ([3] if value < 0.5 else [1, 3])


def test_a_metric_that_can_not_be_noted_ends_no_run(
    job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    now = job().resume()
    monkeypatch.setattr(retention_module, "write_info", full)
    for step in now.steps():
        now.run.checkpoint(every=2, keep=1, best=("loss", "min"))
        if step % 2 == 0:
            now.run._saver.collect(waits=True)
            now.run.log({"loss": 1 / step})
    now.run.close()
    assert capsys.readouterr().out.count("is complete; noting its metric or removing old ones failed") == 1
    assert _steps(tmp_path) == [8] and not _events(tmp_path, "checkpoint_failed")


def _big(seed: int) -> dict[str, Any]:
    return {"model": {"weight": torch.randn(100_000, generator=torch.Generator().manual_seed(seed))}}


def test_a_full_disk(tmp_path: Path) -> None:
    """400 kB a checkpoint, and room for two: refused before it begins, or where the room goes meanwhile."""
    run = tmp_path / "disk" / "run"
    with small_disk(tmp_path / "disk", 1_000_000):
        files.open_folder(run)
        for step in (1, 2):
            files.check_room(run, 400_000)
            files.write(run, step, _big(step))
        with pytest.raises(
            CheckpointError, match=r"can't be written: .*no space left: it needs 0.4 MiB, and 0.2 MiB are free"
        ):
            files.check_room(run, 400_000)
        with pytest.raises(CheckpointError, match=r"step-00000003 can't be written: .*[Nn]o space left"):
            files.write(run, 3, _big(3))
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000001", "step-00000002"]
        found = files.read_newest(run)
        assert found is not None and torch.equal(found.state["model"]["weight"], _big(2)["model"]["weight"])


def test_a_limit_of_the_file_size(tmp_path: Path) -> None:
    """As of a quota: the write fails in the middle of a file."""
    files.write(tmp_path, 1, _big(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"step-00000002 can.t be written: .*File too large"):
            files.write(tmp_path, 2, _big(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_no_permission(job: Callable[..., Job], tmp_path: Path) -> None:
    now = job().resume()
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir()
    checkpoints.chmod(0o500)
    if is_root := os.geteuid() == 0:
        os.seteuid(65534)
    try:
        for _ in now.steps():
            with pytest.raises(CheckpointError, match=r"checkpoints can.t be written: .*[Pp]ermission"):
                now.run.checkpoint()
            assert not now.run.checkpoint(every=1)
            break
    finally:
        if is_root:
            os.seteuid(0)
        checkpoints.chmod(0o700)
    now.run.close()
    assert _steps(tmp_path) == [1]


def test_host_memory_is_used_again() -> None:
    buffers = HostBuffers()
    tensors = {
        "a": torch.randn(8, 3, 4, 4).to(memory_format=torch.channels_last),
        "b": torch.ones(2, 2).to_sparse(),
        "c": nn.Parameter(torch.randn(5)),
        "d": torch.ones(1).expand(6),
    }
    first = buffers.copy(tensors)
    addresses = {name: first[name].data_ptr() for name in "acd"}
    with torch.no_grad():
        tensors["c"].add_(1)
    assert not torch.equal(first["c"], tensors["c"])
    second = buffers.copy(tensors)
    assert {name: second[name].data_ptr() for name in "acd"} == addresses
    assert all(torch.equal(second[name].to_dense(), tensors[name].to_dense()) for name in tensors)
    assert buffers.copy({"c": torch.ones(3)})["c"].shape == (3,)


@pytest.mark.gpu
def test_a_gpu_copies_into_pinned_memory() -> None:
    tensors = {"a": torch.randn(1000, device="cuda")}
    buffers = HostBuffers()
    first = buffers.copy(tensors)["a"]
    assert first.is_pinned() and torch.equal(first, tensors["a"].cpu())
    tensors["a"].mul_(2)
    second = buffers.copy(tensors)["a"]
    assert second.data_ptr() == first.data_ptr() and torch.equal(second, tensors["a"].cpu())
