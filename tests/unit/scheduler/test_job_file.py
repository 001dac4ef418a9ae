"""The job file: what is read, what is refused and how, and that what is written is read back the same."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from evenload.errors import ConfigError
from evenload.scheduler import job_syntax
from evenload.scheduler.core.values import After, Needs
from evenload.scheduler.job_file import BACKENDS, KEYS, JobFile, as_table, job_from, merged, to_program, to_spec
from evenload.scheduler.job_syntax import array_text, bytes_text, duration_text, read_array, read_bytes, read_duration_s
from evenload.scheduler.submit.check import CheckedJob
from tests.paths import ROOT

EXAMPLE = ROOT / "examples" / "job.toml"
PAGE = ROOT / "docs" / "job-file.md"


def test_all_keys_are_read() -> None:
    job = job_from(
        {
            "command": "python train.py --lr '1 e-3'",
            "name": "gpt",
            "devices": "1:4",
            "kind": ["a100", "h100"],
            "memory": "20G",
            "one_kind": True,
            "nodes": 1,
            "priority": -1,
            "time": "2h:3h",
            "estimate": "90m",
            "steps": 1000,
            "saves": True,
            "after": ["11", "12:any"],
            "environment": {"SEED": 1},
            "inherit": ["WANDB_API_KEY"],
            "folder": "/data",
            "snapshot": True,
            "links": ["data"],
            "grace": "2m",
            "requeue": True,
            "retries": 2,
            "notify": "mail:ann@example.org",
            "slurm": {"partition": "gpu", "nice": 3},
        }
    )
    assert job.command == ("python", "train.py", "--lr", "1 e-3")
    spec = to_spec(job, "ann")
    assert spec.needs == Needs(1, 4, ("a100", "h100"), 20 * 10**9, one_host=True, one_kind=True)
    assert (spec.soft_limit_s, spec.hard_limit_s, spec.estimate_s, spec.total) == (7200, 10800, 5400, 1000)
    assert spec.after == (After("11"), After("12", "any")) and spec.preemptible and spec.priority == -1
    checked = CheckedJob(job, {"SEED": "0", "PATH": "/bin"}, takes_snapshot=True, snapshot_reason="")
    program = to_program(checked.resolved(), 1000, "/data", snapshot="/copy")
    assert program.environment == {"SEED": "1", "PATH": "/bin"}
    assert (program.grace_s, program.snapshot, program.notify) == (120, "/copy", ("mail:ann@example.org",))
    assert job.backend_options == {} and job.options["slurm"] == {"partition": "gpu", "nice": "3"}


def test_an_element_of_an_array_has_its_index() -> None:
    job = job_from({"command": ["python", "t.py", "--seed={index}"], "name": "sweep", "array": "3,5-9:2%2"})
    assert job.indices() == (3, 5, 7, 9) and job.array_limit == 2
    program = to_program(job, 0, "/", index=5)
    assert program.command[-1] == "--seed=5" and program.environment == {"EVENLOAD_ARRAY_INDEX": "5"}
    spec = to_spec(job, "ann", index=5, array="40")
    assert (spec.name, spec.array, spec.array_limit) == ("sweep[5]", "40", 2)


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"comand": "x"}, "unknown key 'comand' (did you mean command?)"),
        ({}, "no command given"),
        ({"command": ""}, "expected a command"),
        ({"command": "python 'train"}, "can be split into words (No closing"),
        ({"command": ["python", 3]}, "expected a command"),
        ({"devices": 0}, "devices = 0: expected MIN:MAX with 1 <= MIN <= MAX"),
        ({"devices": "4:2"}, "1 <= MIN <= MAX"),
        ({"devices": "a"}, "1 <= MIN <= MAX"),
        ({"devices": True}, "1 <= MIN <= MAX"),
        ({"memory": 20}, "a size with its unit"),
        ({"memory": "20"}, "a size with its unit"),
        ({"time": "2"}, "such as 90s, 45m, 2h or 1d12h"),
        ({"time": "3h:2h"}, "the soft limit below the hard one"),
        ({"time": 7200}, "SOFT or SOFT:HARD"),
        ({"grace": "0s"}, "a time with its unit"),
        ({"grace": "1h 3m"}, "a time with its unit"),
        ({"grace": "100000d"}, "grace = '100000d': expected a time of at most 1d"),
        ({"time": ":100000d"}, "a time of at most 3650d"),
        ({"estimate": "99999999999w"}, "a time of at most 3650d"),
        ({"idle_end": "3651d"}, "a time of at most 3650d"),
        ({"idle_end": "0.0001s"}, "a time of at least 10s: use is measured that often"),
        ({"steps": 0}, "a number of steps from 1"),
        ({"steps": 1.5}, "a number of steps from 1"),
        ({"priority": 5000}, "from -1000 to 1000"),
        ({"priority": True}, "from -1000 to 1000"),
        ({"retries": -1}, "from 0 to 1000"),
        ({"saves": "yes"}, "true or false"),
        ({"after": "12:never"}, "JOB or JOB:ok, JOB:any, JOB:failed"),
        ({"after": ["12", "12:any"]}, "12 appears twice"),
        ({"array": "9-1"}, "indices such as 0-9"),
        ({"array": "0-9%0"}, "indices such as 0-9"),
        ({"array": "0-100000"}, "at most 1000"),
        ({"command": "run {index}"}, "the job is not an array"),
        ({"environment": ["A"]}, "a table of variables"),
        ({"environment": {"A B": "1"}}, "not 'A B'"),
        ({"environment": {"EVENLOAD_JOB": "1"}}, "a variable other than EVENLOAD_JOB: "),
        ({"environment": {"A": "1"}, "inherit": ["A"]}, "A is both set in environment and named in inherit"),
        ({"name": "../etc"}, "a name of letters"),
        ({"name": "a\x1b[2J"}, "a name of letters"),
        ({"links": ["../data"]}, "folders below the job's own"),
        ({"links": ["/data"]}, "folders below the job's own"),
        ({"notify": "webhook:ftp://x"}, "is not a URL that begins with http"),
        ({"notify": "mail:-oQ/tmp x"}, "is not a mail address"),
        ({"notify": "shout"}, "command:COMMAND, webhook:URL or mail:ADDRESS"),
        ({"backend": "slrm"}, "did you mean slurm?"),
        ({"nodes": 2, "devices": 4}, "the local queue has one machine"),
        ({"nodes": 2, "devices": 3, "backend": "slurm"}, "must be multiples of 2"),
        ({"share_device": True, "devices": 2}, "a job that shares a device can have only one"),
        ({"estimate": "2h", "time": ":1h"}, "exceeds the hard limit"),
        ({"slurm": "gpu"}, "a table, such as [slurm]"),
    ],
)
def test_what_cannot_be_is_refused(table: dict[str, Any], told: str) -> None:
    values = {"command": "true", **table} if table else {}
    with pytest.raises(ConfigError) as caught:
        job_from(values)
    assert told in str(caught.value)


def test_a_file_and_options_are_one_table(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('command = "true"\ndevices = 2\nfolder = "here"\nenvironment = { A = "1" }\n')
    options: dict[str, tuple[Any, str]] = {"devices": ("2:2", "-d 2:2"), "environment": ({"B": "2"}, "--env B=2")}
    values, sources = merged(options, path)
    job = job_from(values, sources)
    assert (job.max_devices, dict(job.environment)) == (2, {"A": "1", "B": "2"})
    assert job.folder == str(tmp_path / "here"), "a file's folder is beside the file"
    with pytest.raises(ConfigError, match=r"devices has two different values: -d 3 and devices = 2 in .*job\.toml"):
        merged({"devices": ("3", "-d 3")}, path)
    with pytest.raises(ConfigError, match="A has two different values"):
        merged({"environment": ({"A": "2"}, "--env A=2")}, path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("devices = [", "is not valid TOML"),
        ("devics = 1", "did you mean devices"),
        ("[slrum]\n", "did you mean slurm"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        merged({}, path)
    with pytest.raises(ConfigError, match=r"can't read the job file .*: No such file"):
        merged({}, tmp_path / "none.toml")


JOBS = st.fixed_dictionaries(
    {"command": st.lists(st.text("ab {}'\"$", min_size=1), min_size=1).filter(lambda c: "{index}" not in " ".join(c))},
    optional={
        "name": st.from_regex(r"[a-z][a-z0-9._-]{0,9}", fullmatch=True),
        "devices": st.tuples(st.integers(1, 9), st.integers(0, 9)).map(lambda n: f"{n[0]}:{n[0] + n[1]}"),
        "kind": st.lists(st.sampled_from(["a100", "h100", "cpu"]), min_size=1),
        "memory": st.integers(1, 2**40).map(lambda n: f"{n}B"),
        "priority": st.integers(-1000, 1000),
        "time": st.sampled_from(["2h", "90s:1h30m", ":1d"]),
        "grace": st.integers(1, 86400).map(lambda n: f"{n}s"),
        "steps": st.integers(1, 2**40),
        "saves": st.booleans(),
        "snapshot": st.booleans(),
        "requeue": st.booleans(),
        "retries": st.integers(0, 9),
        "array": st.lists(st.integers(0, 50), min_size=1, unique=True).map(lambda n: ",".join(map(str, n)) + "%2"),
        "after": st.lists(st.sampled_from(["1", "2:any", "x:failed"]), unique=True),
        "environment": st.dictionaries(st.sampled_from(["A", "B"]), st.text("xyz'\n")),
        "notify": st.sampled_from(["command:true", "webhook:http://a/b"]),
        "slurm": st.dictionaries(st.sampled_from(["partition", "qos"]), st.text("ab", min_size=1)),
    },
)


@given(JOBS)
def test_what_is_written_is_read_back(values: dict[str, Any]) -> None:
    job = job_from(values)
    assert job_from(tomllib.loads(tomli_w.dumps(as_table(job)))) == job


@given(st.integers(1, 2**60), st.integers(1, 3650 * 86400), st.lists(st.integers(0, 300), min_size=1, unique=True))
def test_quantities_are_read_back(size: int, seconds: int, indices: list[int]) -> None:
    assert read_bytes(bytes_text(size)) == pytest.approx(size, rel=1e-12)
    assert read_duration_s(duration_text(float(seconds))) == seconds
    assert read_array(array_text(indices, 3)) == (tuple(indices), 3)


def test_the_page_and_the_example_name_every_key() -> None:
    page = PAGE.read_text()
    assert not [key for key in (*KEYS, *BACKENDS[1:]) if f"`{key}`" not in page and f"[{key}]" not in page]
    job = job_from(tomllib.loads(EXAMPLE.read_text()))
    assert job_from(as_table(job)) == job
    for block in page.split("```toml\n")[1:]:
        job_from({"command": "true", **tomllib.loads(block.split("```")[0])})


def test_the_default_job_asks_for_one_device() -> None:
    assert to_spec(JobFile(("true",)), "ann").needs == Needs()


def test_a_deadline_that_is_over_is_refused() -> None:
    with pytest.raises(ValueError, match="to come"):
        job_syntax.read_moment("2020-01-01 09:00")
    assert job_syntax.read_moment("8h") == "8h"
