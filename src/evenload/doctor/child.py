"""Child process of the doctor: run checks and print one finding per line as JSON, each as soon as it is known.

``python -m evenload.doctor.child '{"checks": ["cpu:cores"]}'`` runs one by hand.
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
    """Run the checks of ``{"checks": ["module:function", ...], "options": {...}, "limits_s": [60, ...]}``.

    Without limits the checks share ``limit_s`` of the options.
    """
    began = time.monotonic()
    request = json.loads(argument)
    options = Options(**request.get("options", {}))
    with os.fdopen(os.dup(1), "w") as findings:
        os.dup2(2, 1)  # keep the output of libraries apart from the findings
        for index, name in enumerate(request["checks"]):
            limits_s = request.get("limits_s")
            limit_s = limits_s[index] if limits_s else options.limit_s - (time.monotonic() - began)
            print(json.dumps(_run(name, replace(options, limit_s=limit_s))), file=findings, flush=True)


def _run(name: str, options: Options) -> dict[str, Any]:
    module, _, function = name.partition(":")
    try:
        check = getattr(import_module(module if "." in module else f"evenload.doctor.checks.{module}"), function)
        return asdict(check(options))
    except Exception as error:  # an error in one check must not stop the next
        traceback.print_exc()
        return {"raised": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main(sys.argv[1])
