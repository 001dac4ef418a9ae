"""Two machines (network namespaces) behind a link of 100 Mbit/s and 2 x 20 ms: islands beside what torch offers.

The example's GPT with 25 MB of gradients, one CPU rank of one thread on each machine, held to equal quotas or to 1 : 0.5 by
control groups from outside (benchmarks/quota.py). All arms take the same global batches of the same data with AdamW:

- `ddp`, `bf16`, `powersgd`: torch's DistributedDataParallel, with a bfloat16 all-reduce, with torch's own PowerSGD hook (rank 4)
- `diloco`: torch alone as torchft does it: equal steps, a blocking average of the weights every `sync_every` steps
- the others: Evenload's strategy local with the same `sync_every`, one with half of it; `auto` takes local_steps=auto

Losses by step do not depend on the link or on the quotas under the first four: they are trained once without a limit, and timed
on the link for a few steps, `diloco` for two rounds. The others train on the link, from the first step on. Validations lie
where an arm has just synchronised, and at the end. Time to the loss: to 1.01 times that of synchronous training after all
steps; the first step, which starts everything, counts as a usual one. An arm that does not get there is not the best one. Compute
is a step of both ranks without a link; exchange is what a step of `ddp` takes beyond that of the slower rank.
`--only summed` runs islands and lone ranks by turns in the same processes (scripts/train_summed.py), after the first
synchronisation, and compares each block of islands with the turns beside it, for the machine's own speed drifts;
`--only summed/ARM` takes another arm. `--only 1:0.5/local` runs one arm, and `--keep FOLDER` keeps what each run
finds: later calls take it from there, so that the parts can be measured one by one.

Bars, by the time to the loss: the best of Evenload reaches 0.9 of (compute + exchange) / compute over `ddp`; at least the speed
of the best of the others with equal islands, 1.3 times it at 1 : 0.5. By steps: there, 0.95 of the islands' summed speed. The
final loss of that best one is within 1 % of synchronous training.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil

from benchmarks.launching import SCRIPTS
from benchmarks.quota import quotas
from benchmarks.report import rows
from evenload.testing import hosts

MBIT, DELAY_MS = 100.0, 20.0
SIZE, QUICK_SIZE = "16,64,256,8", "8,16,32,1"
EVERY, NUM_STEPS, NUM_TIMED = 20, 82, 11
NUM_WARM = 5
"""Steps of an arm before its steps are timed: islands begin in equal parts, for four. To the loss all count."""
CLOSE = 1.01
"""The loss that counts as reached is within 1 % of the synchronous one."""
SPEEDS = {"equal": (0.7, 0.7), "1:0.5": (0.8, 0.4)}
"""Cores of each rank; the rest of two is left to the relay of packets."""
TORCH = ("ddp", "bf16", "powersgd", "diloco")
DELAY = 2
EVENLOAD = {
    "local": (),
    "local fragments=4": ("--fragments", "4"),
    "local int8": ("--wire", "int8"),
    "local int8 delay": ("--wire", "int8", "--sync-delay", str(DELAY)),
    "local int8 delay every 10": ("--wire", "int8", "--sync-delay", str(DELAY), "--sync-every", "10"),
    "local int8 delay auto": ("--wire", "int8", "--sync-delay", str(DELAY), "--local-steps", "auto"),
}
AUTO = "local int8 delay auto"
"""Its islands make different numbers of steps, so it can't be validated inside the loop: it is timed alone."""
SUMMED = "local int8 delay"
SUMMED_S, ALONE_S = 85.0, 4.0
"""Seconds of `--only summed`, and of each turn of lone ranks."""
RIVALS_EVERY = [name for name in EVENLOAD if "every" not in name]
"""Those with the rivals' `sync_every`."""


@dataclass(frozen=True)
class _Place:
    folder: Path
    steps: int
    size: str
    keep: Path | None
    """Where results of runs are kept."""


