"""`UpdateWatch`: recognise an update that no optimizer of torch made."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from evenload.training.step.engine import Engine

_NUM_WATCHED = 16
"""Parameters of each model whose versions are compared: an update by hand changes all of them, or nearly all."""

_VERSION = operator.attrgetter("_version")
_NUM_VALUES = 8
"""Of each watched parameter, that are compared."""


class UpdateWatch:
    """Recognises an update by hand by the parameters it changed, or by the gradients it removed.

    One through ``.data`` that leaves its gradients can't be recognised.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._watched: Sequence[torch.Tensor] = ()
        self._versions: list[int] = []
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.was_refused = False
        """True if an optimizer was refused since that backward; its gradients may be those of parameters that nobody watches."""

    def begin(self) -> None:
        """Note the parameters as they are after a backward."""
        self.was_refused = False
        watched = self._watched = self._engine.parameters.with_gradients(_NUM_WATCHED)
        self._versions = list(map(_VERSION, watched))
        # Where the host has waited for the device, it can find an update through ``.data`` too.
        self._values = [(p, _first_values(p).clone()) for p in watched] if self._engine.totals.waited else []

    @property
    def keeps_weights(self) -> bool:
        """True if no weight has changed since that backward, as far as can be seen; waits where it looks at values."""
        if list(map(_VERSION, self._watched)) != self._versions:
            return False
        return all(torch.equal(_first_values(parameter), values) for parameter, values in self._values)

    @property
    def are_unused(self) -> bool:
        """True if gradients of that backward are present, and nothing was updated."""
        if list(map(_VERSION, self._watched)) != self._versions:
            return False
        return self.was_refused or bool(self._engine.leftovers())


def _first_values(param: torch.Tensor) -> torch.Tensor:
    return param.detach().as_strided((min(_NUM_VALUES, param.numel()),), (1,))
