"""A state as bytes, as it travels to another rank: every kind of tensor arrives with its values, dtype and order in memory."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import nn

from evenload.training.checkpoint import files

TENSORS = {
    "scalar": torch.tensor(1.5),
    "empty": torch.empty(0, 3),
    "bool": torch.tensor([True, False, True]),
    "bf16": torch.randn(7).bfloat16(),
    "int64": torch.arange(5),
    "complex": torch.randn(3, 2, dtype=torch.complex64).conj(),
    "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "part": torch.randn(6, 6)[::2, 1:],
    "expanded": torch.ones(1).expand(4),
    "trained": nn.Parameter(torch.randn(3)),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_was(name: str) -> None:
    sent = TENSORS[name].detach()
    found = files.from_bytes(files.to_bytes({"a": [TENSORS[name], 3], "b": torch.randn(5)}))["a"]
    assert found[1] == 3 and found[0].dtype == sent.dtype and found[0].layout == sent.layout
    assert torch.equal(found[0].to_dense(), sent.to_dense().resolve_conj())
    if name == "channels_last":
        assert found[0].stride() == sent.stride()


def test_the_bytes_are_a_copy_and_so_is_what_is_read_from_them() -> None:
    weight = torch.ones(4)
    payload = files.to_bytes({"weight": weight})
    weight.zero_()
    found = files.from_bytes(payload)
    payload.zero_()
    assert found["weight"].tolist() == [1.0] * 4


def test_the_state_of_an_optimizer_keeps_its_structure() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state: dict[str, Any] = {"optimizer": optimizer.state_dict(), "seen": collections.OrderedDict(a=(1, "b", None))}
    found = files.from_bytes(files.to_bytes(state))
    assert found["seen"] == state["seen"] and type(found["seen"]) is collections.OrderedDict
    assert found["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    for index, moments in state["optimizer"]["state"].items():
        assert all(torch.equal(value, found["optimizer"]["state"][index][key]) for key, value in moments.items())
