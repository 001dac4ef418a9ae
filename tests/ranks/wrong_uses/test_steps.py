"""Wrong loss functions and wrong loops, in the step that shows them."""

import math
import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from evenload.errors import NonFiniteError, StepError
from tests.ranks.wrong_uses.jobs import Job, dataset, told_by_ranks


def _step_error(text):
    return pytest.raises(StepError, match=re.escape(text))


LOSSES = {
    "not a scalar": (lambda job, b: job.model(b[0]), "the loss has shape (16, 1); return a scalar"),
    "a float": (
        lambda job, b: job.loss(b).item(),
        "loss_fn returned a float; return a loss, (loss, weight), or a dict",
    ),
    "nothing": (lambda job, b: None, "loss_fn returned a NoneType; return a loss"),
    "a list": (lambda job, b: [job.loss(b), 2], "loss_fn returned a list; return a loss"),
    "three values": (lambda job, b: (job.loss(b), 2, 3), "loss_fn returned 3 values; return a loss, (loss, weight)"),
    "a pair with a float loss": (lambda job, b: (1.5, 2), "the loss is a float, not a tensor; don't call .item()"),
    "a dict without loss": (lambda job, b: {"los": job.loss(b)}, "a mapping without 'loss' (its keys: los)"),
    "a dict with a vector": (
        lambda job, b: {"loss": job.loss(b), "logits": job.model(b[0])},
        "loss_fn's dict holds 'logits', which is a tensor of shape (16, 1); beside 'loss' and 'weight'",
    ),
    "a dict with a text": (lambda job, b: {"loss": job.loss(b), "note": "good"}, "'note', which is a str"),
    "no graph": (lambda job, b: torch.ones(()), "the loss does not depend on any trainable parameter"),
    "detached": (lambda job, b: job.loss(b).detach(), "computed under torch.no_grad, detached"),
    "a vector of weights": (
        lambda job, b: (job.loss(b), torch.ones(2)),
        "the weight has shape (2,); return one number",
    ),
    "a text as weight": (lambda job, b: (job.loss(b), "2"), "the weight is a str; return one number"),
    "a negative weight": (lambda job, b: (job.loss(b), -2), "the weight is -2; it must be finite and at least 0"),
    "a negative tensor": (lambda job, b: (job.loss(b), torch.tensor(-2)), "the weight is -2; it must be finite"),
    "a NaN weight": (lambda job, b: (job.loss(b), torch.tensor(math.nan)), "the weight is nan; it must be finite"),
    "an infinite weight": (lambda job, b: (job.loss(b), math.inf), "the weight is inf; it must be finite"),
    "no weight at all": (lambda job, b: (job.loss(b), 0), "step 0: all weights are 0, so the mean loss"),
    "its own backward": (
        lambda job, b: job.loss(b).backward(),
        "loss_fn called backward() itself; let it return the loss",
    ),
}


@pytest.mark.filterwarnings("ignore:loss_fn returned a loss other than 0 with the weight 0")
@pytest.mark.parametrize("name", LOSSES)
def test_a_wrong_loss_is_told_and_leaves_no_gradient(init, name):
    loss_fn, told = LOSSES[name]
    job = Job(init())
    for step in job.loader:
        with _step_error(told):
            step.backward(lambda batch: loss_fn(job, batch))
        assert all(p.grad is None for p in job.model.parameters())
        # Nothing is half done: the same step can go on with a right loss.
        assert math.isfinite(job.step(step))
        break


def test_a_weight_for_some_micro_batches_only(init):
    job = Job(init(micro_batch=8))
    calls = []

    def loss_fn(batch):
        calls.append(1)
        return job.loss(batch) if len(calls) % 2 else (job.loss(batch), 8)

    with _step_error("loss_fn returned a weight for some micro-batches only; return one always or never"):
        job.train(loss_fn)


def test_too_many_metrics(init):
    job = Job(init())
    with _step_error("loss_fn returned 100 metrics beside the loss; at most"):
        job.train(lambda batch: {"loss": job.loss(batch), **{f"m{i}": 1.0 for i in range(100)}})


def test_numpy_numbers_are_fine(init):
    import numpy as np

    job = Job(init())
    for step in job.loader:
        job.step(step, lambda batch: {"loss": job.loss(batch), "weight": np.int64(3), "half": np.float32(0.5)})
        assert step.metrics == {"half": 0.5}


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_loss_that_stays_nan_ends_the_run_after_three_steps(init, precision):
    job = Job(init(precision=precision))
    before = job.model.weight.detach().clone()
    seen = []
    with pytest.raises(
        NonFiniteError, match="the loss of rank 0 was NaN or infinite in 3 steps in a row, the last at step 2"
    ):
        for step in job.loader:
            seen.append(step.index)
            job.step(step, lambda batch: job.loss(batch) * math.nan)
    assert seen == [0, 1, 2] and torch.equal(job.model.weight, before), "a skipped step moved the parameters"


