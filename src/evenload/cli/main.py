"""``evenload``: the commands, each loaded when it is called, so that ``--help`` costs next to nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

import evenload
from evenload.errors import EvenloadError


@dataclass(frozen=True)
class Command:
    """Where a command is, and what ``--help`` says of it without loading it."""

    module: str
    help: str

    def load(self, name: str) -> Any:
        """Imports the command's module and makes what the group calls.

        ``COMMAND_CLASS`` and ``CONTEXT_SETTINGS`` of the module hold, where it has them (see script.py).
        """
        module = import_module(self.module)
        function: Callable[..., Any] = getattr(module, name)
        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        app.command(
            name,
            cls=getattr(module, "COMMAND_CLASS", None),
            context_settings=getattr(module, "CONTEXT_SETTINGS", None),
        )(function)
        return typer.main.get_command(app)


COMMANDS = {
    "run": Command("evenload.cli.run", "Train a script on every device here, or on those you name."),
    "doctor": Command("evenload.cli.doctor", "Check whether this machine is fit, and say what would mend it."),
    "verify": Command("evenload.cli.verify", "Prove on your own script that the split gives one device's gradients."),
    "demo": Command("evenload.cli.demo", "Watch a language model train on two unequal devices."),
    "show": Command("evenload.cli.show", "Tell the story of a run, or of a job in the queue."),
    "submit": Command("evenload.cli.submit", "Queue a command, or a job file, for devices shared with others."),
    "ps": Command("evenload.cli.ps", "Show the queue: who has which device, how far jobs are, why others wait."),
    "logs": Command("evenload.cli.logs", "Print what a job printed, or follow it."),
    "cancel": Command("evenload.cli.cancel", "End jobs; those that run save first."),
    "change": Command("evenload.cli.change", "Hold a job back, let it go, or change its priority, limits, devices."),
    "queue": Command("evenload.cli.queue", "Show how the queue decides; stop its daemon, set, limit, reserve."),
    "simulate": Command("evenload.cli.simulate", "Ask what a queue would do: another policy, one more card."),
}


class LazyGroup(TyperGroup):
    """Knows its commands by `COMMANDS` alone and imports one when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The commands, in the order of use."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Imports the command, or returns None for an unknown one."""
        command = COMMANDS.get(cmd_name)
        return command.load(cmd_name) if command is not None else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the list of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in COMMANDS.items()])


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    """Train one PyTorch model on unequal devices: measured, evenly split, exact."""
    if version:
        print(f"evenload {evenload.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; what Evenload says is wrong is printed without a traceback, exit code 2."""
    try:
        app(args=list(arguments) if arguments is not None else None, prog_name="evenload")
    except EvenloadError as error:
        print(f"evenload: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
