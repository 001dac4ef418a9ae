"""What the house promises of itself: the public names, the size of Run, the map, the length of files."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import evenload
from tests.house.map import ROOT, SOURCE, listed, map_lines

PUBLIC = ["Config", "EvenloadError", "Run", "__version__", "count_tokens", "data_parallel", "init", "place", "spawn"]
RUN = {
    "prepare", "resume", "checkpoint", "export", "batches", "log", "any", "reduce", "group", "main_first", "close",
    "device", "rank", "world_size", "is_main",
}  # fmt: skip
LONGEST_FILE_LINES = 420


def test_public_names_are_those_agreed() -> None:
    assert sorted(evenload.__all__) == sorted(PUBLIC)
    assert len(evenload.__all__) <= 20
    for name in PUBLIC:
        assert getattr(evenload, name) is not None


def test_run_has_the_agreed_members_and_no_more() -> None:
    members = {name for name in vars(evenload.Run) if not name.startswith("_")}
    assert members == RUN
    methods = [name for name in members if inspect.isfunction(inspect.getattr_static(evenload.Run, name))]
    assert len(methods) <= 12


def test_importing_evenload_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, evenload; print(sorted({'torch', 'numpy'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_map_in_architecture_is_true() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    drawn = listed(text)
    assert drawn == map_lines(), "run `make map` to redraw the map in ARCHITECTURE.md"


def test_no_file_tells_two_things() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in SOURCE.rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > LONGEST_FILE_LINES
    }
    assert not long, (
        f"files over {LONGEST_FILE_LINES} lines, each a place to ask whether two things live in one room: {long}"
    )


def test_readme_names_only_commands_that_exist() -> None:
    commands = set(re.findall(r"^(?:\$ )?evenload ([a-z]+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE))
    done = subprocess.run(
        [sys.executable, "-m", "evenload.cli.main", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert commands
    assert all(command in done.stdout for command in commands), commands


def test_every_source_file_says_what_it_is() -> None:
    silent = [str(path) for path in SOURCE.rglob("*.py") if not Path(path).read_text().lstrip().startswith('"""')]
    assert not silent
