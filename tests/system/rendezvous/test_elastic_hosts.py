"""Machines of a run that lose a rank, join, are cut off, come back and die: every step once, with the weights of one process."""

import os
import re
import signal
import time

import psutil
import pytest
import torch

from evenload.records.reader import read_steps
from evenload.testing import hosts
from tests.system.launch.test_elastic import SCRIPT, pid_of, steps_of
from tests.system.rendezvous.typed import type_run, write_script
from tests.warm import run

PAUSE_S = "0.15"


class Machines:
    """One command on each of some machines, which share the run folder, and what rank 0 has trained."""

    def __init__(self, boxes, folder, nodes, pause_s=PAUSE_S):
        self.boxes, self.folder, self.nodes, self.pause_s = boxes, folder, nodes, pause_s
        self.typed = {}
        self.lost = []
        """Screens of machines that were killed."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for one in self.typed.values():
            one.process.kill()
            one.process.wait()

    def type(self, *names, options=(), host="box1"):
        (self.folder / "disk").mkdir(parents=True, exist_ok=True)
        for box in (box for box in self.boxes if box.name in names):
            own = self.folder / box.name
            write_script(own, SCRIPT, initialised=False)
            if not (own / "run").exists():
                (own / "run").symlink_to(self.folder / "disk")
            place = ("--nodes", self.nodes, "--host", host, *options)
            env = {"OMP_NUM_THREADS": "1"}
            self.typed[box.name] = type_run(box, own, *place, script=("train.py", self.pause_s, "0"), env=env)

    @property
    def steps(self):
        """The steps so far, each with its number of ranks, wherever rank 0 was."""
        return sorted(pair for box in self.boxes for pair in steps_of(self.folder / box.name))

    def screen(self, name):
        return self.typed[name].text

    def wait(self, found, timeout_s=120):
        deadline_s = time.monotonic() + timeout_s
        while not found():
            screens = {name: one.text for name, one in self.typed.items()}
            assert all(one.process.poll() is None for one in self.typed.values()), screens
            assert time.monotonic() < deadline_s, screens
            time.sleep(0.2)

    def train_on(self, num_ranks, num_steps=3):
        """Wait for some steps after the present one on so many ranks."""
        now = max(self.steps, default=(-1, 0))[0]
        self.wait(lambda: sum(step > now and n == num_ranks for step, n in self.steps) >= num_steps)

    def kill_rank(self, name, rank):
        os.kill(pid_of(self.folder / name, rank), signal.SIGKILL)

    def kill_machine(self, name):
        one = self.typed.pop(name)
        one.process.kill()
        one.process.wait()
        self.lost.append(one.text)

    def signal_machine(self, name, number):
        """Send a signal to all processes of a run on a machine: SIGSTOP and SIGCONT as if it were suspended and woken up."""
        supervisor = psutil.Process(self.typed[name].process.pid)
        for process in (supervisor, *supervisor.children(recursive=True)):
            process.send_signal(number)

    def finish(self):
        """End the run; return its weights and those of one process."""
        for box in self.boxes:
            (self.folder / box.name / "finish").touch()
        ends = [one.end(120) for one in self.typed.values()]
        assert [code for code, _ in ends] == [0] * len(ends), ends
        (saved,) = self.folder.glob("box*/weights.pt")
        found = torch.load(saved)
        assert [record.step for record in read_steps(self.folder / "disk")] == [*range(20 * found["epochs"])]
        whole = self.folder / "whole"
        write_script(whole, SCRIPT, initialised=False)
        run(["train.py", "0", str(found["epochs"])], whole, 120).check_returncode()
        return found["weights"], torch.load(whole / "weights.pt")["weights"]


def assert_equal(found, expected):
    for name, value in found.items():
        assert (value - expected[name]).norm() <= 1e-9 * expected[name].norm(), name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_machines_lose_a_rank_join_are_cut_off_and_die(can_make_machines, tmp_path):
    with hosts.machines(3) as boxes, Machines(boxes, tmp_path, "2:3") as run:
        run.type("box2", options=("--wait", "60"))  # before the coordinator
        run.type("box1", options=("--wait", "8"))
        run.train_on(2)
        run.kill_rank("box2", 1)
        run.train_on(1, num_steps=1)  # it is restarted within a second
        run.train_on(2)
        run.type("box3")
        run.train_on(3)
        boxes[2].unplug()
        run.train_on(2)
        time.sleep(4)  # both sides have noticed it
        boxes[2].plug()
        run.train_on(3)
        run.kill_machine("box2")
        run.train_on(2)
        screen = run.screen("box1")
        assert_equal(*run.finish())
    for text in (
        "rank 1 (cpu on box2) failed: killed by SIGKILL",
        "1 rank goes on; it is restarted (1 of 3)",
        "box3 is here",
        "box3 (1 rank) is gone: nothing was received for 5 s",
    ):
        assert text in screen, (text, screen)
    # The system resets a connection whose process was killed with messages unread.
    assert re.search(r"box2 \(rank 1\) is gone: (it closed the connection|the connection broke \()", screen), screen
