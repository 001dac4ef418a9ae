"""The page of a run in a real browser: whole, small, without console errors; live without a reload."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evenload.records.recorder import Recorder
from tests.system.views.browser import WHY_NOT, Browser
from tests.unit.records.make import make_step
from tests.unit.views.make_run import FAULTS, write_run
from tests.warm import run as run_command

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


def long_run(folder: Path, num_steps: int) -> None:
    """A long run, its lines copied from one: only numbers and times differ."""
    write_run(folder, 2, (2.0, 1.0))
    path = folder / "steps.jsonl"
    header, line = path.read_text().splitlines()[:2]
    line = re.sub(r'"step":\d+', '"step":%d', line, count=1)
    line = re.sub(r'"loss":[\d.]+', '"loss":%.4f', line, count=1)
    line = re.sub(r'"time":[\d.]+', '"time":%.1f', line, count=1)
    with path.open("w") as file:
        file.write(header + "\n")
        for step in range(num_steps):
            file.write(line % (step, 3 / (1 + step / 5000), 1_790_000_003 + 0.5 * step) + "\n")


@pytest.mark.timeout(300)
def test_the_page_in_a_browser(tmp_path: Path, browser: Browser) -> None:
    runs = {"faults": 600, "long": 100_000}
    write_run(tmp_path / "faults", runs["faults"])
    long_run(tmp_path / "long", runs["long"])
    for name, num_steps in runs.items():
        page = tmp_path / f"{name}.html"
        done = run_command(
            ["-m", "evenload.cli.main", "show", str(tmp_path / name), "--html", str(page)], tmp_path, 250
        )
        assert done.returncode == 0, done.stderr
        assert str(page) in done.stdout
        assert page.stat().st_size <= 1_000_000
        browser.goto(page.as_uri())
        text = browser.text()
        assert browser.errors() == []
        assert f"step {num_steps}/{num_steps if name == 'faults' else 2}" in text.replace(",", "")
        for width in (1280, 400):
            browser.resize(width, 900)
            scrolled = browser.run("return document.documentElement.scrollWidth")
            assert scrolled <= width, f"{name} is cut off at {width} pixels"
    browser.goto((tmp_path / "faults.html").as_uri())
    text = browser.text()
    for part, _, message, fields in FAULTS:
        assert message.format(step=round(part * 600)) in text
        assert str(fields.get("reason", "")) in text
    assert zoomed(browser) == [0.25, 0.75]


def zoomed(browser: Browser) -> list[float]:
    """Drag over the middle half of a plot; return the part of the axis that the plots show then."""
    browser.resize(1280, 900)
    box = browser.run(
        "const b = document.querySelector('.tall .box, .plots .box'); b.scrollIntoView({block: 'center'});"
        "const r = b.getBoundingClientRect(); return [r.left, r.top + r.height / 2, r.width]"
    )
    left, y, width = box
    for kind, part in (("mousePressed", 0.25), ("mouseMoved", 0.5), ("mouseReleased", 0.75)):
        browser.devtools("Input.dispatchMouseEvent", type=kind, x=left + part * width, y=y, button="left", clickCount=1)
        if kind == "mouseMoved":
            assert "samples" in browser.run("return document.getElementById('tip').innerText") or browser.run(
                "return document.getElementById('tip').innerText"
            )
    assert browser.errors() == []
    return [round(part, 2) for part in browser.run("return view")]


def test_a_live_page_follows_the_run_without_a_reload(tmp_path: Path, browser: Browser) -> None:
    folder = tmp_path / "run"
    recorder = Recorder(folder, total_steps=400)
    recorder.step(make_step(0, time=time.time()))
    command = [sys.executable, "-m", "evenload.cli.main", "show", str(folder), "--web"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+/\S+/", line)
        assert url is not None, line
        browser.goto(url[0])
        assert "step 1/400" in browser.text()
        browser.run("window.loadedOnce = true")
        recorder.step(make_step(1, time=time.time()))
        recorder.event("lost", "rank 1 on box2 is gone: killed by signal 9", step=1, seconds=1.4, rank=1)
        wait_for(lambda: "step 2/400" in browser.text() and "killed by signal 9" in browser.text())
        recorder.close()
        wait_for(lambda: "ended" in browser.text())
        assert browser.run("return window.loadedOnce === true"), "the page was loaded again"
        assert browser.errors() == []
        port = url[0].split(":")[2].split("/")[0]
        taken = run_command(["-m", "evenload.cli.main", "show", str(folder), "--web", "--port", port], tmp_path, 60)
        assert taken.returncode == 2
        assert f"port {port}" in taken.stderr and "give another --port" in taken.stderr
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=30)
        assert (server.returncode, out.strip(), err) == (0, "", "")
        wait_for(lambda: "no connection" in browser.text())


def wait_for(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
