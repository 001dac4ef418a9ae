"""`evenload.data_parallel`: one forward pass over several devices, split in proportion to their speeds.

Note [One graph]
  The parts run side by side, each in a replica thread, and belong to one autograd graph with the inputs and the module's own
  parameters. The caller's `backward` is autograd's own (GPUs side by side, replicas on the CPU one after the other, each with
  all threads), and second derivatives work. Parameters are copied to other devices in buckets, and their gradients back. For
  training, ``strategy="dp"`` runs the backwards side by side too.

Note [BatchNorm]
  In training mode torch's BatchNorm computes its statistics over all parts, so the result is that of one forward. Running
  statistics are updated once.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from evenload.balance.split import scale_shares
from evenload.errors import ConfigError
from evenload.training.compute import batchnorm
from evenload.training.launch.devices import parse_devices, read_host
from evenload.training.launch.replicas import plan_replicas
from evenload.training.parallel.model_split.devices import parse_device
from evenload.training.parallel.threaded.device_speeds import DeviceSpeeds, timed
from evenload.training.parallel.threaded.dispatch import check_replicable, dispatched
from evenload.training.parallel.threaded.generators import ReplicaGenerators, seed_replica
from evenload.training.parallel.threaded.replica_modules import Replica, UserModules
from evenload.training.parallel.threaded.replica_threads import (
    ReplicaExchange,
    ReplicaThread,
    ReplicaThreads,
    current_replica,
)
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
    """Call a module on several devices at once, each on its part of the batch; the result is that of one call.

    Args:
        module: The module to call, on any device; gradients flow into its parameters.
        inputs: A tensor, a tuple of positional arguments, or a dict of keyword arguments, nested in any way. Samples are along
            the first dimension: tensors as long as the first one are split, all else is passed whole to each part.
        devices: Such as ``["cuda:0", "cuda:1", "cpu"]``, ``[0, 1]``, ``["cpu", "cpu"]`` (two replicas) or ``"0,cpu"``;
            defaults to all GPUs of this machine, else the CPU.
        shares: Samples of each device, or their proportions, such as ``(3, 1)``; 0 leaves a device out. By default measured,
            and remembered for each module and devices.
        module_kwargs: Further keyword arguments, split in the same way.

    Returns:
        The module's result, with tensors joined along the samples, on the device of the first input tensor.

    Raises:
        ConfigError: Invalid devices, shares or arguments, a module that can't be replicated, or a result that can't be
            joined (a scalar: reduce after the call).
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{_WHAT} expected an nn.Module, got a {type(module).__name__}")
    if current_replica() is not None:
        raise ConfigError(
            f"{_WHAT} was called inside a replica, which already computes its own part (of step.backward under "
            "strategy='dp', or of another data_parallel); call the module itself"
        )
    key = _device_key(devices)
    threads = _threads_for(key)
    args, kwargs = _arguments(inputs, module_kwargs)
    tensors = tensors_of((args, kwargs))
    home = _home(module)
    target = tensors[0].device if tensors else threads.all[0].device
    num_samples = num_samples_of((args, kwargs))
    record = _record(module, key)
    if shares is not None:
        _check_shares(shares, key)
    if not num_samples:  # nothing to split: the first device computes everything
        parts = [1] + [0] * (len(key) - 1)
    elif shares is not None:
        parts = list(scale_shares(list(shares), num_samples))
    else:
        parts = record.shares(num_samples)
    call = _ScatteredCall(module, threads, args, kwargs, num_samples or 0, parts)
    with _calls_lock:
        if call.active == [0] and home in (None, threads.all[0].device):
            outputs = [call.alone()]
        else:
            outputs = call.side_by_side(home, record if shares is None and num_samples else None)
    if not num_samples:
        return outputs[0]
    return join(outputs, [parts[index] for index in call.active], target)


# -- who computes -------------------------------------------------------------------------------------------------------


