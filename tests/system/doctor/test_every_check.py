"""Every check finds what is wrong on a machine where it is, and nothing on one where it isn't."""

from __future__ import annotations

import pytest

from evenload import hardware
from evenload.doctor.checklist import GROUPS
from evenload.doctor.finding import Finding
from tests.system.doctor.cases import UNWELL, WELL, Case, Unwell
from tests.system.doctor.conftest import Machine, all_in_child

NAMES = [check.name for group in GROUPS for check in group]
BY_TORCH = ("wheel and driver", "all-reduce")
"""These are well on this very machine, in a child that imports torch once."""
NEED_GPUS = {name for name in NAMES if name.startswith("GPU ")} | {"peer copies"}
NEED_MORE = {"CUDA libraries", "IOMMU and ACS", "CPU governor", "InfiniBand"}


def test_there_are_at_least_25_and_each_has_cases_of_both_kinds() -> None:
    assert len(NAMES) == len(set(NAMES)) >= 25
    assert set(UNWELL) == set(NAMES)
    assert set(WELL) | set(BY_TORCH) == set(NAMES)


@pytest.mark.parametrize(
    ("check", "unwell"),
    [pytest.param(name, case, id=f"{name}: {case.case.__name__}") for name in NAMES for case in UNWELL.get(name, ())],
)
def test_it_finds_what_is_wrong(machine: Machine, check: str, unwell: Unwell) -> None:
    finding = unwell.case(machine)
    assert finding.status == unwell.status, finding
    assert unwell.found in finding.found
    assert finding.expected
    assert unwell.fix in finding.fix


@pytest.mark.parametrize(
    ("check", "well"),
    [pytest.param(name, case, id=f"{name}: {case.__name__}") for name in NAMES for case in WELL.get(name, ())],
)
def test_it_finds_nothing_where_all_is_well(machine: Machine, check: str, well: Case) -> None:
    finding = well(machine)
    assert finding.status == "ok", finding
    assert finding.found
    assert not finding.fix


@pytest.fixture(scope="module")
def by_torch() -> dict[str, Finding]:
    return {finding.name: finding for finding in all_in_child(*BY_TORCH, backend="gloo", limit_s=60)}


@pytest.mark.parametrize("check", BY_TORCH)
def test_torch_here_is_well(by_torch: dict[str, Finding], check: str) -> None:
    assert by_torch[check].status == "ok"


@pytest.mark.parametrize("check", sorted(NEED_GPUS | NEED_MORE))
def test_a_machine_that_has_no_such_thing_is_no_fault(machine: Machine, check: str) -> None:
    if check in NEED_GPUS and hardware.gpus():
        pytest.skip("this machine has a GPU")
    if check == "CUDA libraries":
        import torch

        if torch.version.cuda is not None:
            pytest.skip("this torch is built for CUDA")
    machine.root.mkdir(parents=True, exist_ok=True)
    assert machine.look(check).status == "skip"
