"""The backend on a real Slurm: the one job file runs, is preempted and resumes; stops, cancels, arrays, several nodes."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from evenload.errors import QueueError
from evenload.scheduler.backends.interface import JobStatus
from evenload.scheduler.backends.slurm.backend import SlurmBackend
from evenload.scheduler.core.states import JobState
from tests.system.scheduler.backends.programs import (
    expected_result,
    read_job,
    steps_done,
    write_counting,
    write_job,
)
from tests.system.scheduler.backends.slurm_cluster import SlurmCluster, wait_until
from tests.system.scheduler.backends.test_texts import NASTY

LIMIT_S = 90.0

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def backend(tmp_path: Path, slurm: SlurmCluster) -> SlurmBackend:
    return SlurmBackend(tmp_path / "state")


def submit(backend: SlurmBackend, path: Path, **options: str) -> str:
    (job,) = backend.submit(backend.build_request(read_job(path, "slurm", slurm=options)))
    return job


def one(backend: SlurmBackend, job: str) -> JobStatus:
    (described,) = backend.describe([job])
    return described


def wait_for(backend: SlurmBackend, job: str, *states: JobState) -> JobStatus:
    def told() -> str:
        log = backend.logs(job)
        return f"job {job} is {one(backend, job)}\n{log.read_text() if log.exists() else ''}"

    wait_until(lambda: one(backend, job).state in states or one(backend, job).has_ended, f"{states}", LIMIT_S)
    assert one(backend, job).state in states, told()
    return one(backend, job)


def wait_for_steps(folder: Path, more_than: int = 3) -> None:
    wait_until(lambda: len(steps_done(folder)) > more_than, "steps", LIMIT_S)


def test_the_one_file_is_preempted_and_resumes(backend: SlurmBackend, slurm: SlurmCluster, tmp_path: Path) -> None:
    """Slurm's own preemption: a job of a higher partition takes all nodes (bar 9)."""
    total = 120
    path = write_counting(tmp_path, total, 0.05)
    job = submit(backend, path)
    wait_for_steps(tmp_path / "out")
    urgent = slurm.tool(
        "sbatch", "--parsable", "-p", "high", "-N3", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 2"
    ).strip()
    assert urgent.isdecimal(), urgent
    wait_until(lambda: one(backend, job).state is not JobState.RUNNING, "the preemption", LIMIT_S)
    ended = wait_for(backend, job, JobState.SUCCEEDED)
    assert (tmp_path / "out" / "result").read_text() == expected_result(total)
    assert steps_done(tmp_path / "out") == list(range(total)), "a step was lost or done twice"
    assert (ended.attempt, ended.step, ended.total) == (2, total, total)
    log = backend.logs(job).read_text()
    assert log.count("begins at step") == 2 and "the job is requeued" in log


def test_a_cancelled_job_saves_and_stays_cancelled(backend: SlurmBackend, tmp_path: Path) -> None:
    job = submit(backend, write_counting(tmp_path, 100_000, 0.05))
    wait_for_steps(tmp_path / "out")
    waiting = submit(backend, tmp_path / "job.toml", nodelist="n1", mem="0")
    backend.cancel(waiting)
    wait_for(backend, waiting, JobState.CANCELLED)
    backend.cancel(job)
    wait_for(backend, job, JobState.CANCELLED)
    saved = json.loads((tmp_path / "out" / "state.json").read_text())["step"]
    assert saved == len(steps_done(tmp_path / "out")) > 0
    with pytest.raises(QueueError, match="can't cancel job 999999"):
        backend.cancel("999999")
    assert backend.describe(["999999"]) == ()


def test_cancelled_twice_ends_at_once(backend: SlurmBackend, tmp_path: Path) -> None:
    script = "import signal, time\nfor s in (15, 2): signal.signal(s, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(600)"
    job = submit(backend, write_job(tmp_path, [sys.executable, "-c", "exec(open('deaf.py').read())"]))
    (tmp_path / "deaf.py").write_text(script)
    wait_until(lambda: backend.logs(job).exists() and "deaf" in backend.logs(job).read_text(), "its start", LIMIT_S)
    backend.cancel(job)
    backend.cancel(job)
    wait_for(backend, job, JobState.CANCELLED)


