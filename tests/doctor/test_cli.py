"""`evenload doctor` and `python -m evenload.doctor`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

import pytest
import typer
from typer.testing import CliRunner

from evenload.cli.doctor import doctor
from evenload.doctor import Finding, Options
from evenload.doctor import __main__ as command
from tests.doctor.conftest import environment


def answer(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> list[Options]:
    asked: list[Options] = []

    def examine(options: Options) -> Sequence[Finding]:
        asked.append(options)
        return findings

    monkeypatch.setattr(command, "examine", examine)
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
    assert command.main(["--port", "1"]) == 2
    assert "warn  port  so it is" in capsys.readouterr().out
    assert asked == [Options(port=1)]
    for wrong in ("70000", "-1", "http"):
        with pytest.raises(SystemExit):
            command.main([f"--port={wrong}"])
        assert "expected a number from 0 to 65535" in capsys.readouterr().err


def test_the_command_module_imports_neither_torch_nor_numpy() -> None:
    code = "import sys; import evenload.cli.doctor; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
