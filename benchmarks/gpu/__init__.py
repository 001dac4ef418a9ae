"""Fifteen experiments on one GPU, each with a mark that it must reach; see benchmarks/gpu/README.md.

Method: each experiment runs its commands as child processes with time limits and is judged by the figures they print. Names
after ``--only`` select some (``--only E1,E3``). Without CUDA all are skipped.
"""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Any

from benchmarks.gpu.experiments import EXPERIMENTS, run

NAMES = tuple(experiment.name for experiment in EXPERIMENTS)


def measure(quick: bool, only: str | None = None) -> dict[str, Any]:
    """Run the experiments whose prerequisites are there; `quick` runs the shortest alone.

    Args:
        quick: a smoke run.
        only: names of experiments, separated by commas; all if None.

    Raises:
        SystemExit: there is no such experiment.
    """
    import torch

    chosen = set(only.split(",")) if only else {"E5"} if quick else set(NAMES)
    if unknown := chosen - set(NAMES):
        raise SystemExit(
            f"--only {only}: there is no experiment {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}"
        )
    results: dict[str, Any] = {}
    is_cuda = torch.cuda.is_available()
    for experiment in EXPERIMENTS:
        if experiment.name not in chosen:
            continue
        missing = [name for name in experiment.needs if find_spec(name) is None]
        if not is_cuda or missing:
            reason = f"needs {', '.join(missing)}" if is_cuda else "needs a GPU: torch.cuda.is_available() is False"
            result = {"skipped": reason}
        else:
            began_s = time.monotonic()
            result = run(experiment) | {"seconds": round(time.monotonic() - began_s, 1)}
        results[experiment.name] = result
        print(_line(experiment.name, experiment.question, experiment.mark, result), flush=True)
    if not is_cuda:
        return {"experiments": results, "left_out": "this machine has no GPU that torch can use"}
    judged = {name: result for name, result in results.items() if "skipped" not in result}
    marks = {experiment.name: experiment.mark for experiment in EXPERIMENTS}
    return {
        "experiments": results,
        "device": torch.cuda.get_device_name(0),
        "bars": {f"{name}: {marks[name]}": result["passed"] for name, result in judged.items()},
    }


def _line(name: str, question: str, mark: str, result: dict[str, Any]) -> str:
    if "skipped" in result:
        return f"skipped  {name:4s} {question} ({result['skipped']})"
    return f"{'passed ' if result['passed'] else 'FAILED '}  {name:4s} {question} {result['found']} (mark: {mark})"


def table(result: dict[str, Any]) -> str:
    """Count what passed, failed and was skipped; the lines of the experiments were printed as they ended."""
    results = list(result["experiments"].values())
    num_skipped = sum("skipped" in one for one in results)
    num_passed = sum(one.get("passed", False) for one in results)
    counts = f"{num_passed} passed, {len(results) - num_passed - num_skipped} failed, {num_skipped} skipped"
    return f"{counts}: {result['left_out']}" if "left_out" in result else counts
