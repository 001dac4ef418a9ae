"""A strategy that lies outside of Evenload (gather_strategy.py) passes the suite: the engine knows `Strategy` alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from evenload.errors import ConfigError
from evenload.testing import run_ranks
from tests.ranks.exact import gather_strategy, test_splits
from tests.ranks.exact.measure import check
from tests.ranks.exact.ranks import Setting
from tests.ranks.exact.reference import Reference
from tests.ranks.exact.tasks import TASKS, Recorder
from tests.ranks.exact.test_methods import METHODS, train_methods

pytestmark = pytest.mark.slow

SPLITS = (((24, 6, 2), 8, False), ((31, 1, 0), "auto", False), ("even", 8, True))
SCALED = ("Inf", "InfInOneOfTwo", "InfInDiscriminator")
REPEATED = ("OutOfMemory", "OutOfMemoryTokens")
NAMES = tuple(dict.fromkeys((*test_splits.ON_EVERY_SPLIT, *test_splits.ON_SOME_SPLITS, *METHODS[::3])))


def jobs_of(names: Sequence[str]) -> list[tuple[str, Setting]]:
    """Each task on one of the splits, in turn."""
    jobs = [(name, _setting(*SPLITS[index % 3])) for index, name in enumerate(names)]
    jobs += [(name, _setting((24, 6, 2), 11, precision="fp16")) for name in SCALED]
    return jobs + [(name, _setting((24, 6, 2), "auto")) for name in REPEATED]


def _setting(balance: Any, micro_batch: Any, changing: bool = False, precision: str = "no") -> Setting:
    return Setting(balance, micro_batch, changing, precision, gather_strategy.NAME, options={"timeout_s": 20.0})


def train_gathered(jobs: list[tuple[str, Setting]], folder: str) -> list[Recorder | str]:
    gather_strategy.register()
    return train_methods(jobs, folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[Setting, Sequence[Recorder | str]]]]:
    jobs = jobs_of(NAMES)
    ranks = run_ranks(train_gathered, 3, jobs, str(tmp_path_factory.mktemp("gathered")), timeout_s=100.0)
    found: dict[str, list[tuple[Setting, Sequence[Recorder | str]]]] = {}
    for (name, setting), *results in zip(jobs, *ranks, strict=True):
        found.setdefault(name, []).append((setting, results))
    return found


@cache
def expected_of(name: str, num_micro: tuple[int, ...], scaled: bool) -> Recorder:
    return Reference(TASKS[name](), list(num_micro), scaled=scaled).train()


@pytest.mark.parametrize("name", [*NAMES, *SCALED, *REPEATED])
def test_as_in_one_process(name: str, trained: Any) -> None:
    for setting, records in trained[name]:
        for record in records:
            assert not isinstance(record, str), record
        expected = expected_of(name, tuple(records[0].num_micro), setting.precision == "fp16")
        check(f"{name} gather {setting}", records, expected)
        assert records[0].scales == expected.scales or setting.precision == "no"
        assert any(records[0].redone) == (name in REPEATED)


def test_a_name_is_taken_once() -> None:
    opener: Callable[..., Any] = gather_strategy.GatherStrategy
    from evenload.training.parallel.factory import register_strategy

    with pytest.raises(ConfigError, match="there is a strategy of this name already"):
        register_strategy("ddp", opener)
