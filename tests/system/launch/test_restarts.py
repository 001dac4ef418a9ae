"""A run that can't go on without a rank that is lost starts again by itself, from its newest checkpoint, and only then."""

import signal
import time

import pytest
import torch

from evenload.records.reader import read_events, read_steps
from evenload.testing.ledger import check_ledger, relative_difference
from evenload.training.checkpoint.files import read_newest
from tests.system.launch.scripts import Started, assert_gone, run
from tests.system.launch.test_elastic import wait

SCRIPT = """
import os, signal, sys, time
import torch, evenload
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
from evenload.testing.ledger import SampleLedger
torch.set_default_dtype(torch.float64)
every, resumes, fault = int(sys.argv[1]), sys.argv[2] == "resumes", sys.argv[3]
def die(when, rank):
    mark, (point, _, number) = Path(f"died-{rank}"), fault.partition(":")
    if point == when and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), getattr(signal, number or "SIGKILL"))
if fault == "before init":
    try:
        Path("died").mkdir()
        os.kill(os.getpid(), signal.SIGKILL)
    except FileExistsError:
        pass
run = evenload.init(seed=0, project_dir="run")
with open("pids", "a") as file:
    print(os.getpid(), file=file)
if run.rank == 1:
    die("preamble", 1)
torch.manual_seed(0)
x = torch.randn(96, 8)
data = TensorDataset(x, x.sin().sum(1, keepdim=True), torch.arange(96.0))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
model, loader = run.prepare(model, DataLoader(data, batch_size=24, shuffle=True))
# All islands begin with island 0's optimizer after a resume, so only one without state repeats the calm run.
optimizer = getattr(torch.optim, "SGD" if len(sys.argv) > 4 else "AdamW")(model.parameters(), lr=1e-2)
if resumes:
    run.resume(model=model, optimizer=optimizer)
ledger = SampleLedger(run, lambda batch: batch[2].tolist())
def loss_fn(batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
for epoch in range(loader.epoch, 6):
    for step in loader:
        if step.index == 13:
            if run.rank == 1:
                die("one", 1)
            die("all", run.rank)
            if run.rank == 1 and fault == "always":
                os.kill(os.getpid(), signal.SIGKILL)
            if run.rank == 1 and fault == "error":
                raise KeyError("broken")
        ledger.backward(step, loss_fn)
        optimizer.step(); optimizer.zero_grad()
        if every and (step.index + 1) % every == 0:
            run.checkpoint()
if run.is_main and fault == "end":
    time.sleep(1.5)  # the other rank is at the end of its script
    die("end", 0)
if run.is_main:
    torch.save({"weights": model.state_dict()}, "weights.pt")
if run.is_main and fault == "write":
    from evenload.training.checkpoint import files
    files.write = lambda *_: die("write", 0)
run.close()
"""
LOCAL = ("--strategy", "local", "--islands", "0/1", "--sync-every", "2")


def train(folder, *options, every=5, resumes=True, fault="none", more=(), timeout_s=90):
    folder.mkdir(exist_ok=True)
    arguments = [str(every), "resumes" if resumes else "starts", fault, *more]
    ended = run(folder, SCRIPT, "-d", "cpu:2", *options, arguments=arguments, initialised=False, timeout_s=timeout_s)
    assert_gone(map(int, (folder / "pids").read_text().split()))
    assert not (folder / "run" / "launch.json").exists()
    return ended


def weights(folder):
    return torch.load(folder / "weights.pt")["weights"]


def restarts(folder):
    return [event for event in read_events(folder / "run") if event.kind == "restarted"]


@pytest.mark.parametrize(
    ("fault", "options"), [("one", (*LOCAL, "--balance", "even")), ("all", ())], ids=["local", "all of ddp"]
)
def test_it_starts_again_from_the_checkpoint_and_loses_nothing(tmp_path, fault, options):
    more = ["SGD"] if options else []
    assert train(tmp_path / "calm", *options, more=more)[0] == 0
    code, stdout, stderr = train(tmp_path / "lost", *options, fault=fault, more=more)
    assert code == 0, (stdout, stderr)
    [event] = restarts(tmp_path / "lost")
    # The line of step 12 may not be written yet, and another island may be one step further.
    num = event.fields["steps"]
    line = f" starts again from the checkpoint of step 10, {num} steps are done again (restart 1 of 3)"
    assert line in stderr and line in event.message
    assert event.step == 10 and num in (2, 3, 4) and event.fields["seconds"] > 0, event
    assert (stdout + stderr).count("starts again") == 1 and "killed by SIGKILL" in event.fields["reason"]
    assert relative_difference(weights(tmp_path / "lost"), weights(tmp_path / "calm")) < 1e-12
    assert [record.step for record in read_steps(tmp_path / "lost" / "run")] == [*range(24)]
    if options:  # each island notes its own part of a step
        return
    assert len(read_steps(tmp_path / "lost" / "run")[-1].shares) == 2, "all ranks are there again"
    steps = check_ledger(tmp_path / "calm" / "run", [[]] * 24).committed
    check = check_ledger(tmp_path / "lost" / "run", [row.ids for row in steps])
    assert not check.problems and len(steps) == 24 and check.num_repeated_plans >= 3


