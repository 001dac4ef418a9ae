"""Options and settings of the commands that run a user's script, and where each was set."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from evenload.cli.unknown_options import describe_unknown_option, misplaced_options
from evenload.config import SETTINGS, Config, Setting, check_setting, describe_unknown_setting, option_of, spell_option
from evenload.errors import ConfigError

CONTEXT_SETTINGS = {"allow_interspersed_args": False}
LAUNCH_KEYS = ("devices", "throttle", "port")
"""Keys of a file in addition to the settings."""

Script = Annotated[
    list[str] | None, typer.Argument(metavar="SCRIPT [ARGS]...", help="Script to run, with its own arguments.")
]
Module = Annotated[str | None, typer.Option("-m", metavar="MODULE", help="Run a module, like python -m.")]
ConfigFile = Annotated[
    Path | None, typer.Option("-c", "--config", metavar="FILE", help="Read settings from a TOML file.")
]
Port = Annotated[
    int | None, typer.Option(min=0, max=65535, metavar="PORT", help="Port of the rendezvous; 0: any free port.")
]
NprocPerNode = Annotated[
    str | None,
    typer.Option("--nproc-per-node", "--nproc_per_node", metavar="N", help="Number of ranks, as in torchrun."),
]


class ScriptCommand(TyperCommand):
    """Stops parsing options at the script or after ``-m MODULE``, as python does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ended = self._end_options(args)
        known = [name for param in self.params for name in getattr(param, "opts", ())]
        script = ended[self._num_options(ended) :]
        if misplaced := misplaced_options(script, known):
            raise ConfigError(
                f"{' '.join(misplaced)} stands after the script, which reads no arguments; options of evenload come before it: "
                f"evenload {self.name} {' '.join([*script[1:], script[0]])}"
            )
        try:
            return super().parse_args(ctx, ended)
        except Exception as error:
            option = getattr(error, "option_name", None)
            if type(error).__name__ != "NoSuchOption" or option is None:  # typer may bring its own click
                raise
            hint = describe_unknown_option(option, known)
        raise ConfigError(f"No such option: {option}{hint}; evenload {self.name} --help lists all")

    def _end_options(self, args: list[str]) -> list[str]:
        index = self._num_options(args)
        return [*args[: index + 2], "--", *args[index + 2 :]] if args[index : index + 1] == ["-m"] else args

    def _num_options(self, args: list[str]) -> int:
        """Return the number of words before the script, or before ``-m`` or ``--``."""
        takes_value = {
            name: not getattr(param, "is_flag", False) for param in self.params for name in getattr(param, "opts", ())
        }
        index = 0
        while index < len(args) and args[index].startswith("-") and args[index] not in ("--", "-m"):
            index += 2 if takes_value.get(args[index], False) else 1
        return index


def takes_settings(command: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the ``**settings`` of a command's function by one option for each setting that the command has."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        after_devices = next(i for i, p in enumerate(parameters, 1) if p.name == "devices")
        options = [_parameter(name, setting) for name, setting in SETTINGS.items() if command in setting.commands]
        parameters[after_devices:after_devices] = options
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return decorate


def _parameter(name: str, setting: Setting) -> inspect.Parameter:
    default = getattr(Config, name, None)
    info = typer.Option(option_of(name), help=setting.help, metavar=setting.kind.metavar or None)
    kind: Any = bool if default is False else list[str] | None if name == "logger_options" else str | None
    return inspect.Parameter(
        name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=False if kind is bool else None,
        annotation=Annotated[kind, info],
    )


def merge(
    launch: Mapping[str, Any], options: Mapping[str, Any], path: Path | None, nproc_per_node: str | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge the options and the file given by ``-c``; return the values by name, and where each was set.

    None in ``launch``, and None or False in ``options``, mean not set. ConfigError: the file cannot be read, has an unknown
    key, or contradicts an option; or a value is wrong.
    """
    values = {name: value for name, value in launch.items() if value is not None}
    sources = {name: f"{'-d' if name == 'devices' else option_of(name)} {value}" for name, value in values.items()}
    for name, text in options.items():
        if text in (None, False, []):
            continue
        value = text if text is True else SETTINGS[name].kind.parse(text)
        sources[name] = spell_option(name, value)
        values[name] = check_setting(name, value, sources[name])
    for name, value in {} if path is None else _read_file(path).items():
        spelled = f"{name} = {value!r} in {path}"
        value = check_setting(name, value, spelled) if name in SETTINGS else value
        if name in values and values[name] != value:
            raise ConfigError(f"{name} is set twice, differently: {sources[name]} and {spelled}; remove one of them")
        if name not in values:
            values[name], sources[name] = value, spelled
    if nproc_per_node is not None:
        values["devices"] = _devices_of(nproc_per_node, values, sources)
    return values, sources


def _devices_of(nproc_per_node: str, values: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    """Return what ``-d`` means for torchrun's number of ranks: that many GPUs, or CPU ranks where there is no GPU."""
    from evenload.hardware import find_gpus

    option = f"--nproc-per-node {nproc_per_node}"
    if "devices" in values:
        raise ConfigError(f"{option} and {sources['devices']} both say which ranks to start; leave one of them out")
    if values.get("strategy") == "dp" and nproc_per_node != "1":
        raise ConfigError(
            f"{option} asks for several processes, but {sources['strategy']} uses one process for all devices; name the "
            "devices with -d, such as -d cpu:2"
        )
    num_gpus = len(find_gpus()[0])
    if nproc_per_node in ("auto", "gpu", "cpu"):
        if nproc_per_node == "gpu" and not num_gpus:
            raise ConfigError("--nproc-per-node gpu: there is no GPU here")
        return "cpu" if nproc_per_node == "cpu" else "auto"
    if not nproc_per_node.isdecimal() or nproc_per_node == "0":
        raise ConfigError(f"{option}: expected a number of ranks, auto, gpu or cpu")
    num_ranks = int(nproc_per_node)
    if not num_gpus:
        return f"cpu:{num_ranks}"
    if num_ranks > num_gpus:
        raise ConfigError(
            f"{option}: there are {num_gpus} GPUs here; name ranks that share a GPU with -d, such as -d 0,0"
        )
    return ",".join(map(str, range(num_ranks)))


def _read_file(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"-c {path}: the file can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f'-c {path}: invalid TOML: {error}; settings are lines such as precision = "bf16"') from None
    known = {*SETTINGS, *LAUNCH_KEYS}
    for name, value in table.items():
        if name not in known:
            raise ConfigError(f"-c {path}: {describe_unknown_setting(name, LAUNCH_KEYS)}")
        if name == "throttle" and isinstance(value, list):
            table[name] = ",".join(map(str, value))
        elif name in ("devices", "throttle"):
            table[name] = str(value)
        elif name == "port" and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 65536):
            raise ConfigError(f"-c {path}: port = {value!r}: expected a number from 0 to 65535")
    return table
