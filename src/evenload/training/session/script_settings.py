"""Values that the script set before a resume: those of the checkpoint compared with those of now, and taken over.

A checkpoint keeps the learning rate, weight decay and so on as the script set them, before any training. A value that the
script has changed since is taken; what training did to a value that the script left alone is kept.
"""

from __future__ import annotations

import copy
import hashlib
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from evenload.errors import CheckpointError
from evenload.training.step.step_loader import StepLoader

_IMPLEMENTATION = {"params", "initial_lr", "foreach", "fused", "capturable", "differentiable", "maximize"}
"""Values of a parameter group that are no hyperparameters of the script."""
_DRIVEN = {"lr", "initial_lr", "max_lr", "min_lr", "momentum", "betas", "base_momentum", "max_momentum"}
"""Values of a parameter group that a scheduler may change."""
_COUNTERS = {"last_epoch", "base_lrs", "best", "num_bad_epochs", "cooldown_counter", "optimizer"}
_DATA = ("batch_size", "samples", "seed")
_SCRIPT = "script"
_CLASS, _DTYPE = "class", "dtype"


@dataclass(frozen=True)
class ChangedSetting:
    """A value that differs between the checkpoint and the script."""

    name: str
    saved: Any
    now: Any


class ScriptSettings:
    """The script's values, read before a checkpoint is loaded."""

    def __init__(self, objects: Mapping[str, Any], loaders: Sequence[StepLoader], seed: int) -> None:
        self._optimizers = {name: value for name, value in objects.items() if isinstance(value, Optimizer)}
        self._schedulers = {name: value for name, value in objects.items() if isinstance(value, LRScheduler)}
        self._groups = {
            name: [{key: copy.deepcopy(part) for key, part in group.items() if key != "params"} for group in groups]
            for name, groups in ((name, optimizer.param_groups) for name, optimizer in self._optimizers.items())
        }
        self._fresh = {name: copy.deepcopy(scheduler.state_dict()) for name, scheduler in self._schedulers.items()}
        self.values: dict[str, Any] = {}
        """By name, such as ``optimizer.lr``; of several parameter groups with unlike values a list."""
        for name, groups in self._groups.items():
            for key in groups[0].keys() - _IMPLEMENTATION:
                found = [
                    _plain(group.get("initial_lr", group["lr"]) if key == "lr" else group[key]) for group in groups
                ]
                self.values[f"{name}.{key}"] = found[0] if all(value == found[0] for value in found) else found
        for name, state in self._fresh.items():
            self.values |= _flatten(name, state)
        self.values |= {
            f"{name}.{_CLASS}": type(value).__name__ for name, value in (self._optimizers | self._schedulers).items()
        }
        self._models = [name for name, value in objects.items() if isinstance(value, nn.Module)]
        self.values |= self._dtypes({name: objects[name].state_dict() for name in self._models})
        for index, loader in enumerate(loaders):
            of = f" of loader {index}" if index else ""
            self.values["batch_size" + of] = _plain(loader.batch_size)
            self.values["samples" + of] = loader.loader.num_samples
        self.values |= {"seed": seed, _SCRIPT: _script()}

    def _dtypes(self, state: Mapping[str, Any]) -> dict[str, str]:
        """Return by name, such as ``model.dtype``, the dtypes of the numbers in the states of the models."""
        found = {}
        for name in self._models:
            if not isinstance(saved := state.get(name), Mapping):
                continue  # the registry says what is wrong with it
            dtypes = [part.dtype for part in saved.values() if isinstance(part, torch.Tensor)]
            kinds = {str(dtype)[6:] for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}
            found[f"{name}.{_DTYPE}"] = ", ".join(sorted(kinds))
        return found

    def compare(self, saved: Mapping[str, Any], state: Mapping[str, Any]) -> list[ChangedSetting]:
        """Return the values that differ from those of a checkpoint, or of its `state`; one that only one side has is left out."""
        saved = {**saved, **(self._dtypes(state) if state else {})}
        return [
            ChangedSetting(name, saved[name], now)
            for name, now in self.values.items()
            if name in saved and saved[name] != now
        ]

    def check_classes(self, changed: Sequence[ChangedSetting]) -> None:
        """Raise CheckpointError if an optimizer is of another class: it would load the state, and fail in its first step."""
        for row in changed:
            name, _, key = row.name.partition(".")
            if key == _CLASS and name in self._optimizers:
                raise CheckpointError(
                    f"the checkpoint's {name} is of class {row.saved}, this script's of {row.now}, which can't use its state: "
                    f"keep {row.saved}, or start anew with --fresh (evenload run --fresh train.py); to keep the weights, load "
                    "evenload.load_checkpoint(RUN)['model'] in a run of another project_dir"
                )

    def take(self, changed: Sequence[ChangedSetting]) -> list[str]:
        """Set the changed values of optimizers and schedulers in the loaded objects; return a line for each rate it changed."""
        notes = []
        for name, optimizer in self._optimizers.items():
            own = [setting for setting in changed if setting.name.startswith(f"{name}.")]
            for index, group in enumerate(optimizer.param_groups):
                group.update(
                    {
                        key: self._groups[name][index][key]
                        for key in _keys(own, name) - {"lr"}
                        if key in self._groups[name][index]
                    }
                )
            rate = next((setting for setting in own if setting.name == f"{name}.lr"), None)
            schedulers = {key: value for key, value in self._schedulers.items() if value.optimizer is optimizer}
            before = float(optimizer.param_groups[0]["lr"])
            edited = rate is not None or any(_keys(changed, key) for key in schedulers)
            if schedulers and edited and not any(isinstance(s, ReduceLROnPlateau) for s in schedulers.values()):
                self._recompute(optimizer, self._groups[name], schedulers)
            elif rate is not None:
                _scale(optimizer, self._groups[name], rate.saved)
            if (after := float(optimizer.param_groups[0]["lr"])) != before:
                notes.append(f"  learning rate of {name} at this step: {before:.6g} -> {after:.6g}")
        for name, scheduler in self._schedulers.items():
            if isinstance(scheduler, ReduceLROnPlateau):
                keys = _keys(changed, name) & self._fresh[name].keys()
                scheduler.__dict__.update({key: self._fresh[name][key] for key in keys})
        return notes

    def _recompute(
        self, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], schedulers: Mapping[str, LRScheduler]
    ) -> None:
        """Set the rates of the script's schedule after as many steps as the saved schedulers made, by making them again."""
        inner = [part for scheduler in schedulers.values() for part in getattr(scheduler, "_schedulers", [])]
        outer = {name: value for name, value in schedulers.items() if not any(value is part for part in inner)}
        counts = {name: value.last_epoch - self._fresh[name]["last_epoch"] for name, value in outer.items()}
        for group, own in zip(optimizer.param_groups, groups, strict=True):
            group.update({key: copy.deepcopy(own[key]) for key in _DRIVEN & own.keys()})
        for name, scheduler in outer.items():
            scheduler.load_state_dict(copy.deepcopy(self._fresh[name]))
        longest = max(counts.values())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the optimizer did not step in between
            for index in range(longest):
                for name, scheduler in outer.items():
                    # One that steps once an epoch steps less often.
                    if (index + 1) * counts[name] // longest > index * counts[name] // longest:
                        scheduler.step()


