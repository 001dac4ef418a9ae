"""Further mistakes of a first week, one row each, as in test_mistakes.py."""

from __future__ import annotations

import io
import itertools
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import evenload
from evenload.errors import EvenloadError
from tests.ranks.wrong_uses.jobs import Job, dataset, evenload_run, script
from tests.ranks.wrong_uses.test_mistakes import HEAD_LINES, answer_to


def _loop(job: Job, body: Callable[[Any], object]) -> None:
    for step in job.loader:
        body(step)


def _with_model(job: Job) -> None:
    _loop(job, lambda step: step.backward(lambda model, batch: job.loss(batch)))


def _with_pair(job: Job) -> None:
    _loop(job, lambda step: step.backward(lambda x, y: functional.mse_loss(job.model(x), y)))


def _cycle(job: Job) -> None:
    for _index, step in zip(range(12), itertools.cycle(job.loader), strict=False):
        job.step(step)


def _schedule_in_loss_fn(job: Job) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 1)

    def loss_fn(batch: Any) -> torch.Tensor:
        scheduler.step()
        return job.loss(batch)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch sees only that no optimizer has stepped
        job.train(loss_fn)


def _short_schedule(job: Job) -> None:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(job.optimizer, 0.1, total_steps=1)
    for step in job.loader:
        job.step(step)
        scheduler.step()


def _lambda_in_workers(job: Job) -> None:
    collate = lambda samples: torch.utils.data.default_collate(samples)  # noqa: E731
    loader = DataLoader(job.data, 16, num_workers=1, collate_fn=collate, multiprocessing_context="spawn")
    _, job.loader = job.run.prepare(nn.Linear(4, 1), loader)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own words for it
        job.train()


def _features_before(job: Job) -> None:
    weight = job.model.weight.square()
    for step in job.loader:
        step.backward(lambda batch: functional.linear(batch[0], weight).square().mean())
        job.update()


def _checkpoint_in_loss_fn(job: Job) -> None:
    job.run.resume(model=job.model, optimizer=job.optimizer)

    def loss_fn(batch: Any) -> torch.Tensor:
        job.run.checkpoint()
        return job.loss(batch)

    job.train(loss_fn)


def _every_tenth(job: Job) -> None:
    _loop(job, lambda step: step % 10 == 0)


def _main_first(job: Job) -> None:
    with job.run.main_first:
        pass


def _with_run(job: Job) -> None:
    with job.run:
        pass


def _set_device(job: Job) -> None:
    job.run.device = torch.device("cuda")


def _set_batch_size(job: Job) -> None:
    job.loader.batch_size = 8


def _own_optimizer(job: Job) -> None:
    optimizer = torch.optim.SGD(nn.Linear(4, 1).parameters(), lr=0.1)
    for step in job.loader:
        step.backward(job.loss)
        optimizer.step()
        optimizer.zero_grad()


def _checkpoint(job: Job, **options: Any) -> None:
    job.run.resume(model=job.model, optimizer=job.optimizer)
    for step in job.loader:
        job.step(step)
        job.run.checkpoint(**options)


def _is_main(run: evenload.Run) -> None:
    run.is_main()  # type: ignore[operator]


