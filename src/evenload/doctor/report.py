"""The findings as text for a person, or as JSON for a program."""

from __future__ import annotations

import json
import platform
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from evenload.doctor.finding import Finding, exit_code

SCHEMA = 1
WIDTH = 110


def as_text(findings: Sequence[Finding]) -> str:
    """A plain table: one line a finding; below those that are not well, what was expected and what mends."""
    column = max(len(finding.name) for finding in findings)
    lines = [f"evenload doctor on {platform.node()}, Python {platform.python_version()}", ""]
    for finding in findings:
        lines += _wrap(f"  {finding.status:<4}  {finding.name:<{column}}  ", finding.found)
        if finding.status in ("warn", "fail"):
            lines += _wrap(f"        {'expected':>{column}}  ", finding.expected)
            if finding.mend:  # never wrapped: it is there to be copied
                lines.append(f"        {'mend':>{column}}  {finding.mend}")
    return "\n".join([*lines, "", _summary(findings)])


def as_json(findings: Sequence[Finding]) -> str:
    """``{"schema", "exit_code", "findings": [{"name", "status", "found", "expected", "mend"}]}``."""
    story = {"schema": SCHEMA, "exit_code": exit_code(findings), "findings": [asdict(finding) for finding in findings]}
    return json.dumps(story, indent=1)


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
