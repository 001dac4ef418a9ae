"""The text of docs/settings.md, from the fields of `Config`: ``python -m tests.unit.project.settings_page``."""

from __future__ import annotations

from dataclasses import fields

from evenload.config import SETTINGS, Config, Setting, option_of

_HEAD = """\
# Settings

Set a value in the script (`evenload.init(seed=1)`), on the command line (`evenload run --seed 1`) or in a TOML file
(`evenload run -c run.toml`). Different values for one setting are an error that shows both. A setting without effect is an
error too. `evenload.spawn` takes the same settings as keyword arguments.

A job of the [queue](queue.md) has no settings of its own: its command sets them (`evenload submit -- evenload run --seed 1
train.py`), or the script does. A [job file](job-file.md) does the same under `command`.

This page is generated from `evenload.Config` by `python -m tests.unit.project.settings_page`.

| setting | type | default | values | meaning | in the script | on the command line, also of a job | in a file |
|---|---|---|---|---|---|---|---|"""

_TYPES = {field.name: field.type for field in fields(Config)}


def page() -> str:
    """Return the page."""
    return "\n".join((_HEAD, *(_row(name, setting) for name, setting in SETTINGS.items()), ""))


def _row(name: str, setting: Setting) -> str:
    default = getattr(Config(), name)
    shown = "off" if default is False else f"`{default}`" if default not in (None, (), {}) else "none"
    places = [f"`{command} {option_of(name)}`" for command in setting.commands]
    values = setting.kind.values.replace("` `", "`, `")
    script = f"`init({name}=...)`" if setting.in_script else "no"
    cells = (f"`{name}`", f"`{_TYPES[name]}`", shown, values, setting.help, script, ", ".join(places) or "no", "`-c`")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    print(page(), end="")
