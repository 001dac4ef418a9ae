"""GPUs, by a driver that stands in."""

from __future__ import annotations

from evenload.doctor.finding import Finding
from tests.system.doctor.cases.registry import unwell, well
from tests.system.doctor.conftest import Machine
from tests.system.doctor.nvml import GIB


@unwell("GPU memory", "warn", "cuda:1: 4.0 of 24.0 GiB used by", "nvidia-smi")
def held(machine: Machine) -> Finding:
    machine.gpus({}, {"used": 4 * GIB})
    return machine.look("GPU memory")


@well("GPU memory")
def free(machine: Machine) -> Finding:
    machine.gpus({}, {"used": GIB // 4})
    return machine.look("GPU memory")


@unwell("GPU access", "fail", "GPU 1: GPU is lost", "sudo reboot")
def lost(machine: Machine) -> Finding:
    machine.gpus({}, {"refused": "GPU is lost"}, {})
    return machine.look("GPU access")


@unwell("GPU access", "fail", "GPU 0: Insufficient Permissions", "ls -l /dev/nvidia*")
def closed(machine: Machine) -> Finding:
    machine.gpus({"refused": "Insufficient Permissions"})
    return machine.look("GPU access")


@well("GPU access")
def all_answer(machine: Machine) -> Finding:
    machine.gpus({}, {})
    return machine.look("GPU access")


@unwell("GPU order", "warn", "cuda:0 (RTX 5090) is nvidia-smi's 1", "CUDA_DEVICE_ORDER=PCI_BUS_ID")
def fastest_first(machine: Machine) -> Finding:
    machine.gpus({"Name": "GTX 1060"}, {"Name": "RTX 5090"})
    machine.monkeypatch.setattr("evenload.visible_gpus._cuda_uuids", lambda environ: ("GPU-11-aa", "GPU-00-aa"))
    return machine.look("GPU order")


@unwell("GPU order", "fail", "CUDA_VISIBLE_DEVICES=1,5,0 names 3 GPUs, CUDA sees 1", "CUDA_VISIBLE_DEVICES=1")
def cut_short(machine: Machine) -> Finding:
    machine.gpus({}, {})
    machine.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,5,0")
    return machine.look("GPU order")


@unwell("GPU order", "warn", "CUDA_DEVICE_ORDER=PCI", "CUDA_DEVICE_ORDER=PCI_BUS_ID")
def unknown_order(machine: Machine) -> Finding:
    machine.gpus({}, {})
    machine.monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI")
    return machine.look("GPU order")


@well("GPU order")
def same_numbers(machine: Machine) -> Finding:
    machine.gpus({"Name": "RTX 5090"}, {"Name": "GTX 1060"})
    machine.monkeypatch.setattr("evenload.visible_gpus._cuda_uuids", lambda environ: ("GPU-00-aa", "GPU-11-aa"))
    return machine.look("GPU order")


@well("GPU order")
def chosen_otherwise(machine: Machine) -> Finding:
    machine.gpus({}, {})
    machine.monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    return machine.look("GPU order")


@unwell("GPU generations", "fail", "GTX 1080 (Pascal, 6.1), RTX 5090 (Blackwell, 12.0)", "evenload run -d 1,2 train.py")
def ends_of_the_world(machine: Machine) -> Finding:
    machine.gpus(
        {"Name": "GTX 1080", "capability": (6, 1), "total": 8 * GIB},
        {"Name": "RTX 5090", "capability": (12, 0), "total": 32 * GIB},
        {"Name": "RTX 3090", "capability": (8, 6)},
    )
    return machine.look("GPU generations")


@unwell("GPU generations", "warn", "RTX 2080 Ti (Turing, 7.5), RTX 3090 (Ampere, 8.6)", "--precision fp16")
def bfloat16_on_one(machine: Machine) -> Finding:
    machine.gpus({"Name": "RTX 2080 Ti", "capability": (7, 5)}, {"capability": (8, 6)})
    return machine.look("GPU generations")


@well("GPU generations")
def neighbours(machine: Machine) -> Finding:
    machine.gpus({"capability": (8, 6)}, {"Name": "RTX 4090", "capability": (8, 9)})
    return machine.look("GPU generations")


@unwell("GPU mode", "fail", "cuda:1 (RTX 3090) accepts no process", "sudo nvidia-smi -i 0000:02:00.0 -c DEFAULT")
def prohibited(machine: Machine) -> Finding:
    machine.gpus({"ComputeMode": 0}, {"ComputeMode": 2})
    return machine.look("GPU mode")


@unwell("GPU mode", "warn", "accepts only one process", "-c DEFAULT")
def exclusive(machine: Machine) -> Finding:
    machine.gpus({"ComputeMode": 3})
    return machine.look("GPU mode")


@unwell("GPU mode", "warn", "cuda:0 (A100 MIG 3g.20gb), cuda:1 (A100 MIG 2g.10gb) are parts of GPUs", "-mig 0")
def split(machine: Machine) -> Finding:
    machine.gpus({"ComputeMode": 0, "parts": ["A100 MIG 3g.20gb", "A100 MIG 2g.10gb"]})
    return machine.look("GPU mode")


@well("GPU mode")
def open_to_all(machine: Machine) -> Finding:
    machine.gpus({"ComputeMode": 0}, {"parts": ["A100 MIG 7g.40gb"]})
    return machine.look("GPU mode")


@unwell(
    "GPU throttling",
    "warn",
    "cuda:0 (RTX 3090) is slowed by heat (91 °C, it slows down at 93 °C)",
    "nvidia-smi -q -d TEMPERATURE",
)
def hot(machine: Machine) -> Finding:
    facts = {"Temperature": {"0": 91}, "TemperatureThreshold": {"1": 93}}
    machine.gpus({**facts, "CurrentClocksThrottleReasons": 0x40 | 0x08}, {"CurrentClocksThrottleReasons": 0})
    return machine.look("GPU throttling")


@unwell("GPU throttling", "warn", "slowed by its power supply", "power cables")
def weak_supply(machine: Machine) -> Finding:
    machine.gpus({"CurrentClocksThrottleReasons": 0x80})
    return machine.look("GPU throttling")


@well("GPU throttling")
def idle_or_at_its_cap(machine: Machine) -> Finding:
    machine.gpus(
        {"CurrentClocksThrottleReasons": 0x01, "Temperature": {"0": 41}}, {"CurrentClocksThrottleReasons": 0x04}
    )
    return machine.look("GPU throttling")


@unwell("GPU clocks", "warn", "cuda:0 (RTX 3090) is limited to 200 of 350 W", "sudo nvidia-smi -i 0000:01:00.0 -pl 350")
def capped(machine: Machine) -> Finding:
    machine.gpus({"PowerManagementLimit": 200_000, "PowerManagementDefaultLimit": 350_000})
    return machine.look("GPU clocks")


@unwell(
    "GPU clocks", "warn", "is set to 900 MHz, the default is 1410 MHz", "-rgc && sudo nvidia-smi -i 0000:01:00.0 -rac"
)
def lowered(machine: Machine) -> Finding:
    machine.gpus({"ApplicationsClock": {"1": 900}, "DefaultApplicationsClock": {"1": 1410}})
    return machine.look("GPU clocks")


@unwell("GPU clocks", "warn", "the clocks of cuda:0 (RTX 3090) are locked", "-rgc")
def locked(machine: Machine) -> Finding:
    machine.gpus({"CurrentClocksThrottleReasons": 0x02})
    return machine.look("GPU clocks")


@well("GPU clocks")
def as_they_come(machine: Machine) -> Finding:
    watts = {"PowerManagementLimit": 350_000, "PowerManagementDefaultLimit": 350_000}
    machine.gpus({**watts, "ApplicationsClock": {"1": 1410}, "DefaultApplicationsClock": {"1": 1410}}, {})
    return machine.look("GPU clocks")


@unwell("GPU links", "warn", "cuda:1 (RTX 3090) uses PCIe x4 of x16", "sudo lspci -vv -s 0000:02:00.0")
def narrow(machine: Machine) -> Finding:
    machine.gpus(
        {"CurrPcieLinkWidth": 16, "MaxPcieLinkWidth": 16},
        {"CurrPcieLinkWidth": 4, "MaxPcieLinkWidth": 16},
    )
    return machine.look("GPU links")


@unwell("GPU links", "warn", "has 3 of 4 NVLinks up", "nvidia-smi nvlink --status -i 0000:01:00.0")
def broken_bridge(machine: Machine) -> Finding:
    machine.gpus({"NvLinkState": {"0": 1, "1": 1, "2": 0, "3": 1}})
    return machine.look("GPU links")


@well("GPU links")
def wide(machine: Machine) -> Finding:
    width = {"CurrPcieLinkWidth": 8, "MaxPcieLinkWidth": 16}
    machine.gpus({**width, "NvLinkState": {"0": 1, "1": 1}}, {**width, "NvLinkState": {"0": 0, "1": 0}})
    return machine.look("GPU links")


@unwell("GPU errors", "warn", "has had 3 uncorrected memory errors", "sudo nvidia-smi --gpu-reset -i 0000:02:00.0")
def memory_errors(machine: Machine) -> Finding:
    machine.gpus({"TotalEccErrors": {"1": 0}}, {"TotalEccErrors": {"1": 3}})
    return machine.look("GPU errors")


@unwell("GPU errors", "warn", "a reset replaces", "--gpu-reset")
def pending_row(machine: Machine) -> Finding:
    machine.gpus({"RemappedRows": [0, 1, 1, 0]})
    return machine.look("GPU errors")


@unwell("GPU errors", "fail", "cannot be replaced", "evenload run -d 1 train.py")
def worn_out(machine: Machine) -> Finding:
    machine.gpus({"RemappedRows": [0, 9, 0, 1]}, {"RemappedRows": [0, 0, 0, 0]})
    return machine.look("GPU errors")


@unwell("GPU errors", "warn", "Xid 79 (fell off the bus) of cuda:1 (RTX 3090)", "sudo reboot")
def off_the_bus(machine: Machine) -> Finding:
    machine.gpus({}, {})
    machine.write(
        {
            "dev/kmsg": "6,1,1,-;usb 1-1: new device\n"
            "4,2,2,-;NVRM: Xid (PCI:0000:01:00): 31, pid=77, name=python, MMU Fault\n"
            "4,3,3,-;NVRM: Xid (PCI:0000:02:00): 79, pid='<unknown>', GPU has fallen off the bus.\n"
        }
    )
    return machine.look("GPU errors")


@well("GPU errors")
def faults_of_programs_alone(machine: Machine) -> Finding:
    machine.gpus({"TotalEccErrors": {"1": 0}, "RemappedRows": [1, 0, 0, 0]})
    machine.write({"dev/kmsg": "4,2,2,-;NVRM: Xid (PCI:0000:01:00): 31, pid=77, name=python, MMU Fault\n"})
    return machine.look("GPU errors")
