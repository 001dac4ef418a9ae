"""The reference is complete: every public name, setting, option, exit code and file of a run is on its page."""

from __future__ import annotations

import ast
import inspect
import re
import tarfile
import tomllib
from fnmatch import fnmatch
from pathlib import Path

from typer.testing import CliRunner

import evenload
import evenload.job
import evenload.testing
from evenload import errors
from evenload.cli.exit_codes import exit_codes
from evenload.cli.main import COMMANDS, app
from evenload.records import recorder
from evenload.records.checkpoints import CHECKPOINT_FOLDER
from evenload.records.lines import EVENTS_FILE, STEPS_FILE
from evenload.records.loggers.logger_thread import FOLDER as LOGGERS
from tests.paths import DOCS, ROOT, SOURCE, TESTS
from tests.unit.project import commands_page, ports_page

API = (DOCS / "api.md").read_text()
RUN_FOLDER = (DOCS / "run-folder.md").read_text()
_DIRECTIVE = re.compile(r"^\.\. (?:auto\w+|currentmodule):: ([\w.]+)", flags=re.MULTILINE)
_CLEAN_UP = {"1": "worker.py", "127": "start.py"}
"""Codes that never reach a user: a worker whose supervisor is gone, a program that the queue can't start."""

_TEMPORARY = {"failure-7.json", "throttle-request.json", "throttle.json", "worker-7.json"}
"""Files of the launcher's temporary folder."""
_OF_LOGGERS = {"7.json", "mlflow.json"}
"""``loggers/NAME.json``."""


def documented(module: str) -> set[str]:
    """The names of a module that docs/api.md has a directive for."""
    found, current = set(), ""
    for name in _DIRECTIVE.findall(API):
        if f".. currentmodule:: {name}" in API:
            current = name
        full = name if name.startswith("evenload.") else f"{current}.{name}"
        if full.rpartition(".")[0] == module and full != current:
            found.add(full.rpartition(".")[2])
    return found


