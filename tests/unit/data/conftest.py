from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator

import numpy
import psutil
import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No worker process outlives its test, and the test's own generators are as they were."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    yield
    for attempt in range(20):
        left = [
            child
            for child in psutil.Process().children(recursive=True)
            if child.pid not in before and "resource_tracker" not in " ".join(_command(child))
        ]
        if not left:
            return
        if attempt == 0:
            gc.collect()  # loaders in a reference cycle keep their workers; a collection takes a third of a second
        else:
            time.sleep(0.1)
    pytest.fail(f"processes left behind: {[_command(child) for child in left]}")


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return ["gone"]
