"""Real programs, real signals: asked to stop they save between two steps, end with 75, and go on where they were."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evenload import job
from evenload.errors import ConfigError
from evenload.job.protocol import VARIABLE, RunnerContract, read_contract, read_report, request_stop, write_contract
from tests.paths import ROOT
from tests.system.job.programs import COUNTING, program, terms, wait_for


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_once_it_saves_between_steps_and_goes_on_later(tmp_path: Path, number: signal.Signals) -> None:
    with program(tmp_path, COUNTING, 6, 0.2) as first:
        first.read_until("step 2")
        first.signal(number)
        assert first.end() == job.EXIT_CODE == 75
        assert first.lines == ["step 0", "step 1", "step 2", "saved 3"]
        assert "stopped at step 3 of 6" in first.errors and f"asked by {number.name}" in first.errors
        assert f"start it again: {sys.executable} {tmp_path}/program.py 6 0.2" in first.errors
    with program(tmp_path, COUNTING, 6, 0) as second:
        assert second.end() == 0
        assert second.lines == ["step 3", "step 4", "step 5", "all done"] and second.errors == ""


@pytest.mark.parametrize("where", ["in a step", "in the save"])
def test_asked_twice_it_ends_at_once(tmp_path: Path, where: str) -> None:
    code = (
        COUNTING
        if where == "in a step"
        else COUNTING.replace("def save(step):", "def save(step):\n    print('saving', flush=True); time.sleep(60)")
    )
    with program(tmp_path, code, 3, 60 if where == "in a step" else 0.1) as one:
        one.read_until("step 0")
        one.signal(signal.SIGTERM)
        if where == "in the save":
            one.read_until("saving")
        else:  # the first must have been taken: two at once are one to the kernel
            status = Path(f"/proc/{one.process.pid}/status")
            mask = 1 << (signal.SIGTERM - 1)
            wait_for(lambda: not int(status.read_text().split("SigCgt:")[1].split()[0], 16) & mask)
        one.signal(signal.SIGTERM)
        assert one.end() == -signal.SIGTERM
        assert not (tmp_path / "state.json").exists()


def test_a_stop_after_the_last_step_changes_nothing(tmp_path: Path) -> None:
    with program(tmp_path, COUNTING, 1, 0.3) as one:
        one.read_until("step 0")
        one.signal(signal.SIGTERM)
        assert one.end() == 0 and one.lines == ["step 0", "all done"]


def test_what_save_raises_is_the_programs_error(tmp_path: Path) -> None:
    with program(
        tmp_path, COUNTING.replace("def save(step):", "def save(step):\n    raise OSError('disk full')"), 9, 0.2
    ) as one:
        one.read_until("step 0")
        one.signal(signal.SIGTERM)
        assert one.end() == 1 and "disk full" in one.errors and "stopped at" not in one.errors


def test_a_signal_that_was_ignored_stays_ignored(tmp_path: Path) -> None:
    code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + COUNTING
    with program(tmp_path, code, 2, 0.2) as one:
        one.read_until("step 0")
        one.signal(signal.SIGINT)
        assert one.end() == 0 and one.lines[-1] == "all done"


def test_workers_forked_by_the_loop_end_when_told_and_outlive_a_ctrl_c(tmp_path: Path) -> None:
    code = """
import multiprocessing, os, signal, time
from evenload import job
def work():
    os.kill(os.getpid(), signal.SIGINT)   # as a terminal does to all
    time.sleep(60)
context = multiprocessing.get_context("fork")
for step in job.steps(1, save=lambda: None):
    worker = context.Process(target=work)
    worker.start()
    time.sleep(0.2)
    print(worker.is_alive(), job.stop_requested())
    worker.terminate()
    worker.join(20)
    print(worker.exitcode)
"""
    with program(tmp_path, code) as one:
        assert one.end() == 0 and one.lines == ["True False", "-15"], one.errors


def test_the_stop_file_and_the_reports(tmp_path: Path) -> None:
    line = terms(tmp_path)
    with program(
        tmp_path, COUNTING.replace("save=save", "save=save, samples_per_step=32"), 1000, 0.02, terms=line
    ) as one:
        one.read_until("step 5")
        told = wait_for(lambda: read_report(line))
        assert told.state == "running" and told.total == 1000 and (told.job, told.attempt) == ("17", 2)
        request_stop(line, "bob's job of priority 1 needs the device")
        assert one.end() == 75
        told = read_report(line)
        assert told is not None and told.state == "stopped" and told.pid == one.process.pid
        assert one.lines[-1] == f"saved {told.step}" and one.lines[-2] == f"step {told.step - 1}"
        assert 0 < told.steps_per_s < 1 / 0.02 and told.samples_per_s == pytest.approx(32 * told.steps_per_s)
        assert "bob's job of priority 1 needs the device" in one.errors and "the queue continues job 17" in one.errors


def test_a_finished_loop_says_so_and_the_file_and_a_signal_are_one_request(tmp_path: Path) -> None:
    line = terms(tmp_path, report_every_s=3600)
    with program(tmp_path, COUNTING, 3, 0, terms=line) as one:
        assert one.end() == 0
        told = read_report(line)
        assert told is not None and (told.state, told.step, told.total) == ("finished", 3, 3)
    (tmp_path / "late").mkdir()
    line = terms(tmp_path / "late")
    code = COUNTING.replace(
        "def save(step):", "def save(step):\n    print('saving', job.grace_left_s() < 30, flush=True); time.sleep(0.4)"
    )
    with program(tmp_path / "late", code, 100, 0.05, terms=line) as one:
        one.read_until("step 0")
        request_stop(line, "")
        one.read_until("saving True")
        one.signal(signal.SIGTERM)  # the runner's signal may come after the loop saw its file: still the first
        assert one.end() == 75 and one.lines[-1].startswith("saved")
        assert "asked by the queue" in one.errors


def test_in_another_thread_it_says_what_it_cannot_do(tmp_path: Path) -> None:
    code = """
