"""`LinkMeter`: measures the link between machines once, before training, with the collectives that gradients use."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import astuple

import torch
import torch.distributed as dist

from evenload.balance.exchange_times import Link
from evenload.training.comm.groups import Groups
from evenload.training.comm.wire_groups import find_machines

_NUM_SMALL, _SMALL_BYTES = 5, 1 << 12
"""A sum of fewer values than a ring has parts would take one round instead of two."""
_FIRST_BYTES = 1 << 16
_LARGEST_BYTES = 1 << 24
_UNKNOWN = (0.0, 0.0, 0.0, 0.0, 0.0)
_TARGET_S = 0.12
_TARGET_LATENCIES = 4
"""A measurement takes at least so long, and so many latencies: the first bytes fit into buffers on the way, and TCP begins slowly
after each pause, also in training."""
_MAX_ROUNDS = 6
_NUM_SUMS = 3
"""Of the last size: what is lost on the way when TCP sends too fast makes one take several times as long."""
_NUM_BESIDE, _BESIDE_S = 5, 0.06
"""Sums beside a computation, and how long one of them takes alone, or twice the latency."""


class LinkMeter:
    def __init__(self, groups: Groups, *, always: bool = False) -> None:
        """`always`: measure among ranks of one machine, too."""
        self.link: Link | None = None
        """None before `measure`, and where all ranks are on one machine."""
        self._groups = groups
        self._always = always
        self._agreed_for = -1

    @property
    def num_senders(self) -> int:
        """Number of machines that exchange gradients, or of ranks if there is one."""
        now = self._groups.generation
        return len(find_machines(now.hosts, now.computing))

    def measure(self, device: torch.device) -> Link | None:
        """Return the link, measured once, in one to a few seconds.

        All ranks that compute call it in each generation, and get the same.
        """
        now = self._groups.generation
        if now.gradients is None or (len(now.hosts) == 1 and not self._always) or self._agreed_for == now.number:
            return self.link
        self._agreed_for = now.number
        on_gpu = now.wire.on_gpus if now.wire is not None else bool(self._groups.nccl_ranks) and now.hierarchy is None
        place = device if on_gpu else torch.device("cpu")
        # A rank that has just joined knows none.
        found = torch.tensor(
            astuple(self.link) if self.link is not None else _UNKNOWN, dtype=torch.float64, device=place
        )
        self._broadcast(found, now.gradients)
        if tuple(found.tolist()) == _UNKNOWN:
            if now.wire is None or now.wire.leads:
                group = now.gradients if now.wire is None else now.wire.stages[0]
                found = self._measure(group, place, computes=device.type == "cpu")
            self._broadcast(found, now.gradients)
        self.link = Link(*found.tolist())
        return self.link

    def _measure(self, group: dist.ProcessGroup, device: torch.device, *, computes: bool) -> torch.Tensor:
        """Return the fields of a `Link`; `computes`: the processor that sends computes, too."""
        num_ranks = group.size()

        def timed(send: Callable[[torch.Tensor], object], num_bytes: int) -> float:
            tensor = torch.ones(num_bytes // 4, device=device)
            self._agree(0.0, group, device)
            began_s = time.perf_counter()
            send(tensor)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return self._agree(time.perf_counter() - began_s, group, device)

        def rate(send: Callable[[torch.Tensor], object], sent_part: float, waits_s: float, num_times: int = 1) -> float:
            num_bytes, seconds = _FIRST_BYTES, timed(send, _FIRST_BYTES)
            target_s = max(_TARGET_S, _TARGET_LATENCIES * latency_s)
            for _ in range(_MAX_ROUNDS):
                if num_bytes == _LARGEST_BYTES or (seconds >= target_s and num_bytes > _FIRST_BYTES):
                    break
                # A latency is a part of the time, so more bytes take less than in proportion.
                factor = min(8.0, max(2.0, target_s / seconds))
                num_bytes = int(min(_LARGEST_BYTES, num_bytes * factor)) // 4 * 4
                seconds = timed(send, num_bytes)
            seconds = statistics.median([seconds, *(timed(send, num_bytes) for _ in range(num_times - 1))])
            return sent_part * num_bytes / max(seconds - waits_s, 0.1 * seconds)

        def sum_up(tensor: torch.Tensor) -> None:
            self._groups.wait(dist.all_reduce(tensor, group=group, async_op=True), device)

        latency_s = statistics.median(timed(sum_up, _SMALL_BYTES) for _ in range(_NUM_SMALL))
        both = rate(sum_up, 2 * (num_ranks - 1) / num_ranks, latency_s, _NUM_SUMS)
        up = rate(lambda tensor: self._broadcast(tensor, group), 1.0, latency_s / 2)
        down = rate(lambda tensor: self._broadcast(tensor, group, num_ranks - 1), 1.0, latency_s / 2)
        lost_s = 0.0
        if self._agree(float(computes), group, device):
            sent = min(both * max(_BESIDE_S, 2 * latency_s), float(_LARGEST_BYTES))
            num_values = max(1, int(sent * num_ranks / (2 * (num_ranks - 1))) // 4)
            lost_s = self._agree(computes * self._lost_s(group, num_values), group, device) / sent
        return torch.tensor([latency_s, up, down, both, lost_s], dtype=torch.float64, device=device)

    def _lost_s(self, group: dist.ProcessGroup, num_values: int) -> float:
        """Return the seconds that a computation on this processor loses to one sum of so many values beside it.

        No more than other threads of this process computed meanwhile: other programs may take a processor, too.
        """
        values, left, right = torch.zeros(num_values), torch.ones(64, 512), torch.ones(512, 512)
        out, found = left @ right, []
        for _ in range(_NUM_BESIDE):
            self._agree(0.0, group, values.device)
            began_s, count = time.perf_counter(), 0
            others_s = time.thread_time() - time.process_time()
            pending = self._groups.begin(dist.all_reduce(values, group=group, async_op=True), True)
            while not pending.done:
                torch.mm(left, right, out=out)
                count += 1
            pending.wait()
            others_s += time.process_time() - time.thread_time()
            ended_s = time.perf_counter()
            for _ in range(count):
                torch.mm(left, right, out=out)
            found.append(min(others_s, 2 * ended_s - began_s - time.perf_counter()))
        return max(0.0, statistics.median(found))

    def _agree(self, seconds: float, group: dist.ProcessGroup, device: torch.device) -> float:
        """Return the longest time of all ranks."""
        longest = torch.tensor([seconds], device=device)
        self._groups.wait(dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group, async_op=True), device)
        return float(longest)

    def _broadcast(self, tensor: torch.Tensor, group: dist.ProcessGroup, source: int = 0) -> None:
        self._groups.wait(dist.broadcast(tensor, group_src=source, group=group, async_op=True), tensor.device)
