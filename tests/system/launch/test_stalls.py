"""Ranks that neither work nor die: stopped, or in a dataset that hangs. They are named and left out, and the run goes on."""

import os
import re
import signal
import time

from tests.system.launch.scripts import Started, assert_gone
from tests.system.launch.test_elastic import SCRIPT, at, pid_of, trains_on, wait

HANGS = SCRIPT.replace(
    "data = TensorDataset(",
    """
class Data(TensorDataset):
    def __getitem__(self, index):
        if Path(f"hang-{os.getpid()}").exists():
            time.sleep(1000)
        return super().__getitem__(index)
data = Data(""",
)


def test_ranks_that_are_stopped_or_hang_are_named_and_left_out(tmp_path):
    with Started(tmp_path, HANGS, "-d", "cpu:3", arguments=["0.02", "0"], initialised=False) as started:
        wait(lambda: at(tmp_path)[0] > 12, started)
        stopped_s = time.monotonic()
        os.kill(pid_of(tmp_path, 2), signal.SIGSTOP)
        trains_on(started, tmp_path, 2)
        assert time.monotonic() - stopped_s < 12  # 4 s on an idle machine
        trains_on(started, tmp_path, 3)
        hanging = pid_of(tmp_path, 0)
        (tmp_path / f"hang-{hanging}").touch()
        trains_on(started, tmp_path, 2)
        trains_on(started, tmp_path, 3)
        (tmp_path / "finish").touch()
        code, stdout, stderr = started.end(90)
    assert code == 0, stderr
    text = stdout + stderr
    assert "rank 2 (cpu) does not respond: its process has been stopped (SIGSTOP) for 4." in text
    assert (
        "rank 0 (cpu) does not respond: it has waited for samples for " in text
        and "in __getitem__; 2 ranks go on" in text
    )
    assert_gone([hanging])


def test_two_that_stall_at_once_have_the_ranks_that_they_had(tmp_path):
    with Started(
        tmp_path, SCRIPT, "-d", "cpu:3", "--max-restarts", "0", arguments=["0.02", "0"], initialised=False
    ) as started:
        wait(lambda: at(tmp_path)[0] > 12, started)
        stopped = [pid_of(tmp_path, rank) for rank in (0, 1)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        trains_on(started, tmp_path, 1)
        (tmp_path / "finish").touch()
        code, stdout, stderr = started.end(90)
    assert code == 0, stderr
    for rank in (0, 1):
        assert f"rank {rank} (cpu) does not respond: its process has been stopped (SIGSTOP) for 4." in stdout + stderr
    assert_gone(stopped)


def test_a_stopped_rank_does_not_keep_the_repair_of_a_loss_waiting(tmp_path):
    with Started(
        tmp_path, SCRIPT, "-d", "cpu:3", "--max-restarts", "0", arguments=["0.02", "0"], initialised=False
    ) as started:
        wait(lambda: at(tmp_path)[0] > 12, started)
        stopped = pid_of(tmp_path, 0)
        os.kill(stopped, signal.SIGSTOP)
        os.kill(pid_of(tmp_path, 2), signal.SIGKILL)
        trains_on(started, tmp_path, 1)
        (tmp_path / "finish").touch()
        code, stdout, stderr = started.end(90)
    assert code == 0, stderr
    text = stdout + stderr
    waited = re.search(
        r"rank 0 \(cpu\) does not respond: its process has been stopped \(SIGSTOP\) for ([0-9.]+) s", text
    )
    assert waited is not None and float(waited[1]) < 3, text  # 4 s where no loss is repaired
    assert_gone([stopped])


def test_a_rank_that_is_stopped_while_it_saves_does_not_keep_a_failed_run_waiting(tmp_path):
    script = SCRIPT.replace(
        "        time.sleep(float",
        """
        if step.index == 5 and run.is_main:
            import signal
            from evenload.training.checkpoint import files
            files.write = lambda *args, **options: os.kill(os.getpid(), signal.SIGSTOP)
        if step.index == 6 and run.rank == 1:
            raise RuntimeError("mine")
        time.sleep(float""",
    )
    with Started(
        tmp_path, script, "-d", "cpu:2", "--max-restarts", "0", arguments=["0.02", "0"], initialised=False
    ) as started:
        code, stdout, stderr = started.end(60)
    assert code == 1 and "RuntimeError: mine" in stdout + stderr
    assert_gone([pid_of(tmp_path, rank) for rank in (0, 1)])
