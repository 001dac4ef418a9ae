from __future__ import annotations

import importlib.util
import json
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evenload.cli.main import main
from evenload.errors import ConfigError
from evenload.records.loggers import logger_thread
from evenload.records.loggers.catalogue import check_loggers
from evenload.records.loggers.scalars import read_records
from evenload.records.reader import read_events, read_steps
from evenload.records.recorder import Recorder
from tests.paths import ROOT
from tests.unit.records.make import make_step


def read_back(folder: Path) -> dict[str, dict[int, float]]:
    """Tag to step to value, by TensorBoard's own reader; a point given twice is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    accumulator = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    found = {}
    for tag in accumulator.Tags()["scalars"]:
        points = accumulator.Scalars(tag)
        found[tag] = {point.step: point.value for point in points}
        assert len(points) == len(found[tag]), tag
    return found


def test_tensorboards_own_reader_finds_it_all(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, loggers=("tensorboard",))
    recorder.log({"lr": 0.5}, 0)
    recorder.step(make_step(0, metrics={"lr": 9.0, "accuracy": 0.25}))
    recorder.log({"val_loss": 3.0}, 0)
    recorder.step(make_step(1, loss=float("nan")))
    recorder.close()
    scalars = read_back(tmp_path)
    assert scalars["lr"] == {0: 0.5}
    assert scalars["accuracy"] == {0: 0.25}
    assert scalars["val_loss"] == {0: 3.0}
    assert scalars["loss"][0] == 4.0
    assert scalars["loss"][1] != scalars["loss"][1]
    assert scalars["evenload/samples_per_s"] == {0: 512.0, 1: 512.0}
    assert scalars["share/rank1"] == {0: 85.0, 1: 85.0}
    assert scalars["wait_s/rank1"][0] == pytest.approx(0.1)
    assert scalars["memory_bytes/rank0"][0] == 3 << 30


def test_the_settings_are_tensorboards_hyperparameters(tmp_path: Path) -> None:
    settings = {"precision": "bf16", "seed": 3, "balance": [24, 6], "sources": {"seed": "init(seed=3)"}}
    Recorder(tmp_path, loggers=("tensorboard",), hyperparameters=settings).close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    ((tag, content),) = accumulator.PluginTagToContent("hparams").items()
    assert tag == "_hparams_/session_start_info"
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert {name: value.number_value or value.string_value for name, value in hparams.items()} == {
        "precision": "bf16",
        "seed": 3.0,
        "balance": "[24, 6]",
    }


def test_the_users_own_loss_is_written_once(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, loggers=("tensorboard",))
    recorder.log({"loss": 42.0}, 0)
    recorder.step(make_step(0))
    recorder.step(make_step(1))
    recorder.close()
    assert read_back(tmp_path)["loss"] == {0: 42.0}


def test_steps_done_again_replace_the_lost_ones(tmp_path: Path) -> None:
    for first, loss in ((0, 1.0), (3, 2.0)):
        recorder = Recorder(tmp_path, loggers=("tensorboard",))
        for index in range(first, 5 if first == 0 else 4):
            recorder.step(make_step(index, loss=loss, time=make_step(index).time + 1000 * first))
        recorder.close()
        time.sleep(1.1)  # TensorBoard's files are read in the order of the seconds in their names
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    assert read_back(tmp_path)["loss"] == {0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0}


def test_steps_of_alternating_arms_are_no_training(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, loggers=("tensorboard",))
    recorder.step(make_step(0))
    recorder.step(make_step(0, arm="even", loss=9.0))
    recorder.close()
    assert read_back(tmp_path)["loss"] == {0: 4.0}


@pytest.mark.parametrize("folder", [None, "run"])
def test_a_missing_package_is_named_at_the_start_on_every_rank(
    tmp_path: Path, folder: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("tensorboard", "wandb", "mlflow"):
        with pytest.raises(ConfigError, match=rf"pip install 'evenload\[{name}\]'"):
            Recorder(None if folder is None else tmp_path / folder, loggers=(name,))


def test_a_broken_package_is_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with pytest.raises(ConfigError, match=r"pip install 'evenload\[tensorboard\]'"):
        Recorder(tmp_path, loggers=("tensorboard",))


@pytest.mark.parametrize(
    ("loggers", "options", "told"),
    [
        (("nope",), {}, "unknown logger 'nope'; expected tensorboard, wandb, mlflow"),
        (("wandb", "wandb"), {}, "the logger wandb is listed twice"),
        (("wandb",), {"mlflow": {"name": "a"}}, r"options for 'mlflow', which is not a logger of this run \(wandb\)"),
        ((), {"wandb": {"name": "a"}}, "not a logger of this run \\(none is set\\)"),
        (
            ("wandb",),
            {"wandb": {"projet": "a"}},
            "wandb.projet = 'a': wandb has no such option; expected one of project,",
        ),
        (("wandb",), {"wandb": {"project": 3}}, "wandb.project = 3: expected a string"),
        (("wandb",), {"wandb": {"tags": [1]}}, r"wandb.tags = \[1\]: expected a list of strings"),
        (("wandb",), {"wandb": {"mode": "of-line"}}, "wandb.mode = 'of-line': expected one of online, offline"),
        (("tensorboard",), {"tensorboard": {"folder": "x"}}, "expected no options"),
    ],
)
def test_wrong_loggers_and_options_are_refused_on_every_rank(
    loggers: tuple[str, ...], options: dict[str, dict[str, object]], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        Recorder(None, loggers=loggers, logger_options=options)


DUMMY = """
import json
from pathlib import Path
from typing import Any
from evenload.records.loggers import LoggerContext, StepScalars, RefusedError

