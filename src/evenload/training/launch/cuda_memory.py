"""Settings of torch's CUDA allocator for a worker; they must be known before torch is imported.

Shares of unequal devices change, and with them the sizes of all activations. In segments of fixed size the freed blocks of the
old sizes do not fit the new ones, and memory runs out although much is free. Expandable segments grow in place instead.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Any of them, set by the user, holds as it is."""
_VIRTUAL_MEMORY = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED; some virtual GPUs lack it, and torch would fail there."""


def allocator_variables(
    devices: Sequence[str], variables: Mapping[str, str], supports: Callable[[int], bool] | None = None
) -> dict[str, str]:
    """Return the variables to set for a worker with these devices; none without a GPU, or where the user set them.

    `supports` tells by N of ``cuda:N`` whether a GPU can map memory into an address range; by default the driver is asked.
    """
    numbers = [int(device.partition(":")[2] or 0) for device in devices if device.startswith("cuda")]
    if not numbers or sys.platform != "linux" or any(name in variables for name in VARIABLES):
        return {}
    if not all(map(supports or _maps_memory, numbers)):
        return {}
    return {VARIABLES[0]: "expandable_segments:True"}


def _maps_memory(index: int) -> bool:
    device, found = ctypes.c_int(), ctypes.c_int()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        failed = (
            cuda.cuInit(0)
            or cuda.cuDeviceGet(ctypes.byref(device), index)
            or cuda.cuDeviceGetAttribute(ctypes.byref(found), _VIRTUAL_MEMORY, device)
        )
    except (OSError, AttributeError):  # no driver, or one of long ago
        return False
    return not failed and found.value == 1
