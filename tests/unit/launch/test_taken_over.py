"""The machine that takes over goes on with what its own ranks, and those of the others, have said before."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from evenload.rendezvous.host_info import DeviceSlot
from evenload.rendezvous.peer_monitor import PeerLost, PeerMessage, Takeover
from evenload.rendezvous.run_state import RunState
from evenload.rendezvous.world import Machine, World
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.membership_decider import LOOP_ENDED, MembershipDecider, WorkerPlace
from evenload.training.launch.membership_messages import Finished, MembershipChange, Ready, from_line, to_line
from evenload.training.launch.remote_workers import places_of
from evenload.training.launch.taken_over import TakenOverMembers
from tests.unit.launch.test_remote_workers import Peers, machine

NAMES = ("worker-0", "worker-1", "worker-2")


class Channel:
    ended = False

    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)

    def receive(self):
        return []

    def flush(self):
        pass


def own_process(spec):
    return SimpleNamespace(
        spec=spec,
        channel=Channel(),
        poll=lambda: None,
        read_failure=lambda: None,
        is_stopped=lambda: False,
        kill=lambda: None,
        close=lambda: None,
    )


@pytest.fixture
def take_over():
    """Machine 1 of three takes over, whose own joiner was about to join."""

    def make(said):
        decider = MembershipDecider(
            dict(zip(NAMES, places_of(World((machine("box1"), machine("box2"), machine("box3")))), strict=True)),
            "old:1",
            3,
        )
        for name in NAMES:
            decider.capable(name, "")
        decider.request_join(WorkerPlace(3, "cpu", node=1, local_rank=1))
        members = json.loads(json.dumps(decider.state())) | {"num_places": 4, "seated": [0, 1, 2]}
        machines = tuple(Machine(f"box{n}", "10.0.0.1", "eth0", (DeviceSlot("cpu", "CPU", 1),), "") for n in (1, 2, 3))
        peers = Peers()
        lost = (PeerLost(0, "box1", "it is off"),)
        state = RunState(3, machines, ((0, 1, 2), (1, 2)), members)
        specs = [WorkerSpec(n, workers=NAMES, world_size=3) for n in (1, 2)]
        host = SimpleNamespace(
            folder=Path("no-launch"),
            request=SimpleNamespace(max_restarts=3),
            by_worker={"worker-1": own_process(specs[0]), "worker-3": own_process(specs[1])},
            outputs=SimpleNamespace(set_ranks=lambda workers: None),
            print_line=lambda text: None,
        )
        taken = TakenOverMembers(host, peers, lambda: "new:2", specs, Takeover(peers, state, lost, 5.0, "box2:1"), said)
        return taken, peers, host.by_worker["worker-1"].channel.sent

    return make


def test_a_rank_here_that_was_ready_to_join_joins_after_the_change(take_over):
    taken, peers, sent = take_over([to_line(Ready("worker-3"))])
    taken.poll()
    peers.come(PeerMessage(2, "reported", {"workers": ["worker-2"]}))
    for _ in range(2):
        taken.poll()
    (change,) = sent
    assert isinstance(change, MembershipChange) and change.workers == ("worker-1", "worker-2") and change.urgent
    assert taken._restored._joiners == {"worker-3": True}


@pytest.mark.parametrize("finished", ["worker-1", "worker-2"])
def test_nobody_goes_on_where_the_loop_of_a_rank_has_ended(take_over, finished):
    said = to_line(Finished(finished))
    taken, peers, sent = take_over([said] if finished == "worker-1" else [])
    if finished == "worker-2":
        peers.come(PeerMessage(2, "from_worker", {"worker": finished, "line": said}))
    peers.come(PeerMessage(2, "reported", {"workers": ["worker-2"]}))
    for _ in range(2):
        taken.poll()
    assert taken.end_cause is not None and LOOP_ENDED in taken.end_cause.text and not sent
    assert from_line(said) == Finished(finished)
