"""Refused rendezvous: both sides print the reason, in time, with what to do."""

import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

import evenload
from evenload.rendezvous import settings
from tests.system.rendezvous.side_by_side import SideBySide
from tests.system.rendezvous.typed import on_both, type_run, write_script

REPORTED_S = 15.0
NOTHING = "raise SystemExit('it ran')"
WAIT = ("--wait", "4")
"""Shorter than by default, for the test's sake; see `test_the_default_limits_keep_the_promise`."""


def _ends(typed):
    """Both screens, after looking at what holds for all refusals."""
    screens = []
    for one in typed:
        code, text = one.end(60)
        assert code == 2, text
        assert "Traceback" not in text and "it ran" not in text, text
        screens.append(text)
    return screens


def _wrong_hosts(boxes, folder):
    """A name that nobody has, a closed port, a port that a firewall drops, an address without a machine."""
    box1, box2 = boxes
    box1.drop_port(29502)
    write_script(folder / "box1", NOTHING)
    coordinator = type_run(box1, folder / "box1", "--nodes", "2", "--host", "box1:29502")
    members = []
    for number, host in enumerate(("box9", "box1:29501", "box1:29502", "10.77.0.9")):
        write_script(folder / str(number), NOTHING)
        members.append(type_run(box2, folder / str(number), "--nodes", "2", "--host", host, *WAIT))
    screens = _ends(members)
    coordinator.until("1 of 2 machines is here")
    coordinator.process.send_signal(signal.SIGINT)
    return screens, coordinator.end()


def _missing(boxes, folder):
    for box in boxes[:2]:
        write_script(folder / box.name, NOTHING)
    options = ("--nodes", "3", "--host", "10.77.0.1", "--wait", "6")
    return _ends([type_run(box, folder / box.name, *options) for box in boxes[:2]])


def _other_torch(boxes, folder):
    """A stand-in for another version of an installed package: only its metadata, found first."""
    info = folder / "site" / "torch-2.9.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1\n")
    return _with_environment(boxes, folder, {"PYTHONPATH": str(folder / "site")})


def _other_evenload(boxes, folder):
    """A copy of Evenload itself, of another version."""
    home = folder / "other" / "evenload"
    shutil.copytree(Path(evenload.__file__).parent, home, ignore=shutil.ignore_patterns("__pycache__"))
    version = home / "version.py"
    version.write_text(re.sub(r'__version__ = ".*"', '__version__ = "0.0.9"', version.read_text()))
    return _with_environment(boxes, folder, {"PYTHONPATH": str(folder / "other")})


def _with_environment(boxes, folder, env):
    for box in boxes:
        write_script(folder / box.name, NOTHING)
    options = ("--nodes", "2", "--host", "box1")
    environments = (None, env)
    return _ends(
        [type_run(box, folder / box.name, *options, env=own) for box, own in zip(boxes, environments, strict=True)]
    )


def _differ(first=(), nodes=("--nodes", "2"), added="", extra=()):
    """The two machines get other options, code or arguments."""

    def act(boxes, folder):
        write_script(folder / "box1", NOTHING)
        write_script(folder / "box2", NOTHING + added)
        script = ("train.py", *extra)
        return _ends(
            [
                type_run(boxes[0], folder / "box1", *nodes, "--host", "box1", *first),
                type_run(boxes[1], folder / "box2", "--nodes", "2", "--host", "box1", script=script),
            ]
        )

    return act


def _shares(boxes, folder):
    return _ends(on_both(boxes, folder, NOTHING, "--balance", "1,2,3"))


def _picked_ports(boxes, folder):
    boxes[1].drop_picked_ports()
    return _ends(on_both(boxes, folder, NOTHING))


def _large_packets(boxes, folder):
    for box in boxes:
        box.set_mtu(9000)
    typed = on_both(boxes, folder, NOTHING, script=("train.py", "x" * 4000))
    for one in typed:
        # Each side must notice by itself, because no message arrives.
        one.until("large packets are lost on the way (MTU)", timeout_s=REPORTED_S + 10)
    typed[0].process.send_signal(signal.SIGINT)
    return [one.end() for one in typed]


def _other_program(boxes, folder):
    box1, box2 = boxes
    for box in boxes:
        write_script(folder / box.name, NOTHING)
    server = box1.popen([sys.executable, "-m", "http.server", "29500", "--bind", "10.77.0.1"], cwd=folder, stderr=-3)
    try:
        probe = "import socket; socket.create_connection(('10.77.0.1', 29500))"
        deadline = time.monotonic() + 20
        while box2.popen([sys.executable, "-S", "-c", probe], stderr=-3).wait():
            assert time.monotonic() < deadline
        return _ends([type_run(box, folder / box.name, "--nodes", "2", "--host", "box1") for box in boxes])
    finally:
        server.kill()
        server.wait()


