import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.balance.values import ComputeDevice
from evenload.errors import ConfigError
from evenload.training.launch.devices import HostDevices, describe_workers, own_cores, parse_devices, plan_workers


def _host(num_gpus=0, num_cores=8, quota=None):
    gpus = tuple(ComputeDevice(f"GPU model {index}", "cuda", index, 2**34) for index in range(num_gpus))
    return HostDevices(gpus, ComputeDevice("CPU", "cpu", -1, 2**35, num_cores), tuple(range(num_cores)), quota)


@pytest.mark.parametrize(
    ("text", "num_gpus", "devices"),
    [
        ("auto", 0, ["cpu"]),
        ("auto", 2, ["cuda:0", "cuda:1"]),
        ("all", 0, ["cpu"]),
        ("all", 2, ["cuda:0", "cuda:1", "cpu"]),
        ("0,2", 3, ["cuda:0", "cuda:2"]),
        ("cuda:1", 2, ["cuda:1"]),
        ("0,0", 1, ["cuda:0", "cuda:0"]),
        ("cpu:3", 2, ["cpu"] * 3),
        ("cpu", 2, ["cpu"]),
        ("1,cpu:2", 2, ["cuda:1", "cpu", "cpu"]),
    ],
)
def test_devices(text, num_gpus, devices):
    assert [place.device for place in parse_devices(text, _host(num_gpus))] == devices


@pytest.mark.parametrize("text", ["3", "cpu:0", "cpu:9999", "cpu:x", "tpu", "", "0,", "cuda:9", "-1", "0:1"])
def test_unknown_devices_list_what_is_here(text):
    with pytest.raises(ConfigError, match=r"-d .*(GPU model 1.*cpu \(8 cores\)|no rank)"):
        parse_devices(text, _host(2))


@pytest.mark.parametrize(
    ("text", "num_gpus", "backend", "inner", "shown"),
    [
        ("cpu:2", 0, "gloo", ["", ""], ["gloo", "gloo"]),
        ("0,1", 2, "nccl", ["nccl", "nccl"], ["nccl", "nccl"]),
        ("0", 1, "nccl", ["nccl"], ["nccl"]),
        ("0,0", 1, "gloo", ["", ""], ["gloo", "gloo"]),
        ("all", 1, "gloo", ["nccl", ""], ["gloo", "gloo"]),
        ("all", 2, "gloo", ["nccl", "nccl", ""], ["nccl + gloo", "nccl", "gloo"]),
        ("cpu,1,0", 2, "gloo", ["", "nccl", "nccl"], ["gloo", "nccl + gloo", "nccl"]),
        ("0,0,1,2", 3, "gloo", ["", "", "nccl", "nccl"], ["gloo", "gloo", "nccl + gloo", "nccl"]),
        ("0+1,2", 3, "gloo", ["", "nccl"], ["gloo", "gloo"]),
    ],
)
def test_backend(text, num_gpus, backend, inner, shown):
    host = _host(num_gpus)
    workers = plan_workers(parse_devices(text, host), host)
    assert {worker.backend for worker in workers} == {backend}
    assert [worker.inner_backend for worker in workers] == inner
    assert [line.rpartition(", ")[2] for line in describe_workers(workers)] == shown


@given(num_gpus=st.integers(0, 4), num_cpu=st.integers(0, 6), num_cores=st.integers(1, 17))
def test_cores_are_disjoint_even_and_never_more_than_there_are(num_gpus, num_cpu, num_cores):
    host = _host(num_gpus, num_cores)
    items = [str(index) for index in range(num_gpus)] + [f"cpu:{num_cpu}"] * (num_cpu > 0)
    workers = plan_workers(parse_devices(",".join(items) or "auto", host), host)
    bound = [core for worker in workers for core in worker.cores]
    assert len(bound) == len(set(bound)) and set(bound) <= set(host.cores)
    assert all(worker.num_threads >= 1 for worker in workers)
    cpu_workers = [worker for worker in workers if worker.device == "cpu"]
    sizes = [len(worker.cores) for worker in cpu_workers]
    assert not sizes or max(sizes) - min(sizes) <= 1
    if num_cores >= len(workers):
        assert all(worker.cores and worker.num_threads == len(worker.cores) for worker in cpu_workers)
        assert sum(worker.num_threads for worker in workers) <= num_cores
        if num_gpus == 0:
            assert len(bound) == num_cores
    assert sum(own_cores(workers, host)) == pytest.approx(num_cores)


@pytest.mark.parametrize(
    ("num_gpus", "num_cpu", "num_cores", "left"),
    [
        (1, 1, 2, 1),
        (1, 1, 4, 2),
        (2, 1, 8, 4),
        (8, 1, 16, 8),
        (8, 1, 17, 16),
        (2, 1, 64, 8),
        (1, 2, 3, 1),
        (4, 0, 8, 8),
    ],
)
def test_cores_left_to_gpu_ranks(num_gpus, num_cpu, num_cores, left):
    host = _host(num_gpus, num_cores)
    text = ",".join([*map(str, range(num_gpus)), *["cpu"] * num_cpu])
    workers = plan_workers(parse_devices(text, host), host)
    assert num_cores - sum(len(worker.cores) for worker in workers) == left
    assert all(worker.num_threads == left // num_gpus for worker in workers if worker.device != "cpu")


def test_under_a_quota_nobody_is_bound():
    host = _host(num_cores=64, quota=4.0)
    workers = plan_workers(parse_devices("cpu:2", host), host)
    assert [(worker.cores, worker.num_threads) for worker in workers] == [((), 2)] * 2
    assert own_cores(workers, host) == (2.0, 2.0)


def test_more_ranks_than_cores_share_them():
    host = _host(num_cores=2)
    workers = plan_workers(parse_devices("cpu:3", host), host)
    assert all(worker.cores == () and worker.num_threads == 1 for worker in workers)
    assert own_cores(workers, host) == pytest.approx((2 / 3,) * 3)


def test_the_specs_say_who_is_who():
    host = _host(num_gpus=1, num_cores=4)
    workers = plan_workers(parse_devices("0,cpu", host), host, {"seed": 3}, mode="verify", options={"a": 1})
    assert [worker.rank for worker in workers] == [0, 1]
    assert workers[1].workers == ("worker-0", "worker-1") and workers[0].world_size == 2
    assert workers[0].device_names == ("GPU model 0", "CPU (cores 2-3)")
    assert workers[1].settings == {"seed": 3} and workers[1].mode == "verify" and workers[1].options == {"a": 1}
    assert describe_workers(workers) == [
        "rank 0: cuda:0 GPU model 0      2 threads, gloo",
        "rank 1: cpu    CPU (cores 2-3)  2 threads, gloo",
    ]