JOBS: dict[str, tuple[Callable[[Job], object], str]] = {
    "loss_fn(model, batch)": (_with_model, "def loss_fn(batch): x, y = batch"),
    "loss_fn(x, y)": (_with_pair, "def loss_fn(batch): x, y = batch"),
    "loss_fn()": (lambda job: _loop(job, lambda step: step.backward(lambda: 1)), "def loss_fn(batch): x, y = batch"),
    "step.backward(model)": (lambda job: _loop(job, lambda step: step.backward(job.model)), "def loss_fn(batch)"),
    "step.backward(criterion)": (
        lambda job: _loop(job, lambda step: step.backward(nn.MSELoss())),
        "def loss_fn(batch)",
    ),
    "async def loss_fn": (
        lambda job: _loop(job, lambda step: step.backward(lambda batch: (one for one in batch))),
        "return a loss, (loss, weight), or a dict",
    ),
    "loss.item() in loss_fn": (
        lambda job: _loop(job, lambda step: step.backward(lambda batch: job.loss(batch).item())),
        "return a loss, (loss, weight), or a dict",
    ),
    "retain_graph=True": (
        lambda job: _loop(job, lambda step: step.backward(job.loss, retain_graph=True)),
        "step.backward(loss_fn), where",
    ),
    "scheduler.step() in loss_fn": (_schedule_in_loss_fn, "in the loop body, after optimizer.step()"),
    "OneCycleLR(total_steps=1)": (_short_schedule, "total_steps=epochs * len(loader)"),
    "a lambda in workers that are spawned": (_lambda_in_workers, "as a def at the top of the file instead of a lambda"),
    "features computed before loss_fn": (_features_before, "compute what it uses of the model inside loss_fn"),
    "step.batch[0]": (lambda job: _loop(job, lambda step: job.model(step.batch[0])), "the batch arrives in loss_fn"),  # type: ignore[index]
    "torch.save(run)": (lambda job: torch.save({"run": job.run}, io.BytesIO()), "save model.state_dict()"),
    "any(several flags)": (lambda job: job.run.any(torch.ones(2)), "run.any(flags.any())"),
    "checkpoint in loss_fn": (_checkpoint_in_loss_fn, "at the end of the loop body"),
    "resume()": (lambda job: job.run.resume(), "run.resume(model=model, optimizer=optimizer)"),
    "resume(epoch=0)": (lambda job: job.run.resume(epoch=0), "run.checkpoint(values={'epoch': epoch})"),
    "export('model.onnx')": (lambda job: job.run.export("model.onnx"), "torch.onnx.export"),
    "count_tokens([1])": (lambda job: evenload.count_tokens([1]), "batch['labels']"),  # type: ignore[arg-type]
    "itertools.cycle(loader)": (_cycle, "loop over the epochs"),
    "step % 10": (_every_tenth, "step.index % 100"),
    "len(step)": (lambda job: _loop(job, len), "step.index"),
    "next(step)": (lambda job: _loop(job, next), "step.index"),
    "x, y = next(iter(loader))": (lambda job: [(x, y) for x, y in [next(iter(job.loader))]], "for step in loader:"),
    "model.module": (lambda job: job.model.module, "leave .module out"),
    "os.environ['LOCAL_RANK']": (lambda job: os.environ["LOCAL_RANK"], "run.rank, run.world_size, run.device"),
    "x.cuda()": (
        lambda job: _loop(job, lambda step: step.backward(lambda batch: job.model(batch[0].cuda()).mean())),
        "leave .cuda() out",
    ),
    "run.is_main()": (lambda job: _is_main(job.run), "write it without ()"),
    "with run.main_first:": (_main_first, "with run.main_first():"),
    "with run:": (_with_run, "without `with`"),
    "run(model)": (lambda job: job.run(job.model), "run.prepare(model, loader)"),
    "run.device = cuda": (_set_device, "device is read only; devices are named by evenload run -d"),
    "loader.batch_size = 8": (_set_batch_size, "on the DataLoader before run.prepare"),
    "len(run.batches(loader))": (
        lambda job: len(job.run.batches(DataLoader(job.data))),  # type: ignore[arg-type]
        "len(val_loader)",
    ),
    "batches(iter(loader))": (
        lambda job: job.run.batches(iter(DataLoader(job.data))),
        "expected a torch.utils.data.DataLoader",
    ),
    "prepare(iter(loader))": (lambda job: job.run.prepare(iter(DataLoader(job.data))), "Pass the DataLoader itself"),
    "prepare(loss_fn)": (lambda job: job.run.prepare(job.loss), "step.backward(loss_fn)"),
    "prepare(model, device=)": (lambda job: job.run.prepare(job.model, device="cuda"), "run.prepare(model, loader)"),
    "export(model, path)": (lambda job: job.run.export(job.model, "x.pt"), "run.export(path, model)"),
    "an optimizer of another model": (_own_optimizer, "of the model that run.prepare returned"),
    "load_checkpoint(nothing)": (lambda job: evenload.load_checkpoint("runs/nope"), "there is no folder runs/nope"),
    "checkpoint(every='10 minutes')": (lambda job: _checkpoint(job, every="10 minutes"), "expected '10min'"),
    "checkpoint(best='val_loss')": (lambda job: _checkpoint(job, best="val_loss"), "best=('val_loss', 'min')"),
    "checkpoint(values=[1])": (lambda job: _checkpoint(job, values=[1]), "values={'best_loss': best}"),
    "drop_last of a small dataset": (
        lambda job: job.run.prepare(nn.Linear(4, 1), DataLoader(dataset(8), batch_size=16, drop_last=True)),
        "set a batch_size of at most 8",
    ),
    "log(several images)": (
        lambda job: job.run.log({"x": torch.rand(4, 3, 8, 8)}),
        "an image (channels, height, width)",
    ),
    "log({'a': {'b': 1}})": (lambda job: job.run.log({"a": {"b": 1}}), "expected a number"),
    "reduce(function)": (lambda job: job.run.reduce(job.loss), "it takes numbers, tensors"),
    "reduce(group=[0])": (lambda job: job.run.reduce(1, group=[0]), "expected what run.group returned"),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_mistake_in_the_script(init: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    mistake, fix = JOBS[name]
    job = Job(init())
    with pytest.raises(Exception) as raised:
        mistake(job)
    assert fix in answer_to(raised.value), answer_to(raised.value)


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "batch": ({"batch": 4}, "set batch_size on the DataLoader"),
    "fsdp2": ({"strategy": "fsdp2"}, "expected one of ddp, dp, local, async"),
    "zero": ({"strategy": "zero"}, "evenload.place splits a model"),
    "balance as parts": ({"balance": [0.5, 0.5]}, "such as (3, 1)"),
    "balance as text": ({"balance": "3:1"}, "such as 24,6,2"),
    "num_workers": ({"num_workers": 4}, "DataLoader(num_workers=4)"),
    "seed as text": ({"seed": "0"}, "expected an integer"),
    "a timeout without end": ({"timeout_s": 1e30}, "expected seconds, more than 0, at most 1e9"),
    "dataset_rng": ({"dataset_rng": False}, "expected one of keyed, off"),
    "a folder with a zero byte": ({"project_dir": "runs\0first"}, "expected a folder"),
    "multi_gpu": ({"multi_gpu": True}, "evenload run -d 0,1 train.py"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_mistake_in_a_setting(init: Any, name: str) -> None:
    settings, fix = SETTINGS[name]
    with pytest.raises(EvenloadError) as raised:
        init(**settings)
    assert fix in answer_to(raised.value) and "own dtype" not in answer_to(raised.value), answer_to(raised.value)


COMMANDS = {
    "run python train.py": "leave it out, each rank is a python: evenload run train.py",
    "run -m train.py": "write `evenload run train.py` for the file",
    "run -d cpu 2 train.py": "-d cpu:2",
    "run -d cuda train.py": "leave -d out for all GPUs",
    "run --multi_gpu train.py": "evenload run -d 0,1 train.py",
    "run --use_cpu train.py": "(or -d cpu,cpu)",
    "run --timeout-s 60 train.py": "evenload.init(timeout_s=...)",
    "run notes.ipynb": "evenload.spawn(train, devices='cpu:2')",
    "run .": "give the script in it",
    "run --resume train.py": "run.resume(model=model",
    "run -d cpu:2 --throttle 50%,100% train.py": "such as 1,0.5",
    "run --nodes 2 train.py": "--host is missing",
    "export nope x.pt": "there is no folder nope",
    "show nope": "give the project_dir of a run",
    "help": "evenload --help",
}


@pytest.mark.parametrize("words", COMMANDS)
def test_a_mistake_on_the_command_line(
    words: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from evenload.cli.main import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import argparse\n")
    (tmp_path / "notes.ipynb").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in printed
    assert COMMANDS[words] in "\n".join(printed.splitlines()[:HEAD_LINES]), printed


@pytest.mark.parametrize(
    ("pieces", "fix"),
    [
        ({"loss": "x.cuda()"}, "leave .cuda() out"),
        ({"end": "if run.is_main: run.gather(loss)"}, "run.gather"),
    ],
)
def test_two_ranks_answer_once(tmp_path: Any, pieces: dict[str, str], fix: str) -> None:
    ended = evenload_run(tmp_path, script(**pieces), "-d", "cpu,cpu")
    assert ended.code == 1 and fix in "\n".join(ended.stderr.splitlines()[:HEAD_LINES]), ended.stderr
    assert ended.stderr.count("Traceback") <= 1


EPOCH_LOOPS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "from 0": (lambda loader: range(3), True),
    "from the epoch": (lambda loader: range(loader.epoch, 3), False),
    "until an epoch": (lambda loader: itertools.takewhile(lambda _: loader.epoch < 3, itertools.count()), False),
    "until an epoch, looked at last": (
        lambda loader: itertools.takewhile(lambda index: not index or loader.epoch < 3, itertools.count()),
        False,
    ),
    "one epoch": (lambda loader: range(1), False),
}


@pytest.mark.parametrize("name", EPOCH_LOOPS)
def test_a_resumed_loop_that_counts_epochs_from_0(name: str, init: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for interrupted in (True, False):
        run = init()
        job = Job(run)
        run.resume(model=job.model, optimizer=job.optimizer)
        for _ in range(1) if interrupted else EPOCH_LOOPS[name][0](job.loader):
            job.train()
        run.close()
        assert not interrupted or "loader.epoch" not in capsys.readouterr().out
    text = "RESUMED AT EPOCH 1, NOW IN EPOCH 2, and the script has never read loader.epoch"
    assert (text in capsys.readouterr().out) == EPOCH_LOOPS[name][1]
