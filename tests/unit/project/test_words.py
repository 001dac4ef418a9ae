"""The words of the project (docs/glossary.md): none of the old ones is left in the code, the tests or the docs."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.paths import DOCS, EXAMPLES, ROOT, SOURCE, TESTS

IDENTIFIERS = {
    "sitting", "crew", "ruling", "rulings", "tally", "surroundings", "around", "learnt", "relearn", "retreat", "abandon",
    "forgive", "spoiled", "squares", "meeting", "guest", "party", "doorplate", "roster", "mover", "movers", "holding",
    "desk", "foresight", "stranger", "strangers", "lane", "lanes", "twin", "twins", "alike",
}  # fmt: skip
"""Words that no identifier may contain, in snake_case or CamelCase."""
CLASSES = {
    "Card", "Sheet", "Seat", "Circle", "Door", "Terms", "Point", "Stock", "Room", "Hold", "Place", "Windows", "Arms",
    "Told", "Kept", "Held",
}  # fmt: skip
"""Ordinary words that no class may be called."""
ONLY_OURS = {
    "sitting", "sittings", "crew", "crews", "doorplate", "foresight", "roster", "strangers", "relearn", "rulings",
    "tally", "twins", "surroundings", "lanes", "guests",
}  # fmt: skip
"""Words that only this project used in its sense: none in the docs, the README, docstrings or comments."""
OPENINGS = re.compile(r"(What|Whether|Who|How|Which|Why)\b")
MAX_QUESTION_OPENINGS = 5
_HERE = Path(__file__)
_STORED = SOURCE / "stored_names.py"


def python_files() -> Iterator[Path]:
    for folder in (SOURCE, TESTS):
        for path in sorted(folder.rglob("*.py")):
            if path not in (_HERE, _STORED):
                yield path


def test_no_identifier_uses_an_old_word() -> None:
    found = set()
    for path in python_files():
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.NAME and (old := IDENTIFIERS & words_in(token.string)):
                found.add(f"{path.relative_to(ROOT)}: {token.string} ({', '.join(old)})")
    assert sorted(found) == []


def test_no_file_is_named_by_an_old_word() -> None:
    assert [path for path in python_files() if IDENTIFIERS & words_in(path.stem)] == []


def test_no_class_is_called_by_a_bare_word() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name.lstrip("_") in CLASSES
    ]
    assert found == []


def test_prose_uses_no_word_of_our_own() -> None:
    pages = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    pages += [*DOCS.rglob("*.md"), *EXAMPLES.rglob("*.md"), *EXAMPLES.rglob("*.py"), *python_files()]
    found = {
        f"{path.relative_to(ROOT)}: {word}"
        for path in pages
        if "_build" not in path.parts
        for word in re.findall(r"[a-z]+", path.read_text().lower().replace("barlow twins", ""))  # a name
        if word in ONLY_OURS
    }
    assert sorted(found) == []


def test_few_docstrings_open_with_a_question_word() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for text in _docstrings(node):
                if OPENINGS.match(text):
                    found.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert len(found) <= MAX_QUESTION_OPENINGS, found


def words_in(name: str) -> set[str]:
    """Split snake_case and CamelCase into lower-case words."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Yield the docstring of a module, class or function, and the texts below a class's or module's attributes."""
    body = getattr(node, "body", None)
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not body:
        return
    for statement in body:
        value = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value.lstrip()
