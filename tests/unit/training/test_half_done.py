"""When a step counts as done: its samples are used where its gradients were, by an optimizer or by hand."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.errors import StepError
from evenload.training import run as run_module
from evenload.training.checkpoint import files
from evenload.training.step.step import Step
from evenload.training.step.step_loader import StepLoader

NUM_STEPS = 6


class Job:
    """A tiny model on an ordered data set: step s takes samples 4s to 4s + 3; `seen` are those of all steps begun."""

    def __init__(self, folder: Path) -> None:
        self.run = evenload.init(project_dir=folder)
        data = TensorDataset(torch.arange(4.0 * NUM_STEPS).unsqueeze(1))
        self.model = nn.Linear(1, 1).double()
        self.loader: StepLoader
        self.model, self.loader = self.run.prepare(self.model, DataLoader(data, batch_size=4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-4)
        self.seen: list[int] = []
        self.run.resume(model=self.model, optimizer=self.optimizer)

    def backward(self, step: Step) -> None:
        def loss_fn(batch: list[torch.Tensor]) -> torch.Tensor:
            self.seen.append(int(batch[0][0]) // 4)
            return (self.model(batch[0].double()) - 1).square().mean()

        step.backward(loss_fn)

    def cursor(self) -> tuple[int, int]:
        """Samples used in this epoch, and steps done in all."""
        return self.loader.loader.cursor().position, self.run._context.loop.steps_done


@pytest.fixture
def job(tmp_path: Path) -> Callable[[], Job]:
    yield lambda: Job(tmp_path)
    if run_module._open is not None:
        run_module._open.close()


def test_samples_of_a_step_left_before_its_update_are_not_used(job: Callable[[], Job]) -> None:
    first = job()
    for step in first.loader:
        first.backward(step)
        if step.index == 2:
            break
        first.optimizer.step()
        first.optimizer.zero_grad()
    assert first.cursor() == (8, 2)
    assert first.run.checkpoint()
    first.run.close()
    second = job()
    assert second.cursor() == (8, 2)
    for step in second.loader:
        second.backward(step)
        second.optimizer.step()
        second.optimizer.zero_grad()
    # The watch for coupled losses calls loss_fn again with samples of a step.
    seen = [list(dict.fromkeys(job.seen)) for job in (first, second)]
    assert seen == [[0, 1, 2], [2, 3, 4, 5]], "step 2 was lost, or used twice"
    assert second.run._context.loop.steps_done == NUM_STEPS


def test_records_hold_committed_steps_only(job: Callable[[], Job], tmp_path: Path) -> None:
    first = job()
    for step in first.loader:
        first.backward(step)
        if step.index == 1:
            break
        first.optimizer.step()
        first.optimizer.zero_grad()
    first.run.close()
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert len([line for line in lines if '"loss"' in line]) == 1


@pytest.mark.parametrize("leave", ["break", "break after the update", "after the loop"])
def test_an_update_counts_wherever_it_stands(job: Callable[[], Job], leave: str) -> None:
    now = job()
    for step in now.loader:
        now.backward(step)
        if leave == "break after the update":
            now.optimizer.step()
        break
    assert now.cursor() == ((4, 1) if leave == "break after the update" else (0, 0))
    if leave == "after the loop":
        now.optimizer.step()
        assert now.cursor() == (4, 1)
        now.optimizer.zero_grad()
        now.optimizer.step()
        assert now.cursor() == (4, 1)


def test_an_exception_in_the_middle_of_a_step_does_not_use_its_samples(job: Callable[[], Job]) -> None:
    now = job()

    def train() -> None:
        for step in now.loader:
            now.backward(step)
            if step.index == 1:
                raise ValueError("in the user's frame")
            now.optimizer.step()
            now.optimizer.zero_grad()

    with pytest.raises(ValueError, match="in the user's frame"):
        train()
    assert now.cursor() == (4, 1)


def test_a_loop_that_an_exception_holds_beyond_its_run_ends_without_a_call_of_the_script(
    job: Callable[[], Job],
) -> None:
    """Python closes it when it collects the exception: in the middle of another run, or in a thread."""
    now = job()

    def train(step: Step) -> None:
        now.backward(step)
        raise ValueError("in the user's frame")

    with pytest.raises(ValueError, match="in the user's frame") as raised:
        [train(step) for step in now.loader]  # its frame keeps the loop
    now.run.close()
    seen, cursor = list(now.seen), now.cursor()
    del raised
    gc.collect()
    assert now.seen == seen and now.cursor() == cursor


def _in_place(job: Job) -> None:
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter -= 1e-4 * parameter.grad


def _through_data(job: Job) -> None:
    for parameter in job.model.parameters():
        parameter.data -= 1e-4 * parameter.grad.data
        parameter.grad = None


def _zeroed_in_place(job: Job) -> None:
    for parameter in job.model.parameters():
        parameter.data.add_(parameter.grad, alpha=-1e-4)
        parameter.grad.zero_()


@pytest.mark.parametrize("update", [_in_place, _through_data, _zeroed_in_place])
def test_an_update_by_hand_is_an_update(job: Callable[[], Job], tmp_path: Path, update: Callable[[Job], None]) -> None:
    now = job()
    for step in now.loader:
        now.backward(step)
        with pytest.raises(StepError, match="the step is half done"):
            now.run.checkpoint()
        update(now)
        assert now.run.checkpoint()
        now.model.zero_grad()
        if step.index == 1:
            break
    assert now.cursor() == (8, 2)
    newest = files.newest(tmp_path)
    assert newest is not None and files.step_of(newest) == 2


def test_what_cannot_be_seen_is_told(job: Callable[[], Job]) -> None:
    now = job()
    for step in now.loader:
        now.backward(step)
        for parameter in now.model.parameters():
            parameter.data -= 1e-4 * parameter.grad
        with pytest.raises(StepError, match=r"by hand through .data, call model.zero_grad\(\) first"):
            now.run.checkpoint()
        break


def test_a_step_that_is_given_up_counts(job: Callable[[], Job]) -> None:
    """`if loss > 10: optimizer.zero_grad(); continue`: its samples were looked at, and will not come again."""
    now = job()
    for step in now.loader:
        now.backward(step)
        now.optimizer.zero_grad()
        if step.index == 1:
            break
    assert now.cursor() == (8, 2)
