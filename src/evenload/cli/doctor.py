"""``evenload doctor``: check whether this machine can run Evenload."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class AllReduceBackend(StrEnum):
    auto = "auto"
    gloo = "gloo"
    nccl = "nccl"


def doctor(
    json_: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    port: Annotated[int, typer.Option(help="TCP port that a run will use; 0: any free port.", min=0, max=65535)] = 0,
    backend: Annotated[
        AllReduceBackend, typer.Option(metavar="auto|gloo|nccl", help="Backend of the trial all-reduce.")
    ] = AllReduceBackend.auto,
    folder: Annotated[str, typer.Option(help="Folder in which runs will write.")] = "runs",
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Run only this check; repeatable.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Also measure the speed of every device and link.")] = False,
    issue: Annotated[bool, typer.Option("--issue", help="Print a report for an issue, without names.")] = False,
    with_names: Annotated[bool, typer.Option("--with-names", help="Keep names and addresses in that report.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the checks.")] = False,
    host: Annotated[
        str,
        typer.Option(
            metavar="HOST[:PORT]", help="Check the connection to another machine, on which doctor --serve runs."
        ),
    ] = "",
    serve: Annotated[bool, typer.Option("--serve", help="Answer doctors of other machines until Ctrl-C.")] = False,
    script: Annotated[str, typer.Option(help="With --host or --serve: compare this script.")] = "",
    data: Annotated[
        str, typer.Option(metavar="PATH", help="With --host or --serve: compare this file or folder.")
    ] = "",
) -> None:
    """Check this machine, and print for each problem the finding, the expectation and a fix.

    If this command itself can't start, `python -m evenload.doctor` needs only the standard library.
    """
    from evenload.doctor.__main__ import DoctorRequest, show

    request = DoctorRequest(
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
