"""Mistakes of a first week, one row each: the error has the fix in its first five lines, and no chained traceback."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.errors import EvenloadError
from evenload.training.launch.failure import describe_error
from tests.ranks.wrong_uses.jobs import Job, command, dataset, evenload_run, script

HEAD_LINES = 5


def answer_to(error: BaseException) -> str:
    """Check the report of an error, and return what a user reads first."""
    report = describe_error(error, 0, 0).text("cpu")
    assert report.count("Traceback (most recent call last)") <= 1, report
    assert "During handling" not in report and "direct cause" not in report, report
    return "\n".join(report.splitlines()[:HEAD_LINES])


def _loop(job: Job, body: Callable[[Any], object]) -> None:
    for step in job.loader:
        body(step)


def _labels() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,))), batch_size=16)


def _unpack(job: Job) -> None:
    for _x, _y in job.loader:
        pass


def _enumerate_unpack(job: Job) -> None:
    for _index, (_x, _y) in enumerate(job.loader):
        pass


def _nested(job: Job) -> None:
    for step in job.loader:
        job.step(step)
        for inner in job.loader:
            job.step(inner)


def _accumulate(job: Job) -> None:
    for index, step in enumerate(job.loader):
        step.backward(job.loss)
        if (index + 1) % 4 == 0:
            job.update()


def _never_zeroed(job: Job) -> None:
    for step in job.loader:
        step.backward(job.loss)
        job.optimizer.step()


def _scaler(job: Job) -> None:
    scaler = torch.amp.GradScaler("cpu")
    for step in job.loader:
        scaler.scale(step.backward(job.loss))
        scaler.step(job.optimizer)
        scaler.update()


def _second_loss_backward(job: Job) -> None:
    for step in job.loader:
        loss = step.backward(job.loss)
        loss.backward()


def _plain_backward(job: Job) -> None:
    for _step in job.loader:
        job.loss((torch.randn(2, 4), torch.randn(2, 1))).backward()


def _plain_loader(job: Job) -> None:
    for batch in DataLoader(job.data, batch_size=16):
        batch.backward(job.loss)


def _validate_by_prepared(job: Job) -> None:
    for _batch in job.run.batches(job.loader):
        pass


def _keep_a_step(job: Job) -> None:
    steps = [step for step, _ in zip(job.loader, range(2), strict=False)]
    steps[0].backward(job.loss)


def _checkpoint_path(job: Job) -> None:
    job.run.resume(model=job.model, optimizer=job.optimizer)
    job.run.checkpoint("model.pt")


def _unpack_prepare(job: Job) -> None:
    _model, _optimizer, _loader = job.run.prepare(nn.Linear(4, 1), DataLoader(job.data, batch_size=16))


def _second_process_group(job: Job) -> None:
    raise ValueError("trying to initialize the default process group twice!")


JOBS: dict[str, tuple[Callable[[Job], object], str]] = {
    "for x, y in loader": (_unpack, "for step in loader:"),
    "for i, (x, y) in enumerate(loader)": (_enumerate_unpack, "for step in loader:"),
    "model(step)": (lambda job: _loop(job, job.model), "for step in loader:"),
    "loss_fn(step)": (lambda job: _loop(job, lambda step: step.backward(job.loss(step))), "for step in loader:"),
    "step[0]": (lambda job: _loop(job, lambda step: step[0]), "for step in loader:"),
    "list(step)": (lambda job: _loop(job, list), "for step in loader:"),
    "torch.stack(step)": (lambda job: _loop(job, lambda step: torch.sum(step)), "for step in loader:"),
    "step.to(device)": (lambda job: _loop(job, lambda step: step.to("cpu")), "the batch arrives in loss_fn"),
    "step.x": (lambda job: _loop(job, lambda step: step.x), "the batch arrives in loss_fn"),
    "step.zero_grad()": (lambda job: _loop(job, lambda step: step.zero_grad()), "your own optimizer"),
    "step.loss": (lambda job: _loop(job, lambda step: step.loss), "step.backward(loss_fn) returns the loss"),
    "step.backwards": (lambda job: _loop(job, lambda step: step.backwards(job.loss)), "did you mean 'backward'?"),
    "step.backward()": (lambda job: _loop(job, lambda step: step.backward()), "step.backward(loss_fn), where"),
    "step.backward(loss)": (
        lambda job: _loop(job, lambda step: step.backward(torch.ones((), requires_grad=True))),
        "pass the function itself, without calling it: step.backward(loss_fn)",
    ),
    "step.backward(0.5)": (lambda job: _loop(job, lambda step: step.backward(0.5)), "pass the function itself"),
    "step.backward(None)": (lambda job: _loop(job, lambda step: step.backward(None)), "pass the function itself"),
    "step.backward(loss_fn, batch)": (
        lambda job: _loop(job, lambda step: step.backward(job.loss, (1, 2))),
        "step.backward(loss_fn), where",
    ),
    "loss.backward() after step.backward": (_second_loss_backward, "leave loss.backward() out"),
    "loss.backward() on a batch": (_plain_backward, "step.backward(loss_fn)"),
    "a plain loader": (_plain_loader, "model, loader = run.prepare(model, loader)"),
    "nested loops over one loader": (_nested, "one loop at a time"),
    "optimizer.step() every fourth step": (_accumulate, "batch_size"),
    "no zero_grad": (_never_zeroed, "zero_grad"),
    "GradScaler": (_scaler, 'precision="fp16"'),
    "loader[0]": (lambda job: job.loader[0], "for step in loader"),
    "len(next(iter(loader))[0])": (
        lambda job: len(next(iter(job.loader))[0]),
        "The size of a batch is loader.batch_size",
    ),
    "loader.sampler.set_epoch": (lambda job: job.loader.sampler.set_epoch(1), "each epoch has its own order"),
    "loader.set_epoch": (lambda job: job.loader.set_epoch(1), "each epoch has its own order"),
    "loader.num_workers": (lambda job: job.loader.num_workers, "from the DataLoader that run.prepare was given"),
    "run.batches(prepared loader)": (_validate_by_prepared, "pass a plain DataLoader"),
    "a step of before": (_keep_a_step, "call step.backward inside the loop body"),
    "model, opt, loader = prepare(model, loader)": (_unpack_prepare, "model, loader = run.prepare(model, loader)"),
    "init_process_group after init": (_second_process_group, "leave dist.init_process_group out"),
    "Run()": (lambda job: evenload.Run(), "run = evenload.init()"),
    "tracker()": (lambda job: job.run.tracker(), "run.tracker('wandb')"),
    "tracker(unknown)": (lambda job: job.run.tracker("wandb"), "init(loggers='wandb')"),
    "gather(lambda)": (lambda job: job.run.gather(lambda: 1), "pass tensors, arrays, numbers"),
    "barrier(name)": (lambda job: job.run.barrier("here"), "run.barrier()"),
    "prepare(optimizer)": (lambda job: job.run.prepare(job.optimizer), "optimizers and schedulers stay your own"),
    "resume(model, opt)": (lambda job: job.run.resume(job.model, job.optimizer), "run.resume(model=model, optimizer="),
    "resume({...})": (lambda job: job.run.resume({"model": job.model}), "run.resume(model=model, optimizer="),
    "resume(model=state_dict)": (lambda job: job.run.resume(model=job.model.state_dict()), "state_dict"),
    "resume(path)": (lambda job: job.run.resume("runs/x"), "run.resume(model=model, optimizer="),
    "prepare(model=model)": (
        lambda job: job.run.prepare(model=job.model),
        "model, loader = run.prepare(model, loader)",
    ),
    "checkpoint without resume": (lambda job: job.run.checkpoint(), "run.resume"),
    "checkpoint(path)": (_checkpoint_path, "10min"),
    "checkpoint(model, opt)": (
        lambda job: job.run.checkpoint(job.model, job.optimizer, 1, 2, 3, 4),
        "run.checkpoint(every=",
    ),
    "export()": (lambda job: job.run.export(), "run.export('model.safetensors')"),
    "log(loss=1)": (lambda job: job.run.log(loss=1), "run.log({'loss': loss"),
    "log('loss', 1)": (lambda job: job.run.log("loss", 1), "run.log({'loss': loss"),
    "log({'loss': loss}, step=3)": (lambda job: job.run.log({"loss": 1}, step=3), "the step is known"),
    "log(0.5)": (lambda job: job.run.log(0.5), "run.log({'loss': loss"),
    "log({'loss': '0.5'})": (lambda job: job.run.log({"loss": "0.5"}), "log it without formatting it"),
    "log({'losses': losses})": (lambda job: job.run.log({"losses": torch.ones(4)}), "x.mean()"),
    "any()": (lambda job: job.run.any(), "if run.any(flag): break"),
    "reduce(x, 'avg')": (lambda job: job.run.reduce(1.0, "avg"), "mean"),
    "reduce([text])": (lambda job: job.run.reduce(["a"]), "run.gather"),
    "gather(a, b)": (lambda job: job.run.gather(1, 2), "run.gather((predictions, labels))"),
    "group(0, 1)": (lambda job: job.run.group(0, 1), "run.group([0, 1])"),
    "batches()": (lambda job: job.run.batches(), "for batch in run.batches(val_loader)"),
    "batches(dataset)": (lambda job: job.run.batches(job.data), "DataLoader"),
    "prepare(dataset)": (lambda job: job.run.prepare(job.data), "DataLoader"),
    "prepare([model, loader])": (lambda job: job.run.prepare([job.model]), "run.prepare takes models and DataLoaders"),
    "prepare(loss module)": (lambda job: job.run.prepare(nn.MSELoss()), "use it as it is"),
    "run.backward(loss)": (lambda job: job.run.backward(1), "step.backward(loss_fn)"),
    "run.accumulate(model)": (lambda job: job.run.accumulate(job.model), "global batch"),
    "run.gather_for_metrics": (lambda job: job.run.gather_for_metrics(1), "run.gather(x)"),
    "run.wait_for_everyone()": (lambda job: job.run.wait_for_everyone(), "run.barrier()"),
    "run.is_main_process": (lambda job: job.run.is_main_process, "if run.is_main:"),
    "run.is_global_zero": (lambda job: job.run.is_global_zero, "if run.is_main:"),
    "run.num_processes": (lambda job: job.run.num_processes, "run.world_size"),
    "run.global_rank": (lambda job: job.run.global_rank, "run.rank"),
    "run.unwrap_model": (lambda job: job.run.unwrap_model(job.model), "the model stays your own object"),
    "run.save_state": (lambda job: job.run.save_state("x"), "run.checkpoint("),
    "run.load_state": (lambda job: job.run.load_state("x"), "run.resume("),
    "run.clip_grad_norm_": (lambda job: job.run.clip_grad_norm_(None, 1), "torch.nn.utils.clip_grad_norm_"),
    "run.autocast()": (lambda job: job.run.autocast(), 'precision="bf16"'),
    "run.no_sync": (lambda job: job.run.no_sync(job.model), "leave it out"),
    "run.setup(model)": (lambda job: job.run.setup(job.model), "run.prepare(model, loader)"),
    "run.setup_dataloaders": (lambda job: job.run.setup_dataloaders(1), "run.prepare(model, loader)"),
    "run.all_reduce": (lambda job: job.run.all_reduce(1), "run.reduce(x)"),
    "run.all_gather": (lambda job: job.run.all_gather(1), "run.gather(x)"),
    "run.main_process_first": (lambda job: job.run.main_process_first(), "run.main_first()"),
    "run.get_tracker": (lambda job: job.run.get_tracker("wandb"), "run.tracker("),
    "run.log_dict": (lambda job: job.run.log_dict({}), "run.log("),
    "run.init_trackers": (lambda job: job.run.init_trackers("x"), "init(loggers="),
    "run.fit(model)": (lambda job: job.run.fit(job.model), "there is no trainer"),
    "run.register_for_checkpointing": (lambda job: job.run.register_for_checkpointing(1), "run.resume("),
    "run.skip_first_batches": (lambda job: job.run.skip_first_batches(1), "run.resume restores the position"),
    "run.seed_everything": (lambda job: job.run.seed_everything(1), "init(seed="),
    "run.chekpoint": (lambda job: job.run.chekpoint(), "did you mean 'checkpoint'?"),
    "run.devise": (lambda job: job.run.devise, "did you mean 'device'?"),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_mistake_in_the_script(init: Any, name: str) -> None:
    mistake, fix = JOBS[name]
    job = Job(init())
    with pytest.raises((EvenloadError, AttributeError, RuntimeError, ValueError)) as raised:
        mistake(job)
    assert fix in answer_to(raised.value), answer_to(raised.value)


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "mixed_precision": ({"mixed_precision": "bf16"}, 'precision="bf16"'),
    "gradient_accumulation_steps": ({"gradient_accumulation_steps": 4}, "global batch"),
    "accumulate_grad_batches": ({"accumulate_grad_batches": 4}, "global batch"),
    "batch_size": ({"batch_size": 4}, "set batch_size on the DataLoader"),
    "devices": ({"devices": 2}, "evenload run -d 0,1 train.py"),
    "accelerator": ({"accelerator": "gpu"}, "evenload run -d 0,1 train.py"),
    "num_nodes": ({"num_nodes": 2}, "evenload run --nodes 2"),
    "log_with": ({"log_with": "wandb"}, 'loggers="tensorboard"'),
    "output_dir": ({"output_dir": "x"}, "project_dir="),
    "max_epochs": ({"max_epochs": 3}, "stay in your script"),
    "lr": ({"lr": 0.1}, "stay your own"),
    "gradient_clip_val": ({"gradient_clip_val": 1.0}, "clip_grad_norm_"),
    "backend": ({"backend": "nccl"}, "leave it out"),
    "find_unused_parameters": ({"find_unused_parameters": True}, "leave it out"),
    "fresh": ({"fresh": True}, "evenload run --fresh train.py"),
    "a typo": ({"presision": "bf16"}, "did you mean 'precision'?"),
    "another typo": ({"project_dri": "x"}, "did you mean 'project_dir'?"),
    "something else": ({"zzz": 1}, "the settings are"),
    "bf16-mixed": ({"precision": "bf16-mixed"}, "write precision='bf16'"),
    "torch.bfloat16": ({"precision": torch.bfloat16}, "write precision='bf16'"),
    "32-true": ({"precision": "32-true"}, "leave it out"),
    "ddp_spawn": ({"strategy": "ddp_spawn"}, "write 'ddp'"),
    "strategy typo": ({"strategy": "ddpp"}, "did you mean 'ddp'?"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_mistake_in_a_setting(init: Any, name: str) -> None:
    settings, fix = SETTINGS[name]
    with pytest.raises(EvenloadError) as raised:
        init(**settings)
    assert fix in answer_to(raised.value), answer_to(raised.value)


def test_settings_by_position() -> None:
    with pytest.raises(EvenloadError) as raised:
        evenload.init("runs/x")
    assert "evenload.init(project_dir='runs/name'" in answer_to(raised.value)


PACKAGE = {
    "Accelerator": "run = evenload.init()",
    "Fabric": "run = evenload.init()",
    "prepare": "run.prepare(model, loader)",
    "DistributedDataParallel": "run.prepare(model, loader)",
    "launch": "evenload run train.py",
    "seed_everything": "evenload.init(seed=...)",
    "is_main": "run.is_main",
    "barrier": "run.barrier",
    "spwan": "did you mean 'spawn'?",
    "count_token": "did you mean 'count_tokens'?",
}


@pytest.mark.parametrize("name", PACKAGE)
def test_a_name_that_the_package_does_not_have(name: str) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(evenload, name)
    assert PACKAGE[name] in answer_to(raised.value)


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"ignore_index": 2}, r"mean over \d+ of 16 labels \(ignore_index=2, .*\(labels != 2\).sum\(\)"),
        ({"weight": torch.tensor([1.0, 2.0, 3.0])}, r"class_weights\[labels\].sum\(\)"),
    ],
)
def test_a_mean_over_other_units_than_samples(init: Any, kwargs: dict[str, Any], expected: str) -> None:
    run = init()
    model, loader = run.prepare(nn.Linear(4, 3), _labels())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in loader:
            step.backward(lambda batch: functional.cross_entropy(model(batch[0]), batch[1], **kwargs))
            model.zero_grad()
    messages = [str(warning.message) for warning in caught if "loss_fn returned no weight" in str(warning.message)]
    assert len(messages) == 1 and re.search(expected, messages[0])


@pytest.mark.parametrize(
    ("loss_of", "is_named"),
    [
        (lambda out, y: functional.cross_entropy(out, y, reduction="sum"), True),
        (lambda out, y: functional.cross_entropy(out, y, reduction="sum") + out.square().mean(), True),
        (lambda out, y: functional.cross_entropy(out, y, reduction="sum") / len(y), False),
        (lambda out, y: functional.cross_entropy(out, y) + 0.1 * out.square().mean(), False),
        (lambda out, y: (functional.cross_entropy(out, y, reduction="sum") / len(y), len(y)), False),
    ],
)
def test_a_sum_over_a_part_of_the_batch(init: Any, loss_of: Callable[..., Any], is_named: bool) -> None:
    run = init()
    model, loader = run.prepare(nn.Linear(4, 3), _labels())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in loader:
            step.backward(lambda batch: loss_of(model(batch[0]), batch[1]))
            model.zero_grad()
    named = [warning for warning in caught if "the loss is a sum over a part of the batch" in str(warning.message)]
    assert len(named) == is_named


def test_gradients_removed_before_the_optimizer(init: Any, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(init())
    for step in job.loader:
        step.backward(job.loss)
        job.optimizer.zero_grad()
        job.optimizer.step()
    assert capsys.readouterr().out.count("NOTHING IS TRAINED") == 1


def test_a_loop_without_an_optimizer(init: Any, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(init(), data=dataset(320))
    for step in job.loader:
        step.backward(job.loss)
        job.optimizer.zero_grad()
    assert (
        capsys.readouterr().out.count("NOTHING IS TRAINED: no weight has changed in 10 steps; call optimizer.step()")
        == 1
    )


def test_a_model_left_in_evaluation_mode(init: Any, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(init(), model=nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 1)))
    job.train()
    assert "evaluation mode" not in capsys.readouterr().out
    job.model.eval()
    job.train()
    job.train()
    printed = capsys.readouterr().out
    assert printed.count("trains in evaluation mode: Dropout does not act as in training; call model.train()") == 1


@pytest.mark.parametrize("where", ["loop body", "loss_fn"])
def test_a_loop_body_that_trains_and_evaluates(init: Any, capsys: pytest.CaptureFixture[str], where: str) -> None:
    """The script of GCN evaluates after each step, in its loop body, and calls train() in the next."""
    job = Job(init(), model=nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 1)))
    job.model.eval()

    def loss(batch: Any) -> Any:
        if where == "loss_fn":
            job.model.train()
        return job.loss(batch)

    for _ in range(2):
        for step in job.loader:
            if where == "loop body":
                job.model.train()
            step.backward(loss)
            job.optimizer.step()
            job.optimizer.zero_grad()
            job.model.eval()
    assert "evaluation mode" not in capsys.readouterr().out


def test_a_mean_over_all_samples_is_fine(init: Any) -> None:
    run = init()
    model, loader = run.prepare(nn.Linear(4, 3), _labels())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in loader:
            step.backward(lambda batch: functional.cross_entropy(model(batch[0]), batch[1], ignore_index=7))
            model.zero_grad()


def test_all_errors_are_names_of_the_package() -> None:
    from evenload import errors

    for name in ("RankFailedError", "ConfigError", "StepError", "CheckpointError", "LaunchError", "PeerLostError"):
        assert getattr(evenload, name) is getattr(errors, name)
    assert len([name for name in evenload.__all__ if not name.startswith("__")]) <= 20


def test_shares_that_do_not_sum_to_the_batch_are_proportions(init: Any) -> None:
    job = Job(init(balance=(3,)), data=dataset(32))
    assert [step.shares for step in job.loader if job.step(step) is not None] == [(16,), (16,)]


COMMANDS = {
    "rum train.py": "did you mean 'run'?",
    "sbumit -- python x.py": "did you mean 'submit'?",
    "train.py": "evenload run train.py",
    "launch train.py": "evenload run train.py",
    "squeue": "evenload ps",
    "-d cpu,cpu train.py": "evenload run -d cpu,cpu train.py",
    "run": "evenload run train.py",
    "run nope.py": "scripts in that folder: plain.py, train.py",
    "run --mixed-precision bf16 train.py": "did you mean --precision?",
    "run --precison bf16 train.py": "did you mean --precision?",
    "run --gpus 2 train.py": "evenload run -d 0,1 train.py",
    "run --num_processes 2 train.py": "evenload run -d 0,1 train.py",
    "run --gradient_accumulation_steps 2 train.py": "batch_size is the global batch",
    "run --zzz train.py": "evenload run --help lists all",
    "run plain.py -d cpu,cpu": "evenload run -d cpu,cpu plain.py",
    "run plain.py --precision=bf16": "evenload run --precision=bf16 plain.py",
    "run -d tpu train.py": "expected auto, all, cpu",
    "run --precision 16-mixed train.py": "precision='fp16'",
    "run -c wrong.toml train.py": "did you mean 'precision'?",
    "verify --balence 3,1 train.py": "did you mean --balance?",
    "submit train.py": "evenload submit -- evenload run train.py",
}


@pytest.mark.parametrize("words", COMMANDS)
def test_a_mistake_on_the_command_line(
    words: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from evenload.cli.main import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import argparse\n")
    (tmp_path / "plain.py").write_text("import torch\n")
    (tmp_path / "wrong.toml").write_text("precison = 'bf16'\n")
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in printed
    assert COMMANDS[words] in "\n".join(printed.splitlines()[:HEAD_LINES]), printed


CHAINED = """
try:
    {}["missing"]
