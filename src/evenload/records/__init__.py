"""Records of a run: events and steps, written once and read by all views.

A run folder holds `config.toml`, `events.jsonl` and `steps.jsonl`. The two logs are append-only, one JSON object per
line, with the schema number in the first line. JSON has no NaN, so non-finite numbers are written as the strings
``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which Python's `float` reads back.

`values` defines the records and `lines` their JSON form. `recorder` writes them, `reader` reads them, also while the
run continues. `summary` computes statistics over steps, `console` formats progress lines, `loggers` forwards metrics.
"""