def measure(quick: bool = False, only: str = "", keep: str = "") -> dict[str, Any]:
    """`only`: some of the names in `SPEEDS`, with commas, or one with an arm behind a slash; `keep`: a folder."""
    if reason := hosts.why_not():
        return {"skipped": reason}
    cases: dict[str, Any] = {}
    wanted, _, arm = only.partition("/")
    if keep:
        Path(keep).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="evenload-bench-") as name:
        size = (EVERY, QUICK_SIZE) if quick else (NUM_STEPS, SIZE)
        place = _Place(Path(name), *size, Path(keep) if keep and not quick else None)
        if wanted == "summed":
            return _summed(place, arm or SUMMED) | {"bars": {}}
        if arm:
            return {"arm": _one(place, arm, SPEEDS.get(wanted, (1.0, 1.0)), fast=wanted not in SPEEDS), "bars": {}}
        curves = {arm: _one(place, arm, (1.0, 1.0), fast=True)["curve"] for arm in TORCH[: 1 if quick else 4]}
        for case, speeds in SPEEDS.items():
            if (only and case not in only.split(",")) or (quick and case != "equal"):
                continue
            cases[case] = _case(place, speeds, curves, quick)
    return {"cases": cases, "bars": _bars(cases)}


def _one(place: _Place, arm: str, speeds: tuple[float, float], *, fast: bool = False) -> dict[str, Any]:
    """Run an arm as `_case` does: those of torch are timed for a few steps, and trained where nothing limits them."""
    if arm in EVENLOAD:
        return _run(place, arm, speeds, options=EVENLOAD[arm], steps=place.steps if arm == AUTO else 0)
    is_curve = fast and speeds == (1.0, 1.0)
    timed = NUM_WARM + 2 * EVERY if arm == "diloco" else NUM_TIMED
    return _run(place, arm, speeds, steps=0 if is_curve else timed, fast=fast)


def _case(place: _Place, speeds: tuple[float, float], curves: Mapping[str, Any], quick: bool) -> dict[str, Any]:
    final = curves["ddp"][-1][-1]
    target = CLOSE * final
    arms: dict[str, Any] = {}
    for arm, curve in curves.items():
        step_s = _one(place, arm, speeds)["step_s"]
        arms[arm] = {
            "step_s": step_s,
            "loss": curve[-1][-1],
            **_reach([(n, n * step_s, loss) for n, _, loss in curve], target),
        }
    for arm in EVENLOAD:
        if (quick and arm != "local") or (arm == AUTO and len(set(speeds)) == 1):
            continue
        found = _one(place, arm, speeds)
        arms[arm] = {"step_s": found["step_s"], "shares": found.get("shares", [])[-1:], "loss": None, "reached": False}
        if arm != AUTO:
            arms[arm] |= {"loss": found["curve"][-1][-1], **_reach(found["curve"], target)}
    alone = [_one(place, "ddp", (speed, speed), fast=True)["step_s"] for speed in sorted(set(speeds))]
    # A step of ddp without a limit is half a batch at the speed of one rank.
    speed = sum(0.5 / seconds for seconds in (alone if len(alone) > 1 else alone * 2))
    compute_s = 1 / speed
    exchange_s = arms["ddp"]["step_s"] - max(alone)
    return {"arms": arms, "compute_s": compute_s, "exchange_s": exchange_s, "target": target, "synchronous_loss": final}


def _reach(curve: Sequence[Any], target: float) -> dict[str, Any]:
    """Return the seconds until the loss is reached, between two points of a curve; all of them if it never is."""
    before = None
    for _, seconds, loss in curve:
        if loss <= target:
            if before is None or before[1] == loss:
                return {"to_loss_s": seconds, "reached": True}
            part = (before[1] - target) / (before[1] - loss)
            return {"to_loss_s": before[0] + part * (seconds - before[0]), "reached": True}
        before = (seconds, loss)
    return {"to_loss_s": curve[-1][1], "reached": False}


