"""Translate errors of collectives: another rank is gone, or NCCL could not be set up here.

The first collective of a group makes NCCL's communicator. What fails then (a GPU used twice, no network interface, a small
/dev/shm) is the cause of the failure, while a lost connection is a consequence of another rank's.
"""

from __future__ import annotations

import re

from evenload.errors import LaunchError, PeerLostError

_SETUP_PROBLEMS: tuple[tuple[str, str], ...] = (
    (
        r"Duplicate GPU detected",
        "two ranks have the same GPU, which NCCL does not allow; give each rank its own: look at -d, CUDA_VISIBLE_DEVICES and "
        "the ranks per node",
    ),
    (
        r"no socket interface found|network .* not found|No route to host|Network is unreachable"
        r"|Connect to \S+ failed.*Connection timed out",
        "NCCL found no network interface over which the ranks reach each other; set NCCL_SOCKET_IFNAME to one that connects "
        "the machines (`evenload doctor` lists them), and open the ports between them in the firewall",
    ),
    (
        r"shared memory segment|/dev/shm|No space left on device",
        "NCCL found too little shared memory; give /dev/shm at least 1 GiB (docker run --shm-size=8g)",
    ),
    (
        r"ibv_\w+ failed|Call to ibv_|NET/IB : Unable",
        "NCCL could not set up InfiniBand; raise the limit of locked memory (ulimit -l unlimited), or set NCCL_IB_DISABLE=1",
    ),
    (
        r"peer access|peer mapping|cudaIpc|P2P",
        "the GPUs can't reach each other's memory; set NCCL_P2P_DISABLE=1, and see the checks IOMMU and ACS and peer copies "
        "of `evenload doctor`",
    ),
    (
        r"(?:Cuda failure|CUDA error)[^\n]*out of memory|Failed to CUDA calloc",
        "the memory of the GPU ran out when NCCL allocated its buffers; set --micro-batch lower, or end other programs on it",
    ),
    (
        r"mismatch in rank count|[Mm]ismatched (?:NCCL )?versions?|NCCL version mismatch",
        "the ranks do not agree on their number or on the version of NCCL; install the same torch on all machines, and start "
        "all ranks by one command",
    ),
)
"""Text of an error, and what it means. NCCL appends the line at which it failed ("Last error: …")."""

_LOST_PEER = re.compile(
    r"ncclRemoteError|remote process exited|closed by (?:remote )?peer|reset by peer|Broken pipe|Connection refused"
    r"|communicator was aborted|[Ww]atchdog|[Tt]imed? ?out|retrieving ncclUniqueId",
)
_NCCL = re.compile(r"\bNCCL\b|\bnccl[A-Z]\w+")


def setup_problem(text: str) -> str:
    """Return what NCCL lacked by the text of its error, and what to do; empty if a rank is gone or the text is not NCCL's."""
    if not _NCCL.search(text):
        return ""
    for pattern, problem in _SETUP_PROBLEMS:
        if re.search(pattern, text, re.DOTALL):
            return problem
    if _LOST_PEER.search(text):
        return ""
    return "NCCL failed on this rank; NCCL_DEBUG=INFO shows where, `evenload doctor` tests it between the GPUs of a machine"


def check_setup(error: Exception, what: str) -> None:
    """Raise LaunchError if NCCL could not be set up; `what` says what failed, such as ``the gradients could not be summed``."""
    text = str(error)
    if problem := setup_problem(text):
        raise LaunchError(f"{what}: {problem} ({text})") from error


def collective_error(error: RuntimeError, what: str) -> PeerLostError:
    """Return the error of a collective that another rank's end has made fail; LaunchError as in `check_setup`."""
    check_setup(error, what)
    return PeerLostError(f"{what}: {error}")
