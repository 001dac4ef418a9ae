"""`GradientObservation`: for ``wire="auto"``, the gradients of the first steps, which travel as they are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from evenload.balance.exchange_times import Link, Work, wire_options, without_exchange
from evenload.balance.wire_bytes import GradientSize
from evenload.balance.wire_choice import ObservedGradients, choose_wire, noise_square
from evenload.training.comm.clock import ProcessorDelay
from evenload.training.parallel.buckets import Bucket
from evenload.training.parallel.wire.codec import message_bytes, pack, unpack
from evenload.training.parallel.wire.formats import CODECS, codec_seconds, wide_dtype

NUM_CALLS = 8
CHOICES = ("fp32", *(codec.name for codec in CODECS))


class GradientObservation:
    """Of the calls of one generation; its sums are equal on all ranks once `add` has returned."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._noise = 0.0
        self._totals = torch.zeros(2 * len(CODECS) + 4, dtype=torch.float64)
        """Over calls and ranks: |g_r|², what each codec loses of it, its seconds for a value and ranks on CPUs (once), seconds in
        which a thread that computed had no processor, seconds of computation with them."""
        self.own = self._totals.clone()
        """The same of this rank in this call."""
        self._num_micro = 1
        self._shares: tuple[int, ...] = ()
        self._began_s = self._delay_s = 0.0
        self._delay = ProcessorDelay()
        """Of the thread that runs a backward on a CPU; one on a GPU runs in a thread of autograd."""

    def begin(self, shares: Sequence[int], num_micro: int) -> None:
        self.own.zero_()
        self._shares, self._num_micro = tuple(shares), num_micro
        self._delay.take_s()
        self._began_s, self._delay_s = time.perf_counter(), 0.0

    def look_at(self, bucket: Bucket) -> None:
        """Encode a bucket that is about to leave in each format."""
        began_s = time.perf_counter()
        self._delay_s += self._delay.take_s()
        values = bucket.memory.gradients.to(wide_dtype(bucket))
        self.own[0] += float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
        part = torch.empty_like(values)
        for index, codec in enumerate(CODECS, start=1):
            message = torch.zeros(message_bytes(codec, len(values)), dtype=torch.uint8, device=values.device)
            pack(codec, values, bucket.memory.norm, message)
            unpack(codec, message, part)
            self.own[index] += float(torch.linalg.vector_norm(part.sub_(values), dtype=torch.float64)) ** 2
        self._delay.take_s()  # that of this look
        self._began_s += time.perf_counter() - began_s
        self.own[-1] = time.perf_counter() - self._began_s
        self.own[-2] = self._delay_s if values.device.type == "cpu" else 0.0

    def rehearse(self, device: torch.device, size: GradientSize) -> None:
        """Add what the codecs cost on this rank's device to one of the calls."""
        found = codec_seconds(device, replace(size, matrices=()))  # no PowerSGD: it is no choice
        costs = [*(found[codec.name] for codec in CODECS), float(device.type == "cpu")]
        self.own[1 + len(CODECS) : -2] = torch.tensor(costs, dtype=torch.float64)

    def add(self, sums: torch.Tensor, square: float) -> None:
        """Add a call: the sum of `own` over ranks, and the squared norm of the summed gradient, in units of the buckets."""
        self.num_calls += 1
        self._totals += sums
        self._noise += noise_square(self._shares, float(sums[0]), square)

    def choose(self, size: GradientSize, link: Link, num_senders: int) -> tuple[str, str]:
        """Return a format and the reason."""
        own, *found, num_cpus, delay_s, computed_s = self._totals.tolist()
        lost, codec_s = (
            dict(zip(CHOICES[1:], part, strict=True)) for part in (found[: len(CODECS)], found[len(CODECS) :])
        )
        num_ranks = len([n for n in self._shares if n]) or 1
        costs = {name: seconds / num_ranks for name, seconds in codec_s.items()}
        num_times = self.num_calls * num_ranks
        work = Work(computed_s / num_times, self._num_micro, costs, encodes_on_cpu=num_cpus > 0)
        work = without_exchange(work, "fp32", size, link, num_senders, delay_s / num_times)
        observed = ObservedGradients(own, self._noise, lost)
        options = wire_options(size, link, num_senders, work, CHOICES)
        return choose_wire(observed, dict(zip(CHOICES, options, strict=True)))
