"""Wrong uses of `run.resume` and `run.checkpoint`, and checkpoints that don't fit or are damaged."""

import re
import threading

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from evenload.errors import CheckpointError, ConfigError, DataError, EvenloadError, StepError
from tests.ranks.wrong_uses.jobs import Job, dataset, evenload_run, script, told_by_ranks


def _raises(kind, text):
    return pytest.raises(kind, match=re.escape(text))


def _saved(init, folder, *, stop_at=2, **job):
    """A finished session that left one checkpoint, in mid-epoch."""
    run = init(project_dir=folder)
    job = Job(run, **job)
    run.resume(model=job.model, optimizer=job.optimizer)
    for step in job.loader:
        job.step(step)
        if step.index + 1 == stop_at:
            run.checkpoint()
            break
    run.close()
    (checkpoint,) = (folder / "checkpoints").iterdir()
    return checkpoint


def test_checkpoint_without_resume(init):
    job = Job(init())
    for step in job.loader:
        job.step(step)
        with _raises(
            CheckpointError, "run.checkpoint doesn't know what to save: call run.resume(model=model, optimizer="
        ):
            job.run.checkpoint()
        break


def test_checkpoint_in_the_middle_of_a_step(init):
    job = Job(init())
    job.run.resume(model=job.model)
    for step in job.loader:
        step.backward(job.loss)
        with _raises(
            StepError,
            "run.checkpoint was called between step.backward and optimizer.step(), when the step is half done",
        ):
            job.run.checkpoint()
        job.update()
        assert job.run.checkpoint()
        break


@pytest.mark.parametrize("every", ["soon", "10 parsecs", "", "0s", "-1min", 0, -5, True, 1.5])
def test_an_unknown_interval(init, every):
    job = Job(init())
    job.run.resume(model=job.model)
    for step in job.loader:
        job.step(step)
        with _raises(
            ConfigError, f"run.checkpoint(every={every!r}): expected '10min', '90s', '2h', '500steps' or a number"
        ):
            job.run.checkpoint(every=every)
        break


def test_resume_before_prepare(init):
    with _raises(ConfigError, "run.resume was called before run.prepare(model, loader): prepare first"):
        init().resume(model=nn.Linear(4, 1))


def test_resume_twice(init):
    job = Job(init())
    job.run.resume(model=job.model)
    with _raises(CheckpointError, "run.resume was called twice; pass all state in one call"):
        job.run.resume(optimizer=job.optimizer)


def test_resume_in_the_loop(init):
    job = Job(init())
    for step in job.loader:
        job.step(step)
        with _raises(StepError, "run.resume was called after the loop began; call it once, before the loop"):
            job.run.resume(model=job.model)
        break


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"epoch": 3}, "epoch is 3, which has no state_dict and load_state_dict; give such objects to run.resume"),
        ({"evenload": nn.Linear(1, 1)}, "the name 'evenload' is reserved; give this state another name"),
        ({"values": nn.Linear(1, 1)}, "the name 'values' is reserved; give this state another name"),
    ],
)
def test_state_that_cannot_be_registered(init, state, told):
    job = Job(init())
    with _raises(CheckpointError, told):
        job.run.resume(**state)


def test_a_loader_prepared_after_resume(init):
    job = Job(init())
    job.run.resume(model=job.model)
    with _raises(ConfigError, "run.prepare received a loader after run.resume"):
        Job(job.run, model=job.bare)


class _Holder(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, state):
        self.value = state


@pytest.mark.parametrize("value", [threading.Lock(), lambda: 1, _Holder])
def test_state_that_cannot_be_saved(init, tmp_path, value):
    job = Job(init())
    job.run.resume(model=job.model, extra=_Holder(value))
    for step in job.loader:
        job.step(step)
        with _raises(CheckpointError, "holds values that can't be saved and loaded safely"):
            job.run.checkpoint()
        break
    assert not any((tmp_path / "run" / "checkpoints").iterdir()), "half a checkpoint is left"


def _cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _overwrite(path):
    path.write_bytes(b"\0" * path.stat().st_size)


def _empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [_cut_in_half, _overwrite, _empty, type(None)])
@pytest.mark.parametrize("part", ["skeleton.pt", "tensors/.metadata", "tensors/__0_0.distcp"])
def test_a_damaged_checkpoint(init, tmp_path, part, damage):
    checkpoint = _saved(init, tmp_path / "run")
    victim = checkpoint / part
    if damage is type(None):
        victim.unlink()
    else:
        damage(victim)
    job = Job(init())
    with pytest.raises(
        CheckpointError, match=f"{re.escape(str(checkpoint))} (is incomplete or damaged|is not a checkpoint)"
    ):
        job.run.resume(model=job.model, optimizer=job.optimizer)


def test_a_checkpoint_of_another_version(init, tmp_path):
    checkpoint = _saved(init, tmp_path / "run")
    torch.save({"schema": 99}, checkpoint / "skeleton.pt")
    job = Job(init())
    with _raises(CheckpointError, "has schema 99; this version reads 1"):
        job.run.resume(model=job.model, optimizer=job.optimizer)


