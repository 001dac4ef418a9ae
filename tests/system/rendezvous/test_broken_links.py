"""Networks that break while ranks wait for one that works in the script's own code, or for one another: no wait is for ever."""

import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from evenload.testing import hosts
from tests.system.launch.test_own_code import SLOW
from tests.system.rendezvous.typed import type_run, write_script

STEPS = SLOW.replace("for step in loader:", "for step in (one for _ in range(10_000) for one in loader):").replace(
    "    if step.index == 1:",
    "    Path('steps').write_text(str(step.index))\n    if step.index == 1:",
)
assert "10_000" in STEPS and "steps" in STEPS


@contextmanager
def _typed(boxes, folder, body, *words):
    for box in boxes:
        write_script(folder / box.name, body, initialised=False)
    options, env = ("--nodes", "2", "--host", boxes[0].name, "--wait", "1"), {"OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        yield [
            stack.enter_context(type_run(box, folder / box.name, *options, script=("train.py", *words), env=env))
            for box in boxes
        ]


def _wait_for(path, typed, timeout_s=90):
    end_s = time.monotonic() + timeout_s
    while not path.exists():
        assert all(one.process.poll() is None for one in typed), [one.text for one in typed]
        assert time.monotonic() < end_s, [one.text for one in typed]
        time.sleep(0.05)


def _connected_ports(pid):
    """The local ports of a process's TCP connections, in the namespace that it is in."""
    own = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            own.add(str(fd.readlink()))
    rows = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "01" and f"socket:[{row[9]}]" in own}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_connections_between_two_ranks_that_break_end_the_run_with_the_place_of_each(can_make_machines, tmp_path):
    """The supervisors hear each other all the time, so neither machine is lost."""
    script = STEPS.replace("timeout_s=2.0", "timeout_s=600.0")
    with hosts.machines(2) as boxes, _typed(boxes, tmp_path, script) as typed:
        _wait_for(tmp_path / "box2" / "steps", typed)
        ports = _connected_ports(int((tmp_path / "box2" / "pid-1").read_text()))
        assert ports
        for port in ports:
            boxes[1].drop_port(port)
        began_s = time.monotonic()
        ends = [one.end(90) for one in typed]
        assert time.monotonic() - began_s < 60
    for code, screen in ends:
        assert code == 1 and "all ranks have waited for one another for " in screen, screen
        assert "rank 0 (cpu on box1), last seen at train.py:" in screen, screen
        assert "rank 1 (cpu on box2), last seen at train.py:" in screen, screen


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_machine_that_is_cut_off_while_rank_0_evaluates_is_found(can_make_machines, tmp_path):
    places = ("between two steps", "until killed")
    with hosts.machines(2) as boxes, _typed(boxes, tmp_path, SLOW, *places) as typed:
        _wait_for(tmp_path / "box1" / "works", typed)
        time.sleep(1)  # all machines know that all ranks train
        boxes[1].unplug()
        typed[0].until("box2 (rank 1) is gone: nothing was received for 5 s", timeout_s=30)
        (tmp_path / "box1" / "finish").touch()
        code, screen = typed[0].end(60)
    assert code == 0 and "1 rank goes on" in screen and "ranks 1" in screen, screen
