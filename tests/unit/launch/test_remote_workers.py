"""Workers of other machines, as the coordinator sees them: reports, messages, machines that are lost or join."""

import signal

from evenload.rendezvous.host_info import DeviceSlot
from evenload.rendezvous.peer_monitor import PeerJoined, PeerLost, PeerMessage, PeerMonitor
from evenload.rendezvous.world import Machine, World
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.failure import FailureReport
from evenload.training.launch.membership_messages import Ready, from_line, to_line
from evenload.training.launch.remote_workers import RemoteMachines, places_of, state_content


def machine(name, num_slots=1):
    return Machine(name, "10.0.0.1", "eth0", (DeviceSlot("cpu", "CPU", 1),) * num_slots)


class Peers(PeerMonitor):
    """What would be sent, and what has come."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def send(self, node, kind, **content):
        self.sent.append((node, kind, content))

    def come(self, *events):
        self._events.extend(events)


def machines():
    peers, lines = Peers(), []
    found = RemoteMachines(peers, lines.append)
    place = places_of(World((machine("box1"), machine("box2"))))[1]
    found.take_over(2, {0, 1})
    return peers, lines, found, found.add(WorkerSpec(1, workers=("worker-0", "worker-1"), world_size=2), place)


def test_reports_and_messages_of_a_worker_arrive():
    peers, lines, found, worker = machines()
    failure = FailureReport(1, "ValueError", "a broken batch", "x" * 50_000, step=3, time_s=90.0)
    content = state_content("worker-1", None, failure, 0.0, is_stopped=True) | {"time_s": 10.0}
    peers.come(PeerMessage(1, "worker_state", content))
    peers.come(PeerMessage(1, "from_worker", {"worker": "worker-1", "line": to_line(Ready("worker-1"))}))
    peers.come(
        PeerMessage(1, "from_worker", {"worker": "worker-1", "line": "nonsense"}), PeerMessage(1, "stop_joins", {})
    )
    assert found.poll() == [PeerMessage(1, "stop_joins", {})]
    assert worker.is_stopped() and worker.poll() is None and worker.read_failure().time_s == 10.0
    assert worker.read_failure().message == "a broken batch" and len(worker.read_failure().traceback) == 20_000
    assert worker.receive() == [Ready("worker-1")] and worker.receive() == []
    assert len(lines) == 1 and "can't be read" in lines[0]
    peers.come(PeerMessage(1, "worker_state", state_content("worker-1", -9, None, 20.0, is_stopped=False)))
    found.poll()
    assert (worker.poll(), worker.ended_s, worker.is_stopped()) == (-signal.SIGKILL, 20.0, False)


def test_orders_to_a_worker_are_sent_to_its_machine():
    peers, _, _, worker = machines()
    worker.send(Ready("worker-1"))
    worker.kill()
    worker.kill()
    (_, _, content), killed = peers.sent
    assert from_line(content["line"]) == Ready("worker-1")
    assert killed == (1, "kill_worker", {"worker": "worker-1"}) and worker.poll() == -signal.SIGKILL


def test_the_workers_of_a_lost_machine_are_lost_and_new_places_have_new_indices():
    peers, _, found, worker = machines()
    peers.come(PeerJoined(2, machine("box3", 2)), PeerJoined(3, machine("box4")), PeerLost(1, "box2", "it is off"))
    assert len(found.poll()) == 3 and not found.is_lost(1)
    assert found.lose(1) == ["worker-1"] and found.lose(1) == [] and worker.poll() is not None and found.is_lost(1)
    found.lose(3)
    assert [(p.index, p.node, p.local_rank, p.device) for p in found.take_places()] == [
        (2, 2, 0, "cpu on box3"),
        (3, 2, 1, "cpu on box3"),
    ]
    assert found.take_places() == []
