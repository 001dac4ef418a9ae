"""User settings: each is declared once, as a field of `Config`; init, the command line and docs/settings.md derive from it.

A setting comes from the script (`evenload.init(seed=1)`), from the command line (`evenload run --seed 1`) or from a file given
by ``-c``. Different values for one setting are an error that shows both. No environment variable and no hidden file is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from evenload.errors import ConfigError
from evenload.foreign_names import SETTINGS_ELSEWHERE, describe_unknown
from evenload.setting_kinds import (
    FLAG,
    SECONDS,
    Kind,
    check_balance,
    check_folder,
    check_islands,
    check_logger_options,
    check_loggers,
    check_num_workers,
    integer,
    one_in,
    one_of,
    parse_balance,
    parse_logger_options,
    parse_loggers,
    real,
)

COMMAND_LINE = "command line"
SPAWN = "call of evenload.spawn"
"""Sources of settings other than the script."""


@dataclass(frozen=True)
class Setting:
    kind: Kind
    help: str
    option: str
    commands: tuple[str, ...]
    """The commands that have this option; a file given by ``-c`` may hold any setting."""
    in_script: bool
    """`evenload.init` takes it."""
    rank_0_only: bool
    """Only rank 0 uses it, so the ranks may differ."""


def _setting(
    default: Any,
    kind: Kind,
    help: str,
    *,
    option: str = "",
    commands: tuple[str, ...] = ("run",),
    in_script: bool = True,
    rank_0_only: bool = False,
) -> Any:
    metadata = {"setting": Setting(kind, help, option, commands, in_script, rank_0_only)}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


STRATEGY_NAMES = ["ddp", "dp", "local", "async"]
"""Values of ``strategy``; `register_strategy` adds to them (training/parallel/factory.py)."""


_BOTH = ("run", "verify")


@dataclass(frozen=True)
class Config:
    """The resolved settings of one run (described in docs/settings.md), and where each was set."""

    project_dir: str = _setting(
        "runs/default",
        Kind("a folder", check_folder, metavar="DIR"),
        "Run folder for settings, events, steps and checkpoints; runs/SCRIPT unless set.",
        commands=_BOTH,
        rank_0_only=True,
    )
    seed: int = _setting(
        0,
        integer("an integer from 0 to 2^63 - 1", "INTEGER", least=0),
        "Seed of the sample order and of all randomness that Evenload controls.",
        commands=_BOTH,
    )
    precision: str = _setting(
        "no",
        one_of("no", "bf16", "fp16"),
        "Autocast precision. no: the model's own dtype; fp16: with dynamic loss scaling.",
        commands=_BOTH,
    )
    strategy: str = _setting(
        "ddp",
        one_in(STRATEGY_NAMES),
        "Where replicas of the model live. ddp: one process per device; dp: one process for all devices; local: as ddp inside "
        "an island, and islands synchronise rarely; async: one process per device, and a server of the parameters, so that no "
        "device waits for another.",
        commands=_BOTH,
    )
    islands: tuple[tuple[int, ...], ...] | None = _setting(
        None,
        Kind("the ranks of each island: `0,1/2,3`", check_islands, metavar="RANKS/RANKS"),
        "Ranks joined by fast links, under strategy local. Unless set, the ranks of a machine.",
        commands=_BOTH,
    )
    sync_every: int = _setting(
        20,
        integer("a number of steps, at least 1", "STEPS", least=1),
        "Steps between two synchronisations of the islands, under strategy local.",
        commands=_BOTH,
    )
    local_steps: str = _setting(
        "equal",
        one_of("equal", "auto"),
        "Steps of an island, under strategy local. equal: as many as the others, with its part of each global batch; auto: by "
        "speed, with global batch / islands.",
        commands=_BOTH,
    )
    outer_lr: float = _setting(
        1.0,
        real("a number above 0", "RATE", low=0.0),
        "Learning rate of the outer Nesterov step at a synchronisation; 1 with momentum 0 is the average. DiLoCo: 0.7.",
        commands=_BOTH,
    )
    outer_momentum: float = _setting(
        0.0,
        real("a number from 0, below 1", "MOMENTUM", low=0.0, high=1.0, includes_low=True),
        "Momentum of the outer Nesterov step. DiLoCo: 0.9.",
        commands=_BOTH,
    )
    fragments: int = _setting(
        1,
        integer("a number of fragments, at least 1", "NUMBER", least=1),
        "Fragments that synchronise in turn, each hidden behind the steps until the next one; 1: everything at once.",
        commands=_BOTH,
    )
    sync_delay: int = _setting(
        0,
        integer("a number of steps, at least 0", "STEPS", least=0),
        "Steps from sending a fragment to using its sum, behind which it is hidden. 0: with one fragment wait for the sum, with "
        "several use it when the next one is sent.",
        commands=_BOTH,
    )
    wire: str = _setting(
        "fp32",
        one_of("fp32", "bf16", "fp16", "int8", "powersgd", "auto"),
        "Format of gradients between machines, and of pseudo-gradients between islands. fp32: as they are; auto: a smaller one "
        "where the loss can't show it.",
        commands=_BOTH,
    )
    staleness: int = _setting(
        4,
        integer("an integer of at least 0", "UPDATES", least=0),
        "Under async, the most updates that a gradient may be behind when it is applied. 0: synchronous, as ddp.",
        commands=_BOTH,
    )
    staleness_lr: str = _setting(
        "none",
        one_of("none", "inverse", "compensate"),
        "Under async, the step of a stale gradient. inverse: learning rate / staleness; compensate: delay compensation.",
    )
    servers: int = _setting(
        1, integer("1", "N", least=1), "Under async, the number of servers of the parameters; only 1 for now."
    )
    micro_batch: int | str = _setting(
        "auto",
        integer("auto or a number of samples, at least 1", "SAMPLES", least=1, word="auto"),
        "Largest number of samples a rank computes at once. auto: what fits in memory.",
        commands=_BOTH,
    )
    balance: str | tuple[int, ...] = _setting(
        "auto",
        Kind("`auto` `even`, or one share per rank: `24,6,2`", check_balance, parse_balance, "auto|even|SHARES"),
        "Split of the global batch. auto: by measured speed; even: equal shares; 24,6,2: fixed shares, or proportions.",
        commands=_BOTH,
    )
    batch_max: int | None = _setting(
        None,
        integer("a number of samples, more than the loader's batch_size", "SAMPLES", least=2),
        "Let the global batch grow up to this size where the measured goodput is higher.",
    )
    batch_lr: str = _setting(
        "auto",
        one_of("auto", "adascale", "sqrt", "none"),
        "Learning-rate rule for a grown batch. auto: adascale for SGD, sqrt for other optimizers.",
    )
    batch_norm: str = _setting(
        "global",
        one_of("global", "local"),
        "BatchNorm statistics. global: over all ranks; local: the model's BatchNorm unchanged.",
        commands=(),
    )
    dataset_rng: str = _setting(
        "keyed",
        one_of("keyed", "off"),
        "Randomness inside a dataset. keyed: seeded by (seed, epoch, position); off: unchanged.",
        commands=(),
    )
    num_workers: str = _setting(
        "loader",
        Kind("`loader` `auto`", check_num_workers, metavar="loader|auto"),
        "Loader workers. loader: as set in each DataLoader; auto: chosen by measurement while training.",
    )
    check_every: int | str = _setting(
        10,
        integer("off or a number of steps, at least 1, such as 10", "STEPS", least=1, word="off"),
        "Steps between two comparisons of all ranks' parameters and buffers. off: never compare.",
    )
    loggers: tuple[str, ...] = _setting(
        (),
        Kind("names of loggers", check_loggers, parse_loggers, "NAME,..."),
        "Further destinations of metrics: tensorboard, wandb, mlflow, and loggers of other packages.",
        rank_0_only=True,
    )
    logger_options: Mapping[str, Mapping[str, Any]] = _setting(
        {},
        Kind("options by logger", check_logger_options, parse_logger_options, "LOGGER.OPTION=VALUE"),
        "Options of the loggers, such as wandb.project=gpt; the command-line option may be repeated.",
        option="--logger-option",
        rank_0_only=True,
    )
    log_every_s: float = _setting(
        10.0,
        SECONDS,
        "Time between two progress lines when the output is not a terminal.",
        option="--log-every",
        rank_0_only=True,
    )
    timeout_s: float = _setting(
        600.0,
        SECONDS,
        "Time after which a collective is an error; unless set, under `evenload run` only NCCL's and the script's own.",
        commands=(),
    )
    fresh: bool = _setting(
        False,
        FLAG,
        "Start over instead of resuming; run moves the old contents of the run folder aside.",
        commands=_BOTH,
        in_script=False,
        rank_0_only=True,
    )
    override: bool = _setting(
        False,
        FLAG,
        "Resume with another seed, batch_size or data than the epoch began with: leave the rest of that epoch out.",
        in_script=False,
    )
    dry_run: bool = _setting(False, FLAG, "Print every decision and its reason; train nothing.", in_script=False)
    sources: Mapping[str, str] = field(default_factory=dict)
    """For each setting that was set, where."""


LOCAL_SETTINGS = ("islands", "sync_every", "local_steps", "outer_lr", "outer_momentum", "fragments", "sync_delay")
"""Those of strategy local alone."""

SETTINGS: Mapping[str, Setting] = {f.name: f.metadata["setting"] for f in fields(Config) if f.metadata}
"""The settings by name."""


def resolve(script: Mapping[str, Any], command_line: Mapping[str, Any], caller: str = COMMAND_LINE) -> Config:
    """Merge and check the settings of the script and of the command line; None in either means not set.

    ``caller`` is the source of ``command_line``: `COMMAND_LINE` or `SPAWN`. ConfigError: an unknown setting, a wrong value,
    or a setting with different values in both.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, given in (("script", script), (caller, command_line)):
        for name, raw in given.items():
            if raw is None:
                continue
            spelled = spell_option(name, raw) if source == COMMAND_LINE else _spell_argument(source, name, raw)
            if name not in SETTINGS:
                raise ConfigError(f"{spelled} in the {source}: {describe_unknown_setting(name)}")
            value = check_setting(name, raw, spelled)
            if name in values and values[name] != value:
                raise ConfigError(
                    f"{name} is set twice, differently: {sources[name]} in the script and {spelled} "
                    f"{'on' if source == COMMAND_LINE else 'in'} the {source}; remove one of them"
                )
            values[name] = value
            sources.setdefault(name, spelled)
    return Config(**values, sources=sources)


