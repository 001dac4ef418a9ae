"""Scripts that fail on two ranks under `evenload run`: told once, with rank and step; all end in time, nothing is left."""

import socket

import pytest

from tests.ranks.wrong_uses.jobs import command, evenload_run, script


def _fails(folder, text, code=1, num_tracebacks=1):
    """Runs it on two ranks; what is told, which must be told once."""
    ended = evenload_run(folder, text, "-d", "cpu:2")
    assert ended.code == code, ended
    assert ended.stderr.count("evenload: rank") == 1, ended.stderr
    assert ended.stderr.count("Traceback") <= num_tracebacks and "worker.py" not in ended.stderr
    return ended.stderr


@pytest.mark.parametrize(
    ("pieces", "head", "line"),
    [
        (
            {"loss": "if run.rank == 1 and step.index == 2: raise KeyError('broken')"},
            "evenload: rank 1 (cpu) failed at step 2: KeyError: 'broken'",
            "in loss_fn",
        ),
        (
            {"getitem": "if index == 40: raise OSError('file 40 is gone')"},
            "evenload: rank 1 (cpu) failed at step 2: OSError: file 40 is gone",
            "in __getitem__",
        ),
        (
            {"getitem": "if index == 40: raise OSError('file 40 is gone')", "loader": ", num_workers=2"},
            "evenload: rank 1 (cpu) failed at step 2: OSError: file 40 is gone (in DataLoader worker ",
            "in __getitem__",
        ),
        (
            {"end": "if run.rank == 0 and step.index == 1: 1 / 0"},
            "evenload: rank 0 (cpu) failed at step 1: ZeroDivisionError: division by zero",
            "in <module>",
        ),
        (
            {"prepared": "if run.rank == 1: raise RuntimeError('no memory for the table')"},
            "evenload: rank 1 (cpu) failed: RuntimeError: no memory for the table",
            "in <module>",
        ),
        (
            {"before": "if os.environ['EVENLOAD_WORKER'].endswith('1.json'): import no_such_package"},
            "evenload: rank 1 (cpu) failed: ModuleNotFoundError: No module named 'no_such_package'",
            "import no_such_package",
        ),
    ],
    ids=["loss_fn", "dataset", "loader worker", "loop", "preamble", "before init"],
)
def test_an_error_of_the_users_shows_their_traceback_with_rank_and_step(tmp_path, pieces, head, line):
    told = _fails(tmp_path, script(**pieces))
    assert f"\n{told}".count("\n" + head) == 1 and f'File "{tmp_path}/train.py"' in told and line in told
    assert "torch/utils/data/_utils" not in told


def test_a_misuse_shows_the_message_and_the_users_line_and_nothing_of_ours(tmp_path):
    told = _fails(tmp_path, script(loss="return model(x)"))
    assert "failed at step 0: StepError: the loss has shape (8, 1); return a scalar" in told
    assert "loss = step.backward(loss_fn)" in told and "src/evenload" not in told


def test_a_loader_worker_that_is_killed(tmp_path):
    getitem = "if index == 40: os.kill(os.getpid(), signal.SIGKILL)"
    # Torch's signal handler may be the first to see it, at any place of the script, also where Python can only say
    # "Exception ignored in" with a traceback of its own.
    told = _fails(tmp_path, script(getitem=getitem, loader=", num_workers=2"), num_tracebacks=3)
    assert "rank 1 (cpu) failed" in told
    ours = "DataError: DataLoader worker " in told and "was killed by SIGKILL" in told
    assert ours or "is killed by signal: Killed" in told


def test_a_rank_that_leaves_by_sys_exit(tmp_path):
    told = _fails(tmp_path, script(end="if run.rank == 1 and step.index == 1: sys.exit(3)"), code=3)
    assert told.startswith("evenload: rank 1 (cpu) failed: it ended with exit code 3")


def test_a_rank_that_is_killed(tmp_path):
    told = _fails(
        tmp_path, script(loss="if run.rank == 1 and step.index == 1: os.kill(os.getpid(), signal.SIGKILL)"), code=137
    )
    assert told.startswith("evenload: rank 1 (cpu) failed: killed by SIGKILL: from outside")


