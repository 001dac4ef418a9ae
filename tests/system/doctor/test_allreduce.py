"""The trial all-reduce: real ranks, real failures."""

from __future__ import annotations

import pytest

from evenload import hardware
from evenload.doctor.checks.allreduce import AllReduceResult, allreduce, evaluate_allreduce
from evenload.doctor.finding import Options
from tests.system.doctor.conftest import environment, in_child


def test_a_rank_that_never_comes_is_not_waited_for() -> None:
    code = (
        "import json, time, dataclasses; from evenload.doctor.checks import allreduce\n"
        "real = allreduce._rank\n"
        "def late(backend, rank, *rest):\n"
        "    time.sleep(600) if rank == 1 else real(backend, rank, *rest)\n"
        "allreduce._rank = late\n"
        "results = allreduce.run_ranks('gloo', 2, 2.0)\n"
        "print(json.dumps(dataclasses.asdict(allreduce.evaluate_allreduce('gloo', 2, 2.0, results))))\n"
    )
    import json
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    finding = json.loads(done.stdout)
    assert finding["status"] == "fail"


def test_findings() -> None:
    assert evaluate_allreduce("gloo", 2, 5, [AllReduceResult(0, 0.1), AllReduceResult(1, 0.2)]).found.endswith(
        "4 MB in 200.0 ms"
    )
    silent = evaluate_allreduce("nccl", 3, 5, [AllReduceResult(1, 0.1)])
    assert (silent.status, silent.found) == ("fail", "over nccl rank 0, 2 did not end within 5 s")
    assert silent.fix.startswith("NCCL_P2P_DISABLE=1 ")
    wrong = evaluate_allreduce(
        "gloo", 2, 5, [AllReduceResult(0, 0.1), AllReduceResult(1, 0.1, "sums to 1 ... 3, the true sum is 3")]
    )
    assert (wrong.status, "rank 1" in wrong.found) == ("fail", True)


@pytest.mark.skipif(hardware.gpus() != (), reason="this machine has a GPU")
def test_nccl_without_a_gpu() -> None:
    finding = allreduce(Options(backend="nccl"))
    assert (finding.status, finding.fix) == ("fail", "evenload doctor --backend gloo")


@pytest.mark.gpu
@pytest.mark.skipif(not hardware.gpus(), reason="no NVIDIA GPU here")
def test_one_rank_a_gpu_over_nccl() -> None:
    finding = in_child("allreduce:allreduce", limit_s=60)
    assert finding.status == "ok"
    assert "over nccl" in finding.found
