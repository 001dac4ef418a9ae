"""Checkpoints on other islands, the weights that are shown between synchronisations, and what is refused."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import evenload
from evenload.errors import ConfigError, DataError, EvenloadError, StepError
from evenload.training.comm.control import Operation
from tests.ranks.islands.simulation import BATCH, Case, Points, build, loss_of, simulate
from tests.ranks.islands.test_references import difference

SETTINGS: dict[str, Any] = {"strategy": "local", "sync_every": 4, "outer_lr": 0.7, "outer_momentum": 0.9}


def start(folder: str, model: nn.Module, settings: dict[str, Any]) -> tuple[Any, Any, Any]:
    run = evenload.init(project_dir=folder, seed=0, balance=(6, 3, 3), **settings)
    model, loader = run.prepare(model, DataLoader(Points(), batch_size=BATCH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.resume(model=model, optimizer=optimizer)
    return run, loader, optimizer


def steps(loader: Any, model: nn.Module, optimizer: Any, until: int) -> Any:
    """Yield each step after its update."""
    while loader.loader.cursor().global_step < until:
        for step in loader:
            step.backward(lambda batch: loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            yield step
            if step.index + 1 == until:
                break


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def moved(folder: str) -> dict[str, torch.Tensor]:
    """Train on two islands, then go on with others."""
    for islands, until in (("0,1/2", 8), ("0/1,2", 16)):
        model = build()
        run, loader, optimizer = start(folder, model, {**SETTINGS, "islands": islands})
        for _ in steps(loader, model, optimizer, until):
            pass
        run.close()
    return weights(model)


def moved_delay(folder: str) -> dict[str, torch.Tensor]:
    """The same while a sum is on its way at the end of the first run, and beside the checkpoint of the second."""
    for islands, until in (("0,1/2", 9), ("0/1,2", 16)):
        model = build()
        run, loader, optimizer = start(folder, model, {**SETTINGS, "islands": islands, "sync_delay": 2})
        for _ in steps(loader, model, optimizer, until):
            pass
        run.close()
    return weights(model)


def moved_errors(folder: str) -> dict[str, torch.Tensor]:
    """The same where the islands hold what their wire has lost."""
    for islands, until in (("0/1,2", 8), ("0,1/2", 16)):
        model = build(0, (32, 40))
        run, loader, optimizer = start(folder, model, {**SETTINGS, "islands": islands, "wire": "int8"})
        for step in steps(loader, model, optimizer, until):
            if step.index == 7:
                run.checkpoint()
        run.close()
    return weights(model)


def shown(folder: str) -> dict[str, Any]:
    model = build()
    run, loader, optimizer = start(folder, model, {**SETTINGS, "islands": "0,1/2"})
    seen: dict[str, Any] = {"written": []}
    for step in steps(loader, model, optimizer, 8):
        if step.index == 3:
            run.checkpoint()
            seen["synchronised"] = weights(model)
        if step.index == 5:
            seen["own"] = weights(model)
            seen["written"].append(run.checkpoint())
            for _ in run.batches(DataLoader(Points(), batch_size=8)):
                seen.setdefault("evaluated", weights(model))
            run.export(f"{folder}/model.pt")
            seen["after"] = weights(model)
        if step.index == 6:
            seen["written"].append(
                Path(folder, "checkpoints").is_dir() and len(list(Path(folder, "checkpoints").glob("step*")))
            )
    run.close()
    seen["exported"] = torch.load(f"{folder}/model.pt", weights_only=True)
    if not run.rank:
        rows = [json.loads(line) for line in Path(folder, "events.jsonl").read_text().splitlines()]
        seen["checkpoints"] = [row["step"] for row in rows if row.get("kind") == "checkpoint"]
    return seen


def every_step(folder: str) -> list[dict[str, torch.Tensor]]:
    """Islands that synchronise in each step, and ddp; without BatchNorm, whose statistics are an island's."""
    found = []
    for index, settings in enumerate(({"strategy": "local", "sync_every": 1, "islands": "0,1/2"}, {"strategy": "ddp"})):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        run, loader, optimizer = start(f"{folder}/{index}", model, settings)
        for _ in steps(loader, model, optimizer, 10):
            pass
        run.close()
        found.append(weights(model))
    return found


