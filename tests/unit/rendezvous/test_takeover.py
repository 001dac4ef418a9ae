"""The machines of a run agree on the next coordinator: over real connections of one process, without any rank."""

import asyncio
import contextlib
import dataclasses
import socket

import pytest

from evenload.rendezvous import takeover
from evenload.rendezvous.coordinator_monitor import CoordinatorMonitor
from evenload.rendezvous.event_loop import EventLoopThread
from evenload.rendezvous.host_info import DeviceSlot
from evenload.rendezvous.peer_monitor import PeerLost, Takeover
from evenload.rendezvous.run_state import RunState
from evenload.rendezvous.settings import Endpoint, RendezvousConfig
from evenload.rendezvous.standby import Standby
from evenload.rendezvous.takeover import Candidate, Followed
from evenload.rendezvous.world import Machine
from tests.unit.rendezvous.test_parts import make


def silent_port():
    """A listener that accepts nothing and whose queue is full: the system drops further connections, as a cut network does."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    return [listener, socket.create_connection(listener.getsockname())]


class Run:
    """Machines 0, 1, ... of a run, whose coordinator is 0; those of `lives` take part, `silent` ones never answer."""

    def __init__(self, num_machines, lives, silent=(), voters=None):
        listeners = {node: socket.create_server(("127.0.0.1", 0)) for node in lives}
        with socket.create_server(("127.0.0.1", 0)) as closed:
            refusing = f"127.0.0.1:{closed.getsockname()[1]}"
        ends = {node: f"127.0.0.1:{listener.getsockname()[1]}" for node, listener in listeners.items()}
        self.full = silent_port()
        self.is_silent = 0 in silent
        ends |= dict.fromkeys(silent, f"127.0.0.1:{self.full[0].getsockname()[1]}")
        slots = (DeviceSlot("cpu", "CPU", 1),)
        machines = tuple(
            Machine(f"box{node + 1}", "127.0.0.1", "lo", slots, ends.get(node, refusing))
            for node in range(num_machines)
        )
        self.state = RunState(5, machines, voters or (tuple(range(num_machines)),), {"number": 1})
        self.listeners = listeners
        self.loop = EventLoopThread()
        self.found = {}
        self.standbys = {}

    async def candidate(self, node):
        standby = Standby(self.listeners[node], self.state.machines[0].endpoint)
        await standby.start()
        self.standbys[node] = standby
        config = RendezvousConfig(Endpoint("box1", 1), 1, len(self.state.machines))  # port 1 opens nowhere
        info = make(address="127.0.0.1")
        return Candidate(self.loop, node, config, (), info, standby, 1000 + node, lambda text: None)

    def outcomes(self, states=None):
        """What each machine that takes part finds; `states`: what some know instead."""

        async def all_of_them():
            made = {node: await self.candidate(node) for node in self.listeners if node != 0}
            known = {node: (states or {}).get(node, self.state) for node in made}
            lost = PeerLost(-1, "box1", "it is gone", self.is_silent)
            found = await asyncio.gather(*(one.find_coordinator(known[n], lost) for n, one in made.items()))
            return dict(zip(made, found, strict=True))

        self.found = self.loop.run(all_of_them())
        return self.found

    def close(self):
        async def close_all():
            for one in self.found.values():
                if isinstance(one, Followed):
                    one.connection.close()
            for node, standby in self.standbys.items():
                if not isinstance(self.found[node], Takeover):
                    standby.close()
            await asyncio.sleep(0.05)  # closed sockets are seen at the other end

        self.loop.run(close_all())
        for one in self.found.values():
            if isinstance(one, Takeover):
                one.monitor.end_code = 0
                one.monitor.close()
        self.loop.close()
        for one in self.full:
            one.close()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(takeover, "_TOGETHER_S", 1.0)
    monkeypatch.setattr(takeover, "CONNECT_S", 0.3)


@contextlib.contextmanager
def run_of(*arguments, **options):
    run = Run(*arguments, **options)
    try:
        yield run
    finally:
        run.close()


def test_the_lowest_takes_over_with_the_newest_state_and_the_others_follow():
    with run_of(4, (1, 2, 3)) as run:
        newer = dataclasses.replace(run.state, version=7, members={"number": 2})
        found = run.outcomes({3: newer})
        assert isinstance(found[1], Takeover) and isinstance(found[2], Followed) and isinstance(found[3], Followed)
        state = found[1].state
        assert (state.version, state.members, state.voters) == (8, {"number": 2}, ((0, 1, 2, 3), (1, 2, 3)))
        assert found[2].state == found[3].state == state and (found[2].name, found[2].store_port) == ("box2", 1001)
        assert [lost.node for lost in found[1].lost] == [0]
        monitor = found[1].monitor
        assert (
            isinstance(monitor, CoordinatorMonitor) and monitor.num_machines == 3 and monitor.names == ["box3", "box4"]
        )


def test_machines_that_have_ended_are_not_waited_for():
    with run_of(4, (2, 3)) as run:
        found = run.outcomes()
        assert isinstance(found[2], Takeover) and isinstance(found[3], Followed)
        assert [(lost.node, lost.reason) for lost in found[2].lost] == [(0, "it is gone"), (1, "it does not answer")]


def test_machines_that_were_excluded_before_are_lost_with_the_ranks_that_are_announced():
    with run_of(4, (1, 2)) as run:
        places = {"worker-3": {"node": 3}, "worker-2": {"node": 2}}
        newer = dataclasses.replace(run.state, version=7, voters=((0, 1, 2),), members={"places": places})
        assert [lost.node for lost in run.outcomes({1: newer, 2: newer})[1].lost] == [0, 3]


def test_one_of_two_goes_on_only_if_the_coordinator_has_ended():
    with run_of(2, (1,)) as run:
        assert isinstance(run.outcomes()[1], Takeover)
    with run_of(2, (1,), silent=(0,)) as run:
        assert run.outcomes()[1] == "only 1 of its 2 machines reach each other: too few to go on"


def test_a_minority_stops_everywhere():
    with run_of(5, (3, 4), silent=(0, 1, 2)) as run:
        found = run.outcomes()
        assert found[3] == found[4] == "only 2 of its 5 machines reach each other: too few to go on"
    with run_of(5, (2, 3, 4), silent=(0, 1)) as run:
        assert isinstance(run.outcomes()[2], Takeover)


def test_a_coordinator_goes_on_without_a_machine_once_a_majority_has_confirmed_it():
    with run_of(3, (1, 2)) as run:
        found = run.outcomes()
        monitor, follower = found[1].monitor, found[2].connection

        async def confirm_then_leave():
            assert len(monitor._state.voters) == 2  # the takeover itself
            follower.send("has_state", version=monitor._state.version)
            while len(monitor._state.voters) == 2:
                await asyncio.sleep(0.01)
            assert monitor._state.voters == ((1, 2),) and not monitor.received()
            run.standbys[2].close()  # as the end of its process does
            follower.close()
            while not (events := monitor.received()):
                await asyncio.sleep(0.01)
            return events

        (event,) = run.loop.run(asyncio.wait_for(confirm_then_leave(), 10))
        assert isinstance(event, PeerLost) and event.node == 2 and monitor.cut_off is None


def test_only_a_coordinator_that_has_gone_on_says_so():
    async def ask():
        async def answer(reader, writer):
            assert b"gone_on" in await reader.readline()
            writer.write(b'{"kind": "refuse", "text": "the others have gone on"}\n')
            await reader.read()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        standby = Standby(socket.create_server(("127.0.0.1", 0)), "box1:1")
        await standby.start()
        ends = [server.sockets[0].getsockname(), standby._listener.getsockname(), ("127.0.0.1", 9)]
        texts = [await takeover._has_gone_on(f"{host}:{port}") for host, port in ends]
        assert not standby.supporters
        standby.close()
        server.close()
        await asyncio.sleep(0.05)
        return texts

    assert asyncio.run(ask()) == ["the others have gone on", "", ""]
