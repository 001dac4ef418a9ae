"""``python -m evenload.doctor``: the doctor with the standard library alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from evenload.doctor.examine import examine
from evenload.doctor.finding import Options, exit_code
from evenload.doctor.report import as_json, as_text

BACKENDS = ("auto", "gloo", "nccl")


def main(arguments: Sequence[str] | None = None) -> int:
    """Examines, prints, and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m evenload.doctor",
        description="Is this machine fit to train on?",
        epilog="exit code: 0 fit, 1 something would stop a run, 2 something would slow it",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--port", type=_port, default=0, help="the TCP port a run will use (default: any free one)")
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="of the all-reduce (default: auto)")
    given = parser.parse_args(arguments)
    return show(port=given.port, backend=given.backend, json_=given.json)


def show(*, port: int, backend: str, json_: bool) -> int:
    """Examines this machine, prints the findings, and returns the exit code."""
    findings = examine(Options(port=port, backend=backend))
    print(as_json(findings) if json_ else as_text(findings))
    return exit_code(findings)


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; expected a number from 0 to 65535")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
