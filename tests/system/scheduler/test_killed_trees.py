"""SIGKILL of everything at once: the program, its runner and the daemon, in any order."""

from __future__ import annotations

import random
import time

from tests.system.scheduler.daemons import Box, box, kill, until


def test_a_job_whose_whole_tree_is_killed_goes_on() -> None:
    """Whoever dies first: a runner that saw its program's end a moment before its own doesn't call that a failure."""
    rng = random.Random(5)
    with box() as queue:
        queue.settings("[cpu]\nslots = 2\n[settings]\nmax_lost = 1000\n")
        queue.start()
        queue.client().close()
        jobs = [queue.submit("sh", "-c", "echo up; sleep 1000; exit $?", requeue=True) for _ in range(2)]
        for number in range(1, 5):
            _wait_for_starts(queue, jobs, number)
            assert queue.daemon is not None
            programs, runners = queue.programs(), list(queue.runners())
            rng.shuffle(programs)
            kill([*programs, *runners, queue.daemon.pid])
            queue.daemon.wait()
            queue.start()
            queue.client().close()
        _wait_for_starts(queue, jobs, 5)
        for job in jobs:
            attempts = queue.call("job", job=job)["attempts"]
            assert [row["ending"] for row in attempts] == ["Lost"] * 4 + [""], attempts
            queue.call("cancel", jobs=[job], now=True)
            queue.wait_for(job, "CANCELLED")


def _wait_for_starts(queue: Box, jobs: list[str], num: int) -> None:
    until(lambda: all(queue.output(job).count("up") >= num for job in jobs), lambda: "".join(map(queue.story, jobs)))


def test_a_program_that_alone_is_killed_has_failed() -> None:
    """Its runner waits half a second for its own end before it says so; the bill ends with the program."""
    with box() as queue:
        queue.settings("[cpu]\nslots = 1\n")
        queue.start()
        queue.client().close()
        job = queue.submit("sleep", "1000", requeue=True)
        until(lambda: len(queue.programs()) == 1, lambda: queue.story(job))
        queue.wait_for(job, "RUNNING")
        killed_s = time.time()
        kill(queue.programs())
        failed = queue.wait_for(job, "FAILED")
        assert failed["reason"] == "killed by SIGKILL" and time.time() > killed_s + 0.5
