from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from evenload.errors import ConfigError
from evenload.records.console import RunInfo, plain_line
from evenload.records.recorder import Recorder
from evenload.records.values import RankTimes, RunEvent
from evenload.views.run.panel import BusyBar, render_panel
from evenload.views.run.progress import RunProgress
from tests.paths import ROOT
from tests.unit.records.make import START_S, make_step


def make_facts(*devices: str, **fields: object) -> RunInfo:
    info = RunInfo()
    info.add(RunEvent("open", "", fields={"total_steps": 400, "devices": list(devices), **fields}))
    return info


def draw(window: list, info: RunInfo, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(render_panel(window, info, width))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_the_live_area_word_for_word() -> None:
    window = [make_step(index) for index in range(118, 120)]
    info = make_facts("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 3060")
    info.add(RunEvent("solo_speeds", "", fields={"speeds_per_s": [400, 140]}))
    for step in window:
        info.add(step)
    assert [line.replace("\N{NO-BREAK SPACE}", " ") for line in draw(window, info, 100)] == [
        "step 120/400  loss 0.3101  512.0 samples/s  efficiency 95 %  2:20 left",
        "rank 0  NVIDIA GeForce RTX 3090  share 171  █████████████████████████████░  busy 96 %   wait 4 %",
        "rank 1  NVIDIA GeForce RTX 3060   share 85  ███████████████████████░░░░░░░  busy 78 %  wait 22 %",
    ]


def test_the_bottleneck_stands_in_the_line_and_in_the_area() -> None:
    ranks = (RankTimes(compute_s=0.2, wait_s=0.3), RankTimes(data_s=0.205, compute_s=0.2, wait_s=0.095))
    window = [make_step(index, ranks=ranks) for index in range(4)]
    text = " ".join(draw(window, make_facts(), 100)).replace("\N{NO-BREAK SPACE}", " ")
    assert "data-bound: 41 % of rank 1's step" in text
    assert " | data-bound: 41 % of rank 1's step | rank 0: " in plain_line(window, make_facts())


@pytest.mark.parametrize("width", [40, 60, 72, 80, 200])
@pytest.mark.parametrize("num_ranks", [1, 2, 12, 100])
def test_the_area_fits_any_terminal_and_loses_no_figure(width: int, num_ranks: int) -> None:
    ranks = tuple(RankTimes(compute_s=0.4, wait_s=0.1) for _ in range(num_ranks))
    step = make_step(7, shares=(100,) * num_ranks, ranks=ranks)
    lines = draw([step], make_facts(*["A device with a long name, longer than that"] * num_ranks), width)
    assert all(len(line) <= width for line in lines)
    assert len(lines) <= 12 + 5
    text = " ".join(lines).replace("\N{NO-BREAK SPACE}", " ")
    for part in ("step 8/400", "loss 2.353", "512.0 samples/s", "busy 80 %"):
        assert part in text
    if width >= 60:
        assert "share 100" in text
        assert "wait 20 %" in text
        assert ("█" in text) and ("░" in text)
    assert ("88 more ranks" in text or "89 more ranks" in text) == (num_ranks == 100)


def test_the_bar_is_always_as_wide_as_its_room() -> None:
    console = Console(width=20, file=io.StringIO())
    for busy, wait in [(0.5, 0.25), (1.2, 0.5), (0, 0), (0.333, 0.666), (-1, 2)]:
        ((*segments,),) = console.render_lines(BusyBar(busy, wait), console.options.update(width=20))
        assert sum(len(segment.text) for segment in segments) == 20


def test_the_pipe_word_for_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenload.records.recorder.time.time", lambda: START_S)
    folder, stream = tmp_path / "not" / "yet", io.StringIO()
    with RunProgress(folder, stream, since_s=0.0) as progress:
        progress.poll()
        progress.print("a worker's words")
        recorder = Recorder(folder, total_steps=40)
        for index in range(40):
            recorder.step(make_step(index))
        progress.poll()
        recorder.event("rebalance", "rank 1 slowed 2.9x since step 12: share 128 -> 51 of 256")
        progress.poll()
        assert not progress.ended
        recorder.close()
    assert progress.ended
    ranks = "rank 0: share 171, busy 96 %, wait 4 % | rank 1: share 85, busy 78 %, wait 22 %"
    assert stream.getvalue().splitlines() == [
        "a worker's words",
        "step 1/40 | loss 4.000",  # no rate yet
        f"step 21/40 | loss 1.333 | 512.0 samples/s | busy 87 % | {ranks} | 0:10 left",
        "evenload: rank 1 slowed 2.9x since step 12: share 128 -> 51 of 256",
        f"step 40/40 | loss 0.8163 | 512.0 samples/s | busy 87 % | {ranks} | 0:00 left",
    ]


def test_an_earlier_session_is_not_shown_again(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.event("x", "from before")
    recorder.step(make_step(0))
    recorder.close()
    time.sleep(0.01)
    stream = io.StringIO()
    with RunProgress(tmp_path, stream) as progress:
        progress.poll()
        assert not progress.ended
        recorder = Recorder(tmp_path)
        recorder.event("x", "from now")
        recorder.step(make_step(1, time=time.time()))
        recorder.close()
    assert [line.split(" | ")[0] for line in stream.getvalue().splitlines()] == ["evenload: from now", "step 2"]


def test_the_folder_may_be_told_later(tmp_path: Path) -> None:
    stream = io.StringIO()
    progress = RunProgress(None, stream)
    progress.poll()
    recorder = Recorder(tmp_path)
    recorder.event("x", "hello")
    recorder.close()
    progress.follow(tmp_path)
    progress.poll()
    progress.follow(tmp_path)
    progress.close()
    progress.close()
    progress.poll()
    assert stream.getvalue() == "evenload: hello\n"


def test_records_of_another_version_are_an_error_and_close_still_works(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text('{"schema": 7}\n')
    progress = RunProgress(tmp_path, io.StringIO())
    with pytest.raises(ConfigError, match="schema 7"):
        progress.close()
    progress.close()


def test_what_workers_print_stands_above_the_live_area_once(tmp_path: Path) -> None:
    output = io.StringIO()
    console = Console(width=60, file=output, force_terminal=True, color_system=None)
    threads = set(threading.enumerate())
    recorder = Recorder(tmp_path, total_steps=3)
    with RunProgress(tmp_path, output, since_s=0.0, console=console) as progress:
        for index in range(3):
            recorder.step(make_step(index))
            progress.poll()
            time.sleep(0.11)
            progress.print(f"[bold]worker[/bold] {index} {'long ' * 20}\n")
        assert set(threading.enumerate()) == threads
        recorder.close()
    raw = output.getvalue()
    assert raw.count("\x1b[?25l") == 1  # the cursor is hidden once,
    assert raw.count("\x1b[?25h") == 1  # and shown again
    screen = replay(raw)
    assert [line for line in screen if "worker" in line] == [
        f"[bold]worker[/bold] {index} {'long ' * 20}".rstrip() for index in range(3)
    ]
    assert [line for line in screen if "step" in line] == [screen[3]]
    assert screen[3].startswith("step 3/3")
    assert len([line for line in screen if line.startswith("rank")]) == 2


def replay(raw: str) -> list[str]:
    """What a very wide terminal shows: knows carriage return, newline, erase line and cursor up."""
    screen, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", raw):
        if token == "\n":
            row, column = row + 1, 0
            if row == len(screen):
                screen.append("")
        elif token == "\r":
            column = 0
        elif token.endswith("A") and token.startswith("\x1b"):
            row -= int(token[2:-1] or 1)
        elif token == "\x1b[2K":
            screen[row] = ""
        elif not token.startswith("\x1b"):
            screen[row] = screen[row][:column].ljust(column) + token + screen[row][column + len(token) :]
            column += len(token)
    return [line.replace("\N{NO-BREAK SPACE}", " ").rstrip() for line in screen]


LAUNCHER = """
import sys, time
from pathlib import Path
from evenload.views.run.progress import RunProgress

with RunProgress(Path(sys.argv[1]), sys.stdout, since_s=0.0) as progress:
    deadline_s = time.monotonic() + 30
    while not progress.ended and time.monotonic() < deadline_s:
        progress.poll()
        time.sleep(0.01)
    progress.print("a last word")
"""


def test_a_launcher_on_a_real_terminal_follows_this_process(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "60", "LINES": "20"}
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path / "run")], cwd=ROOT, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    try:
        time.sleep(0.3)
        recorder = Recorder(tmp_path / "run", total_steps=5)
        recorder.event("x", "[hello] there")
        for index in range(5):
            recorder.step(make_step(index, time=time.time()))
            time.sleep(0.05)
        recorder.close()
        raw = b""
        while select.select([ours], [], [], 30)[0]:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # the other side has closed it
                break
            if not chunk:
                break
            raw += chunk
        assert launcher.wait(30) == 0
    finally:
        launcher.kill()
        launcher.wait(10)
        os.close(ours)
    screen = replay(re.sub(r"\x1b\[[0-9;]*m", "", raw.decode()))
    assert "evenload: [hello] there" in screen
    assert sum(line.startswith("step") for line in screen) == 1
    assert any(line.startswith("step 5/5  loss 2.857") for line in screen)
    assert any(re.match(r"rank 1 +share 85 +█+░+ +busy 78 % +wait 22 %", line) for line in screen)
    assert "a last word" in screen


def test_the_live_window_forgets_old_steps_and_other_arms(tmp_path: Path) -> None:
    output = io.StringIO()
    console = Console(width=60, file=output, force_terminal=True, color_system=None)
    recorder = Recorder(tmp_path)
    for index in range(20):
        recorder.step(make_step(index, arm="even", seconds=50.0, time=START_S + index))
    for index in range(20, 50):
        recorder.step(make_step(index, arm="mine", seconds=1.0 if index > 35 else 4.0, time=START_S + index))
    recorder.close()
    with RunProgress(tmp_path, output, since_s=0.0, console=console):
        pass
    assert [line for line in replay(output.getvalue()) if "step" in line] == [
        "mine  step 50  loss 0.6780  256.0 samples/s  busy 44 %"
    ]
