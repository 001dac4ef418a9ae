"""Cut models: the weights of the uncut one in one process, alone and on two ranks that cut at different layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import evenload
from evenload.testing import run_ranks
from evenload.training.parallel.model_split.transfers import ModelSplit, split_of
from tests.ranks.exact.measure import check, relative
from tests.ranks.exact.ranks import EpochOrder, Setting, read_events, train
from tests.ranks.exact.reference import Reference
from tests.ranks.exact.tasks import TASKS, Recorder

NAMES = ["Clipped", "Normed", "Tokens", "Unused", "Unfreezing", "Checkpointed", "Gan", "Ragged"]
LIMITS = (("1GiB", "1GiB"), ("1GiB", "2GiB"))
"""Of the two CPU places of rank 0, of those of rank 1: each fills them in proportion, so the cuts are different."""

Job = tuple[str, Setting]


def placed(model: nn.Module, rank: int) -> ModelSplit:
    found = split_of(evenload.place(model, [("cpu", limit) for limit in LIMITS[rank]]))
    assert found is not None
    return found


def train_cut(jobs: list[Job], folder: str) -> list[Recorder]:
    """Trains each task on these ranks, every model of it cut over two CPU places."""
    torch.set_num_threads(1)
    records = []
    for name, setting in jobs:
        kind = TASKS[name]

        class Cut(kind):  # type: ignore[misc, valid-type]
            def build(self) -> None:
                super().build()
                cuts = [placed(model, self.rank) for model in self.models]
                self.notes["layers"] = [[piece.num_layers for piece in cut.pieces] for cut in cuts]

        records.append(train(Cut(), setting, f"{folder}/{name}"))
    return records


def compare(jobs: list[Job], ranks: list[list[Recorder]]) -> None:
    for index, (name, setting) in enumerate(jobs):
        records = [results[index] for results in ranks]
        check(f"{name} cut {setting}", records, Reference(TASKS[name](), records[0].num_micro).train())
        assert all(all(layers) for layers in records[0].notes["layers"])


def test_alone(tmp_path: Path) -> None:
    jobs = [(name, Setting(micro_batch=11)) for name in NAMES[1:5]]
    compare(jobs, run_ranks(train_cut, 1, jobs, str(tmp_path)))


def test_two_ranks_with_other_cuts(tmp_path: Path) -> None:
    splits = [Setting((24, 8)), Setting((5, 27), 8)]
    jobs = [(name, splits[index % 2]) for index, name in enumerate(NAMES)]
    ranks = run_ranks(train_cut, 2, jobs, str(tmp_path))
    compare(jobs, ranks)
    layers = [[record.notes["layers"] for record in records] for records in ranks]
    assert sum(one != other for one, other in zip(*layers, strict=True)) > 4
    events = [event for event in ranks[0][0].events if event.get("kind") == "place"]
    assert len(events) == 1
    assert [piece["device"] for piece in events[0]["fields"]["pieces"]] == ["cpu", "cpu"]


def sit(folder: str, cut: bool, until: int) -> dict[str, Any]:
    """One session to a step, in the middle of an epoch."""
    torch.set_num_threads(1)
    run = evenload.init(project_dir=folder, seed=0, balance="even")
    task = TASKS["Normed"]()
    torch.manual_seed(task.seed)
    task.build()
    if cut:
        placed(task.models[0], run.rank)
    model, loader = run.prepare(
        task.models[0], DataLoader(task.dataset, batch_size=task.batch_size, sampler=EpochOrder(task))
    )
    task.place([model])
    task.make_optimizers()
    (optimizer,) = task.optimizers
    run.resume(model=model, optimizer=optimizer)
    for step in loader:
        step.backward(task.loss)
        optimizer.step()
        optimizer.zero_grad()
        if step.index + 1 == until:
            break
    else:
        for step in loader:
            step.backward(task.loss)
            optimizer.step()
            optimizer.zero_grad()
            if step.index + 1 == until:
                break
    run.checkpoint()
    result = {
        "params": nn.utils.parameters_to_vector(model.parameters()).detach(),
        "moments": torch.cat([state["exp_avg"].flatten() for state in optimizer.state_dict()["state"].values()]),
        "keys": list(model.state_dict()),
    }
    run.close()
    return result


def test_a_checkpoint_goes_from_one_device_to_a_cut_model_and_back(tmp_path: Path) -> None:
    (whole,) = run_ranks(sit, 1, str(tmp_path / "whole"), False, 5)
    folder = str(tmp_path / "parts")
    run_ranks(sit, 1, folder, False, 1)
    run_ranks(sit, 2, folder, True, 2)
    run_ranks(sit, 1, folder, True, 4)
    (last,) = run_ranks(sit, 1, folder, False, 5)
    assert last["keys"] == whole["keys"]
    for key in ("params", "moments"):
        assert relative(last[key], whole[key]) <= 1e-12, key
    steps = [event["step"] for event in read_events(folder) if event.get("kind") == "resumed"]
    assert steps == [1, 2, 4]
