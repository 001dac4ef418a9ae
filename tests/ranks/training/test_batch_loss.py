"""`step.backward(encode, batch_loss=fn)` where something goes wrong: errors by name, repeated attempts, skipped steps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.balance.rebalance import Decision
from evenload.errors import PeerLostError, StepError
from evenload.testing import run_ranks
from evenload.training.compute import randomness

BATCH = 12
STEPS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("num_encoded", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_encoded += 1
        out: torch.Tensor = self.body(x)
        return out


def _samples() -> torch.Tensor:
    return torch.randn(BATCH * STEPS, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _loss(model: Net, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model.scale.exp() * a @ b.T, torch.arange(len(a)))


def _drive(name: str, folder: str, **settings: Any) -> tuple[list[str], Any]:
    """All steps with one fault; what the script caught, and its weights and buffers."""
    run = evenload.init(project_dir=folder, seed=0, timeout_s=30, **settings)
    model = Net().double()
    model, loader = run.prepare(model, DataLoader(TensorDataset(_samples()), batch_size=BATCH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    caught = []
    calls = 0
    for step in loader:
        faulty = step.index == 1

        def encode(batch: Any, faulty: bool = faulty) -> Any:
            nonlocal calls
            calls += 1
            (x,) = batch
            a, b = model(x), model(x.flip(1))
            if not faulty:
                return a, b
            match name:
                case "raises" if run.rank == 1:
                    raise ValueError("broken in encode")
                case "out_of_memory" if run.rank == 1 and len(x) > 2:
                    raise MemoryError("not enough")
                case "rows":
                    return torch.cat([a, b])
                case "kind":
                    return {"a": a}
                case "lengths":
                    return a, b, x.new_zeros(len(x), 2 + run.rank)
                case "detached":
                    return a.detach(), b.detach()
                case "nan":
                    return a * (float("nan") if run.rank == 1 else 1.0), b
            return a, b

        def batch_loss(a: torch.Tensor, b: torch.Tensor, *_: Any, faulty: bool = faulty) -> Any:
            if faulty and name == "batch_loss_raises" and run.rank == 1:
                raise ValueError("broken in batch_loss")
            return _loss(model, a, b)

        try:
            step.backward(encode, batch_loss=batch_loss)
        except (StepError, ValueError, PeerLostError) as error:
            caught.append(f"{type(error).__name__}: {error}")
            assert all(p.grad is None for p in model.parameters())
            continue
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return caught, torch.cat([value.detach().double().flatten() for value in (*model.parameters(), model.num_encoded)])


def _drive_all(names: list[str], folder: str) -> list[tuple[list[str], Any]]:
    torch.set_num_threads(1)
    return [_drive(name, f"{folder}/{name}", balance=(8, 4), micro_batch=4) for name in names]


def _plain(skipped: bool) -> torch.Tensor:
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index, x in enumerate(_samples().split(BATCH)):
        if skipped and index == 1:
            continue
        _loss(model, model.body(x), model.body(x.flip(1))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


FAULTS = {
    "raises": "broken in encode",
    "batch_loss_raises": "broken in batch_loss",
    "rows": "it has 2 rows per sample (views?): return them as 2 tensors",
    "kind": "encode returned dict",
    "lengths": "encode returned different tensors on different devices",
    "detached": "no tensor that encode returned depends on a trainable parameter",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[list[str], torch.Tensor]]]:
    names = [*FAULTS, "nan", "out_of_memory"]
    ranks = run_ranks(_drive_all, 2, names, str(tmp_path_factory.mktemp("faults")), timeout_s=100)
    return {name: [results[index] for results in ranks] for index, name in enumerate(names)}


@pytest.mark.parametrize("name", FAULTS)
def test_an_error_is_raised_by_name_and_training_goes_on_exactly(outcomes: Any, name: str) -> None:
    for caught, state in outcomes[name]:
        assert len(caught) == 1
        assert (state[:-1] - _plain(skipped=True)).norm() < 1e-12
    assert any(FAULTS[name] in caught[0] for caught, _ in outcomes[name])


def test_a_loss_that_is_not_finite_skips_the_step_on_all_ranks(outcomes: Any) -> None:
    for caught, state in outcomes["nan"]:
        assert not caught and (state[:-1] - _plain(skipped=True)).norm() < 1e-12


def test_out_of_memory_repeats_the_step_in_smaller_micro_batches(outcomes: Any) -> None:
    for caught, state in outcomes["out_of_memory"]:
        assert not caught and (state[:-1] - _plain(skipped=False)).norm() < 1e-12
        assert state[-1] > 0


@pytest.mark.parametrize("micro_batch", ["auto", 4])
def test_buffers_move_once(tmp_path: Any, micro_batch: Any) -> None:
    _, state = _drive("none", str(tmp_path), micro_batch=micro_batch)
    # Both encoders are called once for each of the micro-batches.
    assert state[-1] == 2 * STEPS * (1 if micro_batch == "auto" else 3)


def test_a_second_pass_that_differs_is_an_error(tmp_path: Any) -> None:
    run = evenload.init(project_dir=str(tmp_path), seed=0, micro_batch=4)
    own = torch.Generator().manual_seed(0)
    model, loader = run.prepare(Net().double(), DataLoader(TensorDataset(_samples()), batch_size=BATCH))

    def encode(batch: Any) -> Any:
        z = model(batch[0])
        return z, z + 0.1 * torch.randn(z.shape, generator=own)

    with pytest.raises(StepError, match="draw from a generator of its own"):
        for step in loader:
            step.backward(encode, batch_loss=lambda a, b: _loss(model, a, b))
    run.close()


def _mixed_precision(folder: str, precision: str) -> list[float]:
    torch.set_num_threads(1)
    run = evenload.init(project_dir=folder, seed=0, precision=precision, micro_batch=6, balance=(9, 3))
    data = TensorDataset(_samples().float())
    model, loader = run.prepare(Net(), DataLoader(data, batch_size=BATCH))
    grads = []
    for step in loader:
        step.backward(
            lambda batch: (model(batch[0]), model(batch[0].flip(1))), batch_loss=lambda a, b: _loss(model, a, b)
        )
        grads.append(float(model.scale.grad))
        model.zero_grad()
    run.close()
    return grads


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(tmp_path: Any, precision: str) -> None:
    split, _ = run_ranks(_mixed_precision, 2, str(tmp_path / "split"), precision)
    exact = []
    model = Net()
    for x in _samples().float().split(BATCH):
        _loss(model, model(x), model(x.flip(1))).backward()
        exact.append(float(model.scale.grad))
        model.zero_grad()
    assert split == pytest.approx(exact, rel=0.1, abs=0.02) and split != exact


def _with_dropout(folder: str) -> tuple[list[str], float]:
    """Steps with dropout, on ranks of which the last leaves; the distance to one process that draws the same numbers."""
    torch.set_num_threads(1)
    run = evenload.init(project_dir=folder, seed=7, micro_batch=4)
    model = Net().double()
    model.body.insert(2, nn.Dropout(0.5))
    model, loader = run.prepare(model, DataLoader(TensorDataset(_samples()), batch_size=BATCH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.resume(model=model, optimizer=optimizer)
    worst = 0.0
    loader.planner._balancer = None
    for step in itertools.chain(loader, loader):
        plan = step.batch.plan
        if step.index == 1 and run.rank == 0:
            loader.planner._pending = Decision((8, 4, 0), 2, "left_out", 1, None, "the test decides", 1.0, 0.5)
        step.backward(
            lambda batch: (model(batch[0]), model(batch[0].flip(1))), batch_loss=lambda a, b: _loss(model, a, b)
        )
        grads = [p.grad for p in model.parameters()]
        if run.rank == 0:
            parts = []
            for m, row in enumerate(plan.micro):
                for rank, share in enumerate(row):
                    if share:
                        randomness.seed_all(run.device, 7, step.index, 0, m, rank)
                        low, high = plan.slice_of(m, rank)
                        x = _samples()[low:high]
                        parts.append((model(x), model(x.flip(1))))
            _, *exact = torch.autograd.grad(
                _loss(model, *map(torch.cat, zip(*parts, strict=True))), [model.scale, *model.body.parameters()]
            )
            gaps = [float((a - b).norm() / b.norm()) for a, b in zip(grads[1:], exact, strict=True)]
            worst = max(worst, *gaps)
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return ["computes" if grads[0] is not None else "left"], worst


def test_dropout_is_the_same_in_both_passes_and_a_rank_without_samples_leaves(tmp_path: Any) -> None:
    ranks = run_ranks(_with_dropout, 3, str(tmp_path))
    assert [who for (who,), _ in ranks] == ["computes", "computes", "left"]
    assert ranks[0][1] < 1e-12
