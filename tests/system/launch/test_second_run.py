"""A second `evenload run` in the folder of one in progress is refused, with who holds it, whoever that is by then."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.records.folder_lock import LOCK_FILE, lock_folder
from evenload.records.reader import read_events
from tests.ranks.elastic.supervised import Supervised
from tests.system.launch.scripts import Started, assert_gone
from tests.warm import Command

SCRIPT = """
import os, time
import torch, evenload
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
run = evenload.init(project_dir="run")
model, loader = run.prepare(torch.nn.Linear(1, 1), DataLoader(TensorDataset(torch.ones(64, 1)), batch_size=4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.resume(model=model, optimizer=optimizer)
for epoch in range(loader.epoch, 1000):
    for step in loader:
        step.backward(lambda batch: model(batch[0]).square().mean())
        optimizer.step(); optimizer.zero_grad()
        run.checkpoint(every=4)
        Path(f"pid-{run.rank}.partial").write_text(f"{os.getpid()} {step.index} {run.world_size}")
        os.replace(f"pid-{run.rank}.partial", f"pid-{run.rank}")
        time.sleep(0.02)
    if run.any(Path("finish").exists()):
        break
"""


def trains_as(started: Started, rank: int, num_ranks: int, *gone: int) -> int:
    """Wait until a process that is not one of these trains as `rank` of so many; return it."""
    deadline_s = time.monotonic() + 40
    while True:
        assert started.process.poll() is None, started.process.communicate()
        assert time.monotonic() < deadline_s
        path = started.folder / f"pid-{rank}"
        pid, _, world_size = map(int, path.read_text().split()) if path.exists() else (0, 0, 0)
        if pid not in (0, *gone) and world_size == num_ranks:
            return pid
        time.sleep(0.01)


def refusal(folder: Path, *options: str) -> str:
    """Start the command again; return what it says. It must not train."""
    num_sessions = sum(event.kind == "open" for event in read_events(folder / "run"))
    words = ["-m", "evenload.cli.main", "run", "-d", "cpu", *options, "train.py"]
    with Command(words, folder, {**os.environ, "TMPDIR": str(folder)}) as second:
        stdout, stderr = second.communicate(40)
    assert second.returncode, stdout + stderr
    assert sum(event.kind == "open" for event in read_events(folder / "run")) == num_sessions
    return stdout + stderr


def assert_names(printed: str, pid: int) -> None:
    found = re.search(rf"is in use by process {pid} on {re.escape(socket.gethostname())} since (\S+ [\d:]+\d)", printed)
    assert found is not None, printed
    assert abs(time.time() - time.mktime(time.strptime(found[1], "%Y-%m-%d %H:%M:%S"))) < 60


def test_who_holds_the_folder_is_named_also_after_a_takeover(tmp_path: Path) -> None:
    with Started(tmp_path, SCRIPT, "-d", "cpu:2", initialised=False) as started:
        first = trains_as(started, 0, 2)
        assert_names(refusal(tmp_path), first)
        at_once = refusal(tmp_path, "--project-dir", "run")
        assert_names(at_once, first)
        assert "rank 0" not in at_once and "Traceback" not in at_once, "no process was started"
        os.kill(first, signal.SIGKILL)
        second = trains_as(started, 0, 2, first)  # the lost rank has been restarted
        assert_names(refusal(tmp_path), second)
        (tmp_path / "finish").touch()
        code, stdout, stderr = started.end(40)
    assert code == 0, stdout + stderr


def test_a_lock_does_not_outlive_its_process(tmp_path: Path) -> None:
    with Started(tmp_path, SCRIPT, "-d", "cpu:2", initialised=False) as started:
        pids = [trains_as(started, rank, 2) for rank in range(2)]
        while not (tmp_path / "run" / "checkpoints" / "step-00000004").exists():
            time.sleep(0.01)
        started.process.kill()
        assert_gone(pids)
    for path in tmp_path.glob("evenload-*"):  # as a machine that went down leaves it
        shutil.rmtree(path)
    with Started(tmp_path, SCRIPT, "-d", "cpu", initialised=False) as started:  # resumes
        third = trains_as(started, 0, 1, *pids)
        assert_names(refusal(tmp_path, "--project-dir", "run"), third)
        (tmp_path / "finish").touch()
        code, stdout, stderr = started.end(40)
    assert code == 0 and "resuming at step" in stdout, stdout + stderr


OTHER_USER = """
import os, sys
from pathlib import Path
from evenload.errors import ConfigError
from evenload.records.folder_lock import check_free, lock_folder
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for ask in (check_free, lock_folder):
    try:
        ask(Path(sys.argv[1]))
    except ConfigError as error:
        print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("mode", "is_held"), [(0o777, True), (0o755, True), (0o755, False)])
def test_another_user_learns_who_holds_the_folder(mode: int, is_held: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(mode)
        with lock_folder(folder) as held:
            if not is_held:
                held.close()
            command = [sys.executable, "-c", OTHER_USER, name]
            shown = subprocess.run(command, capture_output=True, text=True, timeout=20)
    printed = shown.stdout.splitlines()
    assert shown.returncode == 0, shown.stderr
    by = f"is in use by process {os.getpid()} on {socket.gethostname()} since "
    if is_held:
        assert len(printed) == 2 and all(by in line for line in printed), printed
    else:
        [line] = printed
        assert "is not writable" in line and "Permission denied" in line


def _leave(folder: str) -> bool:
    """Train; once w0 has left, return whether another process finds the folder locked."""
    run = evenload.init(project_dir=folder, seed=0, timeout_s=60)
    data = TensorDataset(torch.ones(4000, 1))
    model, loader = run.prepare(torch.nn.Linear(1, 1), DataLoader(data, batch_size=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.resume(model=model, optimizer=optimizer)
    alone_s = 0.0
    for step in loader:
        step.backward(lambda batch: model(batch[0]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
        alone_s = alone_s or (time.monotonic() if run.world_size == 1 else 0.0)
        if alone_s and time.monotonic() > alone_s + 4:
            break
    is_held = subprocess.run([sys.executable, "-c", _TRY, f"{folder}/{LOCK_FILE}"], timeout=20).returncode == 3
    run.close()
    return is_held


_TRY = """
import fcntl, sys
try:
    fcntl.lockf(open(sys.argv[1], "r+"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    sys.exit(3)
"""


def test_where_rank_0_leaves_the_next_one_holds_the_folder(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, _leave, str(tmp_path / "run"))
    supervised.start(2)
    supervised.leaves = {0: "w0"}
    results = supervised.run(60)
    assert results == {"w0": {"exit": 0}, "w1": True}
