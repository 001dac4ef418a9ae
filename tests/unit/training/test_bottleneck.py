"""Who waits for samples is named, once, and soon; and what was chosen for it, with what was measured."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import evenload
from evenload.records.reader import read_events
from evenload.records.values import OwnStep, RankTimes, StepRecord
from evenload.testing import run_ranks
from evenload.training.data.tuning import ReadSettings, SettingsOrigin
from evenload.training.step.bottleneck import LoadingMonitor
from evenload.views.run.summary import summarize_run
from evenload.views.run.summary_text import format_run_summary
from tests.unit.records.make import make_step

GIVEN = [ReadSettings(), ReadSettings(2, 2)]


def slow(step: int, *data_s: float, seconds: float = 0.5) -> StepRecord:
    """Each rank computes 0.2 s, waits for its samples, and then for the others."""
    ranks = tuple(RankTimes(data_s=own, compute_s=0.2, wait_s=max(0.0, seconds - 0.2 - own)) for own in data_s)
    return make_step(step, ranks=ranks, seconds=seconds, shares=(128,) * len(ranks))


def events_of(watch: LoadingMonitor, records: list[StepRecord], readings: Any = None) -> list[tuple[int, str, str]]:
    found = []
    for record in records:
        for one in watch.take(record, readings or GIVEN):
            found.append((record.step, one.kind, one.message))
    return found


def test_the_rank_that_waits_is_told_once_and_again_when_it_is_over() -> None:
    watch = LoadingMonitor()
    first = events_of(watch, [slow(step, 0.0, 0.0) for step in range(30)])
    assert first == []
    ((step, kind, message),) = events_of(watch, [slow(step, 0.01, 0.3) for step in range(30, 60)])
    assert kind == "data_bound" and 30 <= step < 42
    assert re.match(
        r"data-bound: \d\d % of rank 1's step is spent waiting for samples \(2 loader workers \(prefetch 2\)\)", message
    )
    assert "--num-workers auto" in message
    ((step, kind, message),) = events_of(watch, [slow(step, 0.0, 0.0) for step in range(60, 90)])
    assert (kind, message) == ("data_bound_over", "rank 1 no longer waits for samples") and step < 72
    assert [kind for _, kind, _ in events_of(watch, [slow(step, 0.2, 0.0) for step in range(90, 110)])] == [
        "data_bound"
    ]


def test_a_rank_alone_that_waits_is_told_of_at_the_same_steps_by_batches_of_steps() -> None:
    def own(step: int) -> OwnStep:
        times = (0.3 if 40 <= step < 70 else 0.0, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0)
        return OwnStep(step, 0, step, 128, 1.0, 0.5, times, 0, {}, 0.5 * step)

    steps, reading = [own(step) for step in range(120)], [GIVEN[0]]
    watch, together = LoadingMonitor(), LoadingMonitor()
    singly = events_of(watch, [step.record() for step in steps], reading)
    found = events_of(together, [steps[0].record()], reading)
    for at in range(1, 120, 17):
        found += [(step, event.kind, event.message) for step, event in together.take_own(steps[at : at + 17])]
    assert [kind for _, kind, _ in singly] == [kind for _, kind, _ in found] == ["data_bound", "data_bound_over"]
    assert all(abs(one[0] - other[0]) <= 4 for one, other in zip(singly, found, strict=True))


def test_the_slower_of_two_is_named() -> None:
    ((_, _, message),) = events_of(LoadingMonitor(), [slow(step, 0.29, 0.3) for step in range(20)])
    assert "rank 1's step" in message


def test_ranks_that_wait_in_turns_are_told_once_each() -> None:
    records = [slow(step, 0.30 - 0.02 * (step // 15 % 2), 0.29) for step in range(120)]
    found = events_of(LoadingMonitor(), records)
    assert [re.findall(r"rank \d", message)[0] for _, _, message in found] == ["rank 0", "rank 1"]


def test_one_step_that_takes_long_says_nothing() -> None:
    late = [slow(step, 0.0, 4.8, seconds=5.0) if step % 10 == 5 else slow(step, 0.0, 0.0) for step in range(100)]
    assert events_of(LoadingMonitor(), late) == []


def test_who_waits_beside_the_others_or_very_little_is_not_spoken_of() -> None:
    beside = [
        make_step(
            step,
            ranks=(RankTimes(compute_s=0.5), RankTimes(data_s=0.1, compute_s=0.1, wait_s=0.3)),
            seconds=0.5,
        )
        for step in range(40)
    ]
    assert events_of(LoadingMonitor(), beside) == []
    tiny = [make_step(step, ranks=(RankTimes(data_s=0.001, compute_s=0.001),) * 2, seconds=0.002) for step in range(40)]
    assert events_of(LoadingMonitor(), tiny) == []


def test_a_search_is_told_by_its_end_with_what_was_measured() -> None:
    watch = LoadingMonitor()
    tried, more, chosen = (
        ReadSettings(0, 0, origin=SettingsOrigin.TRIAL),
        ReadSettings(4, 2, origin=SettingsOrigin.TRIAL),
        ReadSettings(4, 2, origin=SettingsOrigin.CHOSEN),
    )
    found = events_of(watch, [slow(step, 0.0, 0.3) for step in range(12)], [ReadSettings(), tried])
    found += events_of(watch, [slow(step, 0.0, 0.02) for step in range(12, 24)], [ReadSettings(), more])
    found += events_of(watch, [slow(step, 0.0, 0.02) for step in range(24, 40)], [ReadSettings(), chosen])
    assert [(kind, bool(message)) for _, kind, message in found] == [("workers", False), ("workers", True)]
    assert found[1][2] == (
        "rank 1 reads with 4 loader workers (prefetch 2), as measured, with all ranks searching together: 512.0 samples/s with "
        "no loader workers (waiting 60 % of a step); 512.0 samples/s with 4 loader workers (prefetch 2) (waiting 4 % of a step)"
    )


def test_loaders_that_take_turns_tell_nothing() -> None:
    watch = LoadingMonitor()
    for step in range(40):
        assert events_of(watch, [slow(step, 0.0, 0.0)], GIVEN if step % 2 else GIVEN[::-1]) == []


class Rows(Dataset[Any]):
    """The rank that reads slowly takes 3 ms for a sample, from a step on."""

    def __init__(self, slow: bool, since: int) -> None:
        self._slow, self._since = slow, since

    def __len__(self) -> int:
        return 16 * 200

    def __getitem__(self, index: int) -> Any:
        if self._slow and index >= self._since * 16:
            time.sleep(0.003)
        return torch.full((64,), index / 3200), torch.ones(1)


def train(folder: str, since: int, steps: int, settings: dict[str, Any]) -> int:
    """Ends after so many steps, or as soon as all ranks have chosen their workers."""
    run = evenload.init(project_dir=folder, seed=0, log_every_s=0.05, **settings)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    model, loader = run.prepare(model, DataLoader(Rows(run.rank == 1, since), batch_size=16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in loader:
        step.backward(lambda batch: functional.mse_loss(model(batch[0]), batch[1]))
        optimizer.step()
        optimizer.zero_grad()
        settled = step.batch.reading.origin is SettingsOrigin.CHOSEN
        if step.index == steps - 1 or ("num_workers" in settings and not run.any(not settled)):
            break
    run.close()
    return loader.loader.reading.num_workers


@pytest.mark.parametrize("since", [0, 25])
def test_a_loader_made_slow_on_one_rank_is_named_within_20_steps(tmp_path: Path, since: int) -> None:
    folder = tmp_path / "run"
    run_ranks(train, 2, str(folder), since, since + 24, {"balance": "even"})
    (event,) = [event for event in read_events(folder) if event.kind == "data_bound"]
    assert event.fields["rank"] == 1 and event.step is not None and since <= event.step < since + 20
    assert event.message.startswith("data-bound: ") and "of rank 1's step" in event.message
    text = format_run_summary(summarize_run(folder))
    assert re.search(r"bottleneck +.*data-bound: \d+ % of rank 1's step", text), text
    assert json.loads(json.dumps(event.fields["fraction"])) > 0.1


def test_auto_gives_the_slow_rank_workers_and_says_why(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    workers = run_ranks(train, 2, str(folder), 0, 199, {"balance": "even", "num_workers": "auto"}, timeout_s=100)
    assert workers[1] > 0, workers
    chosen = [event for event in read_events(folder) if event.kind == "workers" and event.fields["chosen"]]
    assert {event.fields["rank"] for event in chosen} == {0, 1}
    (of_one,) = [event for event in chosen if event.fields["rank"] == 1]
    assert of_one.fields["num_workers"] == workers[1] and "with no loader workers" in of_one.message


def test_replicas_of_one_process_tell_once() -> None:
    watch = LoadingMonitor()
    found = []
    for step, origin in enumerate([SettingsOrigin.TRIAL] * 12 + [SettingsOrigin.CHOSEN] * 4):
        found += watch.take(slow(step, 0.01, 0.01), [ReadSettings(origin=origin)] * 2)
    assert [one.fields["rank"] for one in found] == [0]
