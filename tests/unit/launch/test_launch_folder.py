"""Folders of launches: none is left, also of a launcher that was killed."""

import os
import tempfile
import time

import pytest

from evenload.errors import LaunchError
from evenload.training.launch.launch_folder import launch_folder


def age(folder):
    os.utime(folder / "lock", (time.time() - 3600,) * 2)


def test_the_folder_of_a_launcher_that_was_killed_is_removed_by_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, call = tmp_path / "evenload-run-killed", tmp_path / "evenload-call-mine"
    for folder in (killed, call):
        folder.mkdir()
        for name in ("lock", "stop-worker-0"):
            (folder / name).touch()
    age(call)
    with launch_folder() as running:
        assert running.parent == tmp_path and killed.exists(), "it may be a launch that has just begun"
        age(running)
        age(killed)
        with launch_folder():
            assert not killed.exists() and running.exists()
    assert [*tmp_path.iterdir()] == [call]


@pytest.mark.timeout(20)
def test_a_pipe_is_not_waited_for_and_a_folder_of_another_user_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder, linked = tmp_path / "evenload-run-x", tmp_path / "evenload-run-y"
    folder.mkdir()
    linked.mkdir()
    os.mkfifo(folder / "lock")
    (linked / "lock").symlink_to(folder / "lock")
    with launch_folder():  # it would wait for ever
        pass
    other = tmp_path / "evenload-run-other"
    other.mkdir()
    (other / "lock").touch()
    age(other)
    monkeypatch.setattr(os, "getuid", lambda: -1)
    with launch_folder():
        assert other.exists()


def test_without_a_folder_for_temporary_files_the_error_says_what_to_set(monkeypatch):
    def refuse(prefix):
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(LaunchError, match=r"No usable temporary directory found.*set TMPDIR"), launch_folder():
        pass
