"""Rendezvous: by IPv6, by a name that is a loopback address there, beside other programs, with fewer machines than allowed."""

import signal
import sys
from pathlib import Path

import pytest

import evenload
from evenload.rendezvous import PROTOCOL
from tests.system.rendezvous.side_by_side import SideBySide
from tests.system.rendezvous.typed import PORT, Typed, type_run, write_script

HERE = Path(__file__).parent


def _type(box, folder, *options):
    """The rendezvous alone, typed on a machine."""
    write_script(folder, "pass")
    return Typed(box, folder, *options, "train.py", program=[str(HERE / "meet_only.py")])


def _texts(typed):
    texts = []
    for one in typed:
        code, text = one.end(60)
        assert code == 0 and "Traceback" not in text, text
        texts.append(text)
    return texts


def _all_type(*options):
    def act(boxes, folder):
        return _texts([_type(box, folder / box.name, *options) for box in boxes])

    return act


def _loopback_name(boxes, folder):
    """As Debian writes it: 127.0.1.1 box1, in box1's own /etc/hosts."""
    boxes[0].hosts_file.write_text("127.0.0.1 localhost\n127.0.1.1 box1\n")
    return _all_type("--nodes", "2", "--host", "box1")(boxes, folder)


def _one_machine(boxes, folder):
    """The first serves; the second finds the port taken by it, and joins."""
    options = ("--nodes", "2", "--host", "localhost")
    return _texts([_type(boxes[0], folder / str(number), *options) for number in range(2)])


def _fixed_ranks(boxes, folder):
    options = ("--nodes", "3", "--host", "box1")
    numbers = ((), ("--node-rank", "2"), ("--node-rank", "1"))
    return _texts([_type(box, folder / box.name, *options, *own) for box, own in zip(boxes, numbers, strict=True)])


OTHER_PROGRAM = f"""
import json, socket
def call(data):
    with socket.create_connection(("10.77.0.1", {PORT}), 5) as s:
        s.settimeout(0.3)
        try:
            s.sendall(data)
            s.recv(100)
        except OSError:
            pass
hello = dict(kind="hello", what="run", protocol={PROTOCOL}, evenload={evenload.__version__!r})
call(b"")
call(b"GET / HTTP/1.0\\r\\n\\r\\n")
call(b"[" * 100000 + b"\\n")
call(b"x" * 3000000)
call(json.dumps(hello).encode() + b"\\n")
call(json.dumps(dict(hello, info=dict(host_name="\\x1b[2J"), probe_port=0, probe_token="")).encode() + b"\\n")
call(json.dumps(dict(hello, what="doctor")).encode() + b"\\n" + b'{{"kind": "sink", "num_bytes": Infinity}}\\n')
"""


def _other_programs(boxes, folder):
    """Port scanners, garbage, and an Evenload that talks nonsense come first."""
    options = ("--nodes", "2", "--host", "box1")
    coordinator = _type(boxes[0], folder / "box1", *options)
    coordinator.until("is the coordinator")
    assert boxes[1].popen([sys.executable, "-S", "-c", OTHER_PROGRAM]).wait(60) == 0
    return _texts([coordinator, _type(boxes[1], folder / "box2", *options)])


def _late_member(boxes, folder):
    """Two machines train; a third one comes."""
    body = "ready()\nwait_for('../go')\n"
    typed = []
    for box in boxes:
        write_script(folder / box.name, body)
    for box in boxes[:2]:
        typed.append(type_run(box, folder / box.name, "--nodes", "1:2", "--host", "box1"))
    typed[0].until("rank 1 on box2")
    late = type_run(boxes[2], folder / "box3", "--nodes", "1:2", "--host", "box1").end(60)
    doctor = Typed(boxes[2], folder / "doctor", "doctor", "--host", "box1").end(60)
    (folder / "go").write_text("")
    return late, doctor, _texts(typed)


def _wrong_clock(boxes, folder):
    """A member of our own making, whose clock is 90 s behind: that of a namespace can't be set."""
    write_script(folder / "box1", "pass")
    coordinator = _type(boxes[0], folder / "box1", "--nodes", "3", "--host", "box1", "--wait", "30")
    coordinator.until("is the coordinator")
    arguments = [str(HERE / "late_clock.py"), str(folder / "box1" / "train.py"), "box1"]
    assert boxes[1].popen([sys.executable, *arguments]).wait(60) == 0
    coordinator.until("left: it was stopped there")
    coordinator.process.send_signal(signal.SIGTERM)
    coordinator.process.wait()
    return coordinator.text


@pytest.fixture(scope="module")
def rendezvous(can_make_machines, tmp_path_factory):
    scenarios = {
        "late": (3, _late_member),
        "fewer": (2, _all_type("--nodes", "1:4", "--host", "box1", "--wait", "2")),
        "ipv6": (2, _all_type("--nodes", "2", "--host", "[fd77::1]:29508")),
        "loopback": (2, _loopback_name),
        "one_machine": (1, _one_machine),
        "fixed": (3, _fixed_ranks),
        "other_programs": (2, _other_programs),
        "clock": (2, _wrong_clock),
    }
    return SideBySide(tmp_path_factory.mktemp("rendezvous"), 4, scenarios)


def test_fewer_machines_begin_after_the_time_that_was_reported(rendezvous):
    for rank, text in enumerate(rendezvous["fewer"]):
        assert f"rank {rank} of 2, node {rank} of 2, over eth0" in text


def test_ipv6(rendezvous):
    for text in rendezvous["ipv6"]:
        assert "store [fd77::1]:" in text and "names box1 CPU" in text


def test_a_name_that_is_a_loopback_address_there(rendezvous):
    first, second = rendezvous["loopback"]
    assert "at port 29500 of all its interfaces because box1 is not an address of its own" in first
    assert "rank 0 of 2, node 0 of 2, over eth0" in first and "store 127.0.0.1:" in first
    assert "over eth0 (10.77.0.2), which gloo and NCCL will use" in second and "store 10.77.0.1:" in second


def test_two_launches_on_one_machine(rendezvous):
    texts = sorted(text[text.index("rank ") :] for text in rendezvous["one_machine"])
    assert all(f"rank {rank} of 2, node {rank} of 2, over lo" in text for rank, text in enumerate(texts))


def test_ranks_that_users_fix_hold(rendezvous):
    for rank, text in zip((0, 2, 1), rendezvous["fixed"], strict=True):
        assert f"rank {rank} of 3, node {rank} of 3" in text


def test_other_programs_at_the_port_do_no_harm(rendezvous):
    for rank, text in enumerate(rendezvous["other_programs"]):
        assert f"rank {rank} of 2" in text and "\x1b" not in text
    assert "its introduction is invalid" in rendezvous["other_programs"][0]


def test_a_machine_that_is_too_late_is_refused_and_does_no_harm(rendezvous):
    (code, text), (looked, expected), _ = rendezvous["late"]
    assert looked == 1 and "no machine can join it now" in " ".join(expected.split())
    assert code == 2 and "began at" in text and "with box1, box2, and no machine can join it now" in text


def test_a_wrong_clock_is_reported(rendezvous):
    found = rendezvous["clock"]
    assert "s behind that of box1 (10.77.0.1); synchronize both: sudo timedatectl set-ntp true" in found
    assert any(f"box2 (10.77.0.2) is {seconds} s" in found for seconds in ("89.9", "90.0", "90.1"))
