"""A run whose ranks are killed, come back, join and leave, as a user sees it; its weights are those of an undisturbed one."""

import os
import signal
import time

import torch

from evenload.records.reader import read_steps
from evenload.training.launch.run_control import change_devices_of, members_of
from tests.system.launch.scripts import Started, assert_gone

SCRIPT = """
import os, sys, time
import torch, evenload
from pathlib import Path
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
torch.set_default_dtype(torch.float64)
run = evenload.init(seed=0, project_dir="run")
torch.manual_seed(0)
x = torch.randn(480, 8)
data = TensorDataset(x, x.sin().sum(1, keepdim=True))
sampler = RandomSampler(data, generator=torch.Generator().manual_seed(3))
loader = DataLoader(data, batch_size=24, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
model, loader = run.prepare(model, loader)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 200)
run.resume(model=model, optimizer=optimizer, scheduler=scheduler)
assert run.is_main == (run.rank == 0)
Path(f"pid-{os.getpid()}").write_text(str(run.rank))
def loss_fn(batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
for epoch in range(loader.epoch, 1000):
    for step in loader:
        loss = step.backward(loss_fn)
        optimizer.step(); scheduler.step(); optimizer.zero_grad()
        run.log({"loss": loss})
        if run.is_main:
            with open("at", "a") as file:
                print(step.index, run.world_size, file=file)
        time.sleep(float(sys.argv[1]))
        assert not run.any(False)  # ranks are lost in here, too
    assert run.reduce(1) == run.world_size
    if run.any(Path("finish").exists() or epoch + 1 == int(sys.argv[2])):
        break
if run.is_main:
    torch.save({"weights": model.state_dict(), "epochs": epoch + 1}, "weights.pt")
"""


TWICE = """
import socket, time
import torch, evenload
from torch.utils.data import DataLoader, TensorDataset
pairs = []
for name in ("first", "second"):
    run = evenload.init(project_dir=name)
    model, loader = run.prepare(torch.nn.Linear(1, 1), DataLoader(TensorDataset(torch.ones(16, 1)), batch_size=4))
    for step in loader:
        step.backward(lambda batch: model(batch[0]).square().mean())
        model.zero_grad()
        time.sleep(0.3)
    for one, other in pairs:  # nobody else reads what the script sends
        one.send(b"mine")
        other.settimeout(20)
        assert other.recv(4) == b"mine"
    run.close()
    # They take the numbers of the files that the first run has closed.
    pairs = [socket.socketpair() for _ in range(20)]
print("both ran")
"""


READY_TOO_LATE = """
import os, signal, time
import torch, evenload
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
killed, joins = Path("killed"), Path("joins")
run = evenload.init(project_dir="run")
model, loader = run.prepare(torch.nn.Linear(1, 1), DataLoader(TensorDataset(torch.ones(16, 1)), batch_size=4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.resume(model=model, optimizer=optimizer)
if killed.exists():
    joins.touch()
for epoch in range(loader.epoch, 1):
    for step in loader:
        step.backward(lambda batch: model(batch[0]).square().mean())
        optimizer.step(); optimizer.zero_grad()
        if step.index == 1 and run.rank == 1:
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while step.index == 3 and not joins.exists():
            time.sleep(0.01)
    time.sleep(1)  # the successor is let in, but no step is left at whose end it could join
print("ended")
"""


IN_A_COLLECTIVE = """
import os, signal
import torch, evenload
import torch.distributed as dist
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
run = evenload.init(project_dir="run")
model, loader = run.prepare(torch.nn.Linear(1, 1), DataLoader(TensorDataset(torch.ones(64, 1)), batch_size=4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.resume(model=model, optimizer=optimizer)
def die(what, rank):  # the others are inside it
    if run.rank == rank and not Path(what).exists():
        def dies(*_, **__):
            Path(what).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        setattr(dist, what, dies)
for epoch in range(loader.epoch, 6):
    for step in loader:
        step.backward(lambda batch: model(batch[0]).square().mean())
        optimizer.step(); optimizer.zero_grad()
    die("all_reduce" if epoch < 2 else "all_gather", 1 - epoch % 2)
    sums = run.reduce({"one": 1, "ranks": torch.tensor([run.rank, 0.5])})
    assert sums["one"] == run.world_size and sums["ranks"].tolist()[1] == 0.5 * run.world_size, sums
    few = DataLoader(TensorDataset(torch.arange(1.0)), batch_size=4)  # the last ranks have no batch
    assert [run.gather(batch[0]).tolist() for batch in run.batches(few)] == ([[0.0]] if run.rank == 0 else [])
    assert sorted(run.gather([run.rank])) == list(range(run.world_size))
print("ended")
"""


