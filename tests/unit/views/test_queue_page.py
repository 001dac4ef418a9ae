"""The page of a queue, from its file: devices over time by user, waiting jobs with reasons, history."""

from __future__ import annotations

import html
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenload.scheduler.core import events
from evenload.scheduler.core.values import Device, JobSpec
from evenload.scheduler.store.writer import QueueStore
from evenload.views.page import document
from evenload.views.queue.page import QueuePage
from evenload.views.queue.text import head
from evenload.views.queue.view import JobFilter, view_of


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    now_s = time.time()
    with QueueStore(tmp_path, holder="a test") as store:
        for index in range(2):
            store.record(events.DeviceAdded(now_s - 9000, Device(f"gpu{index}", "here")))
        for number, user in enumerate(("ann", "ben", "<eve>"), 1):
            store.record(events.Submitted(now_s - 8000, str(number), JobSpec(user, name=f"train-{number}")))
        store.record(events.Placed(now_s - 7200, "1", ("gpu0",), 1, "first in line"))
        store.record(events.JobStarted(now_s - 7199, "1"))
        store.record(events.Ended(now_s - 3600, "1", False, "exit code 3"))
        store.record(events.Placed(now_s - 1800, "2", ("gpu0", "gpu1"), 1, "it fits"))
        store.record(events.JobStarted(now_s - 1799, "2"))
        store.commit()
    yield tmp_path


def test_the_page_shows_devices_users_waiting_jobs_and_history(folder: Path) -> None:
    page = QueuePage(folder)
    sections = page.update()
    assert sections is not None
    plots, users, history = sections["plots"], sections["users"], sections["history"]
    assert plots.count('class="plot rank') == 2
    assert len(re.findall("<title>job 1 train-1 of ann", plots)) == 1
    assert len(re.findall("<title>job 2 train-2 of ben", plots)) == 2
    shown = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", users)))
    assert "ben 1 0 1.00" in shown and "ann 0 0 1.00" in shown and "<eve> 0 1 0.00" in shown
    assert "train-1" in history and "exit code 3" in history and ">failed<" in history and "train-2" not in history
    assert "train-3" in sections["waiting"]
    assert "<eve>" not in "".join(sections.values())
    assert "the daemon is not running" in sections["notes"]
    assert len(document(page.title, sections, live=True)) < 100_000


def test_a_user_without_jobs_is_named(folder: Path) -> None:
    """Others have jobs: "no jobs yet" would be a lie."""
    texts = {user: head(view_of(folder, JobFilter(user))).rpartition(" · ")[2] for user in (None, "ann", "zoe")}
    assert texts == {
        None: "1 running, 1 waiting, 1 failed",
        "ann": "1 failed of user ann",
        "zoe": "no jobs of user zoe yet",
    }


def test_a_queue_that_is_gone_leaves_its_last_page_with_a_note(folder: Path) -> None:
    page = QueuePage(folder)
    assert page.update() is not None
    (folder / "queue.sqlite").unlink()
    sections = page.update()
    assert sections is not None
    assert "there is no queue" in sections["notes"] and "train-3" in sections["waiting"]
