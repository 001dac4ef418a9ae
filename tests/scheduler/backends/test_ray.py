"""The backend on a real Ray of two nodes on one host: the one job file runs, gives way to a higher class, and resumes."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from evenload.scheduler.backends.ray_cluster import RayCluster
from tests.scheduler.backends.programs import expected_result, read_job, steps_done, write_counting, write_job
from tests.scheduler.backends.slurm_cluster import wait_until

LIMIT_S = 90.0
HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray; pip install -e '.[ray]'"),
]


class Queue:
    """The queue on Ray, as the tests speak to it."""

    def __init__(self, process: subprocess.Popen[str], root: Path) -> None:
        self._process = process
        self._root = root

    def call(self, *words: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise AssertionError("the client has ended")

    def submit(self, path: Path, **changes: Any) -> Any:
        job = dataclasses.replace(read_job(path, "ray"), **changes)
        return self.call("submit", dataclasses.asdict(RayCluster(root=self._root).materialise(job)))

    def state(self, job: str) -> str:
        return str(self.one(job)["state"])

    def one(self, job: str) -> dict[str, Any]:
        (described,) = self.call("describe", [job])
        assert isinstance(described, dict)
        return described

    def wait_for(self, job: str, state: str) -> dict[str, Any]:
        ended = ("SUCCEEDED", "FAILED", "CANCELLED")
        wait_until(lambda: self.state(job) in (state, *ended), f"job {job} {state}", LIMIT_S)
        assert self.state(job) == state, f"{self.one(job)}\n{self.log(job)}"
        return self.one(job)

    def log(self, job: str) -> str:
        path = Path(self.call("logs", job))
        return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """Two nodes of two CPUs. The cluster's process is nobody's child, so that its own children are not taken for leaks."""
    folder = tempfile.mkdtemp(prefix="el-ray-")
    words = [sys.executable, str(HERE / "ray_cluster_process.py"), "2", "2"]
    parent = "import os, subprocess, sys; p = subprocess.Popen(sys.argv[1:]); print(p.pid, flush=True); os._exit(0)"
    process = subprocess.Popen(
        [sys.executable, "-c", parent, *words],
        env={
            **os.environ,
            "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_enable_worker_prestart": "0",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    cluster = psutil.Process(int(process.stdout.readline()))
    try:
        address = process.stdout.readline().strip()
        assert address, "the cluster doesn't start"
        yield address
    finally:
        process.stdin.close()
        try:
            cluster.wait(60)
        except psutil.TimeoutExpired:
            for child in (*cluster.children(recursive=True), cluster):
                child.kill()
        process.wait()
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def queue(ray_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Queue]:
    root = tmp_path_factory.mktemp("ray")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.scheduler.backends.ray_client", ray_address, str(root)],
        cwd=HERE.parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield Queue(process, root)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.wait(60)
    process.stdout.close()


def test_the_one_file_is_preempted_and_resumes(queue: Queue, tmp_path: Path) -> None:
    """A job of a higher class takes all devices (bar 9)."""
    total = 120
    path = write_counting(tmp_path, total, 0.05)
    job = queue.submit(path)
    wait_until(lambda: len(steps_done(tmp_path / "out")) > 3, "steps", LIMIT_S)
    wait_until(lambda: queue.one(job)["step"], "a report", LIMIT_S)
    (tmp_path / "urgent").mkdir()
    urgent = queue.submit(write_job(tmp_path / "urgent", ["sleep", "1"], devices="4", priority="1"))
    queue.wait_for(urgent, "SUCCEEDED")
    assert len(steps_done(tmp_path / "out")) < total, "it was to be preempted in its midst"
    ended = queue.wait_for(job, "SUCCEEDED")
    assert (tmp_path / "out" / "result").read_text() == expected_result(total)
    assert steps_done(tmp_path / "out") == list(range(total)), "a step was lost or done twice"
    assert ended["attempt"] == 2
    log = queue.log(job)
    assert log.count("begins at step") == 2 and "a job that goes first needs its devices" in log


def test_a_cancelled_job_saves(queue: Queue, tmp_path: Path) -> None:
    job = queue.submit(write_counting(tmp_path, 100_000, 0.05))
    wait_until(lambda: len(steps_done(tmp_path / "out")) > 3, "steps", LIMIT_S)
    waiting = queue.submit(write_job(tmp_path, ["true"], after=f'"{job}"'))
    assert queue.call("cancel", waiting) is None
    assert queue.state(waiting) == "CANCELLED"
    assert queue.call("cancel", job) is None
    queue.wait_for(job, "CANCELLED")
    saved = json.loads((tmp_path / "out" / "state.json").read_text())["step"]
    assert saved == len(steps_done(tmp_path / "out")) > 0
    assert queue.call("cancel", job)["text"] == f"job {job} has ended: CANCELLED"
    assert queue.call("logs", "999") == {"error": "QueueError", "text": "there is no job 999"}
    refused = queue.submit(write_job(tmp_path, ["true"], devices="5"))
    assert "it asks for 5 devices of kind cpu; this queue has 4 such of its 4 devices" in refused["text"]


def test_a_gang_on_several_nodes_and_an_array(queue: Queue, tmp_path: Path) -> None:
    words = "import os; print(os.environ['NODE_RANK'], os.environ['NUM_NODES'], os.environ['OMP_NUM_THREADS'])"
    gang = queue.submit(write_job(tmp_path, [sys.executable, "-c", words], devices="4"))
    words = "import os, sys; print(sys.argv[1], os.environ['EVENLOAD_ARRAY_INDEX']); sys.exit(int(sys.argv[1]) - 1)"
    array = queue.submit(
        write_job(tmp_path, [sys.executable, "-c", words, "{index}"], array='"1-2"', after=f'"{gang}"')
    )
    ended = queue.wait_for(gang, "SUCCEEDED")
    assert len(set(ended["hosts"])) <= 2
    path = Path(queue.call("logs", gang))
    assert [path.read_text(), path.with_name(f"{gang}.node1.log").read_text()] == ["0 2 2\n", "1 2 2\n"]
    queue.wait_for(f"{array}_1", "SUCCEEDED")
    assert queue.wait_for(f"{array}_2", "FAILED")["reason"] == "exit code 1"
    assert queue.log(f"{array}_1") == "1 1\n"
    assert [row["id"] for row in queue.call("describe", [array])] == [f"{array}_1", f"{array}_2"]


def test_the_queue_is_killed(queue: Queue, tmp_path: Path) -> None:
    """Ray starts it again; it knows all jobs, what ran starts again from its last save."""
    total = 60
    job = queue.submit(write_counting(tmp_path, total, 0.05))
    wait_until(lambda: len(steps_done(tmp_path / "out")) > 3, "steps", LIMIT_S)
    before = queue.call("describe", [])
    queue.call("kill the queue")
    queue.wait_for(job, "SUCCEEDED")
    assert [row["id"] for row in queue.call("describe", [])] == [row["id"] for row in before]
    assert (tmp_path / "out" / "result").read_text() == expected_result(total)
    assert queue.one(job)["attempt"] == 2
