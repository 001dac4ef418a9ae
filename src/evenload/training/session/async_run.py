"""Strategy ``async`` in a session: its settings, its events, and the learning rate of stale gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from evenload.config import Config
from evenload.errors import ConfigError
from evenload.training.launch.environment import WorkerSpec
from evenload.training.launch.server_process import give_up
from evenload.training.parallel.strategy import Strategy

STRATEGY = "async"
_OWN = ("staleness", "staleness_lr", "servers")
_WITHOUT_EFFECT = {
    "balance": "a part is one global batch, which one worker computes: there are no shares",
    "batch_max": "a growing batch needs the gradients of all ranks in each step",
    "batch_norm": "BatchNorm takes its statistics over the micro-batches of one part",
    "check_every": "the ranks' parameters differ while a loop runs, and are sent to all when it ends",
}


def check_settings(config: Config, spec: WorkerSpec) -> None:
    """Raise ConfigError if a setting of strategy ``async`` has no effect, or it would leave another without one."""
    sources = config.sources
    if config.strategy != STRATEGY:
        for name in filter(sources.__contains__, _OWN):
            raise ConfigError(
                f"{sources[name]} has no effect under strategy={config.strategy!r}: it belongs to strategy='async'; set that "
                "too, or leave it out"
            )
        return
    if config.servers != 1:
        raise ConfigError(
            f"{sources['servers']}: one server holds all parameters for now (the norm over one of several shards would be "
            "wrong); leave it out"
        )
    if config.staleness == 0:
        if "staleness_lr" in sources:
            raise ConfigError(f"{sources['staleness_lr']} has no effect with staleness=0: no gradient is stale")
        return
    for name, why in _WITHOUT_EFFECT.items():
        if name in sources:
            raise ConfigError(f"{sources[name]} has no effect under strategy='async': {why}; leave it out")
    if spec.mode in ("verify", "measure"):
        what = "evenload verify compares a step" if spec.mode == "verify" else "a measurement compares the ranks"
        raise ConfigError(
            f"strategy='async': {what} with one process, and stale gradients differ from it by design; use strategy='ddp', or "
            "staleness=0"
        )


def is_asynchronous(config: Config, spec: WorkerSpec) -> bool:
    """Return whether ranks run apart: not with a bound of 0, nor alone."""
    return config.strategy == STRATEGY and config.staleness > 0 and spec.world_size > 1


def describe(config: Config, spec: WorkerSpec) -> str:
    """Return the sentence for the start of a run under strategy ``async``."""
    if config.staleness == 0:
        return (
            "strategy async with staleness=0 is synchronous: all ranks compute each global batch together, as under ddp"
        )
    if spec.world_size == 1:
        return (
            "strategy async needs a server and at least one worker, and this is one process: it trains synchronously. Start it "
            "with evenload run --strategy async"
        )
    count = spec.world_size - 1
    workers = "1 worker computes" if count == 1 else f"{count} workers compute"
    text = (
        f"strategy async: rank 0 holds the parameters, {workers} whole global batches; no gradient is applied that is more than "
        f"{config.staleness} updates behind. The result depends on the order of arrivals"
    )
    if (idle := count - (config.staleness + 1)) > 0:
        text += (
            f". {idle} of the workers wait at any time: with staleness={config.staleness}, {config.staleness + 1} parts may be "
            "computed at once; set staleness to the number of workers or more"
        )
    if not spec.has_server:
        text += (
            ". The device of rank 0 is idle: it only applies gradients. `evenload run --strategy async` on one machine starts a "
            "process of its own for that"
        )
    return text


def lost_reporter(record: Callable[..., None], launch_dir: str) -> Callable[[int, str, Sequence[int], bool], None]:
    """Return what records that a worker is gone; one that hangs is ended by its launcher."""

    def report(worker: int, reason: str, parts: Sequence[int], hangs: bool) -> None:
        give_up(launch_dir, worker, hangs)
        which = ", ".join(map(str, parts))
        takes = f"; another worker takes part {which}" if parts else ""
        record("lost", f"rank {worker} is gone ({reason}){takes}", rank=worker, parts=list(parts))

    return report


class StalenessRates:
    """Divides the learning rate by the staleness of the gradient while an optimizer steps (``staleness_lr="inverse"``).

    Zhang et al. 2016, "Staleness-aware Async-SGD for Distributed Deep Learning": lr / max(1, staleness). Schedulers, the
    user's code and checkpoints see only the rate that was set.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._set: list[tuple[dict[str, Any], Any]] = []

    def before(self, optimizer: Optimizer) -> None:
        self.after()  # after a step that raised
        staleness = getattr(self._strategy, "staleness", 0)
        if staleness < 2:
            return
        for group in (g for g in optimizer.param_groups if g.get("lr") is not None):
            self._set.append((group, group["lr"]))
            group["lr"] = group["lr"] / staleness

    def after(self) -> None:
        for group, rate in self._set:
            group["lr"] = rate
        self._set = []
