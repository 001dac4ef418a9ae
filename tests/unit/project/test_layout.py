"""The project's structure: public names, size of files, class names, import cycles, and the generated map."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import evenload
from tests.paths import DOCS, ROOT, SOURCE
from tests.unit.project.map import MAP, map_text

PUBLIC = [
    *("Config", "Run", "__version__", "count_tokens", "data_parallel", "init", "load_checkpoint", "place", "spawn"),
    *("CheckpointError", "ConfigError", "DataError", "DesyncError", "DivergenceError", "EvenloadError", "LaunchError"),
    *("NonFiniteError", "PeerLostError", "RankFailedError", "StepError"),
]
RUN = {
    "prepare", "resume", "checkpoint", "export", "batches", "log", "print", "any", "reduce", "gather", "barrier", "group",
    "main_first", "tracker", "close",
    "device", "rank", "world_size", "is_main",
}  # fmt: skip
MAX_FILE_LINES = 420
MAX_SOURCE_LINES = 86_150
# 48,500 held while nothing was added (the rework of names and packages). What has come since: the engine (54,000), checkpoints
# and losses over the whole batch (58,500), and then runs that go on when devices are lost, wire formats, islands, strategy
# async, pages for a browser, and a queue that mends itself.
MAX_CORE_LINES = 2_600
MAX_FLAT_TRAINING_FILES = 4
MAX_ARCHITECTURE_BYTES = 14_000


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def test_public_names_are_those_agreed() -> None:
    assert sorted(evenload.__all__) == sorted(PUBLIC)
    assert len(evenload.__all__) <= 20
    for name in PUBLIC:
        assert getattr(evenload, name) is not None


def test_run_has_the_agreed_members_and_no_more() -> None:
    members = {name for name in vars(evenload.Run) if not name.startswith("_")}
    assert members == RUN
    methods = [name for name in members if inspect.isfunction(inspect.getattr_static(evenload.Run, name))]
    assert len(methods) <= 15


def test_the_map_is_up_to_date() -> None:
    assert MAP.read_text() == map_text(), "run `make map`"


def test_architecture_is_short_and_names_files_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.encode()) <= MAX_ARCHITECTURE_BYTES
    names = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:\.py|/))`", text))
    roots = (SOURCE, SOURCE / "training", SOURCE / "scheduler", ROOT, SOURCE / "training" / "parallel")
    missing = {name for name in names if not any((root / name).exists() for root in roots)}
    assert names and not missing


def test_files_are_short() -> None:
    lines = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in trees()}
    assert {path: count for path, count in lines.items() if count > MAX_FILE_LINES} == {}
    assert sum(lines.values()) <= MAX_SOURCE_LINES


def test_the_core_of_the_queue_is_short() -> None:
    core = SOURCE / "scheduler" / "core"
    assert sum(len(path.read_text().splitlines()) for path in trees() if core in path.parents) <= MAX_CORE_LINES


def test_few_files_lie_flat_in_training() -> None:
    flat = [path.name for path in (SOURCE / "training").glob("*.py") if path.name != "__init__.py"]
    assert len(flat) <= MAX_FLAT_TRAINING_FILES


def test_every_source_file_has_a_docstring() -> None:
    assert [path for path, tree in trees().items() if not ast.get_docstring(tree)] == []


def test_class_names_are_unique() -> None:
    found = defaultdict(list)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(SOURCE)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_there_is_no_import_cycle() -> None:
    """Over all imports, those inside functions and under TYPE_CHECKING too; a package stands for its `__init__`."""
    modules = {_module_name(path): path for path in trees()}
    edges = {name: _imported(trees()[path], modules) - {name} for name, path in modules.items()}
    assert _cycle(edges) == []


def test_readme_names_only_commands_that_exist() -> None:
    from evenload.cli.main import COMMANDS

    used = set(re.findall(r"^(?:\$ )?evenload ([a-z]+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE))
    assert used and used <= set(COMMANDS)


def test_every_decision_is_listed() -> None:
    index = (DOCS / "decisions" / "index.md").read_text()
    pages = {path.stem for path in (DOCS / "decisions").glob("*.md")} - {"index"}
    assert pages and pages <= set(index.split())


def _module_name(path: Path) -> str:
    parts = ["evenload", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(tree: ast.Module, modules: dict[str, Path]) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in modules else node.module)
    return found & modules.keys()


def _cycle(edges: dict[str, set[str]]) -> list[str]:
    """Return one cycle as a path of modules, or an empty list."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(edges[name]):
            if cycle := visit(other, [*path, name]):
                return cycle
        done.add(name)
        return []

    for name in sorted(edges):
        if cycle := visit(name, []):
            return cycle
    return []
