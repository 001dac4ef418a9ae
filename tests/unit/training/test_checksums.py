"""Checksums see every bit and every place; sketches see values and tolerate rounding."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from evenload.training.compute import checksums
from evenload.training.compute.checksums import QueuedScalars, QueuedSketches, checksum, fold, queue_checksums, sketch
from evenload.training.compute.replicated_state import ReplicatedState, replicated_state

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip


def values(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=g).bool()
    if dtype.is_complex:
        return torch.view_as_complex(torch.randn(count, 2, generator=g)).to(dtype)
    if not dtype.is_floating_point:
        return torch.randint(0, 100, (count,), generator=g).to(dtype)
    return torch.randn(count, generator=g).to(dtype)


def folded(tensors: list[torch.Tensor]) -> float:
    return fold(QueuedScalars(queue_checksums(tensors)).read())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_flipped_bit_of_any_dtype_is_seen(dtype: torch.dtype) -> None:
    tensor = values(dtype, 3000)
    whole = checksum(tensor)
    assert whole == int(whole) and 0 < whole < 2**53
    assert checksum(tensor.clone()) == whole
    data = tensor.view(torch.uint8)
    for place in (0, 1, len(data) // 2, len(data) - 1):
        for bit in [0] if dtype is torch.bool else range(8):
            data[place] ^= 1 << bit
            assert checksum(tensor) != whole, (place, bit)
            data[place] ^= 1 << bit
    assert checksum(tensor) == whole


@settings(max_examples=60, deadline=None)
@given(size=st.integers(2, 20_000), first=st.integers(0, 19_999), second=st.integers(0, 19_999))
def test_two_values_that_change_places_are_seen(size: int, first: int, second: int) -> None:
    tensor = torch.arange(size, dtype=torch.float32)
    changed = tensor.clone()
    first, second = first % size, second % size
    changed[first], changed[second] = tensor[second], tensor[first]
    assert (checksum(changed) != checksum(tensor)) == (first != second)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rows", [1, 2, 64])
@pytest.mark.parametrize("width", [192, checksums.COLUMNS, 2 * checksums.COLUMNS, 1024])
def test_a_change_that_is_the_same_everywhere_does_not_cancel(dtype: torch.dtype, rows: int, width: int) -> None:
    tensor = values(dtype, rows * width)
    whole = checksum(tensor)
    assert checksum(-tensor) != whole
    assert checksum(tensor * 16) != whole
    assert checksum(tensor + 1) != whole
    assert checksum(tensor.view(rows, width).T) != whole or rows == 1
    assert checksum(tensor.roll(1)) != whole
    if dtype.is_floating_point:
        assert checksum(torch.zeros_like(tensor)) != checksum(-torch.zeros_like(tensor))


def test_the_order_of_tensors_and_what_lies_in_which_counts() -> None:
    a, b = values(torch.float32, 500), values(torch.float32, 500, seed=1)
    both = folded([a, b])
    assert both != folded([b, a])
    assert both == folded([a.clone(), b.clone()])
    c = values(torch.int8, 3)  # whatever lies before it, and however it is aligned
    assert folded([c, a]) == folded([c.clone(), a.clone()])
    assert folded([c, a]) != folded([c, b])


@pytest.mark.parametrize("count", [checksums._CPU_BLOCK_BYTES // 4, 700_001])
def test_tensors_larger_than_a_block(count: int) -> None:
    tensor = values(torch.float32, count)
    whole = checksum(tensor)
    small = values(torch.float32, 10)
    split = folded([small, tensor])
    edge = checksums._CPU_BLOCK_BYTES // 4
    for place in (0, edge - 1, edge - 11, edge % count, count - 1):
        bits = tensor.view(torch.int32)
        bits[place] ^= 1
        assert checksum(tensor) != whole
        assert folded([small, tensor]) != split
        bits[place] ^= 1
    assert checksum(tensor) == whole


def test_shapes_layouts_and_empty_ones() -> None:
    image = values(torch.float32, 2 * 3 * 4 * 5).view(2, 3, 4, 5)
    assert checksum(image) == checksum(image.to(memory_format=torch.channels_last))
    assert checksum(torch.tensor(3.0)) != checksum(torch.tensor(4.0))
    empty = torch.empty(0)
    assert folded([empty, image]) == folded([empty, image.clone()])
    assert folded([empty]) == folded([torch.empty(0)])
    z = values(torch.complex64, 9)
    assert checksum(z.conj()) == checksum(z.conj().resolve_conj()) != checksum(z)


def test_a_sketch_tolerates_rounding_and_sees_values() -> None:
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(0)) * 0.02
    projection, norm = sketch(x)
    assert norm == pytest.approx(float(x.double().norm()), rel=1e-12)
    noise = 1 + 1e-7 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rounded = (x.double() * noise).float()
    assert abs(sketch(rounded)[0] - projection) < 1e-6 * norm
    place = int(x.abs().argsort()[len(x) // 2])  # a value of usual size
    flipped = x.clone()
    flipped[place] = -x[place]
    assert abs(sketch(flipped)[0] - projection) == pytest.approx(2 * abs(float(x[place])), rel=1e-3)
    assert abs(sketch(x.flip(0))[0] - projection) > 1e-3 * norm


def test_a_sketch_of_integers_is_exact_and_of_large_ones_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = torch.tensor(7)
    assert sketch(counter) == (checksum(counter), 0.0) != sketch(counter + 1)
    x = values(torch.float64, 1000)
    monkeypatch.setattr(checksums, "_SKETCH_VALUES", 64)
    checksums._signs.cache_clear()
    parts = sketch(x)
    assert parts[1] == pytest.approx(float(x.norm()), rel=1e-12)
    assert sketch(torch.cat([x[64:128], x[:64], x[128:]]))[0] != pytest.approx(parts[0], rel=1e-6)
    z = values(torch.complex64, 100)
    assert sketch(z)[1] == pytest.approx(float(z.norm()), rel=1e-5)
    checksums._signs.cache_clear()


def test_many_sketches_are_read_at_once() -> None:
    tensors = [values(dtype, 100 + index) for index, dtype in enumerate(DTYPES)]
    assert QueuedSketches(tensors).read() == [sketch(tensor) for tensor in tensors]
    assert QueuedSketches([]).read() == []


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for_until_the_sketches_are_read() -> None:
    tensors = [values(torch.float32, 1000).cuda(), torch.arange(9).cuda()]
    expected = [sketch(tensor) for tensor in tensors]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        queued = QueuedSketches(tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    tensors[0].zero_()
    assert queued.read() == expected


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_same_arithmetic() -> None:
    small = values(torch.float32, 10_000)  # one block on both
    assert checksum(small.cuda()) == checksum(small)
    large = values(torch.float32, 40_000_000).cuda()
    whole = checksum(large)
    bits = large.view(torch.int32)
    for place in (0, checksums._DEVICE_BLOCK_BYTES // 4 - 1, checksums._DEVICE_BLOCK_BYTES // 4, 39_999_999):
        bits[place] ^= 1
        assert checksum(large) != whole
        bits[place] ^= 1
    assert checksum(large) == whole
    assert sketch(small.cuda()) == pytest.approx(sketch(small), rel=1e-9)
    both = folded([small, small.cuda()])  # a model on two devices
    assert both == folded([small.clone(), small.cuda()]) != folded([small, -small.cuda()])


def test_small_tensors_are_read_in_one_piece_as_one_by_one() -> None:
    torch.manual_seed(3)
    mixed = [
        *(values(dtype, 7, seed) for dtype in DTYPES for seed in range(2)),
        *(torch.randn(10, 10) for _ in range(1100)),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(6, 6).t(),
        torch.tensor([True, False, True]),
        torch.tensor([False]),
        torch.arange(5),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(2, dtype=torch.complex64),
        torch.randn(5000),
        torch.empty(0),
        torch.tensor(1.0),
    ]
    joined = torch.cat(list(checksums._joined(mixed)))
    assert torch.equal(joined, torch.cat([checksums._bytes_of(tensor) for tensor in mixed]))
    assert len(list(checksums._joined(mixed))) < 12 + len(DTYPES)


def test_the_state_follows_what_is_added_replaced_and_removed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = ReplicatedState([model])
    assert state.read() is state.read()
    assert list(state.read()) == list(replicated_state([model]))
    model[0].weight = nn.Parameter(torch.ones(2, 2))
    assert state.read()["0.weight"] is model[0].weight
    model.register_buffer("mean", torch.zeros(2))
    assert "mean" in state.read()
    model.mean = torch.ones(2)
    assert state.read()["mean"] is model.mean
    model.append(nn.Linear(2, 1))
    assert "2.bias" in state.read()
    del model[0]
    assert list(state.read()) == list(replicated_state([model]))
