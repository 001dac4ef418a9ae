"""Workers that die, leave and join: the supervisor's part, with real processes and signals, and a loop that computes nothing."""

import json
import os
import signal
import stat
import threading
import time
from pathlib import Path

import pytest

from evenload.errors import ConfigError
from evenload.training.launch.run_control import LAUNCH_FILE, change_devices_of, members_of
from tests.system.launch.scripts import Started, assert_gone

LOOP = """
import threading
from evenload.training.launch.environment import detect
from evenload.training.launch.membership_messages import *
channel = MessageChannel.of_descriptor(spec.channel)
me, members, number, changes = spec.worker, spec.workers, 0, []
def read():
    while not channel.ended:
        changes.extend(m for m in channel.receive() if me in m.workers + m.left)
threading.Thread(target=read, daemon=True).start()
if spec.rank == 0 and not spec.joining:
    Path("run").mkdir()
    Path("run", "events.jsonl").touch()
    Path(spec.launch_dir, "run_folder").write_text(str(Path("run").absolute()))
if spec.joining:
    if Path("broken").exists():
        raise ValueError("this device has no driver")
    if Path("slow").exists():
        Path(f"pid-{me}").write_text(str(os.getpid()))
        time.sleep(1000)
    members = ()
    channel.send(Ready(me))
else:
    channel.send(Capable(me, sys.argv[1] if len(sys.argv) > 1 else ""))
Path(f"pid-{me}").write_text(str(os.getpid()))
while not Path("finish").exists():
    time.sleep(0.01)
    if changes and changes[-1].number > number:
        change = changes[-1]
        number, members = change.number, change.workers
        Path(f"{me}.partial").write_text(repr((number, members, change.urgent, [one.worker for one in change.lost])))
        os.replace(f"{me}.partial", f"seen-{me}-{number}")
        if me in change.left:
            channel.send(Leaving(me))
            sys.exit(0)
        channel.send(Switched(me, number, 0.0, 7))
if members:
    channel.send(Finished(me))
"""


def wait(found, timeout_s=60):
    deadline_s = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def seen(folder, worker, number):
    path = folder / f"seen-{worker}-{number}"
    wait(path.exists)
    return eval(path.read_text())


def pid_of(folder, worker):
    wait((folder / f"pid-{worker}").exists)
    wait(lambda: (folder / f"pid-{worker}").read_text())
    return int((folder / f"pid-{worker}").read_text())


def members(folder):
    return members_of(folder / "run")


def change(folder, devices):
    return list(change_devices_of(folder / "run", devices))


def refusal(folder, devices):
    with pytest.raises(ConfigError) as caught:
        change(folder, devices)
    return str(caught.value)


