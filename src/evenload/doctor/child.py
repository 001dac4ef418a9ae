"""The doctor's child: runs the named checks and prints one finding a line, as JSON, each as soon as it is known.

``python -m evenload.doctor.child '{"checks": ["machine:cores"]}'`` runs one by hand.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, replace
from importlib import import_module

from evenload.doctor.finding import Finding, Options


def main(argument: str) -> None:
    """Runs the checks of a request: ``{"checks": ["module:function", ...], "options": {...}}``."""
    began = time.monotonic()
    request = json.loads(argument)
    options = Options(**request.get("options", {}))
    with os.fdopen(os.dup(1), "w") as findings:
        os.dup2(2, 1)  # what libraries print is no finding
        for name in request["checks"]:
            module, _, function = name.partition(":")
            home = module if "." in module else f"evenload.doctor.checks.{module}"
            finding: Finding = getattr(import_module(home), function)(
                replace(options, limit_s=options.limit_s - (time.monotonic() - began))
            )
            print(json.dumps(asdict(finding)), file=findings, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