def _bars(cases: Mapping[str, Any]) -> dict[str, bool]:
    bars: dict[str, bool] = {}
    for name, case in cases.items():
        arms = case["arms"]

        def best_of(some: Sequence[str], arms: Mapping[str, Any] = arms) -> str | None:
            reached = [arm for arm in some if arm in arms and arms[arm]["reached"]]
            return min(reached, key=lambda arm: float(arms[arm]["to_loss_s"]), default=None)

        own, alike = best_of(tuple(EVENLOAD)), best_of(RIVALS_EVERY)
        rival = best_of(("bf16", "powersgd", "diloco"))
        if own is None or alike is None:
            bars[f"{name}: no arm of Evenload reaches the loss"] = False
            continue
        best = arms[own]
        ideal = (case["compute_s"] + case["exchange_s"]) / case["compute_s"]
        gain = arms["ddp"]["to_loss_s"] / best["to_loss_s"]
        bars[f"{name}: {own} is {gain:.2f}x as fast as ddp (0.9 of {ideal:.2f}x)"] = gain >= 0.9 * ideal
        wanted = 1.0 if name == "equal" else 1.3
        ratio = arms[rival]["to_loss_s"] / arms[alike]["to_loss_s"] if rival is not None else float("inf")
        bars[f"{name}: {alike} is {ratio:.2f}x as fast as the best of the others, {rival} ({wanted:g})"] = (
            ratio >= wanted
        )
        if name != "equal":
            part = case["compute_s"] / min(arms[arm]["step_s"] for arm in EVENLOAD if arm in arms)
            bars[f"{name}: {part:.2f} of the summed speed (0.95)"] = part >= 0.95
        loss, synchronous = best["loss"], case["synchronous_loss"]
        bars[f"{name}: final loss {loss:.3f}, synchronous {synchronous:.3f} (1 %)"] = loss <= CLOSE * synchronous
    return bars


def _run(
    place: _Place,
    arm: str,
    speeds: tuple[float, float],
    *,
    steps: int = 0,
    fast: bool = False,
    options: Sequence[str] = (),
) -> dict[str, Any]:
    """Run an arm on two machines; `steps` times it without validation. The curve is the mean of both ranks' parts."""
    kept = place.keep and place.keep / f"{arm} {speeds[0]:g}-{speeds[1]:g} {steps or place.steps}{' fast' * fast}.json"
    if kept and kept.exists():
        found = json.loads(kept.read_text())
        return dict(found)
    words = [
        *("--arm", arm if arm in TORCH else "evenload", "--steps", str(steps or place.steps)),
        *("--validates", str(int(not steps)), "--offset", str(DELAY if "delay" in arm else 0)),
        *("--every", "10" if "every 10" in arm else str(EVERY)),
    ]
    parts, _ = _on_two(place, arm, speeds, "train_islands.py", words, None if fast else MBIT, options)
    found = parts[0]
    found["step_s"] = max(part["step_s"] for part in parts)
    start_s = max(part["first_s"] for part in parts) - found["step_s"]
    found["curve"] = [
        (here[0], max(here[1], there[1]) - start_s, (here[2] + there[2]) / (here[3] + there[3]))
        for here, there in zip(*(part["curve"] for part in parts), strict=True)
    ]
    print(
        f"{arm}, {speeds}{', no limit' if fast else ''}: {found['step_s']:.3f} s a step, {found['curve'][-1:]}",
        flush=True,
    )
    if kept:
        kept.write_text(json.dumps(found))
    return dict(found)