_threads: dict[tuple[str, ...], ReplicaThreads] = {}
"""By devices; they live as long as the process."""
_threads_lock = threading.Lock()
_calls_lock = threading.Lock()
"""Allows one call at a time, because the module dispatches to the call's replicas meanwhile."""


def _threads_for(key: tuple[str, ...]) -> ReplicaThreads:
    with _threads_lock:
        if key not in _threads:
            _threads[key] = ReplicaThreads.on(plan_replicas(key))
        return _threads[key]


def _device_key(devices: Devices | None) -> tuple[str, ...]:
    """Return the checked devices as ``cuda:N`` and ``cpu``."""
    where = f"{_WHAT}(devices={devices!r})"
    expected = "expected a list of devices, such as ['cuda:0', 0, 'cpu']"
    if devices is None or isinstance(devices, str):
        found = parse_devices(devices or "auto", read_host())
        if any(one.devices for one in found):
            raise ConfigError(f"{where}: each replica has one device; list them separately, such as 0,1")
        entries: list[Any] = [one.device for one in found]
    else:
        try:
            entries = list(devices)
        except TypeError:
            raise ConfigError(f"{where}: {expected}") from None
    if not entries:
        raise ConfigError(f"{where}: expected at least one device")
    names = [f"cuda:{entry}" if type(entry) is int else entry for entry in entries]
    return tuple(str(parse_device(name, where, expected)) for name in names)


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
            f"{_WHAT}: names of keyword arguments are strings, not {odd[0]!r}; put the dict into a tuple to pass it whole"
        )
    return (inputs if type(inputs) is tuple else (inputs,)), given


