"""The folder for temporary files is full while a run is in progress: a good end stays one, and an error is still reported."""

import os

import pytest

from tests.small_disk import small_disk
from tests.warm import Command

SCRIPT = """
import os, signal, sys, time
import torch, evenload
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
what = sys.argv[1]
run = evenload.init(project_dir="run")
model, loader = run.prepare(torch.nn.Linear(1, 1), DataLoader(TensorDataset(torch.ones(80, 1)), batch_size=4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.resume(model=model, optimizer=optimizer)
for epoch in range(loader.epoch, 1):
    for step in loader:
        step.backward(lambda batch: model(batch[0]).square().mean())
        optimizer.step(); optimizer.zero_grad()
        if step.index == 1 and run.rank == 0:
            with open(os.environ["TMPDIR"] + "/fills", "wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    pass
        run.barrier()
        if step.index == 3 and run.rank == 1 and what == "fails":
            raise ValueError("x" * 300_000)
        if step.index == 3 and run.rank == 1 and run.world_size == 2 and what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if step.index >= 8 and run.rank == 0 and what == "killed":
            Path(os.environ["TMPDIR"] + "/fills").unlink(missing_ok=True)
            time.sleep(0.3)
        time.sleep(0.02)
print("ended", run.world_size)
"""


def run(folder, what):
    (folder / "train.py").write_text(SCRIPT)
    with small_disk(folder / "tmp", 1_000_000):
        words = ["-m", "evenload.cli.main", "run", "-d", "cpu:2", "train.py", what]
        with Command(words, folder, {**os.environ, "TMPDIR": str(folder / "tmp")}) as started:
            try:
                stdout, stderr = started.communicate(60)
            finally:
                started.kill()
        assert not list((folder / "tmp").glob("evenload-*")), "the launch folder is left"
    return started.returncode, stdout, stderr


def test_a_good_end_is_no_loss(tmp_path):
    code, stdout, stderr = run(tmp_path, "ends")
    assert code == 0 and stdout.count("ended 2") == 2 and "failed" not in stderr, stdout + stderr


def test_an_error_of_the_script_is_reported_once_and_no_loss(tmp_path):
    code, stdout, stderr = run(tmp_path, "fails")
    assert code == 1 and stderr.count("evenload: rank 1 (cpu) failed at step 3: ValueError: xxx") == 1, stdout + stderr
    assert "restarted" not in stderr and "No space left" not in stderr, stderr


@pytest.mark.timeout(120)
def test_a_lost_rank_is_started_once_there_is_room(tmp_path):
    code, stdout, stderr = run(tmp_path, "killed")
    assert code == 0 and "cpu can't be started: [Errno 28] No space left on device" in stderr, stdout + stderr
    assert "rank 1 (cpu) has joined: 2 ranks" in stdout + stderr and stdout.count("ended 2") == 2, stdout + stderr


def test_a_start_without_room_says_so(tmp_path):
    (tmp_path / "train.py").write_text("print('began')")
    with small_disk(tmp_path / "tmp", 20_000):
        words = ["-m", "evenload.cli.main", "run", "-d", "cpu:2", "train.py"]
        with Command(words, tmp_path, {**os.environ, "TMPDIR": str(tmp_path / "tmp")}) as started:
            stdout, stderr = started.communicate(60)
        assert not list((tmp_path / "tmp").glob("evenload-*")), "the launch folder is left"
    assert started.returncode and "No space left on device" in stderr and "set TMPDIR" in stderr, stdout + stderr
    assert "Traceback" not in stderr and "began" not in stdout, stdout + stderr