def plateau(folder: str) -> list[str]:
    """A scheduler that steps by the loss of an island, and by one value for all; the errors."""
    found = []
    for name, is_shared in (("own", False), ("shared", True)):
        model = build()
        run, loader, optimizer = start(f"{folder}/{name}", model, {**SETTINGS, "islands": "0,1/2"})
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
        try:
            for step in itertools.chain(loader, loader):
                loss = float(step.backward(lambda batch: loss_of(model, batch)))  # noqa: B023
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step(float(run.reduce(loss)) if is_shared else loss)
            found.append(f"{step.index + 1} steps")
        except StepError as error:
            found.append(str(error))
        finally:
            run.close()
    return found


def met_inside(folder: str) -> list[str]:
    """Calls of all ranks where islands are at different steps: what each body finds, and the script after the loop."""
    found = []
    model = build()
    run, loader, optimizer = start(folder, model, {**SETTINGS, "islands": "0,1/2", "local_steps": "auto"})
    for step in loader:
        step.backward(lambda batch: loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        try:
            run._context.control.check_open(Operation.ANY)  # run.any would wait for the others where it is no error
            found.append("no error")
        except StepError as error:
            found.append(str(error))
    found.append(str(run.any(False)))
    run.close()
    return found


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a scheduler that is not registered": (
        {"local_steps": "auto"},
        "StepLR is not registered, and would follow the steps",
    ),
    "two loaders": ({"local_steps": "auto"}, "divides the steps of one loader; this script prepared several"),
    "a stream": ({"local_steps": "auto"}, "local_steps='auto' with an iterable dataset"),
    "an island without samples": ({"balance": (6, 6, 0)}, "balance 6,6,0 leaves an island without samples"),
    "a frozen parameter that changes": ({}, "0.weight was frozen then, and was changed or unfrozen later"),
    "weights that are not finite": ({}, "the weights of an island were NaN or infinite at a synchronisation"),
}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Points())


def refused(folder: str) -> dict[str, str]:
    """The error of each case; all ranks raise it."""
    found = {}
    for number, (name, (settings, _)) in enumerate(REFUSED.items()):
        base = {"strategy": "local", "sync_every": 2, "islands": "0,1/2", "balance": (6, 3, 3)}
        run = evenload.init(project_dir=f"{folder}/{number}", **{**base, **settings})
        model = nn.Sequential(nn.Linear(5, 3)).double()
        model[0].weight.requires_grad_(name != "a frozen parameter that changes")
        points = DataLoader(Points(), batch_size=BATCH)
        if name == "a stream":
            points = DataLoader(Stream(), batch_size=BATCH)
        try:
            model, loader = run.prepare(model, points)
            if name == "two loaders":
                run.prepare(DataLoader(Points(), batch_size=BATCH))
            rate = 1e300 if name == "weights that are not finite" else 0.1
            optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=rate)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            run.resume(model=model, optimizer=optimizer)
            for step in loader:
                step.backward(lambda batch: loss_of(model, batch)[0] * rate)  # noqa: B023
                optimizer.step()
                optimizer.zero_grad()
                if name == "a frozen parameter that changes":
                    model[0].weight.data.mul_(2.0)
                    model[0].weight.requires_grad_()
            del scheduler
        except EvenloadError as error:
            found[name] = str(error)
        with contextlib.suppress(EvenloadError):
            run.close()
    return found


def short_last_batch(folder: str) -> str:
    run = evenload.init(project_dir=folder, strategy="local", islands="0/1/2")
    run.prepare(nn.Linear(5, 3).double(), DataLoader(Points(), batch_size=len(Points()) - 3))
    try:
        run.prepare(DataLoader(Points(), batch_size=len(Points()) - 2))
    except DataError as error:
        return str(error)
    finally:
        run.close()
    return ""


