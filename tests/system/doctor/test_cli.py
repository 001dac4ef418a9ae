"""`evenload doctor` and `python -m evenload.doctor`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from evenload.cli.doctor import doctor
from evenload.doctor import Finding, Options
from evenload.doctor import __main__ as command
from evenload.doctor.checklist import FULL, GROUPS
from evenload.doctor.finding import Figure
from evenload.errors import ConfigError
from tests.system.doctor.conftest import REPOSITORY, SOURCE, environment


def answer(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> list[Options]:
    asked: list[Options] = []

    def run_checks(options: Options, groups: Any = GROUPS, report: Any = None) -> Sequence[Finding]:
        asked.append(options)
        return findings

    monkeypatch.setattr(command, "run_checks", run_checks)
    return asked


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("fail", 1), ("warn", 2), ("skip", 0)])
def test_typer_command(monkeypatch: pytest.MonkeyPatch, status: str, code: int) -> None:
    asked = answer(monkeypatch, Finding("port", status, "so it is", "otherwise"))  # type: ignore[arg-type]
    app = typer.Typer()
    app.command()(doctor)
    result = CliRunner().invoke(app, ["--json", "--port", "29500", "--backend", "gloo"])
    assert result.exit_code == code
    assert json.loads(result.stdout)["exit_code"] == code
    assert asked == [Options(port=29500, backend="gloo")]
    assert "so it is" in CliRunner().invoke(app, []).stdout
    assert CliRunner().invoke(app, ["--port", "70000"]).exit_code == 2
    assert len(asked) == 2


def test_plain_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = answer(monkeypatch, Finding("port", "warn", "so it is", "otherwise"))
    assert command.main(["--port", "1", "--folder", "/data"]) == 2
    assert "warn  port  so it is" in capsys.readouterr().out
    assert asked == [Options(port=1, folder="/data")]
    for wrong in ("70000", "-1", "http"):
        with pytest.raises(SystemExit):
            command.main([f"--port={wrong}"])
        assert "expected a number from 0 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--only", "prot"], "--only 'prot': no such check; the checks are packages,"),
        (["--only", "device speeds"], "add --full"),
        (["--full", "--only", "port"], "--full is set, but --only names none of"),
        (["--json", "--issue"], "remove one of them"),
        (["--with-names"], "add --issue"),
        (["--list", "--full"], "--list only lists the checks"),
    ],
)
def test_options_that_contradict_are_refused_before_anything_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    asked = answer(monkeypatch, Finding("port", "ok", ""))
    with pytest.raises(SystemExit) as left:
        command.main(arguments)
    assert (left.value.code, asked) == (2, [])
    assert told in capsys.readouterr().err
    app = typer.Typer()
    app.command()(doctor)
    assert told in str(CliRunner().invoke(app, arguments).exception)


def test_only_the_named_checks_are_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--only", "port", "--only", "CPU cores", "--json"]) in (0, 2)
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [finding["name"] for finding in findings] == ["CPU cores", "port"]


def test_the_list_is_that_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert command.main(["--list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checks"]
    assert len(listed) == len(rows) >= 28
    assert listed[0].startswith("packages ") and listed[-1].endswith("(--host)")
    assert sum(line.endswith("(--full)") for line in listed) == sum(row["full"] for row in rows) == 3
    assert sum(row["host"] for row in rows) == 12
    page = (REPOSITORY / "docs/doctor.md").read_text()
    told = re.findall(r"^\| ([^|]+?) \|", page, flags=re.MULTILINE)
    names = [check.name for groups in (GROUPS, FULL) for group in groups for check in group]
    assert [name for name in told if name in names] == names


def test_figures_are_told_as_a_table_and_as_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, Finding("port", "ok", "free"))
    figures = (Figure("cpu memory", 12.345, "GB/s"), Figure("cuda:0 matmul bfloat16", 750.0, "TFLOP/s"))
    measured = Finding("device speeds", "ok", "2 devices", figures=figures)
    monkeypatch.setattr(command, "run_measurements", lambda options, groups: (measured,))
    assert command.main(["--full"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^ +cpu memory +12.3 GB/s$", text, flags=re.MULTILINE)
    assert re.search(r"^ +cuda:0 matmul bfloat16 +750 TFLOP/s$", text, flags=re.MULTILINE)
    assert command.main(["--full", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["findings"]
    assert "figures" not in rows[0]
    assert rows[1]["figures"][0] == {"what": "cpu memory", "value": 12.345, "unit": "GB/s"}


def test_it_answers_on_a_machine_of_unlike_gpus() -> None:
    """The whole command, each child asking a driver that stands in."""
    cards = [
        {"Name": "RTX 3090", "capability": [8, 6], "CurrentClocksThrottleReasons": 0x40},
        {"Name": "RTX 2080 Ti", "capability": [7, 5], "used": 8 << 30, "total": 11 << 30, "ComputeMode": 3},
    ]
    env = environment(
        PYTHONPATH=f"{REPOSITORY / 'tests/system/doctor/stand_in_nvml'}:{SOURCE}:{REPOSITORY}",
        STAND_IN_GPUS=json.dumps(cards),
    )
    names = [check.name for group in GROUPS for check in group if check.name.startswith("GPU ")]
    only = [word for name in names for word in ("--only", name)]
    done = subprocess.run(
        [sys.executable, "-m", "evenload.doctor", "--json", *only], env=env, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (2, "")
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert [name for name in names if found[name]["status"] == "warn"] == [
        "GPU memory",
        "GPU generations",
        "GPU mode",
        "GPU throttling",
    ]
    assert found["GPU order"]["found"] == "cuda:0 is RTX 3090, cuda:1 is RTX 2080 Ti"


def test_a_wrong_option_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no such check"):
        command.show(command.DoctorRequest(only=("nope",)))


def test_the_command_module_imports_neither_torch_nor_numpy() -> None:
    code = "import sys; import evenload.cli.doctor; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
