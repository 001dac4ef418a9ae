"""Strategy ``async``: a worker computes a whole global batch as ``ddp`` does alone, and sends its gradient to the server.

The server's `run` sets `.grad` of the gradient that arrived. A worker's leaves it None, so its optimizer changes nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import rpc

from evenload.balance.values import StepPlan
from evenload.errors import PeerLostError, StepError
from evenload.training.comm.broadcast import broadcast
from evenload.training.comm.clock import SEGMENTS, StepClock
from evenload.training.comm.groups import Groups
from evenload.training.comm.rpc import start_rpc
from evenload.training.compute.device_state import memory_bytes
from evenload.training.compute.micro_steps import LossFn
from evenload.training.compute.model_parameters import ModelParameters
from evenload.training.data.global_batch import GlobalBatch
from evenload.training.parallel.asynchronous import server as calls
from evenload.training.parallel.asynchronous.buffers import BufferChanges
from evenload.training.parallel.asynchronous.ledger import PartJob
from evenload.training.parallel.asynchronous.messages import PartGradient, join, split
from evenload.training.parallel.asynchronous.server import PartArrival, PartServer
from evenload.training.parallel.asynchronous.worker import PartWorker, end_watch, watch_worker
from evenload.training.parallel.ddp import ReplicaStrategy
from evenload.training.parallel.strategy import BackwardCall, GlobalTotals, LocalResult, StepResult

_TWICE = (
    "step.backward was called twice in a step under strategy='async': the second gradient would need the first one's update, "
    "which the server makes later. Return the sum of the losses from one loss_fn, or use strategy='ddp'"
)


COMPENSATION = 0.04
"""Lambda of the delay compensation: the constant of Zheng et al. 2017 (DC-ASGD-c)."""


class AsyncStrategy:
    """Both sides; rank 0 has a `server`, the others have a `worker`."""

    def __init__(
        self,
        inner: ReplicaStrategy,
        groups: Groups,
        clock: StepClock,
        device: torch.device,
        *,
        server: PartServer | None,
        worker: PartWorker | None,
        compensation: float,
    ) -> None:
        """`compensation` is lambda of the delay compensation; 0 for none."""
        self.server = server
        self.worker = worker
        self.arrival: PartArrival | None = None
        """The gradient that the server's next `run` applies."""
        self.job: PartJob | None = None
        """The part that this worker computes."""
        self.ids = list(range(groups.world_size))
        """By rank, its number in RPC, which stays when ranks are counted anew without those that are gone."""
        self._inner = inner
        self._groups = groups
        self._clock = clock
        self._device = device
        self._compensation = compensation
        self._models: list[nn.Module] = []
        self._parameters = ModelParameters(())
        self._buffers = BufferChanges(())
        self._versions: list[int] = []
        self._sent: set[int] = set()
        self._alone = contextlib.ExitStack()
        self.staleness = 0
        """Of the gradient that was applied last."""
        self.in_loop = False
        """True while each rank is a world of one: in a loop over a loader."""
        self.averages: Callable[[], list[torch.Tensor]] = list
        """Returns the tensors of registered models that are not prepared: only the server makes every update of them."""
        if server is not None:
            server.read_state = self.read_state

    def attach(self, models: Sequence[nn.Module], groups: Groups) -> None:
        """All ranks begin with rank 0's parameters and buffers."""
        self._inner.attach(models, groups)
        self._models = list(models)
        self._follow()

    def detach(self) -> None:
        self.leave()
        self._inner.detach()
        if self.worker is not None:
            with contextlib.suppress(PeerLostError):
                self.worker.flush()
        end_watch()
        if self.server is not None:
            calls.serve(None)

    def set_on_wait(self, poll: Callable[[], None]) -> None:
        """Call `poll` now and then while this rank waits in a loop; it may end the script."""
        if self.server is not None:
            self.server.on_wait = poll
        if self.worker is not None:
            self.worker.on_wait = poll

    def send_averages(self) -> None:
        """Give all ranks the server's values of `averages`; all call it between two loops."""
        broadcast(self.averages(), self._groups)

    def enter(self) -> None:
        """Begin a loop: from now on every rank is a world of one."""
        self._alone.enter_context(self._groups.alone(-1 - self._groups.generation.number))
        self.in_loop = True

    def leave(self) -> None:
        """End a loop; all ranks are together again."""
        self.in_loop = False
        self._alone.close()

    def run(self, plan: StepPlan, batch: GlobalBatch, loss_fn: LossFn, call: BackwardCall) -> StepResult:
        if call.index > 0:
            raise StepError(_TWICE)
        if self._parameters.has_changed:
            self._follow()
        if self.worker is not None:
            return self._compute(self.worker, plan, batch, loss_fn, call)
        return self._apply(plan, call)

    def rollback(self, *, together: bool) -> None:
        self._inner.rollback(together=together)

    def state_dict(self) -> Mapping[Any, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[Any, Any]) -> None:
        self._inner.load_state_dict(state)

    def fingerprint(self) -> Mapping[str, torch.Tensor]:
        return self._inner.fingerprint()

    # -- state, from the server to the workers ---------------------------------------------------------------------------

    @property
    def _state(self) -> list[torch.Tensor]:
        return [*self._parameters.named.values(), *self._buffers.buffers]

    def read_state(self) -> tuple[list[int], list[torch.Tensor]]:
        """Return what is trained or has changed since all ranks were equal: its indices, and copies of it, joined."""
        state = self._state
        for index, tensor in enumerate(state):
            if tensor.requires_grad or tensor._version != self._versions[index]:
                self._sent.add(index)
        indices = sorted(self._sent)
        return indices, join(state[index] for index in indices)

    @torch.no_grad()
    def load_state(self, indices: Sequence[int], joined: Sequence[torch.Tensor]) -> None:
        state = self._state
        tensors = [state[index] for index in indices]
        for tensor, value in zip(tensors, split(joined, tensors), strict=True):
            tensor.copy_(value)

    def _follow(self) -> None:
        self._parameters = ModelParameters(self._models)
        self._buffers = BufferChanges(self._models)
        self._versions = [tensor._version for tensor in self._state]

    # -- one part --------------------------------------------------------------------------------------------------------

    def _compute(
        self, worker: PartWorker, plan: StepPlan, batch: GlobalBatch, loss_fn: LossFn, call: BackwardCall
    ) -> StepResult:
        own: list[LocalResult] = []

        def exchange(results: Sequence[LocalResult]) -> GlobalTotals:
            own[:] = [result._replace(seconds=self._clock.take()) for result in results]
            return call.exchange(own)

        before = self._buffers.save()
        result = self._inner.run(plan, batch, loss_fn, call._replace(exchange=exchange, reads_late=False))
        totals = result.totals
        units = result.units
        metrics = {name: value / units for name, value in own[0].metrics.items()} if totals is None else totals.metrics
        loss = float(result.loss) if totals is None else totals.loss
        params = list(self._parameters.named.values())
        touched = [index for index, param in enumerate(params) if param.grad is not None]
        job = self.job
        if job is None:
            raise RuntimeError("a worker computes a part that it has not received")
        worker.push(
            PartGradient(
                job.number,
                job.version,
                job.worker,
                units,
                own[0].weighted,
                loss,
                metrics,
                own[0].seconds or {},
                memory_bytes(self._device),
                plan.num_micro,
                touched,
                join(grad for index in touched if (grad := params[index].grad) is not None),
                join(self._buffers.since(before)),
            )
        )
        self.job = None
        for index in touched:
            params[index].grad = None
        return result

    def _apply(self, plan: StepPlan, call: BackwardCall) -> StepResult:
        arrival, self.arrival = self.arrival, None
        if arrival is None:
            raise RuntimeError("no gradient has arrived for this step")
        gradient, self.staleness = arrival.gradient, arrival.staleness
        units, loss = gradient.units, gradient.loss
        shares = plan.shares
        own = {"staleness": float(arrival.staleness), "worker": float(shares.index(max(shares)))}
        metrics = {**gradient.metrics, **own}
        call.exchange(
            [
                LocalResult(
                    weighted=gradient.weighted,
                    units=units if computed else 0.0,
                    loss_sum=loss * units if computed else 0.0,
                    metrics={name: value * units if computed else 0.0 for name, value in metrics.items()},
                    seconds=gradient.seconds if computed else dict.fromkeys(SEGMENTS, 0.0),
                    memory_bytes=gradient.memory_bytes if computed else 0,
                )
                for computed in (share > 0 for share in shares)
            ]
        )
        self._clock.take()
        params = list(self._parameters.named.values())
        touched = [params[index] for index in gradient.touched]
        with torch.no_grad():
            for param, grad in zip(touched, split(gradient.gradients, touched), strict=True):
                moved = grad.to(param.device)
                param.grad = moved if param.grad is None else param.grad.add_(moved)
            if self._compensation and arrival.staleness:
                self._compensate(arrival, touched)
            self._buffers.apply(split(gradient.buffers, self._buffers.buffers))
        return StepResult(units, torch.tensor(loss, dtype=torch.float64), bool(touched) and math.isfinite(loss))

    def _compensate(self, arrival: PartArrival, touched: Sequence[nn.Parameter]) -> None:
        """Add lambda g * g * (now - then): the gradient at today's parameters to first order (Zheng et al. 2017, eq. 10)."""
        state = self._state
        sent = [state[index] for index in arrival.indices]
        then = {id(tensor): value for tensor, value in zip(sent, split(arrival.snapshot, sent), strict=True)}
        for param in touched:
            if param.grad is not None:
                moved = param.detach() - then[id(param)].to(param.device)
                param.grad.addcmul_(param.grad.square(), moved, value=self._compensation)


