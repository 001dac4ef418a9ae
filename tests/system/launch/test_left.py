"""The end of a worker that has left: while it works, whatever way, it goes on."""

import subprocess
import sys
import time

import pytest

SCRIPT = """
import os, sys, threading, time
from types import SimpleNamespace
from evenload.training.launch import left
left.THREADS_S, left.IDLE_S, left._EVERY_S, left._LEAST_PART = 0.4, 0.8, 0.05, 10.0
began_s = time.monotonic()
works = lambda: time.monotonic() - began_s < 2.0
if sys.argv[1] == "disk":
    left.stat_of = lambda thread: SimpleNamespace(state="D" if works() and thread != os.getpid() else "S")
num_bytes = (lambda: int((time.monotonic() - began_s) * 1e6) if works() else 2_000_000) if sys.argv[1] == "sends" else int
if sys.argv[1] == "broken":
    sys.stderr = None
left.watch_end(num_bytes)
threading.Thread(target=time.sleep, args=(1.5 if sys.argv[1] in ("disk", "sends") else 30,)).start()
left.join_threads()
print("joined", flush=True)
time.sleep(30)
"""


@pytest.mark.parametrize("how", ["disk", "sends", "idle", "broken"])
def test_it_ends_once_it_does_not_work(how):
    began_s = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, timeout=20, check=True)
    assert "a rank that has left ends: it has not worked for 0.8 s" in ended.stderr and "Traceback" not in ended.stderr
    assert ended.stdout == "joined\n"
    if how in ("disk", "sends"):
        assert time.monotonic() - began_s > 2.5
