"""Text form of the summary of a run."""

from __future__ import annotations

import time
from collections.abc import Sequence

from evenload.records.checkpoints import CheckpointInfo
from evenload.records.console import format_bottleneck, format_busy, format_number, format_percent, format_seconds
from evenload.records.summary import StepBottleneck
from evenload.views.run.summary import RankBreakdown, RunSummary, SharesSpan

MAX_SPANS = 24
"""Further changes of the shares are omitted in the middle."""
MAX_EVENTS = 40
MAX_SLOWEST = 16
"""Ranks shown of more than 128."""
MAX_RANKS_ACROSS = 8
"""With more ranks, a split is shown as its smallest and largest share."""


def format_run_summary(summary: RunSummary) -> str:
    """Format the summary as several paragraphs, without a newline at the end."""
    paragraphs = [
        _header(summary),
        _figures(summary),
        _measurement(summary),
        _shares(summary.spans),
        _times(summary),
        _checkpoints(summary.checkpoints),
        _events(summary),
    ]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def _header(summary: RunSummary) -> str:
    if not summary.num_steps:
        return f"{summary.folder}: no step was committed yet"
    epochs = f"epoch {summary.first_epoch}"
    if summary.last_epoch > summary.first_epoch:
        epochs = f"epochs {summary.first_epoch} to {summary.last_epoch}"
    sessions = f", {summary.num_sessions} sessions" if summary.num_sessions > 1 else ""
    return (
        f"{summary.folder}: {_many(summary.num_steps, 'step')}, {_many(summary.num_samples, 'sample')}, {epochs}{sessions}, "
        f"{format_seconds(summary.seconds)} in steps"
    )


def _figures(summary: RunSummary) -> str:
    whole, early, late, losses = summary.whole, summary.early, summary.late, summary.losses
    if whole is None or early is None or late is None or losses is None:
        return ""
    rows = [
        (
            "loss",
            f"{format_number(losses.first)} first, {format_number(losses.last)} last, lowest "
            f"{format_number(losses.best)} (step {losses.best_step})",
        ),
        (
            "throughput",
            f"{format_number(whole.samples_per_s)} samples/s; {format_number(early.samples_per_s)} in the first tenth "
            f"of the steps, {format_number(late.samples_per_s)} in the last",
        ),
        ("efficiency", _efficiency(summary)),
        (
            "imbalance",
            f"{format_percent(early.imbalance)} in the first tenth, {format_percent(late.imbalance)} in the last "
            f"(max / mean - 1 of the ranks' own seconds)",
        ),
    ]
    if whole.bottleneck is not None or late.bottleneck is not None:
        rows.append(("bottleneck", _bottlenecks(whole.bottleneck, late.bottleneck)))
    rows += [(name, f"{format_number(value)} (newest)") for name, value in summary.metrics.items() if name != "loss"]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


def _efficiency(summary: RunSummary) -> str:
    whole, late = summary.whole, summary.late
    if whole is None or late is None:
        return ""
    if whole.efficiency is None or late.efficiency is None:
        return f"unknown without the solo speeds; the ranks were busy for {format_percent(whole.busy)} of the steps"
    solo = " + ".join(format_number(speed) for speed in summary.solo_per_s[:MAX_RANKS_ACROSS])
    solo += " + ..." if len(summary.solo_per_s) > MAX_RANKS_ACROSS else ""
    return (
        f"{format_percent(whole.efficiency)} of {solo} samples/s, the sum of the solo speeds; "
        f"{format_percent(late.efficiency)} in the last tenth"
    )


def _bottlenecks(whole: StepBottleneck | None, late: StepBottleneck | None) -> str:
    if whole is None:
        return f"compute; in the last tenth {format_bottleneck(late)}"
    return f"{format_bottleneck(whole)}; in the last tenth {format_bottleneck(late) or 'compute'}"


def _measurement(summary: RunSummary) -> str:
    if not summary.by_arm:
        return ""
    rows = [["arm", "steps", "samples/s", "", "imbalance"]]
    for arm, window in summary.by_arm.items():
        rows.append(
            [
                arm or "(none)",
                str(window.num_steps),
                format_number(window.samples_per_s),
                format_busy(window),
                format_percent(window.imbalance),
            ]
        )
    return "Measurement\n" + _aligned(rows, left=1)