def test_a_loss_before_the_first_step_starts_again_from_the_beginning(tmp_path):
    code, _, stderr = train(tmp_path, fault="preamble")
    assert code == 0 and "the run starts again from the beginning (restart 1 of 3)" in stderr, stderr
    assert len(restarts(tmp_path)) == 1


def test_a_restart_before_there_is_a_run_folder_is_written_as_soon_as_there_is(tmp_path):
    code, _, stderr = train(tmp_path, fault="before init")
    line = "the run starts again from the beginning (restart 1 of 3)"
    assert code == 0 and stderr.count(line) == 1, stderr
    [event] = restarts(tmp_path)
    assert line in event.message and "killed by SIGKILL" in event.fields["reason"] and event.fields["seconds"] > 0
    kinds = [event.kind for event in read_events(tmp_path / "run")]
    assert kinds.index("restarted") > kinds.index("open")


@pytest.mark.parametrize(
    ("fault", "options", "where"),
    [("one:SIGSTOP", LOCAL, "the checkpoint of step 10"), ("preamble:SIGSTOP", (), "the beginning")],
    ids=["local", "preamble"],
)
def test_a_stopped_rank_without_which_the_others_cannot_go_on(tmp_path, fault, options, where):
    code, _, stderr = train(tmp_path, *options, fault=fault)
    assert code == 0 and f" starts again from {where}" in stderr, stderr
    [event] = restarts(tmp_path)
    assert "rank 1 (cpu) does not respond: its process has been stopped (SIGSTOP) for 4." in event.fields["reason"]
    assert [record.step for record in read_steps(tmp_path / "run")] == [*range(24)]


@pytest.mark.parametrize("every", [5, 0])
def test_rank_0_lost_after_the_loop_starts_again_from_the_last_step_which_another_rank_has_saved(tmp_path, every):
    code, _, stderr = train(tmp_path, fault="end", every=every)
    assert code == 0 and "killed by SIGKILL" in stderr, stderr
    assert " starts again from the checkpoint of step 24 (restart 1 of 3)" in stderr, stderr
    assert len(read_newest(tmp_path / "run").state["model"]) == len(weights(tmp_path)) == 4
    assert relative_difference(weights(tmp_path), read_newest(tmp_path / "run").state["model"]) < 1e-12
    assert [record.step for record in read_steps(tmp_path / "run")] == [*range(24)]
    check = check_ledger(tmp_path / "run", [[]] * 24)
    assert check.num_repeated_plans == 0 and len(read_events(tmp_path / "run")) > 0


def test_rank_0_lost_while_it_writes_the_last_checkpoint_leaves_it_to_another_rank(tmp_path):
    code, stdout, stderr = train(tmp_path, fault="write")
    assert code == 0 and "starts again" not in stdout + stderr, stderr
    assert "1 rank goes on; it is not restarted: the training loop has ended" in stdout + stderr, (stdout, stderr)
    newest = read_newest(tmp_path / "run")
    assert newest.folder.name == "step-00000024"
    assert relative_difference(weights(tmp_path), newest.state["model"]) < 1e-12
    assert restarts(tmp_path) == [] and [record.step for record in read_steps(tmp_path / "run")] == [*range(24)]


def test_it_does_not_start_again_after_an_error_or_without_a_checkpoint(tmp_path):
    code, _, stderr = train(tmp_path / "error", *LOCAL, fault="error")
    assert code == 1 and "KeyError: 'broken'" in stderr and "start again" not in stderr, stderr
    code, _, stderr = train(tmp_path / "none", *LOCAL, every=0, resumes=False, fault="one")
    assert code == 137 and "there is no complete checkpoint to start again from: run.checkpoint(" in stderr, stderr
    assert restarts(tmp_path / "error") == restarts(tmp_path / "none") == []


def test_restarts_are_used_up(tmp_path):
    code, _, stderr = train(tmp_path, *LOCAL, "--max-restarts", "1", fault="always")
    assert code == 137 and "it doesn't start again: its 1 restarts are used up (--max-restarts 1)" in stderr, stderr
    assert len(restarts(tmp_path)) == 1 and "(restart 1 of 1)" in stderr


def test_sigterm_before_and_during_a_restart_ends_the_run(tmp_path):
    with Started(
        tmp_path, SCRIPT, *("-d", "cpu:2", *LOCAL), arguments=["5", "resumes", "always"], initialised=False
    ) as started:
        # The third restart waits five seconds (the second only one: on a busy machine it is over before anybody looks).
        wait(lambda: (tmp_path / "run" / "events.jsonl").exists() and len(restarts(tmp_path)) == 3, started)
        began_s = time.monotonic()
        started.process.send_signal(signal.SIGTERM)
        code, _, stderr = started.end()
    assert code == 143 and time.monotonic() - began_s < 4 and "SIGTERM: the run ended" in stderr, stderr
    assert not (tmp_path / "run" / "launch.json").exists()
    pids = list(map(int, (tmp_path / "pids").read_text().split()))
    assert_gone(pids)
    assert len(pids) == 6