def _ctrl_c(boxes, folder):
    """A member leaves and connects again; then the coordinator is stopped."""
    for box in boxes:
        write_script(folder / box.name, NOTHING)
    options = ("--nodes", "3", "--host", "box1")
    coordinator, member = (type_run(box, folder / box.name, *options) for box in boxes)
    coordinator.until("box2 (10.77.0.2) is here")
    member.process.send_signal(signal.SIGINT)
    left = member.end()
    coordinator.until("box2 (10.77.0.2) left: it was stopped there")
    again = type_run(boxes[1], folder / "box2", *options)
    again.until("connected to box1")
    coordinator.process.send_signal(signal.SIGINT)
    return left, coordinator.end(), again.end()


@pytest.fixture(scope="module")
def ends(can_make_machines, tmp_path_factory):
    scenarios = {
        "missing": (3, _missing),
        "wrong_hosts": (2, _wrong_hosts),
        "large_packets": (2, _large_packets),
        "picked_ports": (2, _picked_ports),
        "other_program": (2, _other_program),
        "torch": (2, _other_torch),
        "evenload": (2, _other_evenload),
        "settings": (2, _differ(("--seed", "1"))),
        "code": (2, _differ(added="\n# changed\n")),
        "arguments": (2, _differ(extra=("--lr", "1"))),
        "nodes": (2, _differ(nodes=("--nodes", "2:3"))),
        "shares": (2, _shares),
        "ctrl_c": (2, _ctrl_c),
    }
    return SideBySide(tmp_path_factory.mktemp("refusals"), 5, scenarios)


def test_the_default_limits_keep_the_promise():
    """15 s from the command to the message: a second to start, the limit, a last try that began before it."""
    assert settings.CONNECT_WAIT_S <= 11


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, ["--host box9: the name is unknown on this machine", "/etc/hosts"]),
        (1, ["nothing listens at that port", "on box1 type: evenload run --nodes 2 --host box1:29501 train.py"]),
        (2, ["a firewall drops the packets", "sudo ufw allow 29502/tcp", "evenload doctor --host box1:29502"]),
        (3, ["no machine answers at that address", "this one has 10.77.0.2 (eth0)"]),
    ],
)
def test_a_wrong_host_is_reported_with_what_to_do(ends, number, expected):
    screens, _ = ends["wrong_hosts"]
    assert all(part in screens[number] for part in expected), screens[number]


def test_the_coordinator_reports_who_is_missing_and_what_to_type_there(ends):
    _, (code, text) = ends["wrong_hosts"]
    assert code == 130 and "if that was done, type there: evenload doctor --host box1:29502" in text
    assert "type on each of the others: evenload run --nodes 2 --host box1:29502 train.py" in text


def test_a_machine_that_does_not_come_is_named_missing_on_all(ends):
    for text in ends["missing"]:
        assert "2 of 3 machines are here: box1, box2 (10.77.0.2)" in text
        assert "only 2 of 3 machines connected within 6 s" in text
        assert "type on each of the others: evenload run --nodes 3 --host 10.77.0.1:29500" in text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch", ["torch 2.9.1", "all machines need the same: on box2 (10.77.0.2): python -m pip install torch==2.1"]),
        ("evenload", ["has 0.0.9", f"evenload {evenload.__version__}", "python -m pip install evenload=="]),
        (
            "settings",
            [
                "seed is 1 on box1 (10.77.0.1) and not set on box2 (10.77.0.2)",
                "--project-dir and --log-every may differ",
            ],
        ),
        ("code", ["the script differs", "scp 10.77.0.1:"]),
        ("arguments", ["the script's arguments differ: none on box1 (10.77.0.1), --lr 1 on box2"]),
        ("nodes", ["--nodes 2:3 on box1 (10.77.0.1), --nodes 2 on box2 (10.77.0.2)"]),
        ("shares", ["--balance 1,2,3: 3 shares for 2 ranks (1 on box1, 1 on box2)"]),
        ("picked_ports", ["box1 can't reach box2 at 10.77.0.2: no answer", "sudo ufw allow from"]),
    ],
)
def test_differences_are_reported_on_both(ends, name, expected):
    for text in ends[name]:
        for part in expected:
            assert part.replace("torch 2.9.1", "has 2.9.1") in text, text


def test_packets_too_large_for_the_network_are_found_before_the_ranks_hang(ends):
    (code, first), (other, second) = ends["large_packets"]
    assert (code, other) == (130, 2) and "it ran" not in first + second


def test_another_program_at_the_port_is_reported(ends):
    for text in ends["other_program"]:
        assert "the program that listens there is not Evenload" in text and "choose another port" in text


def test_ctrl_c_during_the_rendezvous_ends_it_for_one_or_for_all(ends):
    (left, _), (coordinator, expected), (again, text) = ends["ctrl_c"]
    assert (left, coordinator, again) == (130, 130, 2) and "left: it was stopped there" in expected
    assert "the rendezvous was stopped on box1" in text
