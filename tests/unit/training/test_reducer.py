"""Reducers in one process: gradients that are kept, present, hooked, complex or late."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from evenload.errors import ConfigError, StepError
from evenload.training.parallel import buckets
from evenload.training.parallel.call_gradients import Expectation
from evenload.training.parallel.local_reducer import LocalReducer
from evenload.training.parallel.reducer import BucketReducer
from evenload.training.parallel.threaded.bucket_sums import BucketSums, ReplicaBuckets

Reducer = BucketReducer | LocalReducer
KINDS = ("buckets", "local")


def reducer_of(kind: str, *models: nn.Module) -> Reducer:
    if kind == "local":
        return LocalReducer(models)
    sums = BucketSums(torch.device("cpu"))
    sums.begin((0,))
    return BucketReducer(models, ReplicaBuckets(sums, 0))


def network() -> nn.Sequential:
    """Has small gradients and a large one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 80), nn.Tanh(), nn.Linear(80, 80), nn.Tanh(), nn.Linear(80, 1))


def call(
    reducer: Reducer,
    *losses: Callable[[], torch.Tensor],
    expected: Expectation | None = None,
    correction: float = 1.0,
) -> bool:
    """One call of step.backward, a micro-batch for each loss."""
    reducer.begin(expected)
    for number, loss in enumerate(losses):
        reducer.micro(last=number == len(losses) - 1, idle=False)
        loss().backward()
        reducer.end_micro()
    assert not reducer.late
    return reducer.finish(reducer.touched(), correction)


def loss_of(model: nn.Module, seed: int) -> Callable[[], torch.Tensor]:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    return lambda: (model(x) ** 2).mean()


def gradients(model: nn.Module, seed: int) -> list[torch.Tensor]:
    """What autograd computes by itself."""
    return list(torch.autograd.grad(loss_of(model, seed)(), list(model.parameters())))


def same(found: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor]) -> bool:
    return all(a is not None and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [lambda g: g, lambda g: g.view(-1), lambda g: g.detach(), lambda g: g.numpy()])
def test_a_kept_gradient_is_not_overwritten(kind: str, keep: Callable[[torch.Tensor], Any]) -> None:
    model = network()
    reducer = reducer_of(kind, model)
    kept: list[tuple[list[Any], list[torch.Tensor]]] = []
    for seed in range(4):
        right = gradients(model, seed)
        call(reducer, loss_of(model, seed), expected=reducer.observed() if seed else None)
        kept.append(([keep(p.grad) for p in model.parameters() if p.grad is not None], right))
        assert same([p.grad for p in model.parameters()], right)
        model.zero_grad()
    for found, right in kept:
        assert same([torch.as_tensor(g).view(r.shape) for g, r in zip(found, right, strict=True)], right)


def test_memory_stays_where_nothing_is_kept_and_alternates_between_two_where_something_is() -> None:
    model = network()
    reducer = reducer_of("buckets", model)
    for keeps, most in ((False, 1), (True, 2)):
        places, kept = set(), None
        for seed in range(6):
            call(reducer, loss_of(model, seed), expected=reducer.observed() if seed else None)
            kept = next(model.parameters()).grad  # as a variable of a loop still holds it in the next step
            assert kept is not None
            places.add(kept.data_ptr())
            if not keeps:
                kept = None
            model.zero_grad()
        kept = None
        assert len(places) == most


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_two_calls_add_up(kind: str) -> None:
    model = network()
    reducer = reducer_of(kind, model)
    first, second = gradients(model, 1), gradients(model, 2)
    for seed, correction in ((1, 1.0), (2, 0.5)):
        call(reducer, loss_of(model, seed), correction=correction)
    torch.testing.assert_close(
        [p.grad for p in model.parameters()], [a + b / 2 for a, b in zip(first, second, strict=True)]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_zeroed_gradients_stay_in_place(kind: str) -> None:
    """zero_grad(set_to_none=False) needs no second copy of the gradients; an unused parameter keeps its zeros."""
    model = network()
    unused = nn.Linear(3, 3)
    reducer = reducer_of(kind, model, unused)
    call(reducer, loss_of(model, 0))
    own = [p.grad for p in model.parameters()]
    unused.weight.grad = torch.zeros(3, 3)
    for seed in (1, 2):
        model.zero_grad(set_to_none=False)
        call(reducer, loss_of(model, seed), expected=reducer.observed() if seed > 1 else None)
        assert all(p.grad is g for p, g in zip(model.parameters(), own, strict=True))
        assert same([p.grad for p in model.parameters()], gradients(model, seed))
        assert unused.weight.grad is not None and not unused.weight.grad.any()
    model.zero_grad(set_to_none=False)
    reducer.begin(None)
    reducer.micro(last=True, idle=False)
    loss_of(model, 3)().backward()
    reducer.end_micro()
    reducer.rollback()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ["rollback", "abort"])
