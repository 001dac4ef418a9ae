"""Who takes part: every event and its instructions, without processes."""

import json

import pytest

from evenload.training.launch.membership_decider import (
    LOOP_ENDED,
    EndRun,
    EndWorker,
    MembershipDecider,
    Notice,
    SendChange,
    StartWorker,
    WorkerPlace,
)
from evenload.training.launch.membership_messages import LostWorker, MembershipChange


def started(num_workers=3, max_restarts=3, capable=True):
    decider = MembershipDecider(
        {f"worker-{i}": WorkerPlace(i, "cpu", f"CPU {i}") for i in range(num_workers)}, "host:1", max_restarts
    )
    if capable:
        for worker in decider.members:
            decider.capable(worker, "")
    return decider


def loss(worker):
    return LostWorker(worker, f"{worker} was killed by SIGKILL", 1.0)


def only(instructions, kind):
    found = [instruction for instruction in instructions if isinstance(instruction, kind)]
    assert len(found) == 1, instructions
    return found[0]


def none_of(instructions, *kinds):
    return not any(isinstance(instruction, kinds) for instruction in instructions)


def switch_all(decider, change):
    got = []
    for worker in change.workers:
        got += decider.switched(worker, change.number)
    return got


def test_a_lost_member_changes_the_others_at_once_and_comes_back_at_a_boundary():
    decider = started()
    got = decider.lost([loss("worker-0")])
    change = only(got, SendChange).change
    assert change == MembershipChange(
        1, ("worker-1", "worker-2"), (), (loss("worker-0"),), (), "host:1", True, ("CPU 1", "CPU 2"), "gloo"
    )
    assert "2 ranks go on; it is restarted (1 of 3)" in only(got, Notice).text
    assert none_of(got, StartWorker), "the restart would take cores from the recovery"
    assert decider.rank_of("worker-1") == 0 and decider.changes

    assert decider.switched("worker-1", 1) == []
    start = only(decider.switched("worker-2", 1), StartWorker)
    assert start == StartWorker("worker-3", WorkerPlace(0, "cpu", "CPU 0"), 0.0)
    sent = only(decider.ready("worker-3"), SendChange)
    assert sent.to == sent.change.workers == ("worker-1", "worker-2", "worker-3") and not sent.change.urgent
    assert sent.change.joined == ("worker-3",) and sent.change.lost == () and sent.change.number == 2
    assert switch_all(decider, sent.change) == [] and not decider.changes


def test_deaths_at_once_and_during_the_recovery_are_one_set_of_losses():
    decider = started(4)
    assert decider.awaited == ()
    first = only(decider.lost([loss("worker-1"), loss("worker-3")]), SendChange).change
    assert first.workers == ("worker-0", "worker-2") and {*decider.awaited} == {*first.workers}
    decider.switched("worker-0", 1)
    assert decider.awaited == ("worker-2",)
    second = only(decider.lost([loss("worker-2")]), SendChange).change
    assert second.workers == ("worker-0",) and second.number == 2 and second.urgent
    assert [lost.worker for lost in second.lost] == ["worker-1", "worker-3", "worker-2"]
    assert decider.switched("worker-0", 1) == [], "an older change counts no more"
    starts = decider.switched("worker-0", 2)
    assert [start.place.index for start in starts] == [1, 3, 2]


def test_the_last_rank_ends_the_run_with_all_causes():
    decider = started(2)
    switch_all(decider, only(decider.lost([loss("worker-0")]), SendChange).change)
    reason = only(decider.lost([loss("worker-1")]), EndRun).reason
    assert "worker-0 was killed" in reason and "worker-1 was killed" in reason and "no rank is left" in reason


@pytest.mark.parametrize("why", ["training has not begun", "run.resume was not called"])
def test_where_survivors_cannot_go_on_the_run_ends(why):
    decider = started(capable=False)
    for worker in decider.members[: 1 if "begun" in why else 3]:
        decider.capable(worker, "" if worker == "worker-0" else why)
    assert why in only(decider.lost([loss("worker-0")]), EndRun).reason


def test_restarts_end_and_joins_and_leaves_do_not_count():
    decider = started(2, max_restarts=2)
    worker = "worker-1"
    for attempt in range(2):
        starts = switch_all(decider, only(decider.lost([loss(worker)]), SendChange).change)
        start = only(starts, StartWorker)
        worker = start.worker
        assert start.delay_s == (0.0, 1.0)[attempt]
        switch_all(decider, only(decider.ready(worker), SendChange).change)
    got = decider.lost([loss(worker)])
    assert "its 2 restarts are used up (--max-restarts 2)" in only(got, Notice).text
    assert switch_all(decider, only(got, SendChange).change) == [] and not decider.changes
    for _ in range(4):
        worker = only(decider.request_join(WorkerPlace(7, "cpu")), StartWorker).worker
        switch_all(decider, only(decider.ready(worker), SendChange).change)
        change = only(decider.request_leave(worker), SendChange).change
        assert change.left == (worker,) and decider.leaves(worker)
        switch_all(decider, change)
        assert decider.ended(worker) == []
    assert decider.members == ("worker-0",)


