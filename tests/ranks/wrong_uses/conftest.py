"""A run of one rank inside the test's own process, for wrong uses that need no second rank to show."""

import pytest

import evenload
from evenload.training import run as run_module


@pytest.fixture
def init(tmp_path):
    """Calls `evenload.init` with a run folder of the test's own; what is still open at the end is closed."""

    def call(**settings):
        return evenload.init(**{"project_dir": tmp_path / "run", **settings})

    yield call
    if run_module._open is not None:
        run_module._open.close()
