"""`evenload.data_parallel`: the result and the gradients of one forward, whatever is cut, nested or uneven."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import evenload
from evenload import data_parallel
from evenload.errors import ConfigError
from evenload.training.parallel.threaded import data_parallel as room
from evenload.training.parallel.threaded.replica_threads import current_replica

TWO = ["cpu", "cpu"]
THREE = ["cpu"] * 3


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    before, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)
    torch.set_num_threads(threads)


def _norm_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 6, bias=False),
        nn.BatchNorm1d(6, track_running_stats=False),
        nn.Linear(6, 5),
    )


def _far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach() - b.detach()).norm() / b.detach().norm())


def _compare(module: nn.Module, x: torch.Tensor, **options: Any) -> None:
    """Output, gradients of parameters and input, and buffers, against one forward."""
    reference = copy.deepcopy(module)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    output, expected = data_parallel(module, ours, **options), reference(theirs)
    weights = torch.randn_like(expected)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    assert output.shape == expected.shape and _far(output, expected) <= 1e-12
    assert _far(ours.grad, theirs.grad) <= 1e-12
    for (name, own), other in zip(module.named_parameters(), reference.parameters(), strict=True):
        assert type(own) is nn.Parameter and _far(own.grad, other.grad) <= 1e-12, name
    for own, other in zip(module.buffers(), reference.buffers(), strict=True):
        assert _far(own.double(), other.double()) <= 1e-12 or torch.equal(own, other)
    assert [type(m) for m in module.modules()] == [type(m) for m in reference.modules()]


@pytest.mark.parametrize("num", [1, 2, 3, 7, 32])
def test_one_forward_with_batch_norm_on_three_replicas(num: int) -> None:
    if num == 1:
        module: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        _compare(module, torch.randn(1, 4), devices=THREE)
    else:
        _compare(_norm_net(), torch.randn(num, 3, 6, 6), devices=THREE)


@pytest.mark.parametrize("shares", [(3, 1), (5, 0), (0, 9), (31, 1)])
def test_shares_are_samples_or_proportions(shares: tuple[int, int]) -> None:
    seen: list[tuple[int, int]] = []

    class Seeing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = current_replica()
            seen.append((thread.index if thread is not None else 0, len(x)))
            return super().forward(x)

    module = Seeing(4, 3)
    _compare(module, torch.randn(32, 4), devices=TWO, shares=shares)
    seen.pop()  # the reference's
    total = sum(shares)
    expected = [(rank, 32 * share // total) for rank, share in enumerate(shares) if share]
    assert sorted(seen) == expected


class Nested(nn.Module):
    """Takes and gives everything: lists, dicts, named tuples, flags, a mask that is no batch, several rows a sample."""

    Out = collections.namedtuple("Out", ["rows", "names"])

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, pair: Any, *rest: Any, table: Any = None, scale: float = 1.0, flag: str = "no") -> Any:
        x, (y, label) = pair
        mask = table["mask"]
        assert mask.shape == (4,) and label == "same for all" and rest == (None, 7)
        out = self.first(x * mask) * scale + self.second(y)
        rows = torch.stack([out, -out], dim=1).flatten(0, 1)  # two rows a sample
        return {"out": out, "more": [self.Out(rows, (flag, 3)), None], "table": {"ids": table["ids"] * 2}}


def test_any_nesting_in_and_out() -> None:
    module = Nested()
    reference = copy.deepcopy(module)
    x, y, mask, ids = torch.randn(7, 4), torch.randn(7, 4), torch.rand(4), torch.arange(7)
    arguments = ((x, (y, "same for all")), None, 7)
    table = {"mask": mask, "ids": ids}
    ours = data_parallel(module, arguments, THREE, module_kwargs={"table": table, "scale": 0.5, "flag": "yes"})
    theirs = reference(*arguments, table=table, scale=0.5, flag="yes")
    assert _far(ours["out"], theirs["out"]) <= 1e-12
    assert _far(ours["more"][0].rows, theirs["more"][0].rows) <= 1e-12
    assert ours["more"][0].names == ("yes", 3) and ours["more"][1] is None and type(ours["more"][0]) is Nested.Out
    assert torch.equal(ours["table"]["ids"], ids * 2)
    by_name = data_parallel(nn.Bilinear(4, 4, 2), {"input1": x, "input2": y}, TWO)
    assert by_name.shape == (7, 2)


@dataclasses.dataclass
class ModelOutput(collections.OrderedDict):  # type: ignore[type-arg]
    """As Hugging Face's: a dict and a dataclass, that can't be updated."""

    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            super().__setitem__(field.name, getattr(self, field.name))

    def update(self, *_: Any, **__: Any) -> None:
        raise Exception("no")


def test_outputs_of_classes() -> None:
    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return ModelOutput(super().forward(x), (x, x + 1))

    x = torch.randn(5, 4)
    out = data_parallel(Net(4, 2), x, TWO)
    assert isinstance(out, ModelOutput) and out.logits.shape == (5, 2) and torch.equal(out.hidden[1], x + 1)


def test_nothing_to_cut() -> None:
    module = nn.Linear(4, 2)
    assert data_parallel(module, torch.randn(0, 4), TWO).shape == (0, 2)

    class Constant(nn.Module):
        def forward(self, n: int) -> int:
            return n + 1

    assert data_parallel(Constant(), (4,), TWO) == 5


def test_second_derivatives_no_grad_autocast_and_inference() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    reference = copy.deepcopy(module)

    def penalty(net: Any, params: Any) -> torch.Tensor:
        x = torch.linspace(-1, 1, 20).view(5, 4).requires_grad_()
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        (slope**2).sum().backward()
        return torch.cat([p.grad.flatten() for p in params if p.grad is not None])

    ours = penalty(lambda x: data_parallel(module, x, TWO), module.parameters())
    assert _far(ours, penalty(reference, reference.parameters())) <= 1e-12
    x = torch.randn(6, 4)
    with torch.no_grad():
        assert not data_parallel(module, x, TWO).requires_grad
    net, images = _norm_net().eval(), torch.randn(6, 3, 6, 6)
    with torch.inference_mode():
        assert data_parallel(module, x, TWO).is_inference()
        net[5].train()  # it has no running statistics, and takes those of all parts in any mode
        assert _far(data_parallel(net, images, TWO), net(images)) <= 1e-12
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert data_parallel(module.float(), x.float(), TWO).dtype == torch.bfloat16


def test_a_recomputed_forward_drops_the_same_and_the_seed_decides() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.first(x))
            x = checkpoint(lambda h: F.dropout(self.block(h), 0.5, self.training), x, use_reentrant=False)
            return self.last(x)

    module, x = Net(), torch.randn(64, 6)

    def run(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(seed)
        module.zero_grad()
        output = data_parallel(module, x, THREE)
        (output**2).sum().backward()
        assert module.block.weight.grad is not None
        return output.detach(), module.block.weight.grad.clone()

    first, gradient = run(1)
    again, gradient_again = run(1)
    other, _ = run(2)
    assert torch.equal(first, again) and _far(gradient, gradient_again) <= 1e-12
    assert not torch.equal(first, other)
    # d/dW of the very outputs: a step along the gradient changes the same (dropped) loss as it says.
    with torch.no_grad():
        module.block.weight.add_(gradient, alpha=1e-7)
    torch.manual_seed(1)
    moved = data_parallel(module, x, THREE).detach()
    rise = float((moved**2).sum() - (first**2).sum()) / 1e-7
    assert rise == pytest.approx(float((gradient**2).sum()), rel=1e-4)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    data_parallel(module.eval(), x, THREE)
    assert torch.equal(torch.get_rng_state(), state), "what draws nothing leaves the generator alone"


def test_side_by_side_in_threads_of_their_own() -> None:
    both = threading.Barrier(2)

    class WaitingLinear(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            both.wait(20)  # deadlocks if one came after the other
            return super().forward(x)

    module = WaitingLinear(4, 4)
    for _ in range(3):
        assert data_parallel(module, torch.randn(4, 4), TWO).shape == (4, 4)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("evenload-replica"))


class Sizes(nn.Linear):
    """Notes how many samples each replica got."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls: list[dict[int, int]] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        thread = current_replica()
        self.calls[-1][thread.index if thread is not None else 0] = len(x)
        return super().__call__(x)


