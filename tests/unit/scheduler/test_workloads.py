"""Workloads from files: what is read, and what is said where something is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenload.errors import ConfigError
from evenload.scheduler.core.values import After, Needs
from evenload.scheduler.simulator.arrivals import capped, thinned
from evenload.scheduler.simulator.cluster import DeviceShape, KindFacts, devices_of
from evenload.scheduler.simulator.programs import alone_s
from evenload.scheduler.simulator.workloads import read_workload
from tests.system.benchmarks.pollux_tables import write_application, write_workload


def test_a_cluster_in_short() -> None:
    devices = devices_of("2x2:a100,1x3", {"a100": KindFacts(speed=2.0, price_per_hour=3.0, memory_bytes=80)})
    assert [(d.id, d.host, d.kind, d.speed, d.price_per_hour) for d in devices[:1]] == [
        ("host0:0", "host0", "a100", 2.0, 3.0)
    ]
    assert len(devices) == 7 and devices[-1].id == "host2:2" and devices[-1].kind == "gpu"


@pytest.mark.parametrize("text", ["", "4", "0x4", "4x0", "4x4:", "4x4,", "axb", "4x4;2x2"])
def test_a_cluster_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="expected HOSTSxDEVICES"):
        devices_of(text)


def test_facts_of_a_kind_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="facts of kind h100, but cluster '1x1' has only gpu"):
        devices_of("1x1", {"h100": KindFacts()})


def test_the_simple_table(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(
        "job,submitted_s,devices,duration_s,user,priority,kinds,memory_gib,one_host,preemptible,after,estimate_s,state\n"
        "b,20,1:4,100,ann,1,a|b,16,yes,no,a;a:any,90,SUCCEEDED\n"
        "a,10,2,50,,,,,,,,,\n"
    )
    first, second = read_workload(path)
    assert (first.job, first.time_s, first.spec.user, first.spec.needs) == ("a", 10.0, "user", Needs(2, 2))
    assert first.spec.preemptible and first.spec.estimate_s is None
    assert second.spec.needs == Needs(1, 4, ("a", "b"), 16 * 2**30, one_host=True)
    assert second.spec.after == (After("a"), After("a", "any")) and second.spec.estimate_s == 90.0
    assert second.spec.priority == 1 and not second.spec.preemptible
    assert alone_s(second.make(), DeviceShape((2,), ("a", "a"), (1.0, 1.0))) == pytest.approx(100 / 2**0.9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "columns of an empty file"),
        ("a,b\n1,2\n", "has the columns a, b: expected job"),
        ("job,submitted_s,devices,duration_s\n", "holds no job"),
        ("job,submitted_s,devices,duration_s,colour\na,0,1,5,red\n", "unknown columns colour"),
        ("job,submitted_s,devices,duration_s\na,0,1,\n", "line 2: the column 'duration_s' is missing or empty"),
        ("job,submitted_s,devices,duration_s\na,0,4:2,5\n", "line 2: devices 4:2"),
        ("job,submitted_s,devices,duration_s\na,0,one,5\n", "line 2: .*'one'"),
        ("job,submitted_s,devices,duration_s\na,-1,1,5\n", "line 2: submitted_s=-1.0"),
        ("job,submitted_s,devices,duration_s\na,0,1,0\n", "line 2: a job of 0.0 s"),
        ("job,submitted_s,devices,duration_s\na,0,1,inf\n", "line 2: a job of inf s"),
        ("job,submitted_s,devices,duration_s,scaling\na,0,1:2,5,nan\n", "line 2: scaling=nan"),
        ("job,submitted_s,devices,duration_s\na,0,1,5\na,0,1,5\n", "line 3: job a is there twice"),
        ("job,submitted_s,devices,duration_s,after\na,0,1,5,b\n", "job a is after b, which is not in the file"),
        ("job,submitted_s,devices,duration_s,preemptible\na,0,1,5,perhaps\n", "'perhaps': expected yes or no"),
        ("job,submitted_s,devices,job_type,steps\na,0,1,resnet,5\n", "job_type 'resnet' is in no table of speeds"),
    ],
)
def test_what_is_wrong_with_a_table_is_said_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_workload(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.csv can't be read"):
        read_workload(tmp_path / "nothing.csv")


def test_speeds_by_kind(tmp_path: Path) -> None:
    speeds = tmp_path / "speeds.json"
    speeds.write_text(
        json.dumps(
            {
                "v100": {"('ResNet (batch 16)', 1)": {"null": 10.0, "('Other', 1)": [5.0, 5.0]}},
                "k80": {"('ResNet (batch 16)', 1)": {"null": 2.0}, "('ResNet (batch 16)', 2)": {"null": 3.5}},
            }
        )
    )
    path = tmp_path / "jobs.csv"
    path.write_text("job,submitted_s,devices,job_type,steps\na,0,1,ResNet (batch 16),100\n")
    (arrival,) = read_workload(path, speeds=speeds)
    assert alone_s(arrival.make(), DeviceShape((1,), ("v100",), (1.0,))) == pytest.approx(10.0)
    assert alone_s(arrival.make(), DeviceShape((2,), ("k80", "k80"), (1.0, 1.0))) == pytest.approx(100 / 3.5)
    with pytest.raises(ConfigError, match="the table of speeds has 1 devices of such"):
        arrival.make().start(DeviceShape((2,), ("v100", "v100"), (1.0, 1.0)))
    speeds.write_text("[]")
    with pytest.raises(ConfigError, match="expected JSON of kind"):
        read_workload(path, speeds=speeds)


MIXED = DeviceShape((4,), ("fast", "fast", "slow", "slow"), (1.0, 1.0, 0.5, 0.5))
SLOW = DeviceShape((4,), ("slow",) * 4, (0.5,) * 4)


def test_unequal_devices_count_in_every_workload(tmp_path: Path) -> None:
    """Half the speed takes twice as long; a gang runs at the slowest's speed, an Evenload job's at the sum of all."""
    write_application(tmp_path / "traces" / "app")
    pollux = write_workload(tmp_path / "workloads" / "w.csv", ("app-0", 5.0, "app", 4, 32))
    philly = tmp_path / "philly.csv"
    philly.write_text("timestamp,duration,num_gpus\n2017-10-09 07:01:55,600.0,4\n")
    table = tmp_path / "jobs.csv"
    table.write_text(
        "job,submitted_s,devices,duration_s,evenload,rates\na,0,4,600,,\nb,0,4,600,yes,\nc,0,1:4,600,,\n"
        "d,0,1:4,600,no,\ne,0,1:4,600,,1|2|3|4\n"
    )
    speeds = tmp_path / "speeds.json"
    of_kind = {"('net', 4)": {"null": 10.0}}
    speeds.write_text(json.dumps({"fast": of_kind, "slow": of_kind, "gpu": of_kind}))
    typed = tmp_path / "typed.csv"
    typed.write_text("job,submitted_s,devices,job_type,steps,evenload\na,0,4,net,6000,\nb,0,4,net,6000,yes\n")
    arrivals = [*read_workload(pollux), *read_workload(philly), *read_workload(table)]
    arrivals += read_workload(typed, speeds=speeds)
    full = DeviceShape((4,), ("gpu",) * 4, (1.0,) * 4)
    slower = [
        tuple(round(alone_s(a.make(), shape) / alone_s(a.make(), full), 3) for shape in (SLOW, MIXED)) for a in arrivals
    ]
    slowest, summed = (2.0, 2.0), (2.0, 1.333)
    assert slower == [slowest, slowest, slowest, summed, summed, slowest, summed, slowest, summed]


def test_philly(tmp_path: Path) -> None:
    path = tmp_path / "philly.csv"
    path.write_text(
        "timestamp,duration,num_gpus,gpu_time,cluster\n"
        "2017-10-09 07:01:55,66.0,1,66.0,11cb48\n2017-10-09 06:01:55,30.0,8,240.0,6214e9\n2017-10-09 06:01:55,0.0,1,0,x\n"
    )
    first, second = read_workload(path)
    assert (first.time_s, first.spec.needs.min_devices, first.spec.user) == (0.0, 8, "6214e9")
    assert second.time_s == 3600.0


def test_workloads_of_applications(tmp_path: Path) -> None:
    write_application(tmp_path / "traces" / "app")
    path = write_workload(tmp_path / "workloads" / "w.csv", ("app-0", 5.0, "app", 4, 32), ("app-1", 9.0, "app", 1, 8))
    rigid = read_workload(path)
    assert [a.spec.needs for a in rigid] == [Needs(4, 4), Needs(1, 1)]
    assert [a.spec.needs for a in read_workload(path, tables=tmp_path / "traces")] == [Needs(4, 4), Needs(1, 1)]
    with pytest.raises(ConfigError, match="expected the tables of an application"):
        read_workload(path, tables=tmp_path)


@pytest.mark.parametrize("options", [{"tables": Path()}, {"speeds": Path("x")}])
def test_what_has_no_effect_is_an_error(tmp_path: Path, options: dict[str, object]) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("timestamp,duration,num_gpus\n2017-10-09 07:01:55,66.0,1\n")
    with pytest.raises(ConfigError, match="no effect"):
        read_workload(path, **options)  # type: ignore[arg-type]


def test_thinned_and_capped(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    lines = [f"j{i},{i},{1 + i % 4},10" for i in range(10)] + ["e,99,2:16,10"]
    path.write_text("job,submitted_s,devices,duration_s\n" + "\n".join(lines))
    arrivals = read_workload(path)
    assert [a.job for a in thinned(arrivals, 4)] == ["j0", "j4", "j8"]
    assert [a.job for a in thinned(arrivals, 4, 3)] == ["j3", "j7"]
    assert [a.spec.needs for a in capped(arrivals, 3)[-2:]] == [Needs(2, 2), Needs(2, 3)]
    with pytest.raises(ConfigError, match="every=0"):
        thinned(arrivals, 0)