def test_a_rank_that_ends_by_os_exit_0(tmp_path):
    """Its exit code says that all is well; the others would wait for it until the time limit."""
    told = _fails(tmp_path, script(loss="if run.rank == 1 and step.index == 1: os._exit(0)"))
    assert told.startswith("evenload: rank 1 (cpu) failed: it ended with exit code 0 before its script did: os._exit")
    ended = evenload_run(tmp_path, f"{script()}\nrun.close(); print('over', flush=True); os._exit(0)\n", "-d", "cpu:2")
    assert ended.code == 0 and ended.stdout.count("over") == 2, ended


def test_a_rank_in_a_deadlock_is_ended_when_another_fails(tmp_path):
    loss = """
        if step.index == 1:
            if run.rank == 0:
                lock = threading.Lock()
                lock.acquire(); lock.acquire()
            time.sleep(0.5)
            raise ValueError("the other rank hangs")
    """
    assert "rank 1 (cpu) failed at step 1: ValueError: the other rank hangs" in _fails(tmp_path, script(loss=loss))


def test_a_rank_that_never_comes_is_told_of_after_the_time_limit(tmp_path):
    text = script(settings=", timeout_s=2.0", loss="if run.rank == 1 and step.index == 2: time.sleep(1000)")
    told = _fails(tmp_path, text)
    assert "failed at step 2: PeerLostError: rank 0 is in step.backward and waited 2 s for another rank" in told
    assert "it hangs, or is very slow" in told and "init(timeout_s=...)" in told


def test_break_on_one_rank(tmp_path):
    told = _fails(tmp_path, script(end="if run.rank == 1 and step.index == 2: break"))
    assert "rank 0 is in step.backward at epoch 0, step 3; rank 1 is in step.backward at epoch 1, step 0" in told
    assert "make one rank's decision everybody's with `if run.any(flag): break`" in told


def test_a_script_that_never_calls_init(tmp_path):
    told = _fails(tmp_path, "print('alone')")
    assert "LaunchError: train.py ended without `evenload.init()`, so each of the 2 ranks ran all of it alone" in told


def test_settings_for_a_script_that_never_calls_init(tmp_path):
    ended = evenload_run(tmp_path, "print('alone')", "-d", "cpu", "--dry-run", "--precision", "bf16")
    assert ended.code == 1 and ended.stdout.endswith("alone\n")
    assert (
        "ended without `evenload.init()`, so it ran as it is, and --precision bf16, --dry-run had no effect"
        in ended.stderr
    )
    assert evenload_run(tmp_path, "print('alone')", "-d", "cpu").code == 0


CLOSES = """
import os, signal, time
def opened():
    try:
        yield
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
closed = opened()
next(closed)
try:
    del closed
    time.sleep(60)
finally:
    print("cleaned up", flush=True)
"""


def test_a_signal_that_comes_while_a_generator_is_closed(tmp_path):
    """Python only prints exceptions of that moment; so it did while the loader's generator shut its workers down."""
    ended = evenload_run(tmp_path, CLOSES, "-d", "cpu")
    assert ended.code == 143 and "cleaned up" in ended.stdout and "Exception ignored" not in ended.stderr, ended


def test_a_port_in_use(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = evenload_run(tmp_path, "print('it ran')", "-d", "cpu:2", "--port", port, within_s=15)
    assert ended.code == 2 and "it ran" not in ended.stdout
    assert f"evenload: error: --port {port} can't be opened (Address already in use); choose another" in ended.stderr


def test_a_spawned_worker_that_imports_a_script_without_main_guard(tmp_path):
    text = script(loader=", num_workers=1, multiprocessing_context='spawn'")
    ended = evenload_run(tmp_path, text, "-d", "cpu")
    assert ended.code == 1
    assert "evenload.init was called while a new process (a DataLoader worker?) imports the script" in ended.stderr
    assert "put the training under `if __name__ == '__main__':`" in ended.stderr


def test_plain_python_tells_the_same(tmp_path):
    (tmp_path / "train.py").write_text(script(loss="return model(x)"))
    ended = command(tmp_path, "train.py")
    assert ended.code == 1 and "StepError: the loss has shape (16, 1); return a scalar" in ended.stderr
    assert ended.stderr.count("Traceback") == 1