def test_workers_are_lost_come_back_join_and_leave(tmp_path):
    with Started(tmp_path, LOOP, "-d", "cpu:3", "--max-restarts", "1") as started:
        pids = [pid_of(tmp_path, f"worker-{rank}") for rank in range(3)]
        wait((tmp_path / "run" / LAUNCH_FILE).exists)
        began_s = time.monotonic()
        os.kill(pids[0], signal.SIGKILL)
        assert seen(tmp_path, "worker-1", 1) == (1, ("worker-1", "worker-2"), True, ["worker-0"])
        assert time.monotonic() - began_s < 1.0, "death noticed"
        # Its successor joins at a boundary, as the last rank; nothing ends.
        everyone = ("worker-1", "worker-2", "worker-3")
        for worker in everyone:
            assert seen(tmp_path, worker, 2) == (2, everyone, False, [])

        # The joiner dies: its place has used up its restart. A change by the user doesn't count.
        os.kill(pid_of(tmp_path, "worker-3"), signal.SIGKILL)
        assert seen(tmp_path, "worker-2", 3)[1] == ("worker-1", "worker-2")
        wait(lambda: members(tmp_path) == ["rank 0: cpu", "rank 1: cpu"])
        address = Path(json.loads((tmp_path / "run" / LAUNCH_FILE).read_text())["socket"])
        assert stat.S_IMODE(address.stat().st_mode) == 0o600
        with pytest.raises(ConfigError, match="'tpu' is not a device"):
            change(tmp_path, "tpu")
        with pytest.raises(ConfigError, match="there is no GPU 7"):
            change(tmp_path, "7")
        assert change(tmp_path, "cpu,cpu") == ["these are the devices of the run already"]
        assert change(tmp_path, "cpu:3") == ["cpu starts, and joins at the end of a step"]
        assert len(members(tmp_path)) == 3
        assert change(tmp_path, "cpu:2") == ["rank 2 (cpu) leaves at the end of a step"]
        assert seen(tmp_path, "worker-4", 5)[1] == ("worker-1", "worker-2")

        # A joiner that fails by an exception disturbs nobody, and is not tried again.
        (tmp_path / "broken").touch()
        assert "the run is on cpu, cpu instead of -d cpu:3" in refusal(tmp_path, "cpu:3")
        (tmp_path / "finish").touch()
        code, _, stderr = started.end()
    assert code == 0, stderr
    assert "rank 0 (cpu) failed: killed by SIGKILL" in stderr and "2 ranks go on; it is restarted (1 of 1)" in stderr
    assert "after the loss: 2 ranks from step 7" in stderr and "rank 2 (cpu) has joined: 3 ranks from step 7" in stderr
    assert "its 1 restarts are used up (--max-restarts 1)" in stderr
    assert "the joining cpu failed: ValueError: this device has no driver" in stderr
    assert "cpu has left: 2 ranks" in stderr
    assert_gone(pids)
    assert not (tmp_path / "run" / LAUNCH_FILE).exists() and members(tmp_path) == []
    with pytest.raises(ConfigError, match="is not in progress on this machine"):
        change(tmp_path, "cpu:2")


@pytest.mark.parametrize("why_not", ["", "run.resume was not called"])
def test_the_run_ends_with_all_causes_where_it_cannot_go_on(tmp_path, why_not):
    with Started(tmp_path, LOOP, "-d", "cpu:2", "--max-restarts", "0", arguments=[why_not]) as started:
        pids = [pid_of(tmp_path, f"worker-{rank}") for rank in range(2)]
        time.sleep(0.1)
        os.kill(pids[1], signal.SIGKILL)
        if not why_not:
            seen(tmp_path, "worker-0", 1)
            time.sleep(0.1)
            os.kill(pids[0], signal.SIGSEGV)
        code, _, stderr = started.end()
    assert "rank 1 (cpu) failed: killed by SIGKILL" in stderr
    if why_not:
        assert code == 137 and "the run can't go on: run.resume was not called" in stderr
    else:
        assert code == 139 and "restarts are off (--max-restarts 0)" in stderr
        assert "rank 0 (cpu) failed: killed by SIGSEGV" in stderr and "the run can't go on: no rank is left" in stderr
    assert_gone(pids)


def test_a_stopped_rank_is_left_out_and_ctrl_c_ends_all(tmp_path):
    with Started(tmp_path, LOOP, "-d", "cpu:2", "--max-restarts", "0") as started:
        pids = [pid_of(tmp_path, f"worker-{rank}") for rank in range(2)]
        os.kill(pids[1], signal.SIGSTOP)
        assert seen(tmp_path, "worker-0", 1) == (1, ("worker-0",), True, ["worker-1"])
        (tmp_path / "slow").touch()
        answers = []
        asking = threading.Thread(target=lambda: answers.append(refusal(tmp_path, "cpu:2")))
        asking.start()
        pid_of(tmp_path, "worker-2")
        started.process.send_signal(signal.SIGINT)
        code, _, stderr = started.end()
        asking.join()
    assert "the run ended before the change took effect" in answers[0]
    assert code == 130 and "rank 1 (cpu) does not respond: its process has been stopped (SIGSTOP) for 4." in stderr
    assert "1 rank goes on" in stderr
    assert_gone([*pids, pid_of(tmp_path, "worker-2")])
