"""``evenload doctor``: is this machine fit?"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Backend(StrEnum):
    """What carries the trial all-reduce."""

    auto = "auto"
    gloo = "gloo"
    nccl = "nccl"


def doctor(
    json_: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    port: Annotated[int, typer.Option(help="The TCP port a run will use; 0: any free one.", min=0, max=65535)] = 0,
    backend: Annotated[Backend, typer.Option(help="Of the trial all-reduce.")] = Backend.auto,
) -> None:
    """Check this machine: what was found, what was expected, and the command that mends.

    Exit code: 0 fit, 1 something would stop a run, 2 something would slow it. Where this command itself can't start,
    `python -m evenload.doctor` needs the standard library alone.
    """
    from evenload.doctor.__main__ import show

    raise typer.Exit(show(port=port, backend=backend.value, json_=json_))
