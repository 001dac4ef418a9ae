"""Check settings when a job is opened: without effect, in contradiction to each other, other than those of rank 0."""

from __future__ import annotations

import zlib

from evenload.config import LOCAL_SETTINGS, SETTINGS, Config
from evenload.errors import ConfigError
from evenload.training.comm.control import Control, Operation
from evenload.training.launch.environment import WorkerSpec


def check_contradictions(config: Config, spec: WorkerSpec) -> None:
    """Raise ConfigError for a setting without effect, and for settings that contradict each other."""
    if "batch_lr" in config.sources and config.batch_max is None:
        raise ConfigError(
            f"{config.sources['batch_lr']} has no effect: it sets how the learning rate follows a growing batch; set "
            "batch_max too, or leave it out"
        )
    if config.fresh and config.override:
        raise ConfigError("--override has no effect with --fresh, which resumes nothing; leave one of them out")
    if config.wire != "fp32" and config.strategy not in ("ddp", "local"):
        raise ConfigError(
            f"{config.sources['wire']} has no effect with strategy={config.strategy!r}: it is the format in which the ranks of "
            "strategy='ddp' sum gradients, and the islands of strategy='local' pseudo-gradients; leave one of them out"
        )
    _check_local(config, spec.mode)


def _check_local(config: Config, mode: str) -> None:
    """Raise ConfigError for settings that have no effect with or without strategy local."""
    given = [config.sources[name] for name in LOCAL_SETTINGS if name in config.sources]
    if config.strategy != "local":
        if given:
            raise ConfigError(
                f"{given[0]} has no effect with strategy {config.strategy}: only islands of strategy='local' synchronise rarely; "
                "set strategy='local', or leave it out"
            )
        return
    if mode == "measure":
        raise ConfigError(
            "strategy='local' cannot be measured against others in one set of processes; measure strategy='ddp'"
        )
    if config.batch_max is not None:
        raise ConfigError(
            "batch_max with strategy='local': a batch grows by noise that all ranks measure; leave one of them out"
        )
    if config.wire == "auto":
        raise ConfigError(
            f"{config.sources['wire']} with strategy='local': it chooses by the noise of gradients, which all ranks of "
            "strategy='ddp' measure in each step; set bf16, fp16, int8 or powersgd for the pseudo-gradients"
        )
    if config.local_steps == "auto" and config.sync_every == 1:
        raise ConfigError(
            f"{config.sources['local_steps']} has no effect with sync_every=1: each island makes at least one step between two "
            "synchronisations; set a larger sync_every, or local_steps='equal', which divides each batch by speed"
        )
    if config.fragments > config.sync_every:
        raise ConfigError(
            f"fragments={config.fragments} with sync_every={config.sync_every}: each fragment needs a step of its own; set "
            "fewer fragments, or a larger sync_every"
        )
    if config.sync_delay * config.fragments > config.sync_every:
        raise ConfigError(
            f"sync_delay={config.sync_delay} with sync_every={config.sync_every} and fragments={config.fragments}: a sum is used "
            f"before the next one begins, at most {config.sync_every // config.fragments} steps after it was sent"
        )


def check_balance(config: Config, world_size: int) -> None:
    """Raise ConfigError unless fixed shares are as many as the ranks."""
    if isinstance(config.balance, tuple) and len(config.balance) != world_size:
        raise ConfigError(
            f"{config.sources['balance']}: {len(config.balance)} shares, but there are {world_size} ranks; give one share "
            "per rank"
        )


def check_same_settings(config: Config, control: Control) -> None:
    """Raise ConfigError on all ranks if a setting differs; ``seed=rank`` would give each rank its own order of samples."""
    keys = [name for name, setting in SETTINGS.items() if not setting.rank_0_only]
    rows = control.exchange(Operation.INIT, [float(zlib.crc32(repr(getattr(config, key)).encode())) for key in keys])
    for rank, row in enumerate(rows):
        for key, own, first in zip(keys, row, rows[0], strict=True):
            if own != first:
                raise ConfigError(
                    f"{key} differs: rank {rank} has another value than rank 0; give init the same settings on every rank"
                )