def _on_two(
    place: _Place,
    arm: str,
    speeds: tuple[float, float],
    script: str,
    words: Sequence[str],
    mbit: float | None,
    options: Sequence[str] = (),
    *,
    limit_s: float | None = None,
) -> tuple[list[dict[str, Any]], float]:
    """Run a script on two machines; return what each rank found, and the seconds of a core that the relay took.

    With `limit_s` the script is ended after so long.
    """
    folder = Path(tempfile.mkdtemp(dir=place.folder))
    with ExitStack() as stack:
        pids = stack.enter_context(quotas(dict(enumerate(speeds))))
        link: dict[str, Any] = {} if mbit is None else {"delay_ms": DELAY_MS}
        boxes = stack.enter_context(hosts.machines(2, mbit, **link))
        words = ["--pids", str(pids), "--out", str(folder), "--size", place.size, *words]
        processes = []
        for box in boxes:
            command = [sys.executable, str(SCRIPTS / script), *words, "--store", f"{boxes[0].address}:29600"]
            if arm not in TORCH:
                run = [sys.executable, "-m", "evenload.cli.main", "run", "-d", "cpu", "--nodes", "2", "--host", "box1"]
                every = [] if "--sync-every" in options else ["--sync-every", str(EVERY)]
                command = [*run, "--strategy", "local", *every, *options, str(SCRIPTS / script), *words]
            own = folder / box.name
            own.mkdir()
            with (own / "screen").open("w") as screen:
                environment = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"} if arm in TORCH else {}
                processes.append(
                    box.popen(
                        ["env", *(f"{key}={value}" for key, value in environment.items()), *command],
                        cwd=own,
                        stdout=screen,
                        stderr=subprocess.STDOUT,
                    )
                )
        try:
            codes = [process.wait(limit_s or 250) for process in processes]
        except subprocess.TimeoutExpired:
            if limit_s is None:
                raise
            codes = []
        finally:
            for process in processes:
                process.kill()
                process.wait()
        relay_s = sum(
            sum(child.cpu_times()[:2])
            for child in psutil.Process().children()
            if "evenload.testing.relay" in child.cmdline()
        )
    if any(codes):
        raise RuntimeError(f"{arm}: " + "\n".join((folder / box.name / "screen").read_text()[-1500:] for box in boxes))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], relay_s


def _summed(place: _Place, arm: str) -> dict[str, Any]:
    """Return what part of the speed of lone ranks the islands reach, from blocks that alternate in the same processes.

    A block of islands is compared with the mean of the turns before and after it.
    """
    words = ["--warm", str(EVERY + EVERY // 2), "--block", str(EVERY), "--alone", str(ALONE_S)]
    speeds = SPEEDS["1:0.5"]
    parts, relay_s = _on_two(place, arm, speeds, "train_summed.py", words, MBIT, EVENLOAD[arm], limit_s=SUMMED_S)
    # One rank may have ended a block more.
    alone = [sum(pair) for pair in zip(*(part["alone"] for part in parts), strict=False)]
    islands = [sum(pair) for pair in zip(*(part["islands"] for part in parts), strict=False)]
    ratios = [here / ((low + high) / 2) for here, (low, high) in zip(islands, itertools.pairwise(alone), strict=True)]
    return {
        "arm": arm,
        "ratios": ratios,
        "alone_per_s": alone,
        "islands_per_s": islands,
        "relay_s": relay_s,
        "ranks": parts,
    }


def table(result: dict[str, Any]) -> str:
    """One row for each arm."""
    if "skipped" in result:
        return f"skipped: {result['skipped']}"
    if "ratios" in result:
        cores = [f"{fmean(part['cores']):.2f}" for part in result["ranks"]]
        return (
            f"{result['arm']}: {median(result['ratios']):.3f} of the summed speed, by blocks "
            f"{', '.join(f'{ratio:.3f}' for ratio in result['ratios'])}; ranks used {' and '.join(cores)} cores, the relay "
            f"{result['relay_s']:.1f} s of one"
        )
    if "arm" in result:
        return "\n".join(f"{n} steps, {seconds:.1f} s: {loss:.4f}" for n, seconds, loss in result["arm"]["curve"])
    lines = [
        (
            case,
            name,
            f"{arm['step_s']:.3f} s",
            f"{found['compute_s'] / arm['step_s']:.2f}",
            "-" if arm["loss"] is None else f"{arm['loss']:.3f}",
            "-" if arm["loss"] is None else f"{arm['to_loss_s']:.1f} s{'' if arm['reached'] else ' (not reached)'}",
        )
        for case, found in result["cases"].items()
        for name, arm in found["arms"].items()
    ]
    return rows(("islands", "arm", "step", "of the summed speed", "final loss", "to the loss"), lines)
