"""`UpdateWatch`: recognise an update that no optimizer of torch made."""

from __future__ import annotations

import torch

from evenload.training.step.engine import Engine

_NUM_WATCHED = 16
"""Parameters of each model whose versions are compared: an update by hand changes all of them, or nearly all."""


class UpdateWatch:
    """Recognises an update by hand by the parameters it changed, or by the gradients it removed.

    One through ``.data`` that leaves its gradients can't be recognised.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._watched: list[tuple[torch.Tensor, int]] = []

    def begin(self) -> None:
        """Note the parameters as they are after a backward."""
        self._watched = [(p, p._version) for p in self._engine.parameters.with_gradients(_NUM_WATCHED)]

    @property
    def are_unused(self) -> bool:
        """True if gradients of that backward are present, and nothing was updated."""
        if any(parameter._version != version for parameter, version in self._watched):
            return False
        return bool(self._engine.leftovers())
