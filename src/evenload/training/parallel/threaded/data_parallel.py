"""`evenload.data_parallel`: one forward pass over several devices, each with the share that its speed is worth.

Note [One graph]
  The parts run side by side, each in a lane's thread, and belong to one autograd graph with the inputs and the module's own
  parameters: what the caller's `backward` then does is autograd's own (GPUs side by side, replicas on the CPU one after the
  other, each with all threads), and second derivatives work. Parameters travel to another device in buckets, and so do
  their gradients back. For training, ``strategy="dp"`` runs the backwards side by side too.

Note [BatchNorm]
  In training mode torch's BatchNorm takes its statistics over all parts, so that the result is that of one forward; running
  statistics are updated once.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from evenload.balance.split import scale_shares
from evenload.errors import ConfigError
from evenload.training.compute import batchnorm
from evenload.training.data.randomness import mix
from evenload.training.launch.devices import parse_devices, read_host
from evenload.training.launch.replicas import ReplicaDevice, plan_replicas
from evenload.training.parallel.threaded.device_speeds import Speeds, timed
from evenload.training.parallel.threaded.dispatch import check_replicable, dispatched
from evenload.training.parallel.threaded.random_draws import Draws
from evenload.training.parallel.threaded.replica_modules import Origins, Replica
from evenload.training.parallel.threaded.replica_threads import Lane, Lanes, Meeting, here
from evenload.training.parallel.threaded.scatter import cut, join, num_samples_of, tensors_of

_WHAT = "data_parallel"
_BUCKET_BYTES = 25 << 20
Devices = str | Sequence[str | int | torch.device]


def data_parallel(
    module: nn.Module,
    inputs: Any,
    devices: Devices | None = None,
    shares: Sequence[int] | None = None,
    module_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Calls a module on several devices at once, each on its part of the batch; the result is that of one call.

    Args:
        module: what is called, wherever its parameters lie; gradients flow into them.
        inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments, nested as you like. Samples lie
            along the first dimension: tensors as long as the first one are cut, all else is given whole to each part.
        devices: such as ``["cuda:0", "cuda:1", "cpu"]``, ``[0, 1]``, ``["cpu", "cpu"]`` (two replicas) or ``"0,cpu"``; every
            GPU here if not given, else the CPU.
        shares: how many samples each device gets, or in which proportion, such as ``(3, 1)``; measured if not given, and
            remembered for each module and devices. A device may get none.
        module_kwargs: further keyword arguments, cut alike.

    Returns:
        What the module returns, tensors joined along the samples, on the device of the first input tensor.

    Raises:
        ConfigError: devices, shares or arguments that make no sense, a module that can't be replicated, or a result that
            can't be joined (a scalar: reduce after the call).
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{_WHAT} got a {type(module).__name__}; it calls an nn.Module")
    if here() is not None:
        raise ConfigError(
            f"{_WHAT} was called inside a replica, which computes its own part already (of step.backward under "
            "strategy='dp', or of another data_parallel); call the module itself"
        )
    team = _team(devices)
    args, kwargs = _arguments(inputs, module_kwargs)
    tensors = tensors_of((args, kwargs))
    home = _home(module)
    target = tensors[0].device if tensors else team.lanes.all[0].device
    num_samples = num_samples_of((args, kwargs))
    record = _record(module, team.key)
    if shares is not None:
        _check_shares(shares, team.key)
    if not num_samples:  # nothing to cut: the first device does it all
        parts = [1] + [0] * (len(team.key) - 1)
    elif shares is not None:
        parts = list(scale_shares(list(shares), num_samples))
    else:
        parts = record.shares(num_samples)
    call = _Call(module, team, args, kwargs, num_samples or 0, parts)
    with _calls_lock:
        if call.active == [0] and home in (None, team.lanes.all[0].device):
            outputs = [call.alone()]
        else:
            outputs = call.side_by_side(home, record if shares is None and num_samples else None)
    if not num_samples:
        return outputs[0]
    return join(outputs, [parts[index] for index in call.active], target)


# -- who computes -------------------------------------------------------------------------------------------------------


@dataclass
class _Team:
    """The lanes of one list of devices; kept as long as the process lives."""

    key: tuple[str, ...]
    lanes: Lanes


_teams: dict[tuple[str, ...], _Team] = {}
_teams_lock = threading.Lock()
_calls_lock = threading.Lock()
"""One call at a time: while it lasts, the module is one that leads each thread to its replica."""


def _team(devices: Devices | None) -> _Team:
    key = _device_key(devices)
    with _teams_lock:
        team = _teams.get(key)
        if team is None:
            team = _teams[key] = _Team(key, Lanes([_lane(i, place) for i, place in enumerate(plan_replicas(key))]))
    return team


def _lane(index: int, place: ReplicaDevice) -> Lane:
    return Lane(index, torch.device(place.device), place.cores, place.num_threads)


def _device_key(devices: Devices | None) -> tuple[str, ...]:
    """The devices as ``cuda:N`` and ``cpu``, checked."""
    if devices is None or isinstance(devices, str):
        places = parse_devices(devices or "auto", read_host())
        if any(place.devices for place in places):
            raise ConfigError(
                f"{_WHAT}(devices={devices!r}): each replica has one device; name them apart, such as 0,1"
            )
        key = tuple(place.device for place in places)
    else:
        try:
            key = tuple(_device_name(device) for device in devices)
        except TypeError:
            raise ConfigError(
                f"{_WHAT}(devices={devices!r}): expected a list of devices, such as ['cuda:0', 'cpu']"
            ) from None
    if not key:
        raise ConfigError(f"{_WHAT}(devices={devices!r}): expected at least one device")
    for name in key:
        if name != "cpu" and int(name.partition(":")[2]) >= torch.cuda.device_count():
            raise ConfigError(
                f"{_WHAT}(devices={devices!r}): there is no {name} here; torch sees {torch.cuda.device_count()} GPUs"
            )
    return key


def _device_name(device: Any) -> str:
    if isinstance(device, bool) or not isinstance(device, str | int | torch.device):
        raise ConfigError(f"{_WHAT}: {device!r} is no device; expected such as 'cuda:0', 0 or 'cpu'")
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"{_WHAT}: {device!r} is no device; expected such as 'cuda:0', 0 or 'cpu'") from error
    if found.type == "cpu":
        return "cpu"
    if found.type != "cuda":
        raise ConfigError(f"{_WHAT}: {device!r} is a {found.type} device; expected cuda or cpu")
    index: int | None = getattr(found, "index", None)
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return f"cuda:{index}"


# -- what is computed ---------------------------------------------------------------------------------------------------


def _arguments(inputs: Any, module_kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given: dict[Any, Any] = dict(module_kwargs or {})
    if isinstance(inputs, Mapping):
        if twice := sorted(set(inputs) & set(given), key=str):
            raise ConfigError(f"{_WHAT}: {', '.join(map(str, twice))} is in inputs and in module_kwargs")
        given = {**inputs, **given}
        inputs = ()
    if odd := [key for key in given if not isinstance(key, str)]:
        raise ConfigError(
            f"{_WHAT}: keyword arguments have names, not {odd[0]!r}; put the dict into a tuple to pass it whole"
        )
    return (inputs if type(inputs) is tuple else (inputs,)), given


def _home(module: nn.Module) -> torch.device | None:
    """Where the module lies; None where it has no parameters and buffers."""
    found = dict.fromkeys(tensor.device for tensor in (*module.parameters(), *module.buffers()))
    if any(device.type == "meta" for device in found):
        raise ConfigError(f"{_WHAT}: {type(module).__name__} has parameters on the meta device; materialise them first")
    if len(found) > 1:
        raise ConfigError(
            f"{_WHAT}: {type(module).__name__} lies on several devices ({', '.join(map(str, found))}); it needs a whole replica "
            "on each: move it to one device first"
        )
    return next(iter(found), None)


def _check_shares(shares: Any, key: Sequence[str]) -> None:
    spelled = f"{_WHAT}(shares={shares!r})"
    if isinstance(shares, str) or not isinstance(shares, Sequence):
        raise ConfigError(f"{spelled}: expected one integer for each device, such as (3, 1)")
    if len(shares) != len(key):
        raise ConfigError(f"{spelled}: {len(shares)} shares for {len(key)} devices ({', '.join(key)})")
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in shares) or not sum(shares):
        raise ConfigError(f"{spelled}: shares are integers of at least 0, and not all of them 0")


class _Call:
    """One call of a module, cut for its devices."""

    def __init__(
        self,
        module: nn.Module,
        team: _Team,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_samples: int,
        parts: Sequence[int],
    ) -> None:
        self._module = module
        self._team = team
        self.active = [index for index, part in enumerate(parts) if part]
        lanes = team.lanes.all
        self._pieces: dict[int, tuple[Any, dict[str, Any]]] = {}
        low = 0
        for index in self.active:
            high = low + parts[index] if num_samples else 0
            self._pieces[index] = cut((args, kwargs), low, high, num_samples or -1, lanes[index].device)
            low = high
        self._sizes = list(parts)
        self._seconds: dict[int, Callable[[], float]] = {}

    def alone(self) -> Any:
        """In this thread, where the module lies."""
        args, kwargs = self._pieces[0]
        return self._module(*args, **kwargs)

    def side_by_side(self, home: torch.device | None, record: Speeds | None) -> list[Any]:
        """Each part in its lane, on a replica of the module; their results in order."""
        check_replicable([self._module], _WHAT)
        lanes = self._team.lanes
        origins = Origins([self._module])
        keeper = next((index for index in self.active if lanes.all[index].device == home), self.active[0])
        replicas = {index: _replicate(origins, lanes.all[index].device, keeps=index == keeper) for index in self.active}
        meeting = Meeting(self.active)
        for replica in replicas.values():
            _join_norms(replica, origins, meeting)
        draws = _OwnDraws(lanes, self.active, any(module.training for module in origins.modules))
        works = {
            index: functools.partial(self._work, lanes.all[index], replicas[index], meeting, draws)
            for index in self.active
        }
        with dispatched(origins, replicas, lanes.all), draws.active():
            results = lanes.run(works, on_failure=meeting.stop)
        replicas[keeper].bring_home()
        if record is not None:
            record.add({index: (self._sizes[index], self._seconds[index]) for index in self.active})
        return [results[index] for index in self.active]

    def _work(self, lane: Lane, replica: Replica, meeting: Meeting, draws: _OwnDraws) -> Any:
        """One part, in its lane's thread."""
        args, kwargs = self._pieces.pop(lane.index)
        twin = replica.modules[id(self._module)]
        with draws.of(lane), timed(lane.device) as seconds:
            result = twin(*args, **kwargs)
        meeting.leave(lane.index)
        self._seconds[lane.index] = seconds
        return result


