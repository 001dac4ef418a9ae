"""`init` and `Run`, the interface of a training script. Wiring only; no file imports this one or takes a Run."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from evenload.config import explain_init_keyword
from evenload.errors import ConfigError
from evenload.foreign_names import RUN_ELSEWHERE
from evenload.training.checkpoint.export import pick_model, write_weights
from evenload.training.checkpoint.options import SavedValues
from evenload.training.comm import collect
from evenload.training.comm.control import Operation
from evenload.training.comm.subgroups import RankLocation, subset_of, user_group
from evenload.training.launch import worker
from evenload.training.launch.child_process import check_process
from evenload.training.launch.uncaught import reports_uncaught
from evenload.training.parallel.threaded.replica_threads import current_replica
from evenload.training.session.open import open_context
from evenload.training.session.session import Session
from evenload.training.session.state import Saver
from evenload.training.session.trackers import open_tracker
from evenload.training.step.context import TrainingContext
from evenload.training.step.step_loader import StepLoader
from evenload.training.step.wrong_loops import inside_loss_fn
from evenload.wrong_calls import shows_usage, unknown_attribute

_open: Run | None = None
_INIT_USAGE = "run = evenload.init(project_dir='runs/name', seed=0): settings by name (docs/settings.md)"


@reports_uncaught
@shows_usage(_INIT_USAGE, explain_init_keyword)
def init(
    *,
    project_dir: str | PathLike[str] | None = None,
    seed: int | None = None,
    precision: str | None = None,
    strategy: str | None = None,
    wire: str | None = None,
    islands: str | Sequence[Sequence[int]] | None = None,
    sync_every: int | None = None,
    local_steps: str | None = None,
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    fragments: int | None = None,
    sync_delay: int | None = None,
    staleness: int | None = None,
    staleness_lr: str | None = None,
    servers: int | None = None,
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
    """Join the job that this process was started for: by ``evenload run``, `evenload.spawn`, torchrun, srun, plain python.

    The settings are those of `evenload.Config`. A setting left out here may come from the command line; different values
    in both places are an error.

    Raises:
        ConfigError: invalid setting, or a run is open already.
        LaunchError: the other ranks can't be reached.
    """
    global _open
    if not dist.is_initialized():
        check_process()
    script = {key: value for key, value in locals().items() if value is not None}
    if _open is not None:
        raise ConfigError(
            "evenload.init was called twice; keep the run it returned, or close it with run.close() first"
        )
    with contextlib.ExitStack() as late:
        _open = Run(open_context(script, late))
    return _open


class Run:
    """One training job on this rank, returned by `init`."""

    @shows_usage("run = evenload.init()")
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
        """Device of this rank; inside loss_fn under strategy ``dp`` of this replica."""
        thread = current_replica()
        return self._context.device if thread is None else thread.device

    @property
    def rank(self) -> int:
        """Index of this rank, 0 to world_size - 1; inside loss_fn under strategy ``dp`` of this replica."""
        thread = current_replica()
        return self._context.rank if thread is None else thread.index

    @property
    def world_size(self) -> int:
        """Number of ranks; inside loss_fn under strategy ``dp`` of replicas."""
        groups = self._context.groups
        if self._context.control.apart:  # in a loop of strategy async, for which each rank is alone
            return len(groups.membership.workers)
        return groups.world_size if current_replica() is None else self._context.num_sharing

    @property
    def is_main(self) -> bool:
        """True if this is the rank that prints and writes."""
        return self.rank == 0

    def __getattr__(self, name: str) -> Any:
        raise unknown_attribute(self, name, RUN_ELSEWHERE)

    @shows_usage("model, loader = run.prepare(model, loader)")
    def prepare(self, *objects: Any) -> Any:
        """Prepare models and training DataLoaders, and return them in the same order.

        A model stays the same object, moved to the device. A loader becomes one that yields steps; its batch_size is the
        global batch. A tuple of loaders becomes one loader, whose steps have a batch of each: `loss_fn` receives a tuple.
        Optimizers and schedulers stay the user's own and are not passed here.

        Raises:
            ConfigError: an object can't be prepared, with the reason.
        """
        if not objects:
            raise ConfigError("run.prepare received nothing; write: model, loader = run.prepare(model, loader)")
        self._refuse_in_loss_fn("run.prepare")
        prepared = [self._session.prepare(value) for value in objects]
        self._session.attach()
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    @shows_usage("run.resume(model=model, optimizer=optimizer, scheduler=scheduler): each object with a name")
    def resume(self, **state: Any) -> SavedValues:
        """Register the state of checkpoints and load the newest checkpoint, if any. Call it once, before the loop.

        Args:
            **state: named objects with `state_dict` and `load_state_dict`: model, optimizer, scheduler, averages. The cursor,
                the epoch and randomness are always included.

        Returns:
            The values stored by ``run.checkpoint(values=...)``, as a mapping. It is true if a checkpoint was loaded, also
            without values: ``if not saved: initialise(model)``, ``best = saved.get("best_loss", inf)``.

        Raises:
            CheckpointError: the checkpoint doesn't match the registered state.
        """
        return self._session.resume(state)

    @shows_usage("run.checkpoint(every='10min') at the end of the loop body; run.export(path) writes the weights alone")
    def checkpoint(
        self,
        every: str | int | None = None,
        *,
        keep: int | str = 3,
        best: tuple[str, str] | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> bool:
        """Write a checkpoint at the end of the loop body; it can be loaded on any set of devices.

        The last steps are saved when the script ends, also by an error, with the values of the last call.

        Args:
            every: ``"10min"``, ``"90s"``, ``"500steps"`` or a number of steps; None for now.
            keep: number of newest checkpoints to keep, or ``"all"``. The best one is kept besides.
            best: name of a metric of `log`, and ``"min"`` or ``"max"``. A better value causes a write before weights change.
            values: plain values that `resume` returns, such as ``{"best_loss": best}``: numbers, text, lists and dicts.

        Returns:
            Whether one was written.

        Raises:
            ConfigError: an argument is wrong.
            CheckpointError: `resume` was not called, the state can't be saved, or, without `every`, the disk does not take it.
        """
        self._context.control.meet()
        return self._saver.checkpoint(every, keep, best, values)

    @shows_usage("run.export('model.safetensors'), or with several models run.export(path, model)")
    def export(self, path: str | PathLike[str], model: nn.Module | None = None) -> None:
        """Write a model's weights for use elsewhere, as ``.safetensors`` or in torch.save's format. Rank 0 writes.

        Raises:
            ConfigError: several models are prepared and `model` is None, or a package is missing.
        """
        chosen = pick_model(model, self._models)
        self._session.catch_up()  # if rank 0 missed the last step
        self._context.engine.totals.read()
        if self.is_main and self._context.spec.mode != "verify":
            with self._session.synchronised_weights():
                write_weights(path, chosen)

    @shows_usage("for batch in run.batches(val_loader):, where val_loader is a plain DataLoader")
    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Iterate over this rank's batches of a plain loader: every sample once over all ranks, equally many batches each.

        Sum over the samples and call `reduce`; a mean of means of unequal batches would be wrong.
        """
        self._refuse_in_loss_fn("run.batches")
        return self._session.evaluate(loader)

    @shows_usage("run.log({'loss': loss, 'lr': lr}); the step is known")
    def log(self, metrics: Mapping[str, Any]) -> None:
        """Write numbers to the run's records and loggers, at the current step. Every rank may call it.

        A number that lies on a GPU is not waited for: it is copied as it is now, and written with the record of its step.

        Images, texts, histograms and tables become files in the run folder, and are sent to the loggers that have them.

        Args:
            metrics: numbers or tensors with one element; images (pictures of Pillow, figures of matplotlib, arrays or tensors of
                shape (channels, height, width) or (height, width, channels), floats from 0 to 1 or integers to 255); texts;
                histograms (counts and edges, what `numpy.histogram` returns); tables (lists of dicts).

        Raises:
            StepError: a value is none of these.
        """
        self._session.log(metrics)

    def print(self, *values: Any, **options: Any) -> None:
        """Print once, on the main rank, as `print` does, in one write; on the others nothing. Every rank may call it."""
        if self.is_main and self._context.spec.mode != "verify":
            text = io.StringIO()
            print(*values, file=text, **{key: value for key, value in options.items() if key not in ("file", "flush")})
            stream = options.get("file") or sys.stdout
            stream.write(text.getvalue())
            stream.flush()

    @shows_usage("if run.any(flag): break")
    def any(self, flag: Any) -> bool:
        """Return whether the flag is true on any rank; the way to leave a loop together."""
        self._refuse_in_loss_fn("run.any")
        return self._session.any(collect.flag_value(flag))

    @shows_usage("run.reduce(value), or with op='mean', 'min' or 'max'")
    def reduce(self, value: Any, op: str = "sum", group: dist.ProcessGroup | None = None) -> Any:
        """Reduce a number, a tensor, or a dict or list of them over all ranks: ``sum``, ``mean``, ``min`` or ``max``.

        Inside a loop over `batches` it is over the ranks that have a batch there, and so are `gather`, `any` and `barrier`.
        With a `group` (see `group`), over its ranks only; a rank outside receives its own value.
        """
        self._refuse_in_loss_fn("run.reduce")
        subset = None if group is None else subset_of(group, self._context.groups)
        return value if group is not None and subset is None else self._session.reduce(value, op, subset)

    @shows_usage("run.gather(predictions); several values in a tuple: run.gather((predictions, labels))")
    def gather(self, value: Any) -> Any:
        """Join a value of all ranks, of any length on each; all ranks call it, and all receive the result.

        Values with one entry for each sample that this rank received from the newest `batches` are joined in the loader's
        order, each sample once, inside the loop and after it. Other values are joined by rank.

        Args:
            value: a tensor or array, joined along its first dimension; a list, one object for each sample, joined to one list;
                a dict or tuple of these; any other object (a number, a text): the result is a list with one for each rank.

        Returns:
            The same kind as `value`; tensors on its device.

        Raises:
            ConfigError: the value can't be pickled.
            DesyncError: the ranks pass other keys or kinds, or tensors that differ beyond their first dimension.
        """
        self._refuse_in_loss_fn("run.gather")
        return self._session.gather(value)

    @shows_usage("run.barrier()")
    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        self._refuse_in_loss_fn("run.barrier")
        self._session.barrier()

    @shows_usage("run.group([0, 1]), or run.group('cuda'), 'cpu' or 'node'")
    def group(self, ranks: Sequence[int] | str) -> dist.ProcessGroup:
        """Return a process group of some ranks for the user's own collectives. All ranks call it with the same ranks.

        The same ranks return the same group. It works with a single rank too, and ends with `close`. A rank outside
        receives torch's ``GroupMember.NON_GROUP_MEMBER``, with which a collective does nothing.

        Args:
            ranks: distinct ranks in any order; or ``"cuda"`` or ``"cpu"`` for the ranks that compute there; or ``"node"`` for
                the ranks of this machine (each machine has its own group).

        Raises:
            ConfigError: an unknown rank, or none.
            DesyncError: the ranks request different groups; the message lists all requests.
        """
        location = RankLocation(self._context.device.type, self._context.spec.node_rank)
        return user_group(ranks, location, self._context.groups, self._context.control)

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the body on rank 0 first, then on one rank of each other machine, then on all others (a download, a cache)."""
        turn = 0 if self.is_main else 1 if self._context.spec.local_rank == 0 else 2
        for _ in range(turn):
            self._context.control.barrier(Operation.MAIN_FIRST)
        yield
        for _ in range(2 - turn):
            self._context.control.barrier(Operation.MAIN_FIRST)

    @shows_usage("run.tracker('wandb')")
    def tracker(self, name: str) -> Any:
        """Return the own object of a logger: for images, histograms, tables, text, whatever its library has.

        ``wandb``: the W&B run. ``tensorboard``: a `torch.utils.tensorboard.SummaryWriter`. ``mlflow``: `(client, run_id)`. Of
        another package: its logger. Steps so far are sent before. On ranks other than the main one, calls do nothing.

        Raises:
            ConfigError: the run has no such logger.
        """
        return open_tracker(name, self._context)

    def _refuse_in_loss_fn(self, what: str) -> None:
        if self._context.loop.in_backward and not self._context.control.is_alone:
            raise inside_loss_fn(what)

    def close(self) -> None:
        """End the run: last checkpoint, records, workers, groups. Called automatically when the script ends."""
        global _open
        if self._closed:
            return
        self._closed = True
        _open = None
        self._session.close()
