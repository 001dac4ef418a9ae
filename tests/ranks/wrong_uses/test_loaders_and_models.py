"""What `run.prepare`, `run.batches` and the values over ranks refuse."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from evenload.errors import ConfigError, DataError, StepError
from tests.ranks.wrong_uses.jobs import Job, dataset, told_by_ranks


class Empty(Dataset):
    def __len__(self):
        return 0

    def __getitem__(self, index):
        raise IndexError(index)


def _loader(data=None, **settings):
    return DataLoader(dataset() if data is None else data, **{"batch_size": 16, **settings})


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        (lambda: _loader(batch_size=None), r"DataLoader\(batch_size=None\) has no batches to split over ranks"),
        (lambda: _loader(Empty()), "the dataset, Empty, is empty; give at least one sample"),
        (
            lambda: _loader(dataset(10), drop_last=True),
            "batch_size=16 with drop_last=True and 10 samples leaves no step",
        ),
        (
            lambda: _loader(sampler=DistributedSampler(dataset(), 2, 0)),
            "a DistributedSampler, which gives each rank a part",
        ),
        (lambda: _loader(num_workers=1, in_order=False), r"in_order=False\) has no effect"),
    ],
)
def test_a_loader_that_cannot_be_split(init, loader, told):
    with pytest.raises((ConfigError, DataError), match=told):
        init().prepare(nn.Linear(4, 1), loader())


def _lazy():
    return nn.LazyLinear(1)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (nn.Identity, r"Identity has no parameters, no buffers and no BatchNorm: there is nothing to prepare"),
        (_lazy, r"LazyLinear has uninitialised lazy parameters \(weight\): run a batch through it"),
        (lambda: nn.Linear(4, 1, device="meta"), r"parameters on the meta device \(weight\)"),
        (
            lambda: nn.DataParallel(nn.Linear(4, 1)),
            r"DataParallel: pass the bare model \(model.module\) to run.prepare",
        ),
        (
            lambda: torch.optim.SGD(nn.Linear(4, 1).parameters()),
            "run.prepare received a SGD: optimizers and schedulers stay",
        ),
        (dataset, "run.prepare takes models and DataLoaders; it received a TensorDataset"),
        (lambda: [1], "run.prepare takes models and DataLoaders; it received a list"),
        (lambda: nn.Linear, "run.prepare takes models and DataLoaders; it received the class Linear"),
    ],
)
def test_what_prepare_does_not_take(init, value, told):
    with pytest.raises(ConfigError, match=told):
        init().prepare(value())


def test_nothing_to_prepare(init):
    with pytest.raises(ConfigError, match=r"run.prepare received nothing; write: model, loader = run.prepare"):
        init().prepare()


def test_a_ddp_model(init):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
        with pytest.raises(ConfigError, match=r"DistributedDataParallel: pass the bare model"):
            init().prepare(wrapped)
    finally:
        del wrapped
        gc.collect()
        torch.distributed.destroy_process_group()


def test_a_loader_prepared_twice(init):
    job = Job(init())
    with pytest.raises(ConfigError, match=r"run.prepare received a loader that is already prepared"):
        job.run.prepare(job.loader)


def test_a_prepared_loader_given_to_batches(init):
    job = Job(init())
    with pytest.raises(ConfigError, match=r"run.batches received a loader from run.prepare"):
        job.run.batches(job.loader)


def test_no_loader_given_to_batches(init):
    with pytest.raises(ConfigError, match=r"expected a torch.utils.data.DataLoader, got builtins.list"):
        list(init().batches([1, 2]))


def test_a_loader_without_a_model(init):
    loader = init().prepare(_loader())
    with pytest.raises(StepError, match=r"no model was passed to run.prepare; write: model, loader = run.prepare"):
        next(iter(loader))


def _fixed(run):
    return next(iter(Job(run).loader)).shares


def test_fixed_shares_that_are_not_the_batch_are_proportions(init, tmp_path):
    assert _fixed(init(balance=[20])) == (16,)
    assert told_by_ranks(_fixed, tmp_path / "two", balance=(3, 1)) == [(12, 4)] * 2


def _batch_of_one(run):
    job = Job(run, data=dataset(6), batch_size=1)
    losses = job.train()
    return losses, job.bare.weight.detach().flatten().tolist(), len(job.loader)


def test_a_batch_of_one_on_two_ranks_leaves_one_idle_and_works(tmp_path, init):
    alone = _batch_of_one(init())
    ranks = told_by_ranks(_batch_of_one, tmp_path / "two")
    assert ranks[0] == ranks[1] and ranks[0][2] == 6
    assert ranks[0][1] == pytest.approx(alone[1], rel=1e-6)


def _other_model(run):
    Job(run, model=nn.Linear(4, 1, bias=run.is_main))


def _other_length(run):
    Job(run, data=dataset(64 if run.is_main else 60))


def _other_batch(run):
    Job(run, batch_size=16 if run.is_main else 8)


def test_different_models_on_different_ranks(tmp_path):
    told = told_by_ranks(_other_model, tmp_path)
    assert all(
        "DesyncError: run.prepare received different models: rank 1 differs from rank 0" in line for line in told
    )


def test_different_datasets_on_different_ranks(tmp_path):
    told = told_by_ranks(_other_length, tmp_path)
    expected = "DesyncError: the loaders differ: rank 0 has 64 samples in batches of 16, rank 1 has 60 samples in batches of 16"
    assert all(line.startswith(expected) for line in told), told
    told = told_by_ranks(_other_batch, tmp_path / "batch")
    assert all("rank 1 has 64 samples in batches of 8" in line for line in told), told


def _batch_sampler(run):
    data = dataset()
    sampler = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(data), 8, drop_last=False)
    _, loader = run.prepare(nn.Linear(4, 1), DataLoader(data, batch_sampler=list(sampler)))
    return next(iter(loader)).shares


def test_fixed_shares_with_a_batch_sampler_that_tells_no_size(init):
    assert _batch_sampler(init(balance=[8])) == (8,)


@pytest.mark.parametrize("value", ["text", None, object(), {"a": ["text"]}])
def test_reduce_of_something_else(init, value):
    with pytest.raises(
        ConfigError, match=r"run.reduce received a .*; it takes numbers, tensors, and dicts or lists of them"
    ):
        init().reduce(value)


def test_reduce_by_an_unknown_operation(init):
    with pytest.raises(ConfigError, match=r"run.reduce\(op='avg'\): expected one of sum, mean, min, max"):
        init().reduce(1, op="avg")


def _shapes(run):
    run.reduce(torch.ones(2 + run.rank))


def _dtypes(run):
    run.reduce(torch.ones(2, dtype=torch.float32 if run.is_main else torch.float64))


def _kinds(run):
    run.reduce(1 if run.is_main else torch.ones(1))


def _numbers(run):
    """An idle rank's sum is still the integer 0."""
    return run.reduce(0 if run.is_main else 2.5), run.reduce(True if run.is_main else 2), run.reduce(3)


