"""fp16's logic over float64 arithmetic, and bf16: what is skipped, and that all ranks stay one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evenload.testing import run_ranks
from tests.ranks.exact.measure import check, relative
from tests.ranks.exact.ranks import Setting, run_split, train_all
from tests.ranks.exact.reference import Reference
from tests.ranks.exact.tasks import TASKS


@pytest.mark.every_strategy
@pytest.mark.parametrize("name", ["Inf", "InfInOneOfTwo", "InfInDiscriminator", "Tokens"])
def test_fp16_scales_and_skips_as_one_process(name: str, strategy: str, tmp_path: Path) -> None:
    settings = [
        Setting((24, 6, 2), "auto", precision="fp16", strategy=strategy),
        Setting((31, 1, 0), 11, precision="fp16", strategy=strategy),
    ]
    ranks = run_split(train_all, 3, strategy, [(name, setting) for setting in settings], str(tmp_path))
    for index, setting in enumerate(settings):
        records = [results[index] for results in ranks]
        expected = Reference(TASKS[name](), records[0].num_micro, scaled=True).train()
        check(f"{name} {setting}", records, expected)
        assert records[0].scales == expected.scales
        skipped = [event["step"] for event in records[0].events if event.get("kind") == "skipped"]
        assert skipped == list(getattr(TASKS[name], "bad_steps", ()))
        assert expected.scales[-1] == 2.0 ** (16 - len(skipped))


def test_the_reference_would_differ_without_the_skip(tmp_path: Path) -> None:
    skipping = Reference(TASKS["Inf"](), 1, scaled=True).train()
    task = TASKS["Inf"]()
    task.bad_steps = ()  # type: ignore[attr-defined]
    assert relative(skipping.params, Reference(task, 1, scaled=True).train().params) > 1e-4


@pytest.mark.every_strategy
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_and_all_ranks_stay_equal(precision: str, strategy: str, tmp_path: Path) -> None:
    setting = Setting((24, 6, 2), 8, precision=precision, strategy=strategy)
    ranks = run_split(train_all, 3, strategy, [("NormedFloat32", setting)], str(tmp_path))
    records = [results[0] for results in ranks]
    expected = Reference(TASKS["NormedFloat32"](), records[0].num_micro).train()
    for record in records[1:]:
        assert torch.equal(record.params, records[0].params)
        assert torch.equal(record.buffers, records[0].buffers)
    assert records[0].params.dtype == torch.float32
    # Half precision is coarse; its first gradient is still the reference's to about its own rounding.
    assert 1e-7 < relative(records[0].grads[0], expected.grads[0]) < 5e-2
    assert expected.losses[-1] < expected.losses[0]
    assert records[0].losses[-1] < records[0].losses[0]


def test_a_model_in_bfloat16(strategy: str, tmp_path: Path) -> None:
    setting = Setting((24, 6, 2), 8, strategy=strategy)
    records = [results[0] for results in run_ranks(train_all, 3, [("NormedBfloat16", setting)], str(tmp_path))]
    expected = Reference(TASKS["NormedBfloat16"](), records[0].num_micro).train()
    assert records[0].params.dtype == torch.bfloat16
    assert all(torch.equal(record.params, records[0].params) for record in records)
    assert relative(records[0].grads[0].double(), expected.grads[0].double()) < 5e-2
