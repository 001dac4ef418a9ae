"""Each usual cause is found in a script that has exactly this fault; scripts without a fault pass."""

import json

import pytest
import torch

import evenload
from evenload.stored_names import VERIFY_JSON
from evenload.testing import run_ranks
from tests.ranks.verify import scripts


def _drive(name, folder, settings):
    """One rank: runs a script under mode verify; tells what is different afterwards."""
    run = evenload.init(project_dir=folder, **settings)
    default = torch.get_default_dtype()
    try:
        getattr(scripts, name)(run)
        ended = "by itself"
    except SystemExit as leave:
        ended = leave.code
    finally:
        run.close()
    return ended, torch.get_default_dtype() == default


def verify(tmp_path, name, num_ranks=2, **settings):
    path = tmp_path / "report.json"
    folder = tmp_path / "run"
    outcomes = run_ranks(_drive, num_ranks, name, str(folder), settings, mode="verify", options={"report": str(path)})
    assert outcomes == [(0, True)] * num_ranks
    assert not folder.exists(), "a verification writes nothing"
    return json.loads(path.read_text())


def kinds(report):
    return [cause["kind"] for call in report["calls"] for cause in call["causes"]]


@pytest.mark.parametrize(
    "name", ["plain", "batch_norm", "casts", "of_numbers", "token_weights", "gan", "leaves_by_break", "compiled"]
)
def test_a_correct_script_is_equal_in_float64(tmp_path, name):
    report = verify(tmp_path, name)
    assert report["equal"] and kinds(report) == []
    assert len(report["calls"]) == (2 if name == "gan" else 1)
    for call in report["calls"]:
        assert call["dtype"] == "float64" and call["shares"] == [12, 4] and call["num_micro"] == 1
        (comparison,) = call["comparisons"]
        assert comparison["difference"] < 1e-13 and comparison["norm"] > 1e-3
        assert comparison["loss_split"] == pytest.approx(comparison["loss_one_process"], rel=1e-13)


def test_what_a_setting_makes_inexact_stands_beside_the_comparison(tmp_path):
    report = verify(tmp_path, "plain", wire="int8")
    (call,) = report["calls"]
    (note,) = [note for note in call["notes"] if "wire=int8" in note]
    difference = float(note.split(" exact one by ")[1].split()[0])
    assert report["equal"] and 1e-3 < difference < 5e-2
    report = verify(tmp_path, "plain", strategy="local", islands="0/1")
    assert report["equal"] and any("compared as one island" in note for note in report["calls"][0]["notes"])


@pytest.mark.parametrize("name", ["batch_norm", "token_weights"])
def test_several_micro_batches_and_three_ranks(tmp_path, name):
    report = verify(tmp_path, name, num_ranks=3, micro_batch=3)
    (call,) = report["calls"]
    assert report["equal"] and call["num_micro"] == 3 and call["shares"] == [9, 5, 2]


def test_shares_that_the_user_gives_are_the_ones_verified(tmp_path):
    (call,) = verify(tmp_path, "plain", balance=(5, 11))["calls"]
    assert call["shares"] == [5, 11] and call["notes"] == []
    (call,) = verify(tmp_path, "forgotten_class_weights", balance="even")["calls"]
    assert call["shares"] == [8, 8] and "hides forgotten weights" in call["notes"][0]


def test_one_rank_alone_says_that_nothing_was_split(tmp_path):
    (call,) = verify(tmp_path, "batch_norm", num_ranks=1)["calls"]
    assert call["equal"] and "nothing was split" in call["notes"][0]


@pytest.mark.parametrize("name", ["dropout", "functional_dropout"])
def test_dropout_is_named_and_verified_without(tmp_path, name):
    report = verify(tmp_path, name)
    (call,) = report["calls"]
    assert report["equal"] and kinds(report) == ["randomness"]
    first, second = call["comparisons"]
    assert first["difference"] > 0.01 and second["difference"] < 1e-13 and second["what"] == "dropout off"


def test_noise_is_named_and_verified_with_each_samples_own(tmp_path):
    report = verify(tmp_path, "noise")
    assert report["equal"] and kinds(report) == ["randomness"] * 2
    for call in report["calls"]:
        assert len(call["comparisons"]) == 3 and call["comparisons"][-1]["difference"] < 1e-13


