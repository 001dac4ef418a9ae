"""`evenload.spawn` from scripts: results, errors told once, settings, and what it refuses before any process starts."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import evenload
from evenload.config import SPAWN, resolve
from evenload.errors import ConfigError, LaunchError, RankFailedError
from evenload.training.launch.environment import detect
from tests.system.launch.scripts import assert_gone
from tests.system.starts import ways

# The functions of this file import no torch: a worker starts in a third of a second.


def who(greeting: str) -> tuple[str, int, str]:
    spec = detect()
    return greeting, spec.world_size, spec.origin


def print_rank() -> None:
    print(f"rank {detect().rank} is here", flush=True)


def settings() -> dict[str, Any]:
    spec = detect()
    return {**spec.settings, "throttle": spec.throttle.get("factor")}


def fail_on_rank_1(folder: str) -> None:
    if detect().rank == 1:
        raise KeyError("a broken batch")
    Path(folder, "pid").write_text(str(os.getpid()))
    time.sleep(60)


def leave(code: int | None) -> str:
    raise SystemExit(code)


def lock() -> Any:
    return threading.Lock()


def nested() -> Any:
    return evenload.spawn(print_rank, devices="cpu")


def test_rank_0s_result_comes_back() -> None:
    assert evenload.spawn(who, devices="cpu:2", args=("hello",)) == ("hello", 2, "spawn")


def test_nothing_returned_is_nothing() -> None:
    assert evenload.spawn(leave, devices="cpu", args=(0,)) is None


def test_all_ranks_print(capfd: pytest.CaptureFixture[str]) -> None:
    assert evenload.spawn(print_rank, devices="cpu:2") is None
    assert sorted(capfd.readouterr().out.splitlines()) == ["rank 0 is here", "rank 1 is here"]


def test_settings_arrive_as_from_a_command_line(tmp_path: Path) -> None:
    got = evenload.spawn(
        settings, devices="cpu:2", balance=(3, 1), precision="bf16", project_dir=tmp_path / "run", throttle=(1, 0.5)
    )
    assert got == {"balance": [3, 1], "precision": "bf16", "project_dir": str(tmp_path / "run"), "throttle": 1.0}


def test_a_setting_given_twice_names_both_places() -> None:
    told = (
        "precision is set twice, differently: init(precision='fp16') in the script and spawn(precision='bf16') in the call of "
        "evenload.spawn; remove one of them"
    )
    with pytest.raises(ConfigError, match=re.escape(told)):
        resolve({"precision": "fp16"}, {"precision": "bf16"}, SPAWN)


def test_a_failing_rank_is_raised_with_its_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailedError) as caught:
        evenload.spawn(fail_on_rank_1, devices="cpu:2", args=(str(tmp_path),))
    told = str(caught.value)
    assert (
        told.startswith("rank 1 (cpu) failed: KeyError: 'a broken batch'\nTraceback") and told.count("Traceback") == 1
    )
    assert "in fail_on_rank_1" in told and "launch/call.py" not in told
    assert capfd.readouterr().err == "", "told twice"
    if (tmp_path / "pid").exists():
        assert_gone([int((tmp_path / "pid").read_text())])


def test_a_rank_that_leaves_with_a_code(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"rank 0 .* failed: it ended with exit code 7"):
        evenload.spawn(leave, devices="cpu", args=(7,))


def test_a_result_that_cannot_travel() -> None:
    with pytest.raises(
        RankFailedError, match=r"ConfigError: evenload.spawn: lock returned a lock, which can't be sent back"
    ):
        evenload.spawn(lock, devices="cpu")


def test_a_rank_does_not_spawn() -> None:
    with pytest.raises(
        RankFailedError, match=r"LaunchError: evenload.spawn was called in a process that is already rank 0 of 1"
    ):
        evenload.spawn(nested, devices="cpu")


def test_a_rank_of_torchrun_does_not_spawn(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="already rank 1 of 2, started by torchrun; call the function itself here"):
        evenload.spawn(print_rank)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: evenload.spawn("train"), "evenload.spawn got a str; it takes a function"),
        (lambda: evenload.spawn(who, devices=2), r"devices=2\): expected text as -d takes it"),
        (lambda: evenload.spawn(who, devices="tpu"), "'tpu' is not a device"),
        (lambda: evenload.spawn(who, "cpu", "hello"), r"args='hello'\): expected a tuple"),
        (lambda: evenload.spawn(who, "cpu", args=1e-3), "expected a tuple of the function's arguments"),
        (lambda: evenload.spawn(who, "cpu", learning_rate=1), r"spawn\(learning_rate=1\) .* there is no setting"),
        (lambda: evenload.spawn(who, "cpu", precision="fp8"), r"spawn\(precision='fp8'\): expected one of"),
        (lambda: evenload.spawn(who, "cpu:2", balance=(1, 2, 3)), "3 shares for 2 ranks"),
        (lambda: evenload.spawn(who, "cpu:2", throttle=(1,)), "1 speeds for 2 ranks"),
        (lambda: evenload.spawn(who, "cpu", port=9), "--port 9 has no effect"),
        (lambda: evenload.spawn(lambda: 1, "cpu"), "define the function at the top of a module or script"),
        (lambda: evenload.spawn(who, "cpu", args=(threading.Lock(),)), "can't be sent to another process"),
    ],
)
def test_wrong_calls_are_refused_before_any_process_starts(
    call: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)  # pytest-xdist's has none
    with pytest.raises(ConfigError, match=told):
        call()


SCRIPT = """
import evenload
{top}
class Thing:
    def __init__(self, value):
        self.value = value
