"""The map in ARCHITECTURE.md: one line a file, drawn from each file's first sentence. `make map` redraws it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "evenload"
BEGIN, END = "<!-- map -->", "<!-- /map -->"


def map_lines() -> list[str]:
    """A line for each file that holds code, rooms in order of their names."""
    lines = []
    for path in sorted(SOURCE.rglob("*.py"), key=lambda p: (len(p.relative_to(SOURCE).parts) > 1, p)):
        tree = ast.parse(path.read_text())
        name = path.relative_to(SOURCE).as_posix()
        doc = (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ")
        lines.append(f"| `{name}` | {doc} |")
    return lines


def listed(text: str) -> list[str]:
    """The lines of the map as drawn."""
    drawn = re.search(re.escape(BEGIN) + r"(.*?)" + re.escape(END), text, flags=re.DOTALL)
    return [line for line in (drawn[1] if drawn else "").splitlines() if line.startswith("| `")]


def redraw() -> None:
    """Puts the present map into ARCHITECTURE.md."""
    path = ROOT / "ARCHITECTURE.md"
    head, _, rest = path.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    table = "\n".join(["", "| file | what it is |", "|---|---|", *map_lines(), ""])
    path.write_text(f"{head}{BEGIN}{table}{END}{tail}")


if __name__ == "__main__":
    redraw()
