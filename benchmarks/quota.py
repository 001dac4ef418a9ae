"""CPU quotas for ranks, set from outside the program that is measured: it knows nothing of them.

The program's ranks write their process ids into a folder; a thread of the benchmark moves each, with its threads, into a
control group of its own. Cgroup v1 or v2, as `evenload run --throttle` finds it; the period is 10 ms.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from evenload.training.launch.throttle import CpuCgroups

PERIOD_US = 10_000


@contextlib.contextmanager
def quotas(num_cores: Mapping[int, float]) -> Iterator[Path]:
    """Hold each rank of `num_cores` to so many cores; yield the folder for files named by the rank that contain its pid.

    Raises:
        OSError: control groups can't be written here.
    """
    groups = CpuCgroups(tuple(num_cores), period_us=PERIOD_US)
    ended = threading.Event()
    with tempfile.TemporaryDirectory(prefix="evenload-pids-") as name:
        folder = Path(name)
        watcher = threading.Thread(target=_admit, args=(groups, dict(num_cores), folder, ended), name="quotas")
        watcher.start()
        try:
            yield folder
        finally:
            ended.set()
            watcher.join()
            groups.remove()


def _admit(groups: CpuCgroups, waiting: dict[int, float], folder: Path, ended: threading.Event) -> None:
    while waiting and not ended.wait(0.02):
        for rank in list(waiting):
            with contextlib.suppress(FileNotFoundError, ValueError):  # ValueError: it is just being written
                pid = int((folder / str(rank)).read_text())
                groups.admit(rank, pid)
                groups.limit(rank, waiting.pop(rank))
