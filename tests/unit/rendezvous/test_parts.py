"""The parts of a rendezvous: options, comparison, order of ranks, connections, monitors, findings."""

import asyncio
import contextlib
import dataclasses
import json
import socket
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.cli.nodes import NodeOptions, read_rendezvous_config
from evenload.doctor.checks import hosts_findings
from evenload.doctor.checks.hosts_findings import HostFacts
from evenload.errors import ConfigError
from evenload.rendezvous import connection as connections
from evenload.rendezvous import host_info, world
from evenload.rendezvous.address import Route, chosen_interface, numeric
from evenload.rendezvous.connection import MAX_MESSAGE_BYTES, ConnectFailure, Connection
from evenload.rendezvous.coordinator_monitor import CoordinatorMonitor
from evenload.rendezvous.event_loop import EventLoopThread
from evenload.rendezvous.host_info import DeviceSlot, HostInfo, compare
from evenload.rendezvous.member_monitor import MemberMonitor
from evenload.rendezvous.peer_monitor import COORDINATOR, FailureCause, Peer, PeerLost, cause_of_loss
from evenload.rendezvous.probe import DataSummary, HostMeasurement, HostReport
from evenload.rendezvous.run_state import RunState
from evenload.rendezvous.settings import Endpoint, parse_endpoint, parse_nodes
from evenload.rendezvous.world import Machine
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.several_machines import assign
from evenload.training.launch.target import target_file


def make(name="box1", address="10.0.0.1", slots=1, **changes):
    values = {
        "host_name": name,
        "address": address,
        "interface": "eth0",
        "source": "s",
        "python": "3.11.7",
        "torch": "2.13.0+cpu",
        "script": "/home/u/train.py",
        "digest": "d",
        "siblings": {},
        "arguments": (),
        "paths": {},
        "settings": {},
        "nodes": "2",
        "job_id": "",
        "node_rank": None,
        "slots": tuple(DeviceSlot("cpu", "CPU", 1) for _ in range(slots)) if isinstance(slots, int) else slots,
    }
    return HostInfo(**{**values, **changes})


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("box1", "box1", 29500),
        ("box1:1234", "box1", 1234),
        ("10.0.0.1:80", "10.0.0.1", 80),
        ("fd00::1", "fd00::1", 29500),
        ("[fd00::1]:1", "fd00::1", 1),
        ("[fe80::1%eth0]", "fe80::1%eth0", 29500),
        ("gpu_box.local", "gpu_box.local", 29500),
    ],
)
def test_endpoints_are_read_and_options(text, host, port):
    endpoint = parse_endpoint(text)
    assert endpoint == Endpoint(host, port)
    assert parse_endpoint(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    "text",
    ["", ":1", "box1:", "box1:x", "box1:0", "box1:65536", "a b", "tcp://box1", "[fd00::1", "[fd00::1]x", "1:2:3"],
)
def test_other_endpoints_are_refused_with_what_is_expected(text):
    with pytest.raises(ConfigError, match="--host"):
        parse_endpoint(text)


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "2:1", "0:3", "1:", ":2", "1:2:3", "1.5"])
def test_other_numbers_of_machines_are_refused(text):
    with pytest.raises(ConfigError, match="--nodes"):
        parse_nodes(text)


