"""Hints for errors of Python and torch that follow from a known wrong use: what to write instead."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from evenload.errors import EvenloadError
from evenload.foreign_names import MODEL_ELSEWHERE, MODULE_ELSEWHERE, OPTIMIZER_ELSEWHERE, describe_unknown

_UNPREPARED = (
    "the loop runs over a plain DataLoader, which yields batches; write: model, loader = run.prepare(model, loader), then "
    "`for step in loader: step.backward(loss_fn)`"
)
_NO_GRADIENT = (
    "step.backward(loss_fn) has computed the gradients already, so leave loss.backward() out; or, if this was step.backward on a "
    f"batch: {_UNPREPARED}"
)
_NO_LAMBDA = (
    "what loader workers need, they receive by name where they are started by spawn: write the collate_fn (or the dataset's "
    "transform) as a def at the top of the file instead of a lambda, or leave multiprocessing_context out"
)
_DTYPE = (
    "the model and the batch have different dtypes: convert the model before run.prepare, and the batch in loss_fn "
    '(x.to(model dtype)); for mixed precision leave .half() and .to(dtype) out, and set evenload.init(precision="bf16")'
)
_GROUPS = (
    "evenload.init opens the process groups: leave dist.init_process_group out, write run = evenload.init(), and read run.rank "
    "and run.world_size"
)
_MP_SPAWN = (
    "evenload run starts one process per device: call the function itself in place of torch.multiprocessing.spawn; or, in "
    'plain python, write evenload.spawn(train, devices="cpu:2") in its place'
)
_CUDA = (
    "leave .cuda() out, and .to('cuda') and torch.cuda.set_device: run.prepare moves the model, and in loss_fn the batch is on "
    "run.device already"
)
_CHECKPOINT = (
    "a checkpoint is a folder with the states of run.resume by name: "
    "model.load_state_dict(evenload.load_checkpoint('runs/name')['model'])"
)
_TERMINAL = (
    "ranks have no terminal: start one rank by plain python train.py for breakpoint(), and pass arguments for input()"
)
_MESSAGES = (
    (
        "Expected all tensors to be on the same device",
        "in loss_fn the batch is on run.device already, and run.prepare moves the model; create others with device=run.device",
    ),
    (
        "Default process group has not been initialized",
        "evenload.init opens the process groups, and one rank alone has none; after it, use run.rank, run.barrier, run.reduce or "
        "run.gather, or run.group([0])",
    ),
    ("element 0 of tensors does not require grad", _NO_GRADIENT),
    (
        "default_collate: batch must contain tensors",
        "the samples that the dataset's __getitem__ returns (is its return missing?) can't be joined to a batch: return tensors, "
        "numbers, or tuples and dicts of them, or give the DataLoader a collate_fn",
    ),
    (
        "stack expects each tensor to be equal size",
        "the samples of a batch differ in size: bring them to one size in the dataset, or pad them in the loader's collate_fn "
        "(torch.nn.utils.rnn.pad_sequence)",
    ),
    *((sign, _CUDA) for sign in ("Torch not compiled with CUDA enabled", "Found no NVIDIA driver", "_cuda_setDevice")),
    *((sign, _CHECKPOINT) for sign in ("checkpoints/step-", 'in state_dict: "values"', 'in state_dict: "schema"')),
    (
        "object of type 'generator' has no len()",
        "the number of batches and of samples is that of the plain loader: len(val_loader)",
    ),
    (
        "'Run' object does not support the context manager protocol",
        "write run = evenload.init() without `with`: the run closes itself when the script ends",
    ),
    (
        "backward through the graph a second time",
        "loss_fn runs once for each micro-batch; compute what it uses of the model inside loss_fn, or detach it",
    ),
    ("Can't pickle <function <lambda>", _NO_LAMBDA),
    ("Can't pickle local object", _NO_LAMBDA),
    (
        "cannot pickle '_thread.lock' object",
        "a run, a prepared loader and a step can't be saved, copied or sent: save model.state_dict(), or all of it by "
        "run.checkpoint()",
    ),
    (
        "Tried to step",
        "a scheduler counts its own calls of scheduler.step(): called once in each step, OneCycleLR needs "
        "total_steps=epochs * len(loader), where len(loader) counts global batches",
    ),
    *(
        (sign, _DTYPE)
        for sign in ("have the same dtype", "expected scalar type", "and bias type (", "and weight type (")
    ),
    ("initialize the default process group twice", _GROUPS),
    (
        "compile() got an unexpected keyword argument",
        "torch's model.compile() takes neither optimizer nor loss: there is no trainer, the loop and the optimizer stay in your "
        "script",
    ),
    (
        "data_parallel() missing",
        "evenload.data_parallel(model, inputs) computes outputs on several devices; to train on them set init(strategy='dp')",
    ),
    ("-- Process ", _MP_SPAWN),
    ("terminated with exit code", _MP_SPAWN),
    (
        "attempted relative import with no known parent package",
        "start a module of a package by its name, from the folder that holds the package: evenload run -m package.train",
    ),
    ("'Run' object is not callable", "write run = evenload.init(), then run.prepare(model, loader)"),
)
_NUMBER_OF_STEP = "a step is no number; its index in the run is step.index: if step.index % 100 == 0"
_LOSS_FN = (
    "step.backward calls loss_fn(batch) with what the DataLoader's collate_fn made; write def loss_fn(batch): x, y = batch, "
    "and return the loss of model(x)"
)
_RANK_VARIABLES = ("'LOCAL_RANK'", "'RANK'", "'WORLD_SIZE'")
_KNOWN_RANK = "run = evenload.init() knows them: run.rank, run.world_size, run.device; a device need not be set"
_PREPARE = (
    "run.prepare returns what it was given, in the same order: model, loader = run.prepare(model, loader). Optimizers and "
    "schedulers stay your own and are not passed to it"
)
_NOT_STEPS = (list, tuple, dict)


_IMPORT = re.compile(r"cannot import name '(\w+)' from 'evenload'|No module named 'evenload\.(\w+)")
_ATTRIBUTE_CALL = re.compile(r"\brun\.(is_main|rank|world_size|device)\(")
_SETTER = re.compile(r"property '(\w+)' of '(Run|StepLoader|Step)' object has no setter")
_NO_MEMORY = re.compile(r"\bout of memory\b|can't allocate memory|std::bad_alloc|_ALLOC_FAILED", re.IGNORECASE)
_OPTIM, _FUNCTIONAL = str(Path("torch", "optim")), str(Path("torch", "nn", "functional.py"))
_MEMORY_OUTSIDE = (
    "outside step.backward Evenload can't repeat the work in smaller parts: evaluate under torch.no_grad(), with a smaller "
    "batch_size of the loader that run.batches receives; keep no outputs on the device (.cpu()); -d leaves a small device out"
)
_MEMORY_OF_OPTIMIZER = (
    "the first step makes the optimizer's state (AdamW: twice the weights). Use fused=True or foreach=False, an optimizer with "
    "less state, evenload.place to divide the model over devices, or leave the small device out by -d"
)
_COMPUTE = str(Path("evenload", "training", "compute"))


def _last_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].line or "") if frames else ""


def _is_call_of_loss_fn(error: BaseException) -> bool:
    """Return whether an error arose where loss_fn is called, or in a module that was given as loss_fn."""
    names = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    last = max((index for index, name in enumerate(names) if _COMPUTE in name), default=None)
    if last is None:
        return False
    return last == len(names) - 1 or names[last + 1].endswith(str(Path("nn", "modules", "module.py")))


def hint_for(error: BaseException) -> str:
    """Return what to write instead; empty if nothing is known."""
    if isinstance(error, EvenloadError):
        return ""
    text = str(error)
    if isinstance(error, MemoryError) or _NO_MEMORY.search(text):
        return _hint_for_memory(error)
    if isinstance(error, AttributeError) and (hint := _hint_for_attribute(error, text)):
        return hint
    if text == "EOF when reading a line" or type(error).__name__ == "BdbQuit":
        return _TERMINAL
    if isinstance(error, ImportError) and (found := _IMPORT.search(text)):
        hint = describe_unknown(found[1] or found[2], (), MODULE_ELSEWHERE)
        return f"write import evenload{'; ' + hint if hint else ', whose names are init, spawn, place, load_checkpoint, ...'}"
    if isinstance(error, KeyError) and text in _RANK_VARIABLES:
        return _KNOWN_RANK
    if isinstance(error, TypeError) and (hint := _hint_for_type(error, text)):
        return hint
    if any(frame.f_code.co_name == "init_process_group" for frame, _ in traceback.walk_tb(error.__traceback__)):
        return _GROUPS
    if "values to unpack" in text and ".prepare(" in _last_line(error):
        return _PREPARE
    return next((hint for sign, hint in _MESSAGES if sign in text), "")


def _hint_for_memory(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    if any(_OPTIM in frame.filename for frame in frames):
        return _MEMORY_OF_OPTIMIZER
    # Not of a dataset, nor of a model that is built or moved.
    in_model = any(frame.name == "_call_impl" or frame.filename.endswith(_FUNCTIONAL) for frame in frames)
    return _MEMORY_OUTSIDE if in_model else ""


def _hint_for_attribute(error: AttributeError, text: str) -> str:
    name = error.name or ""
    if name == "backward" and isinstance(error.obj, _NOT_STEPS):
        return _UNPREPARED
    for kind, names in (("named_parameters", MODEL_ELSEWHERE), ("param_groups", OPTIMIZER_ELSEWHERE)):
        if hasattr(error.obj, kind) and name in names:
            return names[name]
    if found := _SETTER.search(text):
        return (
            f"{found[1]} is read only; devices are named by evenload run -d, settings by evenload.init, and batch_size on the "
            "DataLoader before run.prepare"
        )
    return ""


def _hint_for_type(error: TypeError, text: str) -> str:
    if "'Step'" in text:
        return _NUMBER_OF_STEP
    if "is not callable" in text and (found := _ATTRIBUTE_CALL.search(_last_line(error))):
        return f"run.{found[1]} is a value: write it without ()"
    if "context manager protocol" in text and "main_first" in _last_line(error):
        return "write with run.main_first(): with ()"
    if ("'tuple' object is not callable" in text and "model(" in _last_line(error)) or (
        "is not iterable" in text and _last_line(error).startswith("for step")
    ):
        return _PREPARE
    if "is not iterable" in text and "param_groups = list(params)" in _last_line(error):
        return "an optimizer takes parameters: torch.optim.AdamW(model.parameters(), lr=...)"
    if "positional argument" in text and _last_line(error) == "result = fn(*args)":
        return (
            "give evenload.spawn the function's arguments, args=(1e-3,); a rank's number is no argument, but run.rank"
        )
    is_signature = "positional argument" in text or "must be Tensor, not" in text
    return _LOSS_FN if is_signature and _is_call_of_loss_fn(error) else ""