def _shares(spans: Sequence[SharesSpan]) -> str:
    if not spans:
        return ""
    world_size = max(len(span.shares) for span in spans)
    wide = world_size <= MAX_RANKS_ACROSS
    has_arms = any(span.arm for span in spans)
    ranks = [f"rank {rank}" for rank in range(world_size)] if wide else ["shares"]
    head = ["steps", *(["arm"] if has_arms else []), *ranks, "K", "reason"]
    rows = [head]
    gap = len(spans) - MAX_SPANS
    for index, span in enumerate(spans):
        if gap > 0 and MAX_SPANS // 2 <= index < MAX_SPANS // 2 + gap:
            if index == MAX_SPANS // 2:
                rows.append([f"({gap} more)", *[""] * (len(head) - 1)])
            continue
        steps = f"{span.first_step} to {span.last_step}" if span.last_step > span.first_step else str(span.first_step)
        shares = [str(share) for share in span.shares]
        shares = shares + ["-"] * (world_size - len(shares)) if wide else [_range(span.shares)]
        reason = span.reason or ("at the start" if index == 0 else "")
        rows.append([steps, *([span.arm] if has_arms else []), *shares, str(span.num_micro), reason])
    samples = sorted({span.num_samples for span in spans})
    return f"Shares of {' or '.join(map(str, samples))} samples\n" + _aligned(
        rows, left=2 if has_arms else 1, last=True
    )


def _times(summary: RunSummary) -> str:
    if not summary.ranks:
        return ""
    shown = list(range(len(summary.ranks)))
    title = "Time by segment"
    if summary.whole is not None and summary.whole.many is not None:
        shown = sorted(shown, key=lambda rank: _held(summary.ranks[rank]))[:MAX_SLOWEST]
        of_steps = f"{max(rank.num_steps for rank in summary.ranks)} of {_many(summary.num_steps, 'step')}"
        title += f" in the {of_steps} whose records have it, for the {len(shown)} of {len(summary.ranks)} ranks that wait least"
    ranks = [summary.ranks[rank] for rank in shown]
    names = [name for name in ranks[0].fractions if any(rank.fractions[name] >= 0.0005 for rank in ranks)]
    memory = any(rank.memory_bytes for rank in ranks)
    rows = [["", *names, *(["memory"] if memory else [])]]
    for index, rank in zip(shown, ranks, strict=True):
        name = f"rank {index} {rank.device}".rstrip()
        cells = [f"{rank.fractions[part] * 100:.1f} %" for part in names]
        rows.append([name, *cells, *([format_bytes(rank.memory_bytes)] if memory else [])])
    return f"{title}\n" + _aligned(rows, left=1)


def _held(rank: RankBreakdown) -> float:
    return rank.fractions["wait"] + rank.fractions["comm"]


def _checkpoints(checkpoints: Sequence[CheckpointInfo]) -> str:
    if not checkpoints:
        return ""
    has_metric = any(info.value is not None for info in checkpoints)
    metric = next((info.metric for info in reversed(checkpoints) if info.metric), "")
    rows = [["step", "epoch", "written", "size", *([metric] if has_metric else []), ""]]
    for info in checkpoints:
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.time))
        value = [] if not has_metric else ["-" if info.value is None else format_number(info.value)]
        marks = ", ".join(word for word, holds in (("best", info.is_best), ("last", info.is_last)) if holds)
        if info.damage:
            marks = f"DAMAGED: {info.damage}"
        epoch = "-" if info.epoch is None else str(info.epoch)
        rows.append([str(info.step), epoch, written, format_bytes(info.size_bytes), *value, marks])
    return "Checkpoints\n" + _aligned(rows, left=0, last=True)


def _events(summary: RunSummary) -> str:
    if not summary.events:
        return ""
    first_s = summary.events[0].time
    shown = summary.events[-MAX_EVENTS:]
    title = (
        "Events" if len(shown) == len(summary.events) else f"Events (the last {len(shown)} of {len(summary.events)})"
    )
    rows = []
    for event in shown:
        first, *more = event.message.splitlines() or [""]
        step = "" if event.step is None else f"step {event.step}"
        rows.append([format_seconds(event.time - first_s), step, first])
        rows += [["", "", line] for line in more]
    return f"{title}\n" + _aligned(rows, left=0, last=True)


def _aligned(rows: Sequence[Sequence[str]], left: int, last: bool = False) -> str:
    """Align columns: the first ``left`` ones and, with ``last``, the last one to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    flush = set(range(left)) | ({len(widths) - 1} if last else set())
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in flush else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def _range(shares: Sequence[int]) -> str:
    return f"{min(shares)} to {max(shares)} on {len(shares)}"


def _many(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")


def format_bytes(size: float) -> str:
    units = iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"
