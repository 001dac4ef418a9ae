"""Two machines (network namespaces): how long the example's steps take over slow links, and how soon what is wrong is told.

Steps: train_gpt.py with one CPU rank on each machine, all on the cores of this one, at 1 Gbit/s, 100 Mbit/s and 10 Mbit/s each
way; medians over the steps after the first three. Told: seconds from the command to the word on each side, with all limits as
they are by default; for the network that breaks, from the break.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.launching import EXAMPLE
from benchmarks.report import rows
from evenload.records.reader import read_steps
from evenload.testing import hosts

TOLD_S = 15.0
"""The bar."""
RATES_MBIT = (1000, 100, 10)
_NOTHING = "raise SystemExit('it ran')\n"
_FOREVER = "import time, evenload\nrun = evenload.init()\nprint('ready', flush=True)\ntime.sleep(1000)\n"


def measure(quick: bool = False) -> dict[str, Any]:
    """Steps over slow links, and seconds until what is wrong is told."""
    reason = hosts.why_not()
    if reason:
        return {"skipped": reason}
    rates = RATES_MBIT[1:2] if quick else RATES_MBIT
    cases = dict(list(CASES.items())[1:2]) if quick else CASES
    told: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="evenload-bench-") as folder:
        links = {str(rate): _train(Path(folder, f"steps-{rate}"), rate, 6 if quick else 20, quick) for rate in rates}
        for name, case in cases.items():
            with hosts.machines(2) as boxes:
                told[name] = case(boxes, Path(folder, name.replace(" ", "-")))
    bars = {
        f"told within {TOLD_S:g} s: {name}": all(s <= TOLD_S for s in sides.values()) for name, sides in told.items()
    }
    return {"links": links, "told_s": told, "bars": bars}


def table(result: dict[str, Any]) -> str:
    """Two tables, for people."""
    if "skipped" in result:
        return f"skipped: {result['skipped']}"
    links = [
        (
            f"{rate} Mbit/s",
            f"{link['step_s']:.3f} s",
            f"{link['wait_s']:.3f} s",
            f"{link['gradient_bytes'] / 1e6:.1f} MB",
        )
        for rate, link in result["links"].items()
    ]
    told = [
        (name, ", ".join(f"{side} {seconds:.1f} s" for side, seconds in sides.items()))
        for name, sides in result["told_s"].items()
    ]
    return "\n\n".join(
        (rows(("link", "step", "of it waited", "gradients"), links), rows(("what is wrong", "told after"), told))
    )


class _Typed:
    """A command on a machine, and when its screen shows something."""

    def __init__(self, box: hosts.VirtualHost, folder: Path, script: str, *words: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.py").write_text(script)
        self.box = box
        self._screen = folder / "screen"
        self.began_s = time.monotonic()
        with self._screen.open("w") as screen:
            self.process = box.popen(
                [sys.executable, "-m", "evenload.cli.main", "run", "-d", "cpu", *words],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=subprocess.STDOUT,
            )

    def shows(self, text: str) -> bool:
        """Whether the text is there."""
        return text in self._screen.read_text()

    def end(self) -> None:
        """Ends it, whatever it does."""
        self.process.terminate()
        self.process.wait()


def _until(
    awaited: dict[str, tuple[_Typed, str]], since_s: float | None = None, limit_s: float = 90.0
) -> dict[str, float]:
    """Seconds until each shows its text, since it was typed or since a moment."""
    seconds: dict[str, float] = {}
    deadline_s = time.monotonic() + limit_s
    while len(seconds) < len(awaited):
        for side, (typed, text) in awaited.items():
            if side not in seconds and typed.shows(text):
                seconds[side] = time.monotonic() - (typed.began_s if since_s is None else since_s)
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{awaited.keys() - seconds.keys()} were not told within {limit_s:g} s")
        time.sleep(0.02)
    return {side: seconds[side] for side in awaited}


def _train(folder: Path, mbit_per_s: float, num_steps: int, quick: bool) -> dict[str, float]:
    size = ("--width", "64", "--depth", "1", "--batch-size", "12") if quick else ()
    words = ("--nodes", "2", "--host", "box1", "train.py", "--steps", str(num_steps), "--sample-bytes", "1", *size)
    with hosts.machines(2, mbit_per_s) as boxes:
        typed = [_Typed(box, folder / box.name, EXAMPLE.read_text(), *words) for box in boxes]
        for one in typed:
            if one.process.wait(600):
                raise RuntimeError(f"the example failed on {one.box.name}; see {folder}")
    steps = list(read_steps(folder / "box1" / "runs" / "train"))[3:]
    width, depth = (64, 1) if quick else (192, 4)
    num_parameters = 256 * width + 128 * width + depth * (12 * width**2 + 13 * width) + 2 * width
    return {
        "step_s": statistics.median(step.seconds for step in steps),
        "wait_s": statistics.median(
            statistics.mean(rank.wait_s + rank.comm_s for rank in step.ranks) for step in steps
        ),
        "gradient_bytes": 4.0 * num_parameters,
    }


def _guest_alone(host: str, told: str) -> Callable[[tuple[hosts.VirtualHost, ...], Path], dict[str, float]]:
    """The second machine is told where it is wrong; the first one that nobody comes."""

    def act(boxes: tuple[hosts.VirtualHost, ...], folder: Path) -> dict[str, float]:
        boxes[0].drop_port(29502)
        point = _Typed(boxes[0], folder / "box1", _NOTHING, "--nodes", "2", "--host", "box1:29502", "train.py")
        guest = _Typed(boxes[1], folder / "box2", _NOTHING, "--nodes", "2", "--host", host, "train.py")
        seconds = _until({"meeting point": (point, "1 of 2 machines is here"), "guest": (guest, told)})
        point.end()
        guest.end()
        return seconds

    return act


def _other_code(boxes: tuple[hosts.VirtualHost, ...], folder: Path) -> dict[str, float]:
    words = ("--nodes", "2", "--host", "box1", "train.py")
    point = _Typed(boxes[0], folder / "box1", _NOTHING, *words)
    guest = _Typed(boxes[1], folder / "box2", _NOTHING + "# changed\n", *words)
    told = "the script is not the same code"
    seconds = _until({"meeting point": (point, told), "guest": (guest, told)})
    point.end()
    guest.end()
    return seconds


def _break(box: int, pull: bool) -> Callable[[tuple[hosts.VirtualHost, ...], Path], dict[str, float]]:
    """A cable is pulled, or a supervisor killed, in the middle of a run."""

    def act(boxes: tuple[hosts.VirtualHost, ...], folder: Path) -> dict[str, float]:
        words = ("--nodes", "2", "--host", "box1", "train.py")
        typed = [_Typed(one, folder / one.name, _FOREVER, *words) for one in boxes]
        _until({one.box.name: (one, "ready") for one in typed})
        began_s = time.monotonic()
        if pull:
            boxes[box].unplug()
        else:
            typed[box].process.kill()
        rest = [one for index, one in enumerate(typed) if pull or index != box]
        seconds = _until({f"box{typed.index(one) + 1}": (one, "is gone") for one in rest}, began_s)
        for one in typed:
            one.end()
        return seconds

    return act


CASES = {
    "a name that nobody has": _guest_alone("box9", "no machine is known here by that name"),
    "a closed port": _guest_alone("box1:29501", "nothing listens at that port"),
    "a firewall that drops": _guest_alone("box1:29502", "a firewall drops what is sent there"),
    "an address without a machine": _guest_alone("10.77.0.9", "no machine answers at that address"),
    "other code": _other_code,
    "a supervisor killed, of the meeting point": _break(0, pull=False),
    "a supervisor killed, of a guest": _break(1, pull=False),
    "a cable pulled": _break(1, pull=True),
}
