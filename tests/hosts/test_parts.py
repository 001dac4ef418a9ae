"""The parts of a meeting that are pure: what is read, compared, ordered, and said."""

import contextlib
import dataclasses
import json
import socket
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.cli.nodes import Spelled, read_terms
from evenload.doctor.checks import hosts_verdicts as verdicts
from evenload.doctor.checks.hosts_verdicts import Facts
from evenload.errors import ConfigError
from evenload.rendezvous import host_info as cards
from evenload.rendezvous import messages as wires
from evenload.rendezvous import world as worlds
from evenload.rendezvous.address import Route, chosen_interface, numeric
from evenload.rendezvous.connect import Miss
from evenload.rendezvous.host_info import Card, Seat, compare
from evenload.rendezvous.messages import Wire
from evenload.rendezvous.peer_monitor import Cause, Guest, GuestParty, PointParty
from evenload.rendezvous.probe import Data, Measured, Sheet
from evenload.rendezvous.settings import Endpoint, parse_endpoint, parse_nodes
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.target import target_file


def make(name="box1", address="10.0.0.1", seats=1, **changes):
    values = {
        "host_name": name,
        "address": address,
        "interface": "eth0",
        "machine": "m",
        "source": "s",
        "python": "3.11.7",
        "torch": "2.13.0+cpu",
        "script": "/home/u/train.py",
        "digest": "d",
        "beside": {},
        "arguments": (),
        "paths": {},
        "settings": {},
        "nodes": "2",
        "job": "",
        "node_rank": None,
        "seats": tuple(Seat("cpu", "CPU", 1) for _ in range(seats)),
        "backend": "gloo",
    }
    return Card(**{**values, **changes})


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
def test_endpoints_are_read_and_spelled(text, host, port):
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
    ("given_options", "told"),
    [
        ({"nodes": "2"}, "say where the machines meet"),
        ({"host": "box1"}, "say how many machines"),
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
        ({"nodes": "2", "host": "box1", "standalone": True}, "--standalone says one machine"),
        ({"nodes": "2", "host": "box1", "rdzv_backend": "etcd"}, "without etcd"),
        ({"wait_s": 3.0}, "--wait 3.0 has no effect on one machine"),
        ({"node_rank": 1}, "--node-rank 1 has no effect on one machine"),
        ({"max_restarts": 3}, "--max-restarts 3"),
    ],
)
def test_terms_that_contradict_or_do_nothing_are_refused(given_options, told):
    with pytest.raises(ConfigError, match=told):
        read_terms(Spelled(**given_options), None, ("train.py",))


def test_torchruns_spellings_are_ours():
    ours = read_terms(Spelled(nodes="2", host="box1:29400"), None, ("train.py", "--lr", "1"))
    assert ours is not None and ours.command == "evenload run --nodes 2 --host box1:29400 train.py --lr 1"
    theirs = Spelled(nnodes="2:2", rdzv_endpoint="box1:29400", rdzv_backend="c10d", max_restarts=0)
    static = Spelled(nnodes="2", master_addr="box1", master_port=29400)
    for spelled, port in ((theirs, None), (static, None), (Spelled(nodes="2", host="box1"), 29400)):
        assert read_terms(spelled, port, ("train.py", "--lr", "1")) == ours
    assert read_terms(Spelled(nnodes="1", max_restarts=0, standalone=True), 7, ("train.py",)) is None


def test_equal_machines_have_no_differences_and_cards_survive_the_way():
    card = make(arguments=("--data", "/d"), paths={"/d": True}, settings={"balance": [1, 2]}, node_rank=1)
    assert compare(card, card, 0.0) == cards.Differences()
    assert cards.from_message(json.loads(json.dumps(cards.as_message(card)))) == card


@settings(max_examples=50, deadline=None)
@given(st.recursive(st.none() | st.integers() | st.text(), lambda c: st.lists(c) | st.dictionaries(st.text(), c)))
def test_what_is_no_card_is_refused_and_never_more_than_that(raw):
    with pytest.raises(ValueError):
        cards.from_message(raw)


@pytest.mark.parametrize(
    ("changes", "clock_s", "told"),
    [
        ({"torch": "2.13.1"}, 0.0, "near enough"),
        ({"source": "t"}, 0.0, "same version on box1"),
        ({"beside": {"model.py": "2"}}, 0.0, "model.py beside the script is other code on box2"),
        ({"paths": {"/d": False}}, 0.0, "/d is there on box1 (10.0.0.1), but not on box2"),
        ({}, -2.5, "2.5 s behind"),
        ({}, 1.5, "1.5 s ahead of"),
        ({"settings": {"project_dir": "elsewhere", "log_every_s": 1.0}}, 0.5, ""),
    ],
)
def test_what_is_worth_a_line_keeps_nobody_from_training(changes, clock_s, told):
    here = make(beside={"model.py": "1", "other.py": "1"}, paths={"/d": True})
    there = make("box2", "10.0.0.2", **{"paths": {"/d": True}, **changes})
    found = compare(here, there, clock_s)
    assert not found.errors and len(found.notes) == bool(told) and all(told in note for note in found.notes)