def wait(found, started, timeout_s=90):
    deadline_s = time.monotonic() + timeout_s
    while not found():
        assert started.process.poll() is None, started.process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def steps_of(folder):
    """The steps so far, each with its number of ranks."""
    lines = (folder / "at").read_text().splitlines() if (folder / "at").exists() else []
    return [tuple(map(int, line.split())) for line in lines if len(line.split()) == 2]


def at(folder):
    """The newest step and the number of ranks."""
    return (steps_of(folder) or [(-1, 0)])[-1]


def pid_of(folder, rank):
    return next(int(path.name[4:]) for path in folder.glob("pid-*") if path.read_text() == str(rank))


def trains_on(started, folder, num_ranks):
    """Wait for a step after the present one on so many ranks. A successor may join a few steps later."""
    now = at(folder)[0]
    wait(lambda: any(step > now and ranks == num_ranks for step, ranks in steps_of(folder)), started)


def test_a_run_survives_and_its_weights_are_those_of_an_undisturbed_one(tmp_path):
    torn, whole = tmp_path / "torn", tmp_path / "whole"
    torn.mkdir()
    whole.mkdir()
    with Started(torn, SCRIPT, "-d", "cpu:2", arguments=["0.02", "0"], initialised=False) as started:
        wait(lambda: at(torn)[0] > 3, started)
        main = pid_of(torn, 0)
        os.kill(main, signal.SIGKILL)  # the rank that decides, records and writes checkpoints
        trains_on(started, torn, 1)
        trains_on(started, torn, 2)  # its successor has joined
        assert list(change_devices_of(torn / "run", "cpu:3")) == ["cpu starts, and joins at the end of a step"]
        trains_on(started, torn, 3)
        assert members_of(torn / "run") == ["rank 0: cpu", "rank 1: cpu", "rank 2: cpu"]
        leaves = [f"rank {rank} (cpu) leaves at the end of a step" for rank in (1, 2)]
        assert list(change_devices_of(torn / "run", "cpu")) == leaves
        trains_on(started, torn, 1)
        (torn / "finish").touch()
        code, stdout, stderr = started.end(90)
    assert code == 0, stderr
    for line in ("rank 0 (cpu) failed: killed by SIGKILL", "rank 1 (cpu) has joined", "joins the run"):
        assert (stdout + stderr).count(line) == (line != "joins the run"), stdout + stderr  # one line for each, not two
    assert_gone([main])
    assert "rank 0 (cpu) failed: killed by SIGKILL" in stderr and "it is restarted (1 of 3)" in stderr
    found = torch.load(torn / "weights.pt")
    assert [record.step for record in read_steps(torn / "run")] == [*range(20 * found["epochs"])]

    with Started(whole, SCRIPT, "-d", "cpu", arguments=["0", str(found["epochs"])], initialised=False) as started:
        assert started.end(120)[0] == 0
    expected = torch.load(whole / "weights.pt")["weights"]
    for name, value in found["weights"].items():
        assert (value - expected[name]).norm() <= 1e-9 * expected[name].norm(), name


def test_a_second_run_of_a_script_leaves_the_files_of_the_script_alone(tmp_path):
    with Started(tmp_path, TWICE, "-d", "cpu:2", initialised=False) as started:
        code, stdout, stderr = started.end(100)
    assert code == 0 and stdout.count("both ran") == 2 and "Exception" not in stderr, stdout + stderr


def test_a_rank_that_would_join_after_the_last_step_does_not_keep_the_run(tmp_path):
    with Started(tmp_path, READY_TOO_LATE, "-d", "cpu:2", initialised=False) as started:
        code, stdout, stderr = started.end(60)
    assert code == 0 and stdout.count("ended") == 1 and "it is restarted (1 of 3)" in stderr, stdout + stderr


def test_a_rank_that_is_lost_inside_a_sum_or_a_gather_leaves_it_to_the_others(tmp_path):
    with Started(tmp_path, IN_A_COLLECTIVE, "-d", "cpu:3", initialised=False) as started:
        code, stdout, stderr = started.end(90)
    assert code == 0 and "ended" in stdout, stdout + stderr
    assert stderr.count("failed: killed by SIGKILL") == 2 and stderr.count("training goes on") == 2, stderr
    assert (tmp_path / "all_reduce").exists() and (tmp_path / "all_gather").exists()
