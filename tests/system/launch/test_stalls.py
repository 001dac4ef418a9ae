"""Ranks that neither work nor die: stopped, or in a dataset that hangs. They are named and left out, and the run goes on."""

import os
import signal
import time

from tests.system.launch.scripts import Started, assert_gone, run
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


SLOW = """
import sys, time
import torch, evenload
from dataclasses import replace
from evenload.training.session import open as opening
from torch.utils.data import DataLoader, TensorDataset
resolve, opening.resolve = opening.resolve, lambda *settings: replace(resolve(*settings), timeout_s=2.0)
def works(name, run=None):
    if name in sys.argv and (run is None or run.is_main):
        time.sleep(5)  # the script's own code: more than twice as long as timeout_s would be
import os
if os.environ["EVENLOAD_WORKER"].endswith("worker-0.json"):
    works("before init")
run = evenload.init(project_dir="run")
with run.main_first():
    works("before the first step", run)
model, loader = run.prepare(torch.nn.Linear(2, 1), DataLoader(TensorDataset(torch.randn(24, 2)), batch_size=6))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.resume(model=model, optimizer=optimizer)
for step in loader:
    step.backward(lambda batch: model(batch[0]).square().mean())
    optimizer.step(); optimizer.zero_grad()
    if step.index == 1:
        works("between two steps", run)
works("before a sum", run)
print("sum", run.reduce(1))
works("at the end", run)
"""


def test_the_scripts_own_code_may_take_as_long_as_it_wants(tmp_path):
    places = ["before init", "before the first step", "between two steps", "before a sum", "at the end"]
    code, stdout, stderr = run(tmp_path, SLOW, "-d", "cpu:3", arguments=places, initialised=False, timeout_s=90)
    assert code == 0 and stdout.count("sum 3") == 3 and "is lost" not in stderr, (stdout, stderr)


def test_a_limit_that_the_user_sets_holds(tmp_path):
    script = SLOW.replace('project_dir="run"', 'project_dir="run", timeout_s=8')
    script = script.replace("timeout_s=2.0", "timeout_s=8.0").replace("sleep(5)", "sleep(30)")
    code, _, stderr = run(tmp_path, script, "-d", "cpu:2", arguments=["between two steps"], initialised=False)
    assert code == 1 and "waited 8 s for another rank, which is alive but did not arrive" in stderr, stderr
