"""The terminal of an interactive program: frames, and whose client it accepts."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from evenload.scheduler.runner.terminal import SOCKET, WINDOW, Frames, ProgramTerminal, frame


def test_frames_are_found_in_any_pieces() -> None:
    sent = [(b"w", WINDOW.pack(24, 80)), (b"d", b""), (b"d", b"x" * 5000)]
    stream = b"".join(frame(kind, data) for kind, data in sent)
    for size in (1, 7, 4096, len(stream)):
        frames = Frames()
        assert [found for at in range(0, len(stream), size) for found in frames.feed(stream[at : at + size])] == sent
    with pytest.raises(ValueError, match="a frame of"):
        Frames().feed(frame(b"d", b"")[:1] + b"\xff\xff\xff\xff")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_another_users_client_is_refused(tmp_path: Path) -> None:
    """The owner's, which comes later, gets what the program has written."""
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    wakeup, end = os.pipe()
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and str(folder) != "/" and not folder.stat().st_mode & 0o001:
            folder.chmod(0o711)
    terminal = ProgramTerminal(tmp_path, 12345, log)
    os.write(terminal.slave, b"hello\n")
    for uid, expected in ((54321, b""), (12345, frame(b"d", b"hello\r\n"))):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            os.seteuid(uid)
            try:
                client.connect(str(tmp_path / SOCKET))
            finally:
                os.seteuid(0)
            for _ in range(4):
                terminal.wait(wakeup, 0.01)
            assert client.recv(100) == expected
    terminal.has_started()
    terminal.close()
    for descriptor in (log, wakeup, end):
        os.close(descriptor)
    assert (tmp_path / "log").read_bytes() == b"hello\r\n"


def test_a_program_may_end_before_its_client_comes(tmp_path: Path) -> None:
    """Its output waits for the client."""
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    terminal = ProgramTerminal(tmp_path, os.geteuid(), log)
    os.write(terminal.slave, b"hello\n")
    terminal.has_started()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(tmp_path / SOCKET))
        terminal.close()
        assert client.recv(100) == frame(b"d", b"hello\r\n")
    os.close(log)