@pytest.mark.parametrize(
    ("given_options", "expected"),
    [
        ({"nodes": "2"}, "--host is missing"),
        ({"host": "box1"}, "the number of machines is missing"),
        ({"nodes": "1", "host": "box1"}, "has no effect with --nodes 1"),
        ({"nodes": "2", "nnodes": "3", "host": "box1"}, "--nodes 2 and --nnodes 3"),
        ({"nodes": "2", "host": "box1", "rdzv_endpoint": "box2"}, "--host box1 and --rdzv-endpoint box2"),
        ({"nodes": "2", "host": "box1:5", "master_port": 6}, "name two ports"),
        ({"nodes": "2", "master_port": 6}, "--master-port 6 without --master-addr"),
        ({"nodes": "2", "rdzv_endpoint": "box1:0"}, "a number from 1 to 65535"),
        ({"nodes": "2", "host": "box1", "node_rank": 2}, "the ranks are 0 to 1"),
        ({"nodes": "2", "host": "box1", "node_rank": -1}, "the ranks are 0 to 1"),
        ({"nodes": "2", "host": "box1", "wait_s": 0.0}, "--wait 0"),
        ({"nodes": "2", "host": "box1", "wait_s": float("nan")}, "--wait nan"),
        ({"nodes": "2", "host": "box1", "standalone": True}, "--standalone means one machine"),
        ({"nodes": "2", "host": "box1", "rdzv_backend": "etcd"}, "needs no backend such as etcd"),
        ({"wait_s": 3.0}, "--wait 3.0 has no effect on one machine"),
        ({"node_rank": 1}, "--node-rank 1 has no effect on one machine"),
        ({"max_restarts": -1}, "--max-restarts -1"),
    ],
)
def test_options_that_contradict_or_do_nothing_are_refused(given_options, expected):
    with pytest.raises(ConfigError, match=expected):
        read_rendezvous_config(NodeOptions(**given_options), None, ("train.py",))


def test_torchruns_spellings_are_ours():
    ours = read_rendezvous_config(NodeOptions(nodes="2", host="box1:29400"), None, ("train.py", "--lr", "1"))
    assert ours is not None and ours.command == "evenload run --nodes 2 --host box1:29400 train.py --lr 1"
    theirs = NodeOptions(nnodes="2:2", rdzv_endpoint="box1:29400", rdzv_backend="c10d", max_restarts=0)
    static = NodeOptions(nnodes="2", master_addr="box1", master_port=29400)
    for options, port in ((theirs, None), (static, None), (NodeOptions(nodes="2", host="box1"), 29400)):
        assert read_rendezvous_config(options, port, ("train.py", "--lr", "1")) == ours
    assert read_rendezvous_config(NodeOptions(nnodes="1", max_restarts=0, standalone=True), 7, ("train.py",)) is None


def test_equal_machines_have_no_differences_and_host_info_survives_sending():
    info = make(arguments=("--data", "/d"), paths={"/d": True}, settings={"balance": [1, 2]}, node_rank=1)
    assert compare(info, info, 0.0) == host_info.HostDifferences()
    assert host_info.from_message(json.loads(json.dumps(info, default=dataclasses.asdict))) == info


@settings(max_examples=50, deadline=None)
@given(st.recursive(st.none() | st.integers() | st.text(), lambda c: st.lists(c) | st.dictionaries(st.text(), c)))
def test_invalid_host_info_raises_nothing_but_value_error(raw):
    with pytest.raises(ValueError):
        host_info.from_message(raw)


@pytest.mark.parametrize(
    ("changes", "clock_offset_s", "expected"),
    [
        ({"torch": "2.13.1"}, 0.0, "these work together"),
        ({"source": "t"}, 0.0, "same version on box1"),
        ({"siblings": {"model.py": "2"}}, 0.0, "model.py beside the script: the code on box2"),
        ({"paths": {"/d": False}}, 0.0, "/d exists on box1 (10.0.0.1), but not on box2"),
        ({}, -2.5, "2.5 s behind"),
        ({}, 1.5, "1.5 s ahead of"),
        ({"settings": {"project_dir": "elsewhere", "log_every_s": 1.0}}, 0.5, ""),
    ],
)
def test_notes_are_no_errors(changes, clock_offset_s, expected):
    here = make(siblings={"model.py": "1", "other.py": "1"}, paths={"/d": True})
    there = make("box2", "10.0.0.2", **{"paths": {"/d": True}, **changes})
    found = compare(here, there, clock_offset_s)
    assert not found.errors and len(found.notes) == bool(expected) and all(expected in note for note in found.notes)


