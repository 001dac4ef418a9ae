"""300 kill -9 of a queue's daemon, its runners, or both, and machines that start anew; nothing is lost, nothing runs twice.

Method: ten times 30 kills, each by a seed and with a queue and a machine of its own. A real daemon with four CPU slots and
real runners, always with jobs of 2 to 30 steps that wait (`evenload.job`, a save after each step; priorities of three classes,
so that jobs are preempted too). Every 20 to 400 ms something is killed: the daemon (40 %), a runner (30 %), the daemon and half
of the runners (25 %), or all there is with another boot id afterwards (5 %); three of twenty times the queue's disk is full
meanwhile, and in some of these a daemon is started before it has room again; three of twenty times somebody has set the clock
by a minute to a day, back or forward. A killed daemon is started again, in three of ten cases after up to half a second.
Programs leave traces: a witness of each attempt made with O_EXCL, a lock held while they run. At the end all jobs must have
succeeded, the record must be what folding its log gives, and every attempt recorded as lost must be one whose runner was killed.
Adopted: attempts with a living runner at the moment of the kill that went on, or ended as they should, under the next
daemon. Deciding again: from the start of the new daemon's process to its first answer, which follows a decision.

`--only SEEDS` runs some of the seeds; `--keep FOLDER` keeps what each finds, and takes it from there.

Bars: 0 lost, 0 run twice, 0 at once, all adopted, deciding again within 2 s.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

from benchmarks.report import kept, rows

NUM_SEEDS, NUM_KILLS = 10, 30
DECIDES_S = 2.0
_WRONG = ("lost", "run_twice", "two_at_once", "not_adopted", "lost_without_a_kill", "record", "left_behind")
_COUNTED = ("jobs", "attempts", "full_disks", "clocks_set", "adopted")


def measure(quick: bool, only: str = "", keep: str = "") -> dict[str, Any]:
    """`only`: seeds, with commas; the bars then are those of these alone. `keep`: a folder for what each seed finds."""
    from tests.system.scheduler.daemon_crash import run

    seeds = [int(seed) for seed in only.split(",")] if only else [0] if quick else list(range(NUM_SEEDS))
    runs = []
    for seed in seeds:
        one = partial(run, 10 if quick else NUM_KILLS, seed)
        runs.append(kept("" if quick else keep, f"crash-{seed}", one))
        wrong = {name: runs[-1][name] for name in _WRONG if runs[-1][name]}
        print(
            f"seed {seed}: {runs[-1]['jobs']} jobs, {runs[-1]['attempts']} attempts, {wrong or 'nothing wrong'}",
            flush=True,
        )
    kills = {kind: sum(one["kills"][kind] for one in runs) for kind in runs[0]["kills"]}
    found = {
        name: [f"seed {seed}: {what}" for seed, one in zip(seeds, runs, strict=True) for what in one[name]]
        for name in _WRONG
    }
    decided_s = sorted(took_s for one in runs for took_s in one["decided_after_s"])
    surpluses = [(one["unconfirmed"]["jobs"], one["unconfirmed"]["submits"]) for one in runs]
    return {
        "seeds": seeds,
        "kills": kills,
        **{name: sum(one[name] for one in runs) for name in _COUNTED},
        **found,
        "unconfirmed": {"jobs": sum(jobs for jobs, _ in surpluses), "submits": sum(most for _, most in surpluses)},
        "decided_after_s": {"median": median(decided_s), "most": decided_s[-1], "num": len(decided_s)},
        "bars": {
            f"{sum(kills.values())} kills": sum(kills.values()) >= NUM_KILLS * len(seeds),
            **{f"{name.replace('_', ' ')}: none": not found[name] for name in _WRONG},
            "no job that nobody submitted": all(0 <= jobs <= most for jobs, most in surpluses),
            f"decides again within {DECIDES_S:g} s": decided_s[-1] <= DECIDES_S,
        },
    }


def table(result: dict[str, Any]) -> str:
    """Kills, and what they did."""
    kills, decided = result["kills"], result["decided_after_s"]
    lines = [
        ["kills", ", ".join(f"{num} {kind}" for kind, num in kills.items())],
        ["jobs, attempts", f"{result['jobs']}, {result['attempts']}"],
        ["lost, run twice, two at once", ", ".join(str(len(result[n])) for n in ("lost", "run_twice", "two_at_once"))],
        ["with a full disk, after a clock was set", f"{result['full_disks']}, {result['clocks_set']}"],
        ["adopted, not adopted", f"{result['adopted']}, {len(result['not_adopted'])}"],
        ["decides again", f"median {decided['median']:.2f} s, most {decided['most']:.2f} s of {decided['num']}"],
    ]
    return rows(["", ""], lines)
