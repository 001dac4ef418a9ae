"""The page of a run: its figures by their formulas, each loss by name, its size, and what is torn or unknown."""

from __future__ import annotations

import html
import json
import math
import re
from pathlib import Path

import pytest

from evenload.errors import ConfigError
from evenload.records.lines import EVENTS_FILE, STEPS_FILE, event_line, step_line
from evenload.records.reader import read_steps
from evenload.records.recorder import Recorder
from evenload.records.values import RankTimes, RunEvent, StepRecord
from evenload.stored_names import MEASUREMENT
from evenload.views.run.accounts import COMPUTING, account
from evenload.views.run.incidents import cost_s, group_of
from evenload.views.run.page import MAX_BYTES, RunPage
from evenload.views.run.step_batch import carry_back
from evenload.views.run.summary import summarize_run
from tests.unit.records.make import START_S, make_step
from tests.unit.views.make_run import FAULTS, write_run


@pytest.mark.parametrize(
    ("kind", "fields", "group"),
    [
        ("lost", {}, "death"),
        ("rank_died", {}, "death"),
        ("stalled", {}, "stall"),
        ("memory", {}, "memory"),
        ("left", {}, "leave"),
        ("returned", {}, "join"),
        ("joined", {}, "join"),
        ("rebuilt", {}, "recovery"),
        ("checkpoint", {}, "save"),
        ("not_saved", {}, "fallback"),
        ("checkpoint_failed", {}, "fallback"),
        ("checkpoint_untidy", {}, "fallback"),
        ("balance", {"expected_s": 0.3, "before_s": 0.4}, None),
        ("never_seen", {}, None),
        ("never_seen", {"seconds": 2}, "cost"),
        ("open", {"seconds": 2}, None),
    ],
)
def test_an_event_belongs_to_a_group_by_its_kind(kind: str, fields: dict[str, object], group: str | None) -> None:
    assert group_of(RunEvent(kind, "", fields=fields)) == group


def test_only_finite_seconds_are_a_cost() -> None:
    assert cost_s({"took_s": 2}) == 2.0
    assert cost_s({"seconds": 3.0, "held_s": 0.02}) == 0.02, "a save in the background costs what training waits for"
    assert [cost_s(fields) for fields in ({"seconds": True}, {"seconds": "NaN"}, {"lost_s": -1.0}, {})] == [None] * 4


def test_every_loss_stands_on_the_page_with_its_reason_and_seconds(tmp_path: Path) -> None:
    write_run(tmp_path, 400)
    text = RunPage(tmp_path).html()
    shown = html.unescape(re.sub(r"<[^>]+>", " ", text))
    for part, kind, message, fields in FAULTS:
        assert message.format(step=round(part * 400)) in shown, kind
        assert str(fields.get("reason", "")) in shown
    for seconds in ("6.2 s", "1.4 s", "2.5 s", "3.25 s", "400 ms"):
        assert f'<td class="num">{seconds}</td>' in text
    assert "<b>&</b>" not in text and "abc" not in text.partition("api_key")[2][:30]
    assert not re.search(r"""(?:src|href)=["'](?!data:|#)""", text), "the page loads something"


def test_the_figures_follow_their_formulas(tmp_path: Path) -> None:
    write_run(tmp_path, 300, faults=())
    page = RunPage(tmp_path)
    page.update()
    found, summary = account(page.history), summarize_run(tmp_path)
    assert summary.whole is not None and summary.whole.efficiency is not None
    assert found.efficiency == pytest.approx(summary.whole.efficiency)
    assert found.busy == pytest.approx(summary.whole.busy)
    assert found.imbalance == pytest.approx(summary.whole.imbalance)
    session_s = 3.0 + 300 * 0.5 + 0.3
    assert found.goodput_per_s == pytest.approx(300 * 256 / session_s)
    assert found.device_s == pytest.approx(4 * session_s)
    assert sum(found.parts_s.values()) == pytest.approx(found.device_s)
    assert found.parts_s["starting"] == pytest.approx(4 * 3.0)
    assert found.parts_s[COMPUTING] == pytest.approx(sum(0.44 * 300 for _ in range(4)), rel=0.01)


