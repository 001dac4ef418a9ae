"""Ranks that are stopped, hang or fail while they leave or join, and a launcher that is stopped: the run goes on, and ends."""

import os
import signal
import time

from evenload.training.launch.run_control import change_devices_of
from tests.system.launch.scripts import Started, assert_gone
from tests.system.launch.test_elastic import SCRIPT, at, pid_of, trains_on, wait

SLOW = SCRIPT.replace("time.sleep(float(sys.argv[1]))", "time.sleep(1.0 if Path('slow').exists() else 0.02)")
AT_ITS_END = SLOW.replace(
    "def loss_fn",
    """
import atexit, signal, threading
from evenload.training.launch import left, worker
left.THREADS_S, left.IDLE_S, left._EVERY_S, left._LEAST_PART = 1, 3, 0.2, 0.03
is_over = threading.Event()
threading.Thread(target=lambda: [None for _ in iter(lambda: is_over.wait(0.5), True)]).start()
worker.at_exit(lambda: 1 / 0 if Path("raises").exists() else None)
atexit.register(lambda: os.kill(os.getpid(), signal.SIGSTOP) if Path("stops").exists() else None)
atexit.register(lambda: time.sleep(1000) if Path("sleeps").exists() else None)
def loss_fn""",
).replace("if run.is_main:\n    torch.save", "is_over.set()\nif run.is_main:\n    torch.save")
EARLY = "import os, signal\nfrom pathlib import Path\n" + SLOW.replace(
    "torch.set_default_dtype",
    """
if Path("stops").exists():
    Path("stops").unlink()
    os.kill(os.getpid(), signal.SIGSTOP)
torch.set_default_dtype""",
)


def test_a_rank_that_is_stopped_on_its_way_out_is_killed_and_the_others_go_on(tmp_path):
    with Started(tmp_path, SLOW, "-d", "cpu:3", arguments=["", "0"], initialised=False) as started:
        wait(lambda: at(tmp_path)[0] > 3, started)
        (tmp_path / "slow").touch()
        time.sleep(0.1)
        leaver = pid_of(tmp_path, 2)
        lines = change_devices_of(tmp_path / "run", "cpu:2")
        assert next(lines) == "rank 2 (cpu) leaves at the end of a step"
        os.kill(leaver, signal.SIGSTOP)  # in the step before
        (tmp_path / "slow").unlink()
        stopped_s = time.monotonic()
        trains_on(started, tmp_path, 2)
        assert time.monotonic() - stopped_s < 20  # 5 s on an idle machine
        assert list(lines) == []
        (tmp_path / "finish").touch()
        code, stdout, stderr = started.end(60)
    assert code == 0, stderr
    text = stdout + stderr
    assert "rank 2 (cpu) does not respond: its process has been stopped (SIGSTOP) for 4." in text, text
    assert "restarted" not in text
    assert_gone([leaver])


def test_ranks_that_fail_or_hang_after_they_have_left_hold_nobody(tmp_path):
    with Started(tmp_path, AT_ITS_END, "-d", "cpu:4", arguments=["", "0"], initialised=False) as started:
        wait(lambda: at(tmp_path)[0] > 3, started)
        for num_left, name in ((3, "raises"), (2, "sleeps"), (1, "stops")):
            leaver = pid_of(tmp_path, num_left)
            (tmp_path / name).touch()
            assert len([*change_devices_of(tmp_path / "run", f"cpu:{num_left}")]) == 1
            trains_on(started, tmp_path, num_left)
            assert_gone([leaver], 25)
            (tmp_path / name).unlink()
        (tmp_path / "finish").touch()
        code, stdout, stderr = started.end(60)
    assert code == 0, stderr
    text = stdout + stderr
    assert "cpu, which had left, failed at step" in text and "ZeroDivisionError" in text, text
    assert text.count("a rank that has left ends: it has not worked for 3 s") == 1, text
    assert "cpu, which had left, does not end: its process has been stopped (SIGSTOP) for 4." in text, text
    assert "does not respond" not in text


def test_a_joining_rank_that_is_stopped_is_started_again_and_a_stopped_launcher_blames_nobody(tmp_path):
    with Started(tmp_path, EARLY, "-d", "cpu:2", arguments=["", "0"], initialised=False) as started:
        wait(lambda: at(tmp_path)[0] > 3, started)
        os.kill(started.process.pid, signal.SIGSTOP)
        before = at(tmp_path)[0]
        time.sleep(6)
        assert at(tmp_path)[0] > before, "the ranks need no launcher to train"
        (tmp_path / "stops").touch()
        os.kill(pid_of(tmp_path, 1), signal.SIGKILL)
        time.sleep(6)
        os.kill(started.process.pid, signal.SIGCONT)
        trains_on(started, tmp_path, 1)
        trains_on(started, tmp_path, 2)
        (tmp_path / "finish").touch()
        code, stdout, stderr = started.end(60)
    assert code == 0, stderr
    text = stdout + stderr
    assert text.count("does not respond") == 1, text
    assert "the joining cpu does not respond: its process has been stopped (SIGSTOP) for 4." in text, text
    assert "before it could join; it is restarted (2 of 3)" in text, text