def test_measured_speeds_decide_and_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {0: 1.0, 1: 5.0}

    @contextlib.contextmanager
    def timed(_: torch.device) -> Iterator[Any]:
        # Told times, not taken ones: a test is no place to measure.
        thread = current_replica()
        assert thread is not None
        sizes = module.calls[-1]
        yield lambda: costs[thread.index] * sizes[thread.index]

    monkeypatch.setattr(room, "timed", timed)
    module = Sizes()

    def call(num: int = 48) -> dict[int, int]:
        module.calls.append({})
        with torch.no_grad():
            assert data_parallel(module, torch.randn(num, 4), TWO).shape == (num, 4)
        return module.calls[-1]

    shares = [call() for _ in range(8)]
    assert shares[:5] == [{0: 24, 1: 24}] * 5, "even until both are known"
    assert shares[-1] == {0: 40, 1: 8}
    assert call(12) == {0: 10, 1: 2}, "for any number of samples"
    costs[1] = 500.0
    for _ in range(20):
        call()
    assert call() == {0: 48}
    costs[1] = 1.0  # it is tried again by and by
    late = [call() for _ in range(120)]
    assert late[-1] == {0: 24, 1: 24}
    first, module = module, Sizes()
    assert call() == {0: 24, 1: 24} and set(room._records[first]) == {("cpu", "cpu")}, "another module is measured anew"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"devices": []}, "expected at least one device"),
        ({"devices": ["tpu"]}, "'tpu' is not a device; expected a list of devices, such as"),
        ({"devices": ["meta"]}, r"meta is neither a GPU \(cuda:0\) nor the CPU"),
        ({"devices": ["cpu", 3.5]}, "3.5 is not a device"),
        ({"devices": 7}, r"devices=7\): expected a list of devices"),
        ({"devices": ["cuda:99"]}, "there is no cuda:99; torch sees"),
        ({"devices": "cpu:0"}, "-d cpu:0"),
        ({"devices": TWO, "shares": (1,)}, "1 shares for 2 devices"),
        ({"devices": TWO, "shares": (0, 0)}, "not all of them 0"),
        ({"devices": TWO, "shares": (-1, 2)}, "integers of at least 0"),
        ({"devices": TWO, "shares": (0.5, 0.5)}, "integers of at least 0"),
        ({"devices": TWO, "shares": "even"}, "expected one integer for each device"),
        ({"devices": TWO, "module_kwargs": {3: 1}}, "names of keyword arguments are strings"),
    ],
)
def test_what_makes_no_sense_is_told(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        data_parallel(nn.Linear(4, 2), torch.randn(8, 4), **options)


def test_modules_and_results_that_cannot_be() -> None:
    class Returning(nn.Module):
        def __init__(self, make: Any) -> None:
            super().__init__()
            self.make = make

        def forward(self, x: Any) -> Any:
            return self.make(x)

    def told(make: Any, match: str, inputs: Any = None) -> None:
        with pytest.raises(ConfigError, match=match):
            data_parallel(Returning(make), torch.randn(8, 4) if inputs is None else inputs, TWO, (5, 3))

    told(lambda x: x.mean(), "the output is a scalar for each part")
    told(lambda x: {"loss": x.sum()}, r"the output\['loss'\] is a scalar")
    told(lambda x: x.t(), r"can't be joined along its first dimension: \(4, 5\) for 5 samples, \(4, 3\) for 3")
    told(lambda x: x[:, : len(x)], "can't be joined along its first dimension")
    told(lambda x: [x] * len(x), "has different keys or lengths on each replica")
    told(lambda x: {len(x): x}, "has different keys or lengths on each replica")
    told(lambda x: len(x), "is a int that differs between replicas")
    told(lambda x: x.numpy(), "is a ndarray that differs between replicas")
    told(lambda x: x if len(x) > 3 else None, "is a tensor on some replicas only")
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 2), torch.randn(2, 2)])
    told(lambda pair: pair[0], "can't split a PackedSequence", ((torch.randn(8, 4), packed),))
    with pytest.raises(ConfigError, match=r"expected an nn\.Module, got a function"):
        data_parallel(lambda x: x, torch.randn(4), TWO)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="uninitialised lazy parameters"):
        data_parallel(nn.LazyLinear(3), torch.randn(8, 4), TWO)
    with pytest.raises(ConfigError, match="on the meta device"):
        data_parallel(nn.Linear(4, 3, device="meta"), torch.randn(8, 4), TWO)
    with pytest.raises(ConfigError, match="compiled"):
        data_parallel(torch.compile(nn.Linear(4, 3), backend="eager"), torch.randn(8, 4), TWO)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="input is in inputs and in module_kwargs"):
        data_parallel(nn.Linear(4, 3), {"input": torch.randn(8, 4)}, TWO, module_kwargs={"input": 1})


def test_an_error_of_the_module_comes_out_and_the_next_call_works() -> None:
    class Breaking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.broken = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = current_replica()
            if self.broken and thread is not None and thread.index == 1:
                raise KeyError("mine")
            return self.norm(x)  # the other replicas wait here for replica 1

    module = Breaking()
    with pytest.raises(KeyError, match="mine") as caught:
        data_parallel(module, torch.randn(9, 4), THREE)
    assert "(in replica 1, on cpu)" in caught.value.__notes__
    module.broken = False
    _compare(module, torch.randn(9, 4), devices=THREE)


def test_the_default_is_every_gpu_or_the_cpu() -> None:
    module = nn.Linear(4, 2)
    if torch.cuda.is_available():
        pytest.skip("a machine without GPUs has the CPU alone")
    _compare(module, torch.randn(5, 4))
    assert evenload.data_parallel is data_parallel
