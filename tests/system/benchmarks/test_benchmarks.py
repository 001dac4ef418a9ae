"""Each benchmark runs to its end and writes what it must; no figure is judged here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT
from tests.warm import run


def quick(folder: Path, name: str, *options: str) -> dict[str, Any]:
    (result,) = quick_ones(folder, name, options=options)
    return result


def quick_ones(folder: Path, *names: str, options: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    done = run(["-m", "benchmarks", *names, "--quick", "--results", str(folder), *options], ROOT, 110)
    assert done.returncode == 0, done.stdout + done.stderr
    return [read(folder, name) for name in names]


def read(folder: Path, name: str) -> dict[str, Any]:
    written = json.loads((folder / f"{name}.quick.json").read_text())
    assert written["benchmark"] == name and written["quick"] is True
    assert written["hardware"]["cores"] >= 1 and written["versions"]["torch"] and written["method"] and written["date"]
    result: dict[str, Any] = written["result"]
    return result


def test_solver(tmp_path: Path) -> None:
    assert quick(tmp_path, "solver")["median_s"] > 0


def test_checkpoints(tmp_path: Path) -> None:
    result = quick(tmp_path, "checkpoints")
    assert result["num_rounds"] == 4 and result["size_bytes"] > 0 and 0 < result["held_s"] <= result["write_s"]


def test_store(tmp_path: Path) -> None:
    result = quick(tmp_path, "store")
    assert result["clients"]["8"]["submits"] == 160 and result["clients"]["8"]["per_s"] > 0
    assert result["num_jobs"] == 2000 and result["list_s"]["all"] > 0 and result["audit"] == []


@pytest.mark.long
def test_exact(tmp_path: Path) -> None:
    result = quick(tmp_path, "exact")
    assert result["tests_passed"] and result["worst"] <= 1e-12 and result["cases"]


@pytest.mark.slow
def test_overhead(tmp_path: Path) -> None:
    case = quick(tmp_path, "overhead")["cases"]["gpt"]
    assert case["num_rounds"] >= 1 and case["own_cpu_s"] > 0 and sum(case["shares"]) == 12
    assert case["evenload_over_ddp"]["low"] <= case["evenload_over_ddp"]["high"]


@pytest.mark.slow
def test_small_steps(tmp_path: Path) -> None:
    # Two ranks are as in `overhead`, with other models.
    cases = quick(tmp_path, "small_steps", "--only", "one device")["cases"]
    assert list(cases) == ["one device"]
    assert all(
        case["num_rounds"] >= 1 and case["own_wall_s"]["low"] <= case["own_wall_s"]["high"] for case in cases.values()
    )


@pytest.mark.slow
def test_left_out(tmp_path: Path) -> None:
    (case,) = quick(tmp_path, "left_out")["cases"].values()
    assert {arm: len(seconds) for arm, seconds in case["seconds"].items()} == {"left out": 3, "alone": 3, "plain": 3}
    assert case["ratio"]["alone"]["low"] <= case["ratio"]["alone"]["value"] <= case["ratio"]["alone"]["high"]
    assert case["overall"].keys() == {"alone", "plain"} and 0 < case["num_with_rank_1"] < case["num_steps"] == 300


@pytest.mark.slow
def test_phantom(tmp_path: Path) -> None:
    result = quick(tmp_path, "phantom")
    assert [case["name"] for case in result["equal"]] == ["docs/start.md", "mlp", "gan"]
    assert all(case["num_steps"] >= 40 and case["gain"]["low"] <= case["gain"]["high"] for case in result["equal"])
    assert result["unequal"][0]["over_best_static"] > 0 and len(result["bars"]) == 3


@pytest.mark.slow
def test_adapt(tmp_path: Path) -> None:
    result = quick(tmp_path, "adapt")
    assert len(result["runs"]) == 1 and result["traces"]["count"] == result["spikes"]["count"] == 5


@pytest.mark.long  # its parts are those of `overhead` and `phantom`
def test_efficiency(tmp_path: Path) -> None:
    (case,) = quick(tmp_path, "efficiency")["cases"]
    assert case["ratio"] == 0.5 and len(case["arms"]["solo"]) == 2
    assert {"even", "evenload", "static:8,4"} == set(case["arms"]["speeds"])
    assert case["arms"]["efficiency"]["value"] > 0 and "ddp" in case["peers"]


@pytest.mark.long
def test_consistency_and_loading(tmp_path: Path) -> None:
    consistency, loading = quick_ones(tmp_path, "consistency", "loading")
    assert consistency["in_time"] == consistency["count"] == 5 and all(harm["named"] for harm in consistency["harms"])
    cost = consistency["cost"]
    assert cost["checksum_s"] > 0 and cost["share"]["low"] <= cost["share"]["high"]
    (case,) = loading["cases"].values()
    assert set(case["samples_per_s"]) == {"0", "auto 1"} and case["auto_over_best"] > 0


@pytest.mark.long
def test_hosts(tmp_path: Path) -> None:
    result = quick(tmp_path, "hosts")
    if "skipped" in result:  # no network namespaces here
        pytest.skip(result["skipped"])
    assert list(result["links"]) == ["100"] and all(link["step_s"] > 0 for link in result["links"].values())
    assert result["told_s"] and all(seconds > 0 for sides in result["told_s"].values() for seconds in sides.values())


@pytest.mark.slow
def test_dp(tmp_path: Path) -> None:
    (case,) = quick(tmp_path, "dp")["cases"]
    assert case["ratio"]["value"] > 0 and set(case["samples_per_s"]) == {"dp", "ddp"}
    assert sum(case["told"]["dp"]["shares"]) == sum(case["told"]["ddp"]["shares"]) == 12
    assert len(case["told"]["dp"]["contention"]) <= 1  # found once the shares have settled


@pytest.mark.long
def test_preemption(tmp_path: Path) -> None:
    result = quick(tmp_path, "preemption")
    assert result["num_preemptions"] == 3 and result["codes"] == {"75": 3}
    assert result["lost"]["max"] <= 1 and max(result["differences"]) <= 1e-12