class Dummy:
    accepts_rewrites = False
    newest_step = None

    def __init__(self, context):
        self.path = context.folder / "dummy.jsonl"
        self.run_id = context.run_id or "dummy-1"
        self._say({"opened": context.options, "seed": context.settings.get("seed"), "again": bool(context.run_id)})

    def write(self, points):
        for point in points:
            self._say({"step": point.step, "loss": point.scalars.get("loss"), "names": sorted(point.scalars)})

    def close(self, succeeded):
        self._say({"closed": succeeded})

    def drop(self, for_good):
        self._say({"dropped": for_good})

    def _say(self, what):
        with self.path.open("a") as file:
            file.write(json.dumps(what) + "\\n")
"""


@pytest.fixture
def dummy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution, installed for this test, that offers a logger by entry point."""
    site = tmp_path / "site"
    info = site / "evenload_dummy-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "evenload_dummy.py").write_text(DUMMY)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evenload-dummy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[evenload.loggers]\ndummy = evenload_dummy:Dummy\nbroken = evenload_dummy:Nothing\n"
    )
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "evenload_dummy", raising=False)
    return tmp_path / "run"


def test_a_logger_of_another_package(dummy: Path) -> None:
    options = {"dummy": {"anything": ["goes"]}}
    for first in (0, 2):
        recorder = Recorder(dummy, loggers=("dummy",), logger_options=options, hyperparameters={"seed": 7})
        for index in range(first, first + 3):
            recorder.step(make_step(index))
        recorder.log({"val_loss": 1.0}, first + 2)
        recorder.close(succeeded=first == 2)
    said = [json.loads(line) for line in (dummy / "dummy.jsonl").read_text().splitlines()]
    opened = [row for row in said if "opened" in row]
    assert opened == [
        {"opened": {"anything": ["goes"]}, "seed": 7, "again": False},
        {"opened": {"anything": ["goes"]}, "seed": 7, "again": True},
    ]
    assert [row["closed"] for row in said if "closed" in row] == [False, True]
    assert [row["step"] for row in said if "step" in row] == [0, 1, 2, 2, 3, 4, 4]  # twice where val_loss came late
    assert sum("loss" in (row.get("names") or ()) for row in said) == 5