def test_labels_that_are_ignored_without_a_weight_are_warned_about_once(init):
    class Labelled(Dataset):
        def __len__(self):
            return 48

        def __getitem__(self, index):
            return {"x": torch.ones(4), "labels": torch.tensor(-100 if index % 2 else 1)}

    job = Job(init(), model=nn.Linear(4, 3), data=Labelled())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job.train(lambda batch: functional.cross_entropy(job.model(batch["x"]), batch["labels"]))
    told = [str(warning.message) for warning in caught if "-100" in str(warning.message)]
    assert len(told) == 1 and "Return (loss, evenload.count_tokens(batch['labels'])) instead" in told[0]


def test_backward_by_habit(init):
    job = Job(init())
    habit = _step_error("Write instead:  loss = step.backward(loss_fn)")
    with habit:
        job.loss(dataset()[:4]).backward()
    for step in job.loader:
        with _step_error("loss.backward() was called on a model that run.prepare returned"):
            job.loss(dataset()[:4]).backward()
        job.step(step)
    with _step_error("its gradient would be this rank's alone"):
        job.loss(dataset()[:4]).backward()


def test_a_plain_loader_beside_a_prepared_model(init):
    model = init().prepare(nn.Linear(4, 1))
    with _step_error("Write instead:  loss = step.backward(loss_fn)"):
        for x, y in DataLoader(dataset(), batch_size=16):
            functional.mse_loss(model(x), y).backward()


def test_an_old_step(init):
    job = Job(init())
    steps = []
    for step in job.loader:
        if steps:
            with _step_error("this step is over; call step.backward inside the loop body of its own step"):
                steps[-1].backward(job.loss)
        job.step(step)
        steps.append(step)
    with _step_error("this step is over"):
        steps[-1].backward(job.loss)


def test_all_steps_collected_before_they_are_used(init):
    job = Job(init())
    steps = list(job.loader)
    with _step_error("this step is over"):
        steps[0].backward(job.loss)


def test_gradients_already_present(init):
    job = Job(init())
    with _step_error(
        "gradients are already present before the step's first backward (of 2 parameters, the first is weight)"
    ):
        for step in job.loader:
            step.backward(job.loss)
            job.optimizer.step()


def test_gradients_of_before_the_loop(init):
    model = nn.Linear(4, 1)
    functional.mse_loss(model(dataset()[:4][0]), dataset()[:4][1]).backward()
    job = Job(init(), model=model)
    with _step_error("Call optimizer.step() and optimizer.zero_grad() in each loop body"):
        job.train()


def test_a_sparse_gradient(init):
    model = nn.Embedding(8, 1, sparse=True)
    job = Job(init(), model=model, data=TensorDataset(torch.arange(32) % 8))
    with _step_error(
        "the gradient of weight is sparse, and gradients are summed as dense ones: use sparse=False, and Adam in"
    ):
        job.train(lambda batch: job.model(batch[0]).mean())


def _nan_on_one_rank(run):
    job = Job(run)
    job.train(lambda batch: job.loss(batch) * (math.nan if run.rank == 1 else 1.0))


def _nan_on_all_ranks(run):
    job = Job(run)
    job.train(lambda batch: job.loss(batch) * math.inf)


def _weight_on_one_rank(run):
    job = Job(run)
    job.train(lambda batch: (job.loss(batch), 8) if run.rank == 1 else job.loss(batch))


def _other_metrics(run):
    job = Job(run)
    job.train(lambda batch: {"loss": job.loss(batch), f"from{run.rank}": 1.0})


def _break(run):
    job = Job(run)
    for step in job.loader:
        if run.rank == 1 and step.index == 2:
            break
        job.step(step)
    run.reduce(1)


def _break_after(run):
    job = Job(run)
    for _ in range(2):
        for step in job.loader:
            job.step(step)
            if run.rank == 1 and step.index == 2:
                break


