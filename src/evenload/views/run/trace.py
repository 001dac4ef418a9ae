"""Steps of a run as a trace for Perfetto and chrome://tracing, in the JSON form of the trace event format.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Times are microseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from evenload.errors import ConfigError
from evenload.records.console import RunInfo
from evenload.records.lines import spell_floats
from evenload.records.reader import RecordTail, read_steps
from evenload.records.values import SEGMENTS, RunEvent, StepRecord
from evenload.views.run.step_batch import SECONDS_OF, Seconds, carry_back

DEFAULT_STEPS = 100
"""Without a choice, the last steps are written."""
RESOLUTION = (
    "one duration per segment, rank and step, as measured; the order of the segments inside a step is not recorded, and drawn as "
    "data, compile, compute, comm, wait, optimizer, other. Steps end when their records were written. Times travel with the "
    "exchange near the end of a step: what a rank spent after it was recorded with the next step, and is drawn where it fits."
)
_ORDER = ("data", "compile", "compute", "comm", "wait", "optimizer", "other")
_STEPS_THREAD, _FIRST_RANK_THREAD = 1, 2
_PROCESS = 1


@dataclass(frozen=True)
class StepRange:
    """Steps from ``first`` up to, and without, ``end``; None is open, negative counts from the end, as in a Python slice."""

    first: int | None = -DEFAULT_STEPS
    end: int | None = None

    def choose(self, steps: list[StepRecord]) -> list[StepRecord]:
        if not steps:
            return []
        after = steps[-1].step + 1
        first, end = (bound if bound is None or bound >= 0 else after + bound for bound in (self.first, self.end))
        return [step for step in steps if (first or 0) <= step.step < (after if end is None else end)]


def parse_steps(text: str) -> StepRange:
    """Read ``A:B``, ``A:``, ``:B`` or one step ``A``; raise `ConfigError` for anything else."""
    try:
        first, colon, end = text.partition(":")
        if not colon:
            return StepRange(int(first), int(first) + 1 if int(first) != -1 else None)
        return StepRange(int(first) if first else None, int(end) if end else None)
    except ValueError as error:
        raise ConfigError(
            f"--steps {text}: expected A:B (from step A up to, and without, step B), A:, :B or one step; -20: is the last 20"
        ) from error


def write_trace(folder: Path, path: Path, chosen: StepRange) -> int:
    """Write the chosen steps and the events among them to ``path``; return the number of steps.

    Raises:
        ConfigError: there is no such step, or the file can't be written.
    """
    steps = read_steps(folder)
    found = sorted(chosen.choose(steps), key=lambda step: step.time)
    if not found:
        span = f"steps {steps[0].step} to {steps[-1].step}" if steps else "no step"
        raise ConfigError(f"{folder}: no step is among those of --steps; the run has {span}")
    info = RunInfo()
    events = [record for record in RecordTail(folder).stream() if isinstance(record, RunEvent)]
    for event in events:
        info.add(event)
    since_s = found[0].time - _length_s(found[0])
    among = [event for event in events if since_s <= event.time <= found[-1].time and (event.message or event.step)]
    try:
        with path.open("w", encoding="utf-8") as file:
            _write(file, folder, info, found, among, since_s)
    except OSError as error:
        raise ConfigError(f"{path} can't be written ({error.strerror}); give another file") from error
    return len(found)


def _write(
    file: IO[str], folder: Path, info: RunInfo, steps: list[StepRecord], events: list[RunEvent], since_s: float
) -> None:
    other = {"run": str(folder), "resolution": RESOLUTION, "starts_at_s_since_1970": since_s}
    file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(other)},"traceEvents":[\n')
    separator = ""
    for row in _rows(folder, info, steps, events, since_s):
        file.write(separator + json.dumps(spell_floats(row), separators=(",", ":"), default=str))
        separator = ",\n"
    file.write("\n]}\n")


def _rows(
    folder: Path, info: RunInfo, steps: list[StepRecord], events: list[RunEvent], since_s: float
) -> Iterator[dict[str, Any]]:
    yield _named("process_name", 0, str(folder))
    yield _named("thread_name", _STEPS_THREAD, "steps")
    for rank in range(max(len(step.ranks) for step in steps)):
        name = info.name(rank)
        yield _named(
            "thread_name", _FIRST_RANK_THREAD + rank, name if name == f"rank {rank}" else f"rank {rank}: {name}"
        )
    for thread in range(_STEPS_THREAD, _FIRST_RANK_THREAD + max(len(step.ranks) for step in steps)):
        yield {**_named("thread_sort_index", thread, ""), "args": {"sort_index": thread}}
    last_us = 0
    seconds = [[SECONDS_OF(times) for times in step.ranks] for step in steps]
    for index, step in enumerate(steps):
        if index + 1 < len(steps) and len(seconds[index]) == len(seconds[index + 1]):
            for rank, row in enumerate(seconds[index]):
                lengths_s = _length_s(step), _length_s(steps[index + 1])
                moved = carry_back(row, lengths_s[0], seconds[index + 1][rank], lengths_s[1])
                seconds[index][rank], seconds[index + 1][rank] = moved
        end_us = max(last_us + 1, round((step.time - since_s) * 1e6))
        begin_us = max(last_us, end_us - round(_length_s(step) * 1e6))
        last_us = end_us
        yield from _step_rows(step, seconds[index], begin_us, end_us)
    for event in events:
        yield {
            "name": event.kind,
            "cat": "event",
            "ph": "i",
            "s": "g",
            "ts": round((event.time - since_s) * 1e6),
            "pid": _PROCESS,
            "tid": _STEPS_THREAD,
            "args": {"message": event.message, "step": event.step, **event.fields},
        }


def _step_rows(step: StepRecord, seconds: list[Seconds], begin_us: int, end_us: int) -> Iterator[dict[str, Any]]:
    arm = {"arm": step.arm} if step.arm else {}
    args = {"loss": step.loss, "samples": step.num_samples, "micro_batches": step.num_micro, "epoch": step.epoch, **arm}
    yield _span(f"step {step.step}", "step", _STEPS_THREAD, begin_us, end_us, {**args, **step.metrics})
    if math.isfinite(step.loss):
        yield _counter("loss", begin_us, {"loss": step.loss})
    if end_us > begin_us:
        yield _counter("samples/s", begin_us, {"samples/s": step.num_samples / (end_us - begin_us) * 1e6})
    if not step.ranks and step.spread is not None:
        spread = step.spread
        yield _counter("share", begin_us, {"least": spread.shares[0], "most": spread.shares[1]})
        yield _counter("busy (s)", begin_us, {"mean": spread.mean.busy_s, "most": spread.busiest[1].busy_s})
        return
    yield _counter("share", begin_us, {f"rank {rank}": share for rank, share in enumerate(step.shares)})
    if any(times.memory_bytes for times in step.ranks):
        held = {f"rank {rank}": times.memory_bytes / 2**20 for rank, times in enumerate(step.ranks)}
        yield _counter("memory (MiB)", begin_us, held)
    for rank, row in enumerate(seconds):
        durations_s = {name: row[SEGMENTS.index(f"{name}_s")] for name in _ORDER}
        # Clocks of two ranks differ by a little: the segments are drawn inside the step of rank 0.
        scale = min(1e6, (end_us - begin_us) / (sum(durations_s.values()) or 1.0))
        at_us = begin_us
        for name, duration_s in durations_s.items():
            if (drawn_us := int(duration_s * scale)) > 0:
                args = {"step": step.step, "seconds": duration_s}
                args |= {"share": step.shares[rank]} if name == "compute" and rank < len(step.shares) else {}
                yield _span(name, "segment", _FIRST_RANK_THREAD + rank, at_us, at_us + drawn_us, args)
                at_us += drawn_us


def _length_s(step: StepRecord) -> float:
    return step.seconds + step.first_other_s


def _span(name: str, kind: str, thread: int, begin_us: int, end_us: int, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": begin_us, "dur": end_us - begin_us}
    return {"name": name, "cat": kind, "ph": "X", **times, "pid": _PROCESS, "tid": thread, "args": args}


def _counter(name: str, at_us: int, values: dict[str, float]) -> dict[str, Any]:
    return {"name": name, "ph": "C", "ts": at_us, "pid": _PROCESS, "tid": _STEPS_THREAD, "args": values}


def _named(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "ts": 0, "pid": _PROCESS, "tid": thread, "args": {"name": name}}
