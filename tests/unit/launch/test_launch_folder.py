"""The launch folder: where nothing can be written, the error says what to set."""

import tempfile

import pytest

from evenload.errors import LaunchError
from evenload.training.launch.host_workers import make_launch_folder


def test_without_a_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(prefix: str) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(LaunchError, match=r"No usable temporary directory found.*set TMPDIR"):
        make_launch_folder()
