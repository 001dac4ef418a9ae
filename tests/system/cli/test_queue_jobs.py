"""The queue's commands end to end: submitted, run, watched, stopped, told; with a real daemon and real programs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from evenload.records.recorder import Recorder
from tests.system.cli.queue_box import COUNTING, SLOTS, Box, box_in, inside, until
from tests.unit.records.make import make_step

ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with box_in(tmp_path_factory.mktemp("box")) as made:
        yield made


@pytest.fixture(autouse=True)
def here(tmp_path: Path) -> Iterator[Path]:
    """Each test in a folder of its own, with the program that counts."""
    (tmp_path / "count.py").write_text(COUNTING)
    with inside(tmp_path):
        yield tmp_path


@pytest.fixture
def full(box: Box, here: Path) -> Iterator[Path]:
    """All devices are taken until the file that this gives is there."""
    go = here / "go"
    holders = [
        box.submit("--name", "holder", "--", "sh", "-c", f"until [ -e {go} ]; do sleep 0.05; done")
        for _ in range(SLOTS)
    ]
    for holder in holders:
        box.wait(holder, "RUNNING")
    yield go
    go.touch()
    for holder in holders:
        box.wait(holder, *ENDED)


def test_a_job_runs_and_is_told_everywhere(box: Box, here: Path) -> None:
    result = box.run(
        "submit", "--name", "first", "--env", "GREETING=hello", "--wait", "--", "sh", "-c", "echo $GREETING $PWD"
    )
    assert result.code == 0, result
    number = result.out.split()[1]
    assert result.out.startswith(f"job {number} (first) queued")
    assert (
        "no snapshot" in result.out
        and "not under git" in result.out
        and f"evenload logs --queue {box.queue} -f {number}" in result.out
    )
    assert f"job {number} succeeded" in result.err
    assert box.run("logs", "first").out == f"hello {here}\n"
    listed = box.run("ps", "--all")
    assert [line for line in listed.out.splitlines() if line.startswith(f"{number} ") and "succeeded" in line], listed
    rows = json.loads(box.run("ps", "--json", "--all", "--state", "succeeded").out)["jobs"]
    assert number in [row["id"] for row in rows]
    shown = box.run("show", "first").out
    assert f"(evenload logs --queue {box.queue} {number})" in shown
    assert f"job {number} (first) of " in shown and "succeeded" in shown and "device-hours" in shown
    assert "sh -c 'echo $GREETING $PWD'" in shown and str(here) in shown
    table = json.loads(box.run("show", "--json", number).out)
    assert table["job"]["state"] == "SUCCEEDED" and "environment" not in table["program"]
    assert len(table["attempts"]) == 1 and table["device_hours"] > 0


def test_the_exit_code_is_that_of_the_job(box: Box) -> None:
    result = box.run("submit", "--wait", "--", "sh", "-c", "echo broken >&2; exit 7")
    assert result.code == 7 and "exit code 7" in result.err
    number = result.out.split()[1]
    assert box.run("logs", number).out == "broken\n"


def test_a_job_file_and_further_words(box: Box, here: Path) -> None:
    (here / "sub").mkdir()
    (here / "sub" / "job.toml").write_text('command = "echo file"\nfolder = "."\nname = "of-file"\n')
    result = box.run("submit", "sub/job.toml", "--wait", "--env", "A=1", "--", "more words")
    assert result.code == 0, result
    assert box.run("logs", "of-file").out == "file more words\n"


def test_a_waiting_job_keeps_what_it_was_submitted_with(box: Box, here: Path, full: Path) -> None:
    (here / "say.sh").write_text("echo first > runs/out; cat say.sh; echo made > beside\n")
    subprocess.run(["git", "init", "-q", "."], check=True, timeout=30)
    result = box.run("submit", "--name", "kept", "--", "sh", "say.sh")
    assert result.code == 0 and "snapshot: 2 files" in result.out and "linked to the originals: runs" in result.out
    number = result.out.split()[1]
    second = box.run("submit", "--no-snapshot", "--name", "direct", "--", "sh", "say.sh")
    assert "queued, position 2 of the waiting jobs" in second.out and "snapshot" not in second.out
    (here / "say.sh").write_text("echo second\n")
    waiting = box.job(number)
    assert waiting["state"] == "PENDING" and waiting["reason"]
    listed = box.run("ps").out
    assert "waiting, in the order of the line" in listed and waiting["reason"][:20] in listed
    assert "(holder)" in listed, "who holds the devices"
    full.touch()
    box.wait(number, *ENDED)
    assert box.log(number).startswith("echo first > runs/out"), box.log(number)
    assert (here / "runs" / "out").read_text() == "first\n", "outputs are at home"
    assert "files the job created there: beside" in box.run("show", "kept").out
    direct = box.run("show", "--json", "direct")
    box.wait(json.loads(direct.out)["job"]["id"], *ENDED)
    assert box.run("logs", "direct").out == "second\n"
    assert "removed " in box.run("ps", "--clean").out
    assert not list((box.queue / "snapshots" / "work").glob("2*"))


def test_an_array_is_one_thing(box: Box) -> None:
    result = box.run(
        "submit", "--name", "sweep", "--array", "0-3%1", "--", "sh", "-c", "echo {index} $EVENLOAD_ARRAY_INDEX"
    )
    assert "an array of 4" in result.out, result
    first = int(result.out.split()[1].split("-")[0])
    for number in range(first, first + 4):
        box.wait(str(number), "SUCCEEDED")
        assert box.log(str(number)) == f"{number - first} {number - first}\n"
    told = box.run("logs", "sweep")
    assert told.code == 2 and f"is an array of 4 jobs: name one of them, {first} to {first + 3}" in told.err
    shown = box.run("show", "sweep").out
    assert shown.count("command") == 4 and f"of array {first}" in shown


def test_after_another_job(box: Box) -> None:
    bad = box.submit("--name", "bad", "--", "sh", "-c", "sleep 0.3; exit 3")
    good = box.submit("--after", "bad:failed", "--", "echo", "then")
    never = box.submit("--after", bad, "--", "echo", "never")
    assert box.wait(good, *ENDED)["state"] == "SUCCEEDED"
    assert box.wait(never, *ENDED)["state"] == "CANCELLED"
    assert bad in box.job(never)["reason"]
    again = box.run("submit", "--after", bad, "--", "echo", "never")
    assert again.code == 0 and f"and cancelled: it was to start after job {bad}, which is FAILED" in again.out, again


def test_whom_to_tell(box: Box, here: Path) -> None:
    box.submit("--name", "told", "--notify", "command:sh -c 'cat > note'", "--", "false")
    until(lambda: (here / "note").exists() and bool((here / "note").read_text()), lambda: "the note")
    message = json.loads((here / "note").read_text())
    assert (message["name"], message["state"]) == ("told", "FAILED") and "exit code 1" in message["reason"]


def test_cancelled_it_saves_and_again_it_ends_at_once(box: Box, here: Path) -> None:
    number = box.submit("--name", "saver", "--", sys.executable, "count.py", "state", "100000")
    until(lambda: "step 3" in box.log(number), lambda: f"steps: {box.log(number)}")
    assert "asked to save and stop" in box.run("cancel", "saver").out
    ended = box.wait(number, *ENDED)
    assert ended["state"] == "CANCELLED" and (here / "state").exists()
    for at_once in ([], ["--now"]):
        stubborn = box.submit("--", "sh", "-c", "trap '' TERM INT; echo up; while :; do sleep 0.1; done")
        until(lambda job=stubborn: "up" in box.log(job), lambda: "the stubborn one")
        box.run("cancel", stubborn)
        assert "ending now" in box.run("cancel", *at_once, stubborn).out
        assert box.wait(stubborn, *ENDED)["state"] == "CANCELLED"
    again = box.run("cancel", stubborn, number)
    assert again.code == 2 and "ended already" in again.err


def test_held_released_and_changed(box: Box, full: Path) -> None:
    number = box.submit("--name", "patient", "--", "echo", "at last")
    assert f"job {number}: held" in box.run("change", number, "--hold").out
    assert box.job(number)["is_held"] and "holds it back" in box.run("ps").out
    result = box.run("change", "patient", "--release", "--priority", "-2", "--time", ":5m", "--devices", "1:2")
    assert result.out == f"job {number}: released priority, time, devices changed\n".replace("released ", "released, ")
    row = box.job(number)
    assert not row["is_held"] and row["priority"] == -2 and row["max_devices"] == 2
    assert "hard limit 5m" in box.run("show", number).out
    full.touch()
    box.wait(number, "SUCCEEDED")


def test_logs_follow_to_the_end(box: Box) -> None:
    number = box.submit("--", "sh", "-c", "for i in 1 2 3 4 5; do echo line $i; sleep 0.1; done")
    followed = box.run("logs", "-f", number)
    assert followed.code == 0 and followed.out == "".join(f"line {i}\n" for i in range(1, 6))
    assert box.run("logs", "-n", "2", number).out == "line 4\nline 5\n"
    assert box.run("logs", "-n", "0", number).out == ""


def test_progress_and_devices_are_in_the_list(box: Box) -> None:
    number = box.submit("--", sys.executable, "count.py", "state", "100000")

    def row() -> dict[str, object]:
        rows = json.loads(box.run("ps", "--json").out)["jobs"]
        found: dict[str, object] = next(row for row in rows if row["id"] == number)
        return found

    until(lambda: bool(row()["done"]) and bool(row()["rate_per_s"]), lambda: f"progress: {row()}")
    found = json.loads(box.run("ps", "--json").out)
    assert found["from_daemon"] and [d for d in found["devices"] if d["job"] == number]
    plain = box.run("ps", "--state", "running").out
    assert "/100000" in plain and "/s" in plain and f"of {SLOTS} devices busy" in plain
    box.run("cancel", "--now", number)
    box.wait(number, "CANCELLED")


def test_a_preempted_job_goes_on_and_its_story_tells(box: Box) -> None:
    low = box.submit(
        "--name", "low", "-d", "2", "--priority", "-1", "--", sys.executable, "count.py", "state", "100000"
    )
    until(lambda: box.can_be_preempted(low), lambda: f"the queue to learn that it saves: {box.job(low)}")
    quick = box.submit("--", "true")
    box.wait(quick, "SUCCEEDED")
    until(lambda: box.job(low)["attempt"] == 2 and box.job(low)["state"] == "RUNNING", lambda: f"{box.job(low)}")
    until(lambda: "attempt 2 on" in box.log(low) and "step" in box.log(low).rpartition("attempt 2")[2], lambda: "steps")
    shown = box.run("show", "low").out
    assert "saved and stopped" in shown and "  running" in shown, shown
    assert "lost work  0 steps by 0 of 1 stops" in shown
    assert box.run("cancel", "--now", low).code == 0
    box.wait(low, "CANCELLED")


def test_the_story_has_that_of_its_run(box: Box, here: Path) -> None:
    command = "until [ -e ready ]; do sleep 0.05; done; mkdir -p runs && cp -r prepared runs/gpt"
    number = box.submit("--name", "trainer", "--", "sh", "-c", command)
    box.wait(number, "RUNNING")
    recorder = Recorder(here / "prepared", total_steps=3)
    for index in range(3):
        recorder.step(replace(make_step(index), time=time.time()))
    recorder.close()
    (here / "ready").touch()
    box.wait(number, "SUCCEEDED")
    shown = box.run("show", "trainer").out
    assert f"{here / 'runs' / 'gpt'} (evenload show " in shown and "runs/gpt: 3 steps" in shown, shown


def test_it_can_be_watched(box: Box) -> None:
    watching = box.start("ps", "--watch")
    try:
        assert watching.stdout is not None
        assert "queue " in watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        assert watching.wait(timeout=30) == 0
    finally:
        watching.kill()
        watching.communicate()


def test_settings_limits_and_reservations(box: Box) -> None:
    assert box.run("queue", "set", "min_run_s=60").out == "min_run_s = 60.0\n"
    assert "max_devices 1" in box.run("queue", "limit", "bob", "max_devices=1").out
    device = json.loads(box.run("ps", "--json").out)["devices"][0]["id"]
    name = json.loads(box.run("queue", "reserve", device, "2h", "ann", "--json").out)["reservation"]["id"]
    assert "reserved for ann until" in box.run("ps").out
    shown = box.run("queue").out
    assert "min_run_s" in shown and "bob" in shown and name in shown
    assert box.run("queue", "release", name).code == 0
    assert "reserved" not in box.run("ps").out


def test_a_list_for_programs_loads_little(box: Box) -> None:
    code = (
        "import sys; from evenload.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "print(sorted({'rich', 'numpy', 'torch', 'psutil'} & sys.modules.keys()), file=sys.stderr)"
    )
    for more in (["--json"], ["--all"], []):
        words = [sys.executable, "-c", code, "ps", "--queue", str(box.queue), *more]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        assert done.stderr == "[]\n", (more, done.stderr)


def test_without_its_daemon_the_queue_is_read_and_submit_starts_it_again(box: Box) -> None:
    number = box.submit("--", "true")
    box.wait(number, "SUCCEEDED")
    box.close()
    told = box.run("ps")
    assert told.code == 0 and "read from the queue's file" in told.out and number in told.out
    assert f"job {number} of" in box.run("show", number).out
    refused = box.run("cancel", number)
    assert refused.code == 2 and "no daemon runs" in refused.err
    assert box.run("submit", "--wait", "--", "true").code == 0
