"""Devices of this machine, for the block of a bug report; reports no problems."""

from __future__ import annotations

import os

from evenload import hardware
from evenload.doctor.finding import Finding, Options, ok
from evenload.doctor.system_files import GIB


def devices(options: Options) -> Finding:
    cpu = hardware.cpu(root=options.root_path)
    quota = hardware.cpu_quota(options.root_path)
    limit = "" if quota is None else f", a quota of {quota:g}"
    model = hardware.cpu_model(options.root_path)
    lines = [f"CPU       {model}, {cpu.num_cores} of {os.cpu_count()} cores{limit}, {cpu.memory_bytes / GIB:.1f} GiB"]
    driver = hardware.gpu_driver()
    if driver is None:
        return ok("\n".join([*lines, "GPU       none with a responding driver"]))
    for gpu, capability in zip(hardware.gpus(), driver.capabilities, strict=True):
        lines.append(
            f"cuda:{gpu.index:<4} {gpu.name}, compute capability {capability[0]}.{capability[1]}, "
            f"{gpu.memory_bytes / GIB:.1f} GiB"
        )
    lines.append(f"driver    {driver.version}, CUDA up to {driver.cuda[0]}.{driver.cuda[1]}")
    return ok("\n".join(lines))
