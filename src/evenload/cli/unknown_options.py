"""Messages for options that a command does not have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from evenload.config import SETTINGS, option_of
from evenload.foreign_names import SETTINGS_ELSEWHERE, describe_unknown

_READS_ARGUMENTS = re.compile(
    r"\b(argv|argparse|ArgumentParser|click|typer|fire|hydra|absl|tyro|docopt|HfArgumentParser|getopt)\b"
)


def describe_unknown_option(option: str, known: Sequence[str]) -> str:
    """Return what to write instead of an option that does not exist, after a semicolon; empty if nothing is known."""
    names = {name.lstrip("-").replace("-", "_"): name for name in known}
    word = option.lstrip("-").partition("=")[0].replace("-", "_")
    hint = describe_unknown(word, names, SETTINGS_ELSEWHERE)
    if found := re.fullmatch(r"did you mean '(\w+)'\?", hint):
        return f"; did you mean {names[found[1]]}?"
    if (found := re.match(r"write (\w+)=", hint)) and found[1] in SETTINGS:
        if option_of(found[1]) not in known:
            return f"; it is set in the script: evenload.init({found[1]}=...)"
        return f"; did you mean {option_of(found[1])}? ({SETTINGS[found[1]].help})"
    return f"; {hint}" if hint else ""


def misplaced_options(arguments: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the words after a script that are options of the command, if the script reads no arguments; else none."""
    if not arguments or not arguments[0].endswith(".py"):
        return []
    words = [word for word in arguments[1:] if word.partition("=")[0] in known]
    try:
        text = Path(arguments[0]).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return (
        []
        if _READS_ARGUMENTS.search(text) or _imports_neighbours(text, Path(arguments[0]).absolute().parent)
        else words
    )


def _imports_neighbours(text: str, folder: Path) -> bool:
    """Return whether a script imports modules beside it, which may read its arguments."""
    names = re.findall(r"^\s*(?:from|import)\s+(\.|\w+)", text, re.MULTILINE)
    return any(name == "." or (folder / f"{name}.py").exists() or (folder / name).is_dir() for name in names)
