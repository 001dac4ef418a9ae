"""Read iterable datasets: every rank reads the whole stream and keeps its own samples.

Step s is the s-th batch of the user's own DataLoader, ragged batches included, split over the ranks by the plan. Every sample
is used once, the ranks end at the same step, and a resume skips used samples.

The stream must be the same on every rank. It is where it has no randomness, or draws it from the global generators (torch,
random, numpy), which are seeded by (seed, epoch) on every rank alike; a dataset must not shard itself by rank. The cost: every
rank reads, decodes and augments every sample, and a resume reads the skipped ones again. A map-style dataset has neither cost.

The user's collate_fn runs in the main process, since the plan is known only there.
"""

from __future__ import annotations

import io
import itertools
import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from evenload.errors import DataError
from evenload.training.data import randomness
from evenload.training.data.batches import pin as pin_batch
from evenload.training.data.killed_workers import await_workers, find_dead_worker, iterate
from evenload.training.data.order import BroadcastIntegers
from evenload.training.data.rank_dependence import differs, sharded_stream, stream_row
from evenload.training.data.reading import (
    collate,
    ignore_worker_warnings,
    inner_loader,
    read_settings,
    seed_workers,
    shut_down_workers,
)


class StreamBatch:
    def __init__(self, samples: Sequence[Any], position: int) -> None:
        self._samples = samples
        self._position = position

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def contents(self) -> Sequence[Any]:
        return self._samples

    def samples(self, low: int, high: int) -> list[Any]:
        return [self._samples[index] for index in range(low - self._position, high - self._position)]

    def joined(self, other: StreamBatch) -> StreamBatch:
        return StreamBatch([*self._samples, *other._samples], self._position)


class StreamReader:
    """Read the stream in batches, in the order of the user's loader, which is not referenced."""

    def __init__(self, loader: DataLoader[Any], *, seed: int, keyed: bool, pin: bool) -> None:
        self._dataset = loader.dataset
        self._size = loader.batch_size or 1
        self._drop_last = loader.drop_last
        self._collate_fn: Callable[[list[Any]], Any] = loader.collate_fn
        self._generator = loader.generator
        self._persistent = loader.persistent_workers
        self._seed, self._keyed, self._pin = seed, keyed, pin
        self.reading = read_settings(loader, pinned=pin)
        self._epoch = 0
        self._own: list[Any] = []  # generators that collate_fn holds or names
        self._generators: randomness.IsolatedGenerators | None = None
        self._batches: Iterator[Sequence[Any]] | None = None
        self._inner: DataLoader[Any] | None = None
        if loader.num_workers > 0:
            self._stream = _SeededStream(loader.dataset, seed if keyed else None)
            self._inner = inner_loader(
                loader,
                self._stream,
                read_settings(loader, pinned=False),
                batch_size=loader.batch_size,
                drop_last=loader.drop_last,
                collate_fn=PackedSamples.pack,
            )

    def begin(self, epoch: int, skip_batches: int = 0, skip_samples: int = 0) -> None:
        """Start an epoch and read past the samples used before; DataError if the batches don't hold as many."""
        self._epoch = epoch
        self._own = randomness.find_generators(randomness.holders(self._collate_fn)) if self._keyed else []
        if self._inner is not None:
            # The same base seed on every rank, for the same streams.
            seed_workers(self._inner, self._generator, self._seed, epoch)
            self._stream.epoch.value = epoch
            with ignore_worker_warnings():
                self._batches = iterate(self._inner)
        else:
            if self._keyed:
                self._generators = randomness.IsolatedGenerators(randomness.mix(self._seed, epoch, randomness.STREAM))
            self._batches = self._batches_of_samples()
        passed = sum(len(self._next()) for _ in range(skip_batches))
        if passed != skip_samples:
            raise DataError(
                f"the checkpoint is after {skip_samples} samples in {skip_batches} batches of the stream; now its "
                f"first {skip_batches} batches hold {passed}: the dataset, batch_size or num_workers changed; set them "
                f"as they were, or start anew with --fresh"
            )

    def next_batch(self, position: int) -> StreamBatch:
        """Return the next global batch, whose first sample has this global position; empty at the end."""
        return StreamBatch(self._next(), position)

    def collate(self, samples: list[Any], low: int) -> Any:
        """Collate samples, as `reading.collate` does; `low` is the global position of the first."""
        if not self._keyed:
            data = collate(self._collate_fn, samples, low)
        else:
            with randomness.forked(self._own):
                randomness.reseed(randomness.mix(self._seed, self._epoch, randomness.COLLATE, low), self._own)
                data = collate(self._collate_fn, samples, low)
        return pin_batch(data) if self._pin else data

    def pause(self) -> None:
        self._generators = None
        if self._inner is None or not self._persistent:
            self.close()

    def close(self) -> None:
        batches, self._batches = self._batches, None
        if self._inner is not None:
            shut_down_workers(batches)
            self._inner._iterator = None

    def _next(self) -> Sequence[Any]:
        if self._batches is None:
            return ()
        if self._inner is not None:
            return self._receive(self._batches)
        if self._generators is None:
            return next(self._batches, ())
        with self._generators.active():
            return next(self._batches, ())

    def _receive(self, batches: Iterator[Sequence[Any]]) -> Sequence[Any]:
        """Return what a worker sends; DataError if it ends, whose stream no other one can continue."""
        try:
            with await_workers(batches):
                return next(batches, ())
        except Exception as error:
            if (dead := find_dead_worker(batches, error)) is not None:
                raise dead from None
            raise

    def _batches_of_samples(self) -> Iterator[list[Any]]:
        samples = iter(self._dataset)
        while batch := list(itertools.islice(samples, self._size)):
            if len(batch) == self._size or not self._drop_last:
                yield batch


