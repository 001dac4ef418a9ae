"""Interactive jobs: `evenload submit --pty` in a real terminal, with a real daemon and shell."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.cli.queue_box import PATIENCE_S, SLOTS, Box, box_in

SHELL = ("bash", "--norc", "--noprofile", "-i")
_CLIENT = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from evenload.cli.main import main
main(sys.argv[1:])
"""


class UserTerminal:
    """A terminal with a command in its foreground, as a user's terminal has one."""

    def __init__(self, *words: str) -> None:
        self.master, slave = pty.openpty()
        self.resize(33, 101)
        self.slave = slave
        self.before = termios.tcgetattr(slave)
        self.text = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CLIENT, *words], stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def write(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def read(self) -> str:
        """Reads what has been printed, and returns all."""
        while select.select([self.master], [], [], 0.05)[0]:
            self.text += os.read(self.master, 65536).decode(errors="replace")
        return self.text

    def wait_for(self, pattern: str) -> re.Match[str]:
        deadline_s = time.monotonic() + PATIENCE_S
        while (found := re.search(pattern, self.read())) is None:
            assert time.monotonic() < deadline_s, f"no {pattern!r} in {self.text!r}"
        return found

    def ended(self) -> int:
        """Waits for the end, reading all the time; the exit code."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            self.read()
            assert time.monotonic() < deadline_s, self.text
        self.read()
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for end in (self.master, self.slave):
            with contextlib.suppress(OSError):
                os.close(end)


@contextlib.contextmanager
def terminal(box: Box, *words: str) -> Iterator[UserTerminal]:
    made = UserTerminal("submit", "--queue", str(box.queue), "--pty", *words)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with box_in(tmp_path_factory.mktemp("box")) as made:
        made.submit("--", "true")
        yield made


def _number(shown: UserTerminal) -> str:
    return shown.wait_for(r"job (\d+) queued")[1]


def test_a_shell_in_the_users_terminal(box: Box) -> None:
    """Keys, the window's size and its change, Ctrl-C, the exit code; the terminal is as it was."""
    with terminal(box, "--", *SHELL) as shown:
        number = _number(shown)
        shown.write("echo a$((1+1))b; stty size; tty\n")
        shown.wait_for(r"a2b\s+33 101\s+/dev/")
        shown.resize(44, 120)
        shown.write("for i in $(seq 100); do stty size; sleep 0.1; done\n")
        shown.wait_for(r"44 120")
        shown.write("\x03")
        shown.write("echo up$((1+1)); sleep 1000\n")
        shown.wait_for(r"up2")
        shown.write("\x03")
        shown.write("echo b$((2+2))c $CUDA_VISIBLE_DEVICES $TERM; exit 7\n")
        shown.wait_for(r"b4c")
        assert shown.ended() == 7
        assert f"job {number} failed: exit code 7" in shown.text
        assert termios.tcgetattr(shown.slave) == shown.before
    assert "a2b" in box.log(number) and not box.can_be_preempted(number)


def test_a_job_ends_with_its_terminal(box: Box) -> None:
    """A client that is killed takes the job with it; one that gets SIGTERM restores the terminal."""
    with terminal(box, "--", *SHELL) as shown:
        number = _number(shown)
        shown.write("echo up$((1+1))\n")
        shown.wait_for(r"up2")
        shown.process.send_signal(signal.SIGTERM)
        assert shown.ended() == 128 + signal.SIGTERM
        assert termios.tcgetattr(shown.slave) == shown.before
        box.wait(number, "FAILED")
    with terminal(box, "--", sys.executable, "-c", "import time; print('up'); time.sleep(1000)") as shown:
        number = _number(shown)
        shown.wait_for(r"up\s")
        shown.process.kill()
        box.wait(number, "FAILED")


def test_a_time_limit_ends_a_shell_that_ignores_sigterm(box: Box) -> None:
    with terminal(box, "--time", ":1s", "--grace", "30s", "--", *SHELL) as shown:
        number = _number(shown)
        assert shown.ended() == 1
        assert "its time limit of 1 s is over" in shown.text
        assert termios.tcgetattr(shown.slave) == shown.before
        assert "killed" not in box.log(number)


def test_ctrl_c_before_the_start_cancels(box: Box, tmp_path: Path) -> None:
    go = tmp_path / "go"
    holders = [box.submit("--", "sh", "-c", f"until [ -e {go} ]; do sleep 0.05; done") for _ in range(SLOTS)]
    for holder in holders:
        box.wait(holder, "RUNNING")
    with terminal(box, "--", *SHELL) as shown:
        number = _number(shown)
        shown.wait_for(r"Ctrl-C cancels")
        time.sleep(0.5)
        shown.write("\x03")
        assert shown.ended() == 130
        assert box.job(number)["state"] == "CANCELLED"
    go.touch()


def test_much_output_arrives_whole(box: Box) -> None:
    """More than is kept for a client, and the last line of a program that ends at once."""
    with terminal(
        box, "--", sys.executable, "-c", "print('x' * 79 + '\\n', end='') or [print(i) for i in range(40000)]"
    ) as shown:
        assert shown.ended() == 0
        assert [int(line) for line in re.findall(r"^(\d+)\r?$", shown.text, re.MULTILINE)] == list(range(40000))


def test_a_program_that_ends_at_once_is_shown(box: Box) -> None:
    """Also where it has ended before its terminal could be connected (`tests/unit/scheduler/test_terminal.py`)."""
    for number in range(2):
        with terminal(box, "--", "echo", f"text-{number}") as shown:
            assert shown.ended() == 0
            assert re.search(rf"^text-{number}\r?$", shown.text, re.MULTILINE), shown.text


def test_a_signal_gives_the_exit_code_of_a_shell(box: Box) -> None:
    with terminal(box, "--", "sh", "-c", "echo up$((1+1)); exec sleep 1000") as shown:
        shown.wait_for("up2")
        shown.write("\x03")
        assert shown.ended() == 128 + signal.SIGINT


@pytest.mark.parametrize("words", [("--pty",), ("--pty", "--wait"), ("--pty", "--array", "0-1"), ("--pty", "--saves")])
def test_what_an_interactive_job_cannot_have(box: Box, words: tuple[str, ...]) -> None:
    before = box.num_jobs()
    result = box.run("submit", *words, "--", "true")
    assert result.code == 2 and "--pty" in result.err and box.num_jobs() == before
