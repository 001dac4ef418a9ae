"""`init` and `Run`: what a script speaks to. Wiring only; no file imports this one or takes a Run."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from evenload.errors import ConfigError
from evenload.training.checkpoint.export import pick_model, write_weights
from evenload.training.comm import collect
from evenload.training.comm.control import Control, Operation
from evenload.training.comm.subgroups import RankLocation, subset_of, user_group
from evenload.training.data.evaluate import evaluation_batches
from evenload.training.launch import worker
from evenload.training.parallel.threaded.replica_threads import current_replica
from evenload.training.session.open import open_context
from evenload.training.session.session import Session
from evenload.training.session.state import Saver
from evenload.training.step.context import TrainingContext
from evenload.training.step.step import StepLoader

_open: Run | None = None


def init(
    *,
    project_dir: str | PathLike[str] | None = None,
    seed: int | None = None,
    precision: str | None = None,
    strategy: str | None = None,
    micro_batch: int | str | None = None,
    balance: str | Sequence[int] | None = None,
    batch_max: int | None = None,
    batch_lr: str | None = None,
    batch_norm: str | None = None,
    dataset_rng: str | None = None,
    num_workers: str | None = None,
    check_every: int | str | None = None,
    loggers: str | Sequence[str] | None = None,
    logger_options: Mapping[str, Mapping[str, Any]] | None = None,
    log_every_s: float | None = None,
    timeout_s: float | None = None,
) -> Run:
    """Joins the job that this process was started for: by ``evenload run``, `evenload.spawn`, torchrun, srun, plain python.

    The settings are those of `evenload.Config`; what is not given here may come from the command line, and the same key
    given differently in both places is an error.

    Raises:
        ConfigError: a wrong setting, or a run that is open already.
        LaunchError: the other ranks can't be reached.
    """
    global _open
    if worker.progress.reading or getattr(multiprocessing.current_process(), "_inheriting", False):
        # A spawned process imports the script before it does its work.
        raise ConfigError(
            "evenload.init was called while a new process (a DataLoader worker?) imports the script; put the training under "
            "`if __name__ == '__main__':`"
        )
    script = {key: value for key, value in locals().items() if value is not None}
    if _open is not None:
        raise ConfigError(
            "evenload.init was called twice; keep the run it returned, or close it with run.close() first"
        )
    _open = Run(open_context(script))
    return _open


class Run:
    """One training job on this rank. Made by `init`."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._models: list[nn.Module] = []
        self._loaders: list[StepLoader] = []
        self._saver = Saver(context, self._loaders)
        self._session = Session(context, self._saver, self._models, self._loaders)
        self._closed = False
        worker.at_exit(self.close)

    @property
    def device(self) -> torch.device:
        """Where this rank computes; inside loss_fn under strategy ``dp`` where this replica does."""
        thread = current_replica()
        return self._context.device if thread is None else thread.device

    @property
    def rank(self) -> int:
        """This rank's index now; 0 to world_size - 1. Inside loss_fn under strategy ``dp`` the replica's."""
        thread = current_replica()
        return self._context.groups.rank if thread is None else thread.index

    @property
    def world_size(self) -> int:
        """Ranks that take part now; inside loss_fn under strategy ``dp`` replicas."""
        return self._context.groups.world_size if current_replica() is None else self._context.num_sharing

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def prepare(self, *objects: Any) -> Any:
        """Takes models and training DataLoaders; gives them back in the same order.

        A model is the same object, moved to the device. A loader becomes one that yields steps, its batch_size the global
        batch. Optimizers and schedulers stay the user's own and are not given here.

        Raises:
            ConfigError: something that can't be prepared, with the reason.
        """
        if not objects:
            raise ConfigError("run.prepare got nothing; write: model, loader = run.prepare(model, loader)")
        prepared = [self._session.prepare(value) for value in objects]
        self._session.attach()
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def resume(self, **state: Any) -> bool:
        """Registers what a checkpoint holds and loads the newest one, if there is one. Call it once, before the loop.

        Args:
            **state: by name, anything with `state_dict` and `load_state_dict`: model, optimizer, scheduler, averages. The
                cursor, the epoch and randomness are always included.

        Returns:
            Whether a checkpoint was loaded.

        Raises:
            CheckpointError: the checkpoint doesn't fit what is registered.
        """
        return self._session.resume(state)

    def checkpoint(self, every: str | int | None = None) -> bool:
        """Writes a checkpoint at the end of the loop body; loads on any other set of devices.

        Args:
            every: ``"10min"``, ``"90s"``, ``"500steps"`` or a number of steps; None for now.

        Returns:
            Whether one was written.
        """
        return self._saver.checkpoint(every)

    def export(self, path: str | PathLike[str], model: nn.Module | None = None) -> None:
        """Writes a model's weights for use elsewhere: ``.safetensors``, or else torch.save's format. Rank 0 writes.

        Raises:
            ConfigError: several models are prepared and none is named, or a package is missing.
        """
        chosen = pick_model(model, self._models)
        if self.is_main and self._context.spec.mode != "verify":
            write_weights(path, chosen)

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """This rank's batches of a plain loader: over all ranks every sample once, none twice, equally many batches each.

        Sum over the samples and call `reduce`: means of batches of different sizes are no mean.
        """
        return self._session.evaluate(loader, evaluation_batches)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Writes numbers to the run's records and loggers, at the current step. Every rank may call it."""
        self._session.log(metrics)

    def any(self, flag: Any) -> bool:
        """Whether the flag is true on any rank; the way to leave a loop together."""
        return collect.any_flag(flag, self._context.control)

    def reduce(self, value: Any, op: str = "sum", group: dist.ProcessGroup | None = None) -> Any:
        """A number, a tensor, or a dict or list of them, over all ranks: ``sum``, ``mean``, ``min`` or ``max``.

        With a `group` (see `group`) over its ranks alone; a rank outside gets its own value back.
        """
        if group is None:
            return collect.reduce_value(value, op, self._context.groups, self._context.control)
        subset = subset_of(group, self._context.groups)
        return value if subset is None else collect.reduce_value(value, op, subset, Control(subset))

    def group(self, ranks: Sequence[int] | str) -> dist.ProcessGroup:
        """A process group of some ranks, for collectives of the user's own. All ranks call it, with the same ranks.

        The same ranks give the same group again. It works in a world of one too, and ends with `close`. A rank outside gets
        torch's ``GroupMember.NON_GROUP_MEMBER``, with which a collective does nothing.

        Args:
            ranks: different ranks, in any order; or ``"cuda"`` or ``"cpu"`` for those that compute there, or ``"node"`` for
                those of this machine (on each machine its own).

        Raises:
            ConfigError: a rank that is not there, or none.
            DesyncError: the ranks ask for different groups; all of them are told who asks for what.
        """
        location = RankLocation(self._context.device.type, self._context.spec.node_rank)
        return user_group(ranks, location, self._context.groups, self._context.control)

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """The body runs on rank 0 first, then on one rank of each other machine, then on all others: a download, a cache."""
        turn = 0 if self.is_main else 1 if self._context.spec.local_rank == 0 else 2
        for _ in range(turn):
            self._context.control.barrier(Operation.BARRIER)
        yield
        for _ in range(2 - turn):
            self._context.control.barrier(Operation.BARRIER)

    def close(self) -> None:
        """Ends the run: last checkpoint, records, workers, groups. Called by itself when the script ends."""
        global _open
        if self._closed:
            return
        self._closed = True
        _open = None
        self._session.close()
