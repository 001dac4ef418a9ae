"""`HierarchicalSum`: a sum over GPUs and CPU ranks, in which the GPUs sum among themselves first.

The GPUs reduce to the first of them over NCCL; it sums with the other ranks over gloo, and broadcasts the sum to the other
GPUs; see docs/decisions/gpus-sum-first.md. On CPUs, where tests run the same code, the inner group uses gloo too.

Note [One order on all ranks]
  Ranks begin sums in one order, and wait for them in one order. Reductions follow the first. So do the sums over gloo: a thread
  of the first GPU begins each as soon as its reduction is done, and those before it have begun. Broadcasts follow the second:
  each begins in `wait`. If it began as soon as the sum was there, the queues of two GPUs would hold it at different places
  between the reductions of later buckets, and both would stop.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from evenload.training.comm.collective_errors import collective_error
from evenload.training.comm.pending import Pending

_END_WAIT_S = 5.0

Begin = Callable[[dist.Work | None, bool], Pending]
"""Registers a collective, which an abort then ends: (work or None if it follows later, whether its wait blocks the thread)."""


class HierarchicalSum:
    """Sums over the ranks of one generation; on each of them, what that rank does."""

    def __init__(
        self, inner: dist.ProcessGroup | None, outer: dist.ProcessGroup | None, *, leads: bool, begin: Begin
    ) -> None:
        """Args:
        inner: the group of the ranks that sum first; None on the others, and if there is only one.
        outer: the group of the first of them and of the other ranks; None on the rest.
        leads: this rank is the first of them.
        begin: registers a collective.
        """
        self.inner = inner
        self.outer = outer
        self._leads = leads
        self._begin = begin
        self._is_closed = False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._sums: queue.SimpleQueue[_LeadersSum | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        return [group for group in (self.inner, self.outer) if group is not None]

    def sum_async(self, tensor: torch.Tensor) -> Pending | PendingBroadcast:
        """Begin a sum, in place."""
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        on_cpu = tensor.device.type == "cpu"
        if self.inner is None and not self._leads:
            return self._begin(dist.all_reduce(tensor, group=self.outer, async_op=True), on_cpu)
        reduced = None
        if self.inner is not None:
            reduced = self._begin(dist.reduce(tensor, group_dst=0, group=self.inner, async_op=True), on_cpu)
        if not self._leads:
            return PendingBroadcast(tensor, reduced, self.inner, self._begin)
        leaders = _LeadersSum(tensor, reduced, self.inner, self._begin)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="evenload-hierarchical-sum", daemon=True)
            self._thread.start()
        self._sums.put(leaders)
        return leaders

    def close(self) -> None:
        """End the thread; sums that have not reached the other ranks never will. All pending ones must have failed."""
        self._is_closed = True
        if self._thread is not None:
            self._sums.put(None)
            self._thread.join(_END_WAIT_S)

    def _run(self) -> None:
        while (leaders := self._sums.get()) is not None:
            self._exchange(leaders)
            del leaders  # nothing but a step holds the memory of its gradients

    def _exchange(self, leaders: _LeadersSum) -> None:
        try:
            values = leaders.load(self._stream(leaders.tensor.device))
            if not self._is_closed:
                leaders.exchanged.follow(dist.all_reduce(values, group=self.outer, async_op=True))
        except Exception as error:  # whatever it is, it belongs to the thread that waits
            leaders.exchanged.fail(error)

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


class PendingBroadcast:
    """A sum whose last part, the broadcast among the ranks that sum first, begins when this rank waits for it."""

    def __init__(
        self, tensor: torch.Tensor, before: Pending | None, inner: dist.ProcessGroup | None, begin: Begin
    ) -> None:
        self.tensor = tensor
        self._before = before
        self._inner = inner
        self._begin = begin
        self._is_done = False

    def wait(self) -> None:
        """Return when subsequent computation sees the sum; all ranks of the inner group call it in the same order."""
        if self._is_done:
            return
        if self._before is not None:
            self._before.wait()
        self._store()
        if self._inner is not None:
            try:
                work = dist.broadcast(self.tensor, group_src=0, group=self._inner, async_op=True)
            except RuntimeError as error:
                raise collective_error(error, "the sum of the gradients could not be sent") from error
            self._begin(work, self.tensor.device.type == "cpu").wait()
        self._is_done = True

    def _store(self) -> None:
        """Put the sum into the tensor, if it is elsewhere."""


class _LeadersSum(PendingBroadcast):
    """The sum on the rank that exchanges with those of the other kind."""

    def __init__(
        self, tensor: torch.Tensor, reduced: Pending | None, inner: dist.ProcessGroup | None, begin: Begin
    ) -> None:
        self.exchanged = begin(None, True)
        """Ends with the sum over gloo, which the thread begins."""
        super().__init__(tensor, self.exchanged, inner, begin)
        self._reduced = reduced
        self._values = tensor
        self._written: torch.cuda.Event | None = None
        if tensor.device.type == "cuda" and reduced is None:
            self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._written.record()

    def load(self, stream: torch.cuda.Stream | None) -> torch.Tensor:
        """Return what this rank contributes, on the CPU, once it is complete."""
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            if self._reduced is not None:
                self._reduced.wait()  # on a GPU, it orders the stream only
            if stream is None:
                return self.tensor
            if self._written is not None:
                stream.wait_event(self._written)
            self._values = torch.empty_like(self.tensor, device="cpu", pin_memory=True)
            self._values.copy_(self.tensor, non_blocking=True)
            self.tensor.record_stream(stream)
            stream.synchronize()
        return self._values

    def _store(self) -> None:
        if self._values is not self.tensor:
            with torch.no_grad():
                self.tensor.copy_(self._values, non_blocking=True)
            self._values = self.tensor


def split_ranks(ranks: Sequence[int], able: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the inner ranks, of those that are able to sum first, and the outer ones: the first of them, and the others.

    Without ranks of both kinds there is one sum over all, and both are empty.
    """
    inner = tuple(rank for rank in ranks if rank in able)
    if not 0 < len(inner) < len(ranks):
        return (), ()
    return inner, tuple(rank for rank in ranks if rank == inner[0] or rank not in able)


def make_hierarchy(
    parts: tuple[tuple[int, ...], tuple[int, ...]],
    rank: int,
    ranks: Sequence[int],
    everyone: dist.ProcessGroup | None,
    new_group: Callable[[tuple[int, ...]], dist.ProcessGroup | None],
    begin: Begin,
) -> HierarchicalSum | None:
    """Make the sum in two parts (`split_ranks`) over some ranks, on all ranks; None without parts, and for a rank outside.

    `everyone`: the group of these ranks; `new_group`: makes another one, on all ranks; `begin`: see `HierarchicalSum`.
    """
    inner, outer = parts
    if not inner:
        return None
    inner_group = new_group(inner)
    outer_group = new_group(outer) if outer != tuple(ranks) else everyone
    return HierarchicalSum(inner_group, outer_group, leads=rank == inner[0], begin=begin) if rank in ranks else None
