"""Predict how long a step takes with each way to exchange gradients, from the measured link; see docs/wire.md.

A step computes for C seconds. Buckets travel during H of them, from the first bucket's gradients to the end of the last of K
micro-batches: H = 2/3 · C / K · (1 - first bucket / all bytes). An exchange of b bytes in each direction needs

    E = b / bandwidth + rounds · latency / 2 + codec,      step = C + E - min(H, (1 - busy) · (E - tail))

with the latency of one small all-reduce, which is two rounds: over gloo a round takes a whole round trip of the link, because
data wait for the receiver's word. `tail` is the last bucket, which leaves when the backward ends: with the gradient of a large
first parameter, such as an embedding. On a CPU, codec counts in C and not in E: the cores that encode compute.
Bandwidth is that of both directions in use at once.

`busy` is the part of a sum's time that a computation beside it loses, 0 where a GPU computes: the kernel and gloo copy on the
cores that compute. While h seconds of a sum pass, the computation gets on by (1 - busy) · h. The encoding of other buckets hides
a sum as the backward does, so on a CPU codec · (1 - last bucket / all bytes) is added to H. The C that is measured in steps
with a format contains what its codec took, and what its sums took from the processor (`without_exchange`).

Islands (strategy ``local``) exchange every `sync_every` steps, with nothing hidden; in fragments everything travels beside steps:

    step = C + (E + outer) / sync_every,      in fragments: max(C, (E + outer) / sync_every) at most

with what they compute for it: the pseudo-gradient and the outer step.

Under ``async`` worker r takes W_r seconds for a whole global batch, and, on another machine than the server, fetches parameters
and sends gradients of b bytes each, one after the other. Rank 0, the server, computes nothing:

    1 / step = min(Σ_r 1 / (W_r + F_r),  bandwidth / b for the workers on other machines),   F_r = b / up + b / down + latency
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from evenload.balance.wire_bytes import EXACT_FORMATS, FORMATS, GradientSize, sent_bytes

_BACKWARD_SHARE = 2 / 3
"""Of a micro-batch."""
_SMALLEST_BUCKET, _LARGEST_BUCKET = 1 << 18, 64 << 20
LOCAL_FRAGMENTS = 4
"""Of the option of strategy ``local`` in fragments."""
_MOST_FASTER = 0.9
"""Of the time of a sum: steps that took less say that computation was measured too dear."""
_LOCAL = 'strategy="local"'
_ROUNDS = {"fp32": 2, "bf16": 1, "fp16": 1, "int8": 1, "powersgd": 4}
"""Between two machines; from three on, quantised formats take two."""


@dataclass(frozen=True)
class Link:
    """A link between machines, as collectives see it."""

    latency_s: float
    """Of one small all-reduce, in two rounds."""
    up_bytes_per_s: float
    """From the first machine to the last."""
    down_bytes_per_s: float
    both_bytes_per_s: float
    """Each way, in an all-reduce that uses both at once."""
    lost_s_per_byte: float = 0.0
    """Seconds that a computation on the same processor loses for each byte that a machine sends in a sum beside it."""

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
    codec_s_per_value: Mapping[str, float] = field(default_factory=dict)
    """By format, the time to encode and decode a value; 0 if it is not known."""
    outer_s_per_value: float = 0.0
    """Work of islands in a synchronisation, besides the sum."""
    encodes_on_cpu: bool = False
    """The processor that computes encodes too, so the backward does not hide that."""
    whole_batch_s: tuple[float, ...] = ()
    """Of each rank, to compute a global batch by itself; empty if it is not known."""
    is_far: tuple[bool, ...] = ()
    """Of each rank: it is on another machine than rank 0."""


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


def exchange_s(wire: str, size: GradientSize, link: Link, num_machines: int, work: Work | None = None) -> float:
    """Return E; with the time to encode, if `work` is given."""
    rounds = _ROUNDS[wire] + (1 if num_machines > 2 and _ROUNDS[wire] == 1 else 0)
    codec_s = size.num_values * work.codec_s_per_value.get(wire, 0.0) if work is not None else 0.0
    return sent_bytes(wire, size, num_machines) / link.bytes_per_s + rounds * link.latency_s / 2 + codec_s


def wire_options(
    size: GradientSize, link: Link, num_machines: int, work: Work, wires: Iterable[str] = FORMATS
) -> list[Option]:
    """Return the formats of strategy ``ddp``."""
    options = []
    for wire in wires:
        one = _overlap(wire, size, link, num_machines, work)
        gained_s = min(one.window_s, (1 - one.busy) * one.hideable_s)
        total_s, sent = exchange_s(wire, size, link, num_machines, work), sent_bytes(wire, size, num_machines)
        step_s = work.compute_s + one.codec_s + one.sum_s - gained_s
        options.append(Option(f'wire="{wire}"', wire in EXACT_FORMATS, sent, total_s, step_s))
    return options


def without_exchange(work: Work, wire: str, size: GradientSize, link: Link, num_machines: int, delay_s: float) -> Work:
    """Return the work without what a format encodes, decodes and sends, in whose steps it was measured.

    `delay_s`: seconds in which the threads that compute had no processor. Sums had it for no longer than they compute, other
    programs, or a quota, for the rest, which stays.
    """
    lost_s = min(delay_s, sent_bytes(wire, size, num_machines) * link.lost_s_per_byte)
    lost_s += _overlap(wire, size, link, num_machines, work).codec_s
    return replace(work, compute_s=max(work.compute_s - lost_s, (1 - _BACKWARD_SHARE) * work.compute_s))


def as_measured(
    options: Sequence[Option], wire: str, size: GradientSize, link: Link, num_machines: int, work: Work, took_s: float
) -> list[Option]:
    """Return the options with what the steps of the present format took beyond (or below) its prediction.

    Up to a round trip of the link it is the same with any format: the rows that ranks exchange in each step wait behind the
    gradients in the link's queue. As far as sums keep processors busy, threads waited for each other, as with any format; else
    the link was slower or faster, for what islands send, too.
    """
    known = {f'wire="{name}"': _overlap(name, size, link, num_machines, work) for name in FORMATS}
    present = next(one for one in options if one.setting == f'wire="{wire}"')
    added_s = present.step_s - work.compute_s
    rest_s = min(added_s, max(-_MOST_FASTER * added_s, took_s - present.step_s))
    busy, sum_s = known[present.setting].busy if rest_s > 0 else 0.0, known[present.setting].sum_s
    if not sum_s:
        return list(options)
    rows_s = max(0.0, min(rest_s, link.latency_s / 2))
    link_s = (1 - busy) * (rest_s - rows_s)
    any_s = rest_s - link_s

    def found(one: Option) -> Option:
        if one.setting in known:
            return replace(one, step_s=one.step_s + any_s + link_s * min(1.0, known[one.setting].sum_s / sum_s))
        if not one.setting.startswith(_LOCAL) or not present.sent_bytes:
            return one
        more_s = max(-_MOST_FASTER * one.exchange_s, link_s * one.sent_bytes / present.sent_bytes)
        each_s = one.exchange_s + more_s
        return replace(one, exchange_s=each_s, step_s=_islands_step_s(one.setting, work, each_s))

    return list(map(found, options))


@dataclass(frozen=True)
class _Overlap:
    """One step's sum beside its backward, in seconds."""

    codec_s: float
    """On the cores that compute."""
    sum_s: float
    """Of the rest of the exchange, with nothing beside it."""
    hideable_s: float
    """All of it but the last bucket."""
    window_s: float
    """Of the backward after the first bucket has left, and of the codec until the last one has."""
    busy: float


