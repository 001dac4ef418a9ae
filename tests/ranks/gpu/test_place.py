"""Models cut over a GPU and the CPU, and over one GPU twice."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import evenload
from evenload.errors import StepError
from evenload.testing import run_ranks
from evenload.training.parallel.model_split.transfers import split_of
from tests.ranks.exact.measure import difference, relative
from tests.ranks.exact.ranks import Setting, train
from tests.ranks.exact.reference import Reference
from tests.ranks.exact.tasks import TASKS, Recorder
from tests.unit.model_split.models import CASES
from tests.unit.model_split.test_place import learn, numbers

pytestmark = pytest.mark.gpu

ORDERS = [("cuda:0", "cpu"), ("cpu", "cuda:0")]


def tight(model: nn.Module, devices: tuple[str, ...]) -> dict[str, int]:
    """Limits that no device can hold the whole model in."""
    need = 4 * sum(p.numel() * p.element_size() for p in model.parameters())
    return dict.fromkeys(devices, need * 9 // 10)


@pytest.mark.parametrize("home", ["cuda:0", "cpu"])
@pytest.mark.parametrize("devices", ORDERS)
@pytest.mark.parametrize("name", CASES)
def test_a_cut_model_computes_what_the_whole_one_does(name: str, devices: tuple[str, ...], home: str) -> None:
    case = CASES[name]
    torch.manual_seed(1)
    model, inputs = case.build().double(), _double(case.inputs())
    whole = copy.deepcopy(model)
    evenload.place(model, tight(model, devices))
    assert {p.device for p in model.parameters()} == {torch.device(device) for device in devices}
    sent = _to(inputs, home) if name != "recurrent" else (inputs[0].to(home), inputs[1])
    out = case.call(model, sent)
    case.call(whole, inputs)  # running statistics move with each call
    assert {leaf.device for leaf in numbers(out)} == {torch.device(home)}
    got, expected = learn(model, case, sent), learn(whole, case, inputs)
    for key in ("outputs", "grads"):
        for a, b in zip(got[key], expected[key], strict=True):
            assert relative(a.cpu().double(), b.double()) <= 1e-11
    for key, value in expected["state"].items():
        assert relative(got["state"][key].cpu().double(), value.double()) <= 1e-9


def _to(inputs: Any, device: str) -> Any:
    if isinstance(inputs, dict):
        return {key: value.to(device) for key, value in inputs.items()}
    return inputs.to(device)


def _double(inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    return inputs.double() if isinstance(inputs, torch.Tensor) and inputs.is_floating_point() else inputs


def _train_cut(name: str, devices: tuple[str, ...], setting: Setting, folder: str) -> Recorder:
    kind = TASKS[name]

    class Cut(kind):  # type: ignore[misc, valid-type]
        def build(self) -> None:
            super().build()
            for model in self.models:
                limits = tight(model, devices)
                if self.rank:  # another cut than rank 0's
                    limits[devices[0]] //= 2
                evenload.place(model, limits)

    return train(Cut(), setting, folder)


@pytest.mark.parametrize("name", ["Clipped", "Normed", "Tokens"])
def test_two_ranks_each_on_the_gpu_and_the_cpu(name: str, tmp_path: Path) -> None:
    devices = ("cuda:0", "cpu")
    ranks = run_ranks(
        _train_cut, 2, name, devices, Setting((24, 8)), str(tmp_path), device="cuda:0", devices=devices, backend="gloo"
    )
    expected = Reference(TASKS[name](), ranks[0].num_micro).train()
    assert difference(ranks[0], expected).worst <= 1e-11
    # A layer that one rank has on its GPU and the other on the CPU rounds otherwise in the optimizer.
    assert relative(ranks[1].params, ranks[0].params) <= 1e-12


def test_a_model_that_the_gpu_may_not_hold_alone(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    x = torch.randn(4096, 1024)
    with torch.no_grad():
        expected = model(x)
    evenload.place(model, {"cuda:0": "180MB", "cpu": "1GiB"}, example=x)
    first, last = split_of(model).pieces
    assert (first.device, last.device) == ("cuda:0", "cpu")
    assert first.num_layers == 5  # 33.6 MB each with its activations: as much on the fast one as fits
    out = model(x.cuda())
    assert out.device.type == "cuda"
    assert relative(out.detach().cpu(), expected) < 1e-3
    out.sum().backward()
    assert all(p.grad.device == p.device for p in model.parameters())
    assert "expected" in capsys.readouterr().out


def test_what_fits_the_gpu_stays_there() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    evenload.place(model, ["cuda:0", "cpu"], example=torch.randn(4096, 1024))
    assert [piece.num_layers for piece in split_of(model).pieces] == [8, 0]
    assert {p.device.type for p in model.parameters()} == {"cuda"}


def test_bf16_on_both_kinds_of_device(tmp_path: Path) -> None:
    (losses,) = run_ranks(_train_low, 1, "bf16", str(tmp_path), device="cuda:0", devices=("cuda:0", "cpu"))
    assert losses[-1] < losses[0]


def _train_low(precision: str, folder: str) -> list[float]:
    from torch.utils.data import DataLoader, TensorDataset

    run = evenload.init(project_dir=folder, precision=precision)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    evenload.place(model, {"cuda:0": "20KB", "cpu": "1MiB"})
    x = torch.randn(320, 8)
    model, loader = run.prepare(model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        for step in loader:
            loss = step.backward(lambda batch: nn.functional.mse_loss(model(batch[0]).float(), batch[1]))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    assert {p.device.type for p in model.parameters()} == {"cuda", "cpu"}
    run.close()
    return losses


def test_checkpointed_dropout_beyond_a_cut_is_refused() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 8, 0.5, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.second, self.first(x), use_reentrant=False)

    cut = evenload.place(Checkpointed(), {"cpu": "1200B", "cuda:0": "8KB"})
    assert cut.second.linear1.weight.is_cuda
    assert not cut.first.weight.is_cuda
    with pytest.raises(StepError, match=r"on cuda:0 draws random numbers inside torch\.utils\.checkpoint"):
        cut(torch.randn(2, 3, 8))
    cut.second.apply(lambda module: setattr(module, "p", 0.0) if isinstance(module, nn.Dropout) else None)
    cut.second.self_attn.dropout = 0.0
    cut(torch.randn(2, 3, 8)).sum().backward()
