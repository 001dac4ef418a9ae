"""torch.compile before and after `prepare`."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenload.testing import run_ranks
from tests.ranks.exact.measure import check
from tests.ranks.exact.ranks import Setting, train_all
from tests.ranks.exact.reference import Reference
from tests.ranks.exact.tasks import TASKS


def test_before_and_after_prepare(strategy: str, tmp_path: Path) -> None:
    names = ["Compiled", "CompiledFirst"]
    setting = Setting((29, 3), 11, strategy=strategy)
    ranks = run_ranks(train_all, 2, [(name, setting) for name in names], str(tmp_path), timeout_s=110)
    for index, name in enumerate(names):
        records = [results[index] for results in ranks]
        check(f"{name} {setting}", records, Reference(TASKS["Uncompiled"](), records[0].num_micro).train())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_inductor(strategy: str, tmp_path: Path) -> None:
    setting = Setting((24, 8), strategy=strategy)
    ranks = run_ranks(train_all, 2, [("CompiledInductor", setting)], str(tmp_path), timeout_s=280)
    records = [results[0] for results in ranks]
    check(f"CompiledInductor {setting}", records, Reference(TASKS["UncompiledShort"](), records[0].num_micro).train())