def test_what_comes_between_the_last_look_at_the_records_and_the_end_is_brought(
    dummy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, ended = threading.Event(), threading.Event()

    def slow_look(path: Path, offset: int) -> Any:
        found = read_records(path, offset)
        if found[1] == offset:  # nothing new
            looked.set()
            ended.wait(10.0)
        return found

    monkeypatch.setattr(logger_thread, "read_records", slow_look)
    recorder = Recorder(dummy, loggers=("dummy",))
    assert looked.wait(10.0)
    recorder.step(make_step(0))
    threading.Timer(0.2, ended.set).start()
    recorder.close()
    assert delivered(dummy, "dummy") == 0


def test_training_that_begins_again_at_step_0_is_another_run_of_the_place(dummy: Path) -> None:
    for _ in range(2):
        recorder = Recorder(dummy, loggers=("dummy", "tensorboard"))
        for index in range(3):
            recorder.step(make_step(index, loss=1.0))
        recorder.close()
    said = [json.loads(line) for line in (dummy / "dummy.jsonl").read_text().splitlines()]
    assert [row["again"] for row in said if "again" in row] == [False, False]
    assert [row["step"] for row in said if "step" in row] == [0, 1, 2, 0, 1, 2]
    assert read_back(dummy)["loss"] == {0: 1.0, 1: 1.0, 2: 1.0}
    Recorder(dummy, loggers=("dummy",)).close()  # a run that is finished: nothing is opened for it
    assert len((dummy / "dummy.jsonl").read_text().splitlines()) == len(said)


def test_a_logger_that_its_package_lacks(dummy: Path) -> None:
    check_loggers(("broken",))
    with pytest.raises(ConfigError, match="the logger 'broken' cannot be loaded from its package"):
        Recorder(dummy, loggers=("broken",))
    with pytest.raises(ConfigError, match="expected tensorboard, wandb, mlflow, broken, dummy"):
        check_loggers(("nope",))


# When a logger fails


def delivered(run: Path, name: str) -> int:
    path = run / "loggers" / f"{name}.json"
    return int(json.loads(path.read_text())["newest"]) if path.exists() else -1


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def told(run: Path) -> list[str]:
    return [event.message for event in read_events(run) if event.kind == "logger"]


def test_a_place_that_cannot_be_written_is_told_once_and_gets_everything_later(tmp_path: Path) -> None:
    """The folder of the event files is a file, which is then taken away."""
    (tmp_path / "tensorboard").write_text("in the way")
    recorder = Recorder(tmp_path, loggers=("tensorboard",))
    for index in range(3):
        recorder.step(make_step(index))
    time.sleep(1.2)  # it is tried again, and told no second time
    assert len(told(tmp_path)) == 1
    assert told(tmp_path)[0].startswith("tensorboard fails: FileExistsError")
    assert "training continues" in told(tmp_path)[0]
    (tmp_path / "tensorboard").unlink()
    until(lambda: len(told(tmp_path)) == 2)
    assert told(tmp_path)[1] == "tensorboard works again and has received every step so far"
    recorder.step(make_step(3))
    recorder.close()
    assert list(read_back(tmp_path)["loss"]) == [0, 1, 2, 3]


def test_a_place_that_never_works_is_given_up_at_the_end_and_filled_by_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logger_thread, "CLOSE_TIMEOUT_S", 0.2)
    (tmp_path / "tensorboard").write_text("in the way")
    recorder = Recorder(tmp_path, loggers=("tensorboard",))
    recorder.step(make_step(0))
    recorder.log({"val_loss": 2.0}, 0)
    recorder.close()
    assert [step.step for step in read_steps(tmp_path)] == [0]
    assert f"evenload show {tmp_path} --to tensorboard" in told(tmp_path)[-1]
    with pytest.raises(SystemExit) as left:
        main(["show", str(tmp_path), "--to", "tensorboard"])
    assert left.value.code == 2
    assert f"{tmp_path} was not sent to tensorboard: tensorboard fails: FileExistsError" in capsys.readouterr().err
    (tmp_path / "tensorboard").unlink()
    for answer in (f"sent 2 points of {tmp_path} to tensorboard", "tensorboard is up to date"):
        with pytest.raises(SystemExit) as left:
            main(["show", str(tmp_path), "--to", "tensorboard"])
        assert not left.value.code
        assert answer in capsys.readouterr().out
    scalars = read_back(tmp_path)
    assert (scalars["loss"], scalars["val_loss"]) == ({0: 4.0}, {0: 2.0})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--to", "nope"], "unknown logger 'nope'"),
        (["--to", "tensorboard", "--live"], "are ways to show a run"),
        (["--logger-option", "wandb.name=a"], "name it with --to"),
        (["--to", "wandb", "--logger-option", "wandb.nam=a"], "wandb has no such option"),
        (["--to", "wandb", "--logger-option", "wandb"], "expected LOGGER.OPTION=VALUE"),
    ],
)
def test_wrong_uses_of_show_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    Recorder(tmp_path).close()
    with pytest.raises(SystemExit) as left:
        main(["show", str(tmp_path), *arguments])
    assert left.value.code == 2
    assert told in capsys.readouterr().err


