"""Is this machine fit? Checks, each with what was found, what was expected, and the command that mends.

The parent (`examine`, `report`, ``python -m evenload.doctor``) uses the standard library alone, so it works where torch
or the other packages are missing. The checks (`checklist` names them) run as child processes, which may use torch: one that
hangs or crashes becomes a finding.
"""

from evenload.doctor.examine import examine as examine
from evenload.doctor.finding import Finding as Finding
from evenload.doctor.finding import Options as Options
from evenload.doctor.finding import exit_code as exit_code
