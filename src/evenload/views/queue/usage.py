"""The use of a queue's devices by month, group and user, as text, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from typing import Any

from evenload.views.queue.text import aligned, clean

_VALUES = ("num_jobs", "device_hours", "waited_hours", "num_preempted", "cost", "saved")


def _rows(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows with hours for people, without keys that the report sums over."""
    return [
        {
            **{key: row[key] for key in table["by"]},
            "num_jobs": row["num_jobs"],
            "device_hours": row["device_s"] / 3600,
            "waited_hours": row["waited_s"] / 3600,
            "num_preempted": row["num_preempted"],
            "cost": row["cost"],
            "saved": row["saved"],
        }
        for row in table["rows"]
    ]


def report_json(table: Mapping[str, Any]) -> str:
    return json.dumps(_rows(table), indent=1, ensure_ascii=False)


def report_csv(table: Mapping[str, Any]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, (*table["by"], *_VALUES), lineterminator="\n")
    writer.writeheader()
    writer.writerows(_rows(table))
    return text.getvalue().rstrip("\n")


def report_lines(table: Mapping[str, Any]) -> str:
    """Return a table for people, its last line the sum; costs only where a device has a price."""
    rows = _rows(table)
    if not rows:
        return "nothing was submitted and no device was used in that time"
    if len(rows) > 1 and table["by"]:
        total = {key: sum(row[key] for row in rows) for key in _VALUES}
        rows.append({**dict.fromkeys(table["by"], ""), table["by"][0]: "total", **total})
    has_cost = any(row["cost"] for row in rows)
    money = ("cost", "saved") if has_cost else ("", "")
    lines = [(*table["by"], "jobs", "device-hours", "hours waited", "preempted", *money)]
    lines += [
        (
            *(clean(row[key]) for key in table["by"]),
            str(row["num_jobs"]),
            f"{row['device_hours']:.2f}",
            f"{row['waited_hours']:.2f}",
            str(row["num_preempted"]),
            *((f"{row['cost']:.2f}", f"{_unsigned(row['saved']):.2f}") if has_cost else ("", "")),
        )
        for row in rows
    ]
    return "\n".join(aligned(lines))


def _unsigned(value: float) -> float:
    """Return a value without the sign of a zero."""
    return 0.0 if abs(value) < 0.005 else value
