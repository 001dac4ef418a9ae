"""The deadline of stalled ranks: no false alarm in 2,000 steps that spike, evaluate, save and compile.

Method: three ranks train a small network for 2,000 steps of a few milliseconds under `evenload run`, so that the deadline is
at its least (4.5 s). In every tenth step, at random, one random rank takes 0.05 to 0.3 s longer, and in one of twenty of
these 4 s. In every 500 steps: an evaluation in which rank 1 takes 5 s, code of rank 0 alone between two steps for 5 s, and
two checkpoints in a row, each of which takes 5 s longer to write. In step 666 a model under torch.compile is compiled again,
which takes rank 2 5 s. These are waits, so that the machine stays free. A false alarm is an event `lost`, or a line that a
rank does not respond.

Bar: no false alarm, and all steps are done.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.launching import SCRIPTS
from evenload.records.reader import read_events, read_steps

_LIMIT_S = 600.0


def measure(quick: bool) -> dict[str, Any]:
    num_steps, long_s = (100, 0.5) if quick else (2000, 5.0)
    with tempfile.TemporaryDirectory(prefix="evenload-stalls-") as name:
        run = Path(name) / "run"
        script = [str(SCRIPTS / "train_spiking.py"), str(num_steps), str(long_s), str(run)]
        began_s = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-m", "evenload.cli.main", "run", "-d", "cpu:3", *script],
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )
        seconds = time.monotonic() - began_s
        if ended.returncode:
            raise RuntimeError(ended.stdout[-3000:] + ended.stderr[-3000:])
        alarms = [line for line in (ended.stdout + ended.stderr).splitlines() if "does not respond" in line]
        alarms += [str(event.message) for event in read_events(run) if event.kind == "lost"]
        records = list(read_steps(run))
    bars = {"no false alarm": not alarms, "all steps are done": len(records) == num_steps}
    took_s = [later.time - earlier.time for earlier, later in pairwise(records)]
    return {
        "num_steps": len(records),
        "num_slow": sum(seconds > 0.04 for seconds in took_s),
        "longest_s": max(took_s),
        "seconds": seconds,
        "alarms": alarms,
        "bars": {} if quick else bars,
    }


def table(result: dict[str, Any]) -> str:
    return "\n".join(
        [
            f"{result['num_steps']} steps in {result['seconds']:.0f} s, {result['num_slow']} of them slow, the longest "
            f"{result['longest_s']:.1f} s; {len(result['alarms'])} false alarms",
            *result["alarms"],
        ]
    )
