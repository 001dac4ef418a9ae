"""`Control`: small exchanges at the boundaries of a step, each checked to be the same operation on all ranks.

Every exchange carries the operation and position of its rank. If two ranks differ, all of them raise the same `DesyncError`,
which lists what each does: a `break` on one rank is an error, never a hang. (A row that rank 0 has pushed is checked by the other
ranks alone: there rank 0 gets a `PeerLostError` with that list.)
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from evenload.errors import DesyncError, LaunchError, PeerLostError, StepError
from evenload.training.comm.groups import RankGroup
from evenload.training.comm.host_exchange import ROW_VALUES
from evenload.training.comm.row_ring import RowRing
from evenload.training.comm.subset import Subset
from evenload.training.comm.user_collectives import user_collectives

Result = TypeVar("Result")
Guard = Callable[[Callable[[], object]], object]
"""Runs a collective, again among the remaining ranks if ranks are lost in it, and returns its result."""

_HEAD = 4
CAPACITY = ROW_VALUES - _HEAD
"""Values of one exchange; more values take further rounds."""
_MAX_EXACT = 1 << 53
"""Integers below it are exact as float64."""


class Operation(enum.IntEnum):
    INIT = 0
    PREPARE = 1
    AGREE = 2
    BEGIN = 3
    BACKWARD = 4
    END_ROUND = 5
    """The end of a loop over `run.batches`. A rank ends its loop there too if the others have left theirs before."""
    EVALUATE = 6
    CHECKPOINT = 7
    RESUME = 8
    ANY = 9
    REDUCE = 10
    BARRIER = 11
    CLOSE = 12
    MEASURE = 13
    GROUP = 14
    MAIN_FIRST = 15
    GATHER = 16
    GATHER_BATCH = 17
    """A gather inside a loop over `run.batches`; see `Control.join_gathers`."""
    REBUILD = 18
    SYNCHRONISE = 19
    NEXT_ROUND = 20
    """The next batch of an iterable dataset in such a loop. It is as `END_ROUND` to a rank without batches alone."""
    ANY_BATCH = 21
    """`ANY` inside a loop over `run.batches`; see `Control.join_gathers`."""
    REDUCE_BATCH = 22
    BARRIER_BATCH = 23


_DOING = {
    Operation.INIT: "calls evenload.init",
    Operation.PREPARE: "calls run.prepare",
    Operation.AGREE: "begins an epoch",
    Operation.BEGIN: "is in step.backward",
    Operation.BACKWARD: "is in step.backward",
    Operation.END_ROUND: "is at the end of a loop over run.batches",
    Operation.NEXT_ROUND: "is in a loop over run.batches",
    Operation.EVALUATE: "begins run.batches",
    Operation.CHECKPOINT: "calls run.checkpoint",
    Operation.RESUME: "calls run.resume",
    Operation.ANY: "calls run.any",
    Operation.REDUCE: "calls run.reduce",
    Operation.BARRIER: "calls run.barrier",
    Operation.CLOSE: "has ended its script",
    Operation.MEASURE: "is at the edge of a measured block",
    Operation.GROUP: "calls run.group",
    Operation.MAIN_FIRST: "is in run.main_first",
    Operation.GATHER: "calls run.gather",
    Operation.REBUILD: "begins a generation",
    Operation.GATHER_BATCH: "calls run.gather in a loop over run.batches",
    Operation.SYNCHRONISE: "synchronises its island",
    Operation.ANY_BATCH: "calls run.any in a loop over run.batches",
    Operation.REDUCE_BATCH: "calls run.reduce in a loop over run.batches",
    Operation.BARRIER_BATCH: "calls run.barrier in a loop over run.batches",
}


_CALLED_BY_ALL = (
    *(Operation.CHECKPOINT, Operation.GATHER, Operation.REDUCE, Operation.ANY, Operation.BARRIER, Operation.GROUP),
    *(Operation.RESUME, Operation.PREPARE, Operation.EVALUATE),
)
"""Operations that a script may call on one rank by mistake."""

_GATHERS = (Operation.GATHER_BATCH, Operation.REDUCE_BATCH)
_IN_LOOPS = (*_GATHERS, Operation.ANY_BATCH, Operation.BARRIER_BATCH)

_TOGETHER = (
    *(Operation.EVALUATE, Operation.REDUCE, Operation.BARRIER, Operation.GROUP, Operation.MAIN_FIRST),
    *(Operation.GATHER, *_GATHERS, Operation.BARRIER_BATCH),
)


class Control:
    """Exchanges of small vectors of float64 (exact for integers below 2^53) between all ranks."""

    def __init__(self, groups: RankGroup) -> None:
        self._groups = groups
        self.apart = False
        """True while ranks take different numbers of steps (strategy ``async``): calls of all ranks together are errors."""
        self.islands_apart: Callable[[], bool] = lambda: False
        """Returns whether islands are at different steps (``local_steps="auto"``): calls of all ranks together are errors."""
        self.meets_later: Callable[[], None] | None = None
        """Ends such a time on this rank, whose script has left its loop by an exception, and may have caught it."""
        self._position = (0, -1)
        self._may_be_in_loops = False
        """True from the begin of a loop over `run.batches` until all ranks are known to have left it; equal on all ranks."""
        self._without_batches: Callable[[], Collection[int]] = tuple
        self._send_nothing: Callable[[NDArray[np.float64]], Callable[[], None]] = lambda table: lambda: None
        self._num_collectives = 0
        """Of the script's own, as of the last row that was pushed."""
        self.waits_since_s = 0.0
        """Since when, by `time.monotonic`, this rank waits in an exchange; 0 if it doesn't."""
        self.guard: Guard | None = None
        """Repeats collectives in which a rank is lost (elastic/); None: a lost rank is an error."""
        self.after_others_gather: Callable[[Callable[[], None]], None] = lambda note: note()
        """Does what `guard` does after a collective, where this rank takes part in a gather from another exchange: it calls
        its argument once if all ranks hold the result."""

    def join_gathers(
        self,
        without_batches: Callable[[], Collection[int]],
        send_nothing: Callable[[NDArray[np.float64]], Callable[[], None]],
    ) -> None:
        """Let ranks without batches take part in gathers inside the others' loops, from whichever exchange they wait in.

        Args:
            without_batches: returns these ranks among the present members; the same on all ranks.
            send_nothing: takes part in the gather that follows, and returns what notes it; its argument is the values of all
                ranks, by rank, 0 for those without batches.
        """
        self._without_batches = without_batches
        self._send_nothing = send_nothing

    def set_position(self, epoch: int, step: int) -> None:
        """Set the epoch and the step in the epoch of this rank, compared at each exchange; step -1 is outside of a step."""
        self._position = (epoch, step)

    @property
    def epoch(self) -> int:
        return self._position[0]

    def guarded(self, collective: Callable[[], Result]) -> Result:
        """Run a collective that all ranks call outside of a backward, with `guard`; what it contains is guarded as a whole."""
        guard = self.guard
        if guard is None:
            return collective()
        self.guard = None
        try:
            return guard(collective)  # type: ignore[return-value]
        finally:
            self.guard = guard

    def take_guard(self) -> Guard | None:
        """Let a lost rank be an error, which the caller deals with, until it sets `guard` again to what this returns."""
        guard, self.guard = self.guard, None
        return guard

    def exchange(self, operation: Operation, values: Sequence[float] = ()) -> list[list[float]]:
        """Exchange values and return those of all ranks, by rank; errors as in `exchange_table`."""
        rows: list[list[float]] = self.exchange_table(operation, values).tolist()
        return rows

    def exchange_table(self, operation: Operation, values: Sequence[float] = ()) -> NDArray[np.float64]:
        """Exchange values and return those of all ranks, shape ``(num_ranks, len(values))``.

        Raises:
            DesyncError: the ranks differ in operation, position or number of values.
            LaunchError: the script destroyed the process groups.
            PeerLostError: a rank is gone.
        """
        if self.guard is None:
            return self._exchange_table(operation, values)
        return self.guarded(lambda: self._exchange_table(operation, values))

    def _exchange_table(self, operation: Operation, values: Sequence[float]) -> NDArray[np.float64]:
        self.check_open(operation)
        if self._groups.control is None:
            return np.array([values], dtype=np.float64)
        rounds = max(1, -(-len(values) // CAPACITY))
        head = [float(operation), *map(float, self._position), float(len(values))]
        parts: list[NDArray[np.float64]] = []
        for index in range(rounds):
            part = values[index * CAPACITY : (index + 1) * CAPACITY]
            end = _HEAD + len(part)
            row = [*head, *part, *[0.0] * (ROW_VALUES - end)]
            table = self._exchange_row(operation, row)
            while ((heads := table[:, :_HEAD]) != heads[0]).any():
                outside = self._outside(table)
                if outside is None:
                    without = self._without_batches() if self._may_be_in_loops else ()
                    raise DesyncError(_describe_desync(heads.tolist(), self._groups.ranks, without))
                table[outside, _HEAD:] = 0.0
                if not outside[self._groups.ranks.index(self._groups.rank)]:
                    return table[:, _HEAD:end]
                is_gather = np.isin(heads[~outside, 0], _GATHERS).any()
                self.after_others_gather(self._send_nothing(table[:, _HEAD:]) if is_gather else lambda: None)
                table = self._exchange_row(operation, row)
            parts.append(table[:, _HEAD:end])
        if operation in (Operation.EVALUATE, Operation.BEGIN, Operation.END_ROUND):
            self._may_be_in_loops = operation is Operation.EVALUATE
        return parts[0] if rounds == 1 else np.concatenate(parts, axis=1)

    def push_row(self, operation: Operation, values: Sequence[float]) -> bool:
        """Do rank 0's part of an exchange of `CAPACITY` values without waiting; False if it must exchange them."""
        if isinstance(self._groups, Subset) or (ring := self._ring) is None:
            return False
        before, self._num_collectives = self._num_collectives, user_collectives(self._groups.own_groups)
        row = [float(operation), *self._position, len(values), *values]
        return ring.push(row, wakes=self._num_collectives != before)

    def pop_row(self, operation: Operation, values: Sequence[float]) -> NDArray[np.float64] | None:
        """Return the values that rank 0 has pushed; None if it exchanges them. Errors as in `exchange_table`."""
        if (ring := self._ring) is None:
            return None
        self.check_open(operation)
        self.waits_since_s = time.monotonic()
        try:
            row = ring.pop()
        except (TimeoutError, PeerLostError) as error:
            raise self._lost(operation, error) from None
        finally:
            self.waits_since_s = 0.0
        if row is None:
            return None
        heads = [row[:_HEAD].tolist(), [float(operation), *map(float, self._position), float(len(values))]]
        if heads[0] != heads[1]:
            text = _describe_desync(heads, (0, self._groups.rank), ())
            ring.abort(text)
            raise DesyncError(text)
        return row[_HEAD:]

    @property
    def _ring(self) -> RowRing | None:
        rows = None if isinstance(self._groups, Subset) else self._groups.generation.rows
        return None if rows is None else rows.ring

    def leave_loops(self) -> None:
        """Let ranks that wait in a loop over `run.batches` go on, if others left it. All call it before they compute together."""
        if not self._may_be_in_loops or self.apart:
            return
        if self.is_alone:  # the others were lost in such a loop; a rank that joins later is in none
            self._may_be_in_loops = False
        else:
            self.exchange(Operation.BEGIN)

    @property
    def is_alone(self) -> bool:
        """True if no other rank takes part in an exchange."""
        return self._groups.control is None

    @property
    def is_barred(self) -> bool:
        """True if an exchange of a rank that is alone may be an error; see `check_open`."""
        return self.apart or self._groups.closed

    def meet(self) -> None:
        """Do what `meets_later` has left for the next call of all ranks together."""
        meets, self.meets_later = self.meets_later, None
        if meets is not None:
            meets()

    def check_open(self, operation: Operation) -> None:
        """Raise StepError or LaunchError if the run is over, or the ranks are apart."""
        if self.meets_later is not None and operation not in (Operation.CLOSE, Operation.BEGIN):
            self.meet()
        if self.apart and operation in _TOGETHER:
            raise StepError(
                f"the script {_DOING[operation]} inside a loop over a prepared loader. Under strategy='async' the ranks take "
                "different numbers of steps there and can't meet; call it after the loop"
            )
        if self.islands_apart() and (operation in _TOGETHER or operation is Operation.ANY):
            raise StepError(
                f"the script {_DOING[operation]} inside a loop over a prepared loader. With local_steps='auto' islands are at "
                "different steps there and can't meet; call it after the loop, or set local_steps='equal'"
            )
        if self._groups.closed:
            raise StepError(f"the script {_DOING[operation]} after run.close(): the run is over; close it last")
        if self._groups.gone:
            raise LaunchError(
                f"the script {_DOING[operation]} after dist.destroy_process_group(), which took Evenload's groups too; call "
                "run.close() before it"
            )

    def _exchange_row(self, operation: Operation, row: Sequence[float]) -> NDArray[np.float64]:
        self.waits_since_s = time.monotonic()
        try:
            return self._groups.exchange_row(row)
        except (RuntimeError, TimeoutError, PeerLostError) as error:
            raise self._lost(operation, error) from None
        finally:
            self.waits_since_s = 0.0

    def _outside(self, table: NDArray[np.float64]) -> NDArray[np.bool_] | None:
        """Return which ranks an exchange of others is not for, where it ends without them; None where the ranks disagree.

        That is a gather inside a loop over `run.batches`, for ranks without batches; and the end of such a loop, for ranks that
        have left theirs before.
        """
        without = np.isin(self._groups.ranks, list(self._without_batches()))
        heads = table[~without, :_HEAD]
        if without.any() and len(heads) and (heads == heads[0]).all() and heads[0, 0] in _IN_LOOPS:
            return without
        waits = (table[:, 0] == Operation.END_ROUND) | ((table[:, 0] == Operation.NEXT_ROUND) & without)
        still = np.isin(table[~waits, 0], (*_IN_LOOPS, Operation.NEXT_ROUND))
        return ~waits if waits.any() and len(still) and not still.any() else None

    def _lost(self, operation: Operation, error: Exception) -> PeerLostError:
        if "imed out" in str(error):
            return PeerLostError(
                f"rank {self._groups.rank} {_DOING[operation]} and waited {self._groups.timeout_s:g} s for another rank, which "
                "is alive but did not arrive: it hangs, or is very slow; look at what it does there, or raise "
                "init(timeout_s=...)"
            )
        return PeerLostError(f"another rank is gone while rank {self._groups.rank} {_DOING[operation]} ({error})")

    def agree(self, values: Sequence[int] | None, operation: Operation = Operation.AGREE) -> list[int]:
        """Return rank 0's integers on all ranks. The others pass None, or what they would send in its place.

        With `Operation.NEXT_ROUND` nothing on ranks without batches, once the others have left the loop.

        LaunchError: rank 0 was lost before it could send them, and the next one has None.
        """
        agreed = self.guarded(lambda: self._agree(values, operation))
        if agreed is None:
            raise LaunchError(
                "rank 0 is lost, and with it what it alone had decided, such as the order of the script's own sampler; start "
                "the same command again: the run goes on at its newest checkpoint"
            )
        return agreed

    def _agree(self, values: Sequence[int] | None, operation: Operation) -> list[int] | None:
        if self._groups.control is None:
            return None if values is None else list(values)
        own = list(values or ()) if self._groups.rank == 0 else []
        # One exchange is enough for a few integers, as nearly always.
        fits = len(own) <= CAPACITY - 2 and all(-_MAX_EXACT < value < _MAX_EXACT for value in own)
        first = [float(fits), -1.0 if values is None else float(len(own)), *(map(float, own) if fits else ())]
        row, *_ = rows = self.exchange_table(operation, [*first, *[0.0] * (CAPACITY - len(first))])
        if not rows.any(axis=1).all():
            return []
        length = int(row[1])
        if length < 0:
            return None
        if row[0]:
            return [int(value) for value in row[2 : 2 + length]]
        tensor = torch.tensor(own, dtype=torch.int64) if own else torch.empty(length, dtype=torch.int64)
        try:
            self._groups.wait(dist.broadcast(tensor, group_src=0, group=self._groups.control, async_op=True))
        except RuntimeError as error:
            raise PeerLostError(f"rank 0 is gone ({error})") from error
        return tensor.tolist()

    def confirm(self) -> None:
        """Wait until all ranks have the result of the collective before; PeerLostError if one is gone."""
        if not self.is_alone and not self._groups.closed:
            self._exchange_row(Operation.BARRIER, [0.0] * ROW_VALUES)

    def barrier(self, operation: Operation = Operation.BARRIER) -> None:
        self.exchange(operation)


def _describe_desync(heads: list[list[float]], all_ranks: Sequence[int], without_batches: Collection[int]) -> str:
    places: dict[str, list[int]] = {}
    operations = {Operation(int(head[0])) for head in heads}
    one_epoch = len({head[1] for head in heads}) == 1
    for rank, (operation, epoch, step, length) in zip(all_ranks, heads, strict=True):
        doing = _DOING[Operation(int(operation))]
        at_step = f", step {int(step)}" if step >= 0 else ""
        where = f" at epoch {int(epoch)}{at_step}" if at_step or not one_epoch else ""
        size = f" with {int(length)} values" if len({tuple(head[:3]) for head in heads}) == 1 else ""
        places.setdefault(doing + where + size, []).append(rank)
    who = "; ".join(
        f"{'rank' if len(ranks) == 1 else 'each of ranks'} {', '.join(map(str, ranks))} {doing}"
        for doing, ranks in places.items()
    )
    called = [_DOING[operation].partition(" ")[2] for operation in _CALLED_BY_ALL if operation in operations]
    every = f" All ranks must call {' and '.join(called)}: not under `if run.is_main:`." if called else ""
    if Operation.CLOSE in operations and not called:
        every = (
            " A rank whose script has ended has a shorter loop than the others: another number of epochs (range), or a break, "
            "return or sys.exit() under a condition of its own (time, run.rank, its own loss). Give all ranks the same loop."
        )
    if without_batches and len(without_batches) < len(all_ranks):
        names = ", ".join(map(str, without_batches))
        in_loop = (
            f" The last loop over run.batches had no batch for rank {names}, which is past it: inside the loop the ranks that "
            "have batches may call run.gather, run.reduce, run.any and run.barrier; move all else behind the loop. An iterator "
            "that is not used up is such a loop, too: close() it."
        )
        sides: tuple[set[tuple[float, ...]], set[tuple[float, ...]]] = (set(), set())
        for rank, head in zip(all_ranks, heads, strict=True):
            sides[rank in without_batches].add(tuple(head))
        if len(sides[0]) == 1 and not sides[0] & sides[1]:
            return f"the ranks do different things: {who}.{in_loop}"
        every += in_loop
    return (
        f"the ranks do different things: {who}.{every} All ranks must leave a loop together: "
        "make one rank's decision everybody's with `if run.any(flag): break`"
    )
