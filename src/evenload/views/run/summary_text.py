"""The story of a run as text, for people."""

from __future__ import annotations

from collections.abc import Sequence

from evenload.records.console import format_busy, format_number, format_percent, format_seconds, format_verdict
from evenload.records.summary import Verdict
from evenload.views.run.summary import SharesSpan, Story

MAX_SPANS = 24
"""More changes of the shares than this are cut out of the middle."""
MAX_EVENTS = 40
MAX_RANKS_ACROSS = 8
"""With more ranks, a split is told by its smallest and its largest share."""


def story_text(story: Story) -> str:
    """The whole story, several paragraphs, each line without a newline at the end of the text."""
    paragraphs = [
        _head(story),
        _figures(story),
        _arms(story),
        _shares(story.spans),
        _times(story),
        _events(story),
    ]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def _head(story: Story) -> str:
    if not story.num_steps:
        return f"{story.folder}: no step was committed yet"
    epochs = f"epoch {story.first_epoch}"
    if story.last_epoch > story.first_epoch:
        epochs = f"epochs {story.first_epoch} to {story.last_epoch}"
    sittings = f", {story.num_sittings} sittings" if story.num_sittings > 1 else ""
    return (
        f"{story.folder}: {_many(story.num_steps, 'step')}, {_many(story.num_samples, 'sample')}, {epochs}{sittings}, "
        f"{format_seconds(story.seconds)} in steps"
    )


def _figures(story: Story) -> str:
    whole, early, late, losses = story.whole, story.early, story.late, story.losses
    if whole is None or early is None or late is None or losses is None:
        return ""
    rows = [
        (
            "loss",
            f"{format_number(losses.first)} at first, {format_number(losses.last)} at last, lowest "
            f"{format_number(losses.best)} (step {losses.best_step})",
        ),
        (
            "throughput",
            f"{format_number(whole.samples_per_s)} samples/s; {format_number(early.samples_per_s)} in the first tenth "
            f"of the steps, {format_number(late.samples_per_s)} in the last",
        ),
        ("efficiency", _efficiency(story)),
        (
            "imbalance",
            f"{format_percent(early.imbalance)} in the first tenth, {format_percent(late.imbalance)} in the last "
            f"(max / mean - 1 of the ranks' own seconds)",
        ),
    ]
    if whole.verdict is not None or late.verdict is not None:
        rows.append(("bound by", _verdicts(whole.verdict, late.verdict)))
    rows += [(name, f"{format_number(value)} (newest)") for name, value in story.metrics.items() if name != "loss"]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


def _efficiency(story: Story) -> str:
    whole, late = story.whole, story.late
    if whole is None or late is None:
        return ""
    if whole.efficiency is None or late.efficiency is None:
        return f"not known without the solo speeds; the ranks were busy {format_percent(whole.busy)} of the steps"
    solo = " + ".join(format_number(speed) for speed in story.solo_per_s[:MAX_RANKS_ACROSS])
    solo += " + ..." if len(story.solo_per_s) > MAX_RANKS_ACROSS else ""
    return (
        f"{format_percent(whole.efficiency)} of {solo} samples/s, the sum of the solo speeds; "
        f"{format_percent(late.efficiency)} in the last tenth"
    )


def _verdicts(whole: Verdict | None, late: Verdict | None) -> str:
    """What the run was bound by, where it was not computing, and how it ended."""
    if whole is None:
        return f"computing, but in the last tenth {format_verdict(late)}"
    return f"{format_verdict(whole)}; in the last tenth {format_verdict(late) or 'computing'}"


def _arms(story: Story) -> str:
    if not story.arms:
        return ""
    rows = [["arm", "steps", "samples/s", "", "imbalance"]]
    for arm, summary in story.arms.items():
        rows.append(
            [
                arm or "(none)",
                str(summary.num_steps),
                format_number(summary.samples_per_s),
                format_busy(summary),
                format_percent(summary.imbalance),
            ]
        )
    return "Arms\n" + _aligned(rows, left=1)


def _shares(spans: Sequence[SharesSpan]) -> str:
    if not spans:
        return ""
    world_size = max(len(span.shares) for span in spans)
    wide = world_size <= MAX_RANKS_ACROSS
    arms = any(span.arm for span in spans)
    ranks = [f"rank {rank}" for rank in range(world_size)] if wide else ["shares"]
    head = ["steps", *(["arm"] if arms else []), *ranks, "K", "why"]
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
        rows.append([steps, *([span.arm] if arms else []), *shares, str(span.num_micro), reason])
    samples = sorted({span.num_samples for span in spans})
    return f"Shares of {' or '.join(map(str, samples))} samples\n" + _aligned(rows, left=2 if arms else 1, last=True)


def _times(story: Story) -> str:
    if not story.ranks:
        return ""
    names = [name for name in story.ranks[0].fractions if any(rank.fractions[name] >= 0.0005 for rank in story.ranks)]
    memory = any(rank.memory_bytes for rank in story.ranks)
    rows = [["", *names, *(["memory"] if memory else [])]]
    for index, rank in enumerate(story.ranks):
        name = f"rank {index} {rank.device}".rstrip()
        cells = [f"{rank.fractions[part] * 100:.1f} %" for part in names]
        rows.append([name, *cells, *([_bytes(rank.memory_bytes)] if memory else [])])
    return "Where time went\n" + _aligned(rows, left=1)


def _events(story: Story) -> str:
    if not story.events:
        return ""
    first_s = story.events[0].time
    shown = story.events[-MAX_EVENTS:]
    title = "Events" if len(shown) == len(story.events) else f"Events (the last {len(shown)} of {len(story.events)})"
    rows = [
        [format_seconds(event.time - first_s), "" if event.step is None else f"step {event.step}", event.message]
        for event in shown
    ]
    return f"{title}\n" + _aligned(rows, left=0, last=True)


def _aligned(rows: Sequence[Sequence[str]], left: int, last: bool = False) -> str:
    """Columns under one another: the first ``left`` and, with ``last``, the last one flush left, the others right."""
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


def _bytes(size: float) -> str:
    units = iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"
