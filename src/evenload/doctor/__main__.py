"""``python -m evenload.doctor``: the doctor with the standard library alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from evenload.doctor.checklist import FULL, GROUPS, chosen, every_name
from evenload.doctor.examine import examine, measure
from evenload.doctor.finding import Options, exit_code
from evenload.doctor.issue import DEVICES, as_issue
from evenload.doctor.report import as_json, as_text, checks_as_json, checks_as_text
from evenload.errors import ConfigError

BACKENDS = ("auto", "gloo", "nccl")


@dataclass(frozen=True)
class Request:
    """What the doctor is asked on either command line."""

    port: int = 0
    backend: str = "auto"
    folder: str = "runs"
    only: tuple[str, ...] = ()
    """Names of checks; empty for all."""
    full: bool = False
    """Measure devices and links as well."""
    json: bool = False
    issue: bool = False
    """Print the block for a bug report."""
    with_names: bool = False
    """Leave names and addresses in that block."""
    list: bool = False
    """Only say which checks there are."""
    host: str = ""
    """Another machine to look at, ``HOST[:PORT]``."""
    serve: bool = False
    """Answer the doctors of other machines."""
    script: str = ""
    """A script that both machines should have."""
    data: str = ""
    """A data path that both machines should have."""


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
    parser.add_argument("--folder", default="runs", help="where runs will write (default: runs)")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this check alone; may be repeated")
    parser.add_argument("--full", action="store_true", help="measure every device and link as well")
    parser.add_argument("--issue", action="store_true", help="print the block for a bug report")
    parser.add_argument("--with-names", action="store_true", help="leave names and addresses in that block")
    parser.add_argument("--list", action="store_true", help="say which checks there are")
    parser.add_argument("--host", default="", metavar="HOST[:PORT]", help="look at another machine, not at this one")
    parser.add_argument("--serve", action="store_true", help="answer the doctors of other machines, until Ctrl-C")
    parser.add_argument("--script", default="", help="with --host or --serve: compare this script")
    parser.add_argument("--data", default="", metavar="PATH", help="with --host or --serve: compare what lies there")
    given = vars(parser.parse_args(arguments))
    try:
        return show(Request(**{**given, "only": tuple(given["only"])}))
    except ConfigError as error:
        parser.error(str(error))


def show(request: Request) -> int:
    """Examines this machine, prints the findings, and returns the exit code.

    Raises:
        ConfigError: an unknown check, or options that contradict each other.
    """
    _check(request)
    if request.host or request.serve or request.script or request.data:
        return _show_hosts(request)
    if request.list:
        print(checks_as_json() if request.json else checks_as_text())
        return 0
    options = Options(
        port=request.port,
        backend=request.backend,
        folder=request.folder,
        private=request.issue and not request.with_names,
    )
    findings = examine(options, groups=chosen(request.only, GROUPS))
    if request.full:
        findings += measure(options, groups=chosen(request.only, FULL))
    if request.issue:
        devices = examine(options, groups=((DEVICES,),))[0]
        print(as_issue(findings, devices, request.with_names))
    else:
        print(as_json(findings) if request.json else as_text(findings))
    return exit_code(findings)


def _show_hosts(request: Request) -> int:
    """This machine and another one."""
    from evenload.doctor import hosts

    plain = Request()
    alone = tuple(
        f"--{name.replace('_', '-')}"
        for name in ("backend", "folder", "only", "full", "issue", "with_names", "list")
        if getattr(request, name) != getattr(plain, name)
    )
    hosts.check_options(
        host=request.host,
        serving=request.serve,
        script=request.script,
        data=request.data,
        json_=request.json,
        alone=alone,
    )
    if request.serve:
        return hosts.serve(request.host, request.port, request.script, request.data)
    return hosts.look_at_host(request.host, request.port, request.script, request.data, json_=request.json)


def _check(request: Request) -> None:
    for name in request.only:
        if name not in every_name():
            raise ConfigError(f"--only {name!r}: there is no such check; the checks are {', '.join(every_name())}")
    if request.list and (request.only or request.full or request.issue):
        raise ConfigError("--list only says which checks there are; leave --only, --full and --issue out")
    measured = {check.name for group in FULL for check in group}
    asked = [name for name in request.only if name in measured]
    if asked and not request.full:
        raise ConfigError(f"--only {asked[0]!r} is measured with --full alone; add --full")
    if request.full and request.only and not asked:
        raise ConfigError(
            f"--full measures, but --only names none of {', '.join(sorted(measured))}; leave one of them out"
        )
    if request.json and request.issue:
        raise ConfigError("--json and --issue are two forms of one answer; leave one of them out")
    if request.with_names and not request.issue:
        raise ConfigError("--with-names changes the block of --issue alone, where names are left out; add --issue")


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; expected a number from 0 to 65535")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