def test_what_float64_cant_do_is_verified_in_its_own_dtype(tmp_path):
    (call,) = verify(tmp_path, "float32_only")["calls"]
    assert call["equal"] and call["dtype"] == "float32" and "knows no float64" in call["why_not_float64"]
    assert 0 < call["comparisons"][0]["difference"] < 1e-5


def test_a_kernel_that_rounds_inside_is_verified_in_its_own_dtype(tmp_path):
    (call,) = verify(tmp_path, "rounds_inside")["calls"]
    assert call["equal"] and call["dtype"] == "float32" and "less than float64" in call["why_not_float64"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision(tmp_path, precision):
    report = verify(tmp_path, "batch_norm", precision=precision)
    assert report["equal"] and report["precision"] == precision and report["calls"][0]["dtype"] == "float64"
    (call,) = verify(tmp_path, "float32_only", precision=precision)["calls"]
    assert call["dtype"] == {"bf16": "bfloat16", "fp16": "float16"}[precision]


@pytest.mark.parametrize(
    ("name", "kind", "found", "fix"),
    [
        ("sum_loss", "sum", "add up to the loss of the whole", "reduction='mean'"),
        (
            "forgotten_weights",
            "weights",
            "the labels batch['labels'] hold -100",
            "evenload.count_tokens(batch['labels'])",
        ),
        ("forgotten_where_nothing_counts", "weights", "not finite", "evenload.count_tokens(batch['labels'])"),
        ("forgotten_class_weights", "weights", "units other than samples", "return (loss, units)"),
        ("contrastive", "coupled", "depends on other samples of the batch", "batch_loss=fn"),
        ("looks_at_padding", "coupled", "the parts are padded to other lengths", "pack or mask the padding"),
        ("own_batch_norm", "batch_norm", "1 BatchNorm modules", "_OwnBatchNorm"),
        ("forgotten_head", "unprepared", "Linear.weight", "run.prepare(model, head"),
        ("counts_calls", "nondeterminism", "differs from itself", "no counter"),
        ("random_collation", "data", "reading the same samples twice", "__getitem__"),
        ("numpy_noise", "randomness", "could not be made the same", "__getitem__"),
        ("weights_on_one_rank", "ranks", "rank 1 differed from those of rank 0", "before run.prepare"),
        ("knows_its_rank", "unknown", "none of the usual causes", "rank"),
        ("not_finite", "not_finite", "the loss is -inf", "log"),
        ("nothing_counts", "not_finite", "the loss is nan", "first batch"),
    ],
)
def test_the_fault_is_found(tmp_path, name, kind, found, fix):
    report = verify(tmp_path, name)
    assert not report["equal"] and kinds(report) == [kind]
    (cause,) = report["calls"][0]["causes"]
    assert found in cause["finding"] and fix in cause[VERIFY_JSON["fix"]]


def test_local_batch_norm_is_found(tmp_path):
    report = verify(tmp_path, "batch_norm", batch_norm="local")
    assert not report["equal"] and kinds(report) == ["batch_norm"]
    assert 'batch_norm="global"' in report["calls"][0]["causes"][0][VERIFY_JSON["fix"]]
    assert report["calls"][0]["comparisons"][1]["difference"] < 1e-13


def test_the_worst_parameters_come_first(tmp_path):
    (call,) = verify(tmp_path, "sum_loss")["calls"]
    worst = call["comparisons"][0]["worst"]
    assert {one["name"] for one in worst} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    parts = [one["part"] for one in worst]
    assert parts == sorted(parts, reverse=True) and call["comparisons"][0]["difference"] == pytest.approx(
        sum(part**2 for part in parts) ** 0.5
    )


@pytest.mark.parametrize("settings", [{}, {"micro_batch": 4}])
def test_a_loss_over_the_whole_batch_is_equal(tmp_path, settings):
    report = verify(tmp_path, "batch_loss", **settings)
    assert report["equal"] and set(kinds(report)) == {"randomness"}
    (call,) = report["calls"]
    assert call["num_micro"] == (3 if settings else 1) and call["comparisons"][-1]["difference"] < 1e-12


@pytest.mark.parametrize("name", ["noisy_contrastive", "shuffled_contrastive"])
def test_a_coupled_loss_is_found_behind_randomness(tmp_path, name):
    report = verify(tmp_path, name)
    assert not report["equal"] and kinds(report) == ["randomness", "coupled"]


def test_samples_that_are_mixed_are_no_coupled_loss(tmp_path):
    assert kinds(verify(tmp_path, "mixup")) == ["randomness"]
