"""``evenload simulate`` as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evenload.cli.main import main

JOBS = "job,submitted_s,devices,duration_s,user\n" + "\n".join(
    f"j{i},{30 * i},{(1, 2, 4)[i % 3]},{(2000, 100, 400)[i % 3]},{('ann', 'bob')[i % 2]}" for i in range(24)
)


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.csv"
    path.write_text(JOBS)
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        main(["simulate", *arguments])
    except SystemExit as end:
        assert end.code in (0, None), capsys.readouterr().err
    return capsys.readouterr().out


def complains(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["simulate", *arguments])
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = json.loads(said(capsys, *arguments, "--json"))
    return result


def test_policies_and_one_more_card_side_by_side(jobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, str(jobs), "-c", "1x4", "-c", "1x5", "-p", "fifo", "-p", "default")
    assert [(row["cluster"], row["policy"]) for row in found] == [
        ("1x4", "fifo"), ("1x4", "default"), ("1x5", "fifo"), ("1x5", "default")
    ]  # fmt: skip
    mean = {(row["cluster"], row["policy"]): row["mean_jct_s"] for row in found}
    assert mean["1x4", "default"] < mean["1x4", "fifo"] and mean["1x5", "fifo"] < mean["1x4", "fifo"]
    assert all(row["num_jobs"] == 24 and row["num_failed"] == 0 and 0 < row["utilisation"] <= 1 for row in found)


def test_the_table_for_people(jobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, str(jobs), "-c", "1x4", "-p", "srpt", "--kind", "gpu:price=2,watts=300")
    assert out.splitlines()[0] == "24 jobs, remaining work known"
    assert "mean JCT" in out and "cost" in out and "kWh" in out


def test_jobs_and_a_picture(jobs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "picture.svg"
    (row,) = rows(capsys, str(jobs), "-c", "1x4", "--jobs", "--plot", str(picture), "--every", "2")
    assert len(row["jobs"]) == 12 and row["jobs"][0]["jct_s"] > 0
    from xml.etree import ElementTree

    lines = ElementTree.parse(picture).getroot().findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2 and all(len(line.attrib["points"].split()) > 5 for line in lines)


def test_settings_knowledge_and_ticks_change_the_result(jobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = rows(capsys, str(jobs), "-c", "1x4")
    for options in (
        ("--set", "restart_s=300"), ("--remaining", "unknown"), ("--remaining", "noisy:2", "--seed", "3"),
        ("--ticks-only",), ("--interval", "600", "--ticks-only"), ("--save", "100"), ("--set", "min_run_s=2000"),
    ):  # fmt: skip
        assert rows(capsys, str(jobs), "-c", "1x4", *options) != plain, options


@pytest.mark.parametrize(
    ("options", "said_"),
    [
        (("-p", "best"), "there is no such policy"),
        (("-c", "four"), "expected HOSTSxDEVICES"),
        (("-c", "1x2"), "asks for 4 devices; this queue has 2"),
        (("--set", "speed=1"), "there is no such setting"),
        (("--set", "min_run_s"), "expected NAME=VALUE"),
        (("--set", "min_run_s=soon"), "expected float"),
        (("--set", "policy=fifo"), "use --policy fifo"),
        (("--remaining", "guessed"), "expected one of known, unknown, noisy"),
        (("--remaining", "known:1"), "expected known, unknown, noisy, or noisy:SIGMA"),
        (("--kind", "gpu:colour=red"), "expected NAME:speed=1"),
        (("--kind", "a100:price=1"), "facts of kind a100"),
        (("--every", "0"), "every=0"),
        (("--interval", "0"), "interval_s=0"),
        (("--jobs",), "add --json"),
        (("--plot", "picture.png"), "name the file so"),
        (("--elastic",), "elastic has no effect"),
        (("--speeds", "x.json"), "no effect"),
    ],
)
def test_wrong_options_are_said_before_anything_runs(
    jobs: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said_: str
) -> None:
    assert said_ in complains(capsys, str(jobs), *(() if "-c" in options else ("-c", "1x4")), *options)


def test_what_is_too_large_can_be_capped(jobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rows(capsys, str(jobs), "-c", "1x2", "--cap")[0]["num_jobs"] == 24


def test_simulating_never_loads_torch(jobs: Path) -> None:
    code = (
        "import sys; from evenload.cli.main import main\n"
        f"try: main(['simulate', {str(jobs)!r}, '-c', '1x4'])\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False False"
