"""Real processes and real signals: one story told once, and nothing left."""

import errno
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from evenload.errors import ConfigError, LaunchError
from evenload.training.launch import supervisor
from evenload.training.launch.request import LaunchRequest, plan
from evenload.training.launch.supervisor import launch
from tests.system.launch.scripts import Started, assert_gone, run

FOREVER = "ready()\ntime.sleep(1000)\n"


def test_ranks_run_meet_at_the_store_and_print(tmp_path):
    body = """
from torch.distributed import TCPStore
host, port = spec.store.split(":")
store = TCPStore(host, int(port), is_master=False)
store.set(f"rank{spec.rank}", str(spec.rank))
others = [store.get(f"rank{rank}").decode() for rank in range(spec.world_size)]
print(f"rank {spec.rank} of {spec.world_size} met {others}, {sys.argv[1:]}, {sys.path[0]}, {__name__}")
print("no end of line", end="")
"""
    code, stdout, stderr = run(tmp_path, body, "-d", "cpu:2", arguments=["--seed", "9"])
    assert (code, stderr) == (0, "")
    for rank in range(2):
        assert f"rank {rank} of 2 met ['0', '1'], ['--seed', '9'], {tmp_path}, __main__\n" in stdout
    assert stdout.startswith("evenload: rank 0: cpu") and "gloo" in stdout.splitlines()[1]


def test_a_raising_rank_is_told_once_with_rank_step_and_traceback(tmp_path):
    body = """
ready()
wait_for("ready-0", "ready-1")
def loss_fn(batch):
    raise ValueError("a broken batch")
if spec.rank == 1:
    worker.progress.step = 12
    loss_fn(None)
time.sleep(1000)
"""
    with Started(tmp_path, body, "-d", "cpu:2") as started:
        pids = started.wait_ready()
        code, _, stderr = started.end()
    assert code == 1
    assert stderr.startswith("evenload: rank 1 (cpu) failed at step 12: ValueError: a broken batch\nTraceback")
    assert stderr.count("Traceback") == 1 and "in loss_fn" in stderr and "worker.py" not in stderr
    assert_gone(pids)


def test_the_cause_is_told_not_its_consequence(tmp_path):
    body = """
from evenload.errors import PeerLostError
ready()
wait_for("ready-0", "ready-1")
if spec.rank == 0:
    raise PeerLostError("rank 1 is gone")
time.sleep(0.5)
raise KeyError("the cause")
"""
    code, _, stderr = run(tmp_path, body, "-d", "cpu:2")
    assert code == 1 and "rank 1 (cpu) failed: KeyError: 'the cause'" in stderr and "PeerLost" not in stderr


def test_a_killed_worker_is_named_with_its_signal_and_all_ends(tmp_path):
    with Started(tmp_path, FOREVER, "-d", "cpu:2", "--max-restarts", "0") as started:
        pids = started.wait_ready()
        os.kill(pids[1], signal.SIGKILL)
        code, _, stderr = started.end()
    assert code == 128 + 9 and "rank 1 (cpu) failed: killed by SIGKILL" in stderr
    assert_gone(pids)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_and_the_clean_up_runs(tmp_path, number, code):
    body = "worker.at_exit(lambda: Path(f'clean-{spec.rank}').write_text(str(worker.progress.exit_code)))\n" + FOREVER
    with Started(tmp_path, body, "-d", "cpu:2") as started:
        pids = started.wait_ready()
        began = time.monotonic()
        started.process.send_signal(number)
        assert started.end()[0] == code
    assert time.monotonic() - began < 10
    assert [(tmp_path / f"clean-{rank}").read_text() for rank in range(2)] == ["143", "143"]
    assert_gone(pids)


