"""`batch_max` where a batch can't grow: refused before a step is trained, with what to do instead."""

import re

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from evenload.errors import CheckpointError, ConfigError, DataError
from tests.ranks.wrong_uses.jobs import Job, dataset, told_by_ranks


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.ones(4), torch.ones(1))] * 64)


def _batches():
    return {"batch_sampler": BatchSampler(RandomSampler(dataset()), 16, drop_last=False), "batch_size": 1}


@pytest.mark.parametrize(
    ("settings", "job", "told"),
    [
        (
            {},
            {"batch_size": 32},
            "init(batch_max=32) has no effect: the loader's batch_size is 32 already; set it higher",
        ),
        ({}, {"batch_size": 64}, "init(batch_max=32) has no effect: an epoch of 64 samples is one batch of 64 already"),
        (
            {},
            {"data": Stream()},
            "init(batch_max=32) has no effect on an iterable dataset, which makes its own batches",
        ),
        ({}, _batches(), "init(batch_max=32) has no effect on a loader with a batch_sampler"),
        ({"strategy": "dp"}, {}, "init(batch_max=32): under strategy='dp' the gradient noise is not measured; use"),
        (
            {"micro_batch": 16},
            {},
            "one rank that computes a batch of 16 at once (micro_batch=16) can't measure its gradient noise; set "
            "micro_batch to 8 or less, or use two ranks",
        ),
    ],
    ids=["reached", "one batch", "stream", "batch_sampler", "dp", "one micro-batch"],
)
def test_a_batch_that_can_not_grow(init, settings, job, told):
    run = init(batch_max=32, **settings)
    with pytest.raises(ConfigError, match=re.escape(told)):
        Job(run, **job)


def test_two_loaders(init):
    run = init(batch_max=32)
    Job(run)
    with pytest.raises(
        ConfigError, match=re.escape("init(batch_max=32) works with one loader, and this is the second")
    ):
        Job(run)


def _with_batch_norm(run):
    return Job(run, model=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))).train()


def test_batch_norm_over_ranks_where_memory_is_not_known(tmp_path):
    # A step that does not fit is repeated in smaller micro-batches, with BatchNorm over ranks too.
    first, second = told_by_ranks(_with_batch_norm, tmp_path, batch_max=32)
    assert first == second and len(first) == 4


def _stop_in_a_grown_epoch(init, folder):
    run = init(project_dir=folder, batch_max=32)
    job = Job(run)
    growth = run._saver.adaptive_batch.growth
    growth._decide = lambda: None
    run.resume(model=job.model, optimizer=job.optimizer)
    growth._planner.resize(32, None)
    growth._loader.resize(32)
    growth.now = type(growth.now)(32, 5.0)
    for step in job.loader:
        job.step(step)
        run.checkpoint()
        break
    run.close()


@pytest.mark.parametrize(
    ("settings", "loader", "told"),
    [
        (
            {},
            {},
            "stands inside an epoch in batches of 32, which batch_max chose for a batch_size of 16: keep batch_max",
        ),
        ({"batch_max": 32}, {"batch_size": 8}, "a loader with batch_size=16, which batch_max lets grow; now it is 8"),
    ],
)
def test_a_checkpoint_inside_a_grown_epoch(init, tmp_path, settings, loader, told):
    _stop_in_a_grown_epoch(init, tmp_path / "saved")
    run = init(project_dir=tmp_path / "saved", **settings)
    job = Job(run, **loader)
    with pytest.raises((CheckpointError, DataError), match=re.escape(told)):
        run.resume(model=job.model, optimizer=job.optimizer)
