"""Predict how long a step takes with each way to exchange gradients, from the measured link; see docs/wire.md.

A step computes for C seconds, of which the backward of the last micro-batch takes H: buckets travel meanwhile. An exchange of
b bytes in each direction needs

    E = b / bandwidth + rounds · latency / 2 + codec,      step = C + max(tail, E - H)

with the latency of one small all-reduce, which is two rounds. `tail` is the last bucket, which leaves when the backward ends.
Bandwidth is that of both directions in use at once.

Strategies that exchange more rarely add a function of their own beside `wire_options`, and their options to `options_of`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from evenload.balance.wire_bytes import EXACT_FORMATS, FORMATS, GradientSize, sent_bytes

_HIDDEN_SHARE = 0.6
"""The backward takes about two thirds of a micro-batch; the first bucket leaves after a part of it."""
_SMALLEST_BUCKET, _LARGEST_BUCKET = 1 << 18, 64 << 20
_ROUNDS = {"fp32": 2, "bf16": 1, "fp16": 1, "int8": 1, "powersgd": 4}
"""Between two machines; from three on, quantised formats take two."""


@dataclass(frozen=True)
class Link:
    """A link between machines, as collectives see it."""

    latency_s: float
    """Of one small all-reduce."""
    up_bytes_per_s: float
    """From the first machine to the last."""
    down_bytes_per_s: float
    both_bytes_per_s: float
    """Each way, in an all-reduce that uses both at once."""

    @property
    def bytes_per_s(self) -> float:
        """The speed that limits an exchange in both directions."""
        return min(self.up_bytes_per_s, self.down_bytes_per_s, self.both_bytes_per_s)


@dataclass(frozen=True)
class Work:
    """Computation of a rank in a step."""

    compute_s: float
    """Without waiting for others."""
    num_micro: int = 1
    codec_s_per_byte: float = 0.0
    """Time to encode and decode a byte of gradients; 0 if it is not known."""

    @property
    def hidden_s(self) -> float:
        """Part of the backward during which buckets travel."""
        return _HIDDEN_SHARE * self.compute_s / max(1, self.num_micro)


@dataclass(frozen=True)
class Option:
    """A way to exchange, and its predicted cost."""

    setting: str
    """As the user writes it, such as ``wire="int8"``."""
    is_exact: bool
    sent_bytes: float
    """By each machine in a step, on average."""
    exchange_s: float
    """In a step, on average, if nothing of it is hidden."""
    step_s: float


def exchange_s(wire: str, size: GradientSize, link: Link, num_machines: int, codec_s_per_byte: float = 0.0) -> float:
    """Return E."""
    rounds = _ROUNDS[wire] + (1 if num_machines > 2 and _ROUNDS[wire] == 1 else 0)
    codec_s = 0.0 if wire == "fp32" else codec_s_per_byte * size.num_values * size.value_bytes
    return sent_bytes(wire, size, num_machines) / link.bytes_per_s + rounds * link.latency_s / 2 + codec_s


def wire_options(
    size: GradientSize, link: Link, num_machines: int, work: Work, wires: Iterable[str] = FORMATS
) -> list[Option]:
    """Return the formats of strategy ``ddp``."""
    options = []
    for wire in wires:
        total_s = exchange_s(wire, size, link, num_machines, work.codec_s_per_byte)
        buckets = bucket_sizes(size, link, num_machines, wire)
        num_buckets = max(1.0, size.num_values * size.value_bytes / buckets.other_bytes)
        tail_s = min(total_s, total_s / num_buckets + link.latency_s / 2)
        step_s = work.compute_s + max(tail_s, total_s - work.hidden_s)
        sent = sent_bytes(wire, size, num_machines)
        options.append(Option(f'wire="{wire}"', wire in EXACT_FORMATS, sent, total_s, step_s))
    return options


def options_of(size: GradientSize, link: Link, num_machines: int, work: Work) -> list[Option]:
    """Return all options, of each strategy that exchanges gradients between machines."""
    return [*wire_options(size, link, num_machines, work)]


def cheapest(options: Sequence[Option], *, exact: bool) -> Option:
    """Return the option with the shortest step, among the exact ones if `exact`; at equal times the first."""
    return min((one for one in options if one.is_exact or not exact), key=lambda one: one.step_s)


@dataclass(frozen=True)
class BucketSizes:
    """Bytes of gradients in a bucket, as the model has them."""

    first_bytes: float
    other_bytes: float


def bucket_sizes(size: GradientSize, link: Link, num_machines: int, wire: str = "fp32") -> BucketSizes:
    """Return the sizes that cost least on a link.

    Each of B / b buckets costs a latency, and the last one travels after the backward, for b / bandwidth: the sum is smallest at
    b = √(B · latency · bandwidth). The first bucket should leave early, but keep the link busy for one latency.
    """
    total = size.num_values * size.value_bytes
    if not total:
        return BucketSizes(_SMALLEST_BUCKET, _SMALLEST_BUCKET)
    # A format that sends less has a link that is as much faster.
    speed = link.bytes_per_s * total / max(1.0, sent_bytes(wire, size, max(2, num_machines)))
    product = link.latency_s * speed
    other = min(_LARGEST_BUCKET, max(_SMALLEST_BUCKET, math.sqrt(total * product)))
    return BucketSizes(min(other, max(_SMALLEST_BUCKET, product)), other)


def describe(options: Sequence[Option]) -> list[str]:
    """Return a line for each option, and one that names the cheapest."""
    lines = [
        f"{one.setting}: {one.sent_bytes / 1e6:.3g} MB, {one.step_s:.3g} s a step"
        + ("" if one.is_exact else ", not exact")
        for one in options
    ]
    best, exact = cheapest(options, exact=False), cheapest(options, exact=True)
    named = f"cheapest: {exact.setting} with the exact result ({exact.step_s:.3g} s)"
    return [*lines, named + (f", {best.setting} at all ({best.step_s:.3g} s)" if best is not exact else "")]
