"""The cut of a chain of layers: exactly the best, by every cut there is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.balance.stages import Cut, LayerCost, cut_chain
from evenload.balance.values import LinkSpeed

# Sums of these are exact, so that equal really is equal.
SECONDS = st.one_of(st.integers(0, 8).map(lambda n: n / 8), st.just(math.inf))
BYTES = st.integers(0, 6)
LINKS = st.builds(LinkSpeed, st.sampled_from([0.0, 0.25, 1.0]), st.sampled_from([1.0, 4.0, math.inf]))


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[LayerCost], list[int], list[list[LinkSpeed]], int]:
    num_devices = draw(st.integers(1, 4))
    seconds = st.tuples(*[SECONDS] * num_devices)
    layers = draw(st.lists(st.builds(LayerCost, BYTES, BYTES, BYTES, seconds), min_size=1, max_size=6))
    limits = draw(st.lists(st.integers(0, 40), min_size=num_devices, max_size=num_devices))
    links = [[draw(LINKS) for _ in range(num_devices)] for _ in range(num_devices)]
    return layers, limits, links, draw(BYTES)


def every_cut(num_layers: int, num_devices: int) -> Iterator[tuple[int, ...]]:
    """Bounds of all contiguous pieces, empty ones too."""

    def rest(low: int, left: int) -> Iterator[tuple[int, ...]]:
        if left == 0:
            yield (num_layers,)
            return
        for bound in range(low, num_layers + 1):
            for others in rest(bound, left - 1):
                yield (bound, *others)

    for inner in rest(0, num_devices - 1):
        yield (0, *inner)


def time_of(bounds: tuple[int, ...], layers: list[LayerCost], links: list[list[LinkSpeed]], output_bytes: int) -> float:
    def way(a: int, b: int, num_bytes: int) -> float:
        return 0.0 if a == b else links[a][b].latency_s + num_bytes / links[a][b].bandwidth_bytes_per_s

    where = [d for d in range(len(bounds) - 1) for _ in range(bounds[d], bounds[d + 1])]
    total = sum(layer.seconds[d] for layer, d in zip(layers, where, strict=True))
    total += way(0, where[0], layers[0].input_bytes) + 2 * way(where[-1], 0, output_bytes)
    for before, layer, d in zip(where, layers[1:], where[1:], strict=False):
        total += 2 * way(before, d, layer.input_bytes)
    return total


def peak_of(bounds: tuple[int, ...], layers: list[LayerCost], limits: list[int]) -> float:
    used = [sum(layer.num_bytes for layer in layers[a:b]) for a, b in pairwise(bounds)]
    return max((u / limit if limit else math.inf) if u else 0.0 for u, limit in zip(used, limits, strict=True))


@settings(max_examples=400, deadline=None)
@given(chains(), st.sampled_from([0.0, 0.25, 1.0]))
def test_the_cut_is_the_best_of_all(
    chain: tuple[list[LayerCost], list[int], list[list[LinkSpeed]], int], slack: float
) -> None:
    layers, limits, links, output_bytes = chain
    cuts = {
        bounds: time_s
        for bounds in every_cut(len(layers), len(limits))
        if peak_of(bounds, layers, limits) <= 1
        and math.isfinite(time_s := time_of(bounds, layers, links, output_bytes))
    }
    found = cut_chain(layers, limits, links, output_bytes, slack)
    if not cuts:
        assert found is None
        return
    assert found is not None
    assert found.bounds in cuts
    assert found.expected_s == cuts[found.bounds]
    longest_s = min(cuts.values()) * (1 + slack)
    assert found.expected_s <= longest_s
    least_peak = min(peak_of(bounds, layers, limits) for bounds, time_s in cuts.items() if time_s <= longest_s)
    assert peak_of(found.bounds, layers, limits) == pytest.approx(least_peak, rel=1e-6)
    pieces = list(pairwise(found.bounds))
    assert found.device_bytes == tuple(sum(layer.num_bytes for layer in layers[a:b]) for a, b in pieces)
    assert [found.device_of(index) for index in range(len(layers))] == [
        d for d, (a, b) in enumerate(pieces) for _ in range(a, b)
    ]
    assert found == cut_chain(layers, limits, links, output_bytes, slack)


def chain_of(seconds: list[tuple[float, ...]], num_bytes: int = 4) -> list[LayerCost]:
    return [LayerCost(num_bytes, 0, 1, each) for each in seconds]


def free(num_devices: int) -> list[list[LinkSpeed]]:
    return [[LinkSpeed(0.0, math.inf)] * num_devices] * num_devices


def cut(*arguments: object, **further: object) -> Cut:
    found = cut_chain(*arguments, **further)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_a_fast_device_gets_as_much_as_fits() -> None:
    layers = chain_of([(1.0, 30.0)] * 3)
    assert cut(layers, [9, 100], free(2), slack=0.02).bounds == (0, 2, 3)
    assert cut(layers, [100, 9], free(2), slack=0.02).bounds == (0, 3, 3)  # the slow one is left out
    assert cut(layers, [4, 100], free(2), slack=0.02).bounds == (0, 1, 3)


def test_equal_devices_are_filled_equally_and_in_proportion_to_their_room() -> None:
    layers = chain_of([(1.0, 1.0)] * 8)
    assert cut(layers, [100, 100], free(2), slack=0.02).bounds == (0, 4, 8)
    assert cut(layers, [100, 300], free(2), slack=0.02).bounds == (0, 2, 8)
    assert cut(chain_of([(1.0,) * 3] * 9), [50] * 3, free(3), slack=0.02).bounds == (0, 3, 6, 9)


def test_a_costly_way_is_taken_only_where_memory_asks_for_it() -> None:
    layers = chain_of([(1.0, 1.0)] * 4)
    slow = [[LinkSpeed(1.0, math.inf)] * 2] * 2
    assert cut(layers, [16, 16], slow, slack=0.02).bounds == (0, 4, 4)
    tight = cut(layers, [15, 15], slow, slack=0.02)
    assert tight.bounds == (0, 2, 4)
    assert tight.expected_s == 4 + 2 * 1.0 + 2 * 1.0


def test_the_cut_falls_where_least_crosses_it() -> None:
    layers = [LayerCost(4, 0, crossing, (1.0, 1.0)) for crossing in (1, 50, 50, 2, 50, 50)]
    links = [[LinkSpeed(0.0, 10.0)] * 2] * 2
    assert cut(layers, [20, 20], links).bounds == (0, 3, 6)


def test_nothing_fits() -> None:
    assert cut_chain(chain_of([(1.0, 1.0)] * 3), [4, 4], free(2)) is None
    assert cut_chain(chain_of([(1.0, 1.0)], num_bytes=9), [8, 8], free(2)) is None


def test_a_thousand_layers_on_eight_devices() -> None:
    layers = [LayerCost(100 + 7 * (i % 5), i % 3, 10, tuple(1.0 + 0.01 * d for d in range(8))) for i in range(1000)]
    total = sum(layer.num_bytes for layer in layers)
    found = cut(layers, [total // 7] * 8, free(8), slack=0.5)
    assert max(found.device_bytes) <= total / 8 * 1.01
