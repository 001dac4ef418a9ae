"""``python -m evenload.doctor``: the doctor without third-party packages."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from evenload.doctor.checklist import FULL, GROUPS, chosen, every_name
from evenload.doctor.finding import Options, exit_code
from evenload.doctor.issue import DEVICES, as_issue
from evenload.doctor.report import as_json, as_text, checks_as_json, checks_as_text
from evenload.doctor.runner import run_checks, run_measurements
from evenload.errors import ConfigError

BACKENDS = ("auto", "gloo", "nccl")


@dataclass(frozen=True)
class DoctorRequest:
    port: int = 0
    backend: str = "auto"
    folder: str = "runs"
    only: tuple[str, ...] = ()
    full: bool = False
    json: bool = False
    issue: bool = False
    with_names: bool = False
    list: bool = False
    host: str = ""
    serve: bool = False
    script: str = ""
    data: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m evenload.doctor",
        description="Check this machine for training.",
        epilog="exit code: 0 fit, 1 something would stop a run, 2 something would slow it",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--port", type=_port, default=0, help="the TCP port a run will use (default: any free one)")
    parser.add_argument(
        "--backend", choices=BACKENDS, default="auto", help="backend of the test all-reduce (default: auto)"
    )
    parser.add_argument("--folder", default="runs", help="folder that runs will write to (default: runs)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="run only this check; may be repeated"
    )
    parser.add_argument("--full", action="store_true", help="also measure every device and link")
    parser.add_argument("--issue", action="store_true", help="print a block for a bug report")
    parser.add_argument("--with-names", action="store_true", help="keep names and addresses in that block")
    parser.add_argument("--list", action="store_true", help="list the checks")
    parser.add_argument("--host", default="", metavar="HOST[:PORT]", help="check the connection to another machine")
    parser.add_argument("--serve", action="store_true", help="respond to the doctor on other machines until Ctrl-C")
    parser.add_argument("--script", default="", help="with --host or --serve: compare this script")
    parser.add_argument("--data", default="", metavar="PATH", help="with --host or --serve: compare this data")
    given = vars(parser.parse_args(arguments))
    try:
        return show(DoctorRequest(**{**given, "only": tuple(given["only"])}))
    except ConfigError as error:
        parser.error(str(error))


def show(request: DoctorRequest) -> int:
    """Raise `ConfigError` for an unknown check or options that contradict each other."""
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
    report = _print_progress if sys.stderr.isatty() else None
    findings = run_checks(options, groups=chosen(request.only, GROUPS), report=report)
    if request.full:
        findings += run_measurements(options, groups=chosen(request.only, FULL))
    if request.issue:
        devices = run_checks(options, groups=((DEVICES,),))[0]
        print(as_issue(findings, devices, request.with_names))
    else:
        print(as_json(findings) if request.json else as_text(findings))
    return exit_code(findings)


def _print_progress(text: str) -> None:
    print(f"evenload doctor: {text}", file=sys.stderr, flush=True)


def _show_hosts(request: DoctorRequest) -> int:
    from evenload.doctor import hosts

    defaults = DoctorRequest()
    alone = tuple(
        f"--{name.replace('_', '-')}"
        for name in ("backend", "folder", "only", "full", "issue", "with_names", "list")
        if getattr(request, name) != getattr(defaults, name)
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
    return hosts.examine_host(request.host, request.port, request.script, request.data, json_=request.json)


def _check(request: DoctorRequest) -> None:
    for name in request.only:
        if name not in every_name():
            raise ConfigError(f"--only {name!r}: no such check; the checks are {', '.join(every_name())}")
    if request.list and (request.only or request.full or request.issue):
        raise ConfigError("--list only lists the checks; remove --only, --full and --issue")
    measured = {check.name for group in FULL for check in group}
    requested = [name for name in request.only if name in measured]
    if requested and not request.full:
        raise ConfigError(f"--only {requested[0]!r} is a measurement of --full; add --full")
    if request.full and request.only and not requested:
        raise ConfigError(f"--full is set, but --only names none of {', '.join(sorted(measured))}; remove one of them")
    if request.json and request.issue:
        raise ConfigError("--json and --issue are two output formats; remove one of them")
    if request.with_names and not request.issue:
        raise ConfigError("--with-names only affects --issue; add --issue")


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; expected a number from 0 to 65535")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