def _replicate(origins: Origins, device: torch.device, *, keeps: bool) -> Replica:
    """Twins whose parameters are the module's own where they lie on this device, else copies that are part of the graph."""
    copies = _copies([p for p in origins.parameters if p.device != device], device)
    replica = Replica(origins, device, lambda param: copies.get(id(param), param))
    replica.refresh_buffers(keeps=keeps)
    return replica


def _copies(params: Sequence[nn.Parameter], device: torch.device) -> dict[int, torch.Tensor]:
    """Parameters on another device, brought there in buckets, as their gradients are brought back."""
    copies: dict[int, torch.Tensor] = {}
    buckets: dict[tuple[torch.dtype, torch.device, bool], list[nn.Parameter]] = {}
    for param in params:
        size = param.numel() * param.element_size()
        if size >= _BUCKET_BYTES or not param.is_contiguous() or type(param) is not nn.Parameter:
            copies[id(param)] = param.to(device, non_blocking=device.type == "cuda")
        else:
            buckets.setdefault((param.dtype, param.device, param.requires_grad), []).append(param)
    for members in buckets.values():
        part: list[nn.Parameter] = []
        size = 0
        for param in members:
            part.append(param)
            size += param.numel() * param.element_size()
            if size >= _BUCKET_BYTES:
                copies.update(_moved(part, device))
                part, size = [], 0
        if part:
            copies.update(_moved(part, device))
    return copies


