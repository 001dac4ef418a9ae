"""The parts of a verification, each alone: float64, shared draws, putting back, the fit of a loss's parts."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from evenload.training.verify.double import Float64Mode, float64, in_double
from evenload.training.verify.findings import compare, distance
from evenload.training.verify.parts import fit
from evenload.training.verify.random_draws import SharedDraws
from evenload.training.verify.saved_state import Tracked, params_key, put_back, tracked_parameters
from evenload.training.verify.sides import Gradient, Variant
from evenload.training.verify.wrong_units import describe_metrics

DRAWS = {
    "randn": lambda x: torch.randn(len(x), 3),
    "rand_tuple": lambda x: torch.rand((len(x),)),
    "size_keyword": lambda x: torch.randn(size=(len(x), 2)),
    "randint": lambda x: torch.randint(0, 100, (len(x),)),
    "randint_high": lambda x: torch.randint(100, (len(x),)),
    "like": lambda x: torch.randn_like(x),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "normal_": lambda x: torch.empty(len(x), 2).normal_(),
    "uniform_": lambda x: x.clone().uniform_(1, 2),
    "two_a_sample": lambda x: torch.randn(2 * len(x), 2),
}


@given(st.sampled_from(sorted(DRAWS)), st.integers(1, 6), st.integers(1, 6))
def test_a_part_draws_what_it_would_draw_within_the_whole(name, first, second):
    whole_size, draw = first + second, DRAWS[name]

    def drawn(low, num):
        generator = torch.random.get_rng_state()
        torch.manual_seed(7)
        with SharedDraws(low, num, whole_size):
            alone, then = draw(torch.zeros(num, 4)), torch.rand(())
        torch.random.set_rng_state(generator)
        return alone, then

    whole, then = drawn(0, whole_size)
    parts = [drawn(0, first), drawn(first, second)]
    assert torch.equal(torch.cat([part for part, _ in parts]), whole)
    assert all(torch.equal(after, then) for _, after in parts), "later draws are out of step"


def test_whatever_is_asked_for_is_float64_inside():
    weight = torch.randn(3, 4)

    def loss_fn(batch):
        x = batch["x"]
        assert x.dtype == torch.float64
        for cast in (
            x.float(),
            x.half(),
            x.to(torch.float32),
            x.type_as(torch.zeros(1)),
            torch.zeros(2, dtype=torch.half),
        ):
            assert cast.dtype == torch.float64, cast.dtype
        assert batch["ids"].dtype == torch.int64
        assert F.linear(x, weight).dtype == (x @ weight.T).dtype == torch.float64
        return x.to(torch.bfloat16).sum()

    with torch.no_grad():
        in_double(loss_fn)({"x": torch.randn(2, 4), "ids": torch.arange(2)})


def test_in_place_changes_reach_the_tensor_itself():
    narrow = torch.zeros(3)
    with Float64Mode():
        narrow.add_(1.0)
        narrow += torch.ones(3)
        narrow[0] = 5.0
    assert narrow.tolist() == [5.0, 2.0, 2.0] and narrow.dtype == torch.float32


def test_everything_is_put_back_as_the_same_objects():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    model[0].weight.grad = torch.ones(2, 2)
    tracked = tracked_parameters([model])
    before = {name: (p, p.data_ptr(), p.grad, p.detach().clone()) for name, p in model.named_parameters()}
    buffers = {name: (b, b.clone()) for name, b in model.named_buffers()}
    with put_back([model], tracked), float64([model], tracked):
        assert all(p.grad is None and p.dtype == torch.float64 for p in model.parameters())
        model(torch.randn(4, 2)).sum().backward()
        model.eval()
    assert torch.get_default_dtype() == torch.float32
    for name, p in model.named_parameters():
        param, pointer, grad, value = before[name]
        assert p is param and p.data_ptr() == pointer and p.grad is grad and torch.equal(p, value)
    for name, b in model.named_buffers():
        assert b is buffers[name][0] and torch.equal(b, buffers[name][1])
    assert all(module.training for module in model.modules())


def test_the_checksum_sees_values_and_places():
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    key = params_key([model])
    assert key == params_key([model])
    with torch.no_grad():
        model.bias[0] += 1e-3
    assert params_key([model]) != key


def _gradient(values, loss=1.0):
    return Gradient([torch.tensor(values, dtype=torch.float64)], loss)


@given(st.lists(st.floats(0.05, 2.0), min_size=2, max_size=4), st.integers(0, 1000))
def test_the_fit_finds_how_parts_enter_the_whole(alphas, seed):
    generator = torch.Generator().manual_seed(seed)
    parts = [
        Gradient([torch.randn(20, generator=generator, dtype=torch.float64)], float(i + 1)) for i in range(len(alphas))
    ]
    values = sum(part.values[0] * alpha for part, alpha in zip(parts, alphas, strict=True))
    whole = Gradient([values], sum(part.loss * alpha for part, alpha in zip(parts, alphas, strict=True)))
    assert fit(whole, parts) == pytest.approx(alphas, rel=1e-6)


def test_a_comparison_counts_prepared_parameters_and_lists_the_others():
    param = nn.Parameter(torch.zeros(2))
    tracked = [Tracked("ours", param, True), Tracked("theirs", param, False), Tracked("unused", param, True)]
    split = Gradient([torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0]), None], 1.0)
    one = Gradient([torch.tensor([3.0, 0.0]), torch.tensor([2.0, 0.0]), None], 1.0)
    comparison = compare("as it is", tracked, split, one)
    assert comparison.difference == pytest.approx(4 / 3) and comparison.norm == 3.0
    assert [worst.name for worst in comparison.worst] == ["ours"]
    assert [(worst.name, worst.difference) for worst in comparison.unprepared] == [("theirs", 0.5)]


def test_imaginary_parts_of_gradients_count():
    one, other = (Gradient([torch.tensor([value])], 1.0) for value in (3 + 4j, 3 - 4j))
    assert one.norm() == 5.0 and other.distance(one) == distance(other, one) == 1.6


def test_a_gradient_that_one_side_lacks_counts_whole():
    assert distance(Gradient([None], 1.0), _gradient([3.0, 4.0])) == 1.0
    assert distance(Gradient([None], 1.0), Gradient([None], 1.0)) == 0.0


@given(st.integers(0, 15))
def test_a_variant_travels_as_an_integer(code):
    assert Variant.of(code).code() == code


@pytest.mark.parametrize(("first", "second", "whole", "is_named"), [(0.5, -0.83, 0.001, False), (0.2, 0.5, 0.34, True)])
def test_a_metric_that_nearly_cancels_out_is_compared_at_the_size_of_its_parts(first, second, whole, is_named):
    parts = [Gradient([], 1.0, 5.0), Gradient([], 1.0, 3.0)]
    metrics = [{"mean": value} for value in (whole, first, second)]
    assert bool(describe_metrics(Gradient([], 1.0, 8.0), parts, metrics)) == is_named
