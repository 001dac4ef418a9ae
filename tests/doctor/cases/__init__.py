"""For each check machines on which it is unwell, and machines on which it is well."""

from tests.doctor.cases import environment as environment
from tests.doctor.cases import gpus as gpus
from tests.doctor.cases import machine as machine
from tests.doctor.cases.registry import UNWELL as UNWELL
from tests.doctor.cases.registry import WELL as WELL
from tests.doctor.cases.registry import Case as Case
from tests.doctor.cases.registry import Unwell as Unwell
