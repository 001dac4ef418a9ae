"""Folders of the project, for tests."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "evenload"
TESTS = ROOT / "tests"
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
