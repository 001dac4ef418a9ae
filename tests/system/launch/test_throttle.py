"""Speeds are measured, with margin and retries: other programs run on this machine too."""

import os
import time

import pytest

from evenload.errors import ConfigError, LaunchError, RankFailedError
from evenload.records.reader import read_steps
from evenload.testing import run_ranks
from evenload.testing.faults import set_throttle
from evenload.training.launch.environment import WorkerSpec, detect
from evenload.training.launch.throttle import (
    ComputeThrottle,
    CpuCgroups,
    ThrottleController,
    check_factors,
    find_cpu_group,
    parse_throttle,
    request_speeds,
)
from tests.system.launch.scripts import Started, cpu_groups


def _groups_work():
    try:
        CpuCgroups([0]).remove()
    except OSError:
        return False
    return True


needs_quota = pytest.mark.skipif(not _groups_work(), reason="control groups can't be written here")


def _delivered(window_s):
    """CPU seconds per second that a busy loop gets."""
    wall, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < window_s:
        pass
    return (time.process_time() - cpu) / (time.perf_counter() - wall)


def _delivered_near(speed, tries=6):
    """The delivered speed of the first window within 3 % of what is asked, or the highest: others may take the core."""
    got = 0.0
    for _ in range(tries):
        got = max(got, _delivered(1.0))
        if abs(got / speed - 1) <= 0.03:
            break
    return got


def _speeds_of_rank_1():
    if detect().rank == 0:
        time.sleep(0.0)
        return None
    speeds = [_delivered_near(0.5)]
    set_throttle([1.0, 0.25])
    speeds.append(_delivered_near(0.25))
    return speeds, detect().throttle


def _ask_in_vain():
    set_throttle([0.5])


@needs_quota
def test_a_quota_delivers_the_speed_and_changes_while_running():
    _, (speeds, throttle) = run_ranks(_speeds_of_rank_1, 2, throttle=[1.0, 0.5])
    assert throttle == {"factor": 0.5, "means": "quota"}
    for delivered, speed in zip(speeds, (0.5, 0.25), strict=True):
        assert 0.6 * speed <= delivered <= 1.03 * speed  # less where other programs have the core; never more
    assert not [path for path in cpu_groups() if f"evenload-{os.getpid()}" in path]


@pytest.mark.parametrize("speed", [0.5, 0.25])
def test_repeated_computation_pays_what_is_owed(tmp_path, speed):
    throttle = ThrottleController(tmp_path, [1.0, speed], [1.0, 1.0], ["cpu", "cpu"], use_quota=False)
    computing = ComputeThrottle(
        WorkerSpec(rank=1, local_rank=1, device="cpu", launch_dir=str(tmp_path), throttle=throttle.spec_of(1))
    )
    assert throttle.spec_of(1) == {"factor": speed, "means": "compute"} and computing.active
    computing.slow_down(0.01)
    for _ in range(5):
        cpu = time.process_time()
        ratio = computing.slow_down(0.3) / (0.3 * (1 / speed - 1))
        busy = time.process_time() - cpu
        if abs(ratio - 1) <= 0.03:
            break
    assert ratio == pytest.approx(1, abs=0.03)
    assert busy > 0.05, "it must compute, not sleep"
    throttle.close()


def test_the_burner_follows_a_change_and_the_unthrottled_pay_nothing(tmp_path):
    throttle = ThrottleController(tmp_path, [1.0, 0.5], [1.0, 1.0], ["cpu", "cpu"], use_quota=False)
    where = {"device": "cpu", "launch_dir": str(tmp_path)}
    specs = [WorkerSpec(rank=r, local_rank=r, **where, throttle=throttle.spec_of(r)) for r in (0, 1)]
    computing = [ComputeThrottle(spec) for spec in specs]
    assert computing[0].slow_down(5.0) == 0.0 and computing[1].slow_down(0.05) >= 0.05
    with pytest.raises(LaunchError, match=r"did not apply the speeds \[0.5, 1.0\]"):
        request_speeds(tmp_path, [0.5, 1.0], timeout_s=0.05)
    throttle.poll()
    assert computing[0].slow_down(0.05) >= 0.05 and computing[1].slow_down(5.0) == 0.0
    assert ComputeThrottle(WorkerSpec()).slow_down(5.0) == 0.0