def describe_unknown_setting(name: str, others: Sequence[str] = ()) -> str:
    """Return the words for a setting that does not exist: what to write instead, or else all settings and `others`."""
    known = sorted({*SETTINGS, *others})
    hint = describe_unknown(name, known, SETTINGS_ELSEWHERE)
    return f"there is no setting {name!r}; {hint or 'the settings are ' + ', '.join(known)}"


def explain_init_keyword(name: str) -> str:
    """Return the words for a keyword that `evenload.init` does not take."""
    if name in SETTINGS:
        return f"{name} belongs to the command line: evenload run {option_of(name)} train.py"
    return describe_unknown_setting(name)


def check_setting(name: str, value: Any, spelled: str) -> Any:
    """Return the value of a setting in its normal form; ConfigError, which starts with ``spelled``, if it is wrong."""
    try:
        return SETTINGS[name].kind.check(value)
    except ValueError as error:
        raise ConfigError(f"{spelled}: {error}") from None


def as_table(config: Config) -> dict[str, Any]:
    """Return the settings and their sources as plain values, for `config.toml`."""
    table: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        table[f.name] = list(value) if isinstance(value, tuple) else value
    table["logger_options"] = {name: dict(options) for name, options in config.logger_options.items()}
    table["sources"] = dict(config.sources)
    return table


def option_of(name: str) -> str:
    return (SETTINGS[name].option if name in SETTINGS else "") or "--" + name.replace("_", "-")


def spell_option(name: str, value: Any) -> str:
    """Return a setting as it is written on the command line."""
    option = option_of(name)
    if value is True:
        return option
    if name == "logger_options" and isinstance(value, Mapping):
        return " ".join(
            f"{option} {logger}.{key}={item}"
            for logger, options in value.items()
            for key, item in (options.items() if isinstance(options, Mapping) else ())
        )
    if name == "islands" and not isinstance(value, str):
        return f"{option} {'/'.join(','.join(map(str, part)) for part in value)}"
    return f"{option} {','.join(map(str, value)) if isinstance(value, tuple | list) else value}"


def _spell_argument(source: str, name: str, value: Any) -> str:
    return f"{'spawn' if source == SPAWN else 'init'}({name}={value!r})"
