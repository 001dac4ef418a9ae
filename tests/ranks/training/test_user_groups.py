"""`run.group` and `run.reduce`: subsets of ranks over real gloo processes, asked for alike or not, and always cleaned up."""

from __future__ import annotations

import re
import warnings
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import evenload
from evenload.errors import ConfigError, DesyncError, EvenloadError, StepError
from evenload.testing import run_ranks
from evenload.training import run as run_module
from tests.paths import ROOT

Pair = namedtuple("Pair", "loss count")


def _sum_in(group: Any, value: float) -> float | None:
    tensor = torch.tensor([value])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns a rank outside of the group
        work = dist.all_reduce(tensor, group=group, async_op=True)
    if work is None:
        return None
    work.wait()
    return float(tensor)


def _groups(folder: str) -> dict[str, Any]:
    run = evenload.init(project_dir=folder)
    ends, again, node, cpu = run.group([2, 0]), run.group((0, 2)), run.group("node"), run.group("cpu")
    found = {
        "ends": _sum_in(ends, 10.0**run.rank),
        "same": again is ends,
        "node": _sum_in(node, 10.0**run.rank),
        "kinds": dist.get_process_group_ranks(node) == dist.get_process_group_ranks(cpu) == [0, 1, 2],
        "reduced": run.reduce({"rank": run.rank, "mean": [float(run.rank)]}, op="max", group=ends),
        "mean": run.reduce(float(run.rank), "mean", group=ends),
    }
    try:
        # Member 2 gives another length: told by the ranks of the run, not by places in the group.
        run.reduce([1] * (2 if run.rank == 2 else 1), group=ends)
    except DesyncError as error:
        found["told"] = str(error)
    run.close()
    found["left"] = dist.is_initialized()
    try:
        run.group([0])
    except StepError as error:
        found["closed"] = str(error)
    return found


def test_subsets_of_ranks(tmp_path: Path) -> None:
    ranks = run_ranks(_groups, 3, str(tmp_path))
    assert [found["ends"] for found in ranks] == [101.0, None, 101.0]
    assert [found["node"] for found in ranks] == [111.0] * 3
    assert all(found["same"] and found["kinds"] and not found["left"] for found in ranks)
    assert [found["reduced"]["rank"] for found in ranks] == [2, 1, 2]
    assert [found["mean"] for found in ranks] == [1.0, 1.0, 1.0]
    assert "rank 0 and rank 2 differ in keys" in ranks[0]["told"] and "told" not in ranks[1]
    assert all("calls run.group after run.close()" in found["closed"] for found in ranks)


def _disagree(folder: str, asked: list[Any]) -> str:
    run = evenload.init(project_dir=folder)
    try:
        run.group(asked[run.rank])
    except EvenloadError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        run.close()
    return ""


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (
            [[0, 1], [1]],
            ["DesyncError: run.group received different requests: rank 0: [0, 1]; rank 1: [1]. Call"] * 2,
        ),
        (
            [[0], "node"],
            ["DesyncError: run.group received different requests: rank 0: [0]; rank 1: 'node'. Call"] * 2,
        ),
        (
            [[0, 1], [0, 2]],
            [
                "DesyncError: run.group received different requests: rank 0: [0, 1]; rank 1: an invalid",
                "there is no rank 2",
            ],
        ),
        (["cuda", "cuda"], ["ConfigError: run.group(ranks='cuda'): no rank computes there; all are on cpu"] * 2),
    ],
)
def test_ranks_that_ask_for_different_groups_are_told_who_asks_for_what(
    tmp_path: Path, asked: list[Any], told: list[str]
) -> None:
    for got, expected in zip(run_ranks(_disagree, 2, str(tmp_path), asked, timeout_s=30), told, strict=True):
        assert expected in got


