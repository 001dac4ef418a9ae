"""Permutations and draws of any number of samples that are computed where they are used: a position costs no memory.

Note [Feistel network]
  A position is cut into two halves of h bits, left and right. A round replaces (left, right) by
  (right, left xor f(right, key of the round)), which can be inverted whatever f is, so the rounds permute the numbers below
  4^h. h is the smallest with 4^h >= n. Where the result is n or more, it is permuted again until it is below n: that walks
  along a cycle of the permutation of 4^h numbers, whose members below n follow one another, so it permutes those n. As
  4^h < 4 n (but for n = 1), a walk has less than four steps on average. f is the finalizer of splitmix64 (Steele et al. 2014).
  (Luby and Rackoff 1988 show that four rounds with random functions can't be told from a random permutation; Black and
  Rogaway 2002 show the walk.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from evenload.training.data.randomness import mix

NUM_ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""Added to the state of splitmix64 with each number."""


class KeyedPermutation:
    """A permutation of ``range(num_samples)``, a function of `key`; a slice returns the samples at those positions."""

    def __init__(self, num_samples: int, key: int) -> None:
        self._num_samples = num_samples
        self._half_bits = np.uint64(max(1, ((num_samples - 1).bit_length() + 1) // 2))
        self._half_mask = (np.uint64(1) << self._half_bits) - np.uint64(1)
        self._round_keys = np.array([mix(key, index) for index in range(NUM_ROUNDS)], dtype=np.uint64)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, positions: slice) -> NDArray[np.int64]:
        return self.at(np.arange(*positions.indices(self._num_samples), dtype=np.int64))

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at these positions, each at least 0 and below ``num_samples``."""
        found = self._permute(positions.astype(np.uint64))
        (outside,) = np.nonzero(found >= self._num_samples)
        while outside.size:
            walked = self._permute(found[outside])
            found[outside] = walked
            outside = outside[walked >= self._num_samples]
        return found.astype(np.int64)

    def _permute(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._half_bits, values & self._half_mask
        for key in self._round_keys:
            left, right = right, left ^ (_hash(right + key) & self._half_mask)
        return (left << self._half_bits) | right


class KeyedDraws:
    """`num_draws` samples of ``range(num_samples)`` with replacement, a function of `key`: splitmix64 at each position."""

    def __init__(self, num_samples: int, num_draws: int, key: int) -> None:
        self._num_samples, self._num_draws = np.uint64(num_samples), num_draws
        self._key = np.uint64(key)

    def __len__(self) -> int:
        return self._num_draws

    def __getitem__(self, positions: slice) -> NDArray[np.int64]:
        counts = np.arange(*positions.indices(self._num_draws), dtype=np.int64).astype(np.uint64)
        # Modulo prefers no sample by more than num_samples / 2^64.
        return (_hash(self._key + (counts + np.uint64(1)) * _GOLDEN) % self._num_samples).astype(np.int64)


def _hash(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash each number to 64 bits; the sums and products wrap."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
