"""`QuantisedSum`: a sum whose terms travel encoded, and whose result does.

Each rank is responsible for a part of the values. Terms are encoded and sent to whoever is responsible, which decodes and sums
them in full precision, in the order of ranks, encodes the sum and sends it to all:

    out = Q(Σ_r Q(v_r)),    lost_r = v_r - Q(v_r), and on the responsible rank also  Σ_r Q(v_r) - out

so that Σ_r v_r = out + Σ_r lost_r. Between two ranks each sends all values to the other, which costs the same bytes and one
exchange less. Quantised reduce-scatter and all-gather: Wang et al., "ZeRO++", 2023. Error feedback on both: Tang et al.,
"DoubleSqueeze", ICML 2019.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from evenload.training.comm.wire_groups import WireGroups
from evenload.training.parallel.wire.bucket_sum import BucketSum, Steps
from evenload.training.parallel.wire.codec import (
    CHUNK,
    Codec,
    blocks,
    message_bytes,
    norm_of,
    pack,
    unpack,
    unpack_block,
)


class QuantisedSum:
    def __init__(self, codec: Codec) -> None:
        self.name = codec.name
        self._codec = codec

    def sum(self, job: BucketSum, groups: WireGroups) -> Steps:
        yield from (self._exchange if len(groups.leaders) == 2 else self._scatter_and_gather)(job, groups)

    def _exchange(self, job: BucketSum, groups: WireGroups) -> Steps:
        codec, values = self._codec, job.values
        own = _bytes(message_bytes(codec, len(values)), values)
        pack(codec, values, job.scalar, own)
        table = own.new_empty(2, len(own))
        yield from _gather(table, own, groups, 0)
        job.lost = torch.empty_like(values)
        # Memory for whole terms would be new in each step, which takes as long as decoding does.
        memory: list[torch.Tensor] = []
        for here in blocks(values):
            part = values[here.values]
            memory = memory or [torch.empty_like(part) for _ in table]
            terms = [one[: len(part)] for one in memory]
            for message, term in zip(table, terms, strict=True):
                unpack_block(codec, message, len(values), here, term)
            torch.sub(part, terms[groups.index], out=job.lost[here.values])
            torch.add(*terms, out=part)
        job.scalar.copy_(norm_of(table[0]) + norm_of(table[1]))

    def _scatter_and_gather(self, job: BucketSum, groups: WireGroups) -> Steps:
        codec, values, index = self._codec, job.values, groups.index
        spans = split_chunks(len(values), len(groups.leaders))
        sizes = [message_bytes(codec, high - low) for low, high in spans]
        sent = _bytes(sum(sizes), values)
        messages = torch.split_with_sizes(sent, sizes)
        for (low, high), message in zip(spans, messages, strict=True):
            pack(codec, values[low:high], job.scalar, message)
        table = sent.new_empty(len(spans), sizes[index])
        yield dist.all_to_all_single(
            table.view(-1), sent, [sizes[index]] * len(spans), sizes, group=groups.stages[0], async_op=True
        )
        job.lost = torch.empty_like(values)
        for (low, high), message in zip(spans, messages, strict=True):
            part = job.lost[low:high]
            unpack(codec, message, part)
            torch.sub(values[low:high], part, out=part)
        low, high = spans[index]
        # What nobody else decodes need not be encoded.
        own, lost = values[low:high].clone(), job.lost[low:high].zero_()
        total, term, norm = (
            torch.zeros_like(own),
            torch.empty_like(own),
            torch.zeros_like(job.scalar, dtype=torch.float64),
        )
        for rank, message in enumerate(table):
            norm = norm + unpack(codec, message, term)
            total.add_(own if rank == index else term)
        result = _bytes(max(sizes), values)
        pack(codec, total, norm, result)
        unpack(codec, result, term)
        torch.sub(total, term, out=lost)
        gathered = result.new_empty(len(spans), len(result))
        yield from _gather(gathered, result, groups, 1)
        for (low, high), message in zip(spans, gathered, strict=True):
            job.scalar.copy_(unpack(codec, message, values[low:high]))


def split_chunks(num_values: int, num_parts: int) -> list[tuple[int, int]]:
    """Return equal parts ``[low, high)`` of whole chunks; the last ones are shorter, or empty."""
    size = -(-num_values // (CHUNK * num_parts)) * CHUNK
    return [(min(num_values, n * size), min(num_values, (n + 1) * size)) for n in range(num_parts)]


def _bytes(num_bytes: int, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=like.device)


def _gather(table: torch.Tensor, own: torch.Tensor, groups: WireGroups, stage: int) -> Steps:
    if groups.stages:
        yield dist.all_gather(list(table.unbind()), own, group=groups.stages[stage], async_op=True)
    else:
        # Rehearsed (formats.py): gloo receives into memory of its own, and copies from there.
        table.copy_(torch.stack([own] * len(table)))