def test_ranks_follow_names_not_arrival_and_fixed_ones_hold():
    point, a, b, c = make(), make("a", "10.0.0.2"), make("b", "10.0.0.3"), make("c", "10.0.0.4", node_rank=1)
    assert worlds.order([point, b, a], 3) == worlds.order([point, b, a], 4) == (0, 2, 1)
    assert worlds.order([point, b, c, a], 4) == (0, 2, 3, 1)
    twin = dataclasses.replace(c, host_name="d")
    with pytest.raises(ConfigError, match=r"--node-rank 1 is given on c \(10.0.0.4\) and on d"):
        worlds.order([point, c, twin], 3)
    with pytest.raises(ConfigError, match="node 0 is box1"):
        worlds.order([point, dataclasses.replace(c, node_rank=0)], 2)


def test_the_world_counts_ranks_and_shares_over_all_machines():
    machines = [make(seats=2, backend="nccl"), make("box2", "10.0.0.2", seats=1, backend="nccl")]
    world = worlds.build_world(machines, {"balance": [3, 2, 1]})
    assert (world.world_size, world.backend, world.first_rank(1), world.ranks(0)) == (3, "nccl", 2, "ranks 0-1")
    with pytest.raises(ConfigError, match=r"2 shares for 3 ranks \(2 on box1, 1 on box2\)"):
        worlds.build_world(machines, {"balance": (1, 2)})
    assert worlds.build_world([machines[0], make("box2", backend="gloo")], {}).backend == "gloo"
    own = [WorkerSpec(device="cpu", device_names=("CPU",), throttle={"factor": 0.5})]
    (joined,) = worlds.join_world(own, worlds.from_message(worlds.as_message(world)), 1, "10.0.0.1:5")
    assert (joined.rank, joined.local_rank, joined.node_rank, joined.world_size, joined.num_nodes) == (2, 0, 1, 3, 2)
    assert joined.device_names == ("box1 CPU", "box1 CPU", "box2 CPU") and joined.interface == "eth0"
    assert joined.throttle == {"factor": 0.5} and joined.store == "10.0.0.1:5"
    same = worlds.build_world([make(), make()], {})
    assert [machine.name for machine in same.machines] == ["box1 (10.0.0.1) #1", "box1 (10.0.0.1) #2"]


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    wires_made = Wire(ours), Wire(theirs)
    yield wires_made
    for wire in wires_made:
        wire.close()


def test_messages_arrive_whole_in_order_and_the_last_words_before_the_end(pair):
    ours, theirs = pair
    for number in range(100):
        ours.send("note", number=number, filler="x" * 2000)
    ours.finish(0.1)
    heard = []
    while not theirs.lost:
        heard += theirs.poll()
    assert [message["number"] for message in heard] == list(range(100)) and "closed" in theirs.lost


@pytest.mark.parametrize(
    "data", [b"\n", b"[1]\n", b'{"kind": 1}\n', b"\xff\xfe\n", b"x" * (2 << 20), b"[" * 50_000 + b"\n"]
)
def test_nonsense_ends_a_wire_and_nothing_else(pair, data):
    ours, theirs = pair
    connection = ours._socket
    connection.setblocking(True)
    connection.settimeout(0.2)
    with contextlib.suppress(OSError):
        connection.sendall(data)
    deadline = time.monotonic() + 5
    while not theirs.lost and time.monotonic() < deadline:
        assert theirs.poll() == []
        with contextlib.suppress(OSError):
            connection.sendall(b"")
    assert theirs.lost == "what it says is none of ours"


def test_silence_is_noticed_and_beats_break_it(pair, monkeypatch):
    monkeypatch.setattr(wires, "SILENT_S", 0.4)
    monkeypatch.setattr(wires, "BEAT_S", 0.05)
    ours, theirs = pair
    began = time.monotonic()
    while time.monotonic() - began < 0.8:
        ours.beat()
        assert theirs.poll() == [] and not theirs.lost
        time.sleep(0.01)
    while not theirs.lost:
        theirs.poll()
        assert time.monotonic() - began < 3
    assert "nothing was heard" in theirs.lost


def test_causes_are_ordered_by_the_meeting_points_clock(pair):
    ours, theirs = pair
    point = PointParty([Guest(ours, "box2", "rank 1", clock_s=100.0)], None, "busy")
    guest = GuestParty(theirs, "box1")
    guest.report(Cause("late by its own clock", time_s=1101.0))
    deadline = time.monotonic() + 5
    while not point.causes:
        point.poll()
        assert time.monotonic() < deadline
    (cause,) = point.causes
    assert cause.time_s == 1001.0 and cause.text == "late by its own clock"
    point.end(cause)
    while guest.verdict is None:
        guest.poll()
        assert time.monotonic() < deadline
    assert guest.verdict == cause and not guest.decides


