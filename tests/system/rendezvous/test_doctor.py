"""`evenload doctor --host` on one machine, `--serve` on the other: every finding by a real network."""

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import evenload
from evenload.cli.main import main
from tests.system.rendezvous.side_by_side import SideBySide
from tests.system.rendezvous.typed import Typed, type_run, write_script


@contextlib.contextmanager
def _serving(box, folder, *options):
    """`evenload doctor --serve` on a machine, until the block ends."""
    with Typed(box, folder, "doctor", "--serve", *options) as server:
        server.until("answering at port")
        yield server
        server.process.send_signal(signal.SIGINT)
        code, text = server.end(10)
        assert code == 0 and "Traceback" not in text, text


def _look(box, folder, host, *options, env=None):
    """The exit code and the findings by name, from its JSON."""
    code, text = Typed(box, folder, "doctor", "--host", host, "--json", *options, env=env).end(60)
    expected = json.loads(text[text.index("{") :])
    assert code == expected["exit_code"]
    return code, {finding["name"]: finding for finding in expected["findings"]}


def _fit_and_unfit(boxes, folder):
    """All is well at 1 Gbit/s; then the link, the MTU, the code and the data change."""
    box1, box2 = boxes
    for box in boxes:
        write_script(folder / box.name, "pass")
        (folder / box.name / "data" / "deep").mkdir(parents=True)
        (folder / box.name / "data" / "deep" / "part").write_bytes(b"1" * 1000)
        box.limit(1000)
    asked = ("--script", "train.py", "--data", "data")
    with _serving(box1, folder / "box1", *asked) as server:
        fit = _look(box2, folder / "box2", "box1", *asked)
        server.until("box2 (10.77.0.2) examines this machine")
        box1.limit(100)
        box2.limit(100)
        box2.set_mtu(1400)
        (folder / "box2" / "train.py").write_text("other")
        (folder / "box2" / "data" / "deep" / "part").write_bytes(b"1")
        unfit = _look(box2, folder / "box2", "box1", *asked)
        return fit, unfit, server.text


def _apart(boxes, folder):
    box1, box2 = boxes
    found = [_look(box2, folder / "box2", host) for host in ("box9", "box1:29501", "box2")]
    box1.drop_port(29501)
    return [*found, _look(box2, folder / "box2", "box1:29501")]


def _lost(boxes, folder):
    for box in boxes:
        box.set_mtu(9000)
        box.drop_picked_ports()
    with _serving(boxes[0], folder / "box1"):
        return _look(boxes[1], folder / "box2", "box1")


def _coordinator(boxes, folder):
    """A run that waits for its machines answers too; and this machine has another torch."""
    site = folder / "site" / "torch-2.9.1.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1\n")
    for box in boxes:
        write_script(folder / box.name, "pass")
    coordinator = type_run(boxes[0], folder / "box1", "--nodes", "2", "--host", "box1")
    coordinator.until("is the coordinator")
    old = {"PYTHONPATH": str(site.parent)}
    found = _look(boxes[1], folder / "box2", "box1", "--script", "train.py", env=old)
    coordinator.process.send_signal(signal.SIGINT)
    return found, coordinator.end()


def _run_at_a_doctor(boxes, folder):
    """A run comes to a doctor; and a second doctor wants the same port."""
    write_script(folder / "box2", "pass")
    with _serving(boxes[0], folder / "box1") as server:
        ends = [
            type_run(boxes[1], folder / "box2", "--nodes", "2", "--host", "box1").end(),
            Typed(boxes[0], folder / "two", "doctor", "--serve").end(),
        ]
        server.until("10.77.0.2 wants to train here, but this is the doctor")
        return ends


def _bare(boxes, folder):
    """The standard library alone, as where the installation is what is broken."""
    folder.mkdir()
    python = str(Path(sys.base_prefix, "bin", "python3"))
    home = str(Path(evenload.__file__).parents[1])
    start = f"import sys; sys.path.insert(0, {home!r}); from evenload.doctor.__main__ import main; sys.exit(main())"
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": folder}
    server = boxes[0].popen([python, "-S", "-c", start, "--serve"], **options)
    try:
        first = server.stdout.readline()
        client = boxes[1].popen([python, "-S", "-c", start, "--host", "box1"], **options)
        text, _ = client.communicate(timeout=60)
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=30)
    return first, text, server.returncode


@pytest.fixture(scope="module")
def looks(can_make_machines, tmp_path_factory):
    scenarios = {
        "fit": _fit_and_unfit,
        "apart": _apart,
        "lost": _lost,
        "coordinator": _coordinator,
        "run": _run_at_a_doctor,
        "bare": _bare,
    }
    return SideBySide(tmp_path_factory.mktemp("looks"), 3, {name: (2, act) for name, act in scenarios.items()})