def test_what_is_put_back_into_the_queue(backend: SlurmBackend, slurm: SlurmCluster, tmp_path: Path) -> None:
    """A job asked by the signal that comes before the time limit, and one that fails and is tried again."""
    asked = submit(backend, write_counting(tmp_path, 60, 0.05))
    wait_for_steps(tmp_path / "out")
    assert one(backend, asked).hosts in (("n1",), ("n2",), ("n3",))
    assert slurm.tool("scancel", "--batch", "--signal=TERM", asked) == ""
    words = "import os, sys; n = os.path.exists('tried'); open('tried', 'w'); print('try', n); sys.exit(0 if n else 3)"
    first = submit(backend, write_job(tmp_path, [sys.executable, "-c", words], retries="1"))
    words = "import os, sys; print(sys.argv[1:], os.environ['EVENLOAD_ARRAY_INDEX'])"
    command = [sys.executable, "-c", words, *NASTY[2:10], "{index}"]
    array = submit(backend, write_job(tmp_path, command, array='"1-2"', after=f'"{first}"'))
    assert {d.state for d in backend.describe([array])} == {JobState.PENDING}
    wait_until(lambda: "Dependency" in backend.describe([array])[0].reason, "why it waits", LIMIT_S)
    for element in ("1", "2"):
        wait_for(backend, f"{array}_{element}", JobState.SUCCEEDED)
        assert backend.logs(f"{array}_{element}").read_text() == f"{[*NASTY[2:10], element]} {element}\n"
    assert [d.id for d in backend.describe([array])] == [f"{array}_1", f"{array}_2"]
    log = backend.logs(first).read_text()
    order = [log.index(words) for words in ("try False\n", "exit code 3; the job is requeued", "try True")]
    assert order == sorted(order)
    wait_for(backend, asked, JobState.SUCCEEDED)
    assert (tmp_path / "out" / "result").read_text() == expected_result(60)
    assert one(backend, asked).attempt == 2


def test_a_job_that_fails(backend: SlurmBackend, tmp_path: Path) -> None:
    job = submit(backend, write_job(tmp_path, [sys.executable, "-c", "import sys; sys.exit(5)"]))
    described = wait_for(backend, job, JobState.FAILED)
    assert described.reason == "exit code 5"
    with pytest.raises(QueueError, match="Slurm rejected the job: sbatch: error: invalid partition specified: nowhere"):
        submit(backend, tmp_path / "job.toml", partition="nowhere")


def test_what_may_not_go_on(backend: SlurmBackend, slurm: SlurmCluster, tmp_path: Path) -> None:
    """A program that can't save and that Slurm puts back, and one whose time over all attempts is used up."""
    deaf = submit(backend, write_job(tmp_path, ["sleep", "600"], grace='"2s"'))
    wait_for(backend, deaf, JobState.RUNNING)
    assert slurm.tool("scontrol", "requeue", deaf) == ""
    path = write_counting(tmp_path, 100_000, 0.05, time='":3h"', grace='"1s"')
    request = backend.build_request(read_job(path, "slurm"))
    (late,) = backend.submit(dataclasses.replace(request, text=request.text.replace("--limit=10800", "--limit=4")))
    assert wait_for(backend, late, JobState.FAILED).reason == "the hard limit of 4 s is used up"
    saved = json.loads((tmp_path / "out" / "state.json").read_text())["step"]
    assert saved == len(steps_done(tmp_path / "out")) > 0
    assert "from the beginning, which requires requeue = true" in wait_for(backend, deaf, JobState.FAILED).reason


def test_once_a_node_and_once_a_device(backend: SlurmBackend, tmp_path: Path) -> None:
    words = "import os, socket; print(os.environ['SLURMD_NODENAME'], os.environ.get('NODE_RANK'), os.environ['SLURM_PROCID'])"
    path = write_job(tmp_path, [sys.executable, "-c", words], devices="4", nodes="2")
    jobs = {tasks: submit(backend, path, tasks=tasks) for tasks in ("node", "device")}
    lines = {}
    for tasks, job in jobs.items():
        wait_for(backend, job, JobState.SUCCEEDED)
        lines[tasks] = sorted(line.split()[1:] for line in backend.logs(job).read_text().splitlines())
    assert lines["node"] == [["0", "0"], ["1", "1"]]
    assert lines["device"] == [["None", str(rank)] for rank in range(4)]


def test_what_slurm_has_forgotten(backend: SlurmBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without accounting a job's own folder tells how it ended."""
    job = submit(backend, write_job(tmp_path, ["true"]))
    wait_for(backend, job, JobState.SUCCEEDED)
    monkeypatch.setattr("evenload.scheduler.backends.slurm.backend._in_queue", lambda ids: [])
    assert one(backend, job).state is JobState.SUCCEEDED
    record = tmp_path / "state" / job / "record.json"
    record.write_text(record.read_text().replace("SUCCEEDED", "RUNNING"))
    assert "Slurm no longer knows the job and keeps no accounting" in one(backend, job).reason