def test_earlier_gradients_come_back(kind: str, end: str) -> None:
    model = network()
    reducer = reducer_of(kind, model)
    call(reducer, loss_of(model, 1))
    expected = reducer.observed()
    own, right = [p.grad for p in model.parameters()], gradients(model, 1)
    reducer.begin(expected)
    reducer.micro(last=True, idle=False)
    loss_of(model, 2)().backward()
    getattr(reducer, end)()
    assert all(p.grad is g for p, g in zip(model.parameters(), own, strict=True))
    assert same(own, right)  # type: ignore[arg-type]
    with pytest.raises(StepError, match="Write instead"):
        loss_of(model, 2)().backward()
    model.zero_grad()
    call(reducer, loss_of(model, 3), expected=expected)
    assert same([p.grad for p in model.parameters()], gradients(model, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_post_accumulate_hook_is_refused(kind: str) -> None:
    def step_in_backward(param: torch.Tensor) -> None:
        param.grad = None

    model = network()
    handle = model[2].weight.register_post_accumulate_grad_hook(step_in_backward)
    with pytest.raises(ConfigError, match=r"2.weight has a post-accumulate hook, .*step_in_backward: it would see"):
        reducer_of(kind, model)
    handle.remove()
    reducer = reducer_of(kind, model)
    call(reducer, loss_of(model, 0))
    handle = model[2].weight.register_post_accumulate_grad_hook(step_in_backward)
    with pytest.raises(StepError, match=r"a post-accumulate hook, .*step_in_backward: it would see"):
        call(reducer, loss_of(model, 0))
    reducer.abort()
    handle.remove()
    model.zero_grad()
    call(reducer, loss_of(model, 0))
    reducer.remove()
    model.zero_grad()
    loss_of(model, 0)().backward()  # the module is the user's own again


@pytest.mark.parametrize("is_expected", [False, True])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", ["0.bias", "2.weight"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_loss_fn_sets_is_refused(kind: str, name: str, number: int, is_expected: bool) -> None:
    model = network()
    param = model.get_parameter(name)
    reducer = reducer_of(kind, model)
    reducer.begin((1,) * 6 if is_expected else None)
    for _ in range(number):  # micro-batches before, in which this parameter is not used
        loss = model[2:](torch.ones(3, 80)).square().mean() if name == "0.bias" else model[0](torch.ones(3, 4)).mean()
        reducer.micro(last=False, idle=False)
        loss.backward()
        reducer.end_micro()
    param.grad = torch.ones_like(param)
    with pytest.raises(StepError, match=f"loss_fn (set or changed .grad of {re.escape(name)}|changed the gradients)"):
        reducer.micro(last=True, idle=False)
    reducer.abort()
    assert param.grad is None


@pytest.mark.parametrize("is_expected", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_zeros_that_loss_fn_changes_are_refused_and_those_it_removes_are_fine(kind: str, is_expected: bool) -> None:
    model = network()
    reducer = reducer_of(kind, model)
    call(reducer, loss_of(model, 0))
    model.zero_grad(set_to_none=False)
    reducer.begin((1,) * 6 if is_expected else None)
    model.zero_grad(set_to_none=False)
    model[0].zero_grad()
    reducer.micro(last=True, idle=False)
    loss_of(model, 0)().backward()
    reducer.end_micro()
    assert reducer.finish(reducer.touched(), 1.0)
    assert same([p.grad for p in model.parameters()], gradients(model, 0))
    model.zero_grad(set_to_none=False)
    reducer.begin((1,) * 6 if is_expected else None)
    if model[2].weight.grad is None:
        model[2].weight.grad = torch.zeros_like(model[2].weight)
    model[2].weight.grad.add_(1.0)
    with pytest.raises(StepError, match=r"loss_fn (set or )?changed"):
        reducer.micro(last=True, idle=False)


class _WithoutGradient(torch.autograd.Function):
    """Torch calls the hook of a weight to which it gives None, too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.zeros(len(slope), 4), None


def _without_gradient(weight: torch.Tensor) -> torch.Tensor:
    return _WithoutGradient.apply(torch.ones(2, 4, requires_grad=True), weight).sum()  # type: ignore[no-untyped-call]


def test_a_late_gradient_shows_beside_a_function_that_gives_none() -> None:
    model, other = network(), nn.Linear(4, 4, bias=False)
    reducer = reducer_of("buckets", model, other)
    reducer.begin((1,) * 6 + (0,))
    reducer.micro(last=True, idle=False)
    _without_gradient(other.weight).backward()
    loss_of(model, 0)().backward()
    model[4].bias.sum().backward()
    reducer.end_micro()
    assert reducer.late
    reducer.rollback()


def test_other_memory_of_a_bucket_is_not_taken_for_zeros() -> None:
    bucket = buckets.Bucket([buckets.Slot(0, 0, "weight", nn.Parameter(torch.ones(4)))])
    bucket.flat.zero_()
    assert bucket.is_zero()
    bucket.renew()
    bucket.flat.fill_(1.0)  # as often written as the memory before
    assert not bucket.is_zero()


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_of_a_gradient_that_does_not_come(kind: str) -> None:
    model, other = network(), nn.Linear(4, 4, bias=False)
    other.weight.register_hook(lambda slope: slope * 2)
    reducer = reducer_of(kind, model, other)
    call(reducer, lambda: _without_gradient(other.weight) + loss_of(model, 0)())
    assert other.weight.grad is None
    assert same([p.grad for p in model.parameters()], gradients(model, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_hook_runs_once_on_the_sum(kind: str) -> None:
    model = network()
    reducer = reducer_of(kind, model)
    seen: list[torch.Tensor] = []

    def clamp(grad: torch.Tensor) -> torch.Tensor:
        seen.append(grad.clone())
        return grad.clamp(-1e-3, 1e-3)

    model[2].weight.register_hook(clamp)
    removed = model[0].bias.register_hook(lambda grad: grad * math.nan)
    removed.remove()
    assert call(reducer, loss_of(model, 1), loss_of(model, 2), correction=0.5)
    (total,) = seen
    right = (gradients(model, 1)[2], gradients(model, 2)[2])  # runs the hook twice more, by itself
    torch.testing.assert_close(total, (seen[1] + seen[2]) / 2)
    assert right[0].abs().max() <= 1e-3
    torch.testing.assert_close(model[2].weight.grad, total.clamp(-1e-3, 1e-3))
    model[4].bias.register_hook(lambda grad: grad * math.inf)
    model.zero_grad()
    assert not call(reducer, loss_of(model, 1), expected=reducer.observed())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [complex(1, math.nan), complex(math.inf, 0), complex(0, -math.inf)])
def test_a_complex_gradient_that_is_not_finite(kind: str, bad: complex) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.complex64))])
    reducer = reducer_of(kind, model)
    for factor, finite in ((1 + 1j, True), (bad, False)):
        weights = torch.tensor([1, 1, factor], dtype=torch.complex64)
        assert call(reducer, lambda weights=weights: (model[0] * weights).sum().abs()) is finite
        model.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_gradient_is_finite(kind: str) -> None:
    model = network()
    reducer = reducer_of(kind, model)
    for factor, finite in ((1e30, True), (math.nan, False), (1e39, False)):
        assert call(reducer, lambda factor=factor: model[4].weight.sum() * factor + loss_of(model, 0)()) is finite
        model.zero_grad()


def test_slots_are_aligned() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7).to(torch.float64), nn.Linear(100, 100))
    reducer = reducer_of("buckets", model)
    for bucket in reducer.buckets:
        base = bucket.flat.data_ptr()
        assert all((view.data_ptr() - base) % buckets.ALIGNMENT_BYTES == 0 for view in bucket.memory.views)


class Recursive(nn.Module):
    """Runs its layer `depth` times, each in a re-entrant checkpoint: its gradients come as often."""

    depth = 1

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        for _ in range(self.depth):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return self.head(x)  # type: ignore[no-any-return]


def test_more_arrivals_than_expected_are_late_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "FIRST_BUCKET_BYTES", 1)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    model = Recursive()
    reducer = reducer_of("buckets", model)
    call(reducer, loss_of(model, 0))
    for depth, late in ((1, False), (2, True), (3, False), (4, False)):
        model.depth = depth
        model.zero_grad()
        reducer.begin(reducer.observed())
        reducer.micro(last=True, idle=False)
        loss_of(model, 0)().backward()
        reducer.end_micro()
        assert reducer.late is late
        if late:
            reducer.rollback()
            call(reducer, loss_of(model, 0))
        else:
            reducer.finish(reducer.touched(), 1.0)
        model.head.weight.grad, found = None, model.head.weight.grad
        assert found is not None


class _SlowSums:
    """Counts what is sent, and lets other threads run meanwhile."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.values: dict[int, torch.Tensor] = {}
        """Copies of the buckets as they were last sent."""

    def sum_async(self, tensor: torch.Tensor) -> _SlowSums:
        self.sent.append(tensor.data_ptr())
        self.values[tensor.data_ptr()] = tensor.clone()
        time.sleep(0.01)
        return self

    def wait(self) -> None:
        """Return: there is nothing to add."""


def test_two_backward_threads_send_each_bucket_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "FIRST_BUCKET_BYTES", 1)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    monkeypatch.setattr(buckets, "SMALL_BYTES", 0)
    halves = [nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)]) for _ in range(2)]
    sums = _SlowSums()
    reducer = BucketReducer(halves, sums)
    call(reducer, lambda: loss_of(halves[0], 0)() + loss_of(halves[1], 1)())
    expected = reducer.observed()
    for _ in range(3):
        sums.sent.clear()
        for half in halves:
            half.zero_grad()
        reducer.begin(expected)
        reducer.micro(last=True, idle=False)
        threads = [threading.Thread(target=loss_of(half, 0)().backward) for half in halves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        reducer.end_micro()
        assert sums.sent == [bucket.flat.data_ptr() for bucket in reducer.buckets]
        reducer.finish(reducer.touched(), 1.0)


def test_a_bucket_is_not_sent_by_another_thread_before_its_last_gradient_is_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buckets, "FIRST_BUCKET_BYTES", 1)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    monkeypatch.setattr(buckets, "SMALL_BYTES", 0)
    one, other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    sums = _SlowSums()
    reducer = BucketReducer([one, other], sums)
    call(reducer, lambda: loss_of(one, 0)() + loss_of(other, 1)())
    expected, right = reducer.observed(), gradients(one, 0)
    for module in (one, other):
        module.zero_grad()
    fill, loss = reducer._fill, loss_of(other, 1)()

    def interrupted(slot: Any) -> None:
        if slot.param is one.weight:
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        fill(slot)

    monkeypatch.setattr(reducer, "_fill", interrupted)
    reducer.begin(expected)
    reducer.micro(last=True, idle=False)
    loss_of(one, 0)().backward()
    reducer.end_micro()
    reducer.finish(reducer.touched(), 1.0)
    assert len(sums.values) == 2
    assert one.weight.grad is not None
    assert same([sums.values[one.weight.grad.data_ptr()][: right[0].numel()].view_as(right[0])], right)


