"""Run benchmarks by name, or all of them; each prints a table and writes ``benchmarks/results/<name>.json``."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from benchmarks.report import Neighbours, keep_orphans, write_result

_QUIET = 0.05
"""Other programs may take this part of a core before a result is called disturbed."""
NAMES = (
    "solver",
    "store",
    "exact",
    "overhead",
    "exchange",
    "asynchronous",
    "staleness",
    "scale",
    "small_steps",
    "batch_norm",
    "dp",
    "adapt",
    "efficiency",
    "uneven",
    "phantom",
    "left_out",
    "consistency",
    "loading",
    "hosts",
    "wire",
    "overlap",
    "islands",
    "cut_link",
    "lost_hosts",
    "leaving",
    "preemption",
    "checkpoints",
    "faults",
    "stalls",
    "resizing",
    "churn",
    "queue_decide",
    "queue_policies",
    "queue_product",
    "queue_cost",
    "queue_real",
    "queue_crash",
    "week",
    "queue_external",
    "gpu",
)

_WITH_ONLY = (
    "gpu",
    "small_steps",
    "faults",
    "churn",
    "uneven",
    "queue_product",
    "wire",
    "overlap",
    "islands",
    "cut_link",
    "lost_hosts",
    "queue_crash",
    "staleness",
)
_WITH_KEEP = ("uneven", "islands", "wire", "cut_link", "staleness", "queue_crash")


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"some of {', '.join(NAMES)}; all if none is given")
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: seconds instead of minutes, no bar is judged"
    )
    parser.add_argument("--results", default=None, help="where the JSON goes; benchmarks/results if not given")
    parser.add_argument("--peers", default=None, help="of efficiency: ddp,accelerate,lightning or some of them")
    parser.add_argument(
        "--traces", default=None, help="of queue_policies, queue_product, queue_cost: the folder of recorded workloads"
    )
    parser.add_argument(
        "--only",
        default=None,
        help="of gpu, small_steps and churn: names of experiments, such as E1,E3; of uneven: cases, such as bert/0.5; "
        "of islands: equal, 1:0.5 or one arm, such as 1:0.5/local, summed; of wire: rates in Mbit/s, "
        "or 100/40 for a round trip of 40 ms; "
        "of overlap: links, or 'no limit*2' for two "
        "rounds; of faults, cut_link, lost_hosts, queue_crash and staleness: seeds; of queue_product: parts",
    )
    parser.add_argument(
        "--keep",
        default=None,
        help=f"of {', '.join(_WITH_KEEP)}: a folder for what each run finds, and is taken from later",
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    missed = False
    for name in options.names or NAMES:
        module = import_module(f"benchmarks.{name}")
        print(f"== {name} ==", flush=True)
        neighbours = Neighbours()
        chosen = {"peers": tuple(options.peers.split(","))} if options.peers and name == "efficiency" else {}
        if options.traces and name in ("queue_policies", "queue_product", "queue_cost"):
            chosen = {"traces": options.traces}
        if options.keep and name in _WITH_KEEP:
            chosen = {"keep": options.keep}
        if options.only and name in _WITH_ONLY:
            chosen = {**chosen, "only": options.only}
        result = module.measure(quick=options.quick, **chosen)
        others_cpu = neighbours.share()
        print(module.table(result), flush=True)
        if others_cpu is not None and others_cpu > _QUIET:
            print(f"DISTURBED: other programs took {others_cpu:.0%} of a core meanwhile")
        # A result that was measured elsewhere stays, and one arm is no result.
        if ("left_out" not in result and "arm" not in result) or options.quick:
            path = write_result(
                name,
                module.__doc__ or "",
                result,
                quick=options.quick,
                folder=options.results,
                others_cpu=others_cpu,
            )
            print(f"written to {path}", flush=True)
        bars = result.get("bars", {})
        for bar, kept in {} if options.quick else bars.items():
            print(f"{'kept  ' if kept else 'MISSED'} {bar}", flush=True)
            missed = missed or not kept
    return int(missed)


if __name__ == "__main__":
    sys.exit(keep_orphans(main))