@pytest.fixture(scope="module")
def ranks(island_ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return island_ranks


def test_a_checkpoint_goes_on_with_other_islands(ranks: list[dict[str, Any]]) -> None:
    velocity: dict[str, torch.Tensor] = {}
    first = simulate(Case({}, (9, 3), num_steps=8, lr=0.7, momentum=0.9), velocity=velocity)[0].model
    second = simulate(Case({}, (6, 6), lr=0.7, momentum=0.9), first, 8, velocity)[0].model
    for seen in ranks:
        assert difference(seen["moved"], dict(second.state_dict())) < 1e-12


def test_a_checkpoint_holds_a_sum_that_was_on_its_way(ranks: list[dict[str, Any]]) -> None:
    """It synchronises everything first, so the velocity is that of two sums more."""
    velocity: dict[str, torch.Tensor] = {}
    delayed: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "delay": 2}
    first = simulate(Case({}, (9, 3), num_steps=9, **delayed), velocity=velocity)[0].model
    second = simulate(Case({}, (6, 6), **delayed), first, 9, velocity)[0].model
    for seen in ranks:
        assert difference(seen["moved_delay"], dict(second.state_dict())) < 1e-12


def test_a_checkpoint_holds_what_every_island_has_lost(ranks: list[dict[str, Any]]) -> None:
    wire: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "wire": "int8", "hidden": (32, 40)}
    velocity: dict[str, torch.Tensor] = {}
    first = simulate(Case({}, (6, 6), num_steps=8, **wire), velocity=velocity)
    second = simulate(Case({}, (9, 3), **wire), first[0].model, 8, velocity, first)[0].model
    for seen in ranks:
        assert difference(seen["moved_errors"], dict(second.state_dict())) < 1e-12


def test_weights_of_the_newest_synchronisation_are_shown(ranks: list[dict[str, Any]]) -> None:
    own = [seen["shown"]["own"] for seen in ranks]
    assert difference(own[0], own[2]) > 1e-6
    for seen in (rank["shown"] for rank in ranks):
        assert difference(seen["evaluated"], seen["synchronised"]) == 0
        assert difference(seen["exported"], seen["synchronised"]) == 0
        assert difference(seen["after"], seen["own"]) == 0
        assert difference(seen["synchronised"], ranks[0]["shown"]["synchronised"]) == 0


def test_a_checkpoint_waits_for_the_next_synchronisation(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["shown"]["written"][0] is False
    assert ranks[0]["shown"]["checkpoints"] == [4, 8]


def test_synchronising_in_each_step_is_ddp(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        islands, ddp = seen["every_step"]
        assert difference(islands, ddp) < 1e-12


def test_a_last_batch_shorter_than_the_islands_is_named_before_training(ranks: list[dict[str, Any]]) -> None:
    assert all("a step of 2 samples cannot be divided over 3 islands" in seen["short_last_batch"] for seen in ranks)


@pytest.mark.parametrize("name", REFUSED)
def test_what_islands_cannot_do_is_named(name: str, ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert REFUSED[name][1] in seen["refused"][name]


def test_islands_at_different_steps_do_not_meet(ranks: list[dict[str, Any]]) -> None:
    """Not even in the step that all begin together: a fast island has several batches of that index."""
    for seen, num_batches in zip(ranks, (6, 6, 2), strict=True):
        texts = ["error" if "calls run.any inside a loop" in text else text for text in seen["met_inside"]]
        assert texts == [*["error"] * num_batches, "False"]


def test_a_schedule_by_the_loss_of_an_island_is_named(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        own, shared = seen["plateau"]
        assert "the islands' schedules have parted (learning rates 0.1, 0.1)" in own  # before the rates differ
        assert shared == "8 steps"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sync_every": 5}, "no effect with strategy ddp"),
        ({"islands": "0"}, "no effect with strategy ddp"),
        ({"strategy": "local", "fragments": 3, "sync_every": 2}, "each fragment needs a step"),
        ({"strategy": "local", "sync_delay": 11, "fragments": 2}, "at most 10 steps after it was sent"),
        ({"strategy": "local", "sync_every": 1, "local_steps": "auto"}, "has no effect with sync_every=1"),
        ({"strategy": "local", "wire": "auto"}, "chooses by the noise of gradients"),
        ({"strategy": "async", "wire": "int8"}, "no effect with strategy='async'"),
        ({"strategy": "local", "batch_max": 64}, "batch_max with strategy='local'"),
        ({"strategy": "local", "islands": "0,1/1"}, "expected every rank in one island"),
        ({"strategy": "local", "islands": "0/1"}, "it names 2 ranks, but the job has 1"),
        ({"strategy": "local", "outer_momentum": 1.0}, "from 0, below 1"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        evenload.init(project_dir=tmp_path, **settings)
