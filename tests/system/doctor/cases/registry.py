"""For each check a machine on which it is unwell and one on which it is well.

Real ones where this machine can be made so (variables, limits, folders, ranks), else files and a driver that stand in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from evenload.doctor.finding import Finding
from tests.system.doctor.conftest import Machine

Case = Callable[[Machine], Finding]


@dataclass(frozen=True)
class Unwell:
    """A machine on which a check finds something."""

    case: Case
    status: str
    found: str
    """Part of what it says."""
    fix: str
    """Part of the command."""


UNWELL: dict[str, list[Unwell]] = {}
WELL: dict[str, list[Case]] = {}


def unwell(check: str, status: str, found: str, fix: str) -> Callable[[Case], Case]:
    def add(case: Case) -> Case:
        UNWELL.setdefault(check, []).append(Unwell(case, status, found, fix))
        return case

    return add


def well(check: str) -> Callable[[Case], Case]:
    def add(case: Case) -> Case:
        WELL.setdefault(check, []).append(case)
        return case

    return add
