"""Three elastic Evenload jobs and ten plain ones on a real queue for half an hour, against the simulator's prediction.

Method: a queue with four slots of CPU cores and its default settings. Jobs are submitted at random times in the first quarter of
an hour. Plain ones sleep for 1.5 to 12 minutes on one slot. Elastic ones train on 1 to 4 slots, for 12 to 24 minutes on one:
a sample takes 8 ms (a wait, so that little is computed). The queue knows run times and numbers of steps beforehand. What a
prediction needs besides is measured before, each in a job of its own: the time in which a job starts, steps a second on 1 and
on 4 slots, the cost of a change of devices. Then the simulator gets the same submissions, specs and settings: nothing of the
real run enters the prediction. The result also holds how many slots each job held, and from when. ``--quick`` takes a 45th of all
times (two minutes in all); there most of a job is its start.

Bars: mean completion time within 15 % of the predicted, and each job's within 15 % or 10 s.
"""

from __future__ import annotations

import math
import random
import shutil
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import rows
from benchmarks.resizing import entries, job_path, submit, wait
from evenload.records.reader import read_steps
from evenload.scheduler import paths
from evenload.scheduler.client import Client, connect
from evenload.scheduler.core import events
from evenload.scheduler.core.values import JobSpec, Needs, Settings
from evenload.scheduler.simulator.arrivals import JobArrival, timed_program
from evenload.scheduler.simulator.cluster import devices_of
from evenload.scheduler.simulator.report import mean
from evenload.scheduler.simulator.simulate import Conditions, simulate

_SLOTS = 4
_NUM_PLAIN, _NUM_ELASTIC = 10, 3
_SEED = 3
_WITHIN = 0.15
_WITHIN_S = 10.0
_TRAIN = """
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import evenload

last = int(sys.argv[1])
run = evenload.init(project_dir=sys.argv[2], seed=0)
torch.manual_seed(1)
rows = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
model = nn.Linear(8, 8)
loader = DataLoader(TensorDataset(rows), batch_size=32, shuffle=True)
model, loader = run.prepare(model, loader)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
run.resume(model=model, optimizer=optimizer)

def loss_fn(batch):
    time.sleep(0.008 * len(batch[0]))
    return (model(batch[0]) - batch[0]).square().mean()

is_over = False
for epoch in range(loader.epoch, 100_000):
    for step in loader:
        step.backward(loss_fn)
        optimizer.step()
        optimizer.zero_grad()
        is_over = step.index + 1 >= last
        if is_over:
            break
    if is_over:
        break
"""

Slots = dict[str, list[tuple[float, int]]]


@dataclass(frozen=True)
class Measured:
    """Times and speeds of this machine, from which the simulator predicts."""

    plain_start_s: float
    start_s: float
    """From the submission of an elastic job to its first step, on an idle queue."""
    resize_s: float
    steps_per_s: float
    """On one slot."""
    scaling: float
    """Speed grows like the number of slots to this power."""


@dataclass(frozen=True)
class _Submission:
    at_s: float
    name: str
    lasts_s: float
    """On one slot."""
    is_elastic: bool

    def spec(self, measured: Measured) -> dict[str, Any]:
        """Return the fields of its `JobSpec` that are given: those of the real job and of the simulated one."""
        if not self.is_elastic:
            return {"name": self.name, "estimate_s": self.lasts_s, "restart_s": measured.plain_start_s}
        return {
            "name": self.name,
            "needs": {"min_devices": 1, "max_devices": _SLOTS},
            "total": float(self.num_steps(measured)),
            "estimate_s": self.lasts_s,  # else the real queue estimates it from the runs that were measured before
            "restart_s": measured.start_s,
        }

    def num_steps(self, measured: Measured) -> int:
        return max(1, round(self.lasts_s * measured.steps_per_s))


def submissions(part: float) -> list[_Submission]:
    """Return the workload, all times multiplied by `part`."""
    draw = random.Random(_SEED)
    found = []
    for number in range(_NUM_PLAIN + _NUM_ELASTIC):
        is_elastic = number >= _NUM_PLAIN
        least_s, most_s = (720.0, 1440.0) if is_elastic else (90.0, 720.0)
        lasts_s = math.exp(draw.uniform(math.log(least_s), math.log(most_s)))
        name = f"{'elastic' if is_elastic else 'plain'}-{number}"
        found.append(_Submission(part * draw.uniform(0.0, 900.0), name, part * lasts_s, is_elastic))
    return sorted(found, key=lambda one: one.at_s)


