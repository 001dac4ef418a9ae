"""BatchNorm over ranks beside torch's own over the whole batch: layouts, dtypes, parts of any size, and second derivatives."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import evenload
from evenload.errors import EvenloadError
from evenload.testing import run_ranks
from evenload.training.compute import batchnorm

DOUBLE = torch.float64


@dataclass(frozen=True)
class Case:
    """One BatchNorm, an input, and the rows of it that each of three ranks has."""

    kind: type[nn.Module] = nn.BatchNorm2d
    shape: tuple[int, ...] = (12, 5, 7, 6)
    parts: tuple[int, ...] = (7, 4, 1)
    dtype: torch.dtype = DOUBLE
    layout: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.contiguous
    arguments: tuple[tuple[str, Any], ...] = ()
    offset: float = 3.0
    idle: int | None = None
    """This rank's part does not count."""

    def module(self) -> nn.Module:
        torch.manual_seed(0)
        module = self.kind(self.shape[1], **dict(self.arguments))
        for param in module.parameters():
            nn.init.normal_(param)
        return module.to(self.dtype)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(1)
        x, grad = (torch.randn(self.shape, generator=g, dtype=DOUBLE) for _ in range(2))
        return (x * 2 + torch.arange(self.shape[0]).view(-1, *[1] * (len(self.shape) - 1)) / 10 + self.offset), grad

    def counted(self) -> list[int]:
        """Rows of the batch that count."""
        ends = [sum(self.parts[:r]) for r in range(len(self.parts) + 1)]
        return [row for r in range(len(self.parts)) if r != self.idle for row in range(ends[r], ends[r + 1])]


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def channels_last_3d(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last_3d)


def channels_inside(x: torch.Tensor) -> torch.Tensor:
    """As a transformer transposes: neither contiguous nor channels_last."""
    return x.transpose(1, -1).contiguous().transpose(1, -1)


CASES = {
    "2d": Case(),
    "small planes": Case(shape=(12, 5, 2, 3)),
    "many values": Case(shape=(24, 8, 45, 40), parts=(13, 9, 2)),
    "many values in small planes": Case(shape=(24, 1400, 2, 3), parts=(13, 9, 2)),
    "planes of twenty values": Case(shape=(24, 350, 4, 5), parts=(13, 9, 2)),
    "many values in float32 far from zero": Case(
        shape=(24, 8, 45, 40), parts=(13, 9, 2), dtype=torch.float32, offset=300.0
    ),
    "one value a plane": Case(shape=(12, 5, 1, 1)),
    "channels_last": Case(layout=channels_last),
    "1d": Case(nn.BatchNorm1d, (12, 5)),
    "1d of sequences": Case(nn.BatchNorm1d, (12, 5, 40)),
    "1d, channels inside": Case(nn.BatchNorm1d, (12, 5, 40), layout=channels_inside),
    "2d, channels inside": Case(layout=channels_inside),
    "3d": Case(nn.BatchNorm3d, (12, 3, 4, 5, 6)),
    "3d channels_last": Case(nn.BatchNorm3d, (12, 3, 4, 5, 6), layout=channels_last_3d),
    "SyncBatchNorm": Case(nn.SyncBatchNorm),
    "no affine, mean of all batches": Case(arguments=(("affine", False), ("momentum", None))),
    "no running statistics": Case(arguments=(("track_running_stats", False),)),
    "one value on a rank": Case(nn.BatchNorm1d, (12, 5), parts=(10, 1, 1)),
    "an empty part": Case(parts=(8, 4, 0)),
    "an idle rank": Case(idle=1),
    "float32": Case(dtype=torch.float32),
    "float32 far from zero": Case(dtype=torch.float32, offset=300.0),
    "float32 small planes": Case(shape=(12, 5, 2, 3), dtype=torch.float32),
    "float32 channels_last": Case(dtype=torch.float32, layout=channels_last),
    "bfloat16": Case(dtype=torch.bfloat16),
    "bfloat16 channels_last": Case(dtype=torch.bfloat16, layout=channels_last),
    "bfloat16 no affine": Case(dtype=torch.bfloat16, arguments=(("affine", False),)),
    "float16 1d": Case(nn.BatchNorm1d, (12, 5), dtype=torch.float16),
}
BOUNDS = {DOUBLE: 1e-12, torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}