def is_data(name: str) -> bool:
    """Return whether a value decides which samples come next."""
    return name.partition(" of loader ")[0] in _DATA


def conflicts(changed: Sequence[ChangedSetting], cursors: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of values that decide which samples come next, and can't change at these positions in an epoch."""
    found = set()
    for row in changed:
        name, _, index = row.name.partition(" of loader ")
        for cursor in cursors if name == "seed" else [cursors[int(index or 0)]] if name in _DATA else []:
            position, size = cursor["position"], row.now
            fits = name == "batch_size" and isinstance(size, int) and position % size == 0
            if position > 0 and not fits and position != cursor["epoch_samples"]:
                found.add(row.name)
    return found


def changes_text(
    changed: Sequence[ChangedSetting], conflicting: Collection[str], *, override: bool, refused: bool = False
) -> str:
    """Return a table of the changed values, what is done with each (nothing if `refused`), and how to choose otherwise."""
    of_data = "taken; the rest of the epoch is left out" if override else "can't change within an epoch"
    rows = [("setting", "saved", "now", "")]
    for row in changed:
        taken = "" if refused or row.name == _SCRIPT else "converted" if row.name.endswith(f".{_DTYPE}") else "taken"
        action = of_data if row.name in conflicting else taken
        rows.append((row.name, _short(row.saved), _short(row.now), action))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["the script is not the one of the checkpoint:"]
    for cells in rows:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        lines.append("  " + "  ".join(padded).rstrip())
    if conflicting and not override:
        lines.append(
            "  to go on: set the saved value in the script, leave the rest of the epoch out with --override, or start over "
            "with --fresh"
        )
    elif not refused and any(row.name != _SCRIPT for row in changed):
        lines.append("  to keep a saved value, set it in the script; --fresh starts over")
    return "\n".join(lines)


def resumed_text(step: int, epochs: Sequence[int], missing: Sequence[int], *, finished: bool) -> str:
    """Return where a run resumes; `missing` are ranks that can't see rank 0's checkpoint."""
    if finished:
        where = f"step {step} (epoch {', '.join(map(str, epochs))})"
        return f"this run is finished at {where}; more epochs in the script continue it, --fresh starts from scratch"
    sent = f"; sent to ranks {[*missing]}, which can't see rank 0's run folder" if missing else ""
    return f"resuming at step {step}{sent}"


def _keys(changed: Sequence[ChangedSetting], name: str) -> set[str]:
    return {row.name[len(name) + 1 :].split(".")[0] for row in changed if row.name.startswith(f"{name}.")}


def _scale(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], saved: Any) -> None:
    """Set the rates in the ratio of the script's new rate to its old one: the script may have changed them in training."""
    for index, (group, own) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        before = saved[index] if isinstance(saved, list) else saved
        now = own.get("initial_lr", own["lr"])
        group["lr"] = now if not before or float(group["lr"]) == before else group["lr"] * (now / before)
        if "initial_lr" in group:
            group["initial_lr"] = now


