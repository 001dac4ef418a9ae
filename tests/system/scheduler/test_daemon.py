"""The daemon with real runners and real programs: begun, watched, stopped, taken over."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenload.errors import ConfigError, QueueError
from evenload.job.processes import all_stats, descendants
from evenload.scheduler import paths
from evenload.scheduler.client import connect
from evenload.scheduler.runner.files import read_markers
from tests.system.scheduler.daemons import Box, box, kill, until

STEPS = """
import sys, time
from evenload import job
for step in job.steps(int(sys.argv[1]), save=lambda: time.sleep(0.1)):
    print("step", step, flush=True)
    time.sleep(0.05)
"""


@pytest.fixture
def queue() -> Iterator[Box]:
    with box() as made:
        made.settings("[cpu]\nslots = 2\n")
        made.start()
        made.client().close()
        yield made


def test_a_job_runs_as_it_was_submitted(queue: Box, tmp_path: Path) -> None:
    script = "pwd; echo $WORD; echo $HOME; cat /proc/self/status | grep Cpus_allowed_list; echo [$CUDA_VISIBLE_DEVICES]"
    job = queue.submit("sh", "-c", script, folder=str(tmp_path), environment={"WORD": "here"})
    done = queue.wait_for(job, "SUCCEEDED", "FAILED")
    pwd, word, home, cores, visible = queue.output(job).splitlines()
    assert (pwd, word, home, visible) == (str(tmp_path), "here", str(Path.home()), "[]")
    assert cores.split()[1] in {device["label"].removeprefix("cpu:").partition(".")[0] for device in _devices(queue)}
    assert (done["state"], done["attempt"]) == ("SUCCEEDED", 1)
    log = paths.log_path(queue.folder, job)
    assert log.stat().st_mode & 0o777 == 0o600
    told = queue.call("job", job=job)
    assert told["program"]["environment"] == {"WORD": "here"}
    assert [attempt["ending"] for attempt in told["attempts"]] == ["Ended"]
    assert not list((queue.folder / paths.ATTEMPTS).iterdir()), "an attempt's files stay"


def _devices(queue: Box) -> list[dict[str, str]]:
    found: list[dict[str, str]] = queue.call("status")["devices"]
    return found


def test_what_goes_wrong_is_told(queue: Box) -> None:
    jobs = {
        queue.submit("sh", "-c", "exit 3"): "exit code 3",
        queue.submit("no-such-command"): "can't be started",
        queue.submit("true", folder="/no/such/folder"): "can't be entered",
        queue.submit("sh", "-c", "kill -9 $$"): "SIGKILL",
        queue.submit("sh", "-c", "exit 75"): "no stop request",
    }
    for job, reason in jobs.items():
        assert reason in queue.wait_for(job, "FAILED", "SUCCEEDED")["reason"]


def test_progress_and_a_cancel_that_saves(queue: Box) -> None:
    job = queue.submit(sys.executable, "-c", STEPS, "100000")
    until(lambda: queue.state(job)["done"] > 2, queue.log)
    row = queue.state(job)
    assert row["total"] == 100000 and row["state"] == "RUNNING" and row["rate_per_s"] > 0
    assert row["eta_s"] is not None
    queue.call("cancel", jobs=[job])
    assert queue.wait_for(job, "CANCELLED", "FAILED")["state"] == "CANCELLED"
    assert "stopped at step" in queue.output(job)


def test_a_second_cancel_ends_a_deaf_tree(queue: Box) -> None:
    """One child in a session of its own whose parent is gone, one that ignores SIGTERM: both end with the client."""
    script = textwrap.dedent(
        """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.environ.clear()
                os.execve("/bin/sleep", ["sleep", "1000"], {})
            os._exit(0)
        print("ready", flush=True)
        time.sleep(1000)
        """
    )
    job = queue.submit(sys.executable, "-c", script)
    until(lambda: "ready" in queue.output(job), queue.log)
    runner = next(iter(queue.runners()))
    queue.call("cancel", jobs=[job])
    assert queue.state(job)["state"] == "PREEMPTING"
    tree = _descendants(runner)
    assert len(tree) == 2
    queue.call("cancel", jobs=[job], now=True)
    assert queue.wait_for(job, "CANCELLED", "FAILED")["state"] == "CANCELLED"
    assert not [pid for pid in tree if Path(f"/proc/{pid}").exists()]


def _descendants(pid: int) -> set[int]:
    return descendants([pid], all_stats())


def test_a_higher_priority_takes_the_devices_and_gives_them_back(queue: Box) -> None:
    low = queue.submit(
        sys.executable, "-c", STEPS, "100000", spec={"priority": -1, "needs": {"min_devices": 2, "max_devices": 2}}
    )
    until(lambda: queue.state(low)["done"] > 0, queue.log)
    high = queue.submit("sh", "-c", "true", spec={"needs": {"min_devices": 2, "max_devices": 2}})
    assert queue.wait_for(high, "SUCCEEDED", "FAILED")["state"] == "SUCCEEDED"
    until(lambda: queue.state(low)["attempt"] == 2 and queue.state(low)["state"] == "RUNNING", queue.log)
    until(lambda: "attempt 2" in queue.output(low), queue.log)  # its runner writes after the state has changed
    assert "stopped at step" in queue.output(low)


def test_exit_code_0_at_a_stop_request_is_no_success(queue: Box, tmp_path: Path) -> None:
    """A handler that exits with 0 without a report: the job isn't done, and what waits for it doesn't start."""
    whole = {"needs": {"min_devices": 2, "max_devices": 2}}
    script = f"trap 'exit 0' TERM; echo up; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done"
    low = queue.submit("sh", "-c", script, spec={**whole, "priority": -1}, requeue=True)
    after = queue.submit("true", spec={"after": [{"job": low}]})
    until(lambda: "up" in queue.output(low), queue.log)
    high = queue.submit("sh", "-c", "sleep 0.2", spec=whole)
    assert queue.wait_for(high, "SUCCEEDED", "FAILED")["state"] == "SUCCEEDED"
    until(lambda: queue.output(low).count("up") == 2, queue.log)
    assert queue.state(after)["state"] == "PENDING"
    (tmp_path / "go").touch()
    assert queue.wait_for(after, "SUCCEEDED", "CANCELLED")["state"] == "SUCCEEDED"
    cancelled = queue.submit("sh", "-c", "trap 'exit 0' TERM; echo up; while :; do sleep 0.05; done")
    until(lambda: "up" in queue.output(cancelled), queue.log)
    queue.call("cancel", jobs=[cancelled])
    assert queue.wait_for(cancelled, "CANCELLED", "SUCCEEDED")["state"] == "CANCELLED"


def test_a_new_daemon_takes_over_what_runs_and_hears_what_ended(queue: Box, tmp_path: Path) -> None:
    long = queue.submit("sh", "-c", f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done")
    short = queue.submit("sh", "-c", f"while [ ! -e {tmp_path}/first ]; do sleep 0.05; done; exit 4")
    for job in (long, short):
        queue.wait_for(job, "RUNNING")
    before = queue.runners()
    queue.kill()
    (tmp_path / "first").touch()
    until(lambda: len(queue.runners()) == 1, lambda: "the short one's runner doesn't end without its daemon")
    queue.start()
    assert queue.wait_for(short, "FAILED", "SUCCEEDED")["reason"] == "exit code 4"
    assert queue.runners().items() <= before.items()
    (tmp_path / "go").touch()
    done = queue.wait_for(long, "SUCCEEDED", "FAILED")
    assert (done["state"], done["attempt"]) == ("SUCCEEDED", 1)


def test_a_killed_runner_costs_the_attempt_alone(queue: Box) -> None:
    """What it leaves is ended before the devices are given away; a later attempt runs."""
    job = queue.submit("sh", "-c", "setsid sleep 1000 & sleep 0.2; echo up; sleep 1000", requeue=True)
    until(lambda: "up" in queue.output(job), queue.log)
    left = set(queue.programs())
    assert len(left) >= 3
    kill(list(queue.runners()))
    until(lambda: queue.state(job)["attempt"] == 2 and queue.output(job).count("up") == 2, queue.log)
    assert not left & set(queue.programs())
    attempts = queue.call("job", job=job)["attempts"]
    assert (attempts[0]["ending"], attempts[0]["reason"]) == ("Lost", "its runner was killed")
    queue.call("cancel", jobs=[job], now=True)
    queue.wait_for(job, "CANCELLED")


def test_a_runner_that_is_terminated_lets_its_program_save(queue: Box) -> None:
    """As when the machine goes down."""
    job = queue.submit(sys.executable, "-c", STEPS, "100000")
    until(lambda: queue.state(job)["done"] > 0, queue.log)
    os.kill(next(iter(queue.runners())), signal.SIGTERM)
    until(lambda: queue.state(job)["attempt"] == 2, queue.log)
    assert "stopped at step" in queue.output(job)
    assert queue.call("job", job=job)["attempts"][0]["ending"] == "Yielded"
    queue.call("cancel", jobs=[job], now=True)
    queue.wait_for(job, "CANCELLED")


@pytest.mark.skipif(os.geteuid() != 0, reason="without root there may be no control group of one's own")
def test_what_hid_from_a_killed_runner_ends_too(queue: Box) -> None:
    """Another session, no variables, its parent gone: only the control group still knows whose it is."""
    script = textwrap.dedent(
        """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execve("/bin/sleep", ["sleep", "1000"], {})
            os._exit(0)
        os.wait()
        print("ready", flush=True)
        time.sleep(1000)
        """
    )
    job = queue.submit(sys.executable, "-c", script, spec={"needs": {"min_devices": 2, "max_devices": 2}})
    until(lambda: "ready" in queue.output(job), queue.log)
    markers = read_markers(paths.attempt_folder(queue.folder, job, 1))
    if not markers.cgroup:
        pytest.skip("no control group of the unified hierarchy can be made here")
    runner = next(iter(queue.runners()))
    tree = _descendants(runner)
    kill([runner])
    queue.call("cancel", jobs=[job])
    queue.wait_for(job, "CANCELLED")
    assert len(tree) == 2 and not tree & all_stats().keys()
    assert not Path(markers.cgroup).exists()


def test_arrays_order_hold_and_change(queue: Box) -> None:
    first = queue.submit("sleep", "1000")
    program = {"command": ["true"], "folder": "/"}
    after = queue.call("submit", spec={"after": [{"job": first, "condition": "any"}]}, program=program)["job"]
    elements = queue.call("submit", jobs=[{"spec": {"array_limit": 1}, "program": program}] * 3, array=True)["jobs"]
    for element in elements:
        queue.wait_for(element, "SUCCEEDED")
    held = queue.submit("true", spec={"not_before_s": 4e9})
    assert queue.call("hold", jobs=[held])["jobs"][0]["is_held"]
    changed = queue.call("change", job=held, priority=3, name="later", needs={"min_devices": 2, "max_devices": 2})[
        "job"
    ]
    assert (changed["priority"], changed["name"], changed["min_devices"]) == (3, "later", 2)
    with pytest.raises(ConfigError, match="can't be changed"):
        queue.call("change", job=held, user="root")
    last = queue.call("status")["last"]
    queue.call("release", jobs=[held])
    assert queue.call("wait", after=last, timeout_s=30)["last"] > last
    assert queue.state(after)["state"] == "PENDING"
    queue.call("cancel", jobs=[first, held], now=True)
    queue.wait_for(after, "SUCCEEDED")
    listed = queue.call("list", ended=True, limit=2)
    assert listed["more"] and [row["id"] for row in listed["jobs"]] == [first, after]
    assert queue.call("list")["jobs"] == []
    assert {row["array"] for row in queue.call("list", ended=True)["jobs"]} == {"", elements[0]}


def test_limits_reservations_and_settings(queue: Box) -> None:
    assert queue.call("set", settings={"policy": "fifo"})["settings"]["policy"] == "fifo"
    with pytest.raises(ConfigError, match="there is no such policy"):
        queue.call("set", settings={"policy": "best"})
    user = queue.call("limits", user="root", max_queued=1)["user"]
    assert user["max_queued"] == 1
    labels = [device["label"] for device in queue.call("status")["devices"]]
    made = queue.call("reserve", devices=labels, start_s=1.0, end_s=4e9, users=["nobody"])["reservation"]
    job = queue.submit("true")
    if os.geteuid() == 0:
        with pytest.raises(QueueError, match="may have 1"):
            queue.submit("true")
    assert "reserved" in queue.state(job)["reason"]
    queue.call("unreserve", reservation=made["id"])
    queue.wait_for(job, "SUCCEEDED")
    with pytest.raises(QueueError, match="this queue has 2 such"):
        queue.submit("true", spec={"needs": {"min_devices": 3, "max_devices": 3}})


def test_the_end_of_the_daemon_is_not_that_of_its_jobs(queue: Box, tmp_path: Path) -> None:
    job = queue.submit("sh", "-c", f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done")
    queue.wait_for(job, "RUNNING")
    assert queue.daemon is not None
    queue.call("stop")
    assert queue.daemon.wait(30) == 0
    with pytest.raises(QueueError, match="no daemon runs"):
        connect(queue.folder, start=False)
    queue.start()
    (tmp_path / "go").touch()
    assert queue.wait_for(job, "SUCCEEDED", "FAILED")["attempt"] == 1


def test_a_log_that_grows_too_large_keeps_its_end(queue: Box) -> None:
    queue.settings("[cpu]\nslots = 2\n[log]\nbytes = 65536\n")
    assert queue.daemon is not None
    queue.daemon.send_signal(signal.SIGHUP)
    job = queue.submit("sh", "-c", "yes 0123456789 | head -c 300000; sleep 3; echo the end")
    queue.wait_for(job, "SUCCEEDED")
    text = queue.output(job)
    assert len(text) <= 65536 and "is dropped" in text and text.endswith("the end\n")


def test_a_job_that_writes_fast_and_ends_at_once_keeps_the_end_of_its_log(queue: Box) -> None:
    queue.settings("[cpu]\nslots = 2\n[log]\nbytes = 65536\n")
    assert queue.daemon is not None
    queue.daemon.send_signal(signal.SIGHUP)
    job = queue.submit("sh", "-c", "yes | head -c 30000000; echo the end")
    queue.wait_for(job, "SUCCEEDED")
    assert len(queue.output(job)) <= 65536 and queue.output(job).endswith("the end\n")


def test_settings_that_cannot_be_are_told_and_nothing_ends(queue: Box) -> None:
    (queue.folder / paths.SETTINGS_FILE).write_text("[cpu]\nslotz = 2\n")
    assert queue.daemon is not None
    queue.daemon.send_signal(signal.SIGHUP)
    until(lambda: queue.call("status")["problems"], queue.log)
    assert "slotz" in queue.call("status")["problems"][0]
    queue.wait_for(queue.submit("true"), "SUCCEEDED")


def test_clients_start_one_daemon_however_many_they_are() -> None:
    """In a folder whose path is longer than a socket's address."""
    with box() as made:
        made.folder = made.folder / ("deep" * 30) / "queue"
        pids: list[int] = []
        errors: list[Exception] = []

        def ask() -> None:
            try:
                with connect(made.folder) as client:
                    pids.append(client.call("status")["pid"])
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert len(set(pids)) == 1 and len(pids) == 4
        job = made.submit("echo", "hello")
        made.wait_for(job, "SUCCEEDED")
        assert made.output(job) == "hello\n"
        made.call("stop")
        until(lambda: not made.processes(), lambda: "the daemon doesn't end")


def test_a_daemon_that_cannot_start_says_why() -> None:
    with box() as made:
        made.settings("nonsense = 1\n")
        with pytest.raises(QueueError, match="nonsense"):
            connect(made.folder)
