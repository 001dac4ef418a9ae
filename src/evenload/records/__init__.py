"""What happened: events and steps of a run, written once and read by everybody else.

A run folder holds `config.toml`, `events.jsonl` and `steps.jsonl`. The two logs are append-only, one JSON object a
line, with the schema number in the first line; JSON has no NaN, so numbers that aren't finite are the strings
``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which Python's `float` reads back.

`values` says what is written, `lines` how, `recorder` writes it, `reader` reads it, also while it is written, `summary`
is the arithmetic over steps, `console` the plain line, `loggers` the other places for `run.log`.
"""
