"""`LinkAdvice`: predicts what each way to exchange gradients costs on this link, before the loop and with measured steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace

from torch import nn

from evenload.balance.exchange_times import (
    Work,
    as_measured,
    cheapest,
    describe,
    describe_exchange,
    options_of,
    without_exchange,
)
from evenload.records.reader import read_events
from evenload.training.compute import randomness
from evenload.training.parallel.outer import outer_seconds
from evenload.training.parallel.wire.formats import codec_seconds
from evenload.training.parallel.wire.gradient_wire import gradient_size
from evenload.training.session.async_run import is_asynchronous
from evenload.training.step.context import TrainingContext
from evenload.training.step.step import Step, StepListener

_NUM_STEPS = 6
"""Usual steps from which the time of computation is taken."""


class LinkAdvice(StepListener):
    def __init__(self, context: TrainingContext, models: Sequence[nn.Module]) -> None:
        self._context = context
        self._models = models
        self._computed_s: list[float] = []
        self._delay_s: list[float] = []
        self._took_s: list[float] = []

    def opening(self) -> list[str]:
        """Return what is known before the first step; empty without a link between machines that was measured."""
        context = self._context
        wire = context.config.wire
        if wire != "fp32" and context.groups.world_size == 1:
            return [f"wire={wire} has no effect here: there is one rank, which sends nothing"]
        if context.link is None or context.link.link is None:
            return []
        link, size, senders = context.link.link, gradient_size(self._models), context.link.num_senders
        options = options_of(size, link, senders, Work(0.0), context.config.sync_every)
        own = (
            ""
            if wire in ("fp32", "auto") or context.islands is not None
            else f". wire={wire} is not exact, and the first step reports by how much"
        )
        later = (
            ""
            if is_asynchronous(context.config, context.spec)
            else f". The backward hides a part: a run predicts whole steps after {_NUM_STEPS} of them"
        )
        return [
            f"link between {senders} {'ranks' if len(context.groups.generation.hosts) == 1 else 'machines'}: "
            f"{link.latency_s * 1e3:.3g} ms for a small sum, {link.up_bytes_per_s / 1e6:.3g} MB/s from rank 0, "
            f"{link.down_bytes_per_s / 1e6:.3g} MB/s to it, {link.both_bytes_per_s / 1e6:.3g} MB/s each way at once. The "
            f"gradients of a step have {size.num_values * size.value_bytes / 1e6:.3g} MB; to exchange them takes, on average, "
            f"{describe_exchange(options)}{later}{own}"
        ]

    def for_a_dry_run(self) -> list[str]:
        """Return the opening lines, and predicted steps if an earlier run in this folder has measured what they compute."""
        context = self._context
        found = [event for event in read_events(context.folder) if event.kind == "advice"]
        if not found or context.link is None or (link := context.link.link) is None:
            return self.opening()
        size, compute_s = gradient_size(self._models), float(found[-1].fields["compute_s"])
        options = options_of(size, link, context.link.num_senders, self._work(compute_s), context.config.sync_every)
        return [
            *self.opening(),
            f"in the last run in this folder a step computed for {compute_s:.3g} s on the slowest rank. Predicted on this link:",
            *(f"  {line}" for line in describe(options)),
        ]

    def _work(self, compute_s: float) -> Work:
        """Return the work of a step with what the formats and islands compute, which is timed now."""
        device, size = self._context.device, gradient_size(self._models)
        with randomness.set_aside(device):
            codec_s, outer_s = codec_seconds(device, size), outer_seconds(device)
        return Work(
            compute_s,
            codec_s_per_value=codec_s,
            outer_s_per_value=outer_s,
            encodes_on_cpu=device.type == "cpu",
        )

    def announce(self) -> None:
        """Record it as an event."""
        link = self._context.link.link if self._context.link is not None else None
        for line in self.opening():
            self._context.recorder.event("link", line, **(asdict(link) if link is not None else {}))

    @property
    def rests(self) -> bool:
        return self._context.link is None or self._context.link.link is None or len(self._computed_s) == _NUM_STEPS

    def on_trained(self, step: Step) -> None:
        context = self._context
        if (meter := context.link) is None or (link := meter.link) is None or len(self._computed_s) == _NUM_STEPS:
            return
        if not step.stats.is_usual or context.control.apart:  # under async each rank is alone in a step
            return
        if (timed := step.stats.timed) is None:
            return
        self._computed_s.append(max(timed.own_seconds()))
        self._delay_s.append(timed.delay_s)
        self._took_s.append(timed.whole_seconds())
        if len(self._computed_s) < _NUM_STEPS:
            return
        # The first steps load code and fill caches.
        plan = step.batch.plan
        # An island knows its own ranks' times.
        whole = [] if context.islands is not None else list(zip(timed.own_seconds(), plan.shares, strict=False))
        far = {rank for host in context.groups.generation.hosts if 0 not in host for rank in host}
        size, senders = gradient_size(self._models), meter.num_senders
        work = replace(
            self._work(statistics.median(self._computed_s[1:])),
            num_micro=plan.num_micro,
            whole_batch_s=tuple(seconds * plan.num_samples / share if share else math.inf for seconds, share in whole),
            is_far=tuple(rank in far for rank in range(len(whole))),
        )
        took_s, is_island = statistics.median(self._took_s[1:]), context.islands is not None
        present = context.wire.format if context.wire is not None else None
        wire = "fp32" if present is None else present.name
        if not is_island:
            work = without_exchange(work, wire, size, link, senders, statistics.median(self._delay_s[1:]))
        options = options_of(size, link, senders, work, context.config.sync_every)
        options = options if is_island else as_measured(options, wire, size, link, senders, work, took_s)
        best, exact = cheapest(options, exact=False), cheapest(options, exact=True)
        context.recorder.event(
            "advice",
            f"a step computes for {work.compute_s:.3g} s on the slowest rank and took {took_s:.3g} s. Predicted on this link:\n"
            + "\n".join(f"  {line}" for line in describe(options)),
            step=step.index,
            took_s=took_s,
            compute_s=work.compute_s,
            options=[asdict(one) for one in options],
            cheapest=best.setting,
            cheapest_exact=exact.setting,
        )