import sys, threading, time
from evenload import job
def work():
    for step in job.steps(None, save=lambda: print("saved", flush=True)):
        print("step", step, flush=True)
        time.sleep(0.05)
    print("never here", flush=True)
thread = threading.Thread(target=work)
if len(sys.argv) > 1:
    with job.listening():
        thread.start(); thread.join()
else:
    thread.start(); thread.join()
sys.exit(job.EXIT_CODE if job.stop_requested() else 0)
"""
    line = terms(tmp_path)
    with program(tmp_path, code, terms=line) as one:
        one.read_until("step 1")
        request_stop(line, "somebody asks")
        assert one.end() == 75 and one.lines[-1] == "saved"
        assert "a thread other than the main one" in one.errors and "the queue's stop file does" in one.errors
        assert "the main thread has to end the program with exit code 75" in one.errors
    with program(tmp_path, code, "listen") as one:
        one.read_until("step 1")
        one.signal(signal.SIGTERM)
        assert one.end() == 75 and one.lines[-1] == "saved"
        assert "other than the main one" not in one.errors


def test_ranks_stop_at_the_step_they_agree_on(tmp_path: Path) -> None:
    code = """
import multiprocessing, os, signal, sys, time
from evenload import job
context = multiprocessing.get_context("fork")
barrier, flags = context.Barrier(2), context.Array("b", 2)
def work(rank):
    def agree(mine):
        flags[rank] = mine
        barrier.wait(20)
        everybodys = any(flags)
        barrier.wait(20)
        return everybodys
    def save(step):
        os.write(1, f"{rank} saved {step}\\n".encode())   # one write: lines of two ranks on one pipe never mix
    for step in job.steps(1000, save=save, agree=agree, is_main=rank == 0):
        if step == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)   # one rank alone is asked
        time.sleep(0.02 * rank)
ranks = [context.Process(target=work, args=(rank,)) for rank in range(2)]
for rank in ranks: rank.start()
for rank in ranks: rank.join(30)
print([rank.exitcode for rank in ranks])
"""
    line = terms(tmp_path)
    with program(tmp_path, code, terms=line) as one:
        assert one.end() == 0
        assert sorted(one.lines) == ["0 saved 6", "1 saved 6", "[75, 75]"], one.errors
        told = read_report(line)
        assert told is not None and (told.state, told.step, told.total) == ("stopped", 6, 1000)
        assert one.errors.count("stopped at step 6 of 1000") == 1 and "another rank was asked to stop" in one.errors


def test_the_first_loop_of_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "job.md").read_text()
    loop = page.split("```python\n")[1].split("```")[0]
    prepared = """
import time
from pathlib import Path
def load(): return int(Path("done").read_text()) if Path("done").exists() else 0
def save(step): Path("done").write_text(str(step))
def train(step): print("step", step, flush=True); time.sleep(0 if Path("quick").exists() else 0.05)
"""
    with program(tmp_path, prepared + loop) as one:
        one.read_until("step 3")
        one.signal(signal.SIGINT)
        assert one.end() == 75
        last = one.lines[-1]
    (tmp_path / "quick").touch()
    with program(tmp_path, prepared + loop) as two:
        assert two.end() == 0
        assert two.lines == [f"step {step}" for step in range(int(last.removeprefix("step ")) + 1, 1000)]


def test_the_handlers_of_before_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    for _ in job.steps(3, save=print):
        assert signal.getsignal(signal.SIGTERM) != before[0]
        break
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert list(job.steps(3, start=3, save=print)) == [] and list(job.steps(3, start=1, save=print)) == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"total": -1}, "total=-1"),
        ({"total": 2.5}, "total=2.5"),
        ({"total": True}, "total=True"),
        ({"start": 4}, "start=4, total=3"),
        ({"start": -1}, "start=-1"),
        ({"samples_per_step": 0}, "samples_per_step=0"),
        ({"save": None}, "save=None"),
        ({"save": lambda a, b: None}, "save requires the arguments a, b"),
    ],
)
def test_wrong_arguments_are_refused_before_the_first_step(arguments: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        job.steps(**{"total": 3, "save": print, **arguments})  # type: ignore[arg-type]


def test_a_variable_without_terms_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    for content in (None, "", "[" * 50_000, '{"schema": 9}', '{"schema": 1, "job": "a"}'):
        path = tmp_path / "job.json"
        if content is not None:
            path.write_text(content)
        with pytest.raises(ConfigError, match=f"{VARIABLE}={path}: .*outside of a queue, unset it"):
            read_contract(str(path))


def test_it_loads_neither_torch_nor_numpy() -> None:
    code = "import sys; from evenload import job; print(sorted({'torch', 'numpy'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_full_disk_below_its_output_is_no_other_end(tmp_path: Path) -> None:
    """Neither the report nor the message of it can be written; the code is the program's own all the same."""
    path = tmp_path / "terms.json"
    (tmp_path / "report.json").mkdir()
    write_contract(path, RunnerContract("7", 1, str(tmp_path / "report.json"), str(tmp_path / "stop"), 5.0))
    code = "from evenload import job\nfor step in job.steps(3, save=lambda step: None): pass"
    command, environment = [sys.executable, "-c", code], {**os.environ, VARIABLE: str(path)}
    environment.pop("PYTHONUNBUFFERED", None)
    with Path("/dev/full").open("w") as full:
        assert subprocess.run(command, env=environment, stderr=full, check=False, timeout=60).returncode == 0
    plain = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert "progress can't be reported" in plain.stderr
