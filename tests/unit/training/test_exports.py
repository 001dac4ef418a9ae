"""Weights and pages that are written to a path of the user's: full disks, folders, errors of the model's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evenload.atomic_file import write_atomically
from evenload.errors import ConfigError
from evenload.training.checkpoint import files
from evenload.training.checkpoint.export import export_checkpoint, write_weights
from tests.small_disk import small_disk


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_weights_that_find_no_room_leave_no_partial_file(tmp_path: Path, suffix: str) -> None:
    """The error of safetensors is no OSError: its export ended with a traceback."""
    files.write(tmp_path / "run", 1, {"model": {"weight": torch.rand(1 << 18)}})
    with small_disk(tmp_path / "disk", 200_000):
        out = tmp_path / "disk" / f"model{suffix}"
        with pytest.raises(ConfigError, match=rf"model{suffix} ?.*: .*give the path of a file"):
            export_checkpoint(tmp_path / "run", out)
        assert list(out.parent.iterdir()) == []


def test_weights_and_pages_are_not_written_in_place_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``.`` has no name to write beside it, which ended with a traceback."""
    files.write(tmp_path / "run", 1, {"model": {"weight": torch.rand(1 << 18)}})
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for out in (Path(), here):
        with pytest.raises(ConfigError, match=r"can't be written to .*give the path of a file"):
            export_checkpoint(tmp_path / "run", out)
        with pytest.raises(OSError, match=r"busy|directory"):
            write_atomically(out, "a page")
    assert [*here.iterdir()] == [] and not list(tmp_path.glob(".*"))


class _Unready(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise KeyError("quantizer")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_an_error_of_the_models_own_is_no_error_of_the_path(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(KeyError, match="quantizer"):
        write_weights(tmp_path / f"model{suffix}", _Unready(2, 2))
