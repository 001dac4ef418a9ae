"""A real Ray of two nodes on this host, and the queue in it: fixtures of a file of tests, skipped where Ray is missing.

An idle Ray takes CPU time, so it ends with the file: workers that take whole files would keep theirs to the end of all tests.
"""

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

from evenload.scheduler.backends.ray.backend import RayBackend
from tests.paths import ROOT
from tests.system.scheduler.backends.programs import read_job
from tests.system.scheduler.backends.slurm_cluster import wait_until

LIMIT_S = 90.0
HERE = Path(__file__).parent


class RayBox:
    """The queue on Ray, as the tests speak to it."""

    def __init__(self, process: subprocess.Popen[str], root: Path, address: str) -> None:
        self._process = process
        self.address = address
        self.root = root

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
        return self.call("submit", dataclasses.asdict(RayBackend(root=self.root).build_request(job)))

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
        return str(self.call("output", job))


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """Two nodes of two CPUs. The cluster's process is nobody's child, so that its own children are not taken for leaks."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray; pip install -e '.[ray]'")
    folder = tempfile.mkdtemp(prefix="el-ray-")
    words = [sys.executable, str(HERE / "ray_cluster_process.py"), "2", "2"]
    parent = "import os, subprocess, sys; p = subprocess.Popen(sys.argv[1:]); print(p.pid, flush=True); os._exit(0)"
    process = subprocess.Popen(
        [sys.executable, "-c", parent, *words],
        env={
            **{name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},  # Ray sets it
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
def ray_box(ray_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayBox]:
    root = tmp_path_factory.mktemp("ray")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.system.scheduler.backends.ray_client", ray_address, str(root)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield RayBox(process, root, ray_address)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.wait(60)
    process.stdout.close()
