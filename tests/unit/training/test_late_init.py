"""A rank for which the others wait in `evenload.init` is named, with the line where it is."""

import time

import pytest

from evenload.training.session import late_init


@pytest.mark.parametrize("waits", [False, True], ids=["it works", "it waits itself"])
def test_who_is_long_in_init_is_named(monkeypatch, capsys, waits):
    monkeypatch.setattr(late_init, "_LATE_S", 0.05)
    monkeypatch.setattr(late_init, "waits_for_ranks", lambda frame: waits)
    with late_init.name_if_late(3):
        time.sleep(1.0)
    said = capsys.readouterr().err
    if waits:
        assert not said
    else:
        assert said.startswith("evenload: rank 3 has been in evenload.init for 0 s, at test_late_init.py:")


def test_who_is_soon_done_is_not_named(monkeypatch, capsys):
    monkeypatch.setattr(late_init, "_LATE_S", 0.2)
    with late_init.name_if_late(3):
        pass
    time.sleep(0.4)
    assert not capsys.readouterr().err