@pytest.mark.parametrize("body", [_shapes, _dtypes, _kinds])
def test_reduce_of_different_things_on_different_ranks(tmp_path, body):
    told = told_by_ranks(body, tmp_path)
    assert all(line.startswith("DesyncError: run.reduce received different values: rank 0 ") for line in told), told


def test_reduce_takes_an_integer_on_one_rank_and_a_float_on_another(tmp_path):
    assert told_by_ranks(_numbers, tmp_path) == [(2.5, 3, 6)] * 2


@pytest.mark.parametrize("ranks", [[0, 7], [], [0, 0], [-1], ["a"], [0.5]])
def test_a_group_of_ranks_that_are_not_there(init, ranks):
    with pytest.raises(ConfigError, match=r"run.group\(ranks=.*\): expected a list of different ranks from 0 to 0"):
        init().group(ranks)


def test_export_of_an_unnamed_one_of_several_models(init, tmp_path):
    run = init()
    run.prepare(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"2 models are prepared; say which: run.export\(path, model\)"):
        run.export(tmp_path / "model.pt")


def test_the_run_is_of_no_use_after_close(init):
    run = init()
    run.close()
    run.close()
    with pytest.raises(StepError, match=r"the script calls run.prepare after run.close"):
        run.prepare(nn.Linear(4, 1))


