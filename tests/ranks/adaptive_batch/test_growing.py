"""`batch_max` on two real ranks: the noise that is measured, the batch that follows, and what each training equals."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenload.testing import run_ranks
from evenload.training.comm.clock import SEGMENTS
from evenload.training.comm.control import CAPACITY
from evenload.training.step.report import RankReport, read_table
from evenload.training.step.stats import StepStats
from tests.ranks.adaptive_batch.jobs import BASE, NUM_SAMPLES, Cloud, chosen, plain, plain_steps, train, train_all

# The overhead stays far above what a sample costs on a loaded machine, so a larger batch always pays.
GROWS: dict[str, Any] = {"noise": 400.0, "settings": {"batch_max": 64}, "overhead_s": 0.02}
JOBS: dict[str, dict[str, Any]] = {
    "grown": GROWS | {"num_epochs": 4},
    "uneven": {
        "noise": 60.0,
        "settings": {"batch_max": 64, "balance": (13, 3), "batch_lr": "sqrt"},
        "kind": "adamw",
        "num_epochs": 3,
    },
    "first half": GROWS | {"num_epochs": 3, "until": 70, "name": "halves"},
    "second half": GROWS | {"num_epochs": 3, "name": "halves"},
    "first drawn": GROWS | {"num_epochs": 3, "until": 70, "sampled": True, "name": "drawn"},
    "second drawn": GROWS | {"num_epochs": 3, "sampled": True, "name": "drawn"},
    "on two ranks": GROWS | {"num_epochs": 3, "until": 70, "kind": "adamw", "name": "fewer"},
    "calm": {"noise": 2.0, "settings": {"batch_max": 64}, "num_epochs": 3},
    "off": {"noise": 400.0, "settings": {}, "num_epochs": 2},
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All trainings, one after the other on the same two ranks, as rank 0 saw them."""
    folder = tmp_path_factory.mktemp("batch")
    ranks = run_ranks(train_all, 2, list(JOBS.values()), str(folder), timeout_s=240)
    for ours, others in zip(*ranks, strict=True):
        assert torch.equal(ours["weights"], others["weights"]) and ours["sizes"] == others["sizes"]
    return dict(zip(JOBS, ranks[0], strict=True)) | {"folder": {"path": folder}}


def told(seen: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in seen["events"] if event.get("kind") == "batch"]


@pytest.mark.parametrize(("name", "noise"), [("uneven", 60.0), ("calm", 2.0)])
def test_the_noise_is_measured(seen, name, noise):
    assert seen[name]["noise"] == pytest.approx(noise, rel=0.25)


def test_the_batch_grows_by_at_most_two_and_is_told(seen):
    sizes = [size for _, size, _ in seen["grown"]["lengths"]]
    assert sizes[0] == BASE and max(sizes) > BASE, told(seen["grown"])
    assert all(BASE <= after <= 2 * before and after <= 64 for before, after in itertools.pairwise(sizes))
    first = next(event for event in told(seen["grown"]) if event["fields"]["batch_size"] > BASE)
    assert f"global batch {BASE} → {sizes[first['fields']['epoch']]} from epoch" in first["message"]
    assert "noise scale" in first["message"] and "for SGD" in first["message"]
    assert first["fields"]["expected_per_s"] > first["fields"]["before_per_s"]
    assert 1 < first["fields"]["rate_gains"]["SGD"] < first["fields"]["batch_size"] / BASE


def test_it_stays_where_gradients_are_calm(seen):
    assert [size for _, size, _ in seen["calm"]["lengths"]] == [BASE] * 3
    messages = [event["message"] for event in told(seen["calm"])]
    assert messages[0].startswith(f"the global batch stays {BASE}: noise scale 2 samples") and not any(messages[1:])


def test_each_epoch_is_cut_once_and_as_long_as_told(seen):
    for name in ("grown", "uneven", "calm", "off"):
        for epoch, size, length in seen[name]["lengths"]:
            cut = [samples for at, samples in seen[name]["sizes"] if at == epoch]
            assert len(cut) == length and sum(cut) == NUM_SAMPLES and set(cut[:-1]) == {size}, (name, epoch)


