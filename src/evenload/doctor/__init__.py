"""Checks of this machine for training, each with what was found, what was expected, and the command that fixes it.

The parent (`runner`, `report`, ``python -m evenload.doctor``) uses only the standard library, so it works without torch
or any other package. The checks (listed in `checklist`) run as child processes, which may use torch; one that hangs or
crashes becomes a finding.
"""

from evenload.doctor.finding import Finding as Finding
from evenload.doctor.finding import Options as Options
from evenload.doctor.finding import exit_code as exit_code
from evenload.doctor.runner import run_checks as run_checks
