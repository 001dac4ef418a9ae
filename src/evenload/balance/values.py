"""The values of the mathematics: frozen, plain, equal on all ranks.

Times are seconds (`_s`), sizes are samples or bytes, shares are integer samples of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class ComputeDevice:
    """A device that a rank computes on, as measured or read, never as advertised."""

    name: str
    """Readable name: ``NVIDIA GeForce RTX 3090`` or ``CPU (cores 0-1)``."""
    kind: str
    """``"cuda"`` or ``"cpu"``."""
    index: int
    """The device index of its kind on its node; -1 for the CPU."""
    memory_bytes: int
    num_cores: int = 0
    """CPU cores a rank on it may use; 0 where that means nothing."""
    uuid: str = ""
    """Of a GPU that a process sees only by this name in CUDA_VISIBLE_DEVICES; empty where the index is enough."""
    is_part: bool = False
    """A part of a GPU (MIG), of which a process can use one alone."""


@dataclass(frozen=True)
class LinkSpeed:
    """Latency and bandwidth between two ranks."""

    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True)
class Cost:
    """Cost of one rank: ``t = K * per_micro_s + per_sample_s * max(n, K)`` for n samples in K micro-batches.

    A rank computes at least one sample in each micro-batch: where it has none, one of weight 0.
    ``per_sample_error_s`` is the half-width of the 95 % interval of ``per_sample_s``; infinite where it is a guess.
    """

    per_micro_s: float
    per_sample_s: float
    per_sample_error_s: float = float("inf")

    def predict_s(self, num_samples: int, num_micro: int) -> float:
        return num_micro * self.per_micro_s + self.per_sample_s * max(num_samples, num_micro)


@dataclass(frozen=True)
class StepProgress:
    """Progress of a whole job with a step of which a plan holds one island's part."""

    step: int
    """Index, within the epoch, of the step that follows."""
    position: int
    """Global position of its first sample."""
    num_samples: int
    """Samples of all islands up to there; 0 where an island computes several batches for one step."""
    ends: tuple[int, int] | None = (1, 1)
    """Batches that this island computed for the steps that end here, and the number of these steps; None before their end."""


@dataclass(frozen=True)
class StepPlan:
    """Assignment of the samples of one global batch to ranks.

    ``micro[m][rank]`` counts the samples of rank in micro-batch m. Micro-batch m is the fixed slice of the global batch
    that starts after the samples of the micro-batches before it; inside the slice the ranks follow one another.
    """

    generation: int
    epoch: int
    step: int
    """Index of the step within its epoch."""
    attempt: int
    start: int
    """Global position, within the epoch's order, of the first sample of the step."""
    micro: tuple[tuple[int, ...], ...]
    out: tuple[int, ...] = ()
    """Ranks of share 0 that have left the groups of gradients and statistics: they read and compute nothing."""
    of: StepProgress | None = None
    """The whole of which the plan is a part, and that other islands compute at the same time; None if it is all of it."""

    @property
    def progress(self) -> StepProgress:
        """Progress of the job after the step."""
        return self.of or StepProgress(self.step + 1, self.start + self.num_samples, self.num_samples)

    @cached_property
    def num_micro(self) -> int:
        return len(self.micro)

    @property
    def world_size(self) -> int:
        return len(self.micro[0])

    @cached_property
    def num_samples(self) -> int:
        return sum(map(sum, self.micro))

    def following(self) -> StepPlan:
        """Return the plan of the next step, which is divided as this one."""
        later = object.__new__(StepPlan)  # `replace` takes ten times as long
        later.__dict__.update(vars(self), step=self.step + 1, start=self.start + self.num_samples)
        return later

    @cached_property
    def shares(self) -> tuple[int, ...]:
        return self.micro[0] if len(self.micro) == 1 else tuple(map(sum, zip(*self.micro, strict=True)))

    def slice_of(self, micro_index: int, rank: int | None = None) -> tuple[int, int]:
        """Return the global positions ``[low, high)`` of a micro-batch, or of one rank's part of it."""
        low = self.start + sum(map(sum, self.micro[:micro_index]))
        row = self.micro[micro_index]
        if rank is None:
            return low, low + sum(row)
        low += sum(row[:rank])
        return low, low + row[rank]
