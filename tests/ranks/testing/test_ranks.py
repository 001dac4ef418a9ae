import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from evenload.errors import ConfigError, RankFailedError
from evenload.testing import run_ranks
from evenload.training.launch.environment import detect


def _sum_over_ranks(extra):
    spec = detect()
    host, port = spec.store.split(":")
    store = dist.TCPStore(host, int(port), is_master=False)
    dist.init_process_group("gloo", store=store, rank=spec.rank, world_size=spec.world_size)
    value = torch.tensor([spec.rank + extra])
    dist.all_reduce(value)
    return spec.rank, value, torch.get_num_threads(), os.getsid(0) == os.getpid()


def _settings():
    spec = detect()
    return spec.settings["seed"], spec.throttle, spec.origin


def _raise_on(rank):
    spec = detect()
    host, port = spec.store.split(":")
    dist.init_process_group("gloo", store=dist.TCPStore(host, int(port)), rank=spec.rank, world_size=spec.world_size)
    if spec.rank == rank:
        raise ValueError(f"broken on {rank}")
    dist.all_reduce(torch.zeros(1))


def _kill_on(rank):
    if detect().rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _hang_here(folder):
    child = subprocess.Popen(["sleep", "1000"])
    Path(folder, str(detect().rank)).write_text(str(child.pid))
    time.sleep(1000)


def _unpicklable():
    return threading.Lock()


def _where():
    return str(Path.cwd()), os.environ.get("SEEN_BY_RANKS")


def test_results_come_back_by_rank_and_ranks_talk():
    results = run_ranks(_sum_over_ranks, 3, 10)
    assert [rank for rank, *_ in results] == [0, 1, 2]
    assert all(value.item() == 33 and threads == 1 and own_session for _, value, threads, own_session in results)


def test_fields_of_the_spec_can_be_set_for_all_or_by_rank():
    results = run_ranks(_settings, 2, settings={"seed": 7}, throttle=lambda rank: {"rank": rank})
    assert results == [(7, {"rank": 0}, "evenload"), (7, {"rank": 1}, "evenload")]


def test_ranks_see_the_callers_folder_and_variables(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEEN_BY_RANKS", "yes")
    assert run_ranks(_where, 1) == [(str(tmp_path), "yes")]


@pytest.mark.parametrize("rank", [0, 2])
def test_the_rank_that_raised_is_named_with_its_traceback(rank):
    with pytest.raises(RankFailedError, match=rf"rank {rank} of 3 failed: ValueError: broken on {rank}") as caught:
        run_ranks(_raise_on, 3, rank)
    assert "in _raise_on" in str(caught.value)


def test_a_killed_rank_is_named_with_its_signal():
    with pytest.raises(RankFailedError, match="rank 1 of 2 failed: the process ended with SIGKILL"):
        run_ranks(_kill_on, 2, 1)


def test_at_the_timeout_everything_is_killed_and_the_place_is_shown(tmp_path):
    with pytest.raises(RankFailedError, match="did not end in 3 s") as caught:
        run_ranks(_hang_here, 2, str(tmp_path), timeout_s=3)
    assert "in _hang_here" in str(caught.value)
    children = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    gone = time.monotonic() + 5
    while living := [pid for pid in children if psutil.pid_exists(pid)]:
        assert time.monotonic() < gone, f"{living} live on"
        time.sleep(0.02)


def test_wrong_calls():
    with pytest.raises(ConfigError, match="define it at the top of a module"):
        run_ranks(lambda: None, 1)
    with pytest.raises(ConfigError, match="WorkerSpec has no such field"):
        run_ranks(_where, 1, colour="red")
    with pytest.raises(ConfigError, match="at least 1"):
        run_ranks(_where, 0)
    with pytest.raises(RankFailedError, match=r"cannot pickle '_thread\.lock'"):
        run_ranks(_unpicklable, 1)
