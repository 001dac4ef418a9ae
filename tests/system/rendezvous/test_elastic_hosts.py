"""Machines of a run that lose a rank, join, are cut off, come back and die: every step once, with the weights of one process."""

import os
import re
import signal
import time

import pytest
import torch

from evenload.records.reader import read_steps
from evenload.testing import hosts
from tests.system.launch.test_elastic import SCRIPT, at, pid_of, steps_of
from tests.system.rendezvous.typed import type_run, write_script
from tests.warm import run

PAUSE_S = "0.15"


class Machines:
    """One command on each of some machines, and what rank 0, on the first, has trained."""

    def __init__(self, boxes, folder, nodes):
        self.boxes, self.folder, self.nodes = boxes, folder, nodes
        self.typed = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for one in self.typed.values():
            one.process.kill()
            one.process.wait()

    def type(self, *names, options=()):
        for box in (box for box in self.boxes if box.name in names):
            write_script(self.folder / box.name, SCRIPT, initialised=False)
            place = ("--nodes", self.nodes, "--host", "box1", *options)
            env = {"OMP_NUM_THREADS": "1"}
            self.typed[box.name] = type_run(
                box, self.folder / box.name, *place, script=("train.py", PAUSE_S, "0"), env=env
            )

    @property
    def main(self):
        return self.folder / "box1"

    def screen(self, name):
        return self.typed[name].text

    def wait(self, found, timeout_s=120):
        deadline_s = time.monotonic() + timeout_s
        while not found():
            screens = {name: one.text for name, one in self.typed.items()}
            assert self.typed["box1"].process.poll() is None, screens
            assert time.monotonic() < deadline_s, screens
            time.sleep(0.2)

    def train_on(self, num_ranks, num_steps=3):
        """Wait for some steps after the present one on so many ranks."""
        now = at(self.main)[0]
        self.wait(lambda: sum(step > now and n == num_ranks for step, n in steps_of(self.main)) >= num_steps)

    def kill_rank(self, name, rank):
        os.kill(pid_of(self.folder / name, rank), signal.SIGKILL)

    def kill_machine(self, name):
        process = self.typed.pop(name).process
        process.kill()
        process.wait()

    def finish(self):
        """End the run; return its weights and those of one process."""
        for box in self.boxes:
            (self.folder / box.name / "finish").touch()
        ends = [one.end(120) for one in self.typed.values()]
        assert [code for code, _ in ends] == [0] * len(ends), ends
        found = torch.load(self.main / "weights.pt")
        assert [record.step for record in read_steps(self.main / "run")] == [*range(20 * found["epochs"])]
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