def _two_prepared(init, **settings):
    run = init(**settings)
    model = nn.Linear(4, 1)
    model, first, second = run.prepare(model, _loader(), _loader())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, first, second, optimizer


def _loss_of(model):
    return lambda batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def test_zip_over_prepared_loaders(init):
    _, first, second, _ = _two_prepared(init)
    with pytest.raises(StepError, match=r"zip and nested loops .* run.prepare\(model, \(labeled, unlabeled\)\)"):
        for _ in zip(first, second, strict=False):
            pass


def test_nested_loops_over_prepared_loaders(init):
    model, first, second, optimizer = _two_prepared(init)
    with pytest.raises(StepError, match="a step of one prepared loader began inside a step of another"):
        for step in first:
            step.backward(_loss_of(model))
            optimizer.step()
            optimizer.zero_grad()
            for _ in second:
                pass


def test_one_prepared_loader_after_the_other_is_fine(init):
    model, first, second, optimizer = _two_prepared(init)
    for loader in (first, second, first):
        for index, step in enumerate(loader):
            step.backward(_loss_of(model))
            optimizer.step()
            optimizer.zero_grad()
            if index == 1:
                break


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (lambda run: (), "run.prepare received an empty tuple"),
        (lambda run: (nn.Linear(4, 1), _loader()), r"it holds a Linear\. Give models, .* as arguments of their own"),
        (lambda run: (_loader(), (_loader(), _loader())), "it holds a tuple"),
        (lambda run: (_loader(), run.prepare(_loader())), "holds a prepared loader; give it the plain DataLoaders"),
        (lambda run: [_loader(), _loader()], "it received a list. Loaders that make one loader together go in a tuple"),
        (lambda run: (_loader(), _loader(dataset(10))), "its 10 samples are no batch of 16"),
        (
            lambda run: (_loader(dataset(65)), _loader(batch_size=24)),
            r"has 65 samples, and its last batch ends within a unit of 2 \+ 3 samples \(1 of 2 are there\): set drop_last",
        ),
    ],
)
def test_tuples_that_prepare_does_not_take(init, value, told):
    run = init()
    with pytest.raises((ConfigError, DataError), match=told):
        run.prepare(value(run))


def test_fixed_shares_of_a_tuple_count_units(init):
    run = init(balance=(16,))
    _, loader = run.prepare(nn.Linear(4, 1), (_loader(), _loader(batch_size=24)))
    assert next(iter(loader)).shares == (8,)


@pytest.mark.parametrize("balance", ["auto", (4,)])
def test_lists_of_keys_as_batch_sampler_give_the_global_batch(init, capsys, balance):
    """Columns of a text (word_language_model): the dataset's length is no multiple of the steps, and shares may be a ratio."""
    batches = [[*range(low, low + 16)] for low in range(0, 64, 16)] + [[64, 65]]
    data = dataset(1000)
    _, loader = init(balance=balance).prepare(nn.Linear(4, 1), DataLoader(data, batch_sampler=batches))
    assert "global batch 16, 5 steps an epoch" in capsys.readouterr().out
    assert next(iter(loader)).shares == (16,)


def test_a_batch_of_a_tuple_can_not_grow(init):
    run = init(batch_max=64)
    with pytest.raises(ConfigError, match="works with one loader, and a tuple has a batch for each"):
        run.prepare((_loader(), _loader(batch_size=24)))
