"""One attempt of a program: asked once although it is signalled twice, its grace, what a code means, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from evenload.errors import QueueError
from evenload.job import EXIT_CODE
from evenload.job.protocol import RunnerContract, write_contract
from evenload.scheduler.backends.attempt import AttemptOutcome, BackendAttempt, exit_code_of, outcome_of
from evenload.scheduler.core.states import Verb
from tests.system.scheduler.backends.programs import COUNTING, steps_done
from tests.system.scheduler.backends.slurm_cluster import wait_until

LIMIT_S = 60.0


def terms_in(folder: Path, grace_s: float = 30.0) -> tuple[RunnerContract, Path]:
    terms = RunnerContract("7", 1, str(folder / "report.json"), str(folder / "stop"), grace_s)
    write_contract(folder / "terms.json", terms)
    return terms, folder / "terms.json"


def start(folder: Path, *command: str, grace_s: float = 30.0, goes_on: bool = False) -> BackendAttempt:
    terms, terms_file = terms_in(folder, grace_s)
    return BackendAttempt(terms, terms_file, command, folder=str(folder), goes_on=goes_on)


def counting(folder: Path, total: int = 100_000) -> tuple[str, ...]:
    (folder / "count.py").write_text(COUNTING)
    return sys.executable, "count.py", "out", str(total), "0.02"


def wait(attempt: BackendAttempt) -> AttemptOutcome:
    end_s = time.monotonic() + LIMIT_S
    while (outcome := attempt.poll()) is None:
        assert time.monotonic() < end_s, "the program doesn't end"
        time.sleep(0.05)
    attempt.close()
    return outcome


def test_asked_by_the_file_although_signalled_too(tmp_path: Path) -> None:
    """Slurm signals all processes of a job: the program has SIGTERM already when it is asked."""
    attempt = start(tmp_path, *counting(tmp_path))
    wait_until(lambda: len(steps_done(tmp_path / "out")) > 2, "steps")
    os.kill(attempt.pid, signal.SIGTERM)
    attempt.request_stop("the nodes are needed")
    outcome = wait(attempt)
    assert (outcome.verb, outcome.code) == (Verb.YIELD, EXIT_CODE)
    state = json.loads((tmp_path / "out" / "state.json").read_text())
    assert state["step"] == len(steps_done(tmp_path / "out"))
    report = attempt.report()
    assert report is not None and (report.state, report.step) == ("stopped", state["step"])


def test_one_that_knows_no_file_gets_the_signal(tmp_path: Path) -> None:
    attempt = start(tmp_path, "sleep", "100", grace_s=4.0)
    attempt.request_stop("enough")
    outcome = wait(attempt)
    assert outcome == AttemptOutcome(Verb.FAIL, -signal.SIGTERM, "ended by SIGTERM")


def test_the_grace_ends(tmp_path: Path) -> None:
    script = (
        "import signal, time\nfor s in (15, 2): signal.signal(s, signal.SIG_IGN)\nprint(1, flush=True)\ntime.sleep(100)"
    )
    attempt = start(tmp_path, sys.executable, "-c", script, grace_s=1.0, goes_on=True)
    time.sleep(0.5)
    attempt.request_stop("enough")
    outcome = wait(attempt)
    assert outcome.verb is Verb.YIELD and "it goes on from its last save" in outcome.reason


def test_asked_twice_ends_at_once(tmp_path: Path) -> None:
    attempt = start(tmp_path, "sleep", "100")
    attempt.request_stop("enough")
    attempt.request_stop("now")
    began_s = time.monotonic()
    assert wait(attempt).verb is Verb.FAIL
    assert time.monotonic() - began_s < 20.0


def test_what_it_started_ends_with_it(tmp_path: Path) -> None:
    attempt = start(tmp_path, "bash", "-c", "sleep 1000 & echo $! > pid; exit 3")
    assert wait(attempt) == AttemptOutcome(Verb.FAIL, 3, "exit code 3")
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", "the child's end")


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(QueueError, match="no-such-program can't be started in"):
        start(tmp_path, "no-such-program")


@pytest.mark.parametrize(
    ("code", "asked", "can_go_on", "verb"),
    [
        (0, "", False, Verb.SUCCEED),
        (0, "asked", True, Verb.YIELD),  # many a handler of SIGTERM exits with 0
        (0, "asked", False, Verb.FAIL),
        (75, "", False, Verb.YIELD),
        (75, "asked", False, Verb.YIELD),
        (-15, "asked", True, Verb.YIELD),
        (143, "asked", True, Verb.YIELD),
        (-9, "asked", True, Verb.YIELD),
        (-15, "asked", False, Verb.FAIL),
        (-15, "", True, Verb.FAIL),
        (1, "asked", True, Verb.FAIL),
        (-11, "asked", True, Verb.FAIL),
    ],
)
def test_what_a_code_means(code: int, asked: str, can_go_on: bool, verb: Verb) -> None:
    assert outcome_of(code, asked, can_go_on).verb is verb


def test_only_a_report_makes_exit_code_0_a_success_after_a_request() -> None:
    assert outcome_of(0, "asked", can_go_on=False, has_finished=True).verb is Verb.SUCCEED
    assert exit_code_of(outcome_of(0, "asked", can_go_on=False)) == 1
    assert exit_code_of(outcome_of(0, "asked", can_go_on=True)) == 75


def as_process(folder: Path, *command: str) -> subprocess.Popen[bytes]:
    _, terms_file = terms_in(folder)
    words = [
        sys.executable,
        "-m",
        "evenload.scheduler.backends.attempt",
        f"--terms={terms_file}",
        f"--folder={folder}",
        "--",
    ]
    return subprocess.Popen([*words, *command], stdin=subprocess.PIPE, stderr=subprocess.PIPE)


def test_as_a_process_asked_by_a_line(tmp_path: Path) -> None:
    process = as_process(tmp_path, *counting(tmp_path))
    wait_until(lambda: len(steps_done(tmp_path / "out")) > 2, "steps")
    _, told = process.communicate(b"stop for a more urgent job\n", timeout=LIMIT_S)
    assert process.returncode == EXIT_CODE, told
    assert b"for a more urgent job" in told


@pytest.mark.parametrize("how", ["the pipe is closed", "killed"])
def test_without_its_parent_the_program_ends(tmp_path: Path, how: str) -> None:
    process = as_process(tmp_path, "bash", "-c", "echo $$ > pid; exec sleep 1000")
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip(), "the program")
    pid = int((tmp_path / "pid").read_text())
    if how == "killed":
        process.kill()
    process.communicate(timeout=LIMIT_S)
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", "the program's end")
