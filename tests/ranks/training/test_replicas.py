"""Replicas of one process: what loss_fn may do with the prepared model, and the messages where it can't be led to one."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import evenload
from evenload.errors import ConfigError, EvenloadError, StepError
from evenload.testing import run_ranks
from evenload.training.parallel.threaded.replica_threads import current_replica
from evenload.training.step.plan_source import FixedProportions
from tests.ranks.training.replica_cases import (
    CASES,
    DRAWING,
    REPLICAS,
    SHARES,
    Case,
    Registered,
    Remembering,
    mlp,
    plain,
    random_data,
)


def _train(case: Case, folder: str, strategy: str, shares: Any, each: Callable[[Any, int], None] | None = None) -> Any:
    run = evenload.init(project_dir=folder, seed=3, strategy=strategy, balance=shares)
    model, loader = run.prepare(case.model, DataLoader(random_data(), batch_size=24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    grads = []
    try:
        for _ in range(2):
            for step in loader:
                step.backward(case.loss)
                grads += [p.grad.flatten().clone() for p in model.parameters() if p.grad is not None]
                optimizer.step()
                optimizer.zero_grad()
                if each is not None:
                    each(model, step.index)
        return torch.cat(grads), nn.utils.parameters_to_vector(model.parameters()).detach()
    finally:
        run.close()


def _alone(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The same steps in plain PyTorch."""
    torch.manual_seed(7)
    case = CASES[name]()
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-2)
    grads = []
    for index in range(4):
        x, y = random_data()[24 * (index % 2) : 24 * (index % 2) + 24]
        if isinstance(case.model, Remembering):
            case.model.scale = 1.0 + index
        case.loss((x, y)).backward()
        grads += [p.grad.flatten().clone() for p in case.model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat(grads), nn.utils.parameters_to_vector(case.model.parameters()).detach()


def _all_cases(folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for index, (name, make) in enumerate(CASES.items()):
        torch.manual_seed(7)
        case = make()
        model = case.model

        def change(model: Any, step: int) -> None:
            if isinstance(model, Remembering):
                assert isinstance(model.penalty, torch.Tensor)
                assert float(model.calls) == step + 1  # as many as one forward a step would have made
                model.scale = 2.0 + step  # the user's frame: seen by all replicas in the next step

        found[name] = _train(case, f"{folder}/{index}", "dp", SHARES, change)
        assert type(model) is type(make().model), "the class of the model is the user's own again"
        assert all(type(p) is nn.Parameter for p in model.parameters())
    assert Registered.known == ["Wrapping"], "no class of the user's is seen to be derived from"
    return found


def test_whatever_loss_fn_does_with_the_model_leads_to_the_replica(tmp_path: Path) -> None:
    (found,) = run_ranks(_all_cases, 1, str(tmp_path), replicas=REPLICAS)
    for name, (grads, params) in found.items():
        expected_grads, expected = _alone(name)
        assert float((grads - expected_grads).norm() / expected_grads.norm()) <= 1e-12, name
        assert float((params - expected).norm() / expected.norm()) <= 1e-12, name


def _drawing(folder: str, strategy: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    found = {}
    for index, (name, make) in enumerate(DRAWING.items()):
        torch.manual_seed(7)
        found[name] = _train(make(), f"{folder}/{index}", strategy, SHARES)
    return found


def test_replicas_draw_what_ranks_draw_also_in_a_recomputed_forward(tmp_path: Path) -> None:
    ranks = run_ranks(_drawing, 3, str(tmp_path / "ddp"), "ddp")
    (replicas,) = run_ranks(_drawing, 1, str(tmp_path / "dp"), "dp", replicas=REPLICAS)
    (again,) = run_ranks(_drawing, 1, str(tmp_path / "again"), "dp", replicas=REPLICAS)
    for name, (grads, params) in replicas.items():
        assert float((grads - ranks[0][name][0]).norm() / grads.norm()) <= 1e-12, name
        assert torch.equal(params, again[name][1]), "the same seed gives the same numbers"


def _told(folder: str) -> dict[str, str]:
    """Return the messages where loss_fn can't be led to its replica, and that training goes on after it."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = mlp().double()
    features: dict[str, torch.Tensor] = {}
    run = evenload.init(project_dir=folder, seed=3, strategy="dp", balance=SHARES)
    model, loader = run.prepare(model, DataLoader(random_data(steps=8), batch_size=24))
    together = threading.Barrier(3)

    def by_a_hook(batch: Any) -> Any:
        x, y = batch
        model(x)
        together.wait(20)
        if current_replica().index == 1:
            together.wait(20)
            hidden = features["hidden"]  # looked up once: the others write there again, and their parts differ in size
            return F.cross_entropy(model[3](hidden), torch.zeros(len(hidden), dtype=torch.long))
        if current_replica().index == 0:
            model(x)  # the last word in the dict is replica 0's
        together.wait(20)
        return F.cross_entropy(model(x), y)

    def in_a_thread(batch: Any) -> Any:
        out: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: out.append(model(batch[0])))
        thread.start()
        thread.join()
        return F.cross_entropy(out[0], batch[1])

    def raising(batch: Any) -> Any:
        if run.rank == 1:
            raise KeyError("mine")
        return F.cross_entropy(model(batch[0]), batch[1])

    def backward_itself(batch: Any) -> Any:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    def other_metrics(batch: Any) -> Any:
        return {"loss": F.cross_entropy(model(batch[0]), batch[1]), f"of_{run.rank}": 1.0}

    def nested(batch: Any) -> Any:
        return F.cross_entropy(evenload.data_parallel(model, batch[0], ["cpu", "cpu"]), batch[1])

    cases = {f.__name__: f for f in (by_a_hook, in_a_thread, raising, backward_itself, other_metrics, nested)}
    told = {}
    steps = iter(loader)
    step = next(steps)
    for name, loss_fn in cases.items():
        handle = (
            model[2].register_forward_hook(lambda m, i, o: features.update(hidden=o)) if name == "by_a_hook" else None
        )
        try:
            step.backward(loss_fn)
            told[name] = "nothing"
        except (EvenloadError, KeyError) as error:
            told[name] = f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', ()))}"
        if handle is not None:
            handle.remove()
        assert all(p.grad is None for p in model.parameters()), name
        assert type(model) is nn.Sequential
    seen: set[tuple[int, int, str]] = set()

    def good(batch: Any) -> Any:
        seen.add((run.rank, run.world_size, str(run.device)))
        return F.cross_entropy(model(batch[0]), batch[1])

    loss = step.backward(good)
    model.zero_grad()
    kinds: list[Any] = []

    def in_autocast(batch: Any) -> Any:
        out = model(batch[0])
        kinds.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return F.cross_entropy(out, batch[1])

    with torch.autocast("cpu", dtype=torch.bfloat16):
        next(steps).backward(in_autocast)
    told["autocast"] = str(set(kinds))
    model.zero_grad()
    steps.close()
    with torch.no_grad():
        x = random_data()[:9][0]
        told["forward"] = str(torch.allclose(evenload.data_parallel(model, x, ["cpu", "cpu"]), model(x), atol=1e-14))
    told["good"] = f"{bool(torch.isfinite(loss))} {sorted(seen)} {run.rank} {run.world_size}"
    run.close()
    return told


def test_what_cannot_be_led_to_a_replica_is_told(tmp_path: Path) -> None:
    (told,) = run_ranks(_told, 1, str(tmp_path), replicas=REPLICAS)
    assert "depends on what another replica computed" in told["by_a_hook"] and "strategy='ddp'" in told["by_a_hook"]
    assert told["in_a_thread"].startswith("StepError: a gradient reached the prepared model itself instead of its")
    assert told["raising"].startswith("KeyError: 'mine'") and "(in replica 1, on cpu)" in told["raising"]
    assert "loss_fn called backward() itself" in told["backward_itself"]
    assert told["other_metrics"].startswith(
        "StepError: loss_fn returned different metrics on different replicas: of_0 and of_1"
    )
    assert told["nested"].startswith("ConfigError: data_parallel was called inside a replica")
    assert told["autocast"] == "{(True, torch.bfloat16)}", "what the caller has switched on holds in all replicas"
    assert told["forward"] == "True", "between steps the prepared model is an ordinary one"
    assert told["good"] == "True [(0, 3, 'cpu'), (1, 3, 'cpu'), (2, 3, 'cpu')] 0 1"


def _refused(folder: str, what: str) -> str:
    torch.set_num_threads(1)
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    run = evenload.init(project_dir=folder, strategy="dp", balance=(6, 6, 4))
    data = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=16)
    try:
        if what == "compiled first":
            run.prepare(torch.compile(model, backend="eager"), data)
        elif what == "scripted":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch itself would leave TorchScript behind
                scripted = torch.jit.script(model)
            run.prepare(scripted, data)
        elif what == "an optimizer in the backward":
            model[0].weight.register_post_accumulate_grad_hook(lambda param: None)
            run.prepare(model, data)
        elif what == "uneven BatchNorm":
            model, loader = run.prepare(model, data)
            for step in loader:
                step.backward(lambda batch: (model(batch[0]) if run.rank else model[0](batch[0])).sum())
        elif what == "a parameter of nobody's":
            model, loader = run.prepare(model, data)
            mine = nn.Parameter(torch.ones(4))
            optimizer = torch.optim.SGD([*model.parameters(), mine], lr=0.1)
            for step in loader:
                step.backward(lambda batch: (model(batch[0]) * mine).sum())
                optimizer.step()
        else:
            model, loader = run.prepare(
                nn.Embedding(9, 4, sparse=True), DataLoader(torch.arange(16) % 9, batch_size=16)
            )
            for step in loader:
                step.backward(lambda batch: model(batch).sum())
    except (ConfigError, StepError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        run.close()
    return "nothing"


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("compiled first", "ConfigError: strategy='dp' can't replicate a model that torch.compile has compiled"),
        ("scripted", "can't replicate RecursiveScriptModule, which is TorchScript"),
        ("an optimizer in the backward", "0.weight has a hook that runs when its gradient is accumulated"),
        ("uneven BatchNorm", "waits in a BatchNorm for replica 0, which ended without it"),
        ("a parameter of nobody's", "steps 1 parameters that are in no model given to run.prepare"),
        ("sparse", "is sparse, and gradients are summed as dense ones"),
    ],
)
def test_what_is_refused(what: str, told: str, tmp_path: Path) -> None:
    (found,) = run_ranks(_refused, 1, str(tmp_path), what, replicas=REPLICAS, timeout_s=40)
    assert told in found


def _places(folder: str) -> dict[str, Any]:
    """Which cores and threads replicas have, that a left-out one does nothing, and that nothing of theirs is left."""
    model = nn.Linear(8, 3)
    threads = torch.get_num_threads()
    before = {thread.name for thread in threading.enumerate()}
    run = evenload.init(project_dir=folder, strategy="dp", balance=(10, 0))
    model, loader = run.prepare(
        model, DataLoader(TensorDataset(torch.randn(20, 8), torch.zeros(20).long()), batch_size=10)
    )
    seen: list[tuple[Any, ...]] = []
    in_backward: list[tuple[Any, ...]] = []  # the watch for coupled losses calls loss_fn too, after the loop body

    def loss_fn(batch: Any) -> Any:
        seen.append(
            (run.rank, sorted(os.sched_getaffinity(0)), torch.get_num_threads(), threading.current_thread().name)
        )
        return F.cross_entropy(model(batch[0]), batch[1])

    for step in loader:
        seen.clear()
        step.backward(loss_fn)
        in_backward += seen
        model.zero_grad()
        loader.planner.use(FixedProportions((4, 6)))
    run.close()
    after = {thread.name for thread in threading.enumerate()}
    return {"seen": in_backward, "left": after - before, "threads": (threads, torch.get_num_threads())}


def test_threads_and_cores(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    places = tuple(
        {"device": "cpu", "name": f"core {core}", "cores": [core], "num_threads": index + 1}
        for index, core in enumerate((cores[0], cores[-1]))
    )
    (found,) = run_ranks(_places, 1, str(tmp_path), replicas=places)
    assert found["seen"][0] == (0, [cores[0]], 1, "evenload-replica-0")
    assert sorted(found["seen"][1:]) == [
        (0, [cores[0]], 1, "evenload-replica-0"),
        (1, [cores[-1]], 2, "evenload-replica-1"),
    ]
    assert not found["left"] and found["threads"][0] == found["threads"][1]


def _alone_with(folder: str) -> tuple[Any, ...]:
    run = evenload.init(project_dir=folder, strategy="dp")
    model, loader = run.prepare(nn.Linear(4, 2), DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=8))
    for step in loader:
        step.backward(lambda batch: model(batch[0]).sum())
        model.zero_grad()
    run.close()
    return run.world_size, step.shares, (Path(folder) / "events.jsonl").read_text()


def test_one_device_is_one_replica_and_said_to_be(tmp_path: Path) -> None:
    """As under plain python, on a machine with one device."""
    if torch.cuda.device_count() > 1:
        pytest.skip("several GPUs here: they would all be used")
    ((world_size, shares, events),) = run_ranks(_alone_with, 1, str(tmp_path), device="auto", origin="alone")
    assert (world_size, shares) == (1, (8,))
    assert "strategy dp: there is one device" in events and "evenload run -d cpu:2 --strategy dp" in events


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        x, y = random_data(steps=3)[: 24 * 3 - 5]
        return iter(list(zip(x, y, strict=True)))


def _streaming(folder: str, strategy: str) -> torch.Tensor:
    torch.set_num_threads(1)
    torch.manual_seed(7)
    run = evenload.init(project_dir=folder, seed=3, strategy=strategy, balance=SHARES, micro_batch=6)
    model, loader = run.prepare(mlp().double(), DataLoader(Stream(), batch_size=24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        for step in loader:
            step.backward(plain(model))
            optimizer.step()
            optimizer.zero_grad()
    run.close()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_streams_and_a_ragged_end_are_those_of_ranks(tmp_path: Path) -> None:
    ranks = run_ranks(_streaming, 3, str(tmp_path / "ddp"), "ddp")
    (replicas,) = run_ranks(_streaming, 1, str(tmp_path / "dp"), "dp", replicas=REPLICAS)
    assert float((ranks[0] - replicas).norm() / replicas.norm()) <= 1e-12