@pytest.mark.slow
def test_all_is_well(looks):
    (code, found), _, served = looks["fit"]
    wrong = {name: finding for name, finding in found.items() if finding["status"] != "ok"}
    wrong.pop("bandwidth", None)  # a busy machine may be slower than its network
    assert not wrong and code in (0, 2), wrong
    assert found["name"]["found"] == "box1 is 10.77.0.1"
    assert found["interface"]["found"] == "eth0 (10.77.0.2) here, eth0 there"
    assert found["MTU"]["found"] == "1500 bytes here (eth0), 1500 there (eth0)"
    assert "data with 1 file, 0.0 MB on both, each with its own copy" in found["same data"]["found"]
    assert "on the other machine type: evenload doctor --host 10.77.0.1:29500" in served


def test_a_slow_link_and_what_differs(looks):
    _, (code, found), _ = looks["fit"]
    speeds = [float(part.split()[0]) for part in found["bandwidth"]["found"].split(";")[0].split(", ")]
    assert "each way at once" in found["bandwidth"]["found"]
    assert found["bandwidth"]["status"] == "warn" and all(50 < speed < 130 for speed in speeds), found["bandwidth"]
    assert found["MTU"]["status"] == "warn" and found["MTU"]["mend"].startswith("sudo ip link set dev eth0 mtu 1400")
    assert found["same code"]["status"] == "fail" and found["same code"]["mend"].startswith("scp train.py box1:")
    assert found["same data"]["status"] == "fail" and found["same data"]["mend"].startswith("rsync -a data/ box1:")
    assert code == 1


def test_a_name_that_nobody_has(looks):
    code, found = looks["apart"][0]
    assert code == 1 and found["name"]["status"] == "fail" and "tee -a /etc/hosts" in found["name"]["mend"]
    assert {finding["status"] for name, finding in found.items() if name != "name"} == {"skip"}


def test_a_closed_port_and_a_firewall_are_distinguished(looks):
    _, (_, closed), _, (_, dropped) = looks["apart"]
    assert "nothing listens at that port" in closed["port"]["found"]
    assert closed["port"]["mend"].startswith("evenload doctor --serve --port 29501   # on box1")
    assert "it answers at port" in dropped["port"]["found"]
    assert "a firewall drops port 29501" in dropped["port"]["found"]
    assert "sudo ufw allow 29501/tcp   # on box1" in dropped["port"]["mend"]
    assert {closed["port"]["status"], dropped["port"]["status"]} == {"fail"}


def test_this_machine_itself(looks):
    _, found = looks["apart"][2]
    assert found["name"]["status"] == "warn" and "this machine itself" in found["name"]["found"]


def test_large_packets_and_picked_ports_that_are_lost(looks):
    code, found = looks["lost"]
    assert code == 1 and found["MTU"]["status"] == "fail"
    assert "small packets arrive, but 64 KiB from here to there did not" in found["MTU"]["found"]
    assert found["bandwidth"]["status"] == "skip" and found["port"]["status"] == "ok"
    assert found["other ports"]["status"] == "fail" and "ufw allow from 10.77.0.2" in found["other ports"]["mend"]


def test_the_coordinator_of_a_run_answers_and_other_versions_are_told(looks):
    (code, found), (ended, screen) = looks["coordinator"]
    assert code == 1 and found["versions"]["status"] == "fail" and "torch 2.9.1 here" in found["versions"]["found"]
    assert found["same code"]["status"] == "ok" and found["same data"]["status"] == "skip"
    assert found["clocks"]["status"] == "ok"
    assert ended == 130 and "Traceback" not in screen


def test_a_run_and_a_doctor_recognize_each_other(looks):
    (code, text), (other, expected) = looks["run"]
    assert code == 2 and "a doctor listens at port 29500 of box1, not a run" in text
    assert other == 2 and "port 29500 can't be opened here" in expected and "--port N" in expected


def test_it_works_without_any_package(looks):
    first, text, code = looks["bare"]
    assert "answering at port 29500" in first and code == 0
    assert "eth0 (10.77.0.2) here, eth0 there" in text and "bandwidth" in text and "Traceback" not in text
    assert "torch none" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--script", "train.py"], "--script train.py compares two machines"),
        (["--data", "x"], "--data x compares two machines"),
        (["--host", "a:b"], "'b' is not a port"),
        (["--host", "box1:0"], "a number from 1 to 65535"),
        (["--host", "box1:1", "--port", "2"], "name two ports"),
        (["--serve", "--json"], "--json has no effect with --serve"),
        (["--serve", "--host", "192.0.2.7"], "this machine has no such address"),
        (["--serve", "--script", "none.py"], "--script none.py: it can't be read here"),
        (["--serve", "--data", "none"], "--data none: there is no such file or folder"),
        (["--host", "box1", "--backend", "gloo"], "--backend: without effect with --host"),
        (["--serve", "--full"], "--full: without effect with --serve"),
    ],
)
def test_wrong_uses_are_refused(tmp_path, capfd, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as leave:
        main(["doctor", *arguments])
    assert leave.value.code == 2 and expected in capfd.readouterr().err