def _facts(**changes):
    address = numeric("10.0.0.1", 29500)
    own = Sheet("box2", "0.1.0", "3.11.7", "2.13.0", script="train.py", digest="d")
    theirs = Sheet("box1", "0.1.0", "3.11.9", "2.13.0", "eth0", 1500, "train.py", "d")
    measured = Measured(theirs, 0.0002, 0.0, there=117e6, back=117e6)
    for key in [key for key in changes if key in {f.name for f in dataclasses.fields(Measured)}]:
        measured = dataclasses.replace(measured, **{key: changes.pop(key)})
    for key in [key for key in changes if key.startswith("their_")]:
        theirs = dataclasses.replace(measured.theirs, **{key.removeprefix("their_"): changes.pop(key)})
        measured = dataclasses.replace(measured, theirs=theirs)
    for key in [key for key in changes if key.startswith("own_")]:
        own = dataclasses.replace(own, **{key.removeprefix("own_"): changes.pop(key)})
    values = {
        "addresses": (address,),
        "route": Route("eth0", "10.0.0.2", 1500),
        "own": own,
        "reached": address,
        "measured": measured,
    }
    return Facts(Endpoint("box1"), **{**values, **changes})


LOST = Miss("silent", 3.0)
OFF = Miss("unreachable", 3.1, "no route")
ADDRESS = numeric("10.0.0.1", 29500)
FOLDER = Data("/d", "folder", 3, 10_000_000, "x", "ext4 /dev/sda1")


@pytest.mark.parametrize(
    ("check", "changes", "status", "told"),
    [
        ("interface", {"route": Route("wlan0", "10.0.0.2", 1500)}, "warn", "wireless"),
        ("interface", {"route": Route("docker0", "172.17.0.1", 1500)}, "warn", "containers"),
        ("interface", {"route": None}, "fail", "no interface"),
        ("versions", {"their_evenload": "0.2.0"}, "fail", "evenload==0.1.0"),
        ("versions", {"their_python": "3.12.1"}, "fail", "uv venv --python 3.11"),
        ("versions", {"their_torch": "2.13.0+cu128"}, "warn", "2.13.0+cu128 there"),
        ("versions", {"own_torch": ""}, "fail", "on this machine"),
        ("clocks", {"clock_s": 5.0}, "warn", "5.0 s ahead"),
        ("port", {"reached": None, "measured": None, "misses": ((ADDRESS, OFF),)}, "fail", "ping -c 3 10.0.0.1"),
        ("other_ports", {"from_door": LOST}, "fail", "ufw allow from 10.0.0.1   # here"),
        ("round_trip", {"round_trip_s": 0.02}, "warn", "20.00 ms"),
        ("round_trip", {"broken": "it closed", "measured": None}, "fail", "it closed"),
        ("bandwidth", {"back": 1.25e6}, "warn", "10 Mbit/s back; the gradients of ten million parameters"),
        ("bandwidth", {"there": 1.25e9, "back": 1.25e9}, "ok", "10.00 Gbit/s there"),
        ("code", {"own_script": "", "own_digest": ""}, "skip", "--script train.py"),
        ("code", {"own_digest": ""}, "fail", "can't be read here"),
        ("code", {"their_script": "", "their_digest": ""}, "skip", "doctor --serve --script train.py"),
        ("data", {"own_data": FOLDER}, "skip", "doctor --serve --data /d"),
        ("data", {"own_data": Data("/d", "missing")}, "fail", "on this machine"),
        ("data", {"own_data": FOLDER, "their_data": Data("/d", "missing")}, "fail", "on the other machine"),
        ("data", {"own_data": FOLDER, "their_data": FOLDER}, "ok", "each with its own copy"),
        ("data", {"own_data": FOLDER, "their_data": dataclasses.replace(FOLDER, digest="y")}, "fail", "other names or contents"),
    ],
)  # fmt: skip
def test_verdicts(check, changes, status, told):
    finding = getattr(verdicts, check)(_facts(**changes))
    assert finding.status == status, finding
    assert told in finding.found + finding.fix
    assert finding.status not in ("warn", "fail") or (finding.fix and finding.expected)


def test_what_comes_behind_a_message_stays(pair):
    ours, theirs = pair
    for kind in ("go", "end"):
        ours.send(kind)
    deadline = time.monotonic() + 5
    while (first := theirs.take()) is None:
        assert time.monotonic() < deadline
    assert first["kind"] == "go" and [message["kind"] for message in theirs.poll()] in (["end"], [])


def test_a_story_of_any_length_travels(pair):
    ours, theirs = pair
    guest = GuestParty(ours, "box1")
    point = PointParty([Guest(theirs, "box2", "rank 1", clock_s=0.0)], None, "busy")
    guest.report(Cause("x" * 3_000_000))
    deadline = time.monotonic() + 5
    while not point.causes:
        point.poll()
        assert time.monotonic() < deadline
    assert point.causes[0].text.startswith("xxx") and not theirs.lost


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
