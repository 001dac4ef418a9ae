from __future__ import annotations

from typing import Any

import pytest

from tests.exact import measure

STRATEGIES = ("ddp",)


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> Any:
    """Every strategy has to pass every test of this folder."""
    return request.param


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not measure.TABLE or terminalreporter.verbosity < 1:
        return
    terminalreporter.section("differences to one process (relative, 2-norm)")
    for name, d in measure.TABLE:
        terminalreporter.write_line(
            f"{name:55s} params {d.params:.1e}  grads {d.grads:.1e}  buffers {d.buffers:.1e}  loss {d.losses:.1e}"
        )