def test_a_measurement_is_compared_with_the_best_fixed_split(tmp_path: Path) -> None:
    write_run(tmp_path, 20, (2.0, 1.0), faults=(), solo=False)
    blocks = [
        {"arm": arm, "round": number, "num_samples": samples, "seconds": seconds, "shares": shares}
        for number in range(3)
        for arm, samples, seconds, shares in (
            ("solo", [200, 100], [1.0, 1.0], []),
            ("even", [200], [1.0], [128, 128]),
            ("evenload", [294], [1.0], [171, 85]),
            ("static:170,86", [300], [1.0], [170, 86]),
        )
    ]
    with (tmp_path / EVENTS_FILE).open("ab") as events:
        events.write(event_line(RunEvent(MEASUREMENT, "measured", START_S, 20, {"blocks": blocks})))
    text = RunPage(tmp_path).html()
    assert "<b>0.98<small>× the best fixed split</small></b>" in text
    assert "1.47× equal shares" in text and "(170,86)" in text and "98 % of the sum" in text


def test_steps_that_are_computed_again_count_once(tmp_path: Path) -> None:
    write_run(tmp_path, 100, faults=(), closed=False)
    again_s = START_S + 10_000_000_000
    with (tmp_path / EVENTS_FILE).open("ab") as events, (tmp_path / STEPS_FILE).open("ab") as steps:
        events.write(event_line(RunEvent("open", "", again_s)))
        for index in range(60, 120):
            steps.write(step_line(make_step(index, time=again_s + 2.0 + 0.5 * (index - 59)), {}))
    page = RunPage(tmp_path)
    text = page.html()
    assert page.history.num_samples == sum(step.num_samples for step in read_steps(tmp_path))
    assert page.history.num_repeated == 40
    assert "steps 60 to 99 were computed again" in text
    assert "session 1 ended without closing its records" in text
    assert "2 sessions" in text


def test_the_time_of_an_event_without_seconds_is_estimated_by_the_length_of_its_step(tmp_path: Path) -> None:
    write_run(tmp_path, 30, faults=(), closed=False)
    last = read_steps(tmp_path)[-1].time
    with (tmp_path / EVENTS_FILE).open("ab") as events, (tmp_path / STEPS_FILE).open("ab") as steps:
        events.write(event_line(RunEvent("lost", "rank 1 died", last + 1.0, 30)))
        ranks = tuple(RankTimes(compute_s=0.45) for _ in range(4))
        steps.write(step_line(StepRecord(30, 0, 30, 256, 1.0, (64,) * 4, 1, 4.5, ranks, time=last + 4.5), {}))
        slow = (RankTimes(compute_s=0.4), RankTimes(data_s=7.5), *ranks[:2])
        steps.write(step_line(StepRecord(31, 0, 31, 256, 1.0, (64,) * 4, 1, 8.0, slow, time=last + 12.5), {}))
    page = RunPage(tmp_path)
    page.update()
    lost, slow_step = page.history.incidents
    assert (lost.group, lost.measured) == ("death", False)
    assert lost.seconds == pytest.approx(4.0, abs=0.05)
    assert slow_step.group == "slow" and "rank 1 spent 7.5 s on data" in slow_step.message


