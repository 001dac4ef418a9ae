"""Group the parameters of split models into segments that are on one device on every rank."""

from __future__ import annotations

import itertools
from collections.abc import MutableMapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from evenload.errors import ConfigError, PeerLostError
from evenload.training.comm.groups import Groups
from evenload.training.parallel.model_split.transfers import piece_indices


class BucketSegments:
    """A segment number for each parameter, equal on all ranks; a gradient bucket lies within one segment.

    A bucket is on one device, and all ranks sum the same buckets in the same order. Ranks may split the same model at different
    layers (unlike devices), so a bucket must end where any rank's piece ends.
    """

    def __init__(self, models: Sequence[nn.Module] = (), groups: Groups | None = None) -> None:
        """Gather all ranks' devices; a collective call. ConfigError if NCCL can't sum on them."""
        self._numbers: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()
        self._unused = itertools.count()
        params = list({id(p): p for model in models for p in model.parameters()}.values())
        control = groups.control if groups is not None else None
        if groups is None or control is None:
            return
        pieces = piece_indices(models)
        places = [(p.device, pieces.get(id(p), 0)) for p in params]
        kinds = list(dict.fromkeys(places))
        try:
            most = torch.tensor([len(kinds)], dtype=torch.int32)
            groups.wait(dist.all_reduce(most, op=dist.ReduceOp.MAX, group=control, async_op=True))
            if int(most) < 2:
                return
            own = torch.tensor([kinds.index(place) for place in places], dtype=torch.int32)
            everyone = own.new_empty(groups.world_size, len(params))
            groups.wait(dist.all_gather(list(everyone.unbind()), own, group=control, async_op=True))
        except RuntimeError as error:
            raise PeerLostError(f"the ranks could not exchange the devices of their parameters: {error}") from error
        _check_nccl(everyone, groups)
        columns = [tuple(column) for column in everyone.T.tolist()]
        numbers = {column: number for number, column in enumerate(dict.fromkeys(columns))}
        for param, column in zip(params, columns, strict=True):
            self._numbers[param] = numbers[column]
        self._unused = itertools.count(len(numbers))

    def of(self, param: nn.Parameter) -> int:
        """Return the parameter's segment. A parameter added later gets its own, hence its own bucket."""
        if not len(self._numbers):
            return 0
        if param not in self._numbers:
            self._numbers[param] = next(self._unused)
        return self._numbers[param]


def _check_nccl(everyone: torch.Tensor, groups: Groups) -> None:
    """Refuse unequal splits: NCCL connects devices in the order of their use, which must be equal on all ranks."""
    among_gpus = everyone[list(groups.nccl_ranks)]
    if bool((among_gpus != among_gpus[:1]).any()):
        raise ConfigError(
            "the ranks split the model at different layers, but sum gradients over NCCL, which can't do that; start with "
            "`evenload run -d 0+1,2+3` (which sums over gloo), or give place the same memory limits on all ranks"
        )
