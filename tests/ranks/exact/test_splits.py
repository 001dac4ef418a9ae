"""Every task, on every split: the weights of one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.exact.measure import check
from tests.ranks.exact.ranks import Setting, run_split, train_all
from tests.ranks.exact.reference import Reference
from tests.ranks.exact.tasks import TASKS, Recorder

ALL = {  # balance, micro_batch, another split in each step -> K of full batches; None: it changes
    ((24, 6, 2), "auto", False): 1,
    ((24, 6, 2), 8, False): 3,
    ((31, 1, 0), "auto", False): 1,
    ((31, 1, 0), 11, False): 3,
    ("even", "auto", True): 1,
    ("even", 8, True): None,
}
SOME = {key: ALL[key] for key in (((24, 6, 2), 8, False), ((31, 1, 0), "auto", False), ("even", 8, True))}

ON_EVERY_SPLIT = ("Clipped", "Ragged", "Normed", "Tokens", "SilentRank", "Structured", "Gan", "Unused")
ON_SOME_SPLITS = (
    *(
        "Momentum",
        "ZeroFirst",
        "ChannelsLast",
        "NormedAtEval",
        "PenalisedNormed",
        "MeanTeacher",
        "SilentRankNormed",
        "DictMetrics",
    ),
    *(
        "TwoLosses",
        "GanKeepsGradients",
        "Critic",
        "FixMatch",
        "CycleGan",
        "Unfreezing",
        "Checkpointed",
        "CheckpointedReentrant",
    ),
    *("WrappedFirst", "WrappedAfter"),
)


@cache
def _expected(name: str, num_micro: tuple[int, ...]) -> Recorder:
    """Of one process, which is the same for all shares and strategies."""
    return Reference(TASKS[name](), list(num_micro)).train()


def compare(name: str, grid: dict[Any, int | None], strategy: str, folder: Path) -> None:
    settings = [Setting(balance, micro, changing, strategy=strategy) for balance, micro, changing in grid]
    ranks = run_split(train_all, 3, strategy, [(name, setting) for setting in settings], str(folder))
    for index, (setting, num_micro) in enumerate(zip(settings, grid.values(), strict=True)):
        records = [results[index] for results in ranks]
        assert num_micro is None or max(records[0].num_micro) == num_micro
        check(f"{name} {setting}", records, _expected(name, tuple(records[0].num_micro)))


@pytest.mark.every_strategy
@pytest.mark.parametrize("name", ON_EVERY_SPLIT)
def test_on_every_split(name: str, strategy: str, tmp_path: Path) -> None:
    compare(name, ALL if strategy == "ddp" else SOME, strategy, tmp_path)


@pytest.mark.every_strategy
@pytest.mark.parametrize("name", ON_SOME_SPLITS)
def test_on_some_splits(name: str, strategy: str, tmp_path: Path) -> None:
    """Each task meets the three splits: two of them under ddp, in turn, and the third under dp."""
    left_to_dp = list(SOME)[ON_SOME_SPLITS.index(name) % len(SOME)]
    compare(name, {key: SOME[key] for key in SOME if (key == left_to_dp) == (strategy == "dp")}, strategy, tmp_path)
