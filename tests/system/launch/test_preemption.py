"""Training scripts that are asked to stop, by every way of start: saved, exit code 75, gone on with. Real signals."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from evenload.job.protocol import VARIABLE, read_report, request_stop, write_contract
from evenload.training.checkpoint import files
from evenload.training.launch.devices import HostDevices, parse_devices, plan_workers, read_host
from tests.system.job.programs import terms
from tests.system.launch.scripts import Started, assert_gone
from tests.system.starts import ways
from tests.warm import Command

TRAIN = """
import os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader
import evenload

def main(step_s, resumes):
    run = evenload.init(project_dir="run", seed=0)
    torch.manual_seed(5)
    data = torch.randn(320, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    model, loader = run.prepare(nn.Linear(6, 1).double(), DataLoader(data, batch_size=8, shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if resumes:
        run.resume(model=model, optimizer=optimizer)
    try:
        for epoch in range(loader.epoch, 2):
            for step in loader:
                step.backward(lambda rows: model(rows).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                with open(f"pid-{run.rank}", "w") as file:
                    file.write(str(os.getpid()))
                with open(f"steps-{run.rank}", "a") as file:
                    file.write(f"{step.index}\\n")
                time.sleep(step_s)
    finally:
        print("CLEAN", run.rank, flush=True)
    print("DONE", run.rank, flush=True)

if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2] == "resumes")
"""
NUM_STEPS = 80


def _steps(folder: Path, rank: int = 0) -> list[int]:
    path = folder / f"steps-{rank}"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def _until_steps(folder: Path, process: object, more: int = 3) -> None:
    """Waits until so many more steps are done."""
    before, deadline = len(_steps(folder)), time.monotonic() + 60
    while len(_steps(folder)) < before + more:
        assert process.poll() is None, process.communicate()  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("pid-*")]


def _saved(folder: Path) -> int:
    newest = files.newest(folder / "run")
    return files.step_of(newest) if newest is not None else 0


def _start(folder: Path, step_s: float, *options: str, resumes: bool = True) -> Started:
    arguments = [str(step_s), "resumes" if resumes else "never"]
    return Started(folder, TRAIN, "-d", "cpu:2", *options, arguments=arguments, initialised=False)


def test_a_request_to_the_supervisor_then_a_stop_file_then_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _start(tmp_path, 0.03, "--fresh") as started:
        _until_steps(tmp_path, started.process)
        started.process.send_signal(signal.SIGTERM)
        code, stdout, stderr = started.end()
    assert_gone(_pids(tmp_path))
    first = _steps(tmp_path)
    assert code == 75 and _steps(tmp_path, 1) == first == list(range(len(first))) and _saved(tmp_path) == len(first)
    assert (
        stderr
        == "evenload: SIGTERM: saving and stopping after this step, or at the end of the script; once more ends it at once\n"
    )
    assert f"evenload: stopped at step {len(first)}, saved in " in stdout and stdout.count("CLEAN") == 2
    assert " s (asked by SIGTERM); start it again: evenload run -d cpu:2 train.py 0.03 resumes\n" in stdout

    agreed = terms(tmp_path, grace_s=60.0)
    write_contract(tmp_path / "job.json", agreed)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "job.json"))
    with _start(tmp_path, 0.03) as started:
        _until_steps(tmp_path, started.process)
        told = read_report(agreed)
        assert told is not None and told.state == "running" and told.step > len(first)
        request_stop(agreed, "for a more urgent job")
        code, stdout, stderr = started.end()
    second = _steps(tmp_path)[len(first) :]
    assert code == 75 and stderr == "" and f"stopped at step {second[-1] + 1}, saved" in stdout
    assert (
        "(for a more urgent job); the queue continues job 17 automatically unless it was cancelled; to continue by hand"
        in stdout
    )
    told = read_report(agreed)
    assert told is not None and (told.state, told.step) == ("stopped", second[-1] + 1) and told.steps_per_s > 0

    Path(agreed.stop_file).unlink()
    with _start(tmp_path, 0.0) as started:
        code, stdout, stderr = started.end()
    assert code == 0 and stderr == "" and "DONE 0" in stdout and _steps(tmp_path) == list(range(NUM_STEPS))
    told = read_report(agreed)
    assert told is not None and (told.state, told.step) == ("finished", NUM_STEPS)


def test_a_second_request_ends_at_once(tmp_path: Path) -> None:
    with _start(tmp_path, 30.0) as started:
        _until_steps(tmp_path, started.process, 1)
        began = time.monotonic()
        started.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert started.process.poll() is None, "it did not finish its step"
        started.process.send_signal(signal.SIGINT)
        code, stdout, stderr = started.end()
    assert time.monotonic() - began < 20
    assert code == 130 and "SIGINT: the 2 ranks ended at once, by the second signal" in stderr
    assert "stopped at" not in stdout and _saved(tmp_path) == 0
    assert_gone(_pids(tmp_path))


def test_what_can_not_go_on_ends_at_once_and_is_told_why(tmp_path: Path) -> None:
    with _start(tmp_path, 0.05, resumes=False) as started:
        _until_steps(tmp_path, started.process)
        started.process.send_signal(signal.SIGTERM)
        code, _, stderr = started.end()
    assert code == 143 and "SIGTERM: the 2 ranks ended; nothing was saved: the script doesn't call run.resume" in stderr


LEAVES_SLOWLY = """
import atexit, os, time
def leave():
    open(f"leaves-{os.getpid()}", "w").close()
    time.sleep(1.5)
    print("LEFT", flush=True)
atexit.register(leave)
"""


def _until_it_leaves(folder: Path, num: int) -> list[int]:
    """Waits until so many processes are at their last; their ids."""
    deadline = time.monotonic() + 60
    while len(found := list(folder.glob("leaves-*"))) < num:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return [int(path.name.partition("-")[2]) for path in found]


def test_a_request_after_the_last_step_is_too_late_and_changes_nothing(tmp_path: Path) -> None:
    arguments = ["0", "resumes"]
    with Started(tmp_path, LEAVES_SLOWLY + TRAIN, "-d", "cpu:2", arguments=arguments, initialised=False) as started:
        pids = _until_it_leaves(tmp_path, 2)
        started.process.send_signal(signal.SIGTERM)
        os.kill(pids[0], signal.SIGTERM)
        code, stdout, stderr = started.end()
    assert code == 0 and stdout.count("LEFT") == 2, (stdout, stderr)
    assert stderr == "evenload: SIGTERM: the script is at its end already; once more ends it at once\n"
    assert _steps(tmp_path) == list(range(NUM_STEPS))


def test_a_request_after_the_last_step_of_python_alone_is_too_late(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LEAVES_SLOWLY + TRAIN)
    process = ways.start(tmp_path, ["python", "train.py", "0", "resumes"])
    _until_it_leaves(tmp_path, 1)
    process.send_signal(signal.SIGTERM)
    ended = ways.end(process)
    assert ended.code == 0 and "LEFT" in ended.stdout


def test_a_queues_request_before_the_first_step_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_contract(tmp_path / "job.json", terms(tmp_path))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "job.json"))
    with Started(tmp_path, "ready()\ntime.sleep(1000)", "-d", "cpu:2") as started:
        pids = started.wait_ready()
        started.process.send_signal(signal.SIGTERM)
        code, _, stderr = started.end()
    assert code == 75 and "SIGTERM: the 2 ranks ended before the first step: nothing is lost" in stderr
    assert_gone(pids)


def test_a_stopped_rank_does_not_outlive_its_killed_supervisor(tmp_path: Path) -> None:
    with Started(tmp_path, "ready()\ntime.sleep(1000)", "-d", "cpu:2") as started:
        pids = started.wait_ready()
        os.kill(pids[1], signal.SIGSTOP)
        started.process.kill()
        assert_gone(pids)
    assert not list(tmp_path.glob("evenload-*"))


def test_one_rank_that_leaves_alone_with_that_code_is_an_error(tmp_path: Path) -> None:
    body = """
from evenload.errors import PeerLostError
ready()
wait_for("ready-0", "ready-1")
if spec.rank == 0:
    sys.exit(75)
time.sleep(0.3)
raise PeerLostError("rank 0 is gone")
"""
    with Started(tmp_path, body, "-d", "cpu:2") as started:
        code, _, stderr = started.end()
    assert code == 75 and "rank 0 (cpu) failed: it ended with exit code 75" in stderr


def test_auto_takes_the_cores_that_a_queue_gives() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        host = read_host()
    finally:
        os.sched_setaffinity(0, before)
    for devices in ("auto", "cpu"):
        (worker,) = plan_workers(
            parse_devices(devices, HostDevices((), host.cpu, host.cores)), HostDevices((), host.cpu, host.cores)
        )
        assert worker.cores == (min(before),) and worker.num_threads == 1


def test_python_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    process = ways.start(tmp_path, ["python", "train.py", "0.03", "resumes"])
    _until_steps(tmp_path, process)
    process.send_signal(signal.SIGINT)
    ended = ways.end(process)
    done = _steps(tmp_path)
    assert ended.code == 75 and _saved(tmp_path) == len(done) and "CLEAN 0" in ended.stdout
    assert f"evenload: stopped at step {len(done)}, saved" in ended.stdout
    assert "(asked by SIGINT); start it again: python train.py 0.03 resumes" in ended.stdout


def test_torchrun_passes_a_request_on_and_keeps_its_own_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", "train.py", "0.03", "resumes"]
    process = ways.start(tmp_path, command)
    _until_steps(tmp_path, process)
    process.send_signal(signal.SIGTERM)
    ended = ways.end(process)
    done = _steps(tmp_path)
    assert ended.code != 0 and _steps(tmp_path, 1) == done and _saved(tmp_path) == len(done)
    assert (
        f"evenload: stopped at step {len(done)}, saved" in ended.stdout and "start it again as before" in ended.stdout
    )


def test_spawn(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "spawned.py").write_text(
        "import evenload, train\n"
        "if __name__ == '__main__':\n"
        "    evenload.spawn(train.main, devices='cpu:2', args=(0.03, True))\n"
    )
    process = Command(["spawned.py"], tmp_path, ways.environment())
    _until_steps(tmp_path, process)
    process.send_signal(signal.SIGINT)
    ended = ways.end(process)
    done = _steps(tmp_path)
    assert ended.code == 75 and _steps(tmp_path, 1) == done and _saved(tmp_path) == len(done)
    assert "spawned.py" in ended.stdout.partition("start it again: ")[2]