def _overlap(wire: str, size: GradientSize, link: Link, num_machines: int, work: Work) -> _Overlap:
    first, last = _end_buckets(size, bucket_sizes(size, link, num_machines, wire))
    codec_s = size.num_values * work.codec_s_per_value.get(wire, 0.0) if work.encodes_on_cpu else 0.0
    sum_s = exchange_s(wire, size, link, num_machines, work) - codec_s
    lost_s = sent_bytes(wire, size, num_machines) * link.lost_s_per_byte
    return _Overlap(
        codec_s,
        sum_s,
        hideable_s=max(0.0, sum_s - last * sum_s - link.latency_s / 2),
        window_s=_BACKWARD_SHARE * (1 - first) * work.compute_s / max(1, work.num_micro) + (1 - last) * codec_s,
        busy=min(1.0, lost_s / sum_s) if sum_s else 0.0,
    )


def local_options(size: GradientSize, link: Link, num_machines: int, work: Work, sync_every: int) -> list[Option]:
    """Return strategy ``local``: at once, in fragments, and at once in the format with the fewest bytes per value."""
    options = []
    setting = f"{_LOCAL}, sync_every={sync_every}"
    for wire, more in (("fp32", ""), ("fp32", f", fragments={LOCAL_FRAGMENTS}"), ("int8", ', wire="int8"')):
        if more and sync_every < LOCAL_FRAGMENTS:
            continue
        num_parts = LOCAL_FRAGMENTS if "fragments" in more else 1
        sum_s = exchange_s(wire, size, link, num_machines, work)
        # Each fragment waits for a latency of its own, and what islands report to each other for another one, beside two steps.
        total_s = sum_s + (num_parts - 1) * link.latency_s + max(0.0, link.latency_s - 2 * work.compute_s)
        each_s = (total_s + size.num_values * work.outer_s_per_value) / sync_every
        sent, step_s = sent_bytes(wire, size, num_machines) / sync_every, _islands_step_s(more, work, each_s)
        options.append(Option(setting + more, False, sent, each_s, step_s))
    return options


