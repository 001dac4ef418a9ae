"""Which machines may go on without others: never two sides of a cut at once, whatever each of them knows."""

import dataclasses
import itertools
import json

import pytest

from evenload.rendezvous import run_state
from evenload.rendezvous.host_info import DeviceSlot
from evenload.rendezvous.run_state import RunState
from evenload.rendezvous.world import Machine


def state(*voters):
    return RunState(1, (), voters)


def subsets(items):
    return [set(some) for count in range(len(items) + 1) for some in itertools.combinations(items, count)]


@pytest.mark.parametrize(
    ("voters", "group", "ended", "may"),
    [
        ((0, 1), {0}, set(), True),  # of two, the side with the coordinator
        ((0, 1), {1}, set(), False),
        ((0, 1), {1}, {0}, True),  # it has certainly ended
        ((0, 1, 2), {0}, set(), False),
        ((0, 1, 2), {1, 2}, set(), True),
        ((0, 1, 2), {1}, {0}, True),  # the lowest of the two that are left
        ((0, 1, 2), {2}, {0}, False),
        ((0, 1, 2), {2}, {0, 1}, True),
        ((2, 1, 0, 3), {2, 3}, set(), True),
        ((2, 1, 0, 3), {0, 1}, set(), False),
        ((0, 1), {2}, {0, 1}, False),  # it has no vote
    ],
)
def test_a_majority_goes_on(voters, group, ended, may):
    assert state(voters).may_go_on(group, ended) is may


@pytest.mark.parametrize("num_machines", [2, 3, 4, 5])
def test_two_sides_never_both_go_on(num_machines):
    voters = tuple(range(num_machines))
    some_goes_on = 0
    for ended in subsets(voters):
        alive = sorted({*voters} - ended)
        for one in subsets(alive):
            other = {*alive} - one
            for known, known_there in itertools.product(subsets(sorted(ended)), repeat=2):
                goes_on = state(voters).may_go_on(one, known), state(voters).may_go_on(other, known_there)
                assert goes_on != (True, True), (one, known, other, known_there)
                some_goes_on += any(goes_on)
    assert some_goes_on


def test_until_a_change_is_confirmed_both_sets_of_voters_count():
    joined = state((0, 1, 2), (0, 1, 2, 3))  # machine 3 has joined, which 1 and 2 do not know yet
    assert not joined.may_go_on({0, 3}) and state((0, 1, 2)).may_go_on({1, 2})
    left = state((0, 1, 2), (0, 2))  # machine 1 is lost, which 2 does not know yet
    assert not left.may_go_on({0}) and left.may_go_on({0, 2})
    assert (left.coordinator, left.present) == (0, (0, 2))


def test_a_machine_that_comes_back_again_and_again_costs_little_each_time():
    def machine(name):
        slots = tuple(DeviceSlot(f"cuda:{n}", "NVIDIA H100 80GB HBM3", 12) for n in range(8))
        return Machine(name, "10.0.0.1", "eth0", slots, "10.0.0.1:29500")

    places = {"worker-0": {"node": 0}, "worker-99": {"node": 999}}
    machines = (machine("box1"), *(machine("box2") for _ in range(1000)))
    kept = RunState(1, machines, ((0, 998), (0, 1000)), {"places": places}).without_former()
    assert len(kept.machines) == 1001 and kept.without_former() == kept
    assert [node for node, one in enumerate(kept.machines) if one.name] == [0, 998, 999, 1000]
    assert len(json.dumps(vars(kept), default=dataclasses.asdict)) < 100_000


def test_a_state_survives_sending():
    machine = Machine("box1", "10.0.0.1", "eth0", (DeviceSlot("cpu", "CPU", 1),), "10.0.0.1:29500")
    sent = RunState(3, (machine,), ((0, 1), (0,)), {"number": 2})
    raw = json.loads(json.dumps(vars(sent), default=dataclasses.asdict))
    assert run_state.from_message(raw) == sent
