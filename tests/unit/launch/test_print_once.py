"""Ranks that torchrun started print an error that all of them raise once, by a count in the store of its agent."""

from __future__ import annotations

import sys

import pytest
from torch.distributed import TCPStore

from evenload.errors import EvenloadError, PeerLostError, StepError
from evenload.training.launch import worker


def raised_by(rank: int, error: Exception) -> None:
    """Let the hook of a rank receive an error of a script."""
    sys.excepthook = sys.__excepthook__
    worker.progress.step = None  # another test of this process may have set it
    worker.report_uncaught(2, rank)
    try:
        raise error
    except type(error):
        sys.excepthook(type(error), error, error.__traceback__)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return store


def test_an_error_of_all_ranks_is_printed_once(
    agent: TCPStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error in (StepError("write this"), ValueError("as in plain Python")):
        raised_by(1, error)
        raised_by(0, error)
        printed = capsys.readouterr().err
        assert printed.count("Traceback") == 1 and printed.splitlines()[-1].endswith(f"Error: {error}"), printed
    raised_by(0, StepError("of rank 0"))
    raised_by(1, StepError("of rank 1"))
    printed = capsys.readouterr().err
    assert "rank 0 failed: StepError: of rank 0" in printed and "rank 1 failed: StepError: of rank 1" in printed
    raised_by(1, PeerLostError("rank 0 is gone"))  # what follows from an error elsewhere: no traceback
    assert capsys.readouterr().err == "evenload: rank 1 failed: PeerLostError: rank 0 is gone\n"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    raised_by(0, StepError("write this"))
    assert capsys.readouterr().err.count("Traceback") == 1, "the next attempt prints it again"


def test_without_such_a_store_rank_0_prints_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    error: EvenloadError = StepError("write this")
    raised_by(0, error)
    raised_by(1, error)
    printed = capsys.readouterr().err
    assert printed.count("failed: StepError: write this") == 2 and printed.count("Traceback") == 1
