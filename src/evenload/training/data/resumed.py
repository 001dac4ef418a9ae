"""Check that an epoch goes on in the order in which it began."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from evenload.errors import DataError
from evenload.training.data import order
from evenload.training.data.cursor import Cursor


def check_resumed(now: Cursor, drawn: order.SampleOrder, loader: DataLoader[Any], *, is_joint: bool) -> None:
    """Raise DataError if the order of a running epoch is another than that at which a checkpoint stands."""
    if now.in_epoch and now.epoch_samples not in (-1, drawn.num_samples):
        raise DataError(
            f"the checkpoint is in the middle of an epoch of {now.epoch_samples} samples, now the epoch has "
            f"{drawn.num_samples}: the dataset or the sampler changed; use the same data, leave the rest of the epoch out "
            "with --override, or start anew with --fresh"
        )
    if now.in_epoch and now.order_key == -1 and order.is_computed(loader):
        raise DataError(
            f"the checkpoint is in the middle of an epoch of more than {order.MAX_DRAWN:,} samples that an earlier version "
            "shuffled in another order: finish the epoch with that version, or start anew with --fresh"
        )
    if now.in_epoch and now.order_key not in (-1, drawn.key):
        if is_joint:
            raise DataError(
                "the checkpoint is in the middle of an epoch, and the loaders of the tuple now give other samples: a "
                "batch_size, a length or the order of a sampler changed; set them as they were, or start anew with --fresh"
            )
        raise DataError(
            "the checkpoint is in the middle of an epoch, and the sampler now draws a different order: samples would be "
            "used twice or left out. The sampler has a state that a resume can't restore; let it draw from torch's, Python's "
            "or numpy's global generators, from a generator that it holds, or by set_epoch; or start anew with --fresh"
        )
