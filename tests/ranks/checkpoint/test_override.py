"""`--override`, `--dry-run` and a run with nothing to do, on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.errors import RankFailedError
from evenload.testing import run_ranks


def _session(folder: str, seed: int, batch_size: int, epochs: int, until: int = -1) -> dict[str, Any]:
    run = evenload.init(project_dir=folder, seed=seed)
    data = TensorDataset(torch.arange(16.0).reshape(16, 1))
    model, loader = run.prepare(nn.Linear(1, 1), DataLoader(data, batch_size, shuffle=True))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    saved = run.resume(model=model, optimizer=optimizer)
    steps = []
    for _ in range(loader.epoch, epochs):
        for step in loader:
            step.backward(lambda batch: model(batch[0]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            steps.append((step.epoch, step.index, step.batch.epoch_step))
            run.checkpoint(every=1, values={"seen": step.index})
            if step.index == until:
                break
        else:
            continue
        break
    run.close()
    return {"steps": steps, "saved": dict(saved), "loaded": bool(saved)}


def test_the_rest_of_an_epoch_is_left_out(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    first = run_ranks(_session, 2, folder, 0, 4, 2, 2)
    assert first[0]["steps"] == [(0, 0, 0), (0, 1, 1), (0, 2, 2)] and not first[0]["loaded"]
    second = run_ranks(_session, 2, folder, 5, 8, 2, settings={"override": True})
    assert [rank["steps"] for rank in second] == [[(1, 3, 0), (1, 4, 1)]] * 2
    assert [rank["saved"] for rank in second] == [{"seen": 2}] * 2
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert "taken; the rest of the epoch is left out" in events
    third = run_ranks(_session, 2, folder, 5, 8, 2)
    assert [rank["steps"] for rank in third] == [[]] * 2 and third[0]["saved"] == {"seen": 4}
    run_ranks(_dry, 1, folder, 5, 8, 2, settings={"dry_run": True})
    shown = (tmp_path / "dry.txt").read_text()
    assert "this run is finished at step 5 (epoch 2); more epochs in the script continue it" in shown
    assert "nothing to train: no step began" in shown and "seed = 5" in shown
    fourth = run_ranks(_session, 1, folder, 5, 8, 3)
    assert [step[:2] for step in fourth[0]["steps"]] == [(2, 5), (2, 6)]
    assert "the finished run goes on with epoch 2" in (tmp_path / "run" / "events.jsonl").read_text()


def test_override_with_fresh_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="--override has no effect with --fresh, which resumes nothing"):
        run_ranks(
            _session, 1, str(tmp_path / "run"), 0, 4, 2, settings={"override": True, "fresh": True, "dry_run": True}
        )


def _dry(folder: str, *arguments: Any) -> None:
    import contextlib

    with (Path(folder).parent / "dry.txt").open("w") as file, contextlib.redirect_stdout(file):
        _session(folder, *arguments)


def _fresh(folder: str, fails: bool) -> list[int]:
    run = evenload.init(project_dir=folder, seed=0, batch_max=8 if fails else None)
    (Path(folder) / "vocabulary.txt").write_text("of this session")
    model, loader = run.prepare(nn.Linear(1, 1), DataLoader(torch.ones(16, 1), 8))
    run.resume(model=model)
    steps = []
    for step in loader:
        step.backward(lambda batch: model(batch).square().mean())
        model.zero_grad()
        steps.append(step.index)
    run.close()
    return steps


def test_fresh_moves_nothing_away_before_all_settings_are_checked(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run_ranks(_fresh, 2, str(folder), False) == [[0, 1]] * 2
    before = sorted(folder.rglob("*"))
    with pytest.raises(RankFailedError, match="has no effect"):
        run_ranks(_fresh, 2, str(folder), True, settings={"fresh": True})
    assert sorted(path for path in folder.rglob("*") if path.suffix != ".txt" or path.stem == "vocabulary") == before
    assert list(tmp_path.iterdir()) == [folder]
    assert run_ranks(_fresh, 2, str(folder), False, settings={"fresh": True}) == [[0, 1]] * 2
    (aside,) = (path for path in tmp_path.iterdir() if path != folder)
    assert (aside / "checkpoints").is_dir() and (aside / "events.jsonl").exists()
    assert (folder / "vocabulary.txt").read_text() == "of this session" and not (aside / "vocabulary.txt").exists()
    assert '"loader"' in (folder / "events.jsonl").read_text()
