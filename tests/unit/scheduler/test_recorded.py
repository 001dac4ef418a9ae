"""A queue's own record, simulated again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenload.errors import ConfigError
from evenload.scheduler.core import events
from evenload.scheduler.core.values import Settings
from evenload.scheduler.simulator.cluster import devices_of
from evenload.scheduler.simulator.recorded import read_log, record_of, write_table
from evenload.scheduler.simulator.simulate import Conditions, simulate
from evenload.scheduler.simulator.workloads import read_workload
from evenload.scheduler.store.event_rows import as_row
from tests.unit.scheduler.queue import Queue, box

JOBS = "job,submitted_s,devices,duration_s,user,priority,after,preemptible\n" + "\n".join(
    f"j{i},{40 * i},{(1, 2, 4)[i % 3]},{(900, 150, 400)[i % 3]},{('ann', 'bob')[i % 2]},{i % 4 == 0:d},"
    f"{f'j{i - 2}:any' if i % 5 == 4 else ''},{'no' if i % 7 == 6 else 'yes'}"
    for i in range(20)
)


def write_log(log: list[events.QueueEvent], path: Path) -> Path:
    path.write_text("".join(json.dumps(as_row(event)) + "\n" for event in log))
    return path


@pytest.mark.parametrize("policy", ["fifo", "default"])
def test_a_record_simulated_again_gives_the_same_times(tmp_path: Path, policy: str) -> None:
    table = tmp_path / "jobs.csv"
    table.write_text(JOBS)
    conditions = Conditions(devices_of("1x4"), Settings(policy=policy))
    log: list[events.QueueEvent] = []
    first = simulate(read_workload(table), conditions, log)
    record = write_log(log, tmp_path / "queue.jsonl")
    again = simulate(read_workload(record), conditions)
    ends = {job.job: job.ended_s for job in first.jobs}
    assert {job.job: job.ended_s for job in again.jobs} == pytest.approx(ends, abs=1.0)
    told = read_log(record)
    assert told.num_left_out == 0 and told.devices == conditions.devices and told.settings == conditions.settings
    write_table(told.rows, tmp_path / "export.csv")
    exported = simulate(read_workload(tmp_path / "export.csv"), conditions)
    assert {job.job: job.ended_s for job in exported.jobs} == pytest.approx(ends, abs=1.0)


def test_what_never_ran_or_has_not_ended_is_left_out() -> None:
    queue = Queue(box(2, speed=2.0))
    queue.now_s = 1000.0
    ended = queue.submit(1)
    running = queue.submit(1)
    queue.submit(1)
    queue.settle()
    queue.now_s = 1100.0
    queue.apply(events.StopRequested(1100.0, ended))
    queue.now_s = 1110.0
    queue.yielded(ended)
    queue.now_s = 1200.0
    queue.ended(running)
    queue.submit(1, name="waits")
    queue.settle()
    queue.now_s = 1250.0
    queue.ended(ended, is_success=False) if ended in queue.running else queue.apply(events.Cancelled(1250.0, ended))
    record = record_of(queue.log)
    by_job = {row["job"]: row for row in record.rows}
    assert running in by_job and by_job[running]["duration_s"] == "400.000"  # 200 s at twice the speed
    assert by_job[ended]["submitted_s"] == "0.000" and float(by_job[ended]["duration_s"]) >= 200.0
    assert record.num_left_out == 2


def test_a_record_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "queue.jsonl"
    for text, said in (
        ("{\n", "line 1: expected one event"),
        ('{"kind": "Dreamt"}\n', "an event of kind 'Dreamt'"),
        ('{"kind": "Began", "time_s": 1.0, "job": "x"}\n', "there is no job x"),
        ("", "holds no job that ran and ended"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=said):
            read_workload(path)
    with pytest.raises(ConfigError, match="no effect"):
        read_workload(path, tables=tmp_path)
