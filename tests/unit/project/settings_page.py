"""The text of docs/settings.md, from the fields of `Config`: ``python -m tests.unit.project.settings_page``."""

from __future__ import annotations

from evenload.config import SETTINGS, Config, Setting, option_of

_HEAD = """\
# Settings

Set a value in the script (`evenload.init(seed=1)`), on the command line (`evenload run --seed 1`) or in a TOML file
(`evenload run -c run.toml`). Different values for one setting are an error that shows both. A setting without effect is an
error too. `evenload.spawn` takes the same settings as keyword arguments.

This page is generated from `evenload.Config`.

| setting | default | values | meaning | set in |
|---|---|---|---|---|"""


def page() -> str:
    """Return the page."""
    return "\n".join((_HEAD, *(_row(name, setting) for name, setting in SETTINGS.items()), ""))


def _row(name: str, setting: Setting) -> str:
    default = getattr(Config(), name)
    shown = "off" if default is False else f"`{default}`" if default not in (None, (), {}) else "none"
    places = [f"`{command} {option_of(name)}`" for command in setting.commands]
    values = setting.kind.values.replace("` `", "`, `")
    return (
        f"| `{name}` | {shown} | {values} | {setting.help} | {', '.join([*['`init`'] * setting.in_script, *places])} |"
    )


if __name__ == "__main__":
    print(page(), end="")