def test_workers_that_ignore_the_end_are_killed_and_a_second_signal_does_it_at_once(tmp_path):
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FOREVER
    with Started(tmp_path, body, "-d", "cpu:2") as started:
        pids = started.wait_ready()
        began = time.monotonic()
        while started.process.poll() is None and time.monotonic() - began < 2.9:
            started.process.send_signal(signal.SIGINT)  # two that a loaded launcher has not read yet count as one
            time.sleep(0.1)
        seconds = time.monotonic() - began
        assert started.end()[0] == 130
    assert seconds < 3.0, "the second signal did not end the wait of 3 s"
    assert_gone(pids)


def test_no_worker_outlives_a_killed_supervisor(tmp_path):
    body = (
        """
import subprocess
Path(f"child-{spec.rank}").write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
"""
        + FOREVER
    )
    with Started(tmp_path, body, "-d", "cpu:2") as started:
        pids = started.wait_ready()
        pids += [int((tmp_path / f"child-{rank}").read_text()) for rank in range(2)]
        started.process.kill()
        assert_gone(pids)
    assert not list(tmp_path.glob("evenload-*"))


def test_what_a_worker_leaves_running_ends_with_it(tmp_path):
    body = """
import subprocess
Path("child").write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
"""
    assert run(tmp_path, body, "-d", "cpu")[0] == 0
    assert_gone([int((tmp_path / "child").read_text())])


