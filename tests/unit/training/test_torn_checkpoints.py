"""Damaged checkpoints are never loaded: the newest complete one is, and the message names both."""

from __future__ import annotations

import os
import random
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import evenload
from evenload.cli.main import main
from evenload.errors import CheckpointError, DamagedError
from evenload.records import integrity
from evenload.records.checkpoints import list_checkpoints, read_best
from evenload.records.lines import header_line, step_line
from evenload.training.checkpoint import files
from evenload.training.checkpoint.retention import Retention
from tests.unit.records.make import make_step

NUM_POINTS = 150


def _state(step: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(step)
    weights = {"a": torch.randn(40, generator=generator), "b": torch.randn(3, 5, generator=generator)}
    return {"model": weights, "other": {"step": step, "text": "x" * 50}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with three checkpoints."""
    run = tmp_path_factory.mktemp("whole") / "run"
    for step in (1, 2, 3):
        files.write(run, step, _state(step), {"epoch": 0})
    return run


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def _damage(path: Path, content: bytes, choose: random.Random) -> str:
    """Tear or change a file at a random point, and return what was done."""
    point = choose.randrange(len(content))
    kind = choose.choice(["cut", "flip", "zeros", "longer"])
    if kind == "cut":
        path.write_bytes(content[:point])
    elif kind == "flip":
        path.write_bytes(content[:point] + bytes([content[point] ^ 1 << choose.randrange(8)]) + content[point + 1 :])
    elif kind == "zeros":  # pages that never reached the disk
        torn = content[:point] + bytes(len(content) - point)
        path.write_bytes(torn if torn != content else b"")
    else:
        path.write_bytes(content + b"\0")
    return f"{kind} of {path.name} at byte {point} of {len(content)}"


def test_torn_or_changed_at_any_byte(run: Path) -> None:
    newest = run / "checkpoints" / "step-00000003"
    contents = {path: path.read_bytes() for path in sorted(newest.rglob("*")) if path.is_file()}
    names, sizes = list(contents), [len(content) for content in contents.values()]
    choose = random.Random(0)
    for index in range(NUM_POINTS):
        # Each file in turn, and then the large ones more often.
        path = names[index % len(names)] if index < 100 else choose.choices(names, sizes)[0]
        done = _damage(path, contents[path], choose)
        found = files.read_newest(run)
        assert found is not None, done
        assert found.folder.name == "step-00000002" and [p for p, _ in found.damaged] == [newest], done
        assert found.report().startswith("DAMAGED CHECKPOINT: step-00000003") and path.name in found.report(), done
        assert torch.equal(found.state["model"]["a"], _state(2)["model"]["a"]), done  # type: ignore[index]
        path.write_bytes(contents[path])
    found = files.read_newest(run)
    assert found is not None and found.folder == newest and found.report() == ""


@pytest.mark.parametrize("name", ["skeleton.pt", "info.json", "tensors/.metadata", "tensors/__0_0.distcp", "tensors"])
def test_a_lost_file(run: Path, name: str) -> None:
    path = run / "checkpoints" / "step-00000003" / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    found = files.read_newest(run)
    assert found is not None and found.folder.name == "step-00000002" and len(found.damaged) == 1


def test_files_that_changed_places(run: Path) -> None:
    second, third = (run / "checkpoints" / f"step-0000000{step}" for step in (2, 3))
    for name in ("skeleton.pt", "info.json", "tensors/__0_0.distcp", ""):
        for path, other in (
            (second / name, run / "aside"),
            (third / name, second / name),
            (run / "aside", third / name),
        ):
            path.rename(other)
        found = files.read_newest(run)
        assert found is not None and found.folder.name == "step-00000001" and len(found.damaged) == 2, name
        for path, other in (
            (second / name, run / "aside"),
            (third / name, second / name),
            (run / "aside", third / name),
        ):
            path.rename(other)
    assert "it holds step 2" in found.report()


@pytest.mark.parametrize("name", ["info.json", "skeleton.pt"])
def test_a_folder_in_the_place_of_a_file(run: Path, name: str) -> None:
    newest = run / "checkpoints" / "step-00000003"
    (newest / name).unlink()
    (newest / name).mkdir()
    found = files.read_newest(run)
    assert found is not None and files.step_of(found.folder) == 2 and name in found.report()
    assert [bool(info.damage) for info in list_checkpoints(run)] == [False, False, True]


def test_none_is_complete(run: Path) -> None:
    for checkpoint in (run / "checkpoints").iterdir():
        (checkpoint / "skeleton.pt").write_bytes(b"")
    with pytest.raises(
        DamagedError, match=r"there is no complete checkpoint in .*, or start anew with --fresh"
    ) as raised:
        files.read_newest(run)
    assert all(f"step-0000000{step}" in str(raised.value) for step in (1, 2, 3))


def test_a_newer_version_wrote_it(run: Path) -> None:
    """An older one is not taken silently: the steps between would be lost."""
    newest = run / "checkpoints" / "step-00000003"
    integrity.write_info(newest, {**integrity.read_info(newest), "schema": 99})
    with pytest.raises(CheckpointError, match="has schema 99; this version reads 1 and 2: a newer Evenload wrote it"):
        files.read_newest(run)


def test_values_change_and_the_checkpoint_stays_valid_at_each_moment(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = run / "checkpoints" / "step-00000003"
    seen = []

    def spy(path: Path) -> None:
        if path == newest / integrity.INFO_FILE:
            seen.append(files.read(newest)["other"]["step"])
        before(path)

    before = integrity.sync
    monkeypatch.setattr(integrity, "sync", spy)
    for step in (30, 300):
        files.update_values(newest, {"other": {"step": step}})
        assert files.read(newest)["other"]["step"] == step
    assert seen == [3, 30], "the info is written first, and holds for the old file too"
    assert not list(newest.glob(".*"))


def test_what_a_killed_process_left(run: Path) -> None:
    checkpoints = run / "checkpoints"
    (checkpoints / "step-00000003").rename(checkpoints / ".step-00000003.before")
    (checkpoints / ".step-00000003.partial").mkdir()
    (checkpoints / ".step-00000001.removed").mkdir()
    (checkpoints / ".best.json.123.456").write_text("{")
    files.clean_up(run)
    assert sorted(path.name for path in checkpoints.iterdir()) == [f"step-0000000{step}" for step in (1, 2, 3)]
    files.clean_up(run / "nowhere")


@pytest.fixture
def damaged(run: Path) -> Iterator[Path]:
    victim = run / "checkpoints" / "step-00000003" / "tensors" / "__0_0.distcp"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    return run


def test_load_checkpoint_and_export(damaged: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="DAMAGED CHECKPOINT: step-00000003.*the newest complete one, step-00000002"):
        state = evenload.load_checkpoint(damaged)
    assert state["other"]["step"] == 2
    with pytest.raises(
        CheckpointError, match=r"step-00000003 is incomplete or damaged \(tensors/__0_0.distcp does not"
    ):
        evenload.load_checkpoint(damaged, 3)
    with pytest.raises(SystemExit) as ended, pytest.warns(UserWarning, match="DAMAGED CHECKPOINT: step-00000003"):
        main(["export", str(damaged), str(tmp_path / "model.pt")])
    assert ended.value.code in (0, None)
    assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=True)["a"], _state(2)["model"]["a"])  # type: ignore[index]


def test_the_list_names_it(damaged: Path) -> None:
    rows = [(info.step, info.is_last, info.damage) for info in list_checkpoints(damaged)]
    assert rows == [(1, False, ""), (2, True, ""), (3, False, "tensors/__0_0.distcp does not match its checksum")]


def test_one_that_must_not_be_read_ends_the_resume(run: Path) -> None:
    """What it holds may be whole: an older one would take its steps back."""
    path = run / "checkpoints" / "step-00000003"
    path.chmod(0)
    if is_root := os.geteuid() == 0:
        for parent in list(run.parents)[:4]:
            parent.chmod(parent.stat().st_mode | 0o055)
        os.seteuid(65534)
    try:
        with pytest.raises(CheckpointError, match=r"step-00000003 can't be read: .*Permission denied") as raised:
            files.read_newest(run)
        listed = list_checkpoints(run)
    finally:
        if is_root:
            os.seteuid(0)
        path.chmod(0o755)
    assert not isinstance(raised.value, DamagedError)
    assert [info.damage for info in listed] == ["", "", "it can't be read: Permission denied"]


@pytest.mark.parametrize(("kind", "why"), [("file", "is no folder"), ("link", "is a link to nothing")])
def test_what_is_no_checkpoint_is_passed_over(run: Path, kind: str, why: str) -> None:
    path = run / "checkpoints" / "step-00000007"
    if kind == "link":
        path.symlink_to("nowhere")
    else:
        path.write_text("notes")
    found = files.read_newest(run)
    listed = list_checkpoints(run)
    assert found is not None and found.folder.name == "step-00000003"
    assert why in found.report() and "step-00000007" in found.report()
    assert [info.step for info in listed if info.is_last] == [3]
    assert all(info.damage for info in listed if info.step == 7)
    files.set_aside(found.damaged)
    retention = Retention(run)
    retention.set_options(2, None)
    retention.settle(3)
    assert {path.name for path in (run / "checkpoints").iterdir()} == {
        *("step-00000002", "step-00000003", "step-00000007.damaged"),
    }


@pytest.mark.parametrize(("mode", "best"), [("min", 1), ("max", 2)])
def test_where_the_best_is_damaged_the_best_of_those_left_counts(run: Path, mode: str, best: int) -> None:
    values = {1: 0.2, 2: 0.3, 3: 0.1 if mode == "min" else 0.9}
    retention = Retention(run)
    retention.set_options(3, ("val", mode))

    def log(step: int, value: float) -> bool:
        retention.log({"val": value}, step)
        return retention.needs_write(step)

    assert not any(log(step, value) for step, value in values.items()), "each is on the disk"
    chosen = read_best(run)
    assert chosen is not None and chosen.step == 3
    (run / "checkpoints" / "step-00000003" / "skeleton.pt").write_bytes(b"torn")
    found = files.read_newest(run)
    assert found is not None and found.folder.name == "step-00000002"
    files.set_aside(found.damaged)
    chosen = read_best(run)
    assert chosen is not None and (chosen.step, chosen.value) == (best, values[best])
    assert not log(3, 0.25), "the step done again is no better than the one that is left"
    assert log(4, values[3])


@pytest.mark.parametrize(("logged", "best"), [(2, 2), (3, 3), (4, None)])
def test_who_takes_over_from_rank_0_notes_the_metric_of_weights_that_are_on_the_disk(
    run: Path, logged: int, best: int | None
) -> None:
    retention = Retention(run)  # of another rank, which logs as rank 0 does and looks once it is rank 0
    retention.set_options(3, ("val", "min"))
    retention.log({"val": 0.1}, logged)
    assert not retention.needs_write(5)
    found = read_best(run)
    assert (found and found.step) == best


def test_what_loss_fn_returns_is_no_metric_of_a_checkpoint(run: Path) -> None:
    records = [step_line(make_step(step), {"val": 0.01 * step}) for step in range(3)]
    (run / "steps.jsonl").write_bytes(b"".join([header_line(0.0), *records]))
    retention = Retention(run)
    retention.set_options(3, ("val", "min"))
    assert not retention.needs_write(3)
    assert read_best(run) is None


def test_a_metric_that_is_logged_keeps_no_graph(tmp_path: Path) -> None:
    retention = Retention(tmp_path)
    retention.set_options(3, ("val", "min"))
    held = _Held()
    noted, total = weakref.ref(held), _Holds.apply(torch.ones(8, requires_grad=True), held)
    retention.log({"val": total}, 1)
    with torch.no_grad():
        total -= 10.0
    retention.log({"val": 20.0}, 2)
    del held, total
    assert noted() is None
    assert "of step 1 (val 8)" in retention.lost_best(3)


class _Held:
    """In place of what a forward keeps for its backward."""


class _Holds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, held: _Held) -> torch.Tensor:
        ctx.held = held
        return values.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError
