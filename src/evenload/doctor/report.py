"""Findings, and the list of checks, as text or JSON."""

from __future__ import annotations

import json
import platform
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from evenload.doctor.checklist import FULL, GROUPS, HOSTS, Check
from evenload.doctor.finding import Finding, exit_code
from evenload.stored_names import FINDING_JSON

SCHEMA = 1
WIDTH = 110


def as_text(findings: Sequence[Finding], who: str | None = None) -> str:
    """Format the findings with their expectation and fix; ``who`` replaces the host name in the first line."""
    column = max(len(finding.name) for finding in findings)
    machine = platform.node() if who is None else who
    lines = [f"evenload doctor on {machine}, Python {platform.python_version()}", ""]
    for finding in findings:
        lines += _wrap(f"  {finding.status:<4}  {finding.name:<{column}}  ", finding.found)
        if finding.figures:
            wide = max(len(figure.what) for figure in finding.figures)
            for figure in finding.figures:
                lines.append(f"        {'':>{column}}  {figure.what:<{wide}}  {figure.value:8.3g} {figure.unit}")
        if finding.status in ("warn", "fail"):
            lines += _wrap(f"        {'expected':>{column}}  ", finding.expected)
            if finding.fix:  # not wrapped, so that it can be copied
                lines.append(f"        {'fix':>{column}}  {finding.fix}")
    return "\n".join([*lines, "", _summary(findings)])


def as_json(findings: Sequence[Finding]) -> str:
    """Format findings as ``{"schema", "exit_code", "findings": [{"name", "status", "found", "expected", ...}]}``.

    Findings of ``--full`` also have ``figures``: ``[{"what", "value", "unit"}]``.
    """
    rows = [_row(finding) for finding in findings]
    return json.dumps({"schema": SCHEMA, "exit_code": exit_code(findings), "findings": rows}, indent=1)


def checks_as_text() -> str:
    checks = _listed()
    column = max(len(check.name) for check, _ in checks)
    return "\n".join(
        f"{check.name:<{column}}  {check.subject}{f' ({option})' if option else ''}" for check, option in checks
    )


def checks_as_json() -> str:
    """Format the checks as ``{"schema", "checks": [{"name", "looks_at", "full", "host"}]}``."""
    rows = [
        {"name": check.name, "looks_at": check.subject, "full": option == "--full", "host": option == "--host"}
        for check, option in _listed()
    ]
    return json.dumps({"schema": SCHEMA, "checks": rows}, indent=1)


def _listed() -> list[tuple[Check, str]]:
    """Return all checks, each with the option that it needs."""
    tables = ((GROUPS, ""), (FULL, "--full"), (HOSTS, "--host"))
    return [(check, option) for groups, option in tables for group in groups for check in group]


def _row(finding: Finding) -> dict[str, Any]:
    row = {FINDING_JSON.get(name, name): value for name, value in asdict(finding).items()}
    if not finding.figures:
        del row["figures"]
    return row


def _wrap(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [head.rstrip()]


def _summary(findings: Sequence[Finding]) -> str:
    stops = [finding.name for finding in findings if finding.status == "fail"]
    slows = [finding.name for finding in findings if finding.status == "warn"]
    parts = []
    if stops:
        parts.append(f"would stop a run: {', '.join(stops)}")
    if slows:
        parts.append(f"would slow a run: {', '.join(slows)}")
    return "; ".join(parts) if parts else "fit: nothing here would stop or slow a run"