def _shared(folder: str) -> tuple[Any, batchnorm.Statistics]:
    torch.set_num_threads(1)
    run = evenload.init(project_dir=folder, seed=0)
    return run, batchnorm.Statistics(run._context.groups, run._context.clock)


def _own(case: Case, rank: int) -> slice:
    first = sum(case.parts[:rank])
    return slice(first, first + case.parts[rank])


def _found(module: nn.Module, y: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {"y": y.detach(), "x": x.grad}
    found |= {name: param.grad for name, param in module.named_parameters()}
    found |= {name: buffer.clone() for name, buffer in module.named_buffers()}
    return {name: value.cpu() for name, value in found.items()}


def on_ranks(names: list[str], folder: str) -> list[dict[str, torch.Tensor]]:
    """Forward and backward of each case; weights' gradients are summed over ranks, as the reducer does."""
    run, statistics = _shared(folder)
    all_found = []
    for name in names:
        case = CASES[name]
        module = case.module().to(run.device)
        batchnorm.convert(module)
        x, grad = (t[_own(case, run.rank)].to(run.device, case.dtype) for t in case.tensors())
        x = case.layout(x).requires_grad_()
        statistics.idle = case.idle == run.rank
        with batchnorm.Active(statistics):
            y = module(x)
            y.backward(grad)
        for param in module.parameters():
            if statistics.idle:
                param.grad.zero_()
            dist.all_reduce(param.grad)
        statistics.idle = False
        all_found.append(_found(module, y, x))
    run.close()
    return all_found


def _whole(case: Case) -> dict[str, torch.Tensor]:
    """What torch gives in one process, in double precision."""
    module = case.module().double()
    if isinstance(module, nn.SyncBatchNorm):
        module.__class__ = nn.BatchNorm2d
    rows = case.counted()
    x, grad = (t.to(case.dtype).double()[rows] for t in case.tensors())
    x.requires_grad_()
    y = module(x)
    y.backward(grad)
    return _found(module, y, x)


def test_three_ranks_equal_torch_over_the_whole_batch(tmp_path: Path) -> None:
    _check(run_ranks(on_ranks, 3, list(CASES), str(tmp_path)))


def _gpu(rank: int) -> str:
    return f"cuda:{rank % torch.cuda.device_count()}"


@pytest.mark.gpu
def test_so_do_ranks_on_a_gpu(tmp_path: Path) -> None:
    _check(run_ranks(on_ranks, 3, list(CASES), str(tmp_path), device=_gpu, backend="gloo"))


def _check(ranks: list[list[dict[str, torch.Tensor]]]) -> None:
    for index, (name, case) in enumerate(CASES.items()):
        expected, found = _whole(case), [rank[index] for rank in ranks]
        counted = [r for r in range(3) if r != case.idle]
        for key, value in expected.items():
            if key in ("y", "x"):
                got = torch.cat([found[r][key] for r in counted])
            else:
                got = found[0][key]
                assert all(torch.equal(found[r][key], got) for r in range(3)), (name, key)
            far = float((got.double() - value.double()).norm() / value.double().norm().clamp(min=1.0))
            scale = 30.0 if case.offset > 100 else 1.0  # float32 rounds x itself by 1e-5 of a standard deviation there
            assert far <= BOUNDS[case.dtype] * scale, (name, key, far)
        if case.idle is not None:
            assert not found[case.idle]["x"].any()


def penalty_on_ranks(folder: str) -> dict[str, torch.Tensor]:
    run, statistics = _shared(folder)
    case = CASES["an idle rank"]
    module, x, weight = _penalty_parts(case)
    batchnorm.convert(module)
    own = _own(case, run.rank)
    x = x[own].detach().requires_grad_()
    statistics.idle = case.idle == run.rank
    with batchnorm.Active(statistics):
        loss = _penalty(module, x, weight[own])
        (loss * 0 if statistics.idle else loss).backward()
    for param in module.parameters():
        dist.all_reduce(param.grad)
    found = {"x": x.grad, **{name: param.grad for name, param in module.named_parameters()}}
    run.close()
    return found


def _penalty_parts(case: Case) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    x, weight = case.tensors()
    torch.manual_seed(2)
    module = nn.Sequential(case.module(), nn.Conv2d(5, 4, 3), nn.Tanh(), nn.BatchNorm2d(4), nn.Tanh()).double()
    return module, x, weight


def _penalty(module: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    (grad,) = torch.autograd.grad((module(x) ** 2).sum(), x, create_graph=True)
    return (torch.tanh(grad) * weight).sum()


def test_a_gradient_penalty_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    """Double backward: the inner gradient and its own gradient go through the statistics of all ranks."""
    ranks = run_ranks(penalty_on_ranks, 3, str(tmp_path))
    case = CASES["an idle rank"]
    module, x, weight = _penalty_parts(case)
    x = x[case.counted()].requires_grad_()
    _penalty(module, x, weight[case.counted()]).backward()
    expected = {"x": x.grad, **{name: param.grad for name, param in module.named_parameters()}}
    for key, value in expected.items():
        got = torch.cat([ranks[r]["x"] for r in (0, 2)]) if key == "x" else ranks[0][key]
        assert float((got - value).norm() / value.norm()) <= 1e-12, key


def too_few_values(folder: str) -> str:
    run, statistics = _shared(folder)
    module = nn.BatchNorm1d(4)
    batchnorm.convert(module)
    statistics.idle = run.rank == 1
    try:
        with batchnorm.Active(statistics):
            module(torch.randn(1, 4))
    except (ValueError, EvenloadError) as error:
        return str(error)
    finally:
        run.close()
    return ""


def test_one_value_over_all_ranks_is_refused(tmp_path: Path) -> None:
    assert all(
        "more than 1 value per channel over all ranks, got 1" in text
        for text in run_ranks(too_few_values, 2, str(tmp_path))
    )


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_a_converted_module_looks_pickles_and_copies_as_the_users(kind: type[nn.Module]) -> None:
    module = nn.Sequential(kind(3), nn.Linear(3, 3))
    plain = repr(module)
    module[0].running_mean.fill_(2.0)
    batchnorm.convert(module)
    assert repr(module) == plain
    assert type(module[0]).__name__ == kind.__name__
    file = io.BytesIO()
    torch.save(module, file)
    assert b"evenload" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded[0]) is kind
    assert torch.equal(loaded[0].running_mean, module[0].running_mean)
    # A copy made for an average or a teacher shares statistics, as the module does.
    for copied in (copy.deepcopy(module)[0], copy.copy(module[0])):
        assert type(copied) is type(module[0])
    deep, shallow = copy.deepcopy(module[0]), copy.copy(module[0])
    assert shallow.weight is module[0].weight
    assert deep.weight is not module[0].weight
    assert torch.equal(deep.running_mean, module[0].running_mean)
    batchnorm.restore(module)
    assert type(module[0]) is kind


def _evaluate(folder: str) -> list[Any]:
    """In training mode over this rank's batches, of the model and of an average; then of all batches, over the plain loader."""
    run = evenload.init(project_dir=folder, seed=0, balance=(5, 3))
    model, _ = run.prepare(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), _rows())
    found: list[Any] = []
    for net in (model, average := torch.optim.swa_utils.AveragedModel(model)):
        try:
            torch.optim.swa_utils.update_bn(run.batches(_rows()), net)
        except EvenloadError as error:
            found.append(str(error))
    torch.optim.swa_utils.update_bn(_rows(), average)
    found.append(average.module[1].running_mean)
    model.eval()
    found.append(sum(len(model(x)) for (x,) in run.batches(_rows())))
    run.close()
    return found


def _rows() -> Any:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=8)


def test_training_mode_in_an_evaluation_is_refused(tmp_path: Path) -> None:
    (*errors, mean, num), (*other_errors, other_mean, other_num) = run_ranks(_evaluate, 2, str(tmp_path))
    assert len(errors) == 2 and errors == other_errors
    assert all("BatchNorm1d ran in training mode in a loop over run.batches" in one for one in errors)
    assert torch.equal(mean, other_mean)  # every rank reads all of a plain loader
    assert num + other_num == 16


def test_an_iterator_of_an_evaluation_that_lives_is_over_when_training_goes_on() -> None:
    running = batchnorm.in_evaluation(2), batchnorm.in_evaluation(3)
    for one in running:
        one.__enter__()
    running[1].__exit__(None, None, None)
    assert batchnorm._evaluations == [2]
    with batchnorm.Active(None):
        assert batchnorm._evaluations == []
    running[0].__exit__(None, None, None)
