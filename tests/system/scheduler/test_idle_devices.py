"""Idle devices of running jobs: named in rows and logs, and the job ended where its owner set so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from evenload.views.queue.job_summary import job_text, summarize_job
from tests.paths import ROOT
from tests.system.scheduler.daemons import box, until

WATCH = "[watch]\nevery_s = 0.1\nidle_after_s = 1.5\n"


def test_an_idle_job_is_named_and_ended() -> None:
    """Beside one that computes; what its children computed counts as its own."""
    busy = "import subprocess, sys\nwhile True: subprocess.run([sys.executable, '-c', 'sum(range(10**6))'])"
    with box() as queue:
        queue.settings(f"[cpu]\nslots = 2\n{WATCH}")
        queue.start()
        queue.client().close()
        idle = queue.submit("sleep", "1000", idle_end_s=4.0)
        computing = queue.submit(sys.executable, "-c", busy, idle_end_s=4.0)
        queue.wait_for(computing, "RUNNING")
        until(lambda: queue.state(idle)["idle_s"], lambda: queue.story(idle))
        assert "idle for" in job_text(summarize_job(queue.folder, idle))
        ended = queue.wait_for(idle, "CANCELLED")
        assert ended["reason"] == "its devices were idle for 4s (--idle-end)" and ended["held_s"] >= 4.0
        assert "evenload: idle for" in queue.output(idle) and f"evenload cancel {idle}" in queue.output(idle)
        assert queue.state(computing)["state"] == "RUNNING" and not queue.state(computing)["idle_s"]
        assert "idle for" not in queue.output(computing)


def test_of_two_gpus_the_idle_one_is_named(tmp_path: Path) -> None:
    """The job goes on: only where all are idle it is ended. A GPU whose driver reports no use is never idle."""
    cards = [{"percent": 0}, {"percent": 90}, {}]
    (tmp_path / "cards.json").write_text(json.dumps(cards))
    stand_in = f"{ROOT / 'tests/system/scheduler/stand_in_nvml'}:{ROOT}"
    variables = {"PYTHONPATH": stand_in, "STAND_IN_GPUS_FILE": str(tmp_path / "cards.json")}
    with box(variables=variables) as queue:
        queue.settings(WATCH)
        queue.start()
        queue.client().close()
        job = queue.submit("sleep", "1000", spec={"needs": {"min_devices": 3, "max_devices": 3}}, idle_end_s=2.0)
        labels = {row["id"]: row["label"] for row in queue.call("status")["devices"]}
        until(lambda: queue.state(job)["idle_s"], lambda: queue.story(job))
        until(lambda: max(queue.state(job)["idle_s"].values()) > 3.0, lambda: queue.story(job))
        assert [labels[device] for device in queue.state(job)["idle_s"]] == ["gpu0"]
        assert ": gpu0 (used less than 5%)" in queue.output(job) and queue.state(job)["state"] == "RUNNING"
        (tmp_path / "part").write_text(json.dumps([{"percent": 0}, {"percent": 1}, {"percent": 4}]))
        (tmp_path / "part").replace(tmp_path / "cards.json")
        queue.wait_for(job, "CANCELLED")


def test_the_address_of_a_server_is_shown() -> None:
    """Also of a child process; not after its end."""
    server = (
        "import socket, subprocess, sys, time\n"
        "s = socket.create_server((sys.argv[1], 0), family=getattr(socket, sys.argv[2]))\n"
        "print('port', s.getsockname()[1], flush=True)\n"
        "if len(sys.argv) > 3: subprocess.run([sys.executable, '-c', sys.argv[3], '127.0.0.2', 'AF_INET'])\n"
        "time.sleep(1000)\n"
    )
    with box() as queue:
        queue.settings("[cpu]\nslots = 1\n")
        queue.start()
        queue.client().close()
        job = queue.submit(sys.executable, "-c", server, "127.0.0.1", "AF_INET", server)
        until(lambda: queue.output(job).count("port") == 2, lambda: queue.story(job))
        ports = [int(line.split()[1]) for line in queue.output(job).splitlines()]
        assert sorted(queue.call("job", job=job, listens=True)["listens"]) == sorted(
            [f"127.0.0.1:{ports[0]}", f"127.0.0.2:{ports[1]}"]
        )
        assert f"127.0.0.1:{ports[0]}" in job_text(summarize_job(queue.folder, job))
        queue.call("cancel", jobs=[job], now=True)
        queue.wait_for(job, "CANCELLED")
        assert queue.call("job", job=job, listens=True)["listens"] == []
