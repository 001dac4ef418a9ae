"""The trace of a run: valid by the trace event format, with the seconds of the records."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from evenload.errors import ConfigError
from evenload.records.reader import read_steps
from evenload.views.run.trace import StepRange, parse_steps, write_trace
from tests.unit.views.make_run import write_run


def check_format(trace: dict[str, Any]) -> None:
    """What the format requires: known phases, whole fields, and slices of a thread that nest."""
    slices = defaultdict(list)
    for row in trace["traceEvents"]:
        assert row["ph"] in "XiCM" and isinstance(row["name"], str) and row["name"]
        assert isinstance(row["pid"], int) and isinstance(row["tid"], int) and row["ts"] >= 0
        if row["ph"] == "X":
            assert row["dur"] >= 0
            slices[row["tid"]].append((row["ts"], row["ts"] + row["dur"]))
        elif row["ph"] == "C":
            assert row["args"] and all(isinstance(value, int | float) for value in row["args"].values())
        elif row["ph"] == "i":
            assert row["s"] in "gpt"
        else:
            assert row["args"]
    for spans in slices.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_the_trace_is_valid_and_holds_the_seconds_of_each_rank(tmp_path: Path) -> None:
    write_run(tmp_path, 400)
    path = tmp_path / "trace.json"
    assert write_trace(tmp_path, path, parse_steps("100:140")) == 40
    trace = json.loads(path.read_text())
    check_format(trace)
    rows = trace["traceEvents"]
    assert {row["name"] for row in rows if row["ph"] == "X"} >= {
        "step 100",
        "step 139",
        "data",
        "compute",
        "wait",
        "comm",
    }
    assert {row["args"].get("name") for row in rows if row["ph"] == "M"} >= {"steps", "rank 3: GPU 3 of box2"}
    assert [row["name"] for row in rows if row["ph"] == "i"] == ["lost", "rebuilt"]
    assert "order of the segments inside a step is not recorded" in trace["otherData"]["resolution"]
    drawn = sum(row["dur"] for row in rows if row["ph"] == "X" and row["name"] == "compute") / 1e6
    steps = [step for step in read_steps(tmp_path) if 100 <= step.step < 140]
    assert drawn == pytest.approx(sum(times.compute_s for step in steps for times in step.ranks), rel=1e-3)


@pytest.mark.parametrize(
    ("text", "first", "last", "count"),
    [
        ("5:8", 5, 7, 3),
        ("390:", 390, 399, 10),
        (":4", 0, 3, 4),
        ("-20:", 380, 399, 20),
        ("7", 7, 7, 1),
        ("-1", 399, 399, 1),
    ],
)
def test_steps_are_chosen_as_a_slice(text: str, first: int, last: int, count: int, run: Path) -> None:
    chosen = [step.step for step in parse_steps(text).choose(read_steps(run))]
    assert (chosen[0], chosen[-1], len(chosen)) == (first, last, count)


def test_the_last_hundred_steps_are_the_default(run: Path) -> None:
    assert len(StepRange().choose(read_steps(run))) == 100


@pytest.mark.parametrize(("text", "message"), [("a:b", "expected A:B"), ("500:600", "the run has steps 0 to 399")])
def test_a_wrong_choice_is_named(text: str, message: str, run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        write_trace(run, tmp_path / "trace.json", parse_steps(text))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, 400, (1.0,), faults=())
    return folder
