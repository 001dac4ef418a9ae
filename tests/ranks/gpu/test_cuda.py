"""What only a GPU can show; two ranks share one GPU over gloo where there is only one."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.errors import EvenloadError
from evenload.records.reader import read_events, read_steps
from evenload.testing import run_ranks
from evenload.training.comm.groups import Groups
from evenload.training.parallel import buckets

pytestmark = pytest.mark.gpu


def _devices(rank: int) -> str:
    return f"cuda:{rank % torch.cuda.device_count()}"


def _train(
    project_dir: str,
    balance: Any,
    precision: str = "no",
    limit: int | None = None,
    steps: int = 10,
    bucket_bytes: int | None = None,
    alone_over_nccl: bool = False,
) -> dict[str, Any]:
    if alone_over_nccl:
        Groups._new_group = _group_of_any_size  # type: ignore[method-assign]
    if bucket_bytes is not None:
        buckets.FIRST_BUCKET_BYTES = buckets.BUCKET_BYTES = bucket_bytes
    run = evenload.init(project_dir=project_dir, seed=0, balance=balance, precision=precision)
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(
        torch.randn(320, 16, generator=generator, dtype=torch.float64), torch.randint(0, 4, (320,), generator=generator)
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).double()
    if limit is not None or precision != "no":
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(
            torch.float32 if precision != "no" else torch.float64
        )
    model, loader = run.prepare(model, DataLoader(dataset, batch_size=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sizes = []

    def loss_fn(batch: Any) -> torch.Tensor:
        x, y = batch
        sizes.append(len(x))
        if limit is not None and len(x) > limit:
            torch.empty(1 << 62, dtype=torch.uint8, device=run.device)  # a real CUDA out of memory
        return F.cross_entropy(model(x.to(next(model.parameters()).dtype)), y)

    losses = []
    for step in loader:
        losses.append(float(step.backward(loss_fn)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step.index + 1 == steps:
            break
    weights = torch.cat([p.detach().double().flatten().cpu() for p in model.parameters()])
    device = str(run.device)
    run.close()
    return {"weights": weights, "losses": losses, "device": device, "largest": max(sizes[1:], default=0)}


def _group_of_any_size(groups: Groups, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """In place of `Groups._new_group`, which makes none for a single rank: a GPU alone reduces and broadcasts by NCCL."""
    group = dist.new_group(list(ranks), backend=groups._inner.backend_of(ranks))
    return group if isinstance(group, dist.ProcessGroup) else None


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / one.norm())


def test_two_ranks_give_the_weights_of_one_gpu(tmp_path: Path) -> None:
    alone = run_ranks(_train, 1, str(tmp_path / "one"), "auto", device="cuda:0")[0]
    split = run_ranks(_train, 2, str(tmp_path / "two"), (24, 8), device=_devices, backend="gloo")
    assert alone["device"] == "cuda:0"
    assert _difference(alone["weights"], split[0]["weights"]) <= 1e-12
    assert torch.equal(split[0]["weights"], split[1]["weights"])


@pytest.mark.parametrize(
    ("shares", "alone_over_nccl"),
    [((30, 2), False), ((30, 2), True), ((20, 10, 2), False)],
    ids=["-d 0,cpu", "-d 0,cpu with NCCL", "-d 0,1,cpu"],
)
def test_gpus_and_the_cpu_train_together(tmp_path: Path, shares: tuple[int, ...], alone_over_nccl: bool) -> None:
    cpu = len(shares) - 1
    if cpu > torch.cuda.device_count():
        pytest.skip(f"needs {cpu} GPUs")
    alone = run_ranks(_train, 1, str(tmp_path / "one"), "auto", device="cuda:0")[0]
    mixed = run_ranks(
        _train,
        len(shares),
        str(tmp_path / "mix"),
        shares,
        "no",
        None,
        10,
        400,  # several buckets are on their way at once
        alone_over_nccl,
        device=lambda rank: "cpu" if rank == cpu else f"cuda:{rank}",
        backend="gloo",
        inner_backend=lambda rank: "" if rank == cpu else "nccl",
    )
    assert [result["device"] for result in mixed] == [*(f"cuda:{index}" for index in range(cpu)), "cpu"]
    assert all(_difference(alone["weights"], result["weights"]) <= 1e-12 for result in mixed)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains_and_ranks_stay_equal(tmp_path: Path, precision: str) -> None:
    results = run_ranks(_train, 2, str(tmp_path), (20, 12), precision, device=_devices, backend="gloo")
    assert torch.equal(results[0]["weights"], results[1]["weights"])
    assert all(loss == loss and loss < 10 for loss in results[0]["losses"])


def test_out_of_memory_shrinks_the_micro_batch_and_keeps_the_result(tmp_path: Path) -> None:
    free = run_ranks(_train, 2, str(tmp_path / "free"), (24, 8), "no", 1000, device=_devices, backend="gloo")
    tight = run_ranks(_train, 2, str(tmp_path / "tight"), (24, 8), "no", 12, device=_devices, backend="gloo")
    assert tight[0]["largest"] <= 12 < free[0]["largest"]
    assert _difference(free[0]["weights"], tight[0]["weights"]) <= 1e-12


def _count_waits(project_dir: str, fused: bool) -> dict[str, list[int]]:
    run = evenload.init(project_dir=project_dir, seed=0)
    data = TensorDataset(torch.randn(256, 8), torch.randint(0, 4, (256,)))
    model, loader = run.prepare(nn.Linear(8, 4), DataLoader(data, batch_size=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)

    def loss_fn(batch: Any) -> Any:
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        return {"loss": loss, "weight": (y >= 0).sum(), "nll": loss.detach(), "squared": loss.detach() ** 2}

    waits, unread = [], []
    for step in loader:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                loss = step.backward(loss_fn)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                run.log({"loss": loss, **step.metrics})
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchronizing" in str(warning.message) for warning in found))
        unread.append(int(step.stats.unread is not None))
        assert loss.device == run.device
    run.close()
    return {"waits": waits, "unread": unread}


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_with_a_fused_optimizer_is_read_late(tmp_path: Path, fused: bool) -> None:
    """No call of torch waits (events are waited for by their own calls); the first steps prepare."""
    (found,) = run_ranks(_count_waits, 1, str(tmp_path), fused, device="cuda:0")
    assert set(found["waits"][3:]) == {0}
    assert set(found["unread"][1:]) == {int(fused)}
    steps = read_steps(tmp_path)
    assert len(steps) == 16
    assert all(step.metrics["loss"] == pytest.approx(step.loss, rel=1e-6) for step in steps)


def _raise_where_the_host_waits(project_dir: str, strategy: str, precision: str) -> dict[str, Any]:
    """From step 4 on a call of torch that waits for the GPU raises, also between two steps."""
    run = evenload.init(project_dir=project_dir, seed=0, strategy=strategy, precision=precision)
    data = TensorDataset(torch.randn(320, 8), torch.randint(0, 4, (320,)))
    network = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
    model, loader = run.prepare(network, DataLoader(data, batch_size=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    run.resume(model=model, optimizer=optimizer, schedule=schedule)

    def loss_fn(batch: Any) -> Any:
        logits = model(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        return {"loss": loss, "accuracy": (logits.argmax(1) == batch[1]).float().mean()}

    losses = []
    try:
        for step in loader:
            if step.index == 4:
                torch.cuda.set_sync_debug_mode("error")
            loss = step.backward(loss_fn)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            run.log({"loss_again": loss, "norm": norm, **step.metrics})
            losses.append(loss)
            if step.index == 15:
                torch.cuda.set_sync_debug_mode("default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = [float(loss) for loss in losses]
    run.close()
    return {"losses": found}


@pytest.mark.parametrize("strategy", ["ddp", "dp"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_no_call_of_a_usual_step_waits(tmp_path: Path, strategy: str, precision: str) -> None:
    """Loss, a metric, a clipped norm, a schedule and `run.log`, on a single GPU."""
    (found,) = run_ranks(_raise_where_the_host_waits, 1, str(tmp_path), strategy, precision, device="cuda:0")
    steps = read_steps(tmp_path)
    assert [step.loss for step in steps] == pytest.approx(found["losses"], rel=1e-5)
    assert all({"loss_again", "norm", "accuracy"} <= step.metrics.keys() for step in steps)
    assert len(steps) == 20


def _skip(project_dir: str, bad_steps: tuple[int, ...]) -> list[torch.Tensor]:
    run = evenload.init(project_dir=project_dir, seed=0)
    data = TensorDataset(torch.randn(96, 8, generator=torch.Generator().manual_seed(0)), torch.arange(96))
    torch.manual_seed(0)
    model, loader = run.prepare(nn.Linear(8, 4), DataLoader(data, batch_size=8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    weights = []
    for step in loader:
        factor = float("nan") if step.index in bad_steps else 1.0
        step.backward(lambda batch, factor=factor: F.cross_entropy(model(batch[0]), batch[1] % 4) * factor)
        optimizer.step()
        optimizer.zero_grad()
        weights.append(model.weight.detach().cpu().clone())
    run.close()
    return weights


def test_a_step_that_is_not_finite_changes_nothing_on_a_gpu(tmp_path: Path) -> None:
    (weights,) = run_ranks(_skip, 1, str(tmp_path), (5, 8), device="cuda:0")
    same = [index for index in range(1, len(weights)) if torch.equal(weights[index - 1], weights[index])]
    assert same == [5, 8]
    assert all(bool(weight.isfinite().all()) for weight in weights)
    assert [event.step for event in read_events(tmp_path) if event.kind == "skipped"] == [5, 8]


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
OVER_NCCL: dict[str, Any] = {"device": lambda rank: f"cuda:{rank}", "backend": "nccl"}


@needs_two
@pytest.mark.parametrize("limit", [None, 12])
def test_two_gpus_over_nccl_give_the_weights_of_one(tmp_path: Path, limit: int | None) -> None:
    """With BatchNorm, and without it where one of them runs out of memory in its first step."""
    least = None if limit is None else 1000
    alone = run_ranks(_train, 1, str(tmp_path / "one"), "auto", "no", least, device="cuda:0")[0]
    split = run_ranks(_train, 2, str(tmp_path / "two"), (24, 8), "no", limit, **OVER_NCCL)
    assert _difference(alone["weights"], split[0]["weights"]) <= 1e-12
    assert torch.equal(split[0]["weights"], split[1]["weights"])


def _raise_in_a_forward(project_dir: str, at: int, error: type[Exception]) -> dict[str, Any]:
    """Rank 1 leaves a forward with BatchNorm once, by an exception that the script catches on all ranks or for lack of memory."""
    run = evenload.init(project_dir=project_dir, seed=0, balance="even")
    data = TensorDataset(torch.randn(96, 8), torch.randint(0, 4, (96,)))
    network = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    model, loader = run.prepare(network, DataLoader(data, batch_size=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    caught, raised = [], []
    for step in loader:

        def loss_fn(batch: Any) -> torch.Tensor:
            if run.rank == 1 and step.index == at and not raised:  # noqa: B023
                raised.append(at)
                raise error("injected")
            return F.cross_entropy(model(batch[0]), batch[1])

        try:
            step.backward(loss_fn)
        except (ValueError, EvenloadError):
            caught.append(step.index)
            continue
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    run.close()
    return {"weights": weights, "caught": caught}


@needs_two
@pytest.mark.parametrize(("at", "error"), [(3, ValueError), (0, torch.OutOfMemoryError), (3, torch.OutOfMemoryError)])
def test_statistics_over_nccl_end_where_a_rank_leaves_a_forward(
    tmp_path: Path, at: int, error: type[Exception]
) -> None:
    ranks = run_ranks(_raise_in_a_forward, 2, str(tmp_path), at, error, timeout_s=60.0, **OVER_NCCL)
    assert [rank["caught"] for rank in ranks] == [[at] if error is ValueError else []] * 2
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])


SCRIPT = """
import os, signal, sys, torch, evenload
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

run = evenload.init(project_dir=sys.argv[1], seed=0, balance="even")
x = torch.randn(16 * 40, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)).double()
model, loader = run.prepare(network, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
run.resume(model=model, optimizer=optimizer)
for step in loader:
    if step.index == 20 and run.world_size == 2 and run.rank == 1 and sys.argv[2] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    step.backward(lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1]))
    optimizer.step()
    optimizer.zero_grad()
if run.is_main:
    torch.save([p.detach().cpu() for p in model.parameters()], sys.argv[1] + ".pt")
"""


@needs_two
def test_a_rank_that_dies_over_nccl_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    for name, devices in (("alone", "0"), ("dies", "0,1")):
        words = ["run", "-d", devices, "--max-restarts", "0", "train.py", str(tmp_path / name), name]
        done = subprocess.run(
            [sys.executable, "-m", "evenload.cli.main", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
    alone, others = (torch.load(tmp_path / f"{name}.pt") for name in ("alone", "dies"))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(alone, others, strict=True))
    assert [event.kind for event in read_events(tmp_path / "dies") if event.kind == "lost"] == ["lost"]
