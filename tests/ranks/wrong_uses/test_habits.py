"""Habits from DDP, DeepSpeed, Keras and plain scripts, one row each, as in test_mistakes.py."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import functools
import io
import multiprocessing
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset

import evenload
from evenload.errors import ConfigError, EvenloadError
from evenload.records.folder_lock import LOCK_FILE
from tests.ranks.wrong_uses.jobs import IMPORTS, Job, evenload_run, script, told_by_ranks
from tests.ranks.wrong_uses.test_mistakes import HEAD_LINES, answer_to


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([torch.ones(4)] * 32)


class Missing(Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> None:
        return None


def _loop(job: Job, body: Callable[[Any], object]) -> None:
    for step in job.loader:
        body(step)


def _accumulate_and_checkpoint(job: Job) -> None:
    job.run.resume(model=job.model, optimizer=job.optimizer)
    for step in job.loader:
        step.backward(job.loss)
        if (step.index + 1) % 4 == 0:
            job.update()
        job.run.checkpoint(every="10min")


def _unpack(step: Any) -> None:
    _x, _y = step.batch


def _half(job: Job) -> None:
    job.model.half()
    job.train()


def _bf16(job: Job) -> None:
    job.model.to(torch.bfloat16)
    job.train()


def _train_with(job: Job, data: Any, **loader: Any) -> None:
    Job(job.run, data=data, **loader).train()


def _returning(job: Job, result: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    job.train(lambda batch: result(functional.mse_loss(job.model(batch[0]), batch[1]), job.model(batch[0])))


def _copied(job: Job) -> None:
    other = copy.deepcopy(job.model)
    job.train(lambda batch: functional.mse_loss(other(batch[0]), batch[1]))


def _iterate_model(job: Job) -> None:
    loader, _model = job.run.prepare(nn.Linear(4, 1), DataLoader(job.data, 16))
    for step in loader:
        step.backward(job.loss)


def _keep_tuple(job: Job) -> None:
    model = job.run.prepare(nn.Linear(4, 1), DataLoader(job.data, 16))
    job.train(lambda batch: functional.mse_loss(model(batch[0]), batch[1]))


def _close_in_the_loop(job: Job) -> None:
    for step in job.loader:
        job.run.close()
        step.backward(job.loss)


def _whole_checkpoint(job: Job) -> None:
    job.run.resume(model=job.model, optimizer=job.optimizer)
    job.train()
    job.run.checkpoint()
    job.model.load_state_dict(evenload.load_checkpoint("run"))


def _load_folder(job: Job) -> None:
    job.run.resume(model=job.model, optimizer=job.optimizer)
    job.train()
    job.run.checkpoint()
    torch.load(next(Path("run/checkpoints").iterdir()))


JOBS: dict[str, tuple[Callable[[Job], object], str]] = {
    "with model.no_sync()": (lambda job: job.model.no_sync(), "global batch of one optimizer step"),
    "model_engine.backward(loss)": (lambda job: job.model.backward(1), "step.backward(loss_fn)"),
    "model_engine.step()": (lambda job: job.model.step(), "optimizer.step(); optimizer.zero_grad()"),
    "model.save_checkpoint": (lambda job: job.model.save_checkpoint("x"), "run.checkpoint(every=...)"),
    "model.fit(x, y)": (lambda job: job.model.fit(1, 2), "there is no trainer"),
    "model.clip_grad_norm_": (lambda job: job.model.clip_grad_norm_(1.0), "torch.nn.utils.clip_grad_norm_"),
    "optimizer.backward(loss)": (lambda job: job.optimizer.backward(1), "step.backward(loss_fn)"),
    "optimizer.synchronize()": (lambda job: job.optimizer.synchronize(), "step.backward sums the gradients"),
    "optimizer.optimizer": (lambda job: job.optimizer.optimizer, "never wrapped"),
    "xb, yb = step.batch": (lambda job: _loop(job, _unpack), "the batch arrives in loss_fn"),
    "step.batch['x']": (lambda job: _loop(job, lambda step: step.batch["x"]), "the batch arrives in loss_fn"),
    "model(step.batch)": (lambda job: _loop(job, lambda step: job.model(step.batch)), "the batch arrives in loss_fn"),
    "step.batch.to(device)": (
        lambda job: _loop(job, lambda step: step.batch.to("cpu")),
        "the batch arrives in loss_fn",
    ),
    "accumulation with checkpoints": (_accumulate_and_checkpoint, "batch_size replaces gradient accumulation"),
    "model.half()": (_half, "convert the model before run.prepare"),
    "model.to(torch.bfloat16)": (_bf16, 'evenload.init(precision="bf16")'),
    "len(loader) of a stream": (
        lambda job: len(job.run.prepare(DataLoader(Endless(), 16))),
        "add a __len__ (the number of samples)",
    ),
    "DataLoader(sampler=BatchSampler)": (
        lambda job: job.run.prepare(DataLoader(job.data, 16, sampler=BatchSampler(range(64), 16, False))),
        "give it as batch_sampler=",
    ),
    "model.compile(optimizer=)": (lambda job: job.model.compile(optimizer="adam"), "there is no trainer"),
    "data_parallel(model)": (lambda job: evenload.data_parallel(job.model), "init(strategy='dp')"),  # type: ignore[call-arg]
    "a dict as dataset": (lambda job: _train_with(job, {"x": 1}), "a list of samples is one"),
    "a path as dataset": (lambda job: _train_with(job, "data/train"), "a list of samples is one"),
    "a generator as dataset": (lambda job: _train_with(job, (i for i in range(8))), "a list of samples is one"),
    "samples that are None": (lambda job: _train_with(job, Missing()), "is its return missing?"),
    "samples of unequal size": (
        lambda job: _train_with(job, [(torch.ones(3 + i % 2), torch.ones(1)) for i in range(32)]),
        "pad_sequence",
    ),
    "loss_fn returns nothing": (
        lambda job: _returning(job, lambda loss, out: None),
        "is its return statement missing?",
    ),
    "(loss, logits)": (lambda job: _returning(job, lambda loss, out: (loss, out)), "return the loss alone"),
    "(loss, a, b)": (lambda job: _returning(job, lambda loss, out: (loss, 1, 2)), "a dict with 'loss' and metrics"),
    "a copy in loss_fn": (_copied, "Use the model that run.prepare returned"),
    "loader, model = prepare(model, loader)": (_iterate_model, "in the same order: model, loader = run.prepare"),
    "run.close() in the loop": (_close_in_the_loop, "the run is over; close it last"),
    "model = prepare(model, loader)": (_keep_tuple, "in the same order: model, loader = run.prepare"),
    "SGD(model)": (lambda job: torch.optim.SGD(job.model, lr=0.1), "model.parameters()"),
    "any('False')": (lambda job: job.run.any("False"), "pass True, False or a comparison"),
    "count_tokens(floats)": (lambda job: evenload.count_tokens(torch.ones(4)), "expected integer labels"),
    "resume(optimizers=[...])": (lambda job: job.run.resume(optimizers=[job.optimizer]), "each by a name"),
    "resume(loader=loader)": (lambda job: job.run.resume(loader=job.loader), "position is included anyway"),
    "load_state_dict(load_checkpoint(run))": (_whole_checkpoint, "load_checkpoint('runs/name')['model']"),
    "torch.load of a checkpoint": (_load_folder, "load_checkpoint('runs/name')['model']"),
    "export(model)": (lambda job: job.run.export(job.model), "run.export('model.safetensors', model)"),
    "export to a folder": (lambda job: job.run.export("run"), "give the path of a file"),
    "breakpoint() without a terminal": (lambda job: _end_of_file(), "plain python train.py for breakpoint()"),
    "from evenload import prepare": (lambda job: exec("from evenload import prepare"), "run.prepare(model, loader)"),
    "import evenload.nn": (lambda job: exec("import evenload.nn"), "write import evenload"),
}


def _end_of_file() -> None:
    raise EOFError("EOF when reading a line")


@pytest.mark.parametrize("name", JOBS)
def test_a_mistake_in_the_script(init: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mistake, fix = JOBS[name]
    job = Job(init())
    with pytest.raises(Exception) as raised:
        mistake(job)
    assert fix in answer_to(raised.value), answer_to(raised.value)


@pytest.mark.parametrize("metric", [0.75, lambda loss: loss.item()])
def test_a_metric_in_place_of_the_weight(init: Any, metric: Any) -> None:
    job = Job(init())

    def loss_fn(batch: Any) -> Any:
        loss = job.loss(batch)
        return loss, metric(loss) if callable(metric) else metric

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job.train(loss_fn)
        named = [
            str(one.message) for one in caught if "return {'loss': loss, 'accuracy': accuracy}" in str(one.message)
        ]
        assert len(named) == 1
        job.train(lambda batch: (job.loss(batch), len(batch[0])))
    assert len(caught) == 1


def test_a_metric_logged_in_loss_fn(init: Any) -> None:
    job = Job(init())

    def loss_fn(batch: Any) -> torch.Tensor:
        loss = job.loss(batch)
        job.run.log({"loss": loss.detach()})
        return loss

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("once")
        job.train(loss_fn)
    assert any("log step.metrics" in str(one.message) and one.filename == __file__ for one in caught)


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "a bucket": ({"project_dir": "s3://bucket/run"}, "a folder of this machine"),
    "a folder in a file": ({"project_dir": "/proc/x"}, "set project_dir to a writable folder"),
    "16-bit flag": ({"precision": True}, "expected one of no, bf16, fp16"),
    "a class of DDP": ({"strategy": nn.parallel.DistributedDataParallel}, "expected one of ddp, dp, local, async"),
    "a timedelta": ({"timeout_s": __import__("datetime").timedelta(minutes=1)}, "expected seconds"),
    "tb": ({"loggers": "tb"}, "expected tensorboard, wandb, mlflow"),
    "dry_run": ({"dry_run": True}, "evenload run --dry-run train.py"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_mistake_in_a_setting(init: Any, name: str) -> None:
    settings, fix = SETTINGS[name]
    with pytest.raises(EvenloadError) as raised:
        init(**settings)
    assert fix in answer_to(raised.value), answer_to(raised.value)


def test_the_home_folder_is_meant_by_a_tilde(init: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    init(project_dir="~/runs/x")
    assert (tmp_path / "runs" / "x" / "events.jsonl").exists()


def _hold(path: str, ready: Any, end: Any) -> None:
    with Path(path).open("a+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        ready.set()
        end.wait(30)


def test_a_second_run_in_the_same_folder(init: Any, tmp_path: Path) -> None:
    init().close()
    context = multiprocessing.get_context("fork")
    ready, end = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(str(tmp_path / "run" / LOCK_FILE), ready, end))
    other.start()
    try:
        assert ready.wait(30)
        with pytest.raises(ConfigError, match=r"is in use by process .* set another project_dir") as raised:
            init()
        assert str(os.getpid()) in str(raised.value)  # it wrote the file last
    finally:
        end.set()
        other.join()
    init()


COMMANDS = {
    "run -d= train.py": "'' is not a device; expected auto",
    "run -d 2 train.py": "2 ranks on the CPU are cpu:2",
    "-d cpu:2 run train.py": "write: evenload run -d cpu:2 train.py",
    "run -n 2 train.py": "evenload run -d 0,1 train.py",
    "run job.sh": "is no Python script",
    "run torch.py": "rename it, to train.py",
    "run -c c.yaml train.py": 'precision = "bf16"',
    "submit job.yaml": "job files are TOML",
    "resume runs/x": "the commands are run",
}


@pytest.mark.parametrize("words", COMMANDS)
def test_a_mistake_on_the_command_line(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from evenload.cli.main import main

    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "torch.py", "job.sh", "c.yaml", "job.yaml"):
        (tmp_path / name).write_text("seed: 1\n")
    with pytest.raises(SystemExit) as ended:
        main([word.removesuffix("=") if word != "-d=" else "--devices=" for word in words.split()])
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in printed
    assert COMMANDS[words] in "\n".join(printed.splitlines()[:HEAD_LINES]), printed


# two ranks, in one set of processes


class Files(Dataset[Any]):
    """A list of samples, as image folders have."""

    def __init__(self, files: list[Any]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        return torch.ones(4), torch.ones(1)


def _prepare(run: Any, data: Any) -> None:
    run.prepare(nn.Linear(4, 1), DataLoader(data, 16))


def _shard_of_a_tensor(run: Any) -> None:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    _prepare(run, TensorDataset(x[run.rank :: run.world_size]))


def _shard_of_an_array(run: Any) -> None:
    import numpy as np

    data = Files([0] * 32)
    data.rows = np.arange(256.0).reshape(64, 4)[run.rank :: run.world_size]  # type: ignore[attr-defined]
    _prepare(run, data)


def _shard_of_files(run: Any) -> None:
    _prepare(run, Files([(f"/data-{run.rank}/{i}.png", 0) for i in range(64)][run.rank :: run.world_size]))


def _shard_of_a_list(run: Any) -> None:
    _prepare(run, [(torch.full((4,), i / 64), 0) for i in range(64)][run.rank :: run.world_size])


def _same_files_elsewhere(run: Any) -> str:
    _prepare(run, Files([(f"/data-{run.rank}/{i}.png", 0) for i in range(64)]))
    return "prepared"


def _unequal_epochs(run: Any) -> None:
    job = Job(run)
    for _ in range(1 + run.rank):
        job.train()


def _evaluates_on_main(run: Any) -> None:
    job = Job(run)
    if run.is_main:
        list(run.batches(DataLoader(job.data, 16)))
    job.train()


def _prepares_on_main(run: Any) -> None:
    if run.is_main:
        Job(run)
    run.barrier()


def _reduces_in_loss_fn(run: Any) -> None:
    job = Job(run)
    job.train(lambda batch: job.loss(batch) + run.reduce(0.0))


RANKS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "x[rank::world_size]": (_shard_of_a_tensor, "the dataset holds different values"),
    "array[rank::world_size]": (_shard_of_an_array, "the dataset holds different values"),
    "files[rank::world_size]": (_shard_of_files, "the dataset holds different values"),
    "samples[rank::world_size]": (_shard_of_a_list, "the dataset holds different values"),
    "the same files in another folder": (_same_files_elsewhere, "prepared"),
    "more epochs on one rank": (_unequal_epochs, "has a shorter loop than the others"),
    "run.batches on one rank": (_evaluates_on_main, "All ranks must call run.batches"),
    "run.reduce in loss_fn": (_reduces_in_loss_fn, "call it in the loop body, after step.backward(loss_fn)"),
    "run.prepare on one rank": (_prepares_on_main, "All ranks must call run.barrier and run.prepare"),
}


def _all_told(run: Any, folder: str) -> list[str]:
    run.close()
    told = []
    for index, (body, _) in enumerate(RANKS.values()):
        one = evenload.init(project_dir=f"{folder}/{index}", timeout_s=20.0)
        try:
            returned = str(body(one))
            one.close()
            told.append(returned)
        except EvenloadError as error:
            told.append(str(error))
            with contextlib.suppress(EvenloadError):
                one.close()  # while the error is handled, it waits for nobody
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    folder = tmp_path_factory.mktemp("runs")
    return told_by_ranks(functools.partial(_all_told, folder=str(folder)), folder)


@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_are_told(told: list[list[str]], name: str) -> None:
    for rank in told:
        assert RANKS[name][1] in rank[list(RANKS).index(name)], rank


FORKED = """
import torch.multiprocessing as mp
def train(rank):
    evenload.init(project_dir="run")
