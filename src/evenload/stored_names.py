"""Names that runs and queues on disk were written with, where the code now uses other words.

The only place for old words: everything else uses the names of docs/glossary.md. Add a line here, with what reads it, when
a stored name and its name in the code differ. Keep a line for as long as files with it may exist.
"""

from __future__ import annotations

STORED_EVENTS = {
    "JobStarted": "Began",
    "JobHeld": "Held",
    "MemoryMeasured": "Measured",
    "ResizeRequested": "ResizeAsked",
    "SpecChanged": "Respecified",
    "StopRequested": "StopAsked",
}
"""Queue events (`scheduler.store.event_rows`): class → kind in a queue's log. The others are stored under their own names."""

REMOVED_SETTINGS = ("price_weight", "energy_weight")
"""Settings of a queue that are gone: an error in a file or command, left out where a queue had stored them."""

SPEC_FILE = "order.json"
"""An attempt's `AttemptSpec`; read by scheduler.runner.files, like the next four."""
REQUEST_FILE = "ask.json"
MARKERS_FILE = "marks.json"
REPORT_FOLDER = "told"
RESULT_FIELDS = {"requested": "asked"}
"""Fields of `RunnerResult` and their keys in result.json."""

RUN_SUMMARY_JSON = {"num_sessions": "num_sittings", "by_arm": "arms", "bottleneck": "verdict"}
"""Fields of `views.run.summary.RunSummary`, and the keys that `evenload show RUN --json` prints for them."""

FINDING_JSON = {"fix": "mend"}
"""Fields of `doctor.finding.Finding`, and the keys that `evenload doctor --json` prints for them."""

RAY_LOG = "events.jsonl"
"""The log of a queue on Ray before it was a `QueueStore`; imported by scheduler.backends.ray.queue."""

MEASUREMENT_BEGIN = "windows_begin"
"""Kind of the event in a run's records where a measurement (`training.measure`) begins."""
MEASUREMENT = "windows"
"""Kind of the event that holds a measurement's blocks."""
STORED_MODES = {"windows": "measure"}
"""`WorkerSpec.mode` in a worker's file: stored word → mode. The others are stored under their own names."""

VERIFY_JSON = {"fix": "mend", "unprepared": "strangers"}
"""Fields of `training.verify.findings`, and the keys that `evenload verify --json` prints for them."""
