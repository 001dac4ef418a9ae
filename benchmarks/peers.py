"""Plain DDP, Accelerate and Lightning on the same throttled ranks; the latter two in an environment of their own."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.models import Size
from evenload.training.launch.devices import own_cores, parse_devices, plan_workers, read_host
from evenload.training.launch.throttle import ThrottleController

PEERS = ("ddp", "accelerate", "lightning")
HOME = Path(__file__).parent
ENVIRONMENT = HOME / ".peers"
_SCRIPT = HOME / "scripts" / "train_peer.py"
_TIMEOUT_S = 600.0


class SkippedError(Exception):
    """A peer can't be measured here; the message says why."""


def python_of(peer: str) -> Path:
    """The interpreter that has the peer installed; installs Accelerate and Lightning at the first call.

    Raises:
        SkippedError: they can't be installed.
    """
    if peer == "ddp":
        return Path(sys.executable)
    python = ENVIRONMENT / "bin" / "python"
    marker = ENVIRONMENT / ".installed"
    if not marker.exists():
        constraints = HOME.parent / "constraints.txt"
        try:
            subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True, capture_output=True, text=True)
            subprocess.run(
                [str(python), "-m", "pip", "install", "-q", "-c", str(constraints), "accelerate", "lightning", "numpy"],
                check=True,
                capture_output=True,
                text=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            told = getattr(error, "stderr", None) or str(error)
            raise SkippedError(f"{peer} can't be installed: {told.strip().splitlines()[-1][:200]}") from error
        marker.touch()
    return python


def measure_peer(peer: str, size: Size, factors: tuple[float, ...], block_s: float, num_blocks: int) -> list[float]:
    """Samples/s of each block after the first, with equal shares on CPU ranks held to `factors`.

    Raises:
        SkippedError: it can't be installed, or failed; with the end of what it said.
    """
    python = python_of(peer)
    host = read_host()
    workers = plan_workers(parse_devices(f"cpu:{len(factors)}", host), host, {})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="evenload-peer-") as folder:
        throttle = ThrottleController(Path(folder), factors, own_cores(workers, host), ["cpu"] * len(factors))
        processes = []
        try:
            for worker in workers:
                if throttle.spec_of(worker.rank)["means"] != "quota" and any(factor < 1 for factor in factors):
                    raise SkippedError("other programs can only be slowed by a CPU quota, which can't be set here")
                cores = worker.cores
                processes.append(
                    subprocess.Popen(
                        [
                            *(str(python), str(_SCRIPT), peer, json.dumps(dataclasses.asdict(size))),
                            *(str(block_s), str(num_blocks)),
                        ],
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        text=True,
                        env={
                            **os.environ,
                            "RANK": str(worker.rank),
                            "LOCAL_RANK": str(worker.rank),
                            "NODE_RANK": "0",
                            "GROUP_RANK": "0",
                            "WORLD_SIZE": str(len(workers)),
                            "LOCAL_WORLD_SIZE": str(len(workers)),
                            "MASTER_ADDR": "127.0.0.1",
                            "MASTER_PORT": str(port),
                            "ACCELERATE_USE_CPU": "true",
                            "OMP_NUM_THREADS": "1",
                        },
                        preexec_fn=lambda cores=cores: os.sched_setaffinity(0, cores) if cores else None,
                    )
                )
                throttle.admit(worker.rank, processes[-1].pid)
            said = [process.communicate(timeout=_TIMEOUT_S)[0] for process in processes]
        except subprocess.TimeoutExpired:
            raise SkippedError(f"{peer} did not end in {_TIMEOUT_S:g} s") from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
            throttle.close()
    for line in said[0].splitlines():
        if line.startswith("RESULT "):
            return list(json.loads(line.removeprefix("RESULT ")))
    raise SkippedError(f"{peer} failed: {' | '.join(said[0].strip().splitlines()[-3:])[:400]}")
