"""Runs a script on two ranks, again and again, each time in processes that the interpreter ends.

    python -m tests.system.starts.forked SCRIPT HOW [HOW ...]

What costs seconds, importing torch, is done once; each rank is forked from here, runs the script under MASTER_ADDR and its
fellows, and leaves by the interpreter's own end. For each HOW, the script's argument, one line of JSON: the exit codes, and
what each rank wrote.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import evenload.training.run  # noqa: F401
from evenload.hardware import free_port


def main() -> None:
    script, *hows = sys.argv[1:]
    for index, how in enumerate(hows):
        port = str(free_port("127.0.0.1"))
        ranks = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                # Back to the top of the interpreter, whose own end is what we look at.
                run(script, how, rank, port, f"{index}-{rank}")
                return
            ranks.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        wrote = [[Path(f"{name}-{index}-{rank}").read_text() for name in ("out", "err")] for rank in range(2)]
        print(json.dumps({"how": how, "codes": codes, "wrote": wrote}), flush=True)


def run(script: str, how: str, rank: int, port: str, name: str) -> None:
    for descriptor, stream in ((1, "out"), (2, "err")):
        file = os.open(f"{stream}-{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE="2", RANK=str(rank))
    sys.argv = [script, how]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
