"""Folders of other users, and a user without a home folder: a line that names what to do, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenload.cli.main import main
from evenload.records import reader


def ended(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["show"], ["change", "-d", "cpu"]])
def test_a_run_of_another_user(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path / "events.jsonl"))

    monkeypatch.setattr(reader, "is_run", refuse)
    error = ended([*arguments, str(tmp_path)], capsys)
    assert f"{tmp_path}/events.jsonl: Permission denied; start this as the user to whom it belongs" in error


def test_a_full_disk_takes_no_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(path: Path) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(reader, "is_run", refuse)
    assert "evenload: error: the output: No space left on device" in ended(["show", "/"], capsys)


def test_a_user_without_a_home_folder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", refuse)
    assert "this user has none: set HOME" in ended(["ps"], capsys)
