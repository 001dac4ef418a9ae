"""Wrong uses of the queue's commands: each is told in words that say what to do, and nothing is queued."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.cli.queue_box import COUNTING, Box, box_in, inside


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with box_in(tmp_path_factory.mktemp("box")) as made:
        made.submit("--name", "first", "--", "true")
        yield made


@pytest.fixture(autouse=True)
def here(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "count.py").write_text(COUNTING)
    (tmp_path / "job.toml").write_text('command = "true"\ndevices = 1\n')
    (tmp_path / "typo.toml").write_text('command = "true"\ndevics = 1\n')
    (tmp_path / "plain.txt").write_text("no program\n")
    with inside(tmp_path):
        yield tmp_path


WRONG = [
    ("", "no command given: write it after --"),
    ("-- nothere", "command 'nothere' not found in the PATH of this shell; is its environment active?"),
    ("-- ./plain.txt", "is it executable?"),
    ("-- python missing.py", "missing.py does not exist"),
    ("--folder nowhere -- true", "nowhere does not exist"),
    ("--devices 0 -- true", "--devices 0: expected MIN:MAX"),
    ("--devices 1:x -- true", "--devices 1:x: expected MIN:MAX"),
    ("--devices 64 -- true", "the job could never start: it asks for 64 devices; this queue has 2"),
    (
        "--kind rtx9090 -- true",
        "of kind rtx9090; this queue has 0 such of its 2 devices. Devices of the queue: 2 × cpu",
    ),
    ("--memory 900T -- true", "the job could never start"),
    ("--memory 20 -- true", "--memory 20: expected a size with its unit"),
    ("--time 2 -- true", "--time 2: expected SOFT or SOFT:HARD"),
    ("--time 3h:2h -- true", "the soft limit below the hard one"),
    ("--estimate soon -- true", "--estimate soon: expected a time with its unit"),
    ("--grace 1 -- true", "--grace 1: expected a time with its unit"),
    ("--steps 0 -- true", "--steps 0: expected a number of steps"),
    ("--retries -1 -- true", "--retries -1: expected a number of retries"),
    ("--after nobody -- true", "no job 'nobody' in this queue"),
    ("--after 99999 -- true", "there is no such job"),
    ("--after first:soon -- true", "--after first:soon: expected JOB or JOB:ok, JOB:any, JOB:failed"),
    ("--array 5-1 -- true", "--array 5-1: expected indices"),
    ("-- echo {index}", "the job is not an array"),
    ("--env SURELY_UNSET_9 -- true", "SURELY_UNSET_9 is inherited but not set in this shell"),
    ("--env EVENLOAD_JOB=x -- true", "a variable other than EVENLOAD_JOB"),
    ("--env A=1 --env A=2 -- true", "A is set twice"),
    ("--name ../up -- true", "--name ../up: expected a name of letters"),
    ("--notify pigeon:home -- true", "expected command:COMMAND, webhook:URL or mail:ADDRESS"),
    ("--notify command:nothere -- true", "program 'nothere' not found in the PATH"),
    ("--notify webhook:example.org -- true", "not a URL that begins with http"),
    ("--link data --no-snapshot -- true", "has no effect: no snapshot is taken"),
    ("--nodes 2 --devices 2 -- true", "the local queue has one machine"),
    ("--backend slrm -- true", "did you mean slurm?"),
    ("--backend-option partition=gpu -- true", "requires --backend"),
    ("nothere.toml", "can't read the job file nothere.toml: No such file"),
    ("typo.toml", "unknown key 'devics' (did you mean devices?)"),
    ("job.toml --devices 2", "devices has two different values: --devices 2 and devices = 1 in job.toml"),
    ("--priority 2000 -- true", "--priority 2000: expected an integer from -1000 to 1000"),
]


@pytest.mark.parametrize(("words", "told"), WRONG, ids=[words or "nothing" for words, _ in WRONG])
def test_nothing_is_queued(box: Box, words: str, told: str) -> None:
    before = box.num_jobs()
    result = box.run("submit", *words.split())
    assert result.code == 2 and result.out == ""
    assert told in result.err and result.err.startswith("evenload: error: ") and "Traceback" not in result.err
    assert box.num_jobs() == before


@pytest.mark.parametrize(
    ("command", "words", "told"),
    [
        ("logs", "nobody", "no job 'nobody' in this queue"),
        ("logs", "99999", "there is no job '99999'"),
        ("cancel", "99999", "there is no job '99999'"),
        ("cancel", "9-1", "jobs 9-1: expected FIRST-LAST"),
        ("change", "1", "nothing to change"),
        ("change", "runs/gpt -d cpu:2", "runs/gpt: there is no run in this folder, or it has not begun"),
        ("change", "gpt -d cpu:2", "-d cpu:2 names the devices of a run, and 'gpt' is no run folder"),
        ("change", "1 --hold --release", "--hold and --release contradict each other"),
        ("change", "1 --time soon", "--time soon: expected SOFT"),
        ("show", "nobody", "no job 'nobody' in this queue"),
        ("show", "1 --live", "--live, --html, --web, --port, --trace, --steps, --to and --logger-option are for runs"),
        ("queue", "dance", "unknown action; actions: show, stop, start, service"),
        ("queue", "set policy=best", "there is no such policy"),
        ("queue", "set polic=fifo", "there is no such setting of the queue; did you mean 'policy'?"),
        ("queue", "set max_lost=inf", "max_lost='inf': expected a whole number"),
        ("queue", "limit bob", "expected evenload queue limit USER NAME=VALUE"),
        ("queue", "limit bob max_devices=1e9", "max_devices=1e9: expected a whole number, or none"),
        ("queue", "limit bob devices=2", "unknown limit; limits: share, max_devices"),
        ("queue", "reserve cpu:9 soon", "soon: expected a time with its unit"),
        ("queue", "reserve cpu:9 100000d", "100000d: expected a time of at most 3650d"),
        ("queue", "reserve cpu:9 1h", "there is no device cpu:9 in this queue; there are 2: cpu:0, cpu:1"),
        (
            "show",
            "1 page.html",
            "FILE, --live, --html, --web, --port, --trace, --steps, --to and --logger-option are for runs, not for jobs",
        ),
        ("queue", "release", "expected evenload queue release RESERVATION"),
        ("ps", "--state sleeping", "unknown state 'sleeping'; states: waiting, running, ended"),
        ("ps", "--json --watch", "give one of them"),
    ],
)
def test_other_commands_say_what_is_wrong(box: Box, command: str, words: str, told: str) -> None:
    result = box.run(command, *words.split())
    assert result.code == 2 and told in result.err and "Traceback" not in result.err, result


def test_a_dry_run_queues_nothing(box: Box) -> None:
    before = box.num_jobs()
    result = box.run("submit", "--dry-run", "--array", "0-1", "job.toml")
    assert result.code == 0 and 'command = [\n    "true",\n]' in result.out and "# jobs: 2, an array" in result.out
    assert box.num_jobs() == before


def test_without_a_queue_that_is_said(tmp_path: Path) -> None:
    nobody = Box(tmp_path)
    result = nobody.run("ps")
    assert result.code == 2 and "the first evenload submit creates it" in result.err


def test_an_infinite_setting_is_shown_and_set_back(box: Box) -> None:
    """JSON has no infinite numbers: the daemon used to end at each question for its settings."""
    assert box.run("queue", "set", "horizon_s=inf").out == "horizon_s = inf\n"
    shown = box.run("queue")
    assert shown.code == 0 and "horizon_s                 inf" in shown.out, shown
    assert box.run("queue", "set", "horizon_s=200").out == "horizon_s = 200.0\n"


def test_a_shared_queue_can_be_named_by_users_that_cannot_list_its_folder(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode, **_: mode != os.R_OK)
    for command, *words in (["ps"], ["show", "first"]):
        result = box.run(command, *words)
        assert result.code == 0, result
