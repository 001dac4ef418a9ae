"""Loops over steps that are left by `break` right after a rank has missed a step: it receives the state before the next use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import evenload
from evenload.training.checkpoint import files
from tests.ranks.elastic.supervised import Supervised
from tests.ranks.elastic.test_losses import BATCH, Fault, Faults, Net, data


def script_of_steps(folder: str, faults: list[Fault], between: bool = False) -> dict[str, Any]:
    """Leave the loop over the training loader in each epoch, export, evaluate, and go on.

    `between`: leave it in front of the optimizer, so that the last step has no effect.
    """
    torch.set_default_dtype(torch.float64)
    fault = Faults(Path(os.environ["EVENLOAD_WORKER"]).stem, faults)
    fault.inject()
    run = evenload.init(project_dir=folder, seed=0, timeout_s=30, balance="even")
    torch.manual_seed(0)
    model, loader = run.prepare(Net(), DataLoader(data(), batch_size=BATCH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.resume(model=model, optimizer=optimizer)
    results = []
    for epoch in range(4):
        for number, step in enumerate(loader):
            fault.step = step.index
            step.backward(lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1]))
            for other in range(4):
                fault.at(f"missed by w{other}")
            if between and number == 2:
                optimizer.zero_grad()
                break
            optimizer.step()
            optimizer.zero_grad()
            if number == 2:
                break
        run.export(f"{folder}/epoch-{epoch}.pt")
        model.eval()
        if epoch % 2:
            total = sum(float(model(x).detach().sum()) for x, _ in run.batches(DataLoader(data(), batch_size=BATCH)))
            results.append(run.reduce(total))
        model.train()
    run.close()
    return {"results": results, "weights": torch.cat([v.flatten() for v in model.state_dict().values()])}


@pytest.mark.parametrize(
    ("missed_by", "step", "between"), [("w1", 2, False), ("w0", 5, False), ("w0", 11, False), ("w0", 5, True)]
)
def test_a_rank_misses_the_step_after_which_the_loop_is_left(
    tmp_path: Path, missed_by: str, step: int, between: bool
) -> None:
    found = []
    for name, faults in (("undisturbed", []), ("disturbed", [("w2", f"missed by {missed_by}", step)])):
        supervised = Supervised(tmp_path / name, script_of_steps, str(tmp_path / name / "run"), faults, between)
        (tmp_path / name).mkdir()
        supervised.start(3)
        found.append(supervised.run(60))
        assert supervised.lost == [worker for worker, _, _ in faults]
    expected = found[0]["w0"]
    for seen in found[1].values():
        assert float((seen["weights"] - expected["weights"]).norm() / expected["weights"].norm()) <= 1e-12
        assert seen["results"] == pytest.approx(expected["results"], rel=1e-12)
    for epoch in range(4):
        exports = [torch.load(tmp_path / name / "run" / f"epoch-{epoch}.pt") for name in ("undisturbed", "disturbed")]
        for key, value in exports[0].items():
            torch.testing.assert_close(exports[1][key], value, rtol=1e-12, atol=1e-14)
    newest = files.newest(tmp_path / "disturbed" / "run")
    assert newest is not None
    saved = files.read(newest)["model"]
    weights = torch.cat([value.flatten() for value in saved.values()])
    assert float((weights - expected["weights"]).norm() / expected["weights"].norm()) <= 1e-12