def _gradient_bytes(reducer: Reducer) -> int:
    """Memory of gradients, of those that are set aside, and of buckets; what two of them share counts once."""
    tensors = [g for g in (*(slot.param.grad for slot in reducer.slots), *reducer._stash) if g is not None]
    if isinstance(reducer, BucketReducer):
        memories = [memory for bucket in reducer.buckets for memory in (bucket.memory, bucket._spare)]
        tensors += [memory.flat for memory in memories if memory is not None]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_device", [False, True])
def test_zeroed_gradients_of_one_of_two_models_need_no_second_memory(kind: str, on_device: bool) -> None:
    """Each model keeps its gradients while the other trains, and a layer of both never has one."""
    models = [network().append(nn.Linear(1, 80)) for _ in range(2)]
    used = [model[:-1] for model in models]
    reducer = reducer_of(kind, *models)
    reducer.on_device = on_device
    peaks, expected = [], dict[int, Expectation]()
    for number in range(8):
        turn = number % 2
        other = [None if p.grad is None else p.grad.clone() for p in models[1 - turn].parameters()]
        models[turn].zero_grad(set_to_none=number < 4)
        reducer.begin(expected.get(turn))
        reducer.micro(last=True, idle=False)
        loss_of(used[turn], number)().backward()
        reducer.end_micro()
        peaks.append(_gradient_bytes(reducer))
        expected[turn] = reducer.observed()
        if number == 6:
            reducer.rollback()
            assert all(p.grad is not None and not p.grad.any() for p in used[turn].parameters())
            call(reducer, loss_of(used[turn], number), expected=expected[turn])
        else:
            reducer.finish(reducer.touched(), 1.0)
        assert same([p.grad for p in used[turn].parameters()], gradients(used[turn], number))
        found = [p.grad for p in models[1 - turn].parameters()]
        assert all(g is o is None or (g is not None and torch.equal(g, o)) for g, o in zip(found, other, strict=True))
        assert all(p.grad is None for model in models for p in model[-1].parameters())
    assert max(peaks[4:]) <= peaks[3]


