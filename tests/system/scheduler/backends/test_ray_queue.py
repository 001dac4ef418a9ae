"""What of the backend on Ray needs no Ray: nodes as devices, bundles, and the queue with its log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evenload.errors import ConfigError, QueueError
from evenload.job.protocol import ProgressReport
from evenload.scheduler.backends.ray.devices import NodeBundle, bundles_of, device_label, devices_of, host_names
from evenload.scheduler.backends.ray.queue import RayQueue
from evenload.scheduler.backends.ray.rows import queue_rows
from evenload.scheduler.clock import QueueClock
from evenload.scheduler.core import events
from evenload.scheduler.core.states import JobState
from evenload.stored_names import RAY_LOG
from evenload.views.queue.text import text
from evenload.views.queue.view import JobFilter, view_of_rows
from tests.system.scheduler.backends.test_texts import a_job

NODES: list[dict[str, Any]] = [
    {"NodeID": "a", "Alive": True, "Resources": {"CPU": 16.0, "GPU": 2.0, "accelerator_type:A100": 1.0}},
    {"NodeID": "b", "Alive": True, "Resources": {"CPU": 2.0, "memory": 1e9}},
    {"NodeID": "c", "Alive": False, "Resources": {"CPU": 8.0}},
    {"NodeID": "d", "Alive": True, "Resources": {"GPU": 1.0}},
]


def test_nodes_as_devices() -> None:
    devices = devices_of(NODES)
    assert [device.id for device in devices] == ["a/a100/0", "a/a100/1", "b/cpu/0", "b/cpu/1", "d/gpu/0"]
    assert bundles_of(devices) == (NodeBundle("a", 0, 2), NodeBundle("b", 2, 0), NodeBundle("d", 0, 1))
    assert [bundle.resources() for bundle in bundles_of(devices)] == [{"GPU": 2.0}, {"CPU": 2.0}, {"GPU": 1.0}]


def test_nodes_have_names_for_people() -> None:
    nodes = [
        {"NodeID": "aaaaaaaa", "Alive": True, "NodeManagerHostname": "box1", "NodeManagerAddress": "10.0.0.1"},
        {"NodeID": "bbbbbbbb", "Alive": True, "NodeManagerHostname": "box", "NodeManagerAddress": "10.0.0.2"},
        {"NodeID": "cccccccc", "Alive": True, "NodeManagerHostname": "box", "NodeManagerAddress": "10.0.0.3"},
        {"NodeID": "dddddddd", "Alive": False, "NodeManagerHostname": "box1", "NodeManagerAddress": "10.0.0.1"},
    ]
    names = host_names(nodes)
    assert names == {"aaaaaaaa": "box1", "bbbbbbbb": "10.0.0.2", "cccccccc": "10.0.0.3"}
    assert device_label("bbbbbbbb/gpu/1", names) == "10.0.0.2:gpu1"
    assert device_label("aaaaaaaa/a100/0", names) == "box1:a100/0"
    same = [{**nodes[0], "NodeID": name} for name in ("aaaaaaaa", "eeeeeeee")]
    assert host_names(same) == {"aaaaaaaa": "10.0.0.1/aaaaaa", "eeeeeeee": "10.0.0.1/eeeeee"}


class Clock(QueueClock):
    """Each look at it comes a second later."""

    ahead_s = 0.0
    at_s = 1000.0

    def now_s(self) -> float:
        self.at_s += 1.0
        return self.at_s


def a_queue(root: Path) -> RayQueue:
    queue = RayQueue(root, Clock())
    queue.update_devices(devices_of(NODES), host_names(NODES))
    return queue


def test_jobs_of_the_log_are_there_again(tmp_path: Path) -> None:
    queue = a_queue(tmp_path)
    first = queue.submit(a_job("ray", devices=2, environment={"A": "b"}), "ann")
    array = queue.submit(a_job("ray", array="0-1", after=first), "ann")
    queue.decide()
    queue.record(events.JobStarted(1003.0, first))
    queue.update_progress(first, ProgressReport(first, 1, 5, 10, 100, 2.0, 0.0, "running", 0.0))
    assert queue.queue_state.jobs[first].spec.preemptible, "it has reported, so it can save"
    queue.commit()
    queue.close()

    again = a_queue(tmp_path)
    assert again.queue_state.jobs[first].state is JobState.PENDING
    assert again.queue_state.jobs[first].reason == "the queue on Ray was restarted"
    assert again.program(first)[0].environment == {"A": "b"}
    assert [d.id for d in again.describe([array])] == [f"{array}_0", f"{array}_1"]
    assert [again.queue_state.jobs[name].unmet for name in (f"{array}_0", f"{array}_1")] == [(first,), (first,)]
    assert again.submit(a_job("ray"), "ann") == "3"


@pytest.mark.parametrize(
    ("command", "requeue", "state"),
    [
        (("sleep", "60"), False, JobState.FAILED),
        (("sleep", "60"), True, JobState.PENDING),
        (("evenload", "run", "train.py"), False, JobState.PENDING),
    ],
)
def test_a_job_that_cannot_save_is_not_started_again_by_itself(
    tmp_path: Path, command: tuple[str, ...], requeue: bool, state: JobState
) -> None:
    queue = a_queue(tmp_path)
    lost, stopped = (queue.submit(a_job("ray", command=command, requeue=requeue), "ann") for _ in range(2))
    queue.decide()
    for job in (lost, stopped):
        queue.record(events.JobStarted(queue.now_s, job))
    queue.end(events.Yielded(queue.now_s, stopped, "it ended"))
    queue.commit()
    assert [status.state for status in queue.describe([stopped])] == [state]
    queue.close()
    again = a_queue(tmp_path)
    assert [status.state for status in again.describe([lost])] == [state]
    again.close()


def test_the_log_of_an_earlier_version_is_imported(tmp_path: Path) -> None:
    """A log that the previous version wrote, and a crash while it wrote one more line."""
    log = tmp_path / RAY_LOG
    log.write_text((Path(__file__).parent / "recorded" / "ray_events.jsonl").read_text() + '{"kind": "Beg')
    queue = RayQueue(tmp_path, Clock())
    states = {status.id: status.state for status in queue.describe([])}
    pending = JobState.PENDING
    assert states == {"1": pending, "2_0": pending, "2_1": pending, "3": JobState.SUCCEEDED, "4": JobState.CANCELLED}
    (first,) = queue.describe(["1"])
    assert (first.step, first.total, first.attempt) == (10, 100, 1) and first.extra == {"user": "ann", "name": "gpt"}
    assert queue.queue_state.jobs["1"].reason == "the queue on Ray was restarted"
    assert queue.queue_state.jobs["1"].spec.preemptible
    assert queue.program("1")[0].environment == {"A": "b"} and queue.program("2_1")[1] == 1
    assert set(queue.queue_state.devices) == {device.id for device in devices_of(NODES)}
    queue.close()

    assert not log.exists()
    again = RayQueue(tmp_path, Clock())
    assert {status.id: status.state for status in again.describe([])} == states
    assert again.submit(a_job("ray"), "ann") == "5"
    again.close()


def test_who_may_cancel(tmp_path: Path) -> None:
    queue = a_queue(tmp_path)
    job = queue.submit(a_job("ray"), "ann")
    with pytest.raises(QueueError, match=f"job {job} belongs to ann; bob can't cancel it"):
        queue.cancel(job, "bob")
    with pytest.raises(QueueError, match="no job 99 in this queue"):
        queue.cancel("99", "ann")
    assert queue.cancel(job, "ann") == []
    with pytest.raises(QueueError, match=f"job {job} has ended: CANCELLED"):
        queue.cancel(job, "ann")


def test_who_may_change_and_hold(tmp_path: Path) -> None:
    queue = a_queue(tmp_path)
    job = queue.submit(a_job("ray", array="0-1", name="sweep"), "ann")
    with pytest.raises(QueueError, match=f"job {job}_0 belongs to ann; bob can't change it"):
        queue.change("sweep", "bob", {"priority": 1})
    with pytest.raises(QueueError, match="belongs to ann; bob can't hold it"):
        queue.hold(job, "bob", is_held=True)
    assert queue.change(f"{job}_1", "ann", {"priority": 7}) == [f"{job}_1"]
    assert queue.hold("sweep", "ann", is_held=True) == [f"{job}_0", f"{job}_1"]
    assert queue.decide() == ()
    assert queue.hold(f"{job}_1", "ann", is_held=False) == [f"{job}_1"]
    assert [command.job for command in queue.decide() if isinstance(command, events.Placed)] == [f"{job}_1"]
    with pytest.raises(QueueError, match="is STARTING: only a pending job"):
        queue.hold(f"{job}_1", "ann", is_held=True)


def test_speeds_are_learned(tmp_path: Path) -> None:
    """So that an elastic job gets the devices that speed it up, as in the queue of one machine."""
    queue = a_queue(tmp_path)
    job = queue.submit(a_job("ray", devices="1:2", kind="a100"), "ann")
    queue.decide()
    queue.record(events.JobStarted(1003.0, job))
    size = len(queue.queue_state.jobs[job].devices)
    queue.update_progress(job, ProgressReport(job, 1, 5, 10, 100, 4.0, 0.0, "running", 0.0))
    assert queue.queue_state.jobs[job].rates[size - 1] == pytest.approx(4.0)


def test_a_job_that_is_stopping_is_shown(tmp_path: Path) -> None:
    """Nobody knows when it ends, though it has reported steps."""
    queue = a_queue(tmp_path)
    job = queue.submit(a_job("ray", devices=2, kind="cpu", name="stopping"), "ann")
    queue.decide()
    queue.record(events.JobStarted(queue.now_s, job))
    queue.update_progress(job, ProgressReport(job, 1, 5, 10, 100, 4.0, 0.0, "running", 0.0))
    assert queue.cancel(job, "ann") == [job]
    view = view_of_rows(queue_rows(queue, None, (), None), JobFilter(), "on Ray")
    assert any("stopping" in line and "b:cpu0" in line for line in text(view))


def test_a_deadline_is_refused(tmp_path: Path) -> None:
    queue = a_queue(tmp_path)
    job = queue.submit(a_job("ray"), "ann")
    with pytest.raises(ConfigError, match="only the local queue plans for deadlines"):
        queue.change(job, "ann", {"deadline_s": 1e9})


def test_a_node_that_leaves(tmp_path: Path) -> None:
    queue = a_queue(tmp_path)
    job = queue.submit(a_job("ray", devices=2), "ann")
    queue.decide()
    queue.update_devices(devices_of(node for node in NODES if node["NodeID"] != "b"), {})
    assert set(queue.queue_state.closed) == {"b/cpu/0", "b/cpu/1"}
    queue.record(events.Lost(2000.0, job, "its node died"))
    queue.update_devices(devices_of(node for node in NODES if node["NodeID"] != "b"), {})
    assert not any(name.startswith("b/") for name in queue.queue_state.devices)
    assert queue.describe([job])[0].reason.startswith("asks for devices that are not here")
    with pytest.raises(QueueError, match="it asks for a device of kind cpu; this queue has 0 such"):
        queue.submit(a_job("ray"), "ann")