def predicted(workload: list[_Submission], measured: Measured) -> tuple[dict[str, float], Slots]:
    """Return the completion times that the simulator predicts, and the slots of each job."""
    arrivals = []
    for one in workload:
        fields = one.spec(measured)
        if one.is_elastic:
            fields |= {"needs": Needs(1, _SLOTS), "resize_s": measured.resize_s}
        spec = JobSpec(user="user", preemptible=one.is_elastic, **fields)
        make = timed_program(one.lasts_s, 1, measured.scaling, is_evenload=one.is_elastic)
        arrivals.append(JobArrival(one.at_s, one.name, spec, make))
    log: list[events.QueueEvent] = []
    outcome = simulate(arrivals, Conditions(devices_of(f"1x{_SLOTS}"), Settings(), interval_s=1.0), log)
    return {job.job: job.jct_s for job in outcome.jobs}, {one.name: _slots(log, one.name) for one in workload}


def _slots(log: Iterable[object], job: str, since_s: float = 0.0) -> list[tuple[float, int]]:
    """Return how many slots a job held, each with the time from which it did, in seconds after `since_s`."""
    held = []
    for event in log:
        if isinstance(event, events.Placed | events.Resized) and event.job == job:
            held.append((round(event.time_s - since_s, 1), len(event.devices)))
        elif isinstance(event, events.Yielded | events.Ended | events.Lost) and event.job == job:
            held.append((round(event.time_s - since_s, 1), 0))
    return held


def measure(quick: bool) -> dict[str, Any]:
    workload = submissions(1 / 45 if quick else 1.0)
    folder = Path(tempfile.mkdtemp(prefix="evenload-real-"))
    paths.make_private(folder / "queue")
    (folder / "queue" / paths.SETTINGS_FILE).write_text(f"[cpu]\nslots = {_SLOTS}\n")
    (folder / "train.py").write_text(_TRAIN)
    try:
        with connect(folder / "queue", start=True) as client:
            measured = _measure(client, folder)
            expected_s, expected_slots = predicted(workload, measured)
            print(f"measured: {measured}", flush=True)
            found_s, found_slots = _run(client, folder, workload, measured)
    finally:
        with connect(folder / "queue", start=False) as client:
            if left := [job["id"] for job in client.call("list")["jobs"]]:
                client.call("cancel", jobs=left, now=True)
                for job in left:
                    _wait_for_end(client, folder / "queue", job, is_judged=False)
            client.call("stop")
        shutil.rmtree(folder, ignore_errors=True)
    jobs: list[dict[str, Any]] = [
        {
            "job": one.name,
            "submitted_s": one.at_s,
            "predicted_s": expected_s[one.name],
            "real_s": found_s[one.name],
            "predicted_slots": expected_slots[one.name],
            "real_slots": found_slots[one.name],
        }
        for one in workload
    ]
    ratio = mean(list(found_s.values())) / mean(list(expected_s.values()))
    far = [job["job"] for job in jobs if not _is_near(job["real_s"], job["predicted_s"])]
    bars = {
        f"mean completion time within {_WITHIN:.0%} of the predicted": abs(ratio - 1.0) <= _WITHIN,
        f"each job's within {_WITHIN:.0%} or {_WITHIN_S:g} s": not far,
    }
    return {"measured": asdict(measured), "jobs": jobs, "ratio": ratio, "far": far, "bars": {} if quick else bars}


def _is_near(real_s: float, predicted_s: float) -> bool:
    return abs(real_s - predicted_s) <= max(_WITHIN_S, _WITHIN * predicted_s)


