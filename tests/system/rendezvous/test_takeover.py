"""The coordinator of a run is lost: another machine takes over, each step is done once, and no two sides train on."""

import signal
import time

import pytest

from tests.system.rendezvous.side_by_side import SideBySide
from tests.system.rendezvous.test_elastic_hosts import Machines, assert_equal
from tests.system.rendezvous.typed import type_run, write_script

NEVER_BEGINS = """
import time, evenload
run = evenload.init()
print("ready", flush=True)
time.sleep(1000)
"""


def lost_one_after_the_other(boxes, folder):
    """Of three machines the coordinator, then the one that took over; HOST is typed again meanwhile."""
    with Machines(boxes, folder, "1:3") as run:
        run.type("box1", "box2", "box3")
        run.train_on(3)
        run.kill_machine("box1")
        run.train_on(2)
        run.type("box1")  # HOST, where no run is any more
        run.train_on(3)
        run.kill_machine("box2")
        run.train_on(2)
        return run.screen("box3"), run.screen("box1"), run.finish()


def last_of_two(boxes, folder):
    """Of two machines, with the coordinator's rank lost just before."""
    with Machines(boxes, folder, "2") as run:
        run.type("box1", "box2")
        run.train_on(2)
        run.kill_machine("box1")
        run.train_on(1)
        return run.screen("box2"), run.finish()


def cut_and_back(boxes, folder):
    """The coordinator is cut off from two others, which go on; it joins them afterwards."""
    with Machines(boxes, folder, "3") as run:
        run.type("box1", "box2", "box3")
        run.train_on(3)
        boxes[0].unplug()
        run.train_on(2)
        time.sleep(2)
        boxes[0].plug()
        run.train_on(3)
        return run.screen("box1"), run.screen("box2"), run.finish()


def stopped_and_back(boxes, folder):
    """All processes of the coordinator's machine are stopped for 20 s; the others go on, and it joins them afterwards."""
    with Machines(boxes, folder, "3") as run:
        run.type("box1", "box2", "box3")
        run.train_on(3)
        run.signal_machine("box1", signal.SIGSTOP)
        began_s = time.monotonic()
        run.train_on(2)
        went_on_s = time.monotonic() - began_s
        time.sleep(max(0.0, 20.0 - went_on_s))
        run.signal_machine("box1", signal.SIGCONT)
        run.train_on(3)
        return run.screen("box1"), run.screen("box2"), went_on_s, run.finish()


def with_another_rank(boxes, folder):
    """With the coordinator, a rank of another machine is lost, which starts again."""
    with Machines(boxes, folder, "3") as run:
        run.type("box1", "box2", "box3")
        run.train_on(3)
        run.kill_rank("box3", 2)
        run.kill_machine("box1")
        run.train_on(2)
        return run.screen("box2"), run.finish()


def in_a_join(boxes, folder):
    """A machine is about to join, whose rank has just been started."""
    with Machines(boxes, folder, "1:3") as run:
        run.type("box1", "box2", options=("--wait", "2"))
        run.train_on(2)
        run.type("box3")
        run.wait(lambda: "box3 is here; its devices start" in run.screen("box1"))
        run.kill_machine("box1")
        run.train_on(2)
        return run.screen("box2"), run.finish()


def before_the_first_step(boxes, folder):
    typed = []
    for box in boxes:
        write_script(folder / box.name, NEVER_BEGINS, initialised=False)
        typed.append(type_run(box, folder / box.name, "--nodes", "2", "--host", "box1"))
    with typed[0], typed[1]:
        typed[1].until("ready", timeout_s=60)
        typed[0].process.kill()
        return typed[1].end()


SCENARIOS = {
    "one after the other": (3, lost_one_after_the_other),
    "of two": (2, last_of_two),
    "cut": (3, cut_and_back),
    "stopped": (3, stopped_and_back),
    "with a rank": (3, with_another_rank),
    "in a join": (3, in_a_join),
    "before the first step": (2, before_the_first_step),
}


@pytest.fixture(scope="module")
def scenarios(can_make_machines, tmp_path_factory):
    return SideBySide(tmp_path_factory.mktemp("takeover"), 3, SCENARIOS)


@pytest.mark.timeout(400)
def test_the_lowest_machine_takes_over_and_the_next_one_after_it(scenarios):
    last, typed_again, weights = scenarios["one after the other"]
    assert "box2 coordinates the run from now on" in last and "this machine coordinates the run from now on" in last
    assert "rank 0 is cpu on box3 from now on; records and checkpoints are written there" in last, last
    assert "the run is in progress; this machine joins it at 10.77.0.2" in typed_again, typed_again
    assert_equal(*weights)


def test_one_of_two_machines_goes_on_if_the_coordinator_has_ended(scenarios):
    screen, weights = scenarios["of two"]
    assert "rank 0 (cpu on box1) is lost with its machine; 1 rank goes on" in screen, screen
    assert_equal(*weights)


def test_a_coordinator_without_a_majority_stops_and_joins_the_others(scenarios):
    cut_off, other, weights = scenarios["cut"]
    assert "contact with box" in cut_off and "this machine tries for 60 s to join again" in cut_off, cut_off
    assert "box1, the coordinator, is gone: nothing was received for 5 s" in other, other
    assert "rank 2 (cpu on box1) has joined: 3 ranks" in other, other
    assert_equal(*weights)


def test_a_coordinator_that_was_stopped_does_not_coordinate_any_more(scenarios):
    stopped, other, went_on_s, weights = scenarios["stopped"]
    assert "this machine tries for 60 s to join again" in stopped and "the run on box2 is in progress" in stopped, (
        stopped
    )
    assert "this machine coordinates the run from now on" not in stopped and "goes on;" not in stopped, stopped
    assert "rank 2 (cpu on box1) has joined: 3 ranks" in other, other
    assert went_on_s < 15.0
    assert_equal(*weights)


def test_a_rank_that_is_lost_at_the_same_time_is_restarted(scenarios):
    screen, weights = scenarios["with a rank"]
    assert (
        "rank 0 (cpu on box1) is lost with its machine" in screen and "(cpu on box3) has joined: 2 ranks" in screen
    ), screen
    assert_equal(*weights)


def test_a_machine_that_was_about_to_join_joins(scenarios):
    screen, weights = scenarios["in a join"]
    assert "(cpu on box3) has joined: 2 ranks" in screen, screen
    assert_equal(*weights)


def test_before_the_first_step_the_run_ends(scenarios):
    code, screen = scenarios["before the first step"]
    assert code == 1 and "box1, the coordinator, is gone" in screen and "Start the same command again" in screen, screen