def _break_with_batch_norm(run):
    job = Job(run, model=nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    for step in job.loader:
        if run.rank == 1 and step.index == 2:
            break
        job.step(step)


def _skip_a_step(run):
    job = Job(run)
    for step in job.loader:
        if run.rank == 0 and step.index == 1:
            continue
        job.step(step)


def _skip_the_last_step(run):
    job = Job(run)
    for step in job.loader:
        if run.rank == 0 and step.index == 3:
            continue
        job.step(step)


def _second_backward(run):
    job = Job(run)
    for step in job.loader:
        step.backward(job.loss)
        if run.rank == 1:
            step.backward(job.loss)
        job.update()


def _ends_early(run):
    job = Job(run)
    for step in job.loader:
        if run.rank == 1 and step.index == 2:
            return
        job.step(step)


def _swallows_an_error(run):
    job = Job(run)

    def loss_fn(batch):
        if run.rank == 1 and step.index == 1:
            raise ValueError("a bad sample")
        return job.loss(batch)

    for step in job.loader:
        try:
            job.step(step, loss_fn)
        except ValueError:
            continue


def _evaluates_alone(run):
    job = Job(run)
    job.train()
    if run.is_main:
        for _ in run.batches(DataLoader(dataset(), batch_size=16)):
            pass


def _checkpoints_alone(run):
    job = Job(run)
    run.resume(model=job.model, optimizer=job.optimizer)
    for step in job.loader:
        job.step(step)
        if run.is_main:
            run.checkpoint()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (_nan_on_one_rank, "NonFiniteError: the loss of rank 1 was NaN or infinite in 3 steps in a row"),
        (_nan_on_all_ranks, "NonFiniteError: the loss of rank 0, 1 was NaN or infinite in 3 steps in a row"),
        (_weight_on_one_rank, "StepError: loss_fn returned a weight on ranks 1 only; return one always or never"),
        (_other_metrics, "StepError: loss_fn returned different metrics on different ranks (here: from"),
        (_break, "rank 0 is in step.backward at epoch 0, step 2; rank 1 calls run.reduce"),
        (_break_after, "rank 0 is in step.backward at epoch 0, step 3; rank 1 is in step.backward at epoch 1, step 0"),
        (_break_with_batch_norm, "rank 0 is in step.backward at epoch 0, step 2; rank 1 has ended its script"),
        (_skip_a_step, "rank 0 is in step.backward at epoch 0, step 2; rank 1 is in step.backward at epoch 0, step 1"),
        (_skip_the_last_step, "rank 0 has ended its script; rank 1 is in step.backward at epoch 0, step 3"),
        (
            _second_backward,
            "rank 0 is in step.backward at epoch 0, step 1; rank 1 is in step.backward at epoch 0, step 0",
        ),
        (_ends_early, "rank 0 is in step.backward at epoch 0, step 2; rank 1 has ended its script"),
        (_evaluates_alone, "rank 0 begins run.batches; rank 1 has ended its script"),
        (
            _checkpoints_alone,
            "rank 0 calls run.checkpoint at epoch 0, step 0; rank 1 is in step.backward at epoch 0, step 1",
        ),
    ],
)
def test_ranks_that_disagree_are_told_on_all_of_them(tmp_path, body, told):
    for line in told_by_ranks(body, tmp_path):
        assert told in str(line)
        if "rank 0 is in" in told:
            assert "make one rank's decision everybody's with `if run.any(flag): break`" in line


def test_an_error_that_one_rank_swallows_ends_the_others(tmp_path):
    first, _ = told_by_ranks(_swallows_an_error, tmp_path)
    assert "rank 1 raised an exception in step.backward at step 1; this rank gave the step up with it" in first


def _stray_module(run):
    job = Job(run)
    head = nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*job.model.parameters(), *head.parameters()], lr=0.1)
    for step in job.loader:
        step.backward(lambda batch: functional.mse_loss(head(job.model(batch[0])), batch[1]))
        optimizer.step()


def _unfrozen_later(run, ranks=(0, 1)):
    model = nn.Linear(4, 1)
    model.bias.requires_grad_(False)
    job = Job(run, model=model)
    job.train()
    model.bias.requires_grad_(run.rank in ranks)
    job.train()
    return model.bias.tolist() + model.weight.flatten().tolist()


def _unfrozen_on_one_rank(run):
    _unfrozen_later(run, ranks=(1,))


def _replaced_later(run):
    job = Job(run)
    job.train()
    job.model.weight = nn.Parameter(torch.zeros(1, 4))
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.01)
    job.train()
    return job.model.bias.tolist() + job.model.weight.flatten().tolist()


def test_an_optimizer_of_parameters_that_nobody_sums(tmp_path):
    for line in told_by_ranks(_stray_module, tmp_path):
        assert (
            "StepError: SGD steps 2 parameters that are in no model given to run.prepare (the first has shape (1, 1))"
            in line
        )
        assert "Pass the module that holds them to run.prepare too" in line


def test_a_parameter_unfrozen_on_one_rank_only(tmp_path):
    for line in told_by_ranks(_unfrozen_on_one_rank, tmp_path):
        assert "DesyncError: the ranks train different parameters in step 4: rank 1 differs from rank 0" in line
        assert "freeze and unfreeze the same parameters on all ranks" in line


@pytest.mark.parametrize("body", [_unfrozen_later, _replaced_later])
def test_parameters_unfrozen_or_replaced_on_all_ranks_are_fine(tmp_path, init, body):
    alone = body(init())
    assert told_by_ranks(body, tmp_path / "two") == [pytest.approx(alone, rel=1e-5)] * 2


def _trains(run):
    return Job(run).train()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_narrow_precision_is_fine(tmp_path, precision):
    first, second = told_by_ranks(_trains, tmp_path, precision=precision)
    assert first == second and all(math.isfinite(loss) for loss in first)