def test_a_joiner_that_dies_before_it_is_admitted_disturbs_nobody():
    decider = started(2, max_restarts=1)
    worker = only(decider.request_join(WorkerPlace(2, "cpu")), StartWorker).worker
    got = decider.lost([loss(worker)])
    assert none_of(got, SendChange) and "before it could join; it is restarted (1 of 1)" in only(got, Notice).text
    again = only(got, StartWorker).worker
    got = decider.lost([loss(again)], restart=False)
    assert none_of(got, SendChange, StartWorker) and not decider.changes


def test_a_joiner_that_dies_during_its_admission_is_dropped_by_all():
    decider = started(2)
    worker = only(decider.request_join(WorkerPlace(2, "cpu")), StartWorker).worker
    decider.ready(worker)
    change = only(decider.lost([loss(worker)]), SendChange).change
    assert change.urgent and change.workers == ("worker-0", "worker-1") and change.lost[0].worker == worker
    only(switch_all(decider, change), StartWorker)


def test_a_death_during_an_admission_starts_the_joiner_again_without_counting():
    decider = started(3, max_restarts=1)
    worker = only(decider.request_join(WorkerPlace(3, "cpu")), StartWorker).worker
    decider.ready(worker)
    got = decider.lost([loss("worker-2")])
    assert only(got, SendChange).change.workers == ("worker-0", "worker-1")
    assert only(got, EndWorker).worker == worker
    starts = switch_all(decider, only(got, SendChange).change)
    assert [start.place.index for start in starts] == [2, 3]


def test_a_leave_is_repeated_after_a_death_and_one_that_was_over_is_no_failure():
    decider = started(3)
    decider.request_leave("worker-2")
    change = only(decider.lost([loss("worker-1")]), SendChange).change
    assert change.workers == ("worker-0", "worker-2") and change.left == ()
    # Its leave was over on its own side: it has ended, and the others wait for it.
    change = only(decider.ended("worker-2"), SendChange).change
    assert change.urgent and change.workers == ("worker-0",) and change.lost[-1].reason == "rank 1 (cpu) has left"
    decider = started(3)
    decider.request_leave("worker-2")
    got = switch_all(decider, only(decider.lost([loss("worker-1")]), SendChange).change)
    assert only(got, SendChange).change.left == ("worker-2",)


def test_a_worker_that_has_left_is_no_member_of_a_change_that_replaces_its_leave():
    """Nobody would notice its end again, and the others would wait for it for ever."""
    decider = started(3)
    leave = only(decider.request_leave("worker-2"), SendChange).change
    assert leave.left == ("worker-2",)
    decider.switched("worker-2", leave.number)
    assert decider.ended("worker-2") == []  # by itself or killed; the others may not have switched yet
    change = only(decider.lost([loss("worker-1")]), SendChange).change
    assert change.urgent and change.workers == ("worker-0",) and change.left == ()
    assert {one.worker for one in change.lost} == {"worker-1", "worker-2"}
    switch_all(decider, change)
    assert "worker-2" not in decider.staying


def test_one_change_at_a_boundary_is_outstanding_and_the_only_member_waits_for_its_successor():
    decider = started(1)
    assert decider.request_leave("worker-0") == []
    first = only(decider.request_join(WorkerPlace(1, "cuda:1")), StartWorker).worker
    second = only(decider.request_join(WorkerPlace(2, "cuda:2")), StartWorker).worker
    change = only(decider.ready(first), SendChange).change
    assert change.workers == ("worker-0", first)
    assert decider.ready(second) == []
    sent = only(switch_all(decider, change), SendChange)
    assert sent.change.workers == (first, second) and sent.change.left == ("worker-0",)
    assert sent.to == (first, second, "worker-0")


def test_after_the_loop_nobody_joins():
    decider = started(2)
    worker = only(decider.request_join(WorkerPlace(2, "cpu")), StartWorker).worker
    assert decider.finished() == [EndWorker(worker)]
    assert decider.ready(worker) == [EndWorker(worker)] and decider.request_join(WorkerPlace(3, "cpu")) == []
    assert "the training loop has ended" in only(decider.lost([loss("worker-0")]), EndRun).reason


def test_after_the_end_of_a_script_others_may_be_lost_and_nobody_is_restarted():
    decider = started(3)
    assert decider.finished("worker-1", goes_on=True) == [] and decider.why_not_without(()) == LOOP_ENDED
    instructions = decider.lost([loss("worker-0")])
    change = only(instructions, SendChange).change
    assert change.workers == ("worker-1", "worker-2") and change.urgent
    assert "not restarted: the training loop has ended" in only(instructions, Notice).text
    assert switch_all(decider, change) == [] and decider.lost_late == ["worker-0"]
    decider.finished("worker-2", goes_on=True)
    assert only(decider.lost([loss("worker-2")]), SendChange).change.workers == ("worker-1",)
    assert decider.lost_late == ["worker-0"] and "worker-0" in decider.staying  # a restart needs its place
    assert "no rank is left" in only(decider.lost([loss("worker-1")]), EndRun).reason