@pytest.fixture
def run(tmp_path: Path) -> Any:
    yield evenload.init(project_dir=tmp_path)
    if run_module._open is not None:
        run_module._open.close()


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([], "expected a list of different ranks from 0 to 0"),
        ([1], "there is no rank 1"),
        ([-1], "there is no rank -1"),
        ([0, 0], "a rank is named twice"),
        ([True], "expected a list of different ranks"),
        ([0.0], "expected a list of different ranks"),
        (0, "expected a list of different ranks"),
        (None, "or one of 'node', 'cuda', 'cpu'"),
        ("gpus", "or one of 'node', 'cuda', 'cpu'"),
        (b"\0", "expected a list of different ranks"),
    ],
)
def test_what_names_no_ranks(run: Any, ranks: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        run.group(ranks)


def test_a_world_of_one_has_groups_too(run: Any) -> None:
    group = run.group([0])
    assert group is run.group("node") is run.group(range(1))
    assert _sum_in(group, 3.0) == 3.0
    assert run.reduce({"a": 2, "b": torch.ones(2)}, group=group)["a"] == 2
    run.close()
    assert not dist.is_initialized()


def test_a_group_of_the_users_outlives_the_run(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run = evenload.init(project_dir=tmp_path)
        assert _sum_in(run.group([0]), 2.0) == 2.0
        run.close()
        assert dist.is_initialized() and _sum_in(None, 1.0) == 1.0
    finally:
        dist.destroy_process_group()


def test_a_process_group_made_after_init_is_left_alone(run: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run.close()
    assert dist.is_initialized()
    dist.destroy_process_group()


@pytest.mark.parametrize("group", ["all", 7])
def test_reduce_over_what_is_no_group(run: Any, group: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected what run.group returned"):
        run.reduce(1, group=group)


def _nested(folder: str) -> Any:
    run = evenload.init(project_dir=folder)
    rank = run.rank
    given = {
        "pair": Pair(0.5 * rank, rank + 1),
        "list": [rank, (float(rank), {"deep": torch.tensor([rank, 2 * rank])})],
        "numpy": np.arange(3, dtype=np.float32)[::-1] * rank,
        "int64": np.int64(2**53 + rank),
        "flag": rank == 1,
        "mixed": 1 if rank == 0 else 0.5,
        "bits": torch.tensor([rank == 1, False]),
        "half": torch.full((2,), 1.5, dtype=torch.bfloat16),
        7: rank,
        "7": -rank,
    }
    results = {op: run.reduce(given, op) for op in ("sum", "mean", "min", "max")}
    run.close()
    return results


def test_nested_values_come_back_as_they_are(tmp_path: Path) -> None:
    first, second = run_ranks(_nested, 2, str(tmp_path))
    assert list(first["sum"]) == ["pair", "list", "numpy", "int64", "flag", "mixed", "bits", "half", 7, "7"]
    total = first["sum"]
    assert total["pair"] == Pair(0.5, 3) and type(total["pair"]).__name__ == "Pair"
    assert total["list"][0] == 1 and isinstance(total["list"][1], tuple)
    assert total["list"][1][1]["deep"].tolist() == [1, 2]
    assert total["numpy"].tolist() == [2.0, 1.0, 0.0] and total["numpy"].dtype == np.float32
    assert total["int64"] == 2**54 + 1 and isinstance(total["int64"], int)
    assert total["flag"] == 1 and total["mixed"] == 1.5
    assert total["bits"].tolist() == [True, False] and total["half"].tolist() == [3.0, 3.0]
    assert (total[7], total["7"]) == (1, -1)
    assert first["mean"]["pair"] == Pair(0.25, 1.5) and first["mean"]["list"][1][1]["deep"].tolist() == [0.5, 1.0]
    assert first["min"]["7"] == -1 and first["max"]["int64"] == 2**53 + 1
    assert str(first) == str(second)


@pytest.mark.parametrize(
    ("value", "op", "told"),
    [
        (1, "product", "expected one of sum, mean, min, max"),
        ("1", "sum", "run.reduce received a str"),
        ([1, None], "sum", "run.reduce received a NoneType"),
        ({1}, "sum", "run.reduce received a set"),
        (2**63, "sum", "more than 64 bits"),
        (torch.ones(1, dtype=torch.complex64), "max", "complex numbers, which have no order"),
        (torch.ones(2).to_sparse(), "sum", "a tensor of torch.sparse_coo"),
        (torch.ones(1).to(torch.float8_e4m3fn), "sum", "a tensor of torch.float8_e4m3fn"),
        (np.array(["a"]), "sum", "an array of <U1"),
    ],
)
def test_what_cannot_be_reduced(run: Any, value: Any, op: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        run.reduce(value, op)


def _page(folder: str, blocks: list[str]) -> dict[str, Any]:
    run = evenload.init(project_dir=folder)
    given = {"correct": run.rank, "total": 2, "loss_sum": 1.5, "seconds": run.rank / 4, "value": run.rank + 1}
    names = {**given, "counts": torch.ones(3), "loss_is_bad": run.rank == 1, "tensor": torch.ones(1)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns a rank outside of the group
        for block in blocks:
            exec(block, {"run": run, "torch": torch}, names)
    run.close()
    return {name: names[name] for name in ("accuracy", "stats", "worst", "leave", "tensor", "total")}


def test_the_page_on_groups_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "groups.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    ranks = run_ranks(_page, 3, str(tmp_path), blocks)
    for rank, found in enumerate(ranks):
        assert found["accuracy"] == 0.5 and found["worst"] == 0.5 and found["leave"] is True
        assert found["stats"]["loss"] == 4.5 and found["stats"]["per class"].tolist() == [3.0] * 3
        assert found["tensor"].item() == (1.0 if rank == 1 else 2.0)
        assert found["total"] == (2 if rank == 1 else 4)