REFUSING = DUMMY.replace(
    "    def write(self, points):\n",
    "    def write(self, points):\n"
    "        if any(point.step == 1 for point in points):\n"
    "            raise RefusedError('no ones here')\n",
)


def test_points_that_are_refused_are_told_and_left_out(dummy: Path) -> None:
    (dummy.parent / "site/evenload_dummy.py").write_text(REFUSING)
    recorder = Recorder(dummy, loggers=("dummy",))
    for index in range(3):
        recorder.step(make_step(index))
        until(lambda index=index: delivered(dummy, "dummy") == index)  # type: ignore[misc]
    recorder.close()
    said = [json.loads(line) for line in (dummy / "dummy.jsonl").read_text().splitlines()]
    assert [row["step"] for row in said if "step" in row] == [0, 2]
    assert told(dummy) == ["dummy rejects step 1, which it will not contain: no ones here"]


STUCK = DUMMY.replace(
    "    def write(self, points):\n",
    "    def write(self, points):\n"
    "        import time\n"
    "        while not self.path.with_name('go').exists():\n"
    "            time.sleep(0.01)\n",
)


def test_a_logger_that_hangs_keeps_nobody_waiting(dummy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger_thread, "CLOSE_TIMEOUT_S", 0.2)
    (dummy.parent / "site/evenload_dummy.py").write_text(STUCK)
    recorder = Recorder(dummy, loggers=("dummy", "tensorboard"))
    for index in range(100):
        recorder.step(make_step(index))
    recorder.close()  # comes back, although the logger hangs still
    assert "dummy has not received all steps" in told(dummy)[-1]
    (dummy / "go").touch()
    until(lambda: not any(thread.name == "evenload-dummy" for thread in threading.enumerate()))


def test_the_logger_of_the_docs_works(dummy: Path) -> None:
    page = (ROOT / "docs/loggers.md").read_text()
    (code,) = re.findall(r"```python\n(from evenload.records.loggers import.*?)```", page, flags=re.DOTALL)
    site = dummy.parent / "site"
    (site / "my_package.py").write_text(code)
    (site / "evenload_dummy-1.0.dist-info/entry_points.txt").write_text(
        "[evenload.loggers]\nlines = my_package:Lines\n"
    )
    try:
        recorder = Recorder(dummy, loggers=("lines",))
        for index in range(3):
            recorder.step(make_step(index))
        recorder.close()
    finally:
        sys.modules.pop("my_package", None)
    lines = (dummy / "lines.txt").read_text().splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["0", "1", "2"]
    assert "'loss': 4.0" in lines[0]