def _islands_step_s(setting: str, work: Work, each_s: float) -> float:
    return max(work.compute_s, each_s) if "fragments" in setting else work.compute_s + each_s


def async_option(size: GradientSize, link: Link, work: Work) -> Option | None:
    """Return strategy ``async`` with rank 0 as the server; None where the ranks' times are not known, or no worker is left."""
    workers = list(zip(work.whole_batch_s, work.is_far, strict=True))[1:]
    if not workers:
        return None
    num_bytes = size.num_values * size.value_bytes
    way_s = num_bytes / link.up_bytes_per_s + num_bytes / link.down_bytes_per_s + link.latency_s
    near = sum(1 / max(1e-9, seconds) for seconds, is_far in workers if not is_far)
    far = sum(1 / (seconds + way_s) for seconds, is_far in workers if is_far)
    far = min(far, link.bytes_per_s / max(1, num_bytes))
    if not near + far:
        return None
    step_s = 1 / (near + far)
    return Option('strategy="async"', False, num_bytes * far * step_s, way_s * far * step_s, step_s)


def options_of(size: GradientSize, link: Link, num_machines: int, work: Work, sync_every: int = 20) -> list[Option]:
    """Return all options, of each strategy that exchanges gradients between machines; `sync_every` is that of ``local``."""
    asynchronous = async_option(size, link, work)
    return [
        *wire_options(size, link, num_machines, work),
        *local_options(size, link, num_machines, work, sync_every),
        *([] if asynchronous is None else [asynchronous]),
    ]


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


def _end_buckets(size: GradientSize, sizes: BucketSizes) -> tuple[float, float]:
    """Return the parts of all bytes in the first and in the last bucket; gradients come in the reverse order of registration."""
    parts, limit = [0.0], sizes.first_bytes
    for num_rows, num_columns in reversed(size.matrices):
        if parts[-1] >= limit:
            parts.append(0.0)
            limit = sizes.other_bytes
        parts[-1] += num_rows * num_columns * size.value_bytes
    total = size.num_values * size.value_bytes or 1
    return parts[0] / total, parts[-1] / total


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


def describe_exchange(options: Sequence[Option]) -> str:
    """Return what an exchange takes with options of no computation, which nothing hides, and which is the cheapest."""
    best, exact = cheapest(options, exact=False), cheapest(options, exact=True)
    times = ", ".join(f"{one.setting} {one.exchange_s:.2g} s" for one in options)
    return f"{times}. Cheapest with the exact result: {exact.setting}; cheapest at all: {best.setting}"
