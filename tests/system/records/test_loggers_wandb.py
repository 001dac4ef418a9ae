"""Weights & Biases' own library, offline: each step once, whoever dies."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from evenload.records.loggers.wandb_files import newest_step_in, records_in, rows_in
from tests.paths import ROOT
from tests.ranks.wrong_uses.jobs import command
from tests.system.records.logger_children import run_child

pytest.importorskip("wandb", reason="the package wandb is missing")

KILLED = """
recorder = Recorder(RUN, loggers=("wandb",), logger_options=OPTIONS, hyperparameters={"seed": 3, "precision": "bf16"})
record(recorder, range(0, 5))
until(lambda: delivered("wandb") == 4)
print("opened", flush=True)
os.kill(os.getpid(), signal.SIGKILL)  # W&B's own process has not written these steps yet, and dies with this one
"""
GOES_ON = """
import psutil
recorder = Recorder(RUN, loggers=("wandb",), logger_options=OPTIONS, hyperparameters={"seed": 3, "precision": "no"})
record(recorder, range(3, 8))  # from an older checkpoint: 3 and 4 are done again
until(lambda: delivered("wandb") == 7)
core = [child for child in psutil.Process().children(recursive=True) if "wandb-core" in child.name()]
core[0].kill()  # with it goes what it had not written
record(recorder, range(8, 10))
until(lambda: any("works again" in message for message in told()))
record(recorder, range(10, 12))
recorder.log({"val_loss": 0.5}, 11)
recorder.close()
print(json.dumps(told()))
"""
TRACKER = """
import torch, evenload, wandb
from tests.paths import ROOT
from tests.ranks.wrong_uses.jobs import Job, command

run = evenload.init(project_dir="run", loggers="wandb", logger_options={"wandb": {"project": "x", "mode": "offline"}})
job = Job(run)
for step in job.loader:
    job.step(step)
    if step.index == 2:
        table = wandb.Table(columns=["text"], data=[["a"]])
        run.tracker("wandb").log({"texts": table, "own": 1}, step=step.index)
        weights = torch.histogram(torch.randn(9), 3)
        run.log({"seen": torch.rand(3, 8, 8), "note": "odd", "weights": weights, "errors": [{"id": 3}]})
run.close()
"""
HANGS = """
import psutil
logger_thread.CLOSE_TIMEOUT_S = 0.5
recorder = Recorder(RUN, loggers=("wandb",), logger_options=OPTIONS)
record(recorder, range(12, 14))
until(lambda: delivered("wandb") == 13)
core = [child for child in psutil.Process().children(recursive=True) if "wandb-core" in child.name()]
core[0].suspend()  # as if its server never answered
recorder.close()
print(json.dumps(told()[-1]), flush=True)  # and this process ends, by itself
"""
OPTIONS = 'OPTIONS = {"wandb": {"project": "unlike", "name": "first", "tags": "a,b", "mode": "offline"}}\n'


def test_steps_are_neither_lost_nor_doubled_whoever_dies(tmp_path: Path) -> None:
    variables = {"WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true", "WANDB_API_KEY": "", "WANDB_MODE": ""}
    killed = run_child(tmp_path, OPTIONS + KILLED, **variables)
    assert (killed.returncode, killed.stdout) == (-9, "opened\n"), killed.stderr
    went_on = run_child(tmp_path, OPTIONS + GOES_ON, **variables)
    assert went_on.returncode == 0, went_on.stderr
    told = json.loads(went_on.stdout)
    assert [message.partition(";")[0] for message in told] == [
        "wandb fails: ConnectionResetError: Connection lost",
        "wandb works again and has received every step so far",
    ]
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 3
    run_id = json.loads((tmp_path / "run/loggers/wandb.json").read_text())["run_id"]
    assert {path.name for path in files} == {f"run-{run_id}.wandb"}  # one run of W&B's, whoever wrote
    rows = [row for path in files for row in rows_in(path)]
    steps = [row["_step"] for row in rows]
    assert sorted(steps) == list(range(12))
    by_step = {row["_step"]: row for row in rows}
    assert by_step[4]["acc"] == 0.04 and by_step[4]["loss"] == pytest.approx(4.0 / 1.4)
    assert by_step[11]["val_loss"] == 0.5
    assert by_step[9]["share/rank1"] == 85
    config = _config(files[-1])
    assert (config["seed"], config["precision"]) == (3, "no")
    assert newest_step_in(files) == 11
    hung = run_child(tmp_path, OPTIONS + HANGS, timeout_s=60, **variables)
    assert hung.returncode == 0, hung.stderr
    assert "wandb has not received all steps" in hung.stdout


def _config(path: Path) -> dict[str, Any]:
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    found: dict[str, Any] = {}
    for record in records_in(path.read_bytes()):
        message = messages.Record.FromString(record)
        kind = message.WhichOneof("record_type")
        if kind in ("run", "config"):
            update = message.run.config.update if kind == "run" else message.config.update
            found |= {item.key: json.loads(item.value_json) for item in update}
    return found


NOBODY_HOME = """
try:
    Recorder(RUN, loggers=("wandb",))
except ConfigError as error:
    print("refused", error)
logger_thread.OPEN_TIMEOUT_S, logger_thread.CLOSE_TIMEOUT_S = 0.5, 0.5
os.environ["WANDB_API_KEY"] = "0123456789" * 4
os.environ["WANDB_BASE_URL"] = "http://127.0.0.1:9"
began = time.monotonic()
recorder = Recorder(RUN, loggers=("wandb",))
record(recorder, range(3))
recorder.close()
assert time.monotonic() - began < 20
print(json.dumps([told(), [step.step for step in reader.read_steps(RUN)], delivered("wandb")]))
sys.stdout.flush()
os._exit(0)  # as a worker does
"""


def test_nobody_logged_in_is_refused_and_a_dead_server_is_told(tmp_path: Path) -> None:
    variables = {"WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true", "WANDB_API_KEY": "", "WANDB_MODE": ""}
    done = run_child(tmp_path, NOBODY_HOME, HOME=str(tmp_path), NETRC=str(tmp_path / "none"), **variables)
    assert done.returncode == 0, done.stderr
    refused, answer = done.stdout.splitlines()
    assert refused.startswith("refused W&B cannot open a run: No API key configured")
    assert "wandb.mode=offline" in refused
    told, steps, delivered = json.loads(answer)
    assert told[0].startswith("wandb has not opened yet; training continues")
    assert told[1].startswith("wandb has not received all steps") and "evenload show " in told[1]
    assert (steps, delivered) == ([0, 1, 2], -1)


def test_a_file_that_is_torn_or_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "run-x.wandb"
    assert newest_step_in([]) is None
    path.write_bytes(b"")
    assert newest_step_in([path]) == -1
    path.write_bytes(b":W&B\0\0\0" + b"\1\2\3\4\5\0\1garbage!" * 9)
    assert newest_step_in([path, tmp_path / "missing"]) in (None, -1)


def test_run_tracker_is_wandbs_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRACKER)
    ended = command(tmp_path, "train.py", WANDB_DIR=str(tmp_path), WANDB_SILENT="true", PYTHONPATH=str(ROOT))
    assert ended.code == 0, ended.stderr
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows = {row["_step"]: row for row in rows_in(file)}
    assert sorted(rows) == [0, 1, 2, 3] and all("loss" in row for row in rows.values())
    assert rows[2]["own"] == 1 and "texts" in " ".join(rows[2])
    for name in ("seen", "note", "weights", "errors"):
        assert name in " ".join(rows[2]), name
