"""Every task, on every split: the weights of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenload.testing import run_ranks
from tests.exact.measure import check
from tests.exact.ranks import Setting, train_all
from tests.exact.reference import Reference
from tests.exact.tasks import TASKS

FULL = {  # K of full batches, by setting
    ((24, 6, 2), "auto", False): 1,
    ((24, 6, 2), 8, False): 3,
    ((31, 1, 0), "auto", False): 1,
    ((31, 1, 0), 11, False): 3,
    ("even", "auto", True): 1,
}


def _settings(strategy: str) -> list[Setting]:
    settings = [Setting(balance, micro, changing, strategy=strategy) for balance, micro, changing in FULL]
    return [*settings, Setting("even", 8, True, strategy=strategy)]


@pytest.mark.parametrize(
    "name",
    [
        "Clipped",
        "Ragged",
        "Momentum",
        "ZeroFirst",
        "Normed",
        "ChannelsLast",
        "NormedAtEval",
        "Tokens",
        "SilentRank",
        "SilentRankNormed",
        "Structured",
        "DictMetrics",
        "TwoLosses",
        "Gan",
        "GanKeepsGradients",
        "Critic",
        "Unused",
        "Unfreezing",
        "Checkpointed",
        "CheckpointedReentrant",
    ],
)
def test_task(name: str, strategy: str, tmp_path: Path) -> None:
    settings = _settings(strategy)
    ranks = run_ranks(train_all, 3, [(name, setting) for setting in settings], str(tmp_path))
    for index, setting in enumerate(settings):
        records = [results[index] for results in ranks]
        expected_k = FULL.get((setting.balance, setting.micro_batch, setting.changing))
        assert expected_k is None or max(records[0].num_micro) == expected_k
        expected = Reference(TASKS[name](), records[0].num_micro).train()
        check(f"{name} {setting}", records, expected)
