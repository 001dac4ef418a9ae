"""The command ``evenload``; each subcommand is imported when it is called, so ``--help`` is fast."""

from __future__ import annotations

import codecs
import errno
import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

import evenload
from evenload.cli.exit_codes import help_text
from evenload.errors import ConfigError, EvenloadError
from evenload.foreign_names import COMMANDS_ELSEWHERE, describe_unknown
from evenload.job.output import FULL_DISK_ERRORS, open_standard_streams


@dataclass(frozen=True)
class Command:
    """Module and help text of a command that is not imported yet."""

    module: str
    help: str

    def load(self, name: str) -> Any:
        """Import the module and return its click command, with ``COMMAND_CLASS`` and ``CONTEXT_SETTINGS`` if it has them."""
        module = import_module(self.module)
        function: Callable[..., Any] = getattr(module, name)
        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        app.command(
            name,
            cls=getattr(module, "COMMAND_CLASS", None),
            epilog=help_text(name),
            context_settings=getattr(module, "CONTEXT_SETTINGS", None),
        )(function)
        command: Any = typer.main.get_command(app)
        for param in command.params:
            is_flag = getattr(param, "is_flag", False)
            param.metavar = None if is_flag else str(param.metavar or param.name.strip("_").upper())
            if param.param_type_name == "argument":  # typer adds brackets, dots and Python's type
                param.get_usage_pieces = lambda _, text=param.metavar: [text]
                param.get_help_record = lambda _, text=param.metavar, meaning=param.help: (text, meaning)
        return command


COMMANDS = {
    "run": Command("evenload.cli.run", "Train a script on all devices of this machine, or of several."),
    "doctor": Command("evenload.cli.doctor", "Check this machine, and suggest a fix for each problem."),
    "verify": Command("evenload.cli.verify", "Check that a split gives the gradients of one process."),
    "demo": Command("evenload.cli.demo", "Train a small language model on two unequal devices."),
    "show": Command("evenload.cli.show", "Show a run, or a job of the queue."),
    "export": Command("evenload.cli.export", "Write the weights of a run's checkpoint to one file."),
    "submit": Command("evenload.cli.submit", "Submit a command or a job file to the queue."),
    "ps": Command("evenload.cli.ps", "List jobs, their devices and progress, and why others wait."),
    "logs": Command("evenload.cli.logs", "Print or follow the output of a job."),
    "cancel": Command("evenload.cli.cancel", "Cancel jobs; running jobs save first."),
    "change": Command("evenload.cli.change", "Hold or release a job, or change its priority, limits or devices."),
    "queue": Command("evenload.cli.queue", "Show the queue's settings; set limits and reservations, stop its daemon."),
    "simulate": Command("evenload.cli.simulate", "Simulate a queue under other policies or devices."),
}


class LazyGroup(TyperGroup):
    """Lists `COMMANDS`, and imports a command when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = COMMANDS.get(cmd_name)
        return command.load(cmd_name) if command is not None else None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] in ("-d", "-m", "-c", "--devices", "--nproc-per-node", "--nproc_per_node"):
            rest = [word for word in args if word not in COMMANDS]
            raise ConfigError(f"{args[0]} belongs after a command; write: evenload run {' '.join(rest)}")
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name in COMMANDS:
            return super().resolve_command(ctx, args)
        if name.endswith(".py"):
            raise ConfigError(f"there is no command {name}; to train a script write: evenload run {' '.join(args)}")
        hint = describe_unknown(name, COMMANDS, COMMANDS_ELSEWHERE)
        raise ConfigError(f"there is no command {name!r}; {hint or 'the commands are ' + ', '.join(COMMANDS)}")

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list without importing any command."""
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
def _root(
    context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version and exit.")
) -> None:
    """Train a PyTorch model on unequal devices: measured, evenly split, exact."""
    if version:
        print(f"evenload {evenload.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; print an `EvenloadError` without a traceback and exit with code 2."""
    open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # The encoding may lack the signs of a table, or of a name of a file; what `--json` prints can be read all the same.
        codecs.register_error("json", _escape)
        sys.stdout.reconfigure(errors="json")
    try:
        app(args=list(arguments) if arguments is not None else None, prog_name="evenload")
    except EvenloadError as error:
        print(f"evenload: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except UnicodeEncodeError as error:
        found = error.object[max(0, error.start - 40) : error.end + 20]
        print(f"evenload: error: a name is no text in UTF-8: {found!a}; rename it", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, *FULL_DISK_ERRORS):
            raise
        hint = "; start this as the user to whom it belongs, who may also open it to others" if error.filename else ""
        text = f"{error.filename or 'the output'}: {error.strerror}{hint}"
        print(f"evenload: error: {text}", file=sys.stderr)
        raise SystemExit(2) from None


def _escape(error: Any) -> tuple[str, int]:
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


if __name__ == "__main__":
    main()
