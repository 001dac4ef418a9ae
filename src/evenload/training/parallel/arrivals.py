"""Agree with the other ranks on the parameters that receive a gradient, so that the same buckets leave early everywhere.

Usually nothing is sent: the exchange of a step shows which parameters each rank touched (experts that some ranks do not use,
layers that are dropped), and they are among those of earlier steps. Otherwise, or where a row has no room for so many
parameters, one sum of a few numbers per parameter travels beside the buckets that have been used before.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from evenload.training.comm.groups import Groups
from evenload.training.parallel.call_gradients import Expectation, unpack_flags
from evenload.training.parallel.local_reducer import LocalReducer
from evenload.training.parallel.reducer import BucketReducer
from evenload.training.parallel.strategy import GlobalTotals


class Arrivals:
    """Observations of earlier steps; equal on all ranks."""

    def __init__(self, expected: Mapping[int, Expectation] | None = None) -> None:
        self.expected = dict(expected or {})
        """By index of the call: 0 for a slot that was never touched, 1 where its gradient came once, in every step that
        touched it and on all ranks, 2 otherwise."""
        self.order: dict[int, None] = {}
        """Slots in the order in which their gradients came on rank 0, over the calls of a step."""
        self.last_touched: dict[int, list[int]] = {}
        """Result of `agree` at the last usual call of this index."""

    def agree(
        self,
        call_index: int,
        reducer: BucketReducer | LocalReducer,
        groups: Groups,
        totals: GlobalTotals,
        *,
        was_late: bool,
    ) -> list[int]:
        """Return 1 for each slot that some rank touched.

        Args:
            call_index: index of the call in its step.
            reducer: after the backwards of this rank.
            groups: of this generation.
            totals: of all ranks, with what they touched.
            was_late: the attempt repeats one in which a gradient came after its bucket had left.
        """
        touched, known = reducer.touched(), self.expected.get(call_index)
        is_usual = totals.same_touched and known is not None and not was_late
        if is_usual and touched == self.last_touched.get(call_index):
            return touched
        if is_usual and all(map(int.__le__, touched, known or ())):
            self.last_touched[call_index] = touched
            return touched
        if known is not None and not was_late and totals.touched is not None:
            by_any, by_all = (unpack_flags(words, len(known)) for words in totals.touched)
            if all(map(int.__le__, by_any, known)):
                # A bucket that some ranks have no gradient for leaves at the end.
                parts = zip(by_any, by_all, known, strict=True)
                self.expected[call_index] = tuple(2 if some > every else before for some, every, before in parts)
                return by_any
        if known is not None:
            reducer.flush(known)
        once = [int(count == 1) for count in reducer.observed()]
        place = [0] * len(once)
        if groups.rank == 0 and groups.gradients is not None:
            for number, index in enumerate(reducer.order(), start=1):
                place[index] = number
        on_host = len(groups.generation.computing) == len(groups.generation.ranks)
        device = torch.device("cpu") if on_host else reducer.device
        flags = torch.tensor([touched, once, place], dtype=torch.int32, device=device)
        groups.sum_async(flags, on_host=on_host).wait()
        counts, num_once, place = flags.tolist()
        num_computing = len(groups.generation.computing)
        self.expected[call_index] = tuple(
            before if not count else 1 if number == num_computing and before < 2 else 2
            for count, number, before in zip(counts, num_once, known or [0] * len(counts), strict=True)
        )
        self.order |= dict.fromkeys(
            sorted((index for index, number in enumerate(place) if number), key=place.__getitem__)
        )
        return [int(count > 0) for count in counts]
