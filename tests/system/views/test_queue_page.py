"""The page of a queue in a real browser: a daemon's devices and jobs, and a job that starts without a reload."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.cli.queue_box import SLOTS, Box, box_in, inside
from tests.system.views.browser import WHY_NOT, Browser
from tests.system.views.test_run_page import wait_for

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    with inside(tmp_path), box_in(tmp_path) as made:
        yield made


def test_the_page_of_a_queue_follows_its_jobs(box: Box, tmp_path: Path) -> None:
    go = tmp_path / "go"
    wait = f"until [ -e {go} ]; do sleep 0.05; done"
    holders = [box.submit("--name", f"holder-{index}", "--", "sh", "-c", wait) for index in range(SLOTS)]
    for holder in holders:
        box.wait(holder, "RUNNING")
    waiting = box.submit("--name", "patient", "--", "true")
    server = box.start("queue", "--web")
    browser = Browser(tmp_path / "profile")
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+/\S+/", line)
        assert url is not None, line
        browser.goto(url[0])
        text = browser.text()
        assert f"{SLOTS} of {SLOTS}" in text and "holder-0" in text and "patient" in text
        reason = box.job(waiting)["reason"]
        assert reason and reason[:40] in text
        browser.run("window.loadedOnce = true")
        browser.resize(400, 900)
        assert browser.run("return document.documentElement.scrollWidth") <= 400
        assert browser.run("return document.querySelectorAll('.rank title').length") == SLOTS
        go.touch()
        box.wait(waiting, "SUCCEEDED")
        wait_for(lambda: "History" in browser.text() and f"0 of {SLOTS}" in browser.text())
        assert "patient" in browser.run("return document.getElementById('history').innerText")
        assert browser.run("return window.loadedOnce === true")
        assert browser.errors() == []
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=30)
        assert (server.returncode, out.strip(), err) == (0, "", "")
    finally:
        browser.close()
        server.kill()
        server.communicate()
