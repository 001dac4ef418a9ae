"""Measured tables of an application that nobody measured: laws simple enough to work out results by hand."""

from __future__ import annotations

from pathlib import Path

NUM_EPOCHS = 4
STEPS = 100.0
"""Steps of the smallest batch in an epoch."""


def compute_s(local: float) -> float:
    return 0.1 + 0.01 * local


def sync_s(num_nodes: int, num_devices: int) -> float:
    return 0.0 if num_devices == 1 else 0.02 + 0.001 * num_devices if num_nodes == 1 else 0.1 + 0.002 * num_devices


def write_application(
    folder: Path, *, sqr: float = 1.0, var: float = 7.0, batches: tuple[int, ...] = (8, 32, 128)
) -> Path:
    """Writes a folder like those of Pollux; returns it."""
    folder.mkdir(parents=True)
    locals_ = (4, 8, 16, 32)
    with (folder / "placements.csv").open("w") as file:
        file.write("placement,local_bsz,step_time,sync_time\n")
        for placement in ("1", "2", "3", "4", "11", "12", "22", "44"):
            nodes = [int(digit) for digit in placement]
            for local in locals_:
                sync = sync_s(len(nodes), sum(nodes))
                file.write(f"{placement},{local},{compute_s(local) + sync},{sync}\n")
    with (folder / "scalability.csv").open("w") as file:
        file.write("num_nodes,num_replicas,local_bsz,step_time,sync_time\n")
        for nodes in (4, 8):
            for devices in (nodes, 2 * nodes, 4 * nodes):
                for local in locals_:
                    sync = sync_s(nodes, devices)
                    file.write(f"{nodes},{devices},{local},{compute_s(local) + sync},{sync}\n")
    for batch in batches:
        gain = (var + sqr) / (var * batches[0] / batch + sqr)
        with (folder / f"validation-{batch}.csv").open("w") as file:
            file.write("progress,iteration,metric,grad_sqr,grad_var\n")
            for epoch in range(1, NUM_EPOCHS + 1):
                file.write(f"{STEPS * epoch},{STEPS * epoch / gain},{epoch},{sqr},{var}\n")
    return folder


def write_workload(path: Path, *rows: tuple[str, float, str, int, int]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["name,time,application,num_replicas,batch_size"]
    lines += [",".join(map(str, row)) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path
