"""The global generators are saved and restored exactly, by a shorter way."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from evenload.training.data import randomness


def test_the_fast_saver_restores_what_the_libraries_would() -> None:
    saver = randomness.FastSaver()
    np.random.seed(3)
    for draws_outside, draws_inside in ((0, 0), (1, 0), (0, 1), (2, 3), (1, 1), (3, 700), (0, 0)):
        np.random.randn(draws_outside)  # an odd number leaves a deviate behind
        for _ in range(draws_outside):
            random.gauss(0, 1)  # an odd number leaves a deviate behind here, too
        random.random()
        torch.rand(1)
        expected = randomness.get_global_state()
        state = saver.save()
        randomness.reseed(5)
        np.random.randn(draws_inside)
        np.random.rand(draws_inside)
        random.gauss(0, 1)
        for _ in range(draws_inside):
            random.random()
        torch.rand(draws_inside + 1)
        saver.restore(state)
        found = randomness.get_global_state()
        assert torch.equal(found[0], expected[0]) and found[1] == expected[1]
        assert all(np.array_equal(a, b) for a, b in zip(found[2], expected[2], strict=True)), (
            draws_outside,
            draws_inside,
        )


DRAWS = {
    "one": lambda: torch.rand(()),
    "deviate": lambda: torch.randn(()),
    "many": lambda: torch.randn(100),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(3)),
    "order": lambda: torch.randperm(3),
    "python": random.random,
    "python's deviate": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy's deviate": np.random.randn,
}


@pytest.mark.parametrize("name", DRAWS)
def test_each_draw_shows(name: str) -> None:
    assert randomness._torch_memory() is not None  # otherwise each step is seeded, and nothing is wrong
    saver = randomness.FastSaver()
    randomness.reseed(3)
    assert randomness.is_as_seeded()
    for _ in range(5):  # every second deviate was held back
        state = saver.save()
        holds_one = np.random.get_state()[3]  # nobody can see that it is taken
        assert saver.is_as_saved(state) == (not holds_one)
        DRAWS[name]()
        assert not saver.is_as_saved(state)
    assert not randomness.is_as_seeded()


def test_generators_put_back_are_as_saved() -> None:
    saver = randomness.FastSaver()
    for dtype in (torch.float32, torch.float64):
        randomness.reseed(3)
        torch.randn(2, dtype=dtype)  # held back one, and gave it away
        state = saver.save()
        for _ in range(2):  # as torch.utils.checkpoint and torch.random.fork_rng do
            with torch.random.fork_rng():
                torch.randn((), dtype=dtype)
            assert saver.is_as_saved(state)


def test_the_fast_saver_follows_another_generator_of_numpy() -> None:
    saver, before = randomness.FastSaver(), np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(4))
        state = saver.save()
        drawn = np.random.rand(3)
        saver.restore(state)
        assert np.array_equal(np.random.rand(3), drawn)
    finally:
        np.random.set_bit_generator(before)


def test_the_memory_of_pythons_generator_is_what_it_reports() -> None:
    random.seed(8)
    random.random()
    assert randomness._python_memory() is not None  # otherwise the slow way is taken, and nothing is wrong
    before = random.getstate()
    saver = randomness.FastSaver()
    state = saver.save()
    drawn = [random.random() for _ in range(700)]
    saver.restore(state)
    assert random.getstate() == before
    assert [random.random() for _ in range(700)] == drawn
