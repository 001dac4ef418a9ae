"""How a run on two machines ends: an error, a signal or a death on one is reported on both, and nothing is left."""

import signal
import time

import pytest

from tests.system.launch.scripts import assert_gone
from tests.system.rendezvous.side_by_side import SideBySide
from tests.system.rendezvous.typed import FOREVER, on_both


def _wait_ready(folder, timeout_s=60):
    """Waits for `ready()` on both machines; the workers' pids."""
    files = [folder / f"box{rank + 1}" / f"ready-{rank}" for rank in range(2)]
    deadline = time.monotonic() + timeout_s
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(file.read_text()) for file in files]


def _ends(typed, expected, pids=()):
    """How both ended: codes, screens, and the seconds from now until both printed why."""
    began = time.monotonic()
    for one in typed:
        one.until(expected)
    seconds = time.monotonic() - began
    ends = [one.end(60) for one in typed]
    assert_gone(pids)
    return [code for code, _ in ends], [text for _, text in ends], seconds


def _error(boxes, folder):
    body = """
from evenload.errors import PeerLostError
ready()
wait_for("../box1/ready-0", "../box2/ready-1")
def loss_fn(batch):
    raise ValueError("a broken batch")
if spec.rank == 0:
    raise PeerLostError("rank 1 is gone")
Path("assignment").write_text(f"{spec.node_rank} of {spec.num_nodes}, local {spec.local_rank}, {spec.interface}")
time.sleep(0.7)
worker.progress.step = 12
loss_fn(None)
"""
    typed = on_both(boxes, folder, body)
    pids = _wait_ready(folder)
    return _ends(typed, "a broken batch", pids), (folder / "box2" / "assignment").read_text()


def _ctrl_c(boxes, folder):
    typed = on_both(boxes, folder, FOREVER)
    pids = _wait_ready(folder)
    typed[1].process.send_signal(signal.SIGINT)
    return _ends(typed, "ranks ended", pids)


def _death(box):
    def act(boxes, folder):
        typed = on_both(boxes, folder, FOREVER)
        pids = _wait_ready(folder)
        typed[box].process.kill()
        typed[box].process.wait()
        return _ends([typed[1 - box]], "is gone", pids)

    return act


def _late_failure(boxes, folder):
    body = """
ready()
if spec.rank == 1:
    wait_for("../box1/ready-0")
    time.sleep(1.0)
    sys.exit(7)
"""
    return _ends(on_both(boxes, folder, body), "exit code 7")


@pytest.fixture(scope="module")
def ends(can_make_machines, tmp_path_factory):
    scenarios = {"error": _error, "ctrl_c": _ctrl_c, "death_0": _death(0), "death_1": _death(1), "late": _late_failure}
    return SideBySide(tmp_path_factory.mktemp("ends"), 3, {name: (2, act) for name, act in scenarios.items()})


@pytest.mark.slow
def test_an_error_on_one_machine_is_reported_on_both_not_its_consequence_on_the_other(ends):
    (codes, screens, seconds), expected = ends["error"]
    assert codes == [1, 1] and seconds < 10
    for text in screens:
        assert "rank 1 (cpu on box2) failed at step 12: ValueError: a broken batch\nTraceback" in text
        assert text.count("Traceback") == 1 and "in loss_fn" in text and "PeerLost" not in text
    assert expected == "1 of 2, local 0, eth0"


def test_ctrl_c_on_one_machine_ends_all(ends):
    codes, (first, second), seconds = ends["ctrl_c"]
    assert codes == [130, 130] and seconds < 10
    assert "evenload: SIGINT on box2: the 2 ranks ended" in first and "evenload: SIGINT: the 2 ranks ended" in second


@pytest.mark.parametrize(("box", "who"), [(0, "box1, the coordinator, is gone"), (1, "box2 (rank 1) is gone")])
def test_the_death_of_a_supervisor_ends_the_other_machine_with_a_clear_message(ends, box, who):
    codes, (text,), seconds = ends[f"death_{box}"]
    assert codes == [1] and seconds < 10
    assert who in text and "Start the same command again on all machines" in text


def test_a_machine_that_ends_well_waits_for_the_others_and_shares_their_end(ends):
    codes, screens, _ = ends["late"]
    assert codes == [7, 7]
    assert all("rank 1 (cpu on box2) failed: it ended with exit code 7" in text for text in screens)
