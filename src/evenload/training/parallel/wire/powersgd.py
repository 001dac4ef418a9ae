"""Format ``powersgd``: each matrix travels as the product of two narrow ones, by one step of a power iteration.

    P = Σ_r M_r Q,   P̂ = orthonormal columns of P,   Q' = Σ_r M_rᵀ P̂,   out = P̂ Q'ᵀ,   lost_r = M_r - P̂ (M_rᵀ P̂)ᵀ

Q' is the Q of the next step. Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019, algorithms 1 and 2. Vectors, and matrices
that would not shrink to half, travel as they are.

Note [Equal in each bit]
  All ranks must get the same result although their processors differ in how they sum a long vector. So P̂ and `out` are made of
  additions and multiplications of single values, in a fixed order, which round alike everywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from evenload.balance.wire_bytes import POWERSGD_RANK, is_compressed
from evenload.training.comm.wire_groups import WireGroups
from evenload.training.parallel.wire.bucket_sum import BucketSum, Matrix, Steps


class PowerSGD:
    name = "powersgd"

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.starts: dict[str, torch.Tensor] = {}
        """Q by the name of the parameter, equal on all ranks."""

    def sum(self, job: BucketSum, groups: WireGroups) -> Steps:
        values = job.values
        chosen = [one for one in job.matrices if is_compressed(one.num_rows, one.num_columns)]
        matrices = [values[one.start : one.stop].view(one.num_rows, one.num_columns) for one in chosen]
        rest = [values[low:high] for low, high in _between(chosen, len(values))]
        starts = [self.start(one, values) for one in chosen]
        products = [matrix @ start for matrix, start in zip(matrices, starts, strict=True)]
        first = torch.cat([*map(torch.flatten, products), *rest, job.scalar.view(1)])
        yield from _all_reduce(first, groups, 0)
        *summed, norm = torch.split_with_sizes(first, [*(p.numel() for p in products), *map(len, rest), 1])
        bases = [orthonormal(s.view_as(p)) for s, p in zip(summed, products, strict=False)]
        own = [matrix.T @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        second = torch.cat([torch.empty(0, dtype=values.dtype, device=values.device), *map(torch.flatten, own)])
        job.lost = torch.zeros_like(values)
        for one, matrix, basis, factor in zip(chosen, matrices, bases, own, strict=True):
            lost = job.lost[one.start : one.stop].view_as(matrix)
            torch.addmm(matrix, basis, factor.T, alpha=-1, out=lost)
        yield from _all_reduce(second, groups, 1)
        factors = [
            s.view_as(f) for s, f in zip(torch.split_with_sizes(second, [f.numel() for f in own]), own, strict=False)
        ]
        for one, matrix, basis, factor in zip(chosen, matrices, bases, factors, strict=True):
            _multiply(basis, factor, out=matrix)
            job.next_starts[one.name] = factor / factor.abs().amax(0).clamp_min(torch.finfo(factor.dtype).tiny)
        for part, total in zip(rest, summed[len(chosen) :], strict=True):
            part.copy_(total)
        job.scalar.copy_(norm[0])

    def start(self, one: Matrix, like: torch.Tensor) -> torch.Tensor:
        """Return the Q of a matrix, shape ``(num_columns, POWERSGD_RANK)``."""
        known = self.starts.get(one.name)
        if known is not None and known.shape == (one.num_columns, POWERSGD_RANK):
            return known.to(like)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {one.name}".encode()))
        return torch.randn(one.num_columns, POWERSGD_RANK, generator=generator, dtype=torch.float64).to(like)


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Return orthonormal columns that span the same space: Gram-Schmidt, twice; a column of zeros stays one."""
    tiny = torch.finfo(columns.dtype).tiny
    # Squares must neither overflow nor vanish.
    result = list((columns / columns.abs().amax(0).clamp_min(tiny)).unbind(1))
    for index, column in enumerate(result):
        before = column
        for _ in range(2):
            for earlier in result[:index]:
                column = column - earlier * _sum(earlier * column)
        # What rounding leaves of a column that depends on the others is no direction.
        is_left = _sum(column * column).sqrt() > 64 * torch.finfo(columns.dtype).eps * _sum(before * before).sqrt()
        result[index] = torch.where(is_left, column / _sum(column * column).sqrt().clamp_min(tiny), column * 0.0)
    return torch.stack(result, 1)


def _sum(vector: torch.Tensor) -> torch.Tensor:
    """Return the sum by halves; see Note [Equal in each bit]."""
    while (size := len(vector)) > 1:
        half = size // 2
        folded = vector[:half] + vector[half : 2 * half]
        vector = folded if size % 2 == 0 else torch.cat((folded, vector[2 * half :]))
    return vector[0]


def _multiply(basis: torch.Tensor, factor: torch.Tensor, *, out: torch.Tensor) -> None:
    """Write basis · factorᵀ, term by term; see Note [Equal in each bit]."""
    torch.mul(basis[:, :1], factor[:, 0], out=out)
    for index in range(1, basis.shape[1]):
        out.add_(basis[:, index : index + 1] * factor[:, index])


def _between(chosen: Sequence[Matrix], num_values: int) -> list[tuple[int, int]]:
    starts = [0, *(one.stop for one in chosen)]
    stops = [*(one.start for one in chosen), num_values]
    return [(low, high) for low, high in zip(starts, stops, strict=True) if low < high]


def _all_reduce(tensor: torch.Tensor, groups: WireGroups, stage: int) -> Steps:
    if groups.stages:  # if not, it is rehearsed (formats.py)
        yield dist.all_reduce(tensor, group=groups.stages[stage], async_op=True)