def _on_device(reducer: Reducer, *, refuses: bool) -> None:
    reducer.on_device, reducer.refuses_leftovers = True, refuses


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_gradients_that_may_be_left_over_are_not_looked_at(kind: str) -> None:
    """Zeros stay in place where others are an error, which a flag on the device reports; elsewhere all are added."""
    model = network()
    reducer = reducer_of(kind, model)
    call(reducer, loss_of(model, 0))
    own = [p.grad for p in model.parameters()]
    _on_device(reducer, refuses=True)
    model.zero_grad(set_to_none=False)
    call(reducer, loss_of(model, 1))
    assert all(p.grad is g for p, g in zip(model.parameters(), own, strict=True))
    assert same([p.grad for p in model.parameters()], gradients(model, 1))
    assert reducer.leftovers is not None and not reducer.leftovers
    reducer.begin(None)  # the gradients are those of the call before
    reducer.abort()
    assert bool(reducer.leftovers), "an attempt that is repeated does not forget it"
    model.zero_grad()
    call(reducer, loss_of(model, 1))
    reducer.leftovers = None
    _on_device(reducer, refuses=False)
    call(reducer, loss_of(model, 2))
    found = [a + b for a, b in zip(gradients(model, 1), gradients(model, 2), strict=True)]
    torch.testing.assert_close([p.grad for p in model.parameters()], found)
    assert reducer.leftovers is None


def test_buckets_follow_the_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "FIRST_BUCKET_BYTES", 1)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    model = nn.Module()
    model.last, model.first = nn.Linear(4, 4), nn.Linear(4, 4)  # registered in the reverse order of their use
    sums = _SlowSums()
    reducer = BucketReducer([model], sums)
    left: list[int] = []
    for number in range(3):
        x = torch.ones(2, 4, requires_grad=True)
        hidden = model.first(x)
        hidden.register_hook(lambda grad: left.append(len(sums.sent)))
        loss = model.last(hidden).sum()
        sums.sent.clear()
        call(reducer, lambda loss=loss: loss, expected=reducer.observed() if number else None)
        if number == 1:
            reducer.reorder(reducer.order())
        for p in model.parameters():
            p.grad = None
    assert left == [0, 0, 2]
