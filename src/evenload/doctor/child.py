"""The doctor's child: runs the named checks and prints one finding a line, as JSON, each as soon as it is known.

``python -m evenload.doctor.child '{"checks": ["machine:cores"]}'`` runs one by hand.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import asdict, replace
from importlib import import_module
from typing import Any

from evenload.doctor.finding import Options


def main(argument: str) -> None:
    """Runs the checks of a request: ``{"checks": ["module:function", ...], "options": {...}}``."""
    began = time.monotonic()
    request = json.loads(argument)
    options = Options(**request.get("options", {}))
    with os.fdopen(os.dup(1), "w") as findings:
        os.dup2(2, 1)  # what libraries print is no finding
        for name in request["checks"]:
            left_s = options.limit_s - (time.monotonic() - began)
            print(json.dumps(_run(name, replace(options, limit_s=left_s))), file=findings, flush=True)


def _run(name: str, options: Options) -> dict[str, Any]:
    """A finding as plain values, or ``{"raised": ...}``: a faulty check must not keep the next from its turn."""
    module, _, function = name.partition(":")
    try:
        check = getattr(import_module(module if "." in module else f"evenload.doctor.checks.{module}"), function)
        return asdict(check(options))
    except Exception as error:
        traceback.print_exc()
        return {"raised": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main(sys.argv[1])
