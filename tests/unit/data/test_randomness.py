"""The global generators are saved and restored exactly, by a shorter way."""

from __future__ import annotations

import random
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from evenload.training.data import randomness


def test_a_copy_restores_what_the_libraries_would() -> None:
    np.random.seed(3)
    for draws_outside, draws_inside in ((0, 0), (1, 0), (0, 1), (2, 3), (1, 1), (3, 700), (0, 0)):
        np.random.randn(draws_outside)  # an odd number leaves a deviate behind
        for _ in range(draws_outside):
            random.gauss(0, 1)  # an odd number leaves a deviate behind here, too
        random.random()
        torch.rand(1)
        expected = randomness.get_global_state()
        state = randomness.copy_global_state()
        randomness.reseed(5)
        np.random.randn(draws_inside)
        np.random.rand(draws_inside)
        random.gauss(0, 1)
        for _ in range(draws_inside):
            random.random()
        torch.rand(draws_inside + 1)
        randomness.put_back(state)
        found = randomness.get_global_state()
        assert torch.equal(found[0], expected[0]) and found[1] == expected[1]
        assert all(np.array_equal(a, b) for a, b in zip(found[2], expected[2], strict=True)), (
            draws_outside,
            draws_inside,
        )


def test_all_states_are_found_in_memory() -> None:
    """Otherwise the slow way is taken, and nothing is wrong."""
    assert randomness.copy_global_state()[0] is not None
    assert len(randomness._memory[1]) == 4


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_deviate_that_numpy_held_back_is_given_once(monkeypatch: pytest.MonkeyPatch, is_fast: bool) -> None:
    """Its words don't change when it is taken, or put back with all the rest."""
    if not is_fast:
        monkeypatch.setattr(randomness, "_memory", None)
        monkeypatch.setattr(randomness, "_deviate_memory", lambda: None)
    np.random.seed(4)
    np.random.randn()
    holds_one = np.random.get_state()
    deviate = np.random.randn()
    for expected in (holds_one, np.random.get_state(), holds_one):
        np.random.set_state(expected)
        state = randomness.copy_global_state()
        assert (state[0] is not None) == is_fast
        randomness.reseed(5)
        np.random.randn()
        randomness.put_back(state)
        assert np.random.get_state()[2:] == expected[2:]
    assert np.random.randn() == deviate


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torchs_seed_and_deviate_are_put_back(dtype: torch.dtype) -> None:
    torch.manual_seed(11)
    torch.randn((), dtype=dtype)
    before = torch.get_rng_state()
    state = randomness.copy_global_state()
    expected = torch.randn(5, dtype=dtype), torch.rand(700)
    randomness.reseed(5)
    randomness.put_back(state)
    assert torch.initial_seed() == 11 and torch.equal(torch.get_rng_state(), before)
    found = torch.randn(5, dtype=dtype), torch.rand(700)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_the_memory_is_found_whatever_the_scripts_default_device_is() -> None:
    randomness._torch_memory.cache_clear()
    torch.set_default_device("meta")
    try:
        assert randomness._torch_memory() is not None
    finally:
        torch.set_default_device(None)


def test_a_copy_follows_another_generator_of_numpy() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(4))
        state = randomness.copy_global_state()
        drawn = np.random.rand(3)
        randomness.put_back(state)
        assert np.array_equal(np.random.rand(3), drawn)
    finally:
        np.random.set_bit_generator(before)


def test_the_memory_of_pythons_generator_is_what_it_reports() -> None:
    random.seed(8)
    random.random()
    assert randomness._python_memory() is not None  # otherwise the slow way is taken, and nothing is wrong
    before = random.getstate()
    state = randomness.copy_global_state()
    drawn = [random.random() for _ in range(700)]
    randomness.put_back(state)
    assert random.getstate() == before
    assert [random.random() for _ in range(700)] == drawn


class _LazyProxy:
    """Passes each attribute on to an object that is made when it is needed; here that fails."""

    __slots__ = ("_make",)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("not made yet")


class _ProxyOfAny(_LazyProxy):
    """Has whatever it is asked for."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        return name


@pytest.mark.parametrize("proxy", [_LazyProxy, _ProxyOfAny])
def test_proxies_without_attributes_hold_no_generators(proxy: type) -> None:
    held = types.SimpleNamespace(proxy=proxy(), generator=random.Random(1))
    assert randomness.find_generators(randomness.holders(held)) == [held.generator]
    assert randomness.find_generators([proxy()]) == []


def test_holders_visits_each_object_once_at_a_depth() -> None:
    inner = [types.SimpleNamespace() for _ in range(60)]
    for one in inner:
        vars(one).update({f"one{index}": other for index, other in enumerate(inner)})
    assert sum(1 for _ in randomness.holders(inner[0])) < 200  # 219,661 before


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.Generator().manual_seed(3),
        lambda: random.Random(3),
        lambda: np.random.default_rng(3),
        lambda: np.random.RandomState(3),
        lambda: np.random.RandomState(np.random.PCG64(3)),
    ],
)
def test_generators_of_any_kind_are_seeded_and_restored(make: Callable[[], Any]) -> None:
    own = [make()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = randomness.comparable_state(own)
        with randomness.forked(own):
            randomness.reseed(5, own)
            seeded = _draw(own[0])
            randomness.reseed(5, own)
            assert _draw(own[0]) == seeded and randomness.comparable_state(own) != before
        assert randomness.comparable_state(own) == before
        states = randomness.save_generators(own)
        drawn = _draw(own[0])
        randomness.load_generators(own, states)
        assert _draw(own[0]) == drawn != seeded


def _draw(generator: Any) -> float:
    return float(
        torch.rand((), generator=generator)
        if isinstance(generator, torch.Generator)
        else generator.normal()
        if hasattr(generator, "normal")
        else generator.random()
    )