def test_ranks_follow_names_not_arrival_and_fixed_ones_hold():
    first, a, b, c = make(), make("a", "10.0.0.2"), make("b", "10.0.0.3"), make("c", "10.0.0.4", node_rank=1)
    assert world.order([first, b, a], 3) == world.order([first, b, a], 4) == (0, 2, 1)
    assert world.order([first, b, c, a], 4) == (0, 2, 3, 1)
    same_rank = dataclasses.replace(c, host_name="d")
    with pytest.raises(ConfigError, match=r"--node-rank 1 is given on c \(10.0.0.4\) and on d"):
        world.order([first, c, same_rank], 3)
    with pytest.raises(ConfigError, match="node 0 is box1"):
        world.order([first, dataclasses.replace(c, node_rank=0)], 2)


def test_the_world_counts_ranks_and_shares_over_all_machines():
    machines = [make(slots=2), make("box2", "10.0.0.2", slots=1)]
    built = world.build_world(machines, {"balance": [3, 2, 1]})
    assert (built.world_size, built.first_rank(1), built.describe_ranks(0)) == (3, 2, "ranks 0-1")
    with pytest.raises(ConfigError, match=r"2 shares for 3 ranks \(2 on box1, 1 on box2\)"):
        world.build_world(machines, {"balance": (1, 2)})
    own = [WorkerSpec(device="cpu", device_names=("CPU",), throttle={"factor": 0.5})]
    sent = json.loads(json.dumps(built, default=dataclasses.asdict))
    (joined,) = assign(own, world.from_message(sent).assignments(1, "10.0.0.1:5"))
    assert (joined.rank, joined.local_rank, joined.node_rank, joined.world_size, joined.num_nodes) == (2, 0, 1, 3, 2)
    assert joined.device_names == ("box1 CPU", "box1 CPU", "box2 CPU") and joined.interface == "eth0"
    assert joined.throttle == {"factor": 0.5} and joined.store == "10.0.0.1:5"
    same = world.build_world([make(), make()], {})
    assert [machine.name for machine in same.machines] == ["box1 (10.0.0.1) #1", "box1 (10.0.0.1) #2"]


def test_gpus_of_all_machines_sum_over_nccl_first():
    gpu, cpu = DeviceSlot("cuda:0", "GPU", 4, inner_backend="nccl"), DeviceSlot("cpu", "CPU", 2)
    backends = {}
    for name, slots in {"gpus": [(gpu,), (gpu,)], "all": [(gpu, cpu), (gpu, cpu)], "one": [(gpu, cpu), (cpu,)]}.items():
        built = world.build_world([make(slots=slots[0]), make("box2", "10.0.0.2", slots=slots[1])], {})
        sent = world.from_message(json.loads(json.dumps(built, default=dataclasses.asdict)))
        assert {part.backend for part in sent.assignments(0, "s")} == {"nccl" if name == "gpus" else "gloo"}
        backends[name] = [line.partition("threads, ")[2] for line in sent.describe()]
    assert backends == {
        "gpus": ["nccl", "nccl"],
        "all": ["nccl + gloo", "gloo", "nccl", "gloo"],
        "one": ["gloo", "gloo", "gloo"],
    }


@contextlib.asynccontextmanager
async def _connected():
    """Two ends of one connection; the first one's raw writer as well."""
    accepted = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(
        lambda *streams: accepted.set_result(streams), "127.0.0.1", 0, limit=MAX_MESSAGE_BYTES
    )
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=MAX_MESSAGE_BYTES)
    ends = Connection(reader, writer), Connection(*await accepted)
    try:
        yield *ends, writer
    finally:
        for end in ends:
            end.close()
        server.close()


def test_messages_arrive_whole_in_order_and_the_last_one_before_the_end():
    async def exchange():
        async with _connected() as (ours, theirs, _):
            for number in range(100):
                ours.send("note", number=number, filler="x" * 2000)
            _, received = await asyncio.gather(ours.finish(0.1), _all_of(theirs))
            return received, theirs.lost

    received, lost = asyncio.run(exchange())
    assert [message["number"] for message in received] == list(range(100)) and "closed" in lost