def double(thing):
    from evenload.training.launch.environment import detect
    print("read as", __name__, flush=True)
    return Thing(thing.value * 2)
{guard}
    thing = evenload.spawn(double, devices="cpu", args=(Thing(21),))
    print("answer", type(thing) is Thing, thing.value)
"""


def _script(folder: Path, guard: str, top: str = "") -> ways.Ended:
    (folder / "spawned.py").write_text(textwrap.dedent(SCRIPT.format(guard=guard, top=top)))
    return ways.shell(folder, "python spawned.py")


def test_a_script_with_a_guard_sends_its_own_functions_and_classes(tmp_path: Path) -> None:
    ended = _script(tmp_path, 'if __name__ == "__main__":')
    assert (ended.code, ended.stderr) == (0, "")
    assert ended.stdout == "read as __mp_main__\nanswer True 42\n"


def test_a_script_without_a_guard_is_told_what_to_write(tmp_path: Path) -> None:
    ended = _script(tmp_path, "if True:")
    assert ended.code == 1
    assert "RankFailedError: rank 0 (cpu) failed: ConfigError: evenload.spawn was called while a worker" in ended.stderr
    assert 'if __name__ == "__main__":\n        evenload.spawn(train)' in ended.stderr
    assert "answer" not in ended.stdout


def test_python_c_needs_no_file(tmp_path: Path) -> None:
    code = "import evenload\ndef double(x): return x * factor\nfactor = 2\nprint(evenload.spawn(double, 'cpu', args=(21,)))"
    ended = ways.shell(tmp_path, f'python -c "{code}"')
    assert (ended.code, ended.stdout, ended.stderr) == (0, "42\n", "")


FOREVER = """
import os, time
from pathlib import Path
import evenload
def forever():
    Path("pid.partial").write_text(str(os.getpid()))
    os.replace("pid.partial", "pid")
    time.sleep(1000)
if __name__ == "__main__":
    evenload.spawn(forever, devices="cpu")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_ranks_end_with_their_caller(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "forever.py").write_text(FOREVER)
    process = ways.start(tmp_path, ["python", "forever.py"], TMPDIR=str(tmp_path))
    while not (tmp_path / "pid").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    ended = ways.end(process)
    assert_gone([int((tmp_path / "pid").read_text())])
    if number == signal.SIGINT:
        assert ended.code == -signal.SIGINT and "KeyboardInterrupt" in ended.stderr
    else:
        assert ended.code == (128 + number if number == signal.SIGTERM else -number)
    deadline = time.monotonic() + 5.0
    while left := list(tmp_path.glob("evenload-*")):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
