"""Loggers on the command line: what is refused, and a whole run that writes to two of them."""

import json
from pathlib import Path

import pytest

from evenload.cli.main import main
from evenload.records.loggers.wandb_files import rows_in
from tests.system.launch.scripts import run


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--loggers", "wandbb"], "unknown logger 'wandbb'; expected tensorboard, wandb, mlflow"),
        (["--loggers", "wandb,wandb"], "the logger wandb is listed twice"),
        (["--loggers", "wandb", "--logger-option", "project=x"], "expected LOGGER.OPTION=VALUE"),
        (["--loggers", "wandb", "--logger-option", "wandb.projet=x"], "wandb has no such option"),
        (["--loggers", "wandb", "--logger-option", "mlflow.name=x"], "which is not a logger of this run (wandb)"),
        (["--logger-option", "wandb.name=x", "--logger-option", "wandb.name=y"], "wandb.name is already 'x'"),
        (["--loggers", "wandb", "-c", "run.toml"], "loggers is set twice, differently: --loggers wandb and loggers ="),
    ],
)
def test_wrong_loggers_are_refused_before_a_rank_starts(tmp_path, monkeypatch, capfd, arguments, told):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("raise SystemExit('it ran')")
    Path("run.toml").write_text("loggers = ['mlflow']\n")
    with pytest.raises(SystemExit) as leave:
        main(["run", "-d", "cpu:2", *arguments, "train.py"])
    output, error = capfd.readouterr()
    assert leave.value.code == 2 and told in error and "it ran" not in output + error


TRAIN = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import evenload
run = evenload.init(project_dir="run", log_every_s=30, logger_options={"wandb": {"mode": "offline"}})
model, loader = run.prepare(torch.nn.Linear(4, 1), DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in loader:
    step.backward(lambda batch: model(batch[0]).square().mean())
    optimizer.step(); optimizer.zero_grad()
    run.log({"lr": 0.1})
"""


def test_a_run_writes_to_the_loggers_that_the_command_line_names(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the package wandb is missing")
    for name, value in {"WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    code, _, stderr = run(
        tmp_path, TRAIN, "-d", "cpu", "--loggers", "tensorboard,wandb", initialised=False, timeout_s=100
    )
    assert code == 0, stderr
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows = list(rows_in(path))
    assert [row["_step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["lr"] == 0.1 and "wait_s/rank0" in row for row in rows)
    assert list((tmp_path / "run/tensorboard").iterdir())
    for logger in ("tensorboard", "wandb"):
        mark = json.loads((tmp_path / "run/loggers" / f"{logger}.json").read_text())
        assert (mark["newest"], mark["offset"]) == (3, (tmp_path / "run/steps.jsonl").stat().st_size)