def check_same_stream(
    agree: BroadcastIntegers,
    rank: int,
    samples: StreamBatch,
    where: str,
    read_again: Callable[[], StreamBatch] | None = None,
) -> StreamBatch:
    """Return the batch to go on with; raise DataError on a rank whose batch is not rank 0's, as far as can be seen.

    Batches of other lengths would end in a hang. With `read_again`, which reads the epoch anew up to this batch, and was given
    on rank 0 too, the first samples are compared. The batch is empty where `agree` returns nothing.
    """
    row = stream_row(samples.contents) if read_again is not None else []
    # Rank 0's; another rank may be rank 0 before all have received them.
    if not (agreed := agree([len(samples), *row])):
        return StreamBatch([], 0)
    num_samples, *first = agreed
    if num_samples == len(samples) and read_again is not None and first and differs(row, first):
        samples = read_again()
        if stream_row(samples.contents) == row:
            raise sharded_stream(where, rank)
    if num_samples != len(samples):
        raise DataError(
            f"{where}: rank {rank} read {len(samples)} samples where rank 0 read {num_samples}; an iterable dataset must yield "
            "the same samples on every rank: don't shard it by rank (Evenload takes each rank's part), and draw its randomness "
            "from the global generators"
        )
    return samples


class _SeededStream(IterableDataset[Any]):
    """The user's dataset in a worker, seeded by (seed, epoch, worker) at each start."""

    def __init__(self, dataset: Any, seed: int | None) -> None:
        self.dataset = dataset
        self.epoch = multiprocessing.RawValue("q", 0)  # persistent workers see it change
        self._seed = seed

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if self._seed is not None and info is not None:
            randomness.reseed(randomness.mix(self._seed, self.epoch.value, randomness.STREAM, info.id))
        return iter(self.dataset)


class PackedSamples(Sequence[Any]):
    """Samples from a worker in one buffer, each unpacked only where it is used.

    Unpacked, every tensor of every sample would need an open file of its own.
    """

    def __init__(self, buffer: torch.Tensor, ends: list[int]) -> None:
        self._buffer = buffer
        self._ends = ends

    @classmethod
    def pack(cls, samples: list[Any]) -> PackedSamples:
        stream = io.BytesIO()
        ends = []
        for sample in samples:
            _Pickler(stream, protocol=5).dump(sample)
            ends.append(stream.tell())
        return cls(torch.frombuffer(stream.getbuffer(), dtype=torch.uint8), ends)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        low = self._ends[index - 1] if index else 0
        return pickle.loads(self._buffer.numpy()[low : self._ends[index]].data)


class _Pickler(pickle.Pickler):
    """Pickle plain CPU tensors as bytes; torch's own way takes about 50 microseconds each."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.device.type != "cpu":
            return NotImplemented
        if value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg():
            return NotImplemented
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _unpack_tensor, (data, value.dtype, tuple(value.shape))


def _unpack_tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