def _moved(params: Sequence[nn.Parameter], device: torch.device) -> dict[int, torch.Tensor]:
    flat = torch.cat([param.reshape(-1) for param in params]).to(device, non_blocking=device.type == "cuda")
    pieces = torch.split(flat, [param.numel() for param in params])
    return {id(param): piece.view(param.shape) for param, piece in zip(params, pieces, strict=True)}


# -- BatchNorm ----------------------------------------------------------------------------------------------------------


def _join_norms(replica: Replica, origins: Origins, meeting: Meeting) -> None:
    """BatchNorm that would take the statistics of its part takes those of all."""
    if len(meeting.members) == 1:
        return
    for module in origins.modules:
        if batchnorm.takes_batch_statistics(module):
            twin = replica.modules[id(module)]
            object.__setattr__(twin, "__class__", _joined_class(type(module)))
            twin.__dict__[_MEETING] = meeting


_MEETING = "_evenload_meeting"
_joined_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _joined_class(original: type[nn.Module]) -> type[nn.Module]:
    if original not in _joined_classes:
        _joined_classes[original] = _make_joined(original)
    return _joined_classes[original]


def _make_joined(original: Any) -> type[nn.Module]:
    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        lane = here()
        # Without running statistics torch takes the batch's in eval mode too.
        of_batch = self.training or (self.running_mean is None and self.running_var is None)
        if lane is None or not of_batch:
            plain: torch.Tensor = original.forward(self, input)
            return plain
        if not isinstance(self, nn.SyncBatchNorm):
            self._check_input_dim(input)
        meeting: Meeting = self.__dict__[_MEETING]

        def gather(own: torch.Tensor) -> torch.Tensor:
            return torch.stack([value.to(own.device) for value in meeting.exchange(lane.index, own)])

        return batchnorm.forward_joined(self, input, gather)

    return type(original.__name__, (original,), {"forward": forward, "__module__": original.__module__})


