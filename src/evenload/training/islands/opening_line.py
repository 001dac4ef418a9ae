"""The sentence on islands at the start of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim.swa_utils import AveragedModel

from evenload.config import Config
from evenload.training.comm.islands import IslandMap


def describe(config: Config, islands: IslandMap, registered: Iterable[Any]) -> str:
    """Return which islands there are, how they synchronise, and what that means for the result."""
    count = len(islands)
    average = config.outer_lr == 1 and not config.outer_momentum
    how = "their average" if average else f"an outer step (lr {config.outer_lr:g}, momentum {config.outer_momentum:g})"
    named = f"{count} island{'s' if count > 1 else ''} (ranks {islands})"
    text = f"{named}, synchronised every {config.sync_every} steps by {how}"
    if config.fragments > 1 or config.sync_delay:
        delay = config.sync_delay or config.sync_every / config.fragments
        what = f"in {config.fragments} fragments, each" if config.fragments > 1 else "and their sum"
        text += f", {what} used {delay:g} steps after it was sent"
    if config.wire != "fp32":
        text += f", sent as {config.wire}" if count > 1 else f"; wire={config.wire} has no effect: nothing is sent"
    if count > 1:
        text += (
            ". Not exact: each island follows its own part of the data in between. The loss shown is that of island 0's part of "
            "each batch; evaluation, exports and checkpoints have the weights of the newest synchronisation"
        )
        if any(isinstance(value, AveragedModel) for value in registered):
            text += ". AveragedModel follows the own weights of each island, and a checkpoint holds island 0's"
    elif average:
        text += ": nothing is exchanged, and training is that of ddp. Other islands: --nodes, or --islands 0/1"
    return text