def open_async(
    inner: ReplicaStrategy,
    groups: Groups,
    clock: StepClock,
    device: torch.device,
    *,
    staleness: int,
    compensates: bool,
    report_lost: Callable[[int, str, Sequence[int], bool], None],
) -> AsyncStrategy:
    """Start RPC on all ranks, and return this rank's side."""
    rank, timeout_s = groups.rank, groups.timeout_s
    server = worker = None
    workers = list(range(1, groups.world_size))
    if rank == 0:
        server = PartServer(workers, staleness=staleness, timeout_s=timeout_s, report_lost=report_lost)
        calls.serve(server)
    else:
        worker = PartWorker(rank, timeout_s)
    start_rpc(rank, groups.world_size, timeout_s)
    if server is not None:
        for other in workers:
            _watch(server, other)
    compensation = COMPENSATION if compensates else 0.0
    return AsyncStrategy(inner, groups, clock, device, server=server, worker=worker, compensation=compensation)


def _watch(server: PartServer, worker: int) -> None:
    future = rpc.rpc_async(f"rank{worker}", watch_worker, timeout=0)

    def ended(done: torch.futures.Future[None]) -> None:
        try:
            done.value()
        except RuntimeError as error:
            server.leave(worker, str(error).splitlines()[0], is_dead=True)
        else:
            with contextlib.suppress(RuntimeError):
                server.leave(worker, "its run has ended", is_dead=True)

    future.add_done_callback(ended)