# -- random numbers -----------------------------------------------------------------------------------------------------


class _OwnDraws:
    """Several replicas on the CPU draw from generators of their own, which follow from the state of the process's."""

    def __init__(self, lanes: Lanes, active: Sequence[int], training: bool) -> None:
        on_cpu = [lanes.all[index] for index in active if lanes.all[index].device.type == "cpu"]
        self._lanes = on_cpu if training and len(on_cpu) > 1 else []
        self._draws = Draws(self._lanes)
        self._draws.own = bool(self._lanes)
        self._states: list[torch.Tensor] = []
        if self._lanes:
            base = zlib.crc32(torch.default_generator.get_state().numpy().tobytes())
            for lane in self._lanes:
                if lane.generator is not None:
                    lane.generator.manual_seed(mix(base, lane.index))
                    self._states.append(lane.generator.get_state())

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While the lanes compute."""
        if not self._lanes:
            yield
            return
        with self._draws.active():
            yield
        drawn = [
            lane.generator is not None and not torch.equal(lane.generator.get_state(), state)
            for lane, state in zip(self._lanes, self._states, strict=True)
        ]
        if any(drawn):
            torch.rand(())  # the next call draws other numbers

    def of(self, lane: Lane) -> contextlib.AbstractContextManager[Any]:
        """What a lane computes in."""
        return self._draws.of(lane) if lane in self._lanes else contextlib.nullcontext()


_records: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, ...], Speeds]] = weakref.WeakKeyDictionary()


def _record(module: nn.Module, key: tuple[str, ...]) -> Speeds:
    known = _records.setdefault(module, {})
    if key not in known:
        known[key] = Speeds(len(key))
    return known[key]