async def _all_of(connection):
    return [message async for message in connection.messages()]


@pytest.mark.parametrize(
    "data", [b"\n", b"[1]\n", b'{"kind": 1}\n', b"\xff\xfe\n", b"x" * (2 << 20), b"[" * 50_000 + b"\n"]
)
def test_nonsense_ends_a_connection_and_nothing_else(data):
    async def exchange():
        async with _connected() as (_, theirs, writer), asyncio.timeout(5):
            writer.write(data)
            return await theirs.receive(), theirs.lost

    assert asyncio.run(exchange()) == (None, "it sent something that is not a message of Evenload")


def test_silence_is_noticed_and_heartbeats_break_it(monkeypatch):
    monkeypatch.setattr(connections, "SILENCE_S", 0.4)
    monkeypatch.setattr(connections, "HEARTBEAT_S", 0.05)

    async def exchange():
        async with _connected() as (ours, theirs, _), asyncio.timeout(5):
            ours.start_heartbeats()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.8):
                    await theirs.receive()
            assert not theirs.lost
            ours._heartbeats.cancel()
            assert await theirs.receive() is None
            return theirs.lost

    assert "nothing was received" in asyncio.run(exchange())


@pytest.mark.parametrize("wakes_to", ["a message", "the end", "an error"])
def test_a_system_that_slept_has_been_silent_whatever_it_finds(monkeypatch, wakes_to):
    slept_s = [0.0]
    monkeypatch.setattr(connections, "boottime_s", lambda: time.monotonic() + slept_s[0])

    async def exchange():
        async with _connected() as (ours, theirs, writer), asyncio.timeout(5):
            receiving = asyncio.create_task(theirs.receive())
            await asyncio.sleep(0.05)
            slept_s[0] = connections.SILENCE_S
            if wakes_to == "a message":
                ours.send("note")
            elif wakes_to == "the end":
                ours.close()
            else:
                writer.transport.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
                )
                writer.transport.abort()
            return await receiving, theirs.is_silent, theirs.lost[:20]

    assert asyncio.run(exchange()) == (None, True, "nothing was received")


@pytest.fixture
def monitors():
    """A coordinator's and a member's monitor, connected; the member's clock is 100 s ahead."""
    loops = EventLoopThread(), EventLoopThread()
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()

    async def open_connection(end):
        return Connection(*await asyncio.open_connection(sock=end, limit=MAX_MESSAGE_BYTES))

    async def coordinator():
        peer = Peer(await open_connection(ours), "box2", "rank 1", clock_offset_s=100.0)
        machines = (Machine("box1", "127.0.0.1", "lo", ()), Machine("box2", "127.0.0.1", "lo", (), "127.0.0.1:9"))
        return CoordinatorMonitor(loops[0], RunState(0, machines, ((0, 1),)), {1: peer}, lambda: asyncio.sleep(0))

    async def member():
        return MemberMonitor(loops[1], await open_connection(theirs), "box1")

    made = loops[0].run(coordinator()), loops[1].run(member())
    yield made
    for monitor in made:
        monitor.close()