@pytest.mark.parametrize("name", ["grown", "uneven", "calm", "second half", "off"])
def test_the_weights_are_those_of_one_process_with_these_batches(seen, name):
    job = JOBS[name]
    batches = chosen(seen[name])
    kind = job.get("kind", "sgd")
    rule = {"sgd": "adascale", "adamw": "sqrt"}[kind]
    epochs = [batches.get(epoch, (BASE, 0.0)) for epoch in range(job["num_epochs"])]
    weights = plain(job["noise"], epochs, kind, rule)
    assert float((weights - seen[name]["weights"]).norm() / weights.norm()) <= 1e-12


@pytest.mark.parametrize("kind", ["half", "drawn"])
def test_a_resumed_run_goes_on_in_the_same_batch(seen, kind):
    first, second = seen[f"first {kind}"], seen[f"second {kind}"]
    assert not first["resumed"] and second["resumed"]
    (epoch, size) = first["sizes"][-1]
    assert epoch == 1 and size > BASE and second["lengths"][0][:2] == (epoch, size)
    together = [samples for at, samples in first["sizes"] + second["sizes"] if at == epoch]
    assert sum(together) == NUM_SAMPLES and set(together[:-1]) == {size}


def test_it_goes_on_in_the_same_batch_on_another_number_of_devices(seen):
    folder = str(seen["folder"]["path"] / "fewer")
    alone = train(folder, 400.0, 3, {"batch_max": 64}, "adamw")
    epoch, size, _ = alone["lengths"][0]
    assert alone["resumed"] and (epoch, size) == seen["on two ranks"]["sizes"][-1] and size > BASE
    weights = plain_steps(Cloud(400.0), seen["on two ranks"]["steps"] + alone["steps"], "adamw", "sqrt")
    assert float((weights - alone["weights"]).norm() / weights.norm()) <= 1e-12


def test_a_queue_hears_of_steps_of_the_users_batch(seen):
    assert seen["grown"]["progress"] == (4 * NUM_SAMPLES // BASE, BASE)
    assert seen["first half"]["progress"] == (sum(size for _, size in seen["first half"]["sizes"]) // BASE, BASE)


def test_schedulers_and_users_see_the_rate_that_was_set(seen):
    assert seen["grown"]["rates"][0] == 0.01
    steps = len(seen["grown"]["rates"])
    assert seen["grown"]["rates"][-1] == pytest.approx(0.01 * 0.1 ** (steps // 40))


def test_off_nothing_is_measured_and_the_exchange_carries_what_it_did(seen):
    assert not told(seen["off"]) and seen["off"]["noise"] is None and StepStats().norms is None
    plain_row, measured = report(None).row(), report(5.0).row()
    assert len(plain_row) == len(measured) == CAPACITY and plain_row[:-1] == measured[:-1] and plain_row[-1] == 0.0
    (back,), (bare,) = read_table(np.array([measured]), ["m"], measured=True), read_table(np.array([plain_row]), ["m"])
    assert back.squared_norm == 5.0 and bare.squared_norm is None and back.metrics == bare.metrics == {"m": 2.0}


def report(squared_norm: float | None) -> RankReport:
    return RankReport(
        status=0,
        weighted=False,
        units=1.0,
        loss_sum=1.0,
        touched_key=0.0,
        has_decision=False,
        elapsed_s=0.0,
        memory_bytes=0.0,
        state_key=0.0,
        reading=0.0,
        stop_requested=False,
        may_leave=False,
        has_zero=False,
        seconds=dict.fromkeys(SEGMENTS, 0.0),
        metrics={"m": 2.0},
        squared_norm=squared_norm,
    )


@pytest.mark.parametrize(("micro_batch", "measures"), [(4, True), ("auto", False)])
def test_one_rank_measures_by_its_first_micro_batch(tmp_path: Path, micro_batch: Any, measures: bool) -> None:
    settings = {"batch_max": 32, "micro_batch": micro_batch, "batch_lr": "none"}
    alone = train(str(tmp_path), 10.0, 3, settings)
    told_of = [event["message"] for event in told(alone)]
    if measures:
        assert alone["noise"] == pytest.approx(10.0, rel=0.25)
        epochs = [chosen(alone)[epoch] for epoch in range(3)]
        weights = plain(10.0, epochs, "sgd", "none")
        assert float((weights - alone["weights"]).norm() / weights.norm()) <= 1e-12
    else:
        assert alone["noise"] is None and {size for _, size, _ in alone["lengths"]} == {BASE}
        assert (
            told_of[0].startswith("batch_max has no effect so far: 0 of 60 steps measured the gradient noise")
            and not told_of[1]
        )
