"""`run.gather`, `run.barrier` and `run.print`: values of all ranks in the loader's order, also from ranks without batches."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import evenload
from evenload.errors import ConfigError, DesyncError
from evenload.testing import run_ranks


class Scores(NamedTuple):
    prediction: torch.Tensor
    name: list[str]


class Stream(IterableDataset[Any]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Any:
        return iter(torch.arange(self.num_samples))


def _prepare(folder: str, balance: tuple[int, ...]) -> evenload.Run:
    torch.set_num_threads(1)
    run = evenload.init(project_dir=folder, seed=0, balance=balance)
    run.prepare(nn.Linear(2, 1), DataLoader(TensorDataset(torch.randn(64, 2)), batch_size=32))
    return run


def gather_all(folder: str, balance: tuple[int, ...]) -> dict[str, Any]:
    run = _prepare(folder, balance)
    found: dict[str, Any] = {}
    for kind, loader in {
        "few": DataLoader(range(2)),
        "uneven": DataLoader(range(101), batch_size=7),
        "stream": DataLoader(Stream(41), batch_size=8),
        "few of a stream": DataLoader(Stream(2), batch_size=8),
    }.items():
        inside, after, names = [], [], []
        for batch in run.batches(loader):
            inside.append(run.gather(batch))
            after.append(batch.half())
            names += [f"sample {int(index)}" for index in batch]
        found[f"{kind} batches"] = len(after)
        found[f"{kind} inside"] = torch.cat(inside).tolist() if inside else []
        result = run.gather(Scores(torch.cat(after) if after else torch.empty(0), names))
        found[f"{kind} after"] = (result.prediction.tolist(), result.prediction.dtype, type(result).__name__)
        found[f"{kind} names"] = result.name
    # Of other lengths: by rank.
    found["by rank"] = run.gather(
        {"ones": np.full(run.rank + 1, run.rank), "rank": run.rank, "scalar": torch.tensor(1.5)}
    )
    found["rows"] = run.gather(torch.full((run.rank, 3), float(run.rank), dtype=torch.bfloat16)).shape
    found["refused"] = []
    for wrong in (torch.zeros(1, run.rank + 1), {f"key {run.rank}": 1}, [1] if run.rank else 1):
        with pytest.raises(DesyncError) as raised:
            run.gather(wrong)
        found["refused"].append(str(raised.value))
    run.barrier()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run.print("from", run.rank, end="!")
    found["printed"] = printed.getvalue()
    run.close()
    return found


@pytest.mark.parametrize("balance", [(24, 6, 2), (24, 8, 0)])
def test_gathered_values_are_in_the_loaders_order(balance: tuple[int, ...], tmp_path: Path) -> None:
    ranks = run_ranks(gather_all, 3, str(tmp_path), balance)
    for rank, found in enumerate(ranks):
        for kind, size in {"few": 2, "uneven": 101, "stream": 41, "few of a stream": 2}.items():
            everything = list(range(size))
            assert found[f"{kind} after"] == (everything, torch.float16, "Scores"), kind
            assert found[f"{kind} names"] == [f"sample {index}" for index in everything]
            assert found[f"{kind} inside"] == (everything if found[f"{kind} batches"] else [])
        assert found["by rank"]["ones"].tolist() == [0, 1, 1, 2, 2, 2]
        assert found["by rank"]["rank"] == [0, 1, 2]
        assert found["by rank"]["scalar"].tolist() == [1.5] * 3
        assert found["rows"] == (3, 3)
        assert (
            "differ beyond their first dimension: rank 0: (1, 1) torch.float32; rank 1: (1, 2)" in found["refused"][0]
        )
        assert "pass the same keys and kinds on every rank" in found["refused"][1]
        assert found["printed"] == ("from 0!" if rank == 0 else "")


def test_a_single_rank(tmp_path: Path) -> None:
    run = _prepare(str(tmp_path), (32,))
    try:
        assert run.gather(torch.arange(3)).tolist() == [0, 1, 2]
        assert run.gather({"names": ["a", "b"], "best": 0.5}) == {"names": ["a", "b"], "best": [0.5]}
        run.barrier()
        with pytest.raises(ConfigError, match="can't send a function to another rank"):
            run.gather(lambda: 1)
    finally:
        run.close()


def break_off(folder: str) -> list[list[int]]:
    """Loops over evaluations that end early, on all ranks, with ranks that have no batches."""
    run = _prepare(folder, (24, 8, 0))
    results = []
    for _ in range(2):
        seen: list[int] = []
        for index, batch in enumerate(run.batches(DataLoader(range(100), batch_size=10))):
            seen += batch.tolist()
            if index == 2:
                break
        results.append(run.gather(seen))
    run.close()
    return results


def test_an_evaluation_that_ends_early(tmp_path: Path) -> None:
    for results in run_ranks(break_off, 3, str(tmp_path)):
        assert results == [list(range(30))] * 2


OWN_METRIC = """
import datasets
import evaluate
import sklearn.metrics

class MacroF1(evaluate.Metric):
    def _info(self):
        kinds = datasets.Features({"predictions": datasets.Value("int32"), "references": datasets.Value("int32")})
        return evaluate.MetricInfo(description="F1", citation="", inputs_description="", features=kinds)

    def _compute(self, predictions, references):
        return {"f1": float(sklearn.metrics.f1_score(references, predictions, average="macro"))}
"""


def evaluate_f1(folder: str, packages: tuple[str, ...]) -> dict[str, float]:
    """The recipes of docs/evaluation.md: differences of sklearn, torchmetrics and evaluate to the F1 of all samples."""
    run = _prepare(folder, (24, 6, 2))
    scores, truth = torch.randn(101, 5, generator=torch.Generator().manual_seed(1)), torch.arange(101) % 5
    val_loader = DataLoader(TensorDataset(scores, truth), batch_size=16)
    predictions: list[int] = []
    labels: list[int] = []
    for x, y in run.batches(val_loader):
        predictions += x.argmax(1).tolist()
        labels += y.tolist()
    predictions, labels = run.gather((predictions, labels))
    from sklearn.metrics import f1_score

    results = {"sklearn": float(f1_score(labels, predictions, average="macro"))}
    if "torchmetrics" in packages:
        import torchmetrics

        options = {"num_classes": 5, "average": "macro", "sync_on_compute": False}
        metric = torchmetrics.F1Score("multiclass", **options)
        results["torchmetrics"] = float(metric(torch.tensor(predictions), torch.tensor(labels)))
        inside = torchmetrics.F1Score("multiclass", **options)
        for x, y in run.batches(val_loader):
            inside.update(*run.gather((x, y)))
        results["torchmetrics inside the loop"] = float(inside.compute())
    if "evaluate" in packages:
        import evaluate

        # evaluate.load("f1") downloads it; a metric of one's own is loaded in the same way.
        found = evaluate.load(f"{folder}/macro_f1.py").compute(predictions=predictions, references=labels)
        results["evaluate"] = found["f1"]
    expected = float(f1_score(truth, scores.argmax(1), average="macro"))
    run.close()
    return {name: abs(result - expected) for name, result in results.items()}


@pytest.mark.parametrize("package", ["sklearn", "torchmetrics", "evaluate"])
def test_f1_of_gathered_predictions(package: str, tmp_path: Path) -> None:
    pytest.importorskip(package, reason=f"the package {package} is missing")
    (tmp_path / "macro_f1.py").write_text(OWN_METRIC)
    for differences in run_ranks(evaluate_f1, 3, str(tmp_path), (package,)):
        assert package in differences and max(differences.values()) < 1e-6, differences
