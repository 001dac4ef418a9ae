"""For each check machines on which it is unwell, and machines on which it is well."""

from tests.system.doctor.cases import environment as environment
from tests.system.doctor.cases import gpus as gpus
from tests.system.doctor.cases import machine as machine
from tests.system.doctor.cases.registry import UNWELL as UNWELL
from tests.system.doctor.cases.registry import WELL as WELL
from tests.system.doctor.cases.registry import Case as Case
from tests.system.doctor.cases.registry import Unwell as Unwell
