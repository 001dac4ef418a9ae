"""The text of docs/commands.md, from the commands themselves: ``python -m tests.unit.project.commands_page``."""

from __future__ import annotations

from typing import Any

from evenload.cli.exit_codes import exit_codes
from evenload.cli.main import COMMANDS

_HEAD = """\
# Commands and exit codes

`evenload COMMAND --help` prints the same. Options that are settings are described under [settings](settings.md).

This page is generated from the commands by `python -m tests.unit.project.commands_page`.
"""


def page() -> str:
    """Return the page."""
    return "\n".join((_HEAD, *(_section(name) for name in COMMANDS)))


def options_of(command: Any) -> list[Any]:
    """Return the options of a click command, also those that its help hides."""
    return [param for param in command.params if param.param_type_name == "option" and param.name != "help"]


def _section(name: str) -> str:
    command = COMMANDS[name].load(name)
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    words = [f"evenload {name}", "[OPTIONS]", *(param.metavar for param in arguments)]
    options = options_of(command)
    rows = [_row(param) for param in options if not param.hidden]
    also = [f"`{opt}`" for param in options if param.hidden for opt in param.opts if "_" not in opt]
    codes = "".join(f"| {code} | {meaning} |\n" for code, meaning in exit_codes(name).items())
    return "\n".join(
        part
        for part in (
            f"## {name}\n",
            f"```text\n{' '.join(words)}\n```\n",
            f"{_one_line(command.help)}\n",
            "| option | meaning |\n|---|---|\n" + "\n".join(rows) + "\n" if rows else "",
            f"Also accepted, as in torchrun: {', '.join(also)}.\n" if also else "",
            f"| exit code | meaning |\n|---|---|\n{codes}",
        )
        if part
    )


def _row(param: Any) -> str:
    names = ", ".join(f"`{opt}`" for opt in (*param.opts, *param.secondary_opts))
    value = "" if param.is_flag else f" {_cell(param.metavar)}"
    default = getattr(param.default, "value", param.default)
    shown = "" if default in (None, False, "", []) else f" (default: {default})"
    return f"| {names}{value} | {_cell(_one_line(param.help or ''))}{shown} |"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(page(), end="")
