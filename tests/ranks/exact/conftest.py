from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.exact import measure
from tests.ranks.exact.ranks import STRATEGIES


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of what a strategy does run over all of them, or those that they name; the others over the first alone."""
    named = any("strategy" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "strategy" in metafunc.fixturenames and not named:
        every = metafunc.definition.get_closest_marker("every_strategy") is not None
        metafunc.parametrize("strategy", STRATEGIES if every else STRATEGIES[:1])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not measure.TABLE or terminalreporter.verbosity < 1:
        return
    terminalreporter.section("differences to one process (relative, 2-norm)")
    for name, d in measure.TABLE:
        terminalreporter.write_line(
            f"{name:55s} params {d.params:.1e}  grads {d.grads:.1e}  buffers {d.buffers:.1e}  loss {d.losses:.1e}"
        )
