"""Regenerate the diffs from each plain script to its Evenload form; a test compares them.

    python examples/classic/diffs.py

Run it after changing a script.
"""

import difflib
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def names() -> list[str]:
    """Return the names of the scripts with two forms."""
    return sorted(path.name.removesuffix("_plain.py") for path in FOLDER.glob("*_plain.py"))


def diff(name: str) -> str:
    """Return the diff from NAME_plain.py to NAME_evenload.py."""
    before, after = FOLDER / f"{name}_plain.py", FOLDER / f"{name}_evenload.py"
    old, new = (path.read_text().splitlines(keepends=True) for path in (before, after))
    return "".join(difflib.unified_diff(old, new, before.name, after.name))


if __name__ == "__main__":
    for name in names():
        (FOLDER / f"{name}.diff").write_text(diff(name))
