"""`SampleLedger`: the samples that each committed step used, noted by the ranks themselves, and the check that none is lost.

    ledger = SampleLedger(run, lambda batch: batch[2].tolist())     # on each rank: the ids of a micro-batch
    loss = ledger.backward(step, loss_fn)                           # instead of step.backward(loss_fn)

    check = check_ledger(run_folder, expected)                      # afterwards: the ids that each step should have used
    assert not check.problems

Each rank appends a line before each call of loss_fn, so that the calls of a rank that dies are known, and one when a backward
is done. A step may have been computed several times: under other members, or in a later session from a checkpoint. The plan that
ranks completed last is the one whose gradients the weights hold. Its samples are those of the last K calls of each of its ranks,
where K is the number of its micro-batches; that does not hold for coupled losses, which call the encoder twice.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from evenload.records.reader import read_steps
from evenload.training.run import Run
from evenload.training.step.step import Step

_FOLDER = "samples"
"""In the run folder; a file for each worker."""

_StepCall = tuple[int, int]
"""Step, and number of the backward in it."""
_Plan = tuple[str, int, int]
"""Launch, membership and attempt."""


class SampleLedger:
    """Notes on this rank which samples loss_fn receives, and which backwards are done."""

    def __init__(self, run: Run, ids_of: Callable[[Any], Iterable[int]]) -> None:
        """`ids_of` returns the ids of the samples of a batch as loss_fn receives it."""
        self._context = run._context
        self._ids_of = ids_of
        spec = self._context.spec
        self._launch = Path(spec.launch_dir).name or f"process-{os.getpid()}"
        folder = self._context.folder / _FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        # Each line is one unbuffered append: a process that is killed leaves all but perhaps a part of its last.
        self._file = (folder / f"{self._launch}-{spec.worker}.jsonl").open("ab", buffering=0)

    def backward(self, step: Step, loss_fn: Callable[[Any], Any]) -> torch.Tensor:
        """Call `step.backward(loss_fn)`, and note its samples."""
        call, engine, groups = step.stats.calls, self._context.engine, self._context.groups
        is_running, members = True, groups.membership

        def noted(batch: Any) -> Any:
            nonlocal members
            if is_running:  # later calls only look for losses that couple the batch
                members = groups.membership
                self._write(step, call, ids=[int(one) for one in self._ids_of(batch)])
            return loss_fn(batch)

        before = engine.num_backwards
        loss = step.backward(noted)
        is_running = False
        if engine.num_backwards > before:  # otherwise this rank has missed it, and receives the state of another
            # One may have been lost since, when the others had the gradients.
            members = members if members.number == step.batch.plan.generation else groups.membership
            self._write(step, call, micro=step.batch.plan.micro, workers=members.workers, time_s=time.time())
        return loss

    def _write(self, step: Step, call: int, **values: Any) -> None:
        plan = step.batch.plan
        head = {"step": step.index, "call": call, "plan": [self._launch, plan.generation, plan.attempt]}
        self._file.write(json.dumps({**head, "worker": self._context.spec.worker, **values}).encode() + b"\n")


@dataclass(frozen=True)
class CommittedBackward:
    """A backward whose gradients the weights hold."""

    step: int
    call: int
    """Number of the backward in the step."""
    micro: tuple[tuple[int, ...], ...]
    """The ids of the samples of each micro-batch."""

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(one for part in self.micro for one in part)


@dataclass
class LedgerCheck:
    committed: list[CommittedBackward] = field(default_factory=list)
    """By step and call."""
    num_repeated_plans: int = 0
    """Plans that were completed or begun and given up: work that was done again."""
    lost: list[tuple[int, int]] = field(default_factory=list)
    """Step and id of each sample that was not used."""
    used_twice: list[tuple[int, int]] = field(default_factory=list)
    """Step and id of each sample that was used more often than expected."""
    problems: list[str] = field(default_factory=list)
    """In sentences; empty if nothing is lost and nothing used twice."""


@dataclass(frozen=True)
class _Receipt:
    """A worker completed a backward."""

    worker: str
    plan: _Plan
    micro: tuple[tuple[int, ...], ...]
    workers: tuple[str, ...]
    time_s: float


class _Ledger:
    def __init__(self, folder: Path) -> None:
        self.receipts: dict[_StepCall, list[_Receipt]] = defaultdict(list)
        self.calls: dict[tuple[_StepCall, _Plan, str], list[tuple[int, ...]]] = defaultdict(list)
        self.plans: dict[_StepCall, set[_Plan]] = defaultdict(set)
        for path in sorted((folder / _FOLDER).glob("*.jsonl")):
            for line in path.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    self._add(json.loads(line))

    def _add(self, row: Mapping[str, Any]) -> None:
        launch, generation, attempt = row["plan"]
        key, plan = (row["step"], row["call"]), (launch, generation, attempt)
        self.plans[key].add(plan)
        if "ids" in row:
            self.calls[key, plan, row["worker"]].append(tuple(row["ids"]))
            return
        micro = tuple(tuple(part) for part in row["micro"])
        self.receipts[key].append(_Receipt(row["worker"], plan, micro, tuple(row["workers"]), row["time_s"]))

    def committed(self, key: _StepCall, problems: list[str]) -> CommittedBackward:
        """Return what the weights hold of a backward, and add contradictions."""
        step, call = key
        receipts = self.receipts[key]
        launch = max(receipts, key=lambda receipt: receipt.time_s).plan[0]
        here = [receipt for receipt in receipts if receipt.plan[0] == launch]
        last = max(here, key=lambda receipt: receipt.plan[1:])
        for receipt in here:
            if receipt.plan != last.plan and receipt.worker in last.workers:
                problems.append(
                    f"step {step}: {receipt.worker} completed it under membership {receipt.plan[1]} and again under "
                    f"{last.plan[1]}: its samples count twice"
                )
        parts: list[list[int]] = [[] for _ in last.micro]
        for rank, worker in enumerate(last.workers):
            sizes = [row[rank] for row in last.micro]
            if not any(sizes):
                continue  # no samples, or one of weight 0 in each micro-batch
            calls = self.calls[key, last.plan, worker][-len(sizes) :]
            if len(calls) < len(sizes):
                problems.append(f"step {step}: rank {rank} computed {len(calls)} of {len(sizes)} micro-batches")
            for part, size, ids in zip(parts, sizes, calls, strict=False):
                if size and len(ids) != size:
                    problems.append(f"step {step}: rank {rank} received {len(ids)} samples where its part is {size}")
                part.extend(ids if size else ())
        return CommittedBackward(step, call, tuple(map(tuple, parts)))


def check_ledger(run_folder: Path, expected: Sequence[Sequence[int]]) -> LedgerCheck:
    """Compare the samples of the committed steps in a run folder with those that each step should have used.

    `expected[step]` holds ids in any order. The steps of ``steps.jsonl`` must be the same: all, with the right number of samples.
    """
    ledger, check = _Ledger(run_folder), LedgerCheck()
    for key in sorted(ledger.receipts):
        backward = ledger.committed(key, check.problems)
        check.committed.append(backward)
        if backward.step >= len(expected):
            check.problems.append(f"step {backward.step} was computed; the run has {len(expected)}")
            continue
        check.num_repeated_plans += len(ledger.plans[key]) - 1
        used, wanted = Counter(backward.ids), Counter(expected[backward.step])
        check.lost += [(backward.step, one) for one in (wanted - used).elements()]
        check.used_twice += [(backward.step, one) for one in (used - wanted).elements()]
    for step in sorted({*range(len(expected))} - {backward.step for backward in check.committed}):
        check.lost += [(step, one) for one in expected[step]]
    if check.lost:
        check.problems.append(f"{len(check.lost)} samples were lost: (step, id) {check.lost[:8]}")
    if check.used_twice:
        check.problems.append(f"{len(check.used_twice)} samples were used twice: (step, id) {check.used_twice[:8]}")
    recorded = {record.step: record.num_samples for record in read_steps(run_folder) if not record.arm}
    wrong = [step for step, ids in enumerate(expected) if recorded.get(step) != len(ids)]
    if wrong or len(recorded) != len(expected):
        check.problems.append(
            f"steps.jsonl has {len(recorded)} of {len(expected)} steps; wrong or missing: {wrong[:8]}"
        )
    return check


def relative_difference(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return ‖found − expected‖₂ / ‖expected‖₂ over all floating-point tensors of two state dicts with the same names."""
    if found.keys() != expected.keys():
        raise ValueError(f"the states differ in {sorted(found.keys() ^ expected.keys())}")
    names = [name for name, value in expected.items() if value.is_floating_point()]
    ours, theirs = (torch.cat([state[name].flatten().double() for name in names]) for state in (found, expected))
    return float((ours - theirs).norm() / theirs.norm())
