"""The demo finds its example in a clone, and ends with a table and a text."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenload import stored_names
from evenload.cli.demo import find_example
from evenload.errors import ConfigError
from evenload.records.reader import read_events
from tests.warm import run


def test_the_example_is_found() -> None:
    assert "run.prepare" in find_example("train_gpt.py").read_text()
    with pytest.raises(ConfigError, match="neither at"):
        find_example("train_nothing.py")


@pytest.mark.slow
def test_a_short_demo(tmp_path: Path) -> None:
    short = ["--steps", "20", "--rounds", "1", "--block", "0.3"]
    done = run(["-m", "evenload.cli.main", "demo", "--project-dir", "runs/it", *short], tmp_path, 110)
    assert done.returncode == 0, done.stdout + done.stderr
    before, _, after = done.stdout.partition("measured in 1 rounds")
    assert "rank 1" in before and "shares" in before
    for row in ("rank 0 alone", "rank 1 alone", "sum of these", "equal shares", "Evenload", "efficiency"):
        assert row in after, row
    assert after.index("efficiency") < after.index("validation loss") < after.index("def ")
    assert "\x1b" not in done.stdout  # a pipe gets plain lines
    kinds = [event.kind for event in read_events(tmp_path / "runs" / "it")]
    assert stored_names.MEASUREMENT in kinds and kinds[-1] == "close"