def _wait(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _event(monitor):
    found = []
    _wait(lambda: found or found.extend(monitor.received()) or found)
    return found[0]


def test_times_are_by_the_coordinators_clock(monitors):
    coordinator, member = monitors
    member.send(COORDINATOR, "worker_state", worker="worker-1", time_s=1101.0)
    event = _event(coordinator)
    assert (event.node, event.kind, event.content["time_s"]) == (1, "worker_state", 1001.0)
    coordinator.send(1, "kill_worker", worker="worker-1")
    assert _event(member).content["worker"] == "worker-1"
    member.end_run(FailureCause("SIGINT on box2", 130, time_s=1103.0))
    _wait(lambda: coordinator.end_cause is not None)
    assert coordinator.end_cause.time_s == 1003.0


def test_the_cause_of_an_end_reaches_all_at_any_length(monitors):
    coordinator, member = monitors
    coordinator.end_run(FailureCause("x" * 3_000_000))
    _wait(lambda: member.end_cause is not None)
    assert member.end_cause.text.startswith("xxx")


def test_all_end_once_the_coordinator_says_so(monitors):
    coordinator, member = monitors
    assert member.end_code is None
    coordinator.report_ended(75)
    _wait(lambda: member.end_code == 75)
    member.close()
    assert not coordinator.received() and coordinator.end_cause is None


def test_each_side_notices_the_loss_of_the_other(monitors):
    coordinator, member = monitors
    member._loop.run(_close(member._connection))
    lost = _event(coordinator)
    assert cause_of_loss(lost).text.startswith("box2 (rank 1) is gone: it closed the connection.")
    _wait(lambda: member.cut_off is not None)
    assert cause_of_loss(member.cut_off).text.startswith("box1, the coordinator, is gone:")
    assert not member.cut_off.is_silent


def test_a_message_that_lacks_something_ends_the_connection(monitors):
    coordinator, member = monitors
    coordinator._loop.call_soon(lambda: coordinator._send_all("silence"))
    assert "it sent something that is not a message of Evenload" in _lost(member).reason
    assert isinstance(_event(coordinator), PeerLost)


def _lost(member):
    _wait(lambda: member.cut_off)
    return member.cut_off


def test_the_endpoint_of_a_coordinator_that_began_alone_is_named_once(monitors):
    coordinator, _ = monitors
    for endpoint in ("10.0.0.1:29500", "10.0.0.2:29500"):
        coordinator.name_endpoint(endpoint)
    assert [machine.endpoint for machine in coordinator.machines] == ["10.0.0.1:29500", "127.0.0.1:9"]


def test_silence_is_known_as_such(monitors):
    coordinator, member = monitors
    coordinator.limit_silence(0.2)  # nobody sends heartbeats here
    _wait(lambda: member.cut_off is not None)
    assert member.cut_off.is_silent and "nothing was received for 0 s" in member.cut_off.reason


async def _close(connection):
    connection.close()


def _facts(**changes):
    address = numeric("10.0.0.1", 29500)
    local = HostReport("box2", "0.1.0", "3.11.7", "2.13.0", script="train.py", digest="d")
    remote = HostReport("box1", "0.1.0", "3.11.9", "2.13.0", "eth0", 1500, "train.py", "d")
    measurement = HostMeasurement(remote, 0.0002, 0.0, sent_bytes_per_s=117e6, received_bytes_per_s=117e6)
    for key in [key for key in changes if key in {f.name for f in dataclasses.fields(HostMeasurement)}]:
        measurement = dataclasses.replace(measurement, **{key: changes.pop(key)})
    for key in [key for key in changes if key.startswith("remote_")]:
        remote = dataclasses.replace(measurement.remote, **{key.removeprefix("remote_"): changes.pop(key)})
        measurement = dataclasses.replace(measurement, remote=remote)
    for key in [key for key in changes if key.startswith("local_")]:
        local = dataclasses.replace(local, **{key.removeprefix("local_"): changes.pop(key)})
    values = {
        "addresses": (address,),
        "route": Route("eth0", "10.0.0.2", 1500),
        "local": local,
        "reached": address,
        "measurement": measurement,
    }
    return HostFacts(Endpoint("box1"), **{**values, **changes})


LOST = ConnectFailure("silent", 3.0)
OFF = ConnectFailure("unreachable", 3.1, "no route")
ADDRESS = numeric("10.0.0.1", 29500)
FOLDER = DataSummary("/d", "folder", 3, 10_000_000, "x", "ext4 /dev/sda1")


@pytest.mark.parametrize(
    ("check", "changes", "status", "expected"),
    [
        ("interface", {"route": Route("wlan0", "10.0.0.2", 1500)}, "warn", "wireless"),
        ("interface", {"route": Route("docker0", "172.17.0.1", 1500)}, "warn", "containers"),
        ("interface", {"route": None}, "fail", "no interface"),
        ("versions", {"remote_evenload": "0.2.0"}, "fail", "evenload==0.1.0"),
        ("versions", {"remote_python": "3.12.1"}, "fail", "uv venv --python 3.11"),
        ("versions", {"remote_torch": "2.13.0+cu128"}, "warn", "2.13.0+cu128 there"),
        ("versions", {"local_torch": ""}, "fail", "on this machine"),
        ("clocks", {"clock_offset_s": 5.0}, "warn", "5.0 s ahead"),
        ("port", {"reached": None, "measurement": None, "failures": ((ADDRESS, OFF),)}, "fail", "ping -c 3 10.0.0.1"),
        ("other_ports", {"inward_failure": LOST}, "fail", "ufw allow from 10.0.0.1   # here"),
        ("round_trip", {"round_trip_s": 0.02}, "warn", "20.00 ms"),
        ("round_trip", {"interrupted": "it closed", "measurement": None}, "fail", "it closed"),
        ("bandwidth", {"received_bytes_per_s": 1.25e6}, "warn", "10 Mbit/s back; the gradients of ten million parameters"),
        ("exchange", {"sent_bytes_per_s": 1.25e6}, "ok", 'exact result: wire="fp32"; cheapest at all: wire="powersgd"'),
        ("bandwidth", {"sent_bytes_per_s": 1.25e9, "received_bytes_per_s": 1.25e9}, "ok", "10.00 Gbit/s there"),
        ("bandwidth", {"both_bytes_per_s": 70e6}, "ok", "936 Mbit/s back, 560 Mbit/s each way at once"),
        ("exchange", {"both_bytes_per_s": 40e6}, "ok", 'average): wire="fp32" 1 s'),
        ("code", {"local_script": "", "local_digest": ""}, "skip", "--script train.py"),
        ("code", {"local_digest": ""}, "fail", "can't be read here"),
        ("code", {"remote_script": "", "remote_digest": ""}, "skip", "doctor --serve --script train.py"),
        ("data", {"local_data": FOLDER}, "skip", "doctor --serve --data /d"),
        ("data", {"local_data": DataSummary("/d", "missing")}, "fail", "on this machine"),
        ("data", {"local_data": FOLDER, "remote_data": DataSummary("/d", "missing")}, "fail", "on the other machine"),
        ("data", {"local_data": FOLDER, "remote_data": FOLDER}, "ok", "each with its own copy"),
        ("data", {"local_data": FOLDER, "remote_data": dataclasses.replace(FOLDER, digest="y")}, "fail", "different names"),
    ],
)  # fmt: skip
def test_findings(check, changes, status, expected):
    finding = getattr(hosts_findings, check)(_facts(**changes))
    assert finding.status == status, finding
    assert expected in finding.found + finding.fix
    assert finding.status not in ("warn", "fail") or (finding.fix and finding.expected)


def test_a_cancelled_receive_loses_no_message():
    """As where the rendezvous hands a connection over to the monitor."""

    async def exchange():
        async with _connected() as (ours, theirs, _), asyncio.timeout(5):
            task = asyncio.create_task(theirs.receive())
            await asyncio.sleep(0.05)
            ours.send("start")
            task.cancel()
            await asyncio.wait([task])
            ours.send("end")
            return task.cancelled(), [(await theirs.receive())["kind"] for _ in range(2)]

    assert asyncio.run(exchange()) == (True, ["start", "end"])


def test_an_interface_that_the_user_fixed_for_gloo_holds(monkeypatch):
    assert chosen_interface("127.0.0.1") == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0,ib1")
    assert chosen_interface("127.0.0.1") == "ib0"


def test_the_file_that_would_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "pack"
    package.mkdir()
    for name in ("__init__.py", "__main__.py", "part.py"):
        (package / name).write_text("")
    (tmp_path / "train.py").write_text("")
    assert target_file(["train.py", "--lr"]).absolute() == tmp_path / "train.py"
    assert target_file(["-m", "pack.part"]) == package / "part.py"
    assert target_file(["-m", "pack"]) == package / "__main__.py"
