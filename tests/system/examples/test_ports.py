"""The ports of well-known scripts: the plain form and Evenload's, on two ranks with uneven shares, have the same losses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.system.examples.scripts import EXAMPLES, run_on_ranks

PORTS = EXAMPLES / "ports"


def losses(
    folder: Path, name: str, plain: tuple[str, ...], evenload: tuple[str, ...], balance: tuple[int, int]
) -> list[float]:
    """The numbers that both forms print, in float64; they must agree to the printed digits."""
    texts = []
    for form, arguments, ranks in (("plain", plain, 1), ("evenload", evenload, 2)):
        settings = {"balance": balance} if ranks == 2 else {}
        script = PORTS / f"{name}_{form}.py"
        texts.append(run_on_ranks(script, folder / form, *arguments, num_ranks=ranks, double=True, **settings))
    lines = [re.findall(r"^(?:epoch|step) .*", text[0], flags=re.MULTILINE) for text in texts]
    assert lines[0] == lines[1] and lines[0], texts
    assert not re.search(r"^(?:epoch|step) ", texts[1][1], flags=re.MULTILINE), "rank 1 prints too"
    return [float(number) for line in lines[0] for number in re.findall(r"(?:loss|accuracy|acc@1) ([\d.]+)", line)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for form in ("plain", "evenload"):
        (tmp_path / form).mkdir()
    return tmp_path


@pytest.mark.slow
def test_text(folder: Path) -> None:
    small = ("--max_length", "48", "--hidden_size", "16", "--dropout", "0", "--max_train_samples", "96")
    rest = ("--num_train_epochs", "2", "--num_warmup_steps", "2")
    found = losses(folder, "text", (*small, *rest), (*small, *rest), (23, 9))
    assert len(found) == 4 and found[2] < found[0]
    assert (folder / "evenload" / "runs" / "text" / "config.json").is_file()


@pytest.mark.slow
def test_image(folder: Path) -> None:
    arguments = ("--epochs", "2", "--batch-size", "128", "--clip-grad-norm", "1")
    found = losses(folder, "image", arguments, arguments, (100, 28))
    assert len(found) == 12 and found[-2] < found[0]


@pytest.mark.slow
def test_gpt(folder: Path) -> None:
    small = ("--block-size", "16", "--n-layer", "1", "--n-embd", "16", "--max-iters", "6", "--eval-interval", "3")
    found = losses(folder, "gpt", (*small, "--batch-size", "4"), (*small, "--batch-size", "16"), (11, 5))
    assert len(found) == 3 and found[2] < found[0]
    best = torch.load(folder / "evenload" / "runs" / "gpt" / "best.pt", weights_only=True)
    plain = torch.load(folder / "plain" / "runs" / "gpt" / "ckpt.pt", weights_only=True)
    assert best.keys() == plain["model"].keys()
