"""The doctor's parent: it always answers, in time, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evenload.doctor import Finding, Options, exit_code, run_checks
from evenload.doctor.checklist import GROUPS, Check
from evenload.doctor.report import as_json, as_text
from tests.paths import ROOT
from tests.system.doctor.conftest import environment
from tests.system.launch.scripts import assert_gone

REPOSITORY = ROOT
NAMES = {check.name for group in GROUPS for check in group}


@pytest.fixture(autouse=True)
def _stand_ins_in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


def check(name: str, on_timeout: str = "fail", limit_s: float = 9.0) -> Check:
    return Check(name, f"tests.system.doctor.stand_in:{name}", "a test", on_timeout, limit_s=limit_s)  # type: ignore[arg-type]


def test_findings_come_in_order_and_carry_the_checks_name() -> None:
    one, two, three = run_checks(
        Options(port=7), deadline_s=60, groups=((check("well"), check("time_left")), (check("well"),))
    )
    assert one == Finding("well", "ok", "port 7")
    assert two.name == "time_left"
    assert float(two.found) < 59
    assert three == one


def test_a_hung_check_is_a_finding_and_its_processes_are_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    groups = ((check("well"), check("hang", "warn"), check("well")), (check("well"),))
    first, hung, after, other = run_checks(Options(root=str(tmp_path)), deadline_s=6, groups=groups)
    assert time.monotonic() - began < 20
    assert (first.status, other.status) == ("ok", "ok")
    assert hung.status == "warn"
    assert "no result within 6 s" in hung.found
    assert hung.fix.startswith(f"{sys.executable} -m evenload.doctor.child")
    assert (after.status, after.found) == ("skip", "not run, see hang")
    assert_gone(map(int, (tmp_path / "ids").read_text().split()))


def test_each_check_has_a_limit_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenload.doctor.runner._REPORT_S", 1.0)
    lines: list[str] = []
    groups = ((check("well", limit_s=60), check("hang", limit_s=3), check("well")), (check("time_left", limit_s=60),))
    began = time.monotonic()
    first, hung, after, other = run_checks(Options(root=str(tmp_path)), groups=groups, report=lines.append)
    assert time.monotonic() - began < 40
    assert (first.status, after.status, other.found) == ("ok", "skip", "59.0")
    assert "no result within 3 s" in hung.found
    assert any(line.startswith("still checking hang: ") and line.endswith(" s of at most 3 s") for line in lines)


def test_a_crash_and_an_exception_are_findings() -> None:
    crashed, raised, fine = run_checks(deadline_s=60, groups=((check("crash"),), (check("raises"),), (check("well"),)))
    assert crashed.status == raised.status == "fail"
    assert "exited with code -6" in crashed.found
    assert "terribly sorry" in crashed.found
    assert "RuntimeError: no such thing here" in raised.found
    assert fine.status == "ok"


def test_a_check_that_raises_keeps_no_other_from_its_turn() -> None:
    fine, raised, after = run_checks(deadline_s=60, groups=((check("well"), check("raises"), check("well")),))
    assert (fine.status, after.status) == ("ok", "ok")
    assert (raised.status, raised.found) == ("fail", "the check raised RuntimeError: no such thing here")
    assert raised.fix.startswith(f"{sys.executable} -m evenload.doctor.child")


def test_exit_codes() -> None:
    def code(*statuses: str) -> int:
        return exit_code(Finding("x", status, "") for status in statuses)  # type: ignore[arg-type]

    assert (code("ok", "skip"), code("ok", "fail", "warn"), code("warn", "skip")) == (0, 1, 2)


def test_reports() -> None:
    findings = (
        Finding("port", "ok", "port 5 is free", "port 5 is free"),
        Finding("open files", "warn", "few " * 60, "more", "ulimit -n 65536"),
        Finding("packages", "fail", "no torch", "torch>=2.11", "pip install torch"),
    )
    text = as_text(findings)
    assert "  ok    port        port 5 is free\n  warn  open files  few few" in text
    assert "fix  ulimit -n 65536\n" in text
    assert text.endswith("would stop a run: packages; would slow a run: open files")
    assert all(len(line) <= 120 for line in text.splitlines())
    assert text.count("expected") == 2
    read = json.loads(as_json(findings))
    assert read["exit_code"] == 1
    assert read["findings"][2] == {
        "name": "packages",
        "status": "fail",
        "found": "no torch",
        "expected": "torch>=2.11",
        "mend": "pip install torch",
    }
    assert as_text(findings[:1]).endswith("fit: nothing here would stop or slow a run")


def test_all_checks_on_this_machine() -> None:
    findings = run_checks(deadline_s=60)
    assert [finding.name for finding in findings] == [check.name for group in GROUPS for check in group]
    assert not [finding for finding in findings if "no result" in finding.found or "raised" in finding.found]
    assert all(finding.fix and finding.expected for finding in findings if finding.status in ("warn", "fail"))
    assert {finding.name: finding for finding in findings}["all-reduce"].status == "ok"


def test_it_works_where_nothing_is_installed(bare_python: Path) -> None:
    done = subprocess.run(
        [bare_python, "-m", "evenload.doctor", "--json"],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert done.returncode == 1
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert set(found) == NAMES
    assert found["packages"]["status"] == "fail"
    assert "no torch" in found["packages"]["found"]
    assert "'torch>=2.11'" in found["packages"]["mend"]
    for name in ("wheel and driver", "CUDA libraries", "all-reduce"):
        assert found[name]["status"] == "skip"
        assert "torch is not installed" in found[name]["found"]
    for name in NAMES - {"packages"}:
        assert "no result" not in found[name]["found"] and "raised" not in found[name]["found"]


def test_the_parent_uses_the_standard_library_alone() -> None:
    code = (
        "import sys; before = set(sys.modules); import evenload.doctor.__main__, evenload.doctor.report;"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['evenload']"