@needs_quota
def test_a_launch_under_a_quota_leaves_no_group_behind_also_after_an_error(tmp_path):
    body = """
import re
place = Path("/proc/self/cgroup").read_text()
print(f"rank {spec.rank}", spec.throttle, place.count(f"/rank-{spec.rank}"))
print("group of", re.search("evenload-([0-9]+)", place)[1], "found")
import subprocess
print("child", subprocess.run(["cat", "/proc/self/cgroup"], capture_output=True, text=True).stdout.count("/rank-"))
from evenload.testing.faults import set_throttle
if spec.rank == 1:
    began = time.monotonic()
    set_throttle([0.9, 0.8])
    print("applied", time.monotonic() - began < 1)
    raise ValueError("broken")
time.sleep(1000)
"""
    with Started(tmp_path, body, "-d", "cpu:2", "--throttle", "1,0.5") as started:
        supervisor = started.process.pid
        code, stdout, stderr = started.end(100)
    assert code == 1 and "ValueError: broken" in stderr
    assert "rank 1 {'factor': 0.5, 'means': 'quota'} 1\n" in stdout and "child 1\n" in stdout
    assert "applied True" in stdout and "throttled to 0.5 of its speed" in stdout
    assert f"group of {supervisor} found" in stdout
    assert not [path for path in cpu_groups() if f"evenload-{supervisor}" in path]


def test_ranks_that_share_cores_get_their_part_of_them(tmp_path):
    try:
        above, version = find_cpu_group()
        throttle = ThrottleController(tmp_path, [1.0, 0.5], [2 / 3, 2 / 3], ["cpu", "cpu"])
    except OSError:
        pytest.skip("no control groups here")
    if throttle.spec_of(0)["means"] != "quota" or version != 1:
        throttle.close()
        pytest.skip("no quota of version 1 here")
    (folder,) = above.glob(f"evenload-{os.getpid()}*")
    quotas = [int((folder / f"rank-{rank}" / "cpu.cfs_quota_us").read_text()) for rank in range(2)]
    periods = [int((folder / f"rank-{rank}" / "cpu.cfs_period_us").read_text()) for rank in range(2)]
    throttle.close()
    assert quotas == [3333, 1667] and periods == [5000, 5000] and not folder.exists()


@needs_quota
def test_the_groups_of_a_dead_supervisor_are_swept():
    above, _ = find_cpu_group()
    stale = above / "evenload-4194999"
    (stale / "rank-0").mkdir(parents=True)
    CpuCgroups([0]).remove()
    assert not stale.exists()


def test_groups_are_found_by_what_the_system_says(tmp_path):
    own = tmp_path / "proc/self"
    own.mkdir(parents=True)
    (own / "cgroup").write_text("5:cpu,cpuacct:/box/inner\n0::/user\n")
    (own / "mountinfo").write_text("31 1 0:1 /box /sys/cpu rw - cgroup cgroup rw,cpu,cpuacct\n")
    assert [str(part) for part in find_cpu_group(tmp_path)] == [f"{tmp_path}/sys/cpu/inner", "1"]
    unified = tmp_path / "unified" / "user"
    unified.mkdir(parents=True)
    (own / "mountinfo").write_text("31 1 0:1 / /unified rw - cgroup2 cgroup2 rw\n")
    with pytest.raises(FileNotFoundError):
        find_cpu_group(tmp_path)
    (unified / "cgroup.subtree_control").write_text("memory cpu\n")
    assert find_cpu_group(tmp_path) == (unified, 2)


def test_wrong_speeds(tmp_path):
    assert parse_throttle("1,0.5") == (1.0, 0.5)
    for text in ("", "1,", "fast"):
        with pytest.raises(ConfigError, match="expected one speed for each rank"):
            parse_throttle(text)
    for factors in ([0.0], [1.1], [-1.0], [float("nan")]):
        with pytest.raises(ConfigError, match="more than 0 and at most 1"):
            check_factors(factors, 1)
    with pytest.raises(ConfigError, match="needs launch_dir"):
        set_throttle([1.0])
    with pytest.raises(ConfigError, match="without `--throttle`"):
        set_throttle([1.0], launch_dir=tmp_path)
    with pytest.raises(RankFailedError, match="without `--throttle`"):
        run_ranks(_ask_in_vain, 1)
    with pytest.raises(ConfigError, match="2 speeds for 1 ranks"):
        run_ranks(_ask_in_vain, 1, throttle=[1, 0.5])


UNEQUAL = """
import time, torch, evenload
run = evenload.init(project_dir="run", log_every_s=1000)
model, loader = run.prepare(torch.nn.Linear(1, 1), torch.utils.data.DataLoader(torch.ones(32 * 700, 1), batch_size=32))

sizes = []
def loss_fn(batch):
    sizes.append(len(batch))
    until = time.thread_time() + 0.0015 * len(batch)  # what a throttled rank takes twice as long for
    while time.thread_time() < until:
        pass
    return model(batch).square().mean()

for step in loader:
    step.backward(loss_fn)
    model.zero_grad()
    if step.index % 20 == 19 and run.any(sizes[-1] > 18):
        break
"""


@needs_quota
def test_shares_follow_a_quota_although_it_makes_its_rank_wait_for_its_core(tmp_path):
    with Started(tmp_path, UNEQUAL, "-d", "cpu:2", "--throttle", "1,0.5", initialised=False) as run:
        code, _, stderr = run.end(90)
    assert code == 0, stderr
    last = [record.shares for record in read_steps(tmp_path / "run")][-1]
    assert last[0] > 18 > 14 > last[1], last