@pytest.mark.parametrize(
    ("call", "code", "told"),
    [
        ("sys.exit(0)", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(7)", 7, "rank 0 (cpu) failed: it ended with exit code 7"),
        ("sys.exit('no data here')", 1, "no data here"),
    ],
)
def test_sys_exit(tmp_path, call, code, told):
    got, _, stderr = run(tmp_path, call, "-d", "cpu")
    assert got == code and told in stderr and "Traceback" not in stderr


def test_a_script_without_init_is_told_what_to_add(tmp_path):
    code, _, stderr = run(tmp_path, "print('alone')", "-d", "cpu:2", initialised=False)
    assert code == 1 and "LaunchError: train.py ended without `evenload.init()`" in stderr
    assert "each of the 2 ranks" in stderr and "run = evenload.init()" in stderr and "Traceback" not in stderr
    code, stdout, stderr = run(tmp_path, "print('alone')", "-d", "cpu", initialised=False)
    assert (code, stderr) == (0, "") and "alone" in stdout


@pytest.mark.parametrize(("own", "expected"), [("", "200000 700"), ("gc.set_threshold(5000)", "200000 5000")])
def test_few_collections_of_garbage_until_init(tmp_path, own, expected):
    """Imports make no garbage; what the script sets itself stays."""
    body = f"""
import gc, evenload
before = gc.get_threshold()[0]
{own}
run = evenload.init(project_dir="run")
print(before, gc.get_threshold()[0])
"""
    code, stdout, stderr = run(tmp_path, body, "-d", "cpu", initialised=False)
    assert code == 0 and expected in stdout, stdout + stderr


def test_an_error_in_the_clean_up_fails_the_run(tmp_path):
    code, _, stderr = run(tmp_path, "worker.at_exit(lambda: 1 / 0)\n", "-d", "cpu")
    assert code == 1 and "ZeroDivisionError" in stderr


def test_a_syntax_error_shows_the_line_and_nothing_of_ours(tmp_path):
    code, _, stderr = run(tmp_path, "def broken(:\n", "-d", "cpu")
    assert code == 1 and "SyntaxError" in stderr and "def broken(:" in stderr and "worker.py" not in stderr


def test_spawned_loader_workers_find_the_script(tmp_path):
    body = """
import torch
from torch.utils.data import DataLoader, Dataset
class Squares(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return index * index
if __name__ == "__main__":
    loader = DataLoader(Squares(), batch_size=3, num_workers=1, multiprocessing_context="spawn")
    print([batch.tolist() for batch in loader])
"""
    code, stdout, stderr = run(tmp_path, body, "-d", "cpu")
    # Python's own resource tracker may warn on a loaded machine, when torch has to end the loader's worker by a signal.
    lines = [line for line in stderr.splitlines() if "resource_tracker" not in line and "warnings.warn" not in line]
    assert (code, lines) == (0, []) and "[[0, 1, 4], [9, 16, 25]]" in stdout


def test_a_module_runs_as_python_m_does(tmp_path):
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("print('part')")
    (package / "__main__.py").write_text("import sys\nfrom . import part\nprint(__name__, __spec__.name, sys.argv[1:])")
    (tmp_path / "train.py").write_text("")
    with Started(tmp_path, "", "-d", "cpu", "-m", "pack", "--devices") as started:
        code, stdout, stderr = started.end()
    assert (code, stderr) == (0, "")
    assert "part\n__main__ pack.__main__ ['--devices', 'train.py']\n" in stdout


def test_a_port_in_use(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"--port {port} can't be opened .*in use"):
            launch(LaunchRequest(("train.py",), devices="cpu:2", port=port))


def test_too_many_open_files_are_named(tmp_path, monkeypatch):
    def run_out(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervisor._Supervisor, "_tick", run_out)
    Path("train.py").write_text("import time; time.sleep(60)")
    with pytest.raises(LaunchError, match=r"may open \d+ files at once; raise the limit, such as by `ulimit -n 4096`"):
        launch(LaunchRequest(("train.py",), devices="cpu"))


def test_a_relative_import_points_at_the_module(tmp_path):
    code, _, err = run(tmp_path, "from .models import Net", "-d", "cpu")
    assert (
        code == 1 and "hint: start a module of a package by its name" in err and "evenload run -m package.train" in err
    )


def test_wrong_requests_are_refused_before_any_process_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("plain").mkdir()
    Path("plain/__init__.py").write_text("raise SystemExit('imported')")

    def refused(kind, message, *arguments, **fields):
        with pytest.raises(kind, match=message):
            plan(LaunchRequest(arguments or ("train.py",), **fields))

    refused(LaunchError, "no script nope.py; scripts in that folder: train.py", "nope.py")
    refused(LaunchError, "plain is a folder", "plain")
    refused(LaunchError, "no module nope_here", "-m", "nope_here")
    refused(LaunchError, r"no module plain\.part", "-m", "plain.part")
    refused(LaunchError, "without a __main__.py", "-m", "plain")
    refused(ConfigError, "--balance 24,6,2: 3 shares for 2 ranks", devices="cpu:2", settings={"balance": (24, 6, 2)})
    refused(ConfigError, "--throttle 1: 1 speeds for 2 ranks", devices="cpu:2", throttle=(1.0,))
    refused(ConfigError, "more than 0 and at most 1", devices="cpu:2", throttle=(1.0, 1.5))
    refused(ConfigError, "more than 0 and at most 1", devices="cpu:2", throttle=(1.0, 0.0))
    refused(ConfigError, "--port 9 has no effect", devices="cpu", port=9)
    refused(ConfigError, "--precision fp8", devices="cpu", settings={"precision": "fp8"})
    with pytest.raises(LaunchError, match="no script to run"):
        plan(LaunchRequest(()))


class _View:
    def __init__(self):
        self.folder, self.num_polls, self.closed = None, 0, 0

    def follow(self, folder):
        self.folder = folder

    def poll(self):
        self.num_polls += 1

    def print(self, text):
        raise AssertionError("a pipe is no terminal")

    def close(self):
        self.closed += 1


def test_the_view_is_told_the_run_folder_polled_and_closed_once(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        "import os, time\nfrom pathlib import Path\nfrom evenload.training.launch.environment import detect\n"
        "Path(detect().launch_dir, 'run_folder').write_text('runs/here')\ntime.sleep(0.3)\nprint('printed')"
    )
    view = _View()
    assert launch(LaunchRequest(("train.py",), devices="cpu", view=view)) == 0
    assert view.folder == Path("runs/here") and view.num_polls > 3 and view.closed == 1