except KeyError as error:
    raise ValueError("the config has no such key") from error
"""


@pytest.mark.parametrize(
    ("pieces", "fix", "line"),
    [
        ({"begin": "x, y = step"}, "for step in loader:", "x, y = step"),
        ({"begin": CHAINED}, "the config has no such key", 'raise ValueError("the config has no such key")'),
        ({"begin": "run.wait_for_everyone()"}, "write run.barrier()", "run.wait_for_everyone()"),
        (
            {"prepared": "run.resume(model, optimizer)"},
            "run.resume(model=model, optimizer=",
            "run.resume(model, optimizer)",
        ),
    ],
)
def test_two_ranks_answer_once_at_the_users_line(tmp_path: Any, pieces: dict[str, str], fix: str, line: str) -> None:
    ended = evenload_run(tmp_path, script(**pieces), "-d", "cpu,cpu")
    assert ended.code == 1 and fix in "\n".join(ended.stderr.splitlines()[:HEAD_LINES]), ended.stderr
    assert ended.stderr.count("Traceback") == 1 and line in ended.stderr and "evenload/training" not in ended.stderr
    assert "During handling" not in ended.stderr and "direct cause" not in ended.stderr
    if "missing" in pieces.get("begin", ""):
        assert "caused by KeyError: 'missing'" in ended.stderr and "whole traceback" in ended.stderr
        assert "direct cause" in next((tmp_path / "run").glob("traceback-rank*.txt")).read_text()


def test_a_single_process_answers_with_the_message_first(tmp_path: Any) -> None:
    (tmp_path / "train.py").write_text(script(begin="x, y = step"))
    ended = command(tmp_path, "train.py")
    assert ended.code == 1 and ended.stderr.startswith(
        "evenload: the script failed at step 0: StepError: a prepared loader"
    )
    assert (
        ended.stderr.count("Traceback") == 1 and "x, y = step" in ended.stderr and "training/step" not in ended.stderr
    )
