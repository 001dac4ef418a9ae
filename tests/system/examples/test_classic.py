"""The classic scripts: plain PyTorch and Evenload give the same weights, and the diffs between them are true."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.system.examples.scripts import EXAMPLES, relative_difference, run_commands, run_on_ranks

CLASSIC = EXAMPLES / "classic"
BOUND = 1e-12
EPOCHS = 3
NAMES = ["by_hand", "data_parallel", "ddp_spawn", "distributed_sampler", "functional"]


def options(save: Path) -> tuple[str, ...]:
    return "--double", "--epochs", str(EPOCHS), "--save", str(save)


def check(folder: Path, plain: str, evenload: str, num_lines: int) -> None:
    """Same lines (the losses to six digits, samples right of all), same weights."""
    told = [[line for line in text.splitlines() if re.match(r"epoch|\d+ of", line)] for text in (plain, evenload)]
    assert told[0] == told[1]
    assert len(told[0]) == num_lines
    assert relative_difference(folder / "plain.pt", folder / "evenload.pt") < BOUND


def plain_and_evenload(folder: Path, name: str, shares: tuple[int, int], *, torchrun: bool) -> tuple[str, str]:
    """Rank 0's output of both forms; the other rank must be silent."""
    script = CLASSIC / f"{name}_plain.py"
    plain = run_on_ranks(script, folder, *options(folder / "plain.pt"), num_ranks=1 + torchrun, torchrun=torchrun)
    script = CLASSIC / f"{name}_evenload.py"
    evenload = run_on_ranks(script, folder, *options(folder / "evenload.pt"), balance=shares)
    assert "".join((*plain[1:], *evenload[1:])) == ""
    return plain[0], evenload[0]


def test_data_parallel_class(tmp_path: Path) -> None:
    plain, evenload = plain_and_evenload(tmp_path, "data_parallel", (45, 19), torchrun=False)
    check(tmp_path, plain, evenload, EPOCHS + 1)
    assert "299 right" in plain


def test_distributed_sampler(tmp_path: Path) -> None:
    check(tmp_path, *plain_and_evenload(tmp_path, "distributed_sampler", (20, 44), torchrun=True), EPOCHS + 1)


def test_gradients_by_hand(tmp_path: Path) -> None:
    check(tmp_path, *plain_and_evenload(tmp_path, "by_hand", (63, 1), torchrun=True), EPOCHS)


def test_data_parallel_function(tmp_path: Path) -> None:
    plain = run_on_ranks(CLASSIC / "functional_plain.py", tmp_path, *options(tmp_path / "plain.pt"), num_ranks=1)
    ours = run_on_ranks(CLASSIC / "functional_evenload.py", tmp_path, *options(tmp_path / "evenload.pt"), num_ranks=1)
    check(tmp_path, plain[0], ours[0], EPOCHS)


@pytest.mark.slow
def test_spawn(tmp_path: Path) -> None:
    folders = tmp_path / "first", tmp_path / "second"
    plain = [str(CLASSIC / "ddp_spawn_plain.py"), *options(tmp_path / "plain.pt")]
    ours = [str(CLASSIC / "ddp_spawn_evenload.py"), *options(tmp_path / "evenload.pt")]
    check(tmp_path, *run_commands(dict(zip(folders, (plain, ours), strict=True))), EPOCHS + 1)


def test_the_diffs_are_true() -> None:
    spec = importlib.util.spec_from_file_location("diffs", CLASSIC / "diffs.py")
    diffs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(diffs)
    assert diffs.names() == NAMES
    for name in NAMES:
        assert (CLASSIC / f"{name}.diff").read_text() == diffs.diff(name), "run python examples/classic/diffs.py"
        assert f"({name}.diff)" in (CLASSIC / "README.md").read_text()