mp.start_processes(train, nprocs=1, start_method="fork")
"""
SCRIPTS: dict[str, tuple[str, str]] = {
    "mp.spawn in a rank": (IMPORTS + FORKED, "call the function itself, as train(), in place of mp.spawn"),
    "init_process_group before init": (
        IMPORTS + "torch.distributed.init_process_group('gloo')",
        "leave dist.init_process_group out",
    ),
    "get_rank before init": (IMPORTS + "torch.distributed.get_rank()", "evenload.init opens the process groups"),
    "sys.exit of all ranks": (script(begin="sys.exit('the data is missing')"), "the data is missing"),
    "an error in loss_fn": (script(loss="len(3)"), "object of type 'int' has no len()"),
    "an import": ("import torchh\n", "No module named 'torchh'"),
    "--fresh of this folder": (script(settings="").replace('"run"', '"."'), "set a project_dir of its own"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_two_ranks_answer_once(tmp_path: Path, name: str) -> None:
    text, fix = SCRIPTS[name]
    options = ("--fresh",) if "fresh" in name else ()
    ended = evenload_run(tmp_path, text, "-d", "cpu,cpu", *options)
    head = "\n".join(ended.stderr.splitlines()[:HEAD_LINES])
    assert ended.code == 1 and fix in head, ended.stderr
    assert ended.stderr.count("Traceback") <= 1 and "During handling" not in ended.stderr
    assert ended.stderr.count("the data is missing") <= 1
    frames = re.findall(r'File "([^"]*)"', ended.stderr)
    assert not any("evenload/training" in file for file in frames), ended.stderr
    if name == "an error in loss_fn":
        assert "len(3)" in ended.stderr and "whole traceback" in ended.stderr
        assert "micro_steps.py" in next((tmp_path / "run").glob("traceback-rank*.txt")).read_text()


def test_mp_spawn_without_ranks(tmp_path: Path) -> None:
    from tests.ranks.wrong_uses.jobs import command

    (tmp_path / "train.py").write_text(IMPORTS + FORKED)
    ended = command(tmp_path, "train.py", warm=True)
    assert ended.code == 1 and ended.stderr.startswith(
        "evenload: LaunchError: torch.multiprocessing.spawn started this"
    )
    assert "evenload.spawn(train, devices=" in ended.stderr.splitlines()[0]


UNGUARDED = script(loader=", num_workers=1, multiprocessing_context='spawn'")


def test_spawned_workers_of_a_script_without_a_guard(tmp_path: Path) -> None:
    ended = evenload_run(tmp_path, UNGUARDED, "-d", "cpu")
    head = "\n".join(ended.stderr.splitlines()[:HEAD_LINES])
    assert ended.code == 1 and "put the training under `if __name__ == '__main__':`" in head, ended.stderr
    assert ended.stderr.count("Traceback") <= 1, ended.stderr


def test_a_saved_run_is_no_file(init: Any) -> None:
    with pytest.raises(Exception) as raised:
        torch.save(Job(init()).loader, io.BytesIO())
    assert "save model.state_dict()" in answer_to(raised.value), answer_to(raised.value)
