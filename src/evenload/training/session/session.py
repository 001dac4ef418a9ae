"""One session of a run, from `init` to the end of the script: preparation, checks at the first step, the end."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from evenload.errors import ConfigError, EvenloadError, StepError
from evenload.job import EXIT_CODE
from evenload.training.adaptive_batch.setup import open_adaptive_batch
from evenload.training.checkpoint.options import SavedValues
from evenload.training.comm import rpc
from evenload.training.comm.control import Operation
from evenload.training.comm.subset import Subset
from evenload.training.compute.batchnorm import in_evaluation, restore
from evenload.training.data.checks import check_loader
from evenload.training.data.evaluate import EvaluationMembers, close_persistent_workers, evaluation_batches
from evenload.training.data.gather import follow_evaluation, gather_values, reduce_values
from evenload.training.elastic.evaluating import LiveEvaluationMembers
from evenload.training.elastic.leaving import ComputingRanks, why_not_restored
from evenload.training.elastic.members import Members
from evenload.training.islands.synchroniser import IslandSynchroniser
from evenload.training.launch import worker
from evenload.training.launch.print_once import warn_once
from evenload.training.measure import Measurement, read_options
from evenload.training.parallel.asynchronous.strategy import AsyncStrategy
from evenload.training.session import prepare
from evenload.training.session.advice import LinkAdvice
from evenload.training.session.async_run import StalenessRates, is_asynchronous
from evenload.training.session.dry_run import describe_run
from evenload.training.session.gradient_contract import GradientContract
from evenload.training.session.live_objects import live_objects
from evenload.training.session.open import is_watched
from evenload.training.session.silent_mistakes import SilentMistakes
from evenload.training.session.state import Saver
from evenload.training.session.stop import Stopper
from evenload.training.step.context import TrainingContext
from evenload.training.step.step import Step, StepListener
from evenload.training.step.step_loader import StepLoader
from evenload.training.verify.coupling import CouplingWatch
from evenload.training.verify.verifier import Verifier


class Session(StepListener):
    def __init__(
        self, context: TrainingContext, saver: Saver, models: list[nn.Module], loaders: list[StepLoader]
    ) -> None:
        self._context = context
        self._saver = saver
        self._models = models
        self._loaders = loaders
        self._stopper = Stopper(context, saver)
        if isinstance(context.engine.strategy, AsyncStrategy):
            context.engine.strategy.set_on_wait(self._stopper.poll)
            context.engine.strategy.averages = self._averages
        self._evaluation_parts = follow_evaluation(context.groups, context.control)
        self._attached = 0
        self._has_begun = False
        self._verifier = Verifier(context, models) if context.spec.mode == "verify" else None
        self._contract = GradientContract(context, models, verifies=self._verifier is not None)
        self._ranks = ComputingRanks(context, models, self._unregistered)
        self._advice = LinkAdvice(context, models)
        self._mistakes = SilentMistakes(context, models, loaders)
        self._islands: IslandSynchroniser | None = None
        if context.islands is not None:
            self._islands = IslandSynchroniser(context, context.islands, models, loaders, live_objects)
            saver.islands = self._islands
        asynchronous = is_asynchronous(context.config, context.spec)
        if asynchronous:
            context.loop.before_use = context.control.meet
        self._members: Members | None = None
        self._trains = trains = context.spec.mode == "train" and not asynchronous
        if is_watched(context.config, context.spec):
            self._members = Members(context, loaders, saver, self._why_not_restored, self._contract.search)
            saver.before_write = self._members.catch_up
        # Under async rank 0 computes nothing.
        coupling = CouplingWatch(context, models) if trains else None
        self._stale_rates = (
            StalenessRates(context.engine.strategy) if context.config.staleness_lr == "inverse" else None
        )
        listeners: list[StepListener | None] = [
            self._members,
            self._ranks,
            self._verifier,
            self._islands,
            self,
            self._mistakes if trains else None,
            self._contract,
            coupling,
            self._advice,
            self._stopper,
            None if self._members is None else self._members.stall_watch,
        ]
        if context.spec.mode == "measure":
            listeners.append(Measurement(context, read_options(context.spec.options), self._ranks))
        for listener in listeners:
            if listener is not None:
                context.loop.add_listener(listener)
        self._hooks = (
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        )

    def _averages(self) -> list[torch.Tensor]:
        """Return the tensors of registered models that are not prepared."""
        known = set(map(id, self._models))
        found = [v for v in self._context.registry.values() if isinstance(v, nn.Module) and id(v) not in known]
        return [tensor for model in found for tensor in (*model.parameters(), *model.buffers())]

    def _unregistered(self) -> list[str]:
        """Return the types of existing schedulers and averaged models that were not passed to `run.resume`."""
        held = self._context.registry.values()
        found = live_objects(LRScheduler, AveragedModel, besides=held) if self._saver.resumed else ()
        return sorted(type(value).__name__ for value in found)

    def _why_not_restored(self) -> str:
        """Return why this rank could not take the place of another, or another its; empty if it could."""
        if self._context.islands is not None:
            return "with strategy='local' the state of an island is not another's"
        if rpc.is_running():
            return "torch's RPC is running, which takes no rank anew: one that joins would only reach itself"
        return why_not_restored(self._context, self._models, self._unregistered)

    def prepare(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            self._context.loop.leave_line()
            if not any(value is model for model in self._models):
                self._models.append(prepare.prepare_model(self._context, value))
            return value
        if isinstance(value, DataLoader | tuple):
            if self._saver.resumed:
                raise ConfigError(
                    "run.prepare received a loader after run.resume, which restores the loaders' position; prepare it first"
                )
            source = None if self._verifier is None else self._verifier.plan_source()
            loader = prepare.prepare_loader(self._context, value, len(self._loaders), source)
            adaptive_batch = open_adaptive_batch(self._context, loader, len(self._loaders))
            self._saver.adaptive_batch = adaptive_batch or self._saver.adaptive_batch
            self._loaders.append(loader)
            return loader
        return prepare.refuse(value)

    def attach(self) -> None:
        if len(self._models) != self._attached:
            prepare.attach_models(self._context, self._models)
            self._contract.attach()
            self._advice.announce()
            self._attached = len(self._models)

    def resume(self, state: Mapping[str, Any]) -> SavedValues:
        if not self._loaders:
            raise ConfigError(
                "run.resume was called before run.prepare(model, loader): prepare first; resume restores the loader's position"
            )
        if not state:
            raise ConfigError(
                "run.resume received nothing, so checkpoints would hold no weights; write: run.resume(model=model, "
                "optimizer=optimizer)"
            )
        if self._has_begun:
            raise StepError("run.resume was called after the loop began; call it once, before the loop")
        self._context.open_folder()
        saved = self._saver.resume(dict(state))
        self._stopper.listen()
        return saved

    def catch_up(self) -> None:  # of ranks that missed the last step; all ranks call it
        if self._members is not None and self._context.loop.step is None:
            self._members.catch_up()

    def evaluate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        if isinstance(loader, StepLoader):
            raise ConfigError("run.batches received a loader from run.prepare, for training; pass a plain DataLoader")
        check_loader(loader)
        return self._evaluate(loader)

    def _evaluate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        context = self._context
        context.loop.settle()
        self.catch_up()
        rank, speeds, members = context.control.guarded(lambda: self._meet_to_evaluate(loader))
        batches = evaluation_batches(
            loader,
            rank=rank,
            world_size=len(speeds),
            weights=speeds,
            agree=context.control.agree,
            agree_round=functools.partial(context.control.agree, operation=Operation.NEXT_ROUND),
            seed=context.config.seed,
            epoch=0,
            device=context.device,
            keyed_rng=context.config.dataset_rng == "keyed",
            parts=self._evaluation_parts,
            members=members,
        )
        with context.clock.segment("other"), self.synchronised_weights(together=True), in_evaluation(len(speeds)):
            yield from context.clock.evaluating(batches)

    def _meet_to_evaluate(self, loader: DataLoader[Any]) -> tuple[int, tuple[float, ...], EvaluationMembers]:
        """Return this rank, all speeds and the members that meet here: right after it they may be others, on some ranks only."""
        prepare.check_same_loader(self._context, loader, Operation.EVALUATE)
        groups, world_size = self._context.groups, self._context.groups.world_size
        speeds = self._loaders[0].planner.speeds() if self._loaders else (1.0,)
        if len(speeds) != world_size:
            speeds = (1.0 / world_size,) * world_size
        speeds = tuple(
            speed if rank in groups.generation.computing or world_size == 1 else 0.0
            for rank, speed in enumerate(speeds)
        )
        workers = groups.membership.workers if world_size > 1 else (self._context.spec.worker,)
        members = EvaluationMembers(workers) if self._members is None else LiveEvaluationMembers(self._context)
        return groups.rank if world_size > 1 else 0, speeds, members

    def synchronised_weights(self, *, together: bool = False) -> contextlib.AbstractContextManager[None]:
        """Let the models hold weights of all islands while the body runs; `together`: all ranks do it."""
        return (
            contextlib.nullcontext() if self._islands is None else self._islands.synchronised_weights(together=together)
        )

    def any(self, flag: float) -> bool:
        operation = Operation.ANY_BATCH if self._evaluation_parts.are_for_some else Operation.ANY
        return any(row[0] for row in self._context.control.exchange(operation, [flag]))

    def reduce(self, value: Any, op: str, subset: Subset | None) -> Any:
        return reduce_values(value, op, subset, self._evaluation_parts, self._context.groups, self._context.control)

    def barrier(self) -> None:
        operation = Operation.BARRIER_BATCH if self._evaluation_parts.are_for_some else Operation.BARRIER
        with self._context.clock.segment("wait"):
            self._context.control.barrier(operation)

    def gather(self, value: Any) -> Any:
        with self._context.clock.segment("other"):
            return gather_values(value, self._evaluation_parts, self._context.groups, self._context.control)

    def log(self, metrics: Mapping[str, Any]) -> None:
        if not isinstance(metrics, Mapping):
            raise StepError(f"run.log received a {type(metrics).__name__}; name the numbers: run.log({{'loss': loss}})")
        step = self._context.loop.step
        if step is not None and step.arm:
            return  # a measurement's step is no training
        if self._context.loop.in_backward:
            warn_once(
                "run.log was called inside loss_fn: its values are of one micro-batch of rank 0. For the average over the "
                "global batch return them with the loss, {'loss': loss, 'accuracy': accuracy}, and log step.metrics"
            )
        index = step.index if step is not None else max(0, self._context.loop.steps_done - 1)
        self._context.recorder.log(metrics, index)
        self._saver.log(metrics)

    def close(self) -> None:
        """End the session; call the other ranks only if this one ended without an error."""
        context = self._context
        # A rank that left a step by an error does not reach the exchange where the others would wait.
        well = _ended_well(context.loop.stopped) and not (context.loop.failed and context.groups.world_size > 1)
        well = well and not context.loop.left
        try:
            if well:
                self._meet_at_end()
            else:
                context.control.meets_later = None
                with contextlib.suppress(EvenloadError):
                    context.engine.totals.read(waits=False)
            is_saved = context.groups.rank == 0
            self._saver.close(well)
            if well and context.config.dry_run and not self._has_begun:
                self._print_dry_run(None)
            if well:
                context.control.set_position(0, -1)
                # If rank 0 was lost before all met here, the next one saves. In a loop of async a rank meets nobody.
                while not (
                    context.groups.gone
                    or context.control.apart
                    or context.control.exchange(Operation.CLOSE, [float(is_saved)])[0][0]
                ):
                    is_saved = context.groups.rank == 0
                    self._saver.close(well)
        finally:
            self._release(well)

    def _meet_at_end(self) -> None:
        """Wait for the other ranks at the end of the script, which then all have the newest state."""
        context = self._context
        if worker.progress.exit_code == 0:
            context.control.meet()  # the script goes to its end as if it had left its loop by break
        if self._members is not None:
            self._members.finish()
        context.loop.settle()
        if self._islands is not None:
            self._islands.finish()

    def _release(self, well: bool) -> None:
        """Leave the script's own objects bare, and close records, groups and connections."""
        context = self._context
        for hook in self._hooks:
            hook.remove()
        for loader in self._loaders:
            loader.loader.close()
        close_persistent_workers()
        context.loop.close()
        self._contract.close()
        context.engine.strategy.detach()
        if self._islands is not None:
            self._islands.close()
        together = context.groups.world_size == context.spec.world_size and not context.control.apart
        rpc.end_rpc(well=well and sys.exception() is None and together)
        for model in self._models:
            restore(model)
        try:
            context.recorder.close(well)
        finally:
            self._stopper.close(well)
            with contextlib.suppress(EvenloadError):
                if context.step_groups is not context.groups:
                    context.step_groups.close()
                context.groups.close()
            if self._members is not None:
                self._members.close()

    def _before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        loop = self._context.loop
        try:
            self._contract.before_optimizer(optimizer)
        except StepError:
            if loop.optimizer_stepped:
                loop.unsound = "an optimizer was refused after another one of the same step"
            loop.watch.was_refused = True
            raise
        self._mistakes.before_optimizer(optimizer)
        self._context.engine.totals.before_optimizer(optimizer)
        self._ranks.optimizer = optimizer
        if not self._context.engine.stays_because:
            self._ranks.check_optimizer(optimizer)
        if self._stale_rates is not None:
            self._stale_rates.before(optimizer)
        self._saver.in_optimizer = True
        if (adaptive_batch := self._saver.adaptive_batch) is not None and loop.awaits_optimizer:
            adaptive_batch.rates.before(optimizer)

    def _after_optimizer(self, *_: Any) -> None:
        if (adaptive_batch := self._saver.adaptive_batch) is not None:
            adaptive_batch.rates.after()
        if self._stale_rates is not None:
            self._stale_rates.after()
        self._ranks.optimizer = None
        self._saver.in_optimizer = False
        self._context.engine.totals.after_optimizer()
        self._context.loop.optimizer_done()

    @property
    def rests(self) -> bool:
        return self._trains and self._islands is None and self._saver.rests

    def on_begin(self, step: Step) -> None:
        """Check once, at the first step, that everything is prepared."""
        if not step.arm:
            self._saver.save_best()
        if self._has_begun:
            return
        self._has_begun = True
        self._context.open_folder()
        self._stopper.begin()
        if self._saver.was_finished:
            self._context.recorder.event(
                "continued",
                f"the finished run goes on with epoch {step.epoch}: the script trains longer now",
                step=step.index,
            )
        prepare.check_models_prepared(self._context, self._models)
        if self._context.config.dry_run:
            self._print_dry_run(step)
            raise SystemExit(0)
        # Of a rank that joins, the others wait in this step: what they have looked for is not looked for again.
        if not self._context.spec.joining and (forgotten := self._unregistered()):
            self._context.recorder.event(
                "unregistered",
                f"NOT IN CHECKPOINTS: {', '.join(forgotten)} exists but was not passed to run.resume; after a resume it would "
                "start from scratch",
            )

    def on_boundary(self, step: Step) -> None:
        """Report a checkpoint that is complete; write one that waited for a synchronisation, and a new best one."""
        self._saver.collect()
        if self._islands is not None and self._islands.owes_checkpoint:
            self._saver.save(is_due=True)
        self._saver.save_best()

    def _print_dry_run(self, step: Step | None) -> None:
        if self._context.groups.rank == 0:
            found = describe_run(self._context.config, self._models, self._saver.decisions, step)
            print("\n".join([*found, *self._advice.for_a_dry_run()]), flush=True)


def _ended_well(stopped: bool) -> bool:
    """Return whether the script ended without an error, or called close itself; `stopped` makes EXIT_CODE no error."""
    if worker.progress.exit_code is not None:
        return worker.progress.exit_code == 0 or (stopped and worker.progress.exit_code == EXIT_CODE)
    error = sys.exception()
    return error is None or (stopped and isinstance(error, SystemExit) and error.code == EXIT_CODE)
