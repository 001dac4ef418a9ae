"""300 starts of jobs on GPUs that external processes take and free at random: none on a held device; ghosts are named.

Method: a real daemon, runners and programs; NVML is a stand-in that reads four H200 from a file through the same calls. An
external process takes a free GPU every second or so for 0.1 to 1.5 s; its memory comes back up to 0.1 s later, a job's own up
to 0.3 s. Each program looks at its GPU in its first instruction. A start counts as on a held device if what it finds there
(a process, or memory in use) was there at the queue's last scan before it let the runner go. What is taken between that
scan and the program's first instruction (its length is given, most of it the start of a Python) is invisible to any queue
and counted apart. Ghosts: 5 GiB without a process are put on a GPU until `status` names them.

Bars: 0 starts on held devices; ghosts named within 10 s.
"""

from __future__ import annotations

from typing import Any

from benchmarks.report import rows

NUM_STARTS = 300
NAMED_S = 10.0


def measure(quick: bool) -> dict[str, Any]:
    """One long run."""
    from tests.system.scheduler.external_box import run

    found = run(10 if quick else NUM_STARTS, seed=7)
    return {
        **found,
        "bars": {
            f"{found['starts']} starts": found["starts"] >= NUM_STARTS,
            "none on a held device": not found["on_held_devices"],
            f"ghosts named within {NAMED_S:g} s": max(found["ghosts_named_s"]) <= NAMED_S,
            "all jobs succeed": set(found["counts"]) == {"SUCCEEDED"},
        },
    }


def table(result: dict[str, Any]) -> str:
    """Starts, and what they found."""
    window = result["from_look_to_start_ms"]
    lines = [
        ["starts", str(result["starts"])],
        ["on held devices", str(len(result["on_held_devices"]))],
        ["taken between look and start", str(result["taken_between_look_and_start"])],
        ["from look to start", f"median {window['median']:.0f} ms, most {window['most']:.0f} ms"],
        ["turned back at the last look", str(result["turned_back_at_the_gate"])],
        ["closed devices", str(result["devices_closed"])],
        ["ghosts named after", ", ".join(f"{s:.1f} s" for s in result["ghosts_named_s"])],
    ]
    return rows(["", ""], lines)
