"""Batches of any nesting reach the device; `meta` stands for one."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from evenload.training.data.batches import move, transfer_seconds
from tests.unit.data.fakes import CPU

META = torch.device("meta")


class Pair(NamedTuple):
    x: torch.Tensor
    label: str


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str
    total: int = field(init=False, default=3)

    def __post_init__(self) -> None:
        if self.x.device.type == "meta":
            raise AssertionError("made anew")


@dataclass
class Slots:
    __slots__ = ("x",)
    x: torch.Tensor


class Encoding(collections.UserDict[str, Any]):
    """As Hugging Face's BatchEncoding: more than its keys, and a `to` that changes it in place."""

    def __init__(self, data: dict[str, Any], extra: str = "") -> None:
        super().__init__(data)
        self.extra = extra

    def to(self, device: torch.device) -> Any:
        raise AssertionError("its keys are moved, not itself")


class Graph:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Graph:  # knows no non_blocking
        return Graph(self.x.to(device))


class Fixed(collections.abc.Mapping[str, Any]):
    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def __iter__(self) -> Any:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


def one() -> torch.Tensor:
    return torch.ones(2)


@pytest.mark.parametrize(
    ("batch", "tensor"),
    [
        (one(), lambda b: b),
        ([one(), "a"], lambda b: b[0]),
        ((None, {"x": [one()]}), lambda b: b[1]["x"][0]),
        (Pair(one(), "cat"), lambda b: b.x),
        (Frozen(one(), "a"), lambda b: b.x),
        (Slots(one()), lambda b: b.x),
        (Encoding({"x": one(), "name": "b"}, extra="kept"), lambda b: b["x"]),
        (collections.OrderedDict(x=one()), lambda b: b["x"]),
        (collections.defaultdict(list, x=one()), lambda b: b["x"]),
        (Fixed({"x": one()}), lambda b: b["x"]),
        (Graph(one()), lambda b: b.x),
        (pack_sequence([one()]), lambda b: b.data),
    ],
)
def test_every_nesting_is_moved_and_keeps_its_type(batch: Any, tensor: Any) -> None:
    moved = move(batch, META)
    assert type(moved) is type(batch)
    assert tensor(moved).device == META
    assert tensor(batch).device == CPU
    assert getattr(moved, "extra", "kept") == "kept"
    if isinstance(batch, PackedSequence):
        assert moved.batch_sizes.tolist() == [1, 1]


@pytest.mark.parametrize("batch", ["text", b"bytes", None, 3, 2.5, {"a", "b"}, range(3), object()])
def test_what_holds_no_tensor_is_left_alone(batch: Any) -> None:
    assert move(batch, META) is batch


def test_containers_are_new_and_tensors_the_same_on_the_cpu() -> None:
    inner = {"x": one()}
    batch = [inner]
    moved = move(batch, CPU)
    assert moved[0]["x"] is inner["x"]
    moved[0].pop("x")
    moved.append(1)
    assert (len(batch), list(inner)) == (1, ["x"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_batches_reach_the_gpu() -> None:
    from torch.utils.data import DataLoader

    from tests.ranks.data.test_streams import Stream
    from tests.unit.data.fakes import Board, Numbers, lockstep, make_ranks

    for data in (Numbers(20), Stream(20)):
        for num_workers in (0, 2):
            loader: Any = DataLoader(data, batch_size=8, pin_memory=True, num_workers=num_workers)
            (rank,) = make_ranks(Board((1,)), loader, device=torch.device("cuda", 0))
            found = []
            for step in lockstep([rank]):
                part = step[0].micro(0).data
                assert part.device.type == "cuda"
                assert all(held.is_pinned() for held in step[0]._held.values())
                found += part.tolist()
            assert sorted(found) == list(range(20))


@pytest.mark.gpu
def test_what_pinned_memory_brings_is_measured() -> None:
    usual_s, pinned_s = transfer_seconds([torch.zeros(1 << 22), {"y": torch.zeros(3)}], torch.device("cuda"))
    assert 0 < pinned_s < 10 and 0 < usual_s < 10
    with pytest.raises(RuntimeError):
        transfer_seconds(torch.zeros(3, device="cuda"), torch.device("cuda"))


class ByItem(dict[str, Any]):
    """Its attributes are its keys: another name is no AttributeError, but a KeyError."""

    __getattr__ = dict.__getitem__


class ByGet(dict[str, Any]):
    __getattr__ = dict.get


@pytest.mark.parametrize("kind", [ByItem, ByGet])
def test_dicts_whose_keys_are_attributes(kind: type[Any]) -> None:
    moved = move(kind(x=torch.ones(2), rows=kind(y=torch.ones(1))), META)
    assert type(moved) is kind and moved.x.device == moved.rows.y.device == META
    assert vars(moved) == {}