def _home(module: nn.Module) -> torch.device | None:
    found = dict.fromkeys(tensor.device for tensor in (*module.parameters(), *module.buffers()))
    if any(device.type == "meta" for device in found):
        raise ConfigError(f"{_WHAT}: {type(module).__name__} has parameters on the meta device; materialise them first")
    if len(found) > 1:
        raise ConfigError(
            f"{_WHAT}: {type(module).__name__} is on several devices ({', '.join(map(str, found))}), but each device needs a "
            "whole replica: move it to one device first"
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


class _ScatteredCall:
    def __init__(
        self,
        module: nn.Module,
        threads: ReplicaThreads,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_samples: int,
        parts: Sequence[int],
    ) -> None:
        self._module = module
        self._threads = threads
        self.active = [index for index, part in enumerate(parts) if part]
        self._pieces: dict[int, tuple[Any, dict[str, Any]]] = {}
        low = 0
        for index in self.active:
            high = low + parts[index] if num_samples else 0
            self._pieces[index] = cut((args, kwargs), low, high, num_samples or -1, threads.all[index].device)
            low = high
        self._sizes = list(parts)
        self._seconds: dict[int, Callable[[], float]] = {}

    def alone(self) -> Any:
        args, kwargs = self._pieces[0]
        return self._module(*args, **kwargs)

    def side_by_side(self, home: torch.device | None, record: DeviceSpeeds | None) -> list[Any]:
        check_replicable([self._module], _WHAT)
        threads = self._threads
        user_modules = UserModules([self._module])
        buffer_owner = next((index for index in self.active if threads.all[index].device == home), self.active[0])
        replicas = {
            index: _replicate(user_modules, threads.all[index].device, owns_buffers=index == buffer_owner)
            for index in self.active
        }
        exchange = ReplicaExchange(self.active)
        if len(self.active) > 1:
            for replica in replicas.values():
                _sync_batch_norms(replica, user_modules, exchange)
        on_cpu = [threads.all[index] for index in self.active if threads.all[index].device.type == "cpu"]
        if len(on_cpu) == 1 or not any(module.training for module in user_modules.modules):
            on_cpu = []
        with _separate_generators(on_cpu) as generators, dispatched(user_modules, replicas, threads.all):
            works = {
                index: functools.partial(self._work, threads.all[index], replicas[index], exchange, generators)
                for index in self.active
            }
            results = threads.run(works, on_failure=exchange.cancel)
        replicas[buffer_owner].write_back_buffers()
        if record is not None:
            record.add({index: (self._sizes[index], self._seconds[index]) for index in self.active})
        return [results[index] for index in self.active]

    def _work(
        self, thread: ReplicaThread, replica: Replica, exchange: ReplicaExchange, generators: ReplicaGenerators
    ) -> Any:
        args, kwargs = self._pieces.pop(thread.index)
        replica_module = replica.modules[id(self._module)]
        with generators.mode_of(thread), timed(thread.device) as seconds:
            result = replica_module(*args, **kwargs)
        exchange.leave(thread.index)
        self._seconds[thread.index] = seconds
        return result


def _replicate(user_modules: UserModules, device: torch.device, *, owns_buffers: bool) -> Replica:
    """Build a replica with the module's own parameters on this device, and copies in the graph for the others."""
    copies = _copies([p for p in user_modules.parameters if p.device != device], device)
    replica = Replica(user_modules, device, lambda param: copies.get(id(param), param))
    replica.refresh_buffers(owns_buffers=owns_buffers)
    return replica


def _copies(params: Sequence[nn.Parameter], device: torch.device) -> dict[int, torch.Tensor]:
    """Copy parameters to another device in buckets, as autograd copies their gradients back."""
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


def _sync_batch_norms(replica: Replica, user_modules: UserModules, exchange: ReplicaExchange) -> None:
    """Let BatchNorm modules compute batch statistics over all parts."""
    for module in user_modules.modules:
        if batchnorm.takes_batch_statistics(module):
            replica_module, original = replica.modules[id(module)], cast(Any, type(module))
            object.__setattr__(replica_module, "__class__", _synced_class(original))
            replica_module.__dict__[_EXCHANGE] = exchange


_EXCHANGE = "_evenload_exchange"


@functools.cache
def _synced_class(original: Any) -> type[nn.Module]:
    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        thread = current_replica()
        # Without running statistics torch uses the batch's in eval mode too.
        of_batch = self.training or (self.running_mean is None and self.running_var is None)
        if thread is None or not of_batch:
            plain: torch.Tensor = original.forward(self, input)
            return plain
        if not isinstance(self, nn.SyncBatchNorm):
            self._check_input_dim(input)
        exchange: ReplicaExchange = self.__dict__[_EXCHANGE]

        def gather(own: torch.Tensor) -> torch.Tensor:
            return torch.stack([value.to(own.device) for value in exchange.gather(thread.index, own)])

        return batchnorm.forward_joined(self, input, gather)

    return type(original.__name__, (original,), {"forward": forward, "__module__": original.__module__})


# -- random numbers -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _separate_generators(threads: Sequence[ReplicaThread]) -> Iterator[ReplicaGenerators]:
    """Give replicas on the CPU separate generators, seeded by the process's, which advances if they were used."""
    generators = ReplicaGenerators(threads)
    if not threads:
        yield generators
        return
    generators.separate = True
    base = zlib.crc32(torch.default_generator.get_state().numpy().tobytes())
    before = []
    for thread in threads:
        seed_replica(thread, base, thread.index)
        before.append(_state_of(thread))
    with generators.active():
        yield generators
    if any(not torch.equal(_state_of(thread), state) for thread, state in zip(threads, before, strict=True)):
        torch.rand(())  # so that the next call draws different numbers


def _state_of(thread: ReplicaThread) -> torch.Tensor:
    return (thread.generator or torch.default_generator).get_state()


_records: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, ...], DeviceSpeeds]] = weakref.WeakKeyDictionary()


def _record(module: nn.Module, key: tuple[str, ...]) -> DeviceSpeeds:
    known = _records.setdefault(module, {})
    if key not in known:
        known[key] = DeviceSpeeds(len(key))
    return known[key]
