"""Put on PYTHONPATH, this is the NVML of a machine whose GPUs STAND_IN_GPUS tells as JSON."""

import json
import os
import sys

from tests.system.doctor.nvml import StandInNvml

sys.modules[__name__] = StandInNvml(json.loads(os.environ["STAND_IN_GPUS"]))  # type: ignore[assignment]