def test_a_device_keeps_its_row_when_ranks_move_up_and_when_it_is_restarted(tmp_path: Path) -> None:
    names = ["cpu", "cpu", "cuda:0"]
    members = [(["a", "b", "c"], names), (["b", "c"], names[1:]), (["b", "c", "d"], ["cpu", "cuda:0", "cpu"])]
    folder, time_s, step = tmp_path / "run", START_S, 0
    folder.mkdir()
    with (folder / EVENTS_FILE).open("wb") as events, (folder / STEPS_FILE).open("wb") as steps:
        events.write(event_line(RunEvent("open", "", time_s)))
        for number, (workers, devices) in enumerate(members):
            if number == 1:  # rank 0 is lost: the next rank opens the records again and goes on
                events.write(event_line(RunEvent("open", "", time_s + 1.0)))
                ranks = (RankTimes(compute_s=0.4),) * 3  # the step that rank 0 had no time to write
                steps.write(
                    step_line(StepRecord(step, 0, step, 24, 1.0, (8,) * 3, 1, 0.5, ranks, time=time_s + 1.05), {})
                )
                step += 1
                events.write(event_line(RunEvent("lost", "rank 0 (cpu): killed by SIGKILL", time_s + 1.1, step)))
            fields = {"workers": workers, "devices": devices, "seconds": 0.4 * number}
            events.write(event_line(RunEvent("rebuilt", f"{len(workers)} ranks", time_s + 1.2, step, fields)))
            time_s += 1.0
            for _ in range(20):
                time_s += 0.5
                ranks = tuple(RankTimes(compute_s=0.4 + 0.01 * rank) for rank in range(len(workers)))
                shares = (8,) * len(workers)
                steps.write(
                    step_line(StepRecord(step, 0, step, sum(shares), 1.0, shares, 1, 0.5, ranks, time=time_s), {})
                )
                step += 1
        events.write(event_line(RunEvent("close", "", time_s)))
    page = RunPage(folder)
    page.update()
    found = [(device.name, device.num_samples // 8) for device in page.history.devices.values()]
    assert found == [("cpu", 41), ("cpu", 61), ("cuda:0", 61)]
    assert page.history.num_sessions == 1
    assert [(one.kind, one.seconds) for one in page.history.incidents if one.kind != "rebuilt"] == [
        ("lost", pytest.approx(0.6, abs=0.1))
    ]
    assert page.history.bins.end_s == pytest.approx(time_s - START_S)


def test_late_seconds_go_back_to_their_step() -> None:
    def row(compute_s: float, wait_s: float) -> tuple[float, ...]:
        return (0.0, compute_s, wait_s, 0.0, 0.0, 0.0, 0.0)

    assert carry_back(row(3.0, 0.0), 10.0, row(3.0, 7.0), 3.5) == (row(3.0, 6.5), row(3.0, 0.5))
    assert carry_back(row(0.4, 0.1), 0.5, row(0.4, 0.1), 0.5) == (row(0.4, 0.1), row(0.4, 0.1))
    assert carry_back(row(1.0, 0.0), 9.0, row(5.0, 0.0), 1.0) == (row(1.0, 0.0), row(5.0, 0.0)), (
        "computing is never late"
    )


def test_a_run_that_still_trains_and_a_torn_line_are_read(tmp_path: Path) -> None:
    write_run(tmp_path, 20, faults=(), closed=False)
    whole = (tmp_path / STEPS_FILE).read_bytes()
    (tmp_path / STEPS_FILE).write_bytes(whole[:-40])
    page = RunPage(tmp_path)
    first = page.update()
    assert first is not None and page.history.num_steps == 19
    assert "no record for" in first["head"]
    assert page.update() is None
    (tmp_path / STEPS_FILE).write_bytes(whole)
    second = page.update()
    assert second is not None and "step 20/20" in second["head"]
    changed = {name for name in second if second[name] != first[name]}
    assert "plots" in changed and "settings" not in changed


def test_a_page_that_follows_a_run_begins_anew_with_it_and_says_that_it_was_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run, 40)
    page = RunPage(run)
    assert page.update() is not None and page.history.num_steps == 40
    run.rename(tmp_path / "aside")  # as by --fresh
    assert "its folder was removed" in (page.update() or {})["head"]
    write_run(run, 12, faults=(), start_s=START_S + 1000.0)
    sections = page.update() or {}
    assert (page.history.num_steps, page.history.num_sessions, page.history.num_repeated) == (12, 1, 0)
    assert "computed again" not in sections["incidents"] and "2 sessions" not in sections["head"]
    assert page.update() is None


def test_a_resumed_run_before_its_first_step(tmp_path: Path) -> None:
    write_run(tmp_path, 20, faults=(), closed=False)
    Recorder(tmp_path).close()
    assert "step 20/20" in RunPage(tmp_path).html()


def test_a_loss_that_is_not_finite_is_shown_and_breaks_no_script(tmp_path: Path) -> None:
    write_run(tmp_path, 10, faults=(), closed=False)
    time_s = read_steps(tmp_path)[-1].time
    with (tmp_path / STEPS_FILE).open("ab") as steps:
        for index, loss in enumerate((math.inf, math.nan)):
            step = make_step(10 + index, loss=loss, time=time_s + 0.5 * (index + 1))
            steps.write(step_line(step, {"norm": math.inf}))
    text = RunPage(tmp_path).html()
    assert "<b>NaN</b>" in text
    for data in re.findall(r"data-series='([^']*)'", text):
        json.loads(html.unescape(data), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_folder_without_a_step(tmp_path: Path) -> None:
    write_run(tmp_path, 0, faults=())
    assert "No step was committed yet" in RunPage(tmp_path).html()


@pytest.mark.parametrize("num_ranks", [1, 64])
def test_the_page_stays_small(tmp_path: Path, num_ranks: int) -> None:
    faults = tuple(
        (index / 500, "lost", f"rank {index} is gone. " + "a long reason " * 40, {"seconds": 1}) for index in range(500)
    )
    write_run(tmp_path, 500, tuple(1.0 + rank % 4 for rank in range(num_ranks)), faults=faults)
    text = RunPage(tmp_path).html()
    assert len(text.encode()) <= MAX_BYTES
    assert text.count('class="plot rank') == num_ranks


def test_records_of_another_schema_are_refused(tmp_path: Path) -> None:
    (tmp_path / EVENTS_FILE).write_text('{"schema": 99, "time": 1}\n')
    with pytest.raises(ConfigError, match="schema 99"):
        RunPage(tmp_path).html()