def files_of_a_run() -> list[str]:
    """The patterns of the table in docs/run-folder.md."""
    rows = re.findall(r"^\| (.+?) \|", RUN_FOLDER, flags=re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    return [re.sub(r"\b(N|NAME)\b", "*", name) + ("*" if name.endswith("/") else "") for name in names]


def undocumented(folder: Path) -> set[str]:
    """The files of a run's folder that docs/run-folder.md does not list."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {name for name in names if not any(fnmatch(name, pattern) for pattern in files_of_a_run())}


def test_every_public_name_is_documented() -> None:
    assert documented("evenload") == set(evenload.__all__) - {"__version__"}
    assert "`evenload.__version__`" in API
    assert documented("evenload.testing") == set(evenload.testing.__all__)
    names = {name for name in vars(evenload.job) if not name.startswith("_")}
    assert documented("evenload.job") == {
        name for name in names if not inspect.ismodule(getattr(evenload.job, name))
    } - {"annotations"}


def test_every_public_name_has_a_docstring() -> None:
    for module in (evenload, evenload.testing, evenload.job):
        for name in documented(module.__name__):
            value = getattr(module, name)
            assert isinstance(value, int) or inspect.getdoc(value), name
    members = {name: value for name, value in vars(evenload.Run).items() if not name.startswith("_")}
    assert [name for name, value in members.items() if not inspect.getdoc(value)] == []


def test_the_tree_of_errors_is_complete() -> None:
    tree = (errors.__doc__ or "").partition("EvenloadError")[2].partition("An error says")[0]
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value)} - {"EvenloadError"}
    assert classes == set(re.findall(r"── (\w+)", tree))
    assert ":start-at: EvenloadError" in API and ":end-before: An error says" in API


def test_the_page_of_commands_is_generated() -> None:
    command = "python -m tests.unit.project.commands_page > docs/commands.md"
    text = (DOCS / "commands.md").read_text()
    assert text == commands_page.page(), f"run `{command}`"
    for name in COMMANDS:
        section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        options = {opt for param in commands_page.options_of(COMMANDS[name].load(name)) for opt in param.opts}
        assert {opt for opt in options if "_" not in opt and f"`{opt}`" not in section} == set(), name


def test_every_exit_code_is_declared() -> None:
    declared = {code for name in COMMANDS for code in exit_codes(name)}
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "xit(" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
                "Exit",
                "SystemExit",
                "exit",
                "_exit",
            ):
                for argument in node.args:
                    code = ast.unparse(argument)
                    if code.isdecimal() and code not in declared and path.name != _CLEAN_UP.get(code):
                        found[f"{path.relative_to(SOURCE)}:{node.lineno}"] = code
    assert found == {}
    assert str(evenload.job.EXIT_CODE) in exit_codes("run")


def test_the_files_of_a_run_are_documented(tmp_path: Path) -> None:
    with tarfile.open(TESTS / "stored" / "run.tar.gz") as stored:
        stored.extractall(tmp_path, filter="data")
    assert undocumented(tmp_path / "run") == set()
    (tmp_path / "run" / "unheard.txt").touch()
    assert undocumented(tmp_path / "run") == {"unheard.txt"}
    for name in (EVENTS_FILE, STEPS_FILE, recorder.CONFIG_FILE, f"{CHECKPOINT_FOLDER}/", f"{LOGGERS}/"):
        assert f"`{name}" in RUN_FOLDER, name


def test_every_file_name_in_the_code_is_documented() -> None:
    """Names of files that records, training and views use; those of the launcher's own temporary folder apart."""
    name = re.compile(r"[\w./-]*\w\.(?:jsonl?|toml|pt|txt|html|distcp)")
    listed = [pattern.rpartition("/")[2] for pattern in files_of_a_run() if not pattern.startswith("loggers/")]
    listed = [pattern for pattern in listed if pattern != "*"]
    found = {}
    for package in ("records", "training", "views"):
        for path in sorted((SOURCE / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                parts = (
                    node.values if isinstance(node, ast.JoinedStr) else [node] if isinstance(node, ast.Constant) else []
                )
                texts = [getattr(part, "value", "") if isinstance(part, ast.Constant) else "7" for part in parts]
                text = "".join(part for part in texts if isinstance(part, str))
                if name.fullmatch(text) and not any(fnmatch(text.rpartition("/")[2], pattern) for pattern in listed):
                    found[text] = path.relative_to(SOURCE).as_posix()
    assert {text: where for text, where in found.items() if text not in _TEMPORARY | _OF_LOGGERS} == {}


def test_help_has_the_words_of_the_page_of_commands() -> None:
    """Neither Python's types, as typer shows them by itself, nor brackets around brackets."""
    page = (DOCS / "commands.md").read_text()
    for name in COMMANDS:
        text = CliRunner().invoke(app, [name, "--help"], prog_name="evenload").output
        (usage,) = re.findall(rf"^evenload {name} .*$", page, flags=re.MULTILINE)
        assert f"Usage: {usage}\n" in text
        assert re.findall(r"<[a-z\[\] ]+>", text) == []
        options = re.findall(r"^  (?:-\w, )?(--[\w-]+) (?![ /])(\S+)", text, flags=re.MULTILINE)
        shown = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0].replace("\\|", "|")
        for option, value in options:
            assert re.search(rf"`{option}`.* {re.escape(value)}", shown), f"{name} {option} {value}"


def test_the_ports_page_is_generated() -> None:
    command = "python -m tests.unit.project.ports_page > docs/ports.md"
    assert (DOCS / "ports.md").read_text() == ports_page.page(), f"run `{command}`"


def test_the_diff_of_readme_is_counted() -> None:
    text = (ROOT / "README.md").read_text()
    (diff,) = re.findall(r"```diff\n(.*?)```", text, flags=re.DOTALL)
    added, removed = ports_page.changed_lines(diff)
    heading = f"## Your loop: {added} lines added, {removed} removed\n"
    assert heading in text and heading in (DOCS / "index.md").read_text()


def test_installation_is_described_the_same_way_everywhere() -> None:
    """Extras by name, as docs/install.md explains; the whole package from a clone, with the name beside it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (DOCS / "install.md").read_text()
    assert set(re.findall(r"`([a-z]+)`", page.partition("| extra |")[2].partition("\n\n")[0])) == set(extras)
    for path in (ROOT / "README.md", *DOCS.glob("*.md")):
        text = path.read_text()
        if path.name != "install.md":
            assert "-e '.[" not in text, f"{path.name}: write pip install 'evenload[...]'"
            assert "pip install -e .\n" not in text or "pip install evenload" in text, path.name
        assert {name for found in re.findall(r"evenload\[([a-z,]+)\]", text) for name in found.split(",")} <= set(
            extras
        )


def test_signatures_on_the_pages_are_those_of_the_code() -> None:
    """Blocks of text that begin with a signature: the names of its parameters, in order, those after ``*`` too."""
    pattern = re.compile(r"^(evenload|run)\.(\w+)\((.*)\) ->", flags=re.MULTILINE)
    found = [(path, *groups) for path in DOCS.glob("*.md") for groups in pattern.findall(path.read_text())]
    assert len(found) >= 7
    for path, owner, name, written in found:
        function = getattr(evenload if owner == "evenload" else evenload.Run, name)
        actual = [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]
        assert re.findall(r"\*?(\w+)(?:=[^,]+)?(?:, |$)", written.replace("*, ", "")) == actual, f"{path.name}: {name}"