def test_a_checkpoint_of_another_model(init, tmp_path):
    _saved(init, tmp_path / "run")
    job = Job(init(), model=nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1)))
    with _raises(CheckpointError, "start anew with --fresh (evenload run --fresh train.py)") as raised:
        job.run.resume(model=job.model, optimizer=job.optimizer)
    first, *others = str(raised.value).splitlines()
    assert "Error(s) in loading state_dict" in first and any("Missing key(s)" in line for line in others)


def test_a_checkpoint_with_other_shapes(init, tmp_path):
    _saved(init, tmp_path / "run")
    job = Job(init(), model=nn.Linear(4, 2))
    with pytest.raises(CheckpointError, match=r"the checkpoint's model does not fit[^$]*size mismatch for weight"):
        job.run.resume(model=job.model, optimizer=job.optimizer)


def test_a_checkpoint_of_another_optimizer(init, tmp_path):
    _saved(init, tmp_path / "run")
    job = Job(init())
    optimizer = torch.optim.SGD([job.model.weight], lr=0.1)
    with pytest.raises(CheckpointError, match=r"the checkpoint's optimizer does not fit .*loaded state dict contains"):
        job.run.resume(model=job.model, optimizer=optimizer)


def test_a_checkpoint_of_another_class_of_optimizer(init, tmp_path):
    _saved(init, tmp_path / "run")
    job = Job(init())
    before = job.bare.weight.detach().clone()
    optimizer = torch.optim.AdamW(job.model.parameters(), lr=0.1)
    with _raises(
        CheckpointError, "optimizer is of class SGD, this script's of AdamW, which can't use its state: keep SGD"
    ):
        job.run.resume(model=job.model, optimizer=optimizer)
    assert torch.equal(job.bare.weight, before), "half of the checkpoint was loaded"


def test_a_checkpoint_with_other_names(init, tmp_path):
    _saved(init, tmp_path / "run")
    job = Job(init())
    with _raises(
        CheckpointError,
        "the checkpoint holds evenload, model, optimizer; this script registers evenload, model, scheduler: scheduler can't "
        "be restored. optimizer would be lost. Give run.resume the same names, or start anew with --fresh",
    ):
        job.run.resume(model=job.model, scheduler=StepLR(job.optimizer, 1))


def test_a_checkpoint_of_another_number_of_loaders(init, tmp_path):
    _saved(init, tmp_path / "run")
    job = Job(init())
    Job(job.run, model=job.bare)
    with _raises(CheckpointError, "the checkpoint holds 1 prepared loaders, but this script prepared 2"):
        job.run.resume(model=job.model, optimizer=job.optimizer)


@pytest.mark.parametrize(
    ("init_with", "job_with", "told"),
    [
        ({"seed": 3}, {"shuffle": True}, "whose order was drawn with seed 0, now the seed is 3"),
        ({}, {"batch_size": 12}, "is at sample 32 of its epoch, where no step of this loader begins"),
        ({}, {"data": dataset(80)}, "is in the middle of an epoch of 64 samples, now the epoch has 80"),
    ],
)
def test_a_checkpoint_in_the_middle_of_another_epoch(init, tmp_path, init_with, job_with, told):
    _saved(init, tmp_path / "run")
    job = Job(init(**init_with), **job_with)
    with pytest.raises(EvenloadError, match=told) as caught:
        job.run.resume(model=job.model, optimizer=job.optimizer)
        job.train()
    assert isinstance(caught.value, DataError) and "start anew with --fresh" in str(caught.value)


def _damaged_for_two(run):
    job = Job(run)
    run.resume(model=job.model, optimizer=job.optimizer)


def test_a_damaged_checkpoint_is_told_by_every_rank(init, tmp_path):
    checkpoint = _saved(init, tmp_path / "run")
    _overwrite(checkpoint / "skeleton.pt")
    assert all("is incomplete or damaged" in line for line in told_by_ranks(_damaged_for_two, tmp_path))


def _unwritable(run):
    job = Job(run)
    run.resume(model=job.model)
    for step in job.loader:
        job.step(step)
        run.checkpoint()


def test_a_checkpoint_that_cannot_be_written_ends_all_ranks(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    first, second = told_by_ranks(_unwritable, tmp_path)
    assert first.startswith("UnwritableError: the checkpoint") and "can't be written" in first
    assert second == "CheckpointError: rank 0 failed to write the checkpoint"


def test_a_scheduler_that_resume_was_not_given_is_a_loud_line(tmp_path):
    text = script(
        prepared="""
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            run.resume(model=model, optimizer=optimizer)
        """
    )
    ended = evenload_run(tmp_path, text, "-d", "cpu")
    assert ended.code == 0
    told = (
        "NOT IN CHECKPOINTS: StepLR exists but was not passed to run.resume; after a resume it would start from scratch"
    )
    assert ended.stdout.count(told) == 1
