"""The output of a job on Ray: a file for each attempt and node, on that node, read from any machine of the cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenload.errors import QueueError

if TYPE_CHECKING:
    from evenload.scheduler.backends.ray.queue import RayQueue

_BLOCK_BYTES = 8 << 20
_READ_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class OutputFile:
    """The output of one attempt on the first of its nodes."""

    attempt: int
    node: str
    """Ray's id."""
    host: str
    """Its name for people."""
    path: str


def attempt_folder(root: Path, job: str, attempt: int, node_rank: int = 0) -> Path:
    """Return the folder of an attempt on one of its nodes."""
    return root / job / f"{attempt}-{node_rank}"


def output_path(root: Path, job: str, attempt: int, node_rank: int = 0) -> Path:
    return attempt_folder(root, job, attempt, node_rank) / "output.log"


def output_files(queue: RayQueue, job: str) -> list[OutputFile]:
    """Return where the output of a job lies; raise a `QueueError` for no job, or several."""
    names = queue.ids_of(job)
    if len(names) > 1:
        raise QueueError(f"{job} is an array of {len(names)} jobs: name one of them, {names[0]} to {names[-1]}")
    found = []
    for record in queue.reader.attempts(names[0]):
        node = record.devices[0].partition("/")[0]
        path = output_path(queue.root, names[0], record.fence.attempt)
        found.append(OutputFile(record.fence.attempt, node, queue.names.get(node, node), str(path)))
    return found


class JobOutput:
    """Reads a job's output in the order of its attempts; each call of `read` returns what has come since the last."""

    def __init__(self, ray: Any, files: Callable[[], Sequence[OutputFile]]) -> None:
        self._ray, self._files = ray, files
        self._positions: dict[int, int] = {}
        self._gone: set[int] = set()

    def read(self) -> bytes:
        parts = []
        for file in self._files():
            while part := self._read(file):
                parts.append(part)
                if len(part) < _BLOCK_BYTES:
                    break
        return b"".join(parts)

    def _read(self, file: OutputFile) -> bytes:
        """Return the next block of a file; a line that says so, once, where its node has left."""
        start = self._positions.get(file.attempt, 0)
        if file.attempt in self._gone:
            return b""
        if self._is_here(file.node):
            part = _block(file.path, start)
        elif any(node["Alive"] and node["NodeID"] == file.node for node in self._ray.nodes()):
            part = self._read_there(file, start)
        else:
            self._gone.add(file.attempt)
            return f"evenload: attempt {file.attempt} ran on {file.host}, which has left Ray with its output\n".encode()
        self._positions[file.attempt] = start + len(part)
        return part

    def _is_here(self, node: str) -> bool:
        """Return whether this process runs on a node; Ray's client (`ray://`) names the server's node as its own."""
        from ray.util.client import ray as client

        return not client.is_connected() and bool(node == self._ray.get_runtime_context().get_node_id())

    def _read_there(self, file: OutputFile, start: int) -> bytes:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(file.node, soft=False)
        task = self._ray.remote(_block).options(num_cpus=0, scheduling_strategy=there)
        try:
            return bytes(self._ray.get(task.remote(file.path, start), timeout=_READ_TIMEOUT_S))
        except self._ray.exceptions.RayError as error:
            raise QueueError(f"the output in {file.path} on {file.host} can't be read: {error}") from error


def _block(path: str, start: int) -> bytes:
    """Read up to `_BLOCK_BYTES` of a file of this node; nothing while there is none."""
    with contextlib.suppress(FileNotFoundError), Path(path).open("rb") as file:
        file.seek(start)
        return file.read(_BLOCK_BYTES)
    return b""
