"""A process that speaks to the queue on Ray for the tests: a call a line in, its answer a line out, both JSON.

Ray leaves threads and variables in whoever connects; so the tests don't. ``python ray_client.py ADDRESS ROOT``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from evenload.errors import EvenloadError
from evenload.scheduler.backends.interface import BackendRequest
from evenload.scheduler.backends.ray.backend import RayBackend


def main() -> None:
    backend = RayBackend(sys.argv[1], Path(sys.argv[2]))
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        try:
            answer: Any = _answer(backend, verb, arguments)
        except EvenloadError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(f"answer {json.dumps(answer)}", flush=True)
    sys.stdout.flush()
    os._exit(0)


def _answer(backend: RayBackend, verb: str, arguments: list[Any]) -> Any:
    if verb == "submit":
        (job,) = backend.submit(BackendRequest(**arguments[0]))
        return job
    if verb == "describe":
        return [dataclasses.asdict(described) for described in backend.describe(arguments[0])]
    if verb == "cancel":
        return backend.cancel(*arguments[:1], now=bool(arguments[1:]))
    if verb == "change":
        return backend.change(*arguments)
    if verb == "hold":
        return backend.hold(arguments[0], is_held=arguments[1])
    if verb == "job rows":
        return backend.job_rows(arguments[0])
    if verb == "rows":
        return backend.rows(None, (), None)
    if verb == "kill the queue":
        import ray

        ray.kill(ray.get_actor("queue", namespace="evenload"), no_restart=False)
        return None
    return backend.output(arguments[0]).read().decode()


if __name__ == "__main__":
    main()