def _measure(client: Client, folder: Path) -> Measured:
    queue = folder / "queue"
    plain = submit(client, folder, job_path(), ["sleep", "1"], {})
    _wait_for_end(client, queue, plain)
    one_s, rate = _trained(client, folder, 1, 30)
    _, fast = _trained(client, folder, _SLOTS, 90)
    elastic = _submit_training(client, folder, 100_000, {"needs": {"min_devices": 1, "max_devices": _SLOTS}}, "resized")
    wait(lambda: client.call("job", job=elastic)["spec"].get("resize_s") is not None, queue, elastic)
    submit(client, folder, job_path(), ["sleep", "3"], {})  # it shrinks for the other job, or grows beside it
    wait(lambda: bool(entries(queue, elastic, events.Resized)), queue, elastic)
    resize_s = float(client.call("job", job=elastic)["spec"]["resize_s"])
    client.call("cancel", jobs=[elastic])
    _wait_for_end(client, queue, elastic)
    scaling = math.log(fast / rate) / math.log(_SLOTS)
    return Measured(_completion_s(client, plain) - 1.0, one_s, resize_s, rate, scaling)


def _trained(client: Client, folder: Path, num_slots: int, num_steps: int) -> tuple[float, float]:
    """Return the seconds up to the first step, and steps a second, of a training on some slots."""
    needs = {"min_devices": num_slots, "max_devices": num_slots}
    job = _submit_training(client, folder, num_steps, {"needs": needs}, f"on-{num_slots}")
    _wait_for_end(client, folder / "queue", job)
    ended_s = sorted(record.time for record in read_steps(folder / f"on-{num_slots}"))
    begin, half = len(ended_s) // 3, len(ended_s) - 1  # the first steps are slower
    rate = (half - begin) / (ended_s[half] - ended_s[begin])
    return ended_s[0] - 1.0 / rate - client.call("job", job=job)["job"]["submitted_s"], rate


def _run(
    client: Client, folder: Path, workload: list[_Submission], measured: Measured
) -> tuple[dict[str, float], Slots]:
    """Submit the workload in its time; return the completion times and the slots of each job once all have ended."""
    began_s, ids = time.monotonic(), {}
    for one in workload:
        time.sleep(max(0.0, began_s + one.at_s - time.monotonic()))
        spec = one.spec(measured)
        if one.is_elastic:
            ids[one.name] = _submit_training(client, folder, one.num_steps(measured), spec, one.name)
        else:
            ids[one.name] = submit(client, folder, job_path(), ["sleep", str(one.lasts_s)], spec)
    for job in ids.values():
        _wait_for_end(client, folder / "queue", job)
    first_s = client.call("job", job=ids[workload[0].name])["job"]["submitted_s"] - workload[0].at_s
    slots = {name: _slots(entries(folder / "queue", job, events.JobEvent), job, first_s) for name, job in ids.items()}
    return {name: _completion_s(client, job) for name, job in ids.items()}, slots


def _submit_training(client: Client, folder: Path, num_steps: int, spec: dict[str, Any], name: str) -> str:
    num_fixed = 0 if "total" in spec else spec["needs"]["min_devices"]
    devices = ["-d", f"cpu:{num_fixed}"] if num_fixed > 1 else []  # an elastic job has a rank on each slot without it
    command = ["evenload", "run", *devices, "train.py", str(num_steps), name]
    return submit(client, folder, job_path(), command, spec)


def _wait_for_end(client: Client, queue: Path, job: str, *, is_judged: bool = True) -> None:
    wait(
        lambda: client.call("job", job=job)["job"]["state"] in ("SUCCEEDED", "CANCELLED", "FAILED"), queue, job, 3600.0
    )
    if is_judged and client.call("job", job=job)["job"]["state"] == "FAILED":
        raise RuntimeError(paths.log_path(queue, job).read_text()[-3000:])


def _completion_s(client: Client, job: str) -> float:
    row = client.call("job", job=job)["job"]
    return float(row["since_s"] - row["submitted_s"])


def table(result: dict[str, Any]) -> str:
    lines = [
        (
            job["job"],
            f"{job['submitted_s']:.0f}",
            f"{job['predicted_s']:.0f}",
            f"{job['real_s']:.0f}",
            f"{job['real_s'] / job['predicted_s']:.3f}",
        )
        for job in result["jobs"]
    ]
    return f"{rows(('job', 'submitted, s', 'predicted, s', 'real, s', 'ratio'), lines)}\nmean: {result['ratio']:.3f}"
