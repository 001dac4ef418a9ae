"""A queue as JSON."""

from __future__ import annotations

import json

from evenload.views.queue.view import QueueView


def json_of(view: QueueView) -> str:
    """Return one object, with a line for each job."""
    head = {
        "queue": str(view.folder),
        "time_s": view.now_s,
        "from_daemon": view.is_live,
        "counts": dict(view.counts),
        "devices": list(view.devices),
        "problems": list(view.problems),
    }
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode
    start = json.dumps(head, ensure_ascii=False)[:-1]
    jobs = ",\n".join(map(encode, view.jobs))
    return f'{start}, "jobs": [\n{jobs}\n]}}\n'
