"""Wrong uses are refused when the loader is prepared, with what to do."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from evenload.errors import ConfigError, DataError
from evenload.training.data.reading import inner_loader, read_settings
from evenload.training.data.tuning import ReadSettings
from tests.unit.data.fakes import Board, Numbers, make_ranks


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class OwnLoop(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


class Sharding(Sampler[int]):
    """Another library's."""

    num_replicas, rank, shuffle = 2, 0, False

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 8, 2))


class Outer(Sampler[list[int]]):
    def __init__(self) -> None:
        self.inner = Sharding()

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(self.inner)])


def distributed() -> Any:
    return DistributedSampler(Numbers(8), num_replicas=2, rank=0)


@pytest.mark.parametrize(
    ("loader", "error", "match"),
    [
        (lambda: [1, 2, 3], ConfigError, "expected a torch.utils.data.DataLoader, got builtins.list"),
        (lambda: DataLoader(Numbers(8), 4, sampler=distributed()), DataError, "DistributedSampler.*remove the sampler"),
        (
            lambda: DataLoader(Numbers(8), batch_sampler=torch.utils.data.BatchSampler(distributed(), 2, False)),
            DataError,
            "DistributedSampler.*remove the sampler",
        ),
        (
            lambda: DataLoader(Numbers(8), 4, sampler=Sharding()),
            DataError,
            "Sharding, which gives each rank a part.*shuffle=False",
        ),
        (lambda: DataLoader(Numbers(8), batch_sampler=Outer()), DataError, "Sharding, which gives each rank a part"),
        (lambda: DataLoader(Numbers(0), 4), DataError, "is empty"),
        (lambda: DataLoader(Numbers(3), 4, sampler=[]), DataError, "sampler, list, is empty"),
        (
            lambda: DataLoader(Numbers(3), 4, drop_last=True),
            DataError,
            "batch_size=4 with drop_last=True and 3 samples",
        ),
        (lambda: DataLoader(Numbers(3), batch_size=None), DataError, "has no batches to split"),
        (lambda: DataLoader(Stream(), batch_size=None), DataError, "can't be split over"),
        (lambda: DataLoader(Numbers(8), 4, num_workers=1, in_order=False), ConfigError, "has no effect"),
        (lambda: DataLoader(Numbers(8), 4, num_workers=1, prefetch_factor=0), ConfigError, "prefetch_factor=0"),
        (lambda: OwnLoop(Numbers(8), 4), DataError, "overrides __iter__"),
        (lambda: DataLoader({1, 2}, 4, sampler=[0]), DataError, "has no __getitem__: give the"),  # type: ignore[arg-type]
    ],
)
def test_wrong_loaders_are_refused(loader: Any, error: type[Exception], match: str) -> None:
    made = loader()
    with pytest.raises(error, match=match):
        make_ranks(Board((1, 1)), made)


def test_a_search_for_workers_is_refused_where_they_decide_the_order() -> None:
    with pytest.raises(ConfigError, match=r"num_workers=.auto. has no effect on an iterable dataset"):
        make_ranks(Board((1,)), DataLoader(Stream(), 4), most_workers=2)


def test_datapipes_are_refused() -> None:
    with pytest.warns() as _:
        import warnings

        from torch.utils.data.datapipes.iter import IterableWrapper

        warnings.warn("datapipes may warn of their end", DeprecationWarning, stacklevel=1)
        pipe = IterableWrapper(range(5))
        loader = DataLoader(pipe, batch_size=2)
    with pytest.raises(DataError, match="IterDataPipe"):
        make_ranks(Board((1,)), loader)


def test_what_the_users_loader_says_is_still_there() -> None:
    data = Numbers(10)
    (rank,) = make_ranks(Board((1,)), DataLoader(data, batch_size=4))
    assert (rank.batch_size, rank.dataset, len(rank)) == (4, data, 3)
    (stream,) = make_ranks(Board((1,)), DataLoader(Stream(), batch_size=4))
    with pytest.raises(TypeError):
        len(stream)


@pytest.mark.parametrize(("num_bytes", "refused"), [(75, False), (76, True)])
def test_workers_in_a_temporary_folder_with_a_long_path(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int, refused: bool
) -> None:
    """Loader workers hang where the names of their sockets don't fit (found by trying 75 and 76)."""
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * (num_bytes - 1))
    loader = DataLoader(Numbers(8), 4, num_workers=1)
    inner_loader(loader, Numbers(8), ReadSettings())
    with (
        pytest.raises(ConfigError, match=r"76 characters.*export TMPDIR=/tmp") if refused else contextlib.nullcontext()
    ):
        inner_loader(loader, Numbers(8), read_settings(loader, pinned=False))
