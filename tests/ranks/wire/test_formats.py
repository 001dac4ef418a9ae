"""Each format against its formula in one process, and what training with it keeps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.testing import run_ranks
from evenload.training.comm import host_exchange, link
from evenload.training.comm.generation import Membership
from evenload.training.comm.groups import Groups
from evenload.training.launch.environment import detect
from evenload.training.parallel.buckets import Slot, build_buckets
from evenload.training.parallel.model_split.buckets import BucketSegments
from evenload.training.parallel.wire.gradient_wire import GradientWire, spans
from tests.ranks.wire.simulation import CODECS, Values, powersgd_sum, quantised_sum

pytestmark = pytest.mark.slow

FORMATS = ("bf16", "fp16", "int8", "powersgd")
HOSTS = ("a", "a", "b", "c")
COMPUTING = {"two machines": (0, 1, 2), "three machines": (0, 1, 2, 3)}
LEADERS = {"two machines": ((0, 1), (2,)), "three machines": ((0, 1), (2,), (3,))}
SHAPES = ((64, 40), (40,), (96, 48), (3, 5))
STEPS = 4


def _gradient(rank: int, step: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + index)
    return torch.randn(SHAPES[index], generator=generator, dtype=torch.float64) * 3.0 ** (index - rank)


def _scale(step: int) -> tuple[float, float]:
    """The loss scale of a step, and the factor from its buckets to the gradient: N / nominal is 1.25."""
    scale = 4.0 if step < 2 else 2.0
    return scale, 0.8 / scale


def _all_on_ranks(folder: str) -> dict[str, Any]:
    spec = detect()
    host_exchange._host_name = lambda: HOSTS[spec.rank]  # type: ignore[assignment]
    groups = Groups(Membership(0, spec.workers, spec.store), spec.rank, backend="gloo", timeout_s=20.0, has_wire=True)
    results: dict[str, Any] = {}
    for layout, computing in COMPUTING.items():
        groups.set_computing(computing)
        for name in FORMATS:
            if spec.rank in computing:
                results[layout, name] = _sums(groups, name)
    groups.close()
    link.LinkMeter._measure = lambda *_, **__: torch.tensor([0.02, 1e5, 1e5, 1e5, 0.0], dtype=torch.float64)
    results["trained"] = {name: _train(name, Path(folder, name)) for name in ("fp32", *FORMATS, "auto")}
    results["resumed"] = {
        name: [_train_in_parts(name, Path(folder, f"{name}-{parts}"), parts) for parts in (1, 2)]
        for name in ("int8", "powersgd")
    }
    return results


def _sums(groups: Groups, name: str) -> dict[str, Any]:
    params = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]
    slots = [Slot(index, 0, f"p{index}", param) for index, param in enumerate(params)]
    buckets = build_buckets(slots, BucketSegments(), pins=False)
    wire = GradientWire(name, groups, seed=3)
    wire.attach(buckets)
    outputs, norms, starts = [], [], {}
    for step in range(STEPS):
        attempts = 2 if step == 1 else 1  # the first attempt is repeated
        for _ in range(attempts):
            scale, correction = _scale(step)
            wire.begin(scale)
            if step == 0 and name == "powersgd":
                starts = {one: start.clone() for one, start in wire.format.starts.items()}  # type: ignore[union-attr]
            for bucket in buckets:
                for slot, view in zip(bucket.laid_out, bucket.memory.views, strict=True):
                    view.copy_(_gradient(groups.rank, step, slot.index))
                bucket.write_norm()
                bucket.pending = wire.sum_async(bucket)
            for bucket in buckets:
                bucket.pending.wait()  # type: ignore[union-attr]
        touched = [1] * len(slots) if step != 2 else [1, 1, 0, 1]
        wire.commit(touched, correction)
        outputs.append([bucket.memory.gradients.mul(correction).numpy().copy() for bucket in buckets])
        norms.append([float(bucket.memory.norm) for bucket in buckets])
    layout = [[(slot.index, *span) for slot, span in zip(b.laid_out, spans(b), strict=True)] for b in buckets]
    errors = wire.state_dict()["errors"]
    wire.keep(wire.gather())
    gathered = wire.state_dict()["errors"]
    wire.close()
    return {
        "outputs": outputs,
        "layout": layout,
        "errors": errors,
        "gathered": gathered,
        "norms": norms,
        "starts": starts,
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_all_on_ranks, 4, str(tmp_path_factory.mktemp("wire")), timeout_s=90.0)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layout", COMPUTING)
def test_sum_is_that_of_the_formula(results: list[dict[str, Any]], layout: str, name: str) -> None:
    found = [results[rank][layout, name] for rank in COMPUTING[layout]]
    machines = LEADERS[layout]
    for number, slots in enumerate(found[0]["layout"]):
        size = found[0]["outputs"][0][number].size
        errors: list[Values] = [np.zeros(size) for _ in machines]
        starts = {low: found[0]["starts"].get(f"p{index}", torch.empty(0)).numpy() for index, low, _ in slots}
        matrices = [(low, *SHAPES[index]) for index, low, _ in slots if index in (0, 2)]
        fed = np.zeros(size)
        for step in range(STEPS):
            scale, correction = _scale(step)
            terms = [np.zeros(size) for _ in machines]
            exact = np.zeros(size)
            for machine, term, error in zip(machines, terms, errors, strict=True):
                for index, low, high in slots:
                    for rank in machine:
                        term[low:high] += _gradient(rank, step, index).numpy().ravel()
                exact += term
                term += error * scale
            if name == "powersgd":
                out, lost = powersgd_sum(terms, matrices, starts)
            else:
                out, lost = quantised_sum(terms, CODECS[name])
            left = 1 - scale * correction
            kept = [correction * new + left * error for new, error in zip(lost, errors, strict=True)]
            for index, low, high in slots:
                if step == 2 and index == 2:
                    continue  # nobody touched it: its result is not used
                fed[low:high] += correction * (exact - out)[low:high]
                for error, new in zip(errors, kept, strict=True):
                    error[low:high] = new[low:high]
            for rank, one in enumerate(found):
                difference = np.abs(one["outputs"][step][number] - correction * out).max() / np.abs(out).max()
                assert difference < 1e-12, (layout, name, step, rank)
                np.testing.assert_array_equal(one["outputs"][step][number], found[0]["outputs"][step][number])
        for machine, error in zip(machines, errors, strict=True):
            for index, low, high in slots:
                own = results[machine[0]][layout, name]["errors"][f"p{index}"].numpy()
                np.testing.assert_allclose(own, error[low:high], atol=1e-12 * np.abs(fed).max() + 1e-12)
        # Nothing is lost over steps: what the steps lack of the exact sums is what the ranks hold.
        for index, low, high in slots:
            held = found[0]["gathered"][f"p{index}"].numpy()
            np.testing.assert_allclose(held, fed[low:high], atol=1e-11)


@pytest.mark.parametrize("name", FORMATS)
def test_norms_are_summed_as_they_are_and_rank_0_gathers_the_errors(results: list[dict[str, Any]], name: str) -> None:
    ranks = [results[rank]["two machines", name] for rank in COMPUTING["two machines"]]
    for step, norms in enumerate(ranks[0]["norms"]):
        own = [
            math.hypot(*(float(_gradient(rank, step, index).norm()) for index in range(len(SHAPES))))
            for rank in range(len(ranks))
        ]
        assert math.isclose(norms[0], sum(own), rel_tol=1e-12)
    assert all(error.any() for error in ranks[0]["gathered"].values()) or name == "powersgd"
    assert not any(ranks[1]["gathered"].values())


# -- training ---------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 64)
        self.norm = nn.BatchNorm1d(64)
        self.outer = nn.Linear(64, 1)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.norm(self.inner(x)).relu())


def _train(name: str, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(240, 32)
    y = 0.5 * x[:, :4].sum(1, keepdim=True) + 0.05 * torch.randn(240, 1)
    run = evenload.init(
        project_dir=str(folder), seed=1, wire=name, balance=(12, 6, 4, 2), micro_batch=6, check_every=1, timeout_s=20.0
    )
    loader = DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True)
    model, loader = run.prepare(Net(), loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses, skipped = [], []
    for epoch in range(4):
        for step in loader:
            poison = epoch == 1 and step.index == 12 and run.rank == 2
            before = model.inner.weight.detach().clone()

            def loss_fn(batch: Any) -> Any:
                loss = nn.functional.mse_loss(model(batch[0]), batch[1])
                return loss * float("nan") if poison else loss  # noqa: B023

            losses.append(float(step.backward(loss_fn)))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if torch.equal(before, model.inner.weight):
                skipped.append(step.index)
    taken = run._context.wire.format.name if run._context.wire is not None else ""
    weights = [p.detach().clone() for p in model.parameters()]
    run.close()
    return {"losses": losses, "skipped": skipped, "weights": weights, "format": taken}


def _train_in_parts(name: str, folder: Path, num_parts: int) -> list[torch.Tensor]:
    """Train 8 steps with a checkpoint after the fourth, in one session or in two."""
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(96, 32), torch.randn(96, 1))
    for part in range(num_parts):
        run = evenload.init(
            project_dir=str(folder), seed=1, wire=name, balance=(5, 3, 3, 1), check_every=1, timeout_s=20.0
        )
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 1))
        model, loader = run.prepare(model, DataLoader(dataset, batch_size=12, shuffle=True))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.resume(model=model, optimizer=optimizer)
        for step in loader:
            step.backward(lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1]))  # noqa: B023
            optimizer.step()
            optimizer.zero_grad()
            run.checkpoint(every="4 steps")
            if step.index == 3 and part == 0 and num_parts == 2:
                break
        weights = [p.detach().clone() for p in model.parameters()]
        run.close()
    return weights


@pytest.mark.parametrize("name", ["int8", "powersgd"])
def test_a_checkpoint_holds_the_errors_of_all_ranks(results: list[dict[str, Any]], name: str) -> None:
    at_once, in_parts = results[0]["resumed"][name]
    for a, b in zip(at_once, in_parts, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", (*FORMATS, "auto"))
def test_training_converges_and_ranks_stay_equal(results: list[dict[str, Any]], name: str) -> None:
    exact, found = results[0]["trained"]["fp32"], [one["trained"][name] for one in results]
    for other in found[1:]:
        for a, b in zip(found[0]["weights"], other["weights"], strict=True):
            assert torch.equal(a, b)
    assert exact["skipped"] == found[0]["skipped"] == [12]
    last = [float(np.mean(one["losses"][-10:])) for one in (exact, found[0])]
    assert last[0] < 0.3 * float(np.mean(exact["losses"][:10]))
    assert found[0]["format"] == ("int8" if name == "auto" else name)  # over a link of 0.1 MB/s
    assert last[1] < 1.1 * last[0] + 0.005, last
