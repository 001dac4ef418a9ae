"""Ranks that torchrun started print an error that all of them raise once, by a count in the store of its agent."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

import evenload
from evenload.errors import EvenloadError, PeerLostError, StepError
from evenload.training.launch import worker
from evenload.training.launch.environment import WORKER_VARIABLE
from evenload.training.launch.print_once import warn_once
from evenload.training.launch.uncaught import report_uncaught


def raised_by(rank: int, error: Exception) -> None:
    """Let the hook of a rank receive an error of a script."""
    sys.excepthook = sys.__excepthook__
    worker.progress.step = None  # another test of this process may have set it
    report_uncaught(2, rank)
    try:
        raise error
    except type(error):
        sys.excepthook(type(error), error, error.__traceback__)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys, "exit", sys.exit)
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


def test_a_text_of_sys_exit_is_printed_once(agent: TCPStore) -> None:
    codes = []
    for rank in (1, 0):
        sys.excepthook = sys.__excepthook__
        report_uncaught(2, rank)
        with pytest.raises(SystemExit) as ended:
            sys.exit("the data is missing")
        codes.append(ended.value.code)
        with pytest.raises(SystemExit) as ended:
            sys.exit(3)
        assert ended.value.code == 3
    assert codes == ["the data is missing", 1]


def test_without_such_a_store_rank_0_prints_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    error: EvenloadError = StepError("write this")
    raised_by(0, error)
    raised_by(1, error)
    printed = capsys.readouterr().err
    assert printed.count("failed: StepError: write this") == 2 and printed.count("Traceback") == 1


@pytest.mark.parametrize(
    "mistake", [lambda: evenload.init(sede=0), lambda: evenload.init("runs/x"), lambda: evenload.inti()]
)
def test_a_mistake_before_the_ranks_have_met_is_printed_once(
    agent: TCPStore, mistake: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(WORKER_VARIABLE, raising=False)
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        sys.excepthook = sys.__excepthook__
        with pytest.raises(EvenloadError) as raised:
            mistake()
        sys.excepthook(raised.type, raised.value, raised.tb)
    printed = capsys.readouterr().err
    assert printed.startswith("evenload: rank 1 failed: ") and printed.count("Traceback") == 1, printed


def test_a_warning_of_all_ranks_is_printed_once_at_the_users_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rank in (1, 0):
            monkeypatch.setenv(WORKER_VARIABLE, str(tmp_path / f"worker-{rank}.json"))
            warn_once("the labels contain -100")
    assert [(str(one.message), one.filename) for one in caught] == [("the labels contain -100", __file__)]
