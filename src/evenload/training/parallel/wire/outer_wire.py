"""`OuterWire`: sums the pseudo-gradients of islands in another format between their first ranks, with error feedback.

Island i sends v_i = U_i (θ - θ_i) + s_i e_i, where e_i is what its earlier sums lost, in units of the pseudo-gradient Δ. The
sum of units T = Σ U_i is not known before, so s_i = U_i · T' / U_i' of the sum before. After it

    Δ = (Σ v_i - Σ lost_i) / T,     e_i ← lost_i / T + (1 - s_i / T) e_i

so that the sum over time of Δ as it is used is that of the exact one, minus the last Σ e_i: as in gradient_wire.py, whose
Note [Units of an error] this follows. Buffers travel as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evenload.balance.wire_bytes import GradientSize
from evenload.training.comm.islands import IslandLink
from evenload.training.comm.pending import Pending
from evenload.training.parallel.wire.bucket_sum import BucketSum, Matrix
from evenload.training.parallel.wire.formats import open_format
from evenload.training.parallel.wire.pipeline import Pipeline
from evenload.training.parallel.wire.powersgd import PowerSGD


@dataclass
class OuterSum:
    """A sum in progress over the islands, in place."""

    memory: torch.Tensor
    """Values weighted by units, and the units behind them."""
    places: list[int]
    """The tensors of the fragment in it."""
    pending: Pending | torch.cuda.Event
    flat: torch.Tensor | None = None
    """The memory where it is summed."""
    job: BucketSum | None = None
    """None where nothing is lost, and on ranks that only receive."""
    spans: Sequence[tuple[str, int, int]] = ()
    """Name, begin and end of each tensor."""
    scale: float = 0.0
    """s_i."""
    units: float = 0.0
    """U_i."""

    def wait(self) -> None:
        self.pending.wait()
        if self.flat is not None and self.flat is not self.memory:
            self.memory.copy_(self.flat)


class OuterWire:
    """One for a job; its errors are kept by the first rank of each island."""

    def __init__(self, name: str, link: IslandLink, seed: int) -> None:
        """`name`: a value of the setting ``wire`` other than ``fp32`` and ``auto``; `seed`: of what ``powersgd`` starts with."""
        found = open_format(name, seed)
        if found is None:
            raise ValueError(f"{name} is no format that loses something")
        self.name, self.format = name, found
        self._link = link
        self._pipeline = Pipeline(link.begin)
        self._errors: dict[str, torch.Tensor] = {}
        self._total_per_own = float(link.num_islands)
        """T' / U_i'."""
        self._lost_square = self._square = 0.0
        self._measures = True

    def start(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], places: list[int], memory: torch.Tensor
    ) -> OuterSum:
        """Begin the sum of `memory`, flat values of `tensors` called `names`, and their units."""
        groups = self._link.groups
        if not groups.leads:
            return OuterSum(memory, places, Pending(None, blocking=False))
        ends = [0]
        for tensor in tensors:
            ends.append(ends[-1] + tensor.numel())
        spans = list(zip(names, ends[:-1], ends[1:], strict=True))
        units = float(memory[-1])
        scale = units * self._total_per_own
        flat = memory if groups.on_gpus else memory.cpu()
        for name, low, high in spans:
            if name in self._errors:  # a checkpoint's lie on the CPU
                error = self._errors[name] = self._errors[name].to(flat.device)
                flat[low:high].add_(error, alpha=scale)
        job = BucketSum(flat[:-1], flat[-1], _matrices(spans, tensors))
        steps = self.format.sum(job, groups)
        pending: Pending | torch.cuda.Event = (
            self._pipeline.start_on_gpu(steps, flat.device) if groups.on_gpus else self._pipeline.start(steps)
        )
        return OuterSum(memory, places, pending, flat, job, spans, scale, units)

    def settle(self, done: OuterSum, total: float) -> None:
        """Keep what a sum lost; `total` is T, above 0."""
        job = done.job
        if job is None:
            return
        if done.units:
            self._total_per_own = total / done.units
        if isinstance(self.format, PowerSGD):
            self.format.starts.update(job.next_starts)
        if job.lost is None:
            return
        if self._measures:
            self._lost_square += float(torch.linalg.vector_norm(job.lost, dtype=torch.float64)) ** 2
            self._square += float(torch.linalg.vector_norm(job.values, dtype=torch.float64)) ** 2
        for name, low, high in done.spans:
            lost = job.lost[low:high] / total
            if name in self._errors:
                lost.add_(self._errors[name], alpha=1 - done.scale / total)
            self._errors[name] = lost

    def difference(self) -> float:
        """Return about ‖Δg‖/‖g‖ of the sums so far, once; the errors of islands are taken as independent.

        The first ranks of all islands call it; others get 0.
        """
        square = torch.tensor([self._lost_square], dtype=torch.float64)
        if self._link.groups.on_gpus:
            square = square.cuda()
        self._link.sum_async(square).wait()
        found = math.sqrt(float(square) / self._square) if self._square else 0.0
        self._measures = False  # the norms take a third of a synchronisation's time on a CPU
        return found

    # -- checkpoints ----------------------------------------------------------------------------------------------------

    def gather(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Move the errors of all islands to the first rank of the first one; `tensors` are all that travel. All ranks call it."""
        groups = self._link.groups
        if not groups.leads:
            return
        for name, tensor in tensors.items():
            wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
            place = tensor.device if groups.on_gpus else torch.device("cpu")
            error = self._errors.get(name, torch.zeros(tensor.numel(), dtype=wide, device=place)).to(place)
            self._errors[name] = error
            self._link.sum_async(error).wait()
        if not self._keeps_all:
            self._errors = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the errors that this rank holds, what ``powersgd`` starts with, and T / U_i."""
        starts = dict(self.format.starts) if isinstance(self.format, PowerSGD) else {}
        return {"errors": dict(self._errors), "starts": starts, "total_per_own": self._total_per_own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what rank 0's `state_dict` returned; the other islands begin without errors. Another format keeps them."""
        if self._keeps_all:
            self._errors = {name: error.clone() for name, error in state["errors"].items()}
            self._total_per_own = float(state["total_per_own"])
        if isinstance(self.format, PowerSGD):
            self.format.starts = dict(state["starts"])

    @property
    def _keeps_all(self) -> bool:
        # Rank 0, which writes checkpoints, is the first rank of its island.
        groups = self._link.groups
        return groups.leads and groups.leaders[groups.index] == 0

    def close(self) -> None:
        self._pipeline.close()


def outer_size(tensors: Sequence[torch.Tensor]) -> GradientSize:
    """Return the size of what travels for `tensors`."""
    num_values = sum(tensor.numel() for tensor in tensors)
    shapes = tuple((t.shape[0], t.numel() // t.shape[0]) for t in tensors if t.dim() > 1 and t.numel())
    value_bytes = 8 if any(tensor.dtype == torch.float64 for tensor in tensors) else 4
    return GradientSize(num_values, value_bytes, shapes)


def _matrices(spans: Sequence[tuple[str, int, int]], tensors: Sequence[torch.Tensor]) -> tuple[Matrix, ...]:
    return tuple(
        Matrix(name, low, tensor.shape[0], tensor.numel() // tensor.shape[0])
        for (name, low, _), tensor in zip(spans, tensors, strict=True)
        if tensor.dim() > 1 and tensor.numel()
    )
