"""That every tensor is where its operation is, checked without a GPU: on fake tensors, whose operations refuse to mix devices.

The devices are torch's own stand-in for a backend written in Python, which can't be taken back: in processes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import evenload
from evenload.testing import run_ranks
from evenload.training.parallel.model_split.transfers import LayerPreHook, MixedDeviceMode, move_if_needed
from tests.unit.model_split.models import CASES, Gpt

CPU = torch.device("cpu")


def far(index: int) -> torch.device:
    return torch.device("far", index)


def in_a_process(check: Callable[[FakeTensorMode], None]) -> None:
    run_ranks(_run, 1, check)


def _run(check: Callable[[FakeTensorMode], None]) -> None:
    _setup_privateuseone_for_python_backend("far")
    with FakeTensorMode() as mode:
        check(mode)


@contextmanager
def real(mode: FakeTensorMode) -> Iterator[None]:
    """The body makes true tensors."""
    mode.__exit__(None, None, None)
    try:
        yield
    finally:
        mode.__enter__()


def cut(build: Callable[[], nn.Module], devices: Sequence[Any], mode: FakeTensorMode, **settings: Any) -> nn.Module:
    """A model cut over as many CPU places, with each piece's tensors turned into fake ones on its device."""
    with real(mode):
        model = build()
        evenload.place(model, ["cpu"] * len(devices), **settings)
    pieces: dict[int, int] = {}
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, LayerPreHook):
                for tensor in (*module.parameters(), *module.buffers()):
                    pieces.setdefault(id(tensor), hook.piece)
    turned: dict[int, torch.Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        there = sent(tensor, devices[pieces.get(id(tensor), 0)], mode)
        turned[id(tensor)] = nn.Parameter(there) if isinstance(tensor, nn.Parameter) else there
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                held[key] = turned[id(tensor)] if tensor is not None else None
    assert {p.device for p in model.parameters()} == set(devices)
    return model


def sent(tensor: torch.Tensor, device: torch.device, mode: FakeTensorMode) -> torch.Tensor:
    with real(mode):
        fake = mode.from_tensor(tensor.detach())
    return fake.to(device)


def devices_of(values: Any) -> set[torch.device]:
    return {leaf.device for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}


def check_case(mode: FakeTensorMode, name: str) -> None:
    case = CASES[name]
    for devices in ([far(0), far(1), far(2)], [far(0), CPU], [CPU, far(0)]):
        model = cut(case.build, devices, mode)
        with real(mode):
            inputs = case.inputs()
        for home in dict.fromkeys([devices[0], CPU]):
            there = tree_map(lambda leaf, home=home: sent(leaf, home, mode), inputs)
            out = case.call(model, there)
            assert devices_of(out) == {home}, (name, devices, home, devices_of(out))
            if far(1) in devices:
                continue  # autograd knows of one device of a kind only
            leaves = [leaf for leaf in tree_leaves(out) if leaf.requires_grad]
            with torch.autograd.set_multithreading_enabled(False):  # fake tensors are one thread's
                torch.autograd.backward([leaf.sum() for leaf in leaves])
            assert all(p.grad is None or p.grad.device == p.device for p in model.parameters())
            assert any(p.grad is not None for p in model.parameters())


def check_cases(mode: FakeTensorMode) -> None:
    for name in CASES:
        if name != "recurrent":  # a packed batch can't be faked
            check_case(mode, name)


def test_nothing_mixes_devices_and_the_output_comes_home() -> None:
    in_a_process(check_cases)


def check_without_hooks(mode: FakeTensorMode) -> None:
    model = cut(Gpt, [far(0), far(1)], mode)
    for module in model.modules():
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    with pytest.raises(RuntimeError, match="device"):
        model(torch.zeros(2, 3, dtype=torch.long, device=far(0)))


def check_last(mode: FakeTensorMode) -> None:
    model = cut(two_layers, [far(0), far(1)], mode, returns="last")
    assert model(torch.zeros(2, 4, device=far(0))).device == far(1)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


class Look(nn.Linear):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        self.seen = lengths.device
        return super().forward(x)


class WithLengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Look(4, 4), Look(4, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, lengths), lengths=lengths)


def check_lengths(mode: FakeTensorMode) -> None:
    model = cut(WithLengths, [far(0), far(1)], mode)
    model(torch.zeros(2, 4, device=far(0)), torch.zeros(2, dtype=torch.long))
    assert (model.first.seen, model.second.seen) == (CPU, CPU)
    model(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))  # where all of the input is on the CPU, all of it moves
    assert (model.first.seen, model.second.seen) == (far(0), far(1))


def check_moved(mode: FakeTensorMode) -> None:
    model = cut(Gpt, [far(0), far(1)], mode)
    for module in model.modules():
        for key, param in module._parameters.items():
            module._parameters[key] = nn.Parameter(param.detach().to(far(2)))
    assert model(torch.zeros(2, 3, dtype=torch.long, device=far(2))).device == far(2)


def check_operations(mode: FakeTensorMode) -> None:
    big, small = torch.zeros(8, 8, device=far(0)), torch.zeros(8, device=far(1))
    number = torch.tensor(2.0)
    with MixedDeviceMode():
        assert (small + big).device == far(0)  # where most bytes are
        assert (big @ small).device == far(0)
        assert torch.cat([small, small, big[0]]).device == far(1)
        assert F.linear(small, big, bias=small).device == far(0)
        assert (big * number).device == far(0)
        assert torch.where(big > 0, big, small).device == far(0)
        kept = small
        small += big[0]  # in place: it stays where it is
        assert small is kept
        assert small.device == far(1)
        small[2:5] = big[0, 2:5]
        small.add_(big[1]).mul_(big[2])
        assert small.device == far(1)
        assert torch.mul(big[0], small, out=big[2]).device == far(0)
        assert big.to(small).device == far(1)  # what says where it goes goes there
        assert big.type_as(small).device == far(1)
        assert big.to(far(2)).device == far(2)
        assert small.copy_(big[0]).device == far(1)
    with pytest.raises(RuntimeError, match="device"):
        small + big


def check_nesting(mode: FakeTensorMode) -> None:
    x, y = torch.zeros(2, device=far(0)), torch.zeros(2, device=far(1))
    nested = {"a": (x, [x, "text", None]), "b": 3}
    assert move_if_needed(nested, far(0)) is nested
    moved = move_if_needed({**nested, "c": y}, far(0))
    assert devices_of(moved) == {far(0)}
    assert moved["a"][1][1:] == ["text", None]
    left = move_if_needed((x, y), far(0), frozenset((id(y),)))
    assert left[0] is x
    assert left[1] is y


def check_details(mode: FakeTensorMode) -> None:
    for check in (check_without_hooks, check_last, check_lengths, check_moved, check_operations, check_nesting):
        check(mode)


def test_in_detail() -> None:
    in_a_process(check_details)
