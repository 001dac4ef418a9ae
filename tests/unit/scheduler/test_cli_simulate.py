"""``evenload simulate`` as a user calls it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evenload.cli.main import main
from evenload.scheduler.core import events
from evenload.scheduler.core.values import Limits, Settings
from evenload.scheduler.simulator.simulate import Conditions, simulate
from evenload.scheduler.simulator.workloads import read_workload
from evenload.scheduler.store.ledger import RunnerStarted
from evenload.scheduler.store.reader import Reader
from evenload.scheduler.store.writer import QueueStore
from tests.unit.scheduler.queue import box

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
        (("--set", "min_run_s=soon"), "min_run_s='soon': expected a number"),
        (("--set", "policy=fifo"), "use --policy fifo"),
        (("--remaining", "guessed"), "expected one of known, unknown, noisy"),
        (("--remaining", "known:1"), "expected known, unknown, history, noisy, or noisy:SIGMA"),
        (("--equal-kinds",), "has no effect without --kind NAME:speed"),
        (("--kind", "gpu:colour=red"), "expected NAME:speed=1"),
        (("--kind", "a100:price=1"), "facts of kind a100"),
        (("--every", "0"), "every=0"),
        (("--interval", "0"), "interval_s=0"),
        (("--interval", "inf"), "none infinite"),
        (("--save", "inf"), "none infinite"),
        (("--start-hour", "nan"), "--start-hour is an hour of the day"),
        (("--jobs",), "add --json"),
        (("--plot", "picture.png"), "name the file so"),
        (("-c", "own"), "only a queue's own record has devices"),
        (("--export", "jobs.csv"), "--export has no effect on a table"),
        (("--limit", "ann:gpus=1"), "expected USER:devices=N"),
        (("--limit", "ann:devices=2"), "ann may have 2 at once"),
        (("--reserve", "devices=host0:0,from=0"), "expected devices=ID|ID,from=S,until=S"),
        (("--reserve", "devices=host7:0,from=0,until=9"), "there is no device host7:0; there are host0:0"),
        (("--tables", "x"), "no effect"),
        (("--speeds", "x.json"), "no effect"),
    ],
)
def test_wrong_options_are_said_before_anything_runs(
    jobs: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said_: str
) -> None:
    assert said_ in complains(capsys, str(jobs), *(() if "-c" in options else ("-c", "1x4")), *options)


def test_limits_and_reservations_hold_people_back(jobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = rows(capsys, str(jobs), "-c", "1x8")[0]
    limited = rows(capsys, str(jobs), "-c", "1x8", "--limit", "bob:devices=4,jobs=1")[0]
    reserved = rows(
        capsys, str(jobs), "-c", "1x8", "--reserve", "devices=host0:0|host0:1,from=0,until=20000,users=bob"
    )[0]
    assert limited["mean_jct_s"] > plain["mean_jct_s"] < reserved["mean_jct_s"]


@pytest.mark.parametrize(
    "options",
    [
        ("--limit", "ann:jobs=0", "--limit", "bob:jobs=0"),
        ("--reserve", "devices=host0:0|host0:1|host0:2|host0:3,from=0,until=1e5,users=cid", "--limit", "ann:jobs=0"),
        ("--set", "restart_s=1e300"),
    ],
)
def test_jobs_that_never_run_end_the_simulation(
    jobs: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    """Not after the ten million decisions of 20 years."""
    assert "for a month no job runs and none starts" in complains(
        capsys, str(jobs), "-c", "1x4", "--interval", "3600", *options
    )


def test_deadlines_that_are_all_missed_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "late.csv"
    path.write_text("job,submitted_s,devices,duration_s,deadline_s\na,0,1,100,50\n")
    out = said(capsys, str(path), "-c", "1x1")
    assert "in time" in out and "0.0%" in out
    path.write_text("job,submitted_s,devices,duration_s\na,0,1,100\n")
    assert "in time" not in said(capsys, str(path), "-c", "1x1")


@pytest.fixture
def queue_folder(jobs: Path, tmp_path: Path) -> Path:
    """A queue as a daemon leaves it: four devices with a price, two users, one of them limited."""
    devices = [replace(device, price_per_hour=2.0, power_w=300.0) for device in box(4)]
    log: list[events.QueueEvent] = []
    settings = Settings(policy="fifo", restart_s=5.0)
    conditions = Conditions(tuple(devices), settings, limits={"bob": Limits(max_devices=4)})
    simulate(read_workload(jobs), conditions, log)
    with QueueStore(tmp_path / "queue", holder="a test") as store:
        for event in log:
            store.record(event, extra={"command": ["x"]} if isinstance(event, events.Submitted) else None)
            if isinstance(event, events.JobStarted):
                job = store.queue_state.jobs[event.job]
                store.record(RunnerStarted(event.time_s, event.job, job.attempt, {"pid": 1}))
        store.commit()
    return tmp_path / "queue"


def test_our_own_queue_with_one_more_card_and_another_policy(
    queue_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rows(capsys, str(queue_folder), "-c", "own", "-c", "own+1", "-c", "own,1x4", "-p", "fifo", "-p", "default")
    assert [row["num_devices"] for row in found] == [4, 4, 5, 5, 8, 8]
    as_it_was, default, more = found[0], found[1], found[2]
    assert as_it_was["cost"] > 0 and as_it_was["energy_kwh"] > 0 and as_it_was["num_jobs"] == 24
    assert default["mean_jct_s"] < as_it_was["mean_jct_s"] > more["mean_jct_s"]
    ended = {}
    with Reader(queue_folder) as reader:
        for line in reader.jobs():
            ended[line.id] = line.since_s - line.submitted_s
    assert as_it_was["mean_jct_s"] == pytest.approx(sum(ended.values()) / 24, rel=0.01)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "evenload").mkdir()
    queue_folder.rename(tmp_path / "evenload" / "queue")
    assert rows(capsys)[0] == as_it_was  # this machine's own queue, its own devices, policy, settings and limits
    out = said(capsys, "--export", str(tmp_path / "export.csv"))
    assert out.startswith("24 jobs")
    again = rows(capsys, str(tmp_path / "export.csv"), "-c", "1x4", "-p", "fifo", "--set", "restart_s=5")
    assert again[0]["mean_jct_s"] == pytest.approx(as_it_was["mean_jct_s"], rel=0.01)


def test_no_queue_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert "no WORKLOAD was named, and there is no queue in" in complains(capsys)
    assert "there is no queue in" in complains(capsys, str(tmp_path))


def test_what_is_too_large_can_be_capped(jobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rows(capsys, str(jobs), "-c", "1x2", "--cap")[0]["num_jobs"] == 24
