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
    folder: Annotated[str, typer.Option(help="Where runs will write.")] = "runs",
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="This check alone; may be repeated.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Measure every device and link as well.")] = False,
    issue: Annotated[bool, typer.Option("--issue", help="Print the block for a bug report, without names.")] = False,
    with_names: Annotated[bool, typer.Option("--with-names", help="Leave names and addresses in that block.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Say which checks there are, and what they look at.")] = False,
    host: Annotated[
        str, typer.Option(metavar="HOST[:PORT]", help="Look at another machine (type --serve there), not at this one.")
    ] = "",
    serve: Annotated[bool, typer.Option("--serve", help="Answer the doctors of other machines, until Ctrl-C.")] = False,
    script: Annotated[str, typer.Option(help="With --host or --serve: compare this script.")] = "",
    data: Annotated[str, typer.Option(metavar="PATH", help="With --host or --serve: compare what lies there.")] = "",
) -> None:
    """Check this machine: what was found, what was expected, and the command that mends.

    Exit code: 0 fit, 1 something would stop a run, 2 something would slow it. Where this command itself can't start,
    `python -m evenload.doctor` needs the standard library alone.
    """
    from evenload.doctor.__main__ import Request, show

    request = Request(
        port=port,
        backend=backend.value,
        folder=folder,
        only=tuple(only or ()),
        full=full,
        json=json_,
        issue=issue,
        with_names=with_names,
        list=list_,
        host=host,
        serve=serve,
        script=script,
        data=data,
    )
    raise typer.Exit(show(request))
