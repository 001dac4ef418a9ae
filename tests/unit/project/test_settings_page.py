"""docs/settings.md and the signature of `evenload.init` agree with the settings that `Config` declares."""

from __future__ import annotations

import inspect

import evenload
from evenload.cli.main import COMMANDS
from evenload.config import SETTINGS, option_of
from tests.system.docs.test_commands import ROOT
from tests.unit.project.settings_page import page


def test_the_page_is_generated() -> None:
    command = "python -m tests.unit.project.settings_page > docs/settings.md"
    assert (ROOT / "docs" / "settings.md").read_text() == page(), f"run `{command}`"


def test_init_takes_the_settings_of_a_script() -> None:
    expected = {name for name, setting in SETTINGS.items() if setting.in_script}
    assert set(inspect.signature(evenload.init).parameters) == expected


def test_commands_have_their_options() -> None:
    for command in ("run", "verify"):
        options = {option for param in COMMANDS[command].load(command).params for option in param.opts}
        settings = {option_of(name): command in setting.commands for name, setting in SETTINGS.items()}
        assert {option for option in settings if option in options} == {o for o, has in settings.items() if has}
