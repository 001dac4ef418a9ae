"""Errors of collectives: what NCCL lacked on this rank, and what only shows that another rank is gone."""

from __future__ import annotations

import pytest
import torch

from evenload.errors import LaunchError, PeerLostError
from evenload.training.comm.collective_errors import collective_error, setup_problem
from evenload.training.comm.pending import Pending

USAGE = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, invalid usage (run with NCCL_DEBUG=WARN for details), "
    "NCCL version 2.21.5\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
)
SYSTEM = (
    "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970, unhandled system error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclSystemError: System call (e.g. socket, malloc) or external library "
    "call failed or device error. \nLast error:\n"
)
CUDA = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, unhandled cuda error (run with NCCL_DEBUG=INFO for "
    "details), NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (USAGE + "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000", "CUDA_VISIBLE_DEVICES"),
        (USAGE + "Bootstrap : no socket interface found", "NCCL_SOCKET_IFNAME"),
        (SYSTEM + "socketStartConnect: Connect to 10.0.0.7<41823> failed : No route to host", "NCCL_SOCKET_IFNAME"),
        (SYSTEM + "socketStartConnect: Connect to 10.0.0.7<41823> failed : Connection timed out", "NCCL_SOCKET_IFNAME"),
        (SYSTEM + "Error while creating shared memory segment /dev/shm/nccl-Vq3x4F (size 9637888)", "--shm-size"),
        (SYSTEM + "Call to ibv_create_qp failed with error Cannot allocate memory", "ulimit -l"),
        (CUDA + "Cuda failure 217 'peer access is not supported between these two devices'", "NCCL_P2P_DISABLE"),
        (CUDA + "Cuda failure 2 'out of memory'", "--micro-batch"),
        (CUDA + "Cuda failure 801 'operation not supported'", "NCCL_DEBUG=INFO"),
        (USAGE, "NCCL_DEBUG=INFO"),
    ],
)
def test_set_up_is_the_cause(text: str, remedy: str) -> None:
    with pytest.raises(LaunchError, match=r"^the gradients could not be summed: ") as error:
        collective_error(RuntimeError(text), "the gradients could not be summed")
    assert remedy in str(error.value)
    assert text.splitlines()[-1] in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "NCCL error in: x.cpp:1, remote process exited or there was a network error, NCCL version 2.21.5\nncclRemoteError: A "
        "call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\nsocketProgress: "
        "Connection closed by remote peer box2<53512>",
        SYSTEM + "socketPollConnect: Connect to 10.0.0.7<41823> returned 111(Connection refused)",
        "NCCL communicator was aborted on rank 1.",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE, Timeout(ms)=600000)",
        "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but "
        "store->get('0') got error: wait timeout after 600000ms",
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:37261",
        "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 30000ms for recv operation to complete",
        "No space left on device",  # not NCCL's
    ],
)
def test_a_lost_peer_is_a_consequence(text: str) -> None:
    assert setup_problem(text) == ""
    assert isinstance(collective_error(RuntimeError(text), "the gradients could not be summed"), PeerLostError)


class _BrokenWork:
    def get_future(self) -> torch.futures.Future[object]:
        raise AssertionError("a GPU's work is waited for by its stream")

    def wait(self) -> bool:
        raise RuntimeError(USAGE + "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000")


def test_a_wait_for_nccl_names_the_cause() -> None:
    with pytest.raises(LaunchError, match="two ranks have the same GPU"):
        Pending(_BrokenWork(), blocking=False).wait()  # type: ignore[arg-type]
