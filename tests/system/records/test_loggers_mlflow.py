"""MLflow's own library, with its local store: each step once, also over a kill; refusals and outages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenload.records.loggers.mlflow import metric_name
from tests.system.records.logger_children import run_child

pytest.importorskip("mlflow", reason="the package mlflow is missing")

KILLED = """
options = {"mlflow": {"tracking_uri": "sqlite:///" + os.path.abspath("mlflow.db"), "experiment": "unlike", "tags": ["a=1", "b"]}}
Path("options.json").write_text(json.dumps(options))
logger_thread.OPEN_TIMEOUT_S = 90.0  # a store's tables are made when it is first used
recorder = Recorder(RUN, loggers=("mlflow",), logger_options=options, hyperparameters={"seed": 3, "balance": [24, 6]})
record(recorder, range(0, 4))
until(lambda: delivered("mlflow") == 3)
record(recorder, range(4, 6))
os.kill(os.getpid(), signal.SIGKILL)
"""
GOES_ON = """
import logging; logging.disable()
options = json.loads(Path("options.json").read_text())
recorder = Recorder(RUN, loggers=("mlflow",), logger_options=options, hyperparameters={"seed": 4, "precision": "no"})
record(recorder, range(5, 70))  # 5 is done again
recorder.log({"val@1": 0.5, "note": "odd", "errors": [{"id": 3}]}, 69)
import numpy
own, run_id = recorder.tracker("mlflow")  # what run.tracker("mlflow") returns
sent_before = len(own.get_metric_history(run_id, "acc"))
own.log_text(run_id, "a text", "own/note.txt")
own.log_image(run_id, numpy.zeros((4, 4, 3), dtype="uint8"), "own/seen.png")
recorder.step(make_step(70, loss=float("nan")))
recorder.close()
from mlflow import MlflowClient
client = MlflowClient(options["mlflow"]["tracking_uri"])
state = json.loads((RUN / "loggers" / "mlflow.json").read_text())
run = client.get_run(state["run_id"])
history = lambda name: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
found = {
    "runs": len(client.search_runs([run.info.experiment_id])),
    "experiment": client.get_experiment(run.info.experiment_id).name,
    "name": run.info.run_name, "status": run.info.status, "params": run.data.params,
    "tags": {key: value for key, value in run.data.tags.items() if not key.startswith("mlflow.")},
    "acc": history("acc"), "loss": history("loss"), "val": history("val_1"), "share": history("share/rank1")[:2],
    "told": told(), "sent_before": sent_before, "own": [file.path for file in client.list_artifacts(run.info.run_id, "own")],
    "media": [file.path for name in ("note", "errors") for file in client.list_artifacts(run.info.run_id, f"media/{name}")],
}
# A run that was deleted there
client.delete_run(run.info.run_id)
recorder = Recorder(RUN, loggers=("mlflow",), logger_options=options)
record(recorder, [71])
limit = time.monotonic() + 15
while not told() and time.monotonic() < limit:
    time.sleep(0.1)
recorder.close()
found["deleted"] = told()
# A server that is gone
logger_thread.OPEN_TIMEOUT_S, logger_thread.CLOSE_TIMEOUT_S = 0.5, 0.5
RUN = Path("other")
began = time.monotonic()
recorder = Recorder(RUN, loggers=("mlflow",), logger_options={"mlflow": {"tracking_uri": "http://127.0.0.1:9"}})
record(recorder, range(3))
recorder.close()
found["gone_s"], found["gone"], found["kept"] = time.monotonic() - began, told(), len(reader.read_steps(RUN))
print(json.dumps(found), flush=True)
os._exit(0)
"""


def test_steps_are_neither_lost_nor_doubled_and_outages_are_told(tmp_path: Path) -> None:
    quiet = {"MLFLOW_TRACKING_URI": "", "MLFLOW_EXPERIMENT_NAME": "", "PYTHONWARNINGS": "ignore"}
    assert run_child(tmp_path, KILLED, **quiet).returncode == -9
    done = run_child(tmp_path, GOES_ON, **quiet)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["runs"], found["experiment"], found["name"]) == (1, "unlike", "run")
    assert (found["status"], found["told"]) == ("FINISHED", [])
    assert found["params"] == {"seed": "3", "balance": "[24, 6]", "precision": "no"}  # what is there can't change
    assert found["tags"] == {"a": "1", "b": ""}
    assert found["acc"] == [[step, step / 100] for step in range(70)]
    assert [step for step, _ in found["loss"]] == list(range(71))
    assert found["loss"][70][1] != found["loss"][70][1]
    assert found["val"] == [[69, 0.5]]
    assert found["sent_before"] == 70 and found["own"] == ["own/note.txt", "own/seen.png"]
    assert found["media"] == ["media/note/step-69.txt", "media/errors/step-69.table.json"]
    assert found["share"] == [[0, 85.0], [1, 85.0]]
    (deleted,) = found["deleted"]
    assert deleted.startswith("mlflow is disabled: the MLflow run ") and "was deleted; remove " in deleted
    assert found["gone_s"] < 15
    assert found["gone"][0].startswith("mlflow has not opened yet; training continues")
    assert found["kept"] == 3


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("loss", "loss"),
        ("share/rank0", "share/rank0"),
        ("acc@1 (top)", "acc_1 _top_"),
        ("/a//b/", "a/b"),
        ("../secret", "secret"),
        ("..", "_"),
        ("", "_"),
        ("grösse %", "grösse _"),
    ],
)
def test_names_as_mlflow_allows_them(name: str, allowed: str) -> None:
    assert metric_name(name) == allowed