def _flatten(name: str, state: Any) -> dict[str, Any]:
    """Return the plain values of a scheduler's state by their paths, without its counters."""
    if isinstance(state, Counter):  # milestones
        return {name: sorted(state.elements())}
    if isinstance(state, Mapping):
        found: dict[str, Any] = {}
        for key, value in state.items():
            if key not in _COUNTERS and (not str(key).startswith("_") or key in ("_schedulers", "_milestones")):
                found |= _flatten(f"{name}.{str(key).lstrip('_')}", value)
        return found
    if isinstance(state, list | tuple) and any(isinstance(part, Mapping) for part in state):
        return {
            key: value for index, part in enumerate(state) for key, value in _flatten(f"{name}.{index}", part).items()
        }
    value = _plain(state)
    return {} if value is None else {name: value}


def _plain(value: Any) -> Any:
    """Return numbers, text, and lists of them as they can be stored and compared; None for anything else."""
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, bool | int | float | str):
        return value
    return float(value) if getattr(value, "ndim", None) == 0 else None


def _script() -> str:
    """Return name and checksum of the script's file; empty where there is none (a notebook)."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    try:
        return f"{Path(path).name} {hashlib.sha256(Path(path).read_bytes()).hexdigest()[:8]}" if path else ""
    except OSError:
        return ""


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."
