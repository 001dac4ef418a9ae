"""Ranks that work in the script's own code for longer than `timeout_s`, which no fixed time ends; deadlocks, which end."""

import os
import signal
import time
from pathlib import Path

import torch

from tests.system.launch.scripts import Started, assert_gone, run
from tests.warm import run as run_script

SLOW = """
import os, sys, time
from dataclasses import replace
from pathlib import Path
import torch, evenload
import torch.distributed as dist
from evenload.training.elastic import own_wait
from evenload.training.session import open as opening
from torch.utils.data import DataLoader, TensorDataset
own_wait.STUCK_S = 3.0
resolve = opening.resolve
def resolved(*settings):
    config = resolve(*settings)
    return config if "timeout_s" in config.sources else replace(config, timeout_s=2.0)
opening.resolve = resolved
torch.set_default_dtype(torch.float64)
def works(name, run=None):
    if name in sys.argv and (run is None or run.is_main):
        Path("works").touch()
        end_s = time.monotonic() + (60 if "until killed" in sys.argv else 3.5)  # longer than the limit
        while time.monotonic() < end_s and not Path("finish").exists():
            time.sleep(0.01)
if os.environ.get("EVENLOAD_WORKER", "").endswith("worker-0.json"):
    works("before init")
run = evenload.init(project_dir="run", seed=0)
Path(f"pid-{run.rank}").write_text(str(os.getpid()))
with run.main_first():
    works("before the first step", run)
torch.manual_seed(0)
data = TensorDataset(torch.randn(24, 2))
model, loader = run.prepare(torch.nn.Linear(2, 1), DataLoader(data, batch_size=6))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.resume(model=model, optimizer=optimizer)
for step in loader:
    step.backward(lambda batch: model(batch[0]).square().mean())
    optimizer.step(); optimizer.zero_grad()
    if step.index == 1:
        works("between two steps", run)
works("in an evaluation", run)
print("ranks", run.reduce(1))
if "deadlock" in sys.argv:
    dist.barrier() if run.rank else run.reduce(1)
works("after the last step", run)
if run.is_main:
    torch.save(model.state_dict(), "weights.pt")
"""
PLACES = ("before init", "before the first step", "between two steps", "in an evaluation", "after the last step")


def test_a_rank_may_work_in_its_own_code_as_long_as_it_wants(tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "train.py").write_text(SLOW)
    run_script(["train.py"], whole, 60).check_returncode()
    code, stdout, stderr = run(tmp_path, SLOW, "-d", "cpu:3", arguments=PLACES, initialised=False, timeout_s=90)
    assert code == 0 and stdout.count("ranks 3") == 3 and "lost" not in stderr, (stdout, stderr)
    expected = torch.load(whole / "weights.pt")
    for name, value in torch.load(tmp_path / "weights.pt").items():
        assert (value - expected[name]).norm() <= 1e-12 * expected[name].norm(), name


def test_a_rank_that_is_stopped_meanwhile_is_found(tmp_path):
    places = ("between two steps", "until killed")
    options = ("-d", "cpu:3", "--max-restarts", "0")
    with Started(tmp_path, SLOW, *options, arguments=places, initialised=False) as started:
        _wait_for(tmp_path / "works", started)
        stopped = int((tmp_path / "pid-2").read_text())
        os.kill(stopped, signal.SIGSTOP)
        assert_gone([stopped], timeout_s=20)  # 4 s on an idle machine
        time.sleep(3)  # rank 1 waits in a new generation, for longer than the limit
        (tmp_path / "finish").touch()
        code, stdout, stderr = started.end(60)
    assert code == 0 and stdout.count("ranks 2") == 2, (stdout, stderr)
    assert "rank 2 (cpu) does not respond: its process has been stopped (SIGSTOP) for 4." in stdout + stderr


def test_ranks_that_wait_for_one_another_are_named_and_the_run_ends(tmp_path):
    script = SLOW.replace("timeout_s=2.0", "timeout_s=600.0")
    code, stdout, stderr = run(tmp_path, script, "-d", "cpu:2", arguments=["deadlock"], initialised=False)
    line = next(number for number, text in enumerate(script.splitlines(), 1) if "dist.barrier" in text)
    assert code == 1 and "all ranks have waited for one another for " in stderr, (stdout, stderr)
    assert stderr.count(f" (cpu), last seen at train.py:{line} in <module>") == 2


def test_a_limit_that_the_user_sets_holds(tmp_path):
    script = SLOW.replace("seed=0", "seed=0, timeout_s=8")
    places = ("between two steps", "until killed")
    code, _, stderr = run(tmp_path, script, "-d", "cpu:2", arguments=places, initialised=False)
    assert code == 1 and "waited 8 s for another rank, which is alive but did not arrive" in stderr, stderr


def _wait_for(path: Path, started: Started, timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not path.exists():
        assert started.process.poll() is None, started.process.communicate()
        assert time.monotonic() < end_s
        time.sleep(0.02)


HANGS = SLOW.replace(
    "run = evenload.init",
    """
from evenload.training.elastic import stall_watch
stall_watch._FIRST_DEADLINE_S = 3.0  # in which a loader may start
class Data(TensorDataset):
    def __getitem__(self, index):
        if run.rank == 1:
            time.sleep(1000)
        return super().__getitem__(index)
run = evenload.init""",
).replace(
    "print(",
    "rows = sum(len(x[0]) for x in run.batches(DataLoader(Data(torch.zeros(8, 1)), batch_size=4)))\nprint(rows,",
)


def test_a_rank_that_hangs_in_an_evaluation_is_left_out_after_the_limit(tmp_path):
    code, stdout, stderr = run(tmp_path, HANGS, "-d", "cpu:2", "--max-restarts", "0", initialised=False)
    assert code == 0 and "8 ranks 1" in stdout, (stdout, stderr)
    assert "rank 1 (cpu) does not respond: it has waited for samples for " in stdout + stderr
