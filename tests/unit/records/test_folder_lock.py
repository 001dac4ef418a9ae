from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from evenload.records.folder_lock import LOCK_FILE, lock_folder


def test_a_folder_that_is_moved_while_it_is_locked_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lockf = fcntl.lockf

    def moved_meanwhile(*arguments: Any) -> None:
        monkeypatch.setattr(fcntl, "lockf", lockf)
        folder.rename(tmp_path / "aside")
        folder.mkdir()
        lockf(*arguments)

    monkeypatch.setattr(fcntl, "lockf", moved_meanwhile)
    with lock_folder(folder) as held:
        assert os.path.samestat(os.fstat(held.fileno()), (folder / LOCK_FILE).stat())
