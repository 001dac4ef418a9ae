"""The registry of a job's state: named objects with `state_dict` and `load_state_dict`.

The registry holds the names and the last committed step; files.py reads and writes the disk. A peer's state is captured and
loaded in the same form as a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from evenload.errors import CheckpointError, PeerLostError
from evenload.training.checkpoint import files
from evenload.training.checkpoint.host_copy import HostCopy
from evenload.training.comm.groups import Groups
from evenload.training.comm.pending import Pending


@runtime_checkable
class Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


OWN_STATE = "evenload"
"""Name of Evenload's own state: cursors, random generators, shares."""


class Registry:
    """Named state of one job; `last_step` returns the number of committed steps."""

    def __init__(self, last_step: Callable[[], int]) -> None:
        self._objects: dict[str, Stateful] = {}
        self._last_step = last_step
        self._sending: list[tuple[int, Pending, torch.Tensor]] = []
        """Receiver, transfer and its memory."""

    def register(self, name: str, value: Any) -> None:
        """Register an object, twice without effect; CheckpointError if it has no state or the name is taken."""
        if not isinstance(value, Stateful):
            raise CheckpointError(
                f"{name} is {_short(value)}, which has no state_dict and load_state_dict; give such objects to run.resume, each "
                "by a name, and numbers, text, lists and dicts to run.checkpoint"
                f"(values={{{name!r}: {name}}}); a loader's position is included anyway"
            )
        if self._objects.get(name, value) is not value:
            raise CheckpointError(f"two different objects are registered as {name!r}")
        self._objects[name] = value

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._objects)

    @property
    def last_step(self) -> int:
        return self._last_step()

    def values(self) -> tuple[Stateful, ...]:
        return tuple(self._objects.values())

    def capture(self) -> dict[str, Any]:
        """Return all state by name. Tensors are the live ones: copy them to keep them."""
        return {name: value.state_dict() for name, value in self._objects.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load all state; CheckpointError if names differ or a state does not fit its object, and nothing is changed then."""
        self._check_names(state, self._objects.keys())
        before = [HostCopy(value) for name, value in self._objects.items() if name != OWN_STATE]
        try:
            self._load(state, self._objects.keys())
        except BaseException:
            for copy in before:
                copy.restore()
            raise

    def _check_names(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        missing, extra = set(names) - state.keys(), state.keys() - set(names)
        if missing or extra:
            raise CheckpointError(
                f"the checkpoint holds {', '.join(sorted(state))}; this script registers {', '.join(sorted(self._objects))}: "
                + (f"{', '.join(sorted(missing))} can't be restored. " if missing else "")
                + (f"{', '.join(sorted(extra))} would be lost. " if extra else "")
                + "Give run.resume the same names, or start anew with --fresh"
            )

    def _load(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        self._check_names(state, names)
        for name, value in self._objects.items():
            if name not in names:
                continue
            try:
                value.load_state_dict(state[name])
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                raise CheckpointError(
                    f"the checkpoint's {name} does not fit this script's; keep it as it was, or start anew with --fresh "
                    f"(evenload run --fresh train.py) or another project_dir: {error}"
                ) from error

    def send(
        self,
        groups: Groups,
        to: Sequence[int],
        extra: Mapping[str, Any] | None = None,
        *,
        without: Collection[str] = (),
    ) -> None:
        """Send a copy of the state to ranks, each of which calls `receive`; don't wait until it has arrived.

        `extra` goes with it, the names `without` do not.
        """
        self.wait_until_sent()
        state = {name: value for name, value in self.capture().items() if name not in without}
        payload = files.to_bytes({"state": state, "extra": dict(extra or {})})
        size = torch.tensor([payload.numel()])
        try:
            for rank in to:
                for part in (size, payload):
                    work = dist.isend(part, group=groups.control, group_dst=rank)
                    assert work is not None  # every rank is in the group
                    self._sending.append((rank, groups.begin_transfer(work), part))
        except RuntimeError as error:
            raise PeerLostError(f"the state could not be sent to rank {rank}: {error}") from error

    def wait_until_sent(self) -> None:
        """Wait until the ranks have received what was sent; PeerLostError if one is gone."""
        sending, self._sending = self._sending, []
        for rank, pending, _ in sending:
            try:
                pending.wait()
            except RuntimeError as error:
                raise PeerLostError(f"the state did not reach rank {rank}: {error}") from error

    def receive(self, groups: Groups, source: int, *, without: Collection[str] = ()) -> dict[str, Any]:
        """Load the state that `source` sends, and return its `extra`. CheckpointError if it does not fit."""
        size = torch.zeros(1, dtype=torch.int64)
        try:
            _receive(groups, size, source)
            payload = torch.empty(int(size), dtype=torch.uint8)
            _receive(groups, payload, source)
        except RuntimeError as error:
            raise PeerLostError(f"the state of rank {source} did not arrive: {error}") from error
        received = files.from_bytes(payload)
        state = {name: value for name, value in received["state"].items() if name not in without}
        self._load(state, self._objects.keys() - set(without))
        extra: dict[str, Any] = received["extra"]
        return extra


def _short(value: Any) -> str:
    return f"{value!r:.40}" if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def _receive(groups: Groups, tensor: torch.Tensor, source: int) -> None:
    work = dist.irecv(tensor, group=groups.control, group_src=source)
    assert work is not None
    groups.begin_transfer(work).wait()
