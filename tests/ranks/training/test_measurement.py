"""Alternating blocks in the middle of a script: training must not notice them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload import stored_names
from evenload.errors import RankFailedError
from evenload.records.measurement import blocks_from_rows
from evenload.records.reader import read_events, read_steps
from evenload.testing import run_ranks

OPTIONS = {"after_steps": 3, "num_rounds": 2, "block_s": 0.05, "arms": ["even", "evenload", "solo", "static:9,3"]}


def train(
    folder: str, resume: bool = True, num_workers: int = 0, every: int | None = None, weighted: bool = False
) -> dict[str, Any]:
    """Two epochs of 5 steps (the last one ragged); what is left of it, and what the body saw."""
    run = evenload.init(project_dir=folder, seed=0, balance=(8, 4) if _world() == 2 else "auto")
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(56, 6, generator=generator, dtype=torch.float64), torch.randint(0, 3, (56,), generator=generator)
    )
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    ).double()
    model, loader = run.prepare(model, DataLoader(data, batch_size=12, shuffle=True, num_workers=num_workers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, 10)
    if resume:
        run.resume(model=model, optimizer=optimizer, schedule=schedule)

    def loss_fn(batch: Any) -> Any:
        x, y = batch
        if not weighted:
            return F.cross_entropy(model(x), y)
        weights = 1.0 + 7 * (y == 0)
        losses = F.cross_entropy(model(x), y, reduction="none")
        # As if the ranks met other data while they are alone: the next step's N is guessed from the last one's.
        units = weights.sum() * (1000 if step.arm == "solo" and run.rank else 1)
        return (losses * weights).sum() / weights.sum(), units

    seen: list[tuple[str, int]] = []
    losses = []
    for _ in range(loader.epoch, 2):
        for step in loader:
            loss = step.backward(loss_fn)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            run.log({"mine": loss})
            if every is not None:
                run.checkpoint(every=every)
            seen.append((step.arm, step.index))
            if not step.arm:
                losses.append(float(loss))
    weights = torch.cat([value.flatten().double() for value in model.state_dict().values()])
    result = {"seen": seen, "losses": losses, "weights": weights.tolist(), "lr": schedule.get_last_lr()[0]}
    result["random"] = torch.rand(1).item()
    run.close()
    return result


def _world() -> int:
    from evenload.training.launch.environment import detect

    return detect().world_size


@pytest.mark.parametrize("weighted", [False, True])
def test_training_is_the_same_to_the_last_bit(tmp_path: Path, weighted: bool) -> None:
    options = {**OPTIONS, "arms": ["even", "evenload", "static:9,3", "solo"], "num_rounds": 1 if weighted else 2}
    plain = run_ranks(train, 2, str(tmp_path / "plain"), True, 0, None, weighted)
    measured = run_ranks(train, 2, str(tmp_path / "measured"), True, 0, None, weighted, mode="measure", options=options)
    for without, with_measurement in zip(plain, measured, strict=True):
        for key in ("losses", "weights", "lr", "random"):
            assert without[key] == with_measurement[key], key
    training = [index for arm, index in measured[0]["seen"] if not arm]
    assert training == list(range(10))
    assert measured[0]["weights"] == measured[1]["weights"]


def test_the_blocks_are_as_planned(tmp_path: Path) -> None:
    ranks = run_ranks(train, 2, str(tmp_path), mode="measure", options=OPTIONS)
    arms = [arm for arm, _ in ranks[0]["seen"]]
    assert arms[:3] == ["", "", ""]
    order = [arm for arm, before in zip(arms[1:], arms, strict=False) if arm != before]
    assert order == ["even", "evenload", "solo", "static:9,3", "solo", "evenload", "even", ""]  # static twice in a row
    (event,) = [event for event in read_events(tmp_path) if event.kind == stored_names.MEASUREMENT]
    blocks = blocks_from_rows(event.fields["blocks"])
    assert [block.arm for block in blocks] == [*OPTIONS["arms"], *OPTIONS["arms"][::-1]]  # type: ignore[misc]
    shares = {block.arm: block.shares for block in blocks}
    assert shares == {"even": (6, 6), "evenload": (8, 4), "static:9,3": (9, 3), "solo": ()}
    assert all(len(block.num_samples) == (2 if block.arm == "solo" else 1) for block in blocks)
    assert all(time_s > 0 for block in blocks for time_s in block.seconds)
    (speeds,) = [event for event in read_events(tmp_path) if event.kind == "solo_speeds"]
    assert len(speeds.fields["speeds_per_s"]) == 2


def test_records_carry_the_arm_and_metrics_stay_out_of_measurements(tmp_path: Path) -> None:
    run_ranks(train, 2, str(tmp_path), mode="measure", options=OPTIONS)
    steps = read_steps(tmp_path)
    training = [step for step in steps if not step.arm]
    assert [step.step for step in training] == list(range(10))
    assert all("mine" in step.metrics for step in training)
    measured = [step for step in steps if step.arm]
    assert {step.arm for step in measured} == set(OPTIONS["arms"])  # type: ignore[call-overload]
    assert not any("mine" in step.metrics for step in measured)
    assert all(len(step.ranks) == len(step.shares) for step in measured)


def test_no_checkpoint_is_written_in_a_window(tmp_path: Path) -> None:
    options = {**OPTIONS, "after_steps": 4}
    plain = run_ranks(train, 2, str(tmp_path / "plain"), True, 0, 2)
    measured = run_ranks(train, 2, str(tmp_path / "measured"), True, 0, 2, mode="measure", options=options)
    assert plain[0]["weights"] == measured[0]["weights"]
    written = [
        [event.step for event in read_events(tmp_path / name) if event.kind == "checkpoint"]
        for name in ("plain", "measured")
    ]
    assert written[0] == written[1]


def test_loader_workers_and_one_rank(tmp_path: Path) -> None:
    plain = run_ranks(train, 1, str(tmp_path / "plain"), True, 1)
    options = {**OPTIONS, "arms": ["evenload", "solo"]}
    measured = run_ranks(train, 1, str(tmp_path / "measured"), True, 1, mode="measure", options=options)
    assert plain[0]["weights"] == measured[0]["weights"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arms": ["even", "fastest"]}, "unknown arm 'fastest'"),
        ({"arms": ["static:5,4,3"]}, "has 3 shares for 2 ranks"),
        ({"rounds": 3}, "unknown option rounds"),
        ({"num_rounds": 0}, "at least 1 step, at least 1 round"),
        ({"arms": ["even", "even"]}, "named twice"),
    ],
)
def test_wrong_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RankFailedError, match=message):
        run_ranks(train, 2, str(tmp_path), mode="measure", options={**OPTIONS, **options})


def test_a_script_whose_state_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"call run\.resume"):
        run_ranks(train, 2, str(tmp_path), False, mode="measure", options=OPTIONS)