def test_an_admission_that_no_further_step_can_carry_out_is_given_up():
    decider = started(2)
    worker = only(decider.request_join(WorkerPlace(2, "cpu")), StartWorker).worker
    change = only(decider.ready(worker), SendChange).change
    assert decider.finished() == []  # a stop was requested: the step that runs may still carry it out
    assert decider.finished("worker-0") == [EndWorker(worker)]
    assert decider.members == ("worker-0", "worker-1") and not decider.changes
    assert decider.finished("worker-1") == [] and decider.switched("worker-1", change.number) == []


def test_an_admission_that_a_finished_worker_has_carried_out_stays():
    decider = started(2)
    worker = only(decider.request_join(WorkerPlace(2, "cpu")), StartWorker).worker
    change = only(decider.ready(worker), SendChange).change
    decider.switched("worker-0", change.number)
    assert decider.finished("worker-0") == []
    decider.switched("worker-1", change.number)
    decider.switched(worker, change.number)
    assert decider.members == ("worker-0", "worker-1", worker) and not decider.changes


def test_a_request_to_leave_of_a_joiner_ends_it():
    decider = started(2)
    worker = only(decider.request_join(WorkerPlace(2, "cpu")), StartWorker).worker
    assert decider.request_leave(worker) == [EndWorker(worker)] and not decider.changes


def test_who_was_to_leave_for_a_worker_that_does_not_come_stays():
    decider = started(2)
    worker = only(decider.request_join(WorkerPlace(2, "cpu")), StartWorker).worker
    change = only(decider.request_leave("worker-0"), SendChange).change
    decider.request_leave("worker-1")
    assert switch_all(decider, change) == [] and decider.members == ("worker-1",) and decider.changes
    decider.lost([loss(worker)], restart=False)
    assert decider.staying == ("worker-1",) and not decider.changes


def handed_over(decider):
    """The same decider on another machine."""
    return MembershipDecider.of_state(json.loads(json.dumps(decider.state())), "other:2")


def test_another_coordinator_goes_on_where_the_last_one_was_lost():
    decider = started(4)
    only(decider.lost([loss("worker-3")]), SendChange)  # not all have switched
    decider.switched("worker-1", 1)
    again = handed_over(decider)
    assert again.state() == decider.state() | {"joiners": ["worker-4"]}
    got = again.lost([loss("worker-0")], restart=False, new_coordinator=True)
    change = only(got, SendChange).change
    assert (change.number, change.workers, change.store, change.urgent) == (
        2,
        ("worker-1", "worker-2"),
        "other:2",
        True,
    )
    assert [one.worker for one in change.lost] == ["worker-3", "worker-0"]
    assert switch_all(again, change) == [] and again.joiners == ("worker-4",)
    assert only(again.ready("worker-4"), SendChange).change.workers == ("worker-1", "worker-2", "worker-4")
    (restart,) = [one for one in again.lost([loss("worker-1")]) if isinstance(one, Notice)]
    assert "it is restarted (1 of 3)" in restart.text


def test_another_coordinator_changes_the_members_in_any_case_and_restarts_whom_the_last_one_admitted():
    decider = started(2, max_restarts=1)
    switch_all(decider, only(decider.lost([loss("worker-1")]), SendChange).change)
    admitted = only(decider.ready("worker-2"), SendChange).change
    decider.switched("worker-2", admitted.number)
    again = handed_over(decider)
    (notice,) = [one for one in again.lost([loss("worker-2")]) if isinstance(one, Notice)]
    assert "--max-restarts 1" in notice.text
    again = handed_over(decider)
    got = again.lost([], restart=False, new_coordinator=True)
    assert only(got, SendChange).change.workers == ("worker-0",) and only(got, EndWorker).worker == "worker-2"
    assert only(switch_all(again, only(got, SendChange).change), StartWorker).worker == "worker-3"
    assert handed_over(started(1, capable=False)).why_not_without(()) == "training has not begun"


def test_what_every_machine_is_sent_does_not_grow_with_the_losses():
    decider, sizes = started(2, max_restarts=1000), []
    for _ in range(60):
        change = only(decider.lost([loss(decider.members[-1])]), SendChange).change
        joiner = only(switch_all(decider, change), StartWorker).worker
        switch_all(decider, only(decider.ready(joiner), SendChange).change)
        sizes.append(len(json.dumps(decider.state())))
    assert sizes[-1] <= sizes[30] + 60, sizes  # numbers get longer


def test_a_joiner_that_nobody_expects_is_ended():
    decider = started(2)
    change = only(decider.lost([loss("worker-1")]), SendChange).change
    joiner = only(switch_all(decider, change), StartWorker).worker
    first = only(decider.ready(joiner), SendChange).change
    assert decider.ready(joiner) == [], "it repeats itself"
    switch_all(decider, first)
    assert decider.ready(joiner) == [], "it is a member"
    assert decider.ready("worker-9") == [EndWorker("worker-9")]
